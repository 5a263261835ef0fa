"""Attention of layers of one shape by the pack's kernels: which serve a step, what they are given, and when stock must.

A step is chosen for by what the host knows of it (how many requests, the most queries, the longest sequence that there may be), so
that a CUDA graph holds one choice; all else stays in tensors. Knows torch and packs; what vLLM's layers are is attention.py's affair.
"""

from __future__ import annotations

import ctypes
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from emmy.ir.dtype import DType
from emmy.ir.ops import ServedAttention, parse_op
from emmy.pack import Case, Pack, PackedPlan, Served
from emmy.runtime import launcher
from emmy_vllm.attention_selftest import wrong_answer

log = logging.getLogger("emmy.vllm")
_SIZES = ctypes.c_int64 * 1
_OFFSETS = (1 << 31) - 1  # a kernel that loads rows itself counts elements in 32 bits


@dataclass(frozen=True, slots=True)
class Shape:
    """What the layers of a kind have in common. `window`: keys up to its own position that a query sees, 0 = all."""

    heads: int
    kv_heads: int
    dim: int
    dtype: DType
    window: int
    scale: float

    def fits(self, op: ServedAttention) -> bool:
        same = (op.heads, op.groups, op.dim, op.dtype, op.window) == (
            self.heads, self.kv_heads, self.dim, self.dtype, self.window,
        )  # fmt: skip
        return same and abs((op.scale or op.dim**-0.5) / self.scale - 1) < 1e-6


@dataclass(frozen=True, slots=True)
class Cache:
    """A layer's cache: its memory, and the axes of p c j g d (see ServedAttention) in the order in which `view` has them.

    fixed: (order of keys, of values) where the view cannot say it, for keys lie transposed in their pages
    """

    view: torch.Tensor
    axes: str
    fixed: tuple[str, str] | None = None

    def size(self, axis: str) -> int:
        return int(self.view.shape[self.axes.index(axis)])

    def lies_as(self, op: ServedAttention) -> bool:
        """Whether the op's kernels find keys and values in it."""
        if self.size("j") != op.page:
            return False
        if self.fixed is not None:
            return self.view.is_contiguous() and self.fixed == (op.order, op.values or op.order)
        return not op.values and self.view.permute([self.axes.index(a) for a in op.order]).is_contiguous()


@dataclass(frozen=True, slots=True)
class Step:
    """A forward pass of a layer's group as vLLM describes it; `of` is that description, the same for all layers of the group."""

    of: object
    tokens: int
    most_queries: int
    most_keys: int
    lengths: torch.Tensor
    table: torch.Tensor


@dataclass(slots=True)
class Told:
    """What a kernel is told of a step, made once for all layers of a group. `layers`: those that were given it."""

    of: object
    table: torch.Tensor
    counts: torch.Tensor
    layers: set[int] = field(default_factory=set)


class Kernel:
    """A case of the pack that is ready to run."""

    def __init__(self, op: ServedAttention, case: Case, plan: PackedPlan, device: str) -> None:
        self.op, self.case, self.plan, self._is_cpu = op, case, plan, device == "cpu"
        self._run, self._handle = launcher.library().emmy_run, plan.loaded.handle
        self._arguments = plan.loaded.arguments
        self._told: dict[int, Told] = {}  # by description: groups of layers take turns

    @property
    def slides(self) -> bool:
        """Whether it is given only those pages of a sequence that its window reaches: a decoding step's, however long that is."""
        return self.op.decodes and self.op.window > 0 and self.op.keys >= self.op.window + self.op.page - 1

    def reaches(self, step: Step) -> bool:
        return self.slides or step.most_keys <= self.op.keys

    def reads(self, cache: Cache) -> bool:
        """Whether positions in the cache fit the kernel's numbers."""
        by_engine = all(f"map {n}" in _maps(r) for r in self.case.ranges if r.code for n in self.op.caches)
        return self._is_cpu or by_engine or cache.view.numel() <= _OFFSETS

    def run(self, size: int, q: torch.Tensor, cache: Cache, told: Told, out: torch.Tensor) -> None:
        """Runs it on a step of so many sequences, or queries. Raises LaunchError."""
        given: Mapping[str, torch.Tensor] = {
            "Q": q, "O": out, "table": told.table, self.op.told: told.counts, **dict.fromkeys(self.op.caches, cache.view),
        }  # fmt: skip
        addresses = (ctypes.c_void_p * len(self._arguments))(*(given[n].data_ptr() for n in self._arguments))
        threads, stream = (torch.get_num_threads(), 0) if self._is_cpu else (1, torch.cuda.current_stream().cuda_stream)
        launcher.check(self._run(self._handle, addresses, _SIZES(size), threads, stream), self.case.op)

    def told(self, step: Step, layer: int) -> Told:
        """Table and counts of a step. A layer that comes again with the same description has another step: numbers may have changed."""
        kept = self._told.get(id(step.of))
        if kept is None or layer in kept.layers:
            self._told = {of: t for of, t in self._told.items() if layer not in t.layers}  # those are of steps before
            kept = self._told[id(step.of)] = self._tell(step)
        kept.layers.add(layer)
        return kept

    def _tell(self, step: Step) -> Told:
        op, lengths, table = self.op, step.lengths, step.table
        if not op.decodes:
            return Told(step.of, self._wide(table[:1]), lengths[:1] - step.tokens)
        if not self.slides:
            return Told(step.of, self._wide(table), lengths)
        first = (lengths - op.window).clamp_(min=0).floor_divide_(op.page)
        columns = torch.arange(op.columns, device=table.device, dtype=torch.int32)
        at = (first[:, None] + columns).clamp_(max=table.shape[1] - 1)
        return Told(step.of, table.gather(1, at.long()), torch.sub(lengths, first, alpha=op.page))

    def _wide(self, table: torch.Tensor) -> torch.Tensor:
        """The table with rows as long as the kernel takes them to be."""
        columns, apart = self.op.columns, table.stride(0)
        if table.stride(1) == 1 and (apart == columns or (len(table) == 1 and not self._is_cpu)):
            return table
        out = torch.zeros((len(table), columns), dtype=table.dtype, device=table.device)
        shown = min(columns, table.shape[1])
        out[:, :shown] = table[:, :shown]
        return out


def _maps(r: Served) -> str:
    return "\n".join(r.code.launch) if r.code else ""


class Attended:
    """The kernels that serve layers of a shape beside one of vLLM's backends. `counts`: of steps of layers, by who served them."""

    def __init__(self, shape: Shape, kernels: Sequence[Kernel]) -> None:
        self.shape, self.kernels, self.counts = shape, tuple(kernels), Counter[str]()

    def run(self, layer: int, q: torch.Tensor, cache: Cache, step: Step, out: torch.Tensor) -> bool:
        """Whether a kernel served the step; else stock must. q, out: [tokens, heads, D], perhaps with more tokens than the step has."""
        found = self.choose(q, cache, step, out)
        if isinstance(found, str):
            self.counts[f"stock: {found}"] += 1
            return False
        kernel, size = found
        kernel.run(size, q, cache, kernel.told(step, layer), out)
        self.counts[kernel.case.op] += 1
        return True

    def choose(self, q: torch.Tensor, cache: Cache, step: Step, out: torch.Tensor) -> tuple[Kernel, int] | str:
        """(kernel, size) of a step, or why it is stock's."""
        requests, decodes = len(step.lengths), step.most_queries == 1
        if decodes and requests != step.tokens:
            return "requests without a query"
        if not decodes and requests != 1:
            return "several requests, of which some have several queries"
        if not (q.is_contiguous() and out.is_contiguous()):
            return "rows that do not follow one another"
        size = requests if decodes else step.tokens
        for k in self.kernels:
            if k.op.decodes == decodes and k.op.page == cache.size("j") and k.plan.serves(size) and k.reaches(step):
                return (k, size) if cache.lies_as(k.op) and k.reads(cache) else "a cache that lies otherwise"
        return f"no kernel of such a {'decoding step' if decodes else 'prompt'}"

    def describe(self) -> Iterator[str]:
        """A line a kernel: what it serves."""
        for k in self.kernels:
            served = ", ".join(r.sizes or "all" for r in k.plan.case.ranges if r.code)
            yield f"{k.op.key}: {'requests' if k.op.decodes else 'queries'} {served}"


def attended(
    pack: Pack, shape: Shape, backend: str, device: torch.device, most: Callable[[ServedAttention], int]
) -> tuple[Attended, list[str]]:
    """What the pack has for layers of a shape, each kernel tried once; and why others are left out.

    A range is used where it was raced with the kernel of that backend, and won. most: the largest size that steps ask of an op
    """
    kernels, left = list[Kernel](), list[str]()
    for case in pack.cases:
        op = parse_op(case.op)
        if not isinstance(op, ServedAttention) or not shape.fits(op):
            continue
        plan = pack.plan(op, lambda r: _why_left(r, backend))
        if plan is None:
            left.append(f"{case.op}: {_why_none(pack, case, backend)}")
            continue
        kernel = Kernel(op, plan.case, plan, device.type)
        if wrong := wrong_answer(kernel, device, most(op)):
            log.error("%s: WRONG ANSWER, left to stock: %s", case.op, wrong)
            left.append(f"{case.op}: {wrong}")
            continue
        kernels.append(kernel)
    kernels.sort(key=lambda k: k.op.keys)
    return Attended(shape, kernels), left


def _why_left(r: Served, backend: str) -> str:
    """Why a range is stock's beside this backend; "" when it is not."""
    won = r.evidence.rivals.get(f"vllm:{backend}") if r.evidence else None
    if won is None:
        return f"it was never raced with {backend}"
    return "" if won > 1 else f"no win: {won:.3f} times as fast as {backend}"


def _why_none(pack: Pack, case: Case, backend: str) -> str:
    return pack.why_stock(case.op) or next(
        filter(None, (_why_left(r, backend) for r in case.ranges if r.code)), "nothing"
    )
