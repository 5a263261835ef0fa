"""What a server's attention is raced against: torch on gathered pages, or the kernel of a backend of vLLM's. Knows no schedules."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import sqrt
from typing import TYPE_CHECKING, Any

from emmy.errors import UsageError
from emmy.ir.ops.served_attention import ServedAttention
from emmy.measure.allocated import Allocated
from emmy.measure.device import Buffer, Call

if TYPE_CHECKING:
    import torch

_AXES = "pcjgd"
# vllm/v1/attention/backends/triton_attn.py: parts of a decode, blocks below which it is cut up
_SEGMENTS, _GRID = 16, 128


@dataclass(frozen=True, slots=True)
class TorchServedAttention:
    """Pages of each sequence side by side, by the table, then scaled_dot_product_attention, with a mask that was made before.

    Heads that share keys are rows of one head. Results stay where torch puts them.
    """

    op: ServedAttention
    tensor: Callable[[Buffer], torch.Tensor]
    results: Allocated = field(default_factory=Allocated)

    def bind(self, buffers: Mapping[str, Buffer], sizes: Mapping[str, int]) -> Call:
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        op, x = self.op, {name: self.tensor(buffer) for name, buffer in buffers.items()}
        q = x["Q"] if not op.decodes else x["Q"][:, None]
        (batch, queries, groups, share, dim), table = q.shape, x["table"].long()
        before = x[op.told].long() - int(op.decodes)
        at = before[:, None, None] + torch.arange(queries, device=q.device).repeat(share)[:, None]
        t = torch.arange(int(before.max()) + queries, device=q.device)
        seen = t <= at
        if op.window:
            seen = seen & (at < t + op.window)
        mask, blind = seen[:, None], not bool(seen.any(-1).all())
        keys, values = sides(op, x)

        def gathered(pages: torch.Tensor) -> torch.Tensor:
            return pages[table].flatten(1, 2)[:, : len(t)].transpose(1, 2)

        def run() -> torch.Tensor:
            rows = q.permute(0, 2, 3, 1, 4).reshape(batch, groups, share * queries, dim)
            out = scaled_dot_product_attention(rows, gathered(keys), gathered(values), mask, scale=op.scale or None)
            out = out.nan_to_num_(0.0) if blind else out
            return out.view(batch, groups, share, queries, dim).permute(0, 3, 1, 2, 4).reshape(x["Q"].shape)

        return self.results.call(lambda: {"O": run()}, x)


def sides(op: ServedAttention, x: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a cache as [pool, page, heads, D], where they lie."""
    orders = (op.order, op.values or op.order)
    caches = [x[op.caches[side if op.values else 0]] for side in (0, 1)]
    both = [
        c.permute([order.index(a) for a in _AXES])[:, side]
        for side, (c, order) in enumerate(zip(caches, orders, strict=True))
    ]
    return both[0], both[1]


@dataclass(frozen=True, slots=True)
class VllmAttention:
    """The kernel that a backend of vLLM's calls, on the same cache, table and lengths, and into the same output."""

    op: ServedAttention
    tensor: Callable[[Buffer], torch.Tensor]
    backend: str

    def bind(self, buffers: Mapping[str, Buffer], sizes: Mapping[str, int]) -> Call:
        import torch

        op, x = self.op, {name: self.tensor(buffer) for name, buffer in buffers.items()}
        q, out = (x[n].view(-1, op.heads, op.dim) for n in ("Q", "O"))
        told, batch = x[op.told], x["table"].shape[0]
        queries = len(q) // batch
        lengths = told if op.decodes else told + queries
        starts = torch.arange(0, len(q) + 1, queries, dtype=torch.int32, device=q.device)
        k, v = sides(op, x)
        given: dict[str, Any] = {
            "q": q, "k": k, "v": v, "out": out, "cu_seqlens_q": starts, "max_seqlen_q": queries, "seqused_k": lengths,
            "max_seqlen_k": int(lengths.max()), "softmax_scale": op.scale or 1 / sqrt(op.dim), "causal": True,
            "block_table": x["table"], "softcap": 0,
        }  # fmt: skip
        match self.backend:
            case "vllm:TRITON_ATTN":
                return _triton(op, given, batch)
            case "vllm:CPU_ATTN":
                return _cpu(op, given, x)
            case _:
                return _flash(op, given)


def vllm_attention(op: ServedAttention, tensor: Callable[[Buffer], torch.Tensor], backend: str) -> VllmAttention | None:
    """What a backend computes the op with; None where vLLM is not installed. Raises UsageError for a cache that it does not read."""
    if importlib.util.find_spec("vllm") is None:
        return None
    if backend == "vllm:CPU_ATTN" and (op.order, op.values) != ("pgcdj", "pgcjd"):
        raise UsageError(f"{op.key}: {backend} reads caches in the orders pgcdj of keys and pgcjd of values")
    if backend != "vllm:CPU_ATTN" and (op.values or op.order[-1] != "d"):
        raise UsageError(f"{op.key}: {backend} reads caches whose keys and values lie along d, in one order")
    return VllmAttention(op, tensor, backend)


def _triton(op: ServedAttention, given: Mapping[str, Any], batch: int) -> Call:
    import torch
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    few, device = max(1, _GRID // op.groups), given["q"].device
    parts = (few, op.heads, _SEGMENTS)
    scale = torch.ones(1, device=device).expand(batch, op.groups)
    segments = [torch.empty(shape, dtype=torch.float32, device=device) for shape in (parts, parts)]
    wide = torch.empty((*parts, 1 << (op.dim - 1).bit_length()), dtype=torch.float32, device=device)
    return partial(
        unified_attention, **given, window_size=(op.window - 1, 0) if op.window else (-1, -1), q_descale=None, k_descale=scale,
        v_descale=scale, seq_threshold_3D=few, num_par_softmax_segments=_SEGMENTS, softmax_segm_output=wide,
        softmax_segm_max=segments[0], softmax_segm_expsum=segments[1],
    )  # fmt: skip


def _flash(op: ServedAttention, given: Mapping[str, Any]) -> Call:
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version
    from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported

    version = 4 if is_fa_version_supported(4) else get_flash_attn_version(head_size=op.dim)
    window = [op.window - 1, 0] if op.window else [-1, -1]
    return partial(flash_attn_varlen_func, **given, window_size=window, fa_version=version, num_splits=0)


def _cpu(op: ServedAttention, given: Mapping[str, Any], x: Mapping[str, torch.Tensor]) -> Call:
    from vllm import _custom_ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    rows = [x[n].view(-1, op.groups, 2 * op.page, op.dim).split(op.page, 2)[side] for side, n in enumerate(op.caches)]
    said = {"causal": True, "dynamic_causal": None, "kv_cache_dtype": "auto"}
    starts, lengths, q = given["cu_seqlens_q"], given["seqused_k"], given["q"]
    plan = _custom_ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(lengths), num_heads=op.heads, num_kv_heads=op.groups, head_dim=op.dim, seq_lens=lengths, dtype=q.dtype,
        query_start_loc=starts, sliding_window_size=op.window or -1, isa=_get_attn_isa(q.dtype, op.page, op.dim, "auto"),
        enable_kv_split=True, **said,
    )  # fmt: skip
    return partial(
        _custom_ops.cpu_attention_with_kv_cache, query=q, key_cache=rows[0], value_cache=rows[1], output=given["out"],
        query_start_loc=starts, seq_lens=lengths, scale=given["softmax_scale"], alibi_slopes=None, sliding_window=op.window or -1,
        block_table=given["block_table"], softcap=0, scheduler_metadata=plan, s_aux=None, k_scale=1.0, v_scale=1.0, **said,
    )  # fmt: skip
