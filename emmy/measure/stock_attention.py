"""torch's scaled dot product attention as something a measurer can time: one of its backends, or the fastest. Knows no schedules."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from emmy.errors import UsageError
from emmy.ir.ops.attention import Attention
from emmy.ir.ops.paged_attention import PagedAttention
from emmy.measure.allocated import Allocated
from emmy.measure.device import Buffer, Call
from emmy.measure.rivals import SDPA

if TYPE_CHECKING:
    import torch

_RUNS = 8  # of each backend, of which the fastest counts


@dataclass(frozen=True, slots=True)
class TorchAttention:
    """scaled_dot_product_attention on whole heads, by a backend, or by the one that is fastest for the op.

    torch has no form of it that writes to a given array, so results stay where torch puts them. K and V are repeated for each
    head before anything is timed, for backends that need it.

    `tensor` gives a buffer's memory as a tensor, on whatever device it lies.
    """

    op: Attention
    tensor: Callable[[Buffer], torch.Tensor]
    backend: str = ""  # of emmy.measure.rivals.SDPA
    results: Allocated = field(default_factory=Allocated)

    def bind(self, buffers: Mapping[str, Buffer], sizes: Mapping[str, int]) -> Call:
        x = {name: self.tensor(buffer) for name, buffer in buffers.items()}
        calls = _running(self.op, x, self.backend)
        if not calls:
            raise UsageError(f"{self.backend} does not compute {self.op.key} here")
        call = min(calls, key=lambda c: _seconds(c, x["Q"].is_cuda))
        return self.results.call(lambda: {"O": call()}, x)


@dataclass(frozen=True, slots=True)
class TorchPagedAttention:
    """Pages of each sequence side by side, by the table, then scaled_dot_product_attention, with a mask that was made before.

    Heads that share keys are rows of one head. Results stay where torch puts them.
    """

    op: PagedAttention
    tensor: Callable[[Buffer], torch.Tensor]
    results: Allocated = field(default_factory=Allocated)

    def bind(self, buffers: Mapping[str, Buffer], sizes: Mapping[str, int]) -> Call:
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        op, x = self.op, {name: self.tensor(buffer) for name, buffer in buffers.items()}
        table, share = x["table"].long(), op.heads // op.groups
        t = torch.arange(op.keys, device=table.device)
        query = torch.arange(op.queries * share, device=table.device) // share
        at = query[:, None] + x["lengths"].long()[:, None, None] - op.queries
        seen = t <= at if op.causal else (t < x["lengths"][:, None, None]).expand(-1, len(query), -1)
        if op.window:
            seen = seen & (at < t + op.window)
        mask, blind = seen[:, None], not bool(seen.any(-1).all())

        def keys(pages: torch.Tensor) -> torch.Tensor:
            return pages[table].flatten(1, 2)[:, : op.keys].transpose(1, 2)

        def run() -> torch.Tensor:
            k = keys(x["K_pages"])
            v = k if op.shared else keys(x["V_pages"])
            out = scaled_dot_product_attention(x["Q"], k, v, mask, scale=op.scale or None)
            return out.nan_to_num_(0.0) if blind else out

        return self.results.call(lambda: {"O": run()}, x)


def _running(op: Attention, x: Mapping[str, torch.Tensor], only: str) -> list[Callable[[], torch.Tensor]]:
    """Calls of every backend that computes the op here, or of the one that is named."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    size = x["Q"].shape[-1]
    q, k = (x[v].reshape(1, heads, -1, size) for v, heads in (("Q", op.heads), ("K", op.groups)))
    v = k if op.shared else x["V"].reshape(k.shape)
    grouped = k.shape[1] != q.shape[1]
    every = tuple(t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v)) if grouped else (k, v)
    mask = None
    if op.causal and (op.window or q.shape[2] != k.shape[2]):
        s, t = (torch.arange(n, device=q.device) for n in (q.shape[2], k.shape[2]))
        at = s[:, None] + (len(t) - len(s))
        mask = t[None] <= at
        if op.window:
            mask &= at < t[None] + op.window
    causal, scale = op.causal and mask is None, op.scale or None

    def call(backend: SDPBackend, kv: tuple[torch.Tensor, torch.Tensor]) -> Callable[[], torch.Tensor]:
        gqa = kv[0].shape[1] != q.shape[1]

        def run() -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, *kv, mask, is_causal=causal, scale=scale, enable_gqa=gqa)

        return run

    found: list[Callable[[], torch.Tensor]] = []
    backends = (
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    )
    for name, backend in zip(SDPA, backends, strict=True):
        if only and name != only:
            continue
        if backend is SDPBackend.MATH and found:
            break  # it makes every logit in memory
        for kv in ((k, v), every)[: 1 + grouped]:
            run = call(backend, kv)
            try:
                run()
            except RuntimeError:
                continue
            found.append(run)
    return found


def _seconds(call: Callable[[], torch.Tensor], on_gpu: bool) -> float:
    """Of a few runs, the best of a few times; on a GPU as a graph, in which no kernel waits for the host."""
    import torch

    runs, wait = partial(_in_a_row, call), torch.cuda.synchronize if on_gpu else _nothing
    if on_gpu:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            runs()
        runs = graph.replay
    best = float("inf")
    for _ in range(_RUNS):
        wait()
        begin = time.perf_counter()
        runs()
        wait()
        best = min(best, time.perf_counter() - begin)
    return best


def _in_a_row(call: Callable[[], torch.Tensor]) -> None:
    for _ in range(_RUNS):
        call()


def _nothing() -> None:
    pass
