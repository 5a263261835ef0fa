"""An attention kernel against torch's own arithmetic on a small cache, before a request reaches it. Knows no vLLM."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from emmy.ir.dtype import DType
from emmy.ir.ops import ServedAttention
from emmy_vllm.attention_steps import Cache, Told

if TYPE_CHECKING:
    from emmy_vllm.attended import Kernel

_MOST = 130  # sequences, or queries, of a test
_AXES = "pcjgd"
TORCH: dict[DType, torch.dtype] = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


def wrong_answer(kernel: Kernel, device: torch.device, most: int) -> str:
    """What is wrong with the kernel at sizes up to `most`; "" when nothing is. Each range is tried at its ends."""
    op = kernel.op
    for r in kernel.case.ranges:
        if r.code is None or r.lo > most:
            continue
        absolute, relative = op.tolerance(r.code.accumulate)
        for size in sorted({r.lo, max(r.lo, min(r.hi, most, _MOST))}):
            q, cache, told = _given(op, size, device)
            out = torch.full_like(q, float("nan"))
            kernel.run(size, q, cache, told, out)
            want = answer(op, q, cache.view, told)
            error = (out.double() - want).abs() / (2 * absolute + 2 * relative * (1 + want.abs()))
            if not (worst := float(error.nan_to_num(nan=float("inf")).max())) <= 1:
                return f"at {size or 'its one size'} its error is {worst:.3g} times what is allowed"
    return ""


def _given(op: ServedAttention, size: int, device: torch.device) -> tuple[torch.Tensor, Cache, Told]:
    """Rows, a cache of few pages that sequences share, and a table: keys beyond a window where there is one.

    Drawn on the CPU, so that every device gets the same, and whatever torch's defaults are: vLLM sets device and dtype while it builds
    a model.
    """
    batch, queries = (size or op.batch, 1) if op.decodes else (op.batch, size or op.queries)
    assert isinstance(batch, int) and isinstance(queries, int)
    random = torch.Generator().manual_seed(size)
    here = torch.device("cpu")
    drawn = partial(torch.randn, generator=random, device=here, dtype=torch.float32)
    keys = min(op.keys, max(queries, op.window) + 5 * op.page + 3)
    pages, dtype = -(-keys // op.page) + 3, TORCH[op.dtype]
    extent = {"p": pages, "c": 2, "j": op.page, "g": op.groups, "d": op.dim}
    cache = drawn([extent[a] for a in op.order])
    table = torch.randint(0, pages, (batch, op.columns), generator=random, device=here, dtype=torch.int32)
    most = keys if op.decodes else keys - queries
    counts = (most * torch.linspace(1, 0, batch, device=here, dtype=torch.float32)).int()
    q = drawn(batch * queries, op.heads, op.dim)
    orders = (op.order, op.values) if op.values else None
    told = Told(None, table.to(device), counts.to(device))
    return q.to(device, dtype), Cache(cache.to(device, dtype), op.order, orders), told


def answer(op: ServedAttention, q: torch.Tensor, cache: torch.Tensor, told: Told) -> torch.Tensor:
    """The output in float64: [tokens, heads, D]."""
    memory = cache.reshape(-1)
    sides = []
    for side, order in enumerate((op.order, op.values or op.order)):
        extent = {"p": cache.shape[0], "c": 2, "j": op.page, "g": op.groups, "d": op.dim}
        lying = memory.view([extent[a] for a in order])
        sides.append(lying.permute([order.index(a) for a in _AXES])[:, side].double())
    batch, share = len(told.counts), op.heads // op.groups
    rows = q.double().view(batch, -1, op.groups, share, op.dim)
    out = torch.zeros_like(rows)
    for b, before in enumerate((told.counts - int(op.decodes)).tolist()):
        t, at = (torch.arange(n, device=q.device) for n in (before + rows.shape[1], rows.shape[1]))
        hidden = t > at[:, None] + before
        if op.window:
            hidden |= at[:, None] + before >= t + op.window
        k, v = (x[told.table[b].long()[: -(-len(t) // op.page)]].flatten(0, 1)[: len(t)] for x in sides)
        logits = torch.einsum("sgqd,tgd->gqst", rows[b], k) * (op.scale or op.dim**-0.5)
        weights = torch.softmax(logits.masked_fill(hidden, float("-inf")), -1).nan_to_num(0.0)
        out[b] = torch.einsum("gqst,tge->sgqe", weights, v)
    return out.view(q.shape)
