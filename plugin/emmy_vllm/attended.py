"""Attention of layers of one shape by the pack's kernels: which serve a step, what they are given, and when stock must.

A step is chosen for by what the host knows of it (how many requests, the most queries, the longest sequence that there may be), so
that a CUDA graph holds one choice; all else stays in tensors. Knows torch and packs; what vLLM's layers are is attention.py's affair.
"""

from __future__ import annotations

import ctypes
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from emmy.ir.ops import ServedAttention, parse_op
from emmy.pack import Case, Pack, PackedPlan, Served
from emmy.runtime import launcher
from emmy_vllm.attention_selftest import wrong_answer
from emmy_vllm.attention_steps import Cache, Kept, Part, Shape, Step, Told
from emmy_vllm.counts import Counts

log = logging.getLogger("emmy.vllm")
_SIZES = ctypes.c_int64 * 1
_OFFSETS = (1 << 31) - 1  # a kernel that loads rows itself counts elements in 32 bits


class Kernel:
    """A case of the pack that is ready to run. `counts`: of its runs, by range."""

    def __init__(self, op: ServedAttention, case: Case, plan: PackedPlan, device: torch.device, instance: str) -> None:
        self.op, self.case, self._plan, self._is_cpu = op, case, plan, device.type == "cpu"
        self.counts = Counts(instance, case.op, [(r.sizes or "any") if r.code else "" for r in case.ranges])
        self._run, self._handle = launcher.library().emmy_run, plan.loaded.handle
        self._arguments = plan.loaded.arguments
        self._told = Kept()  # by description and part: groups of layers take turns
        self._near = Kept()  # by lengths and part, which groups share
        self._columns = torch.arange(op.columns, device=device)
        self._by_engine = all(f"map {n}" in _maps(r) for r in case.ranges if r.code for n in op.caches)

    @property
    def slides(self) -> bool:
        """Whether it is given only those pages of a sequence that its window reaches: a decoding step's, however long that is."""
        return self.op.decodes and self.op.window > 0 and self.op.keys >= self.op.window + self.op.page - 1

    def range(self, size: int) -> int | None:
        """Number of the range that has kernels for so many sequences, or queries."""
        sized = self.case.symbol
        return next((i for i, r in enumerate(self.case.ranges) if r.code and (not sized or r.lo <= size <= r.hi)), None)

    def reaches(self, step: Step) -> bool:
        return self.slides or step.most_keys <= self.op.keys

    def reads(self, cache: Cache) -> bool:
        """Whether positions in the cache fit the kernel's numbers."""
        return self._is_cpu or self._by_engine or cache.view.numel() <= _OFFSETS

    def run(self, size: int, q: torch.Tensor, cache: Cache, told: Told, out: torch.Tensor) -> None:
        """Runs it on a step of so many sequences, or queries. Raises LaunchError."""
        given: Mapping[str, torch.Tensor] = {
            "Q": q, "O": out, "table": told.table, self.op.told: told.counts, **dict.fromkeys(self.op.caches, cache.view),
        }  # fmt: skip
        addresses = (ctypes.c_void_p * len(self._arguments))(*(given[n].data_ptr() for n in self._arguments))
        threads, stream = (torch.get_num_threads(), 0) if self._is_cpu else (1, torch.cuda.current_stream().cuda_stream)
        launcher.check(self._run(self._handle, addresses, _SIZES(size), threads, stream), self.case.op)

    def told(self, step: Step, part: Part, layer: int) -> Told:
        """Table and counts of a part."""
        return self._told.get((id(step.of), part.first), layer, lambda: self._tell(step, part, layer))

    def _tell(self, step: Step, part: Part, layer: int) -> Told:
        lengths, table = step.lengths[part.first : part.last], step.table[part.first : part.last]
        if not self.op.decodes:
            return Told(step.of, self._wide(table), lengths - part.tokens)
        if not self.slides:
            return Told(step.of, self._wide(table), lengths)
        near = self._near.get(
            (id(step.lengths), part.first), layer, lambda: self._reached(step.lengths, lengths, table)
        )
        return Told(step.of, table.gather(1, near.table), near.counts, near)

    def _reached(self, of: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor) -> Told:
        """For all groups: which columns of their tables the window reaches, and how many keys there are from there on."""
        op = self.op
        first = lengths.sub(op.window).clamp_(min=0).div_(op.page, rounding_mode="floor")
        columns = (first[:, None] + self._columns).clamp_(max=table.shape[1] - 1)
        return Told(of, columns, torch.sub(lengths, first, alpha=op.page))

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
    """The kernels that serve layers of a shape beside one of vLLM's backends.

    left:   why others of the pack do not
    counts: of layers' steps that stock had; `why` they were its
    """

    def __init__(
        self, shape: Shape, backend: str, kernels: Sequence[Kernel], left: Sequence[str], instance: str
    ) -> None:
        self.shape, self.backend, self.kernels, self.left = shape, backend, tuple(kernels), tuple(left)
        self.why, self.n_layers = Counter[str](), 0
        self.counts = Counts(instance, f"attention:{shape}", ())

    def run(self, layer: int, q: torch.Tensor, cache: Cache, step: Step, out: torch.Tensor) -> bool:
        """Whether a kernel served the step; else stock must. q, out: [tokens, heads, D], perhaps with more tokens than the step has."""
        found = self.choose(q, cache, step, out)
        if isinstance(found, str):
            self.counts.array[0] += 1
            self.why[found] += 1
            return False
        for kernel, part in found:
            rows = slice(part.token, part.token + part.tokens)
            size = part.last - part.first if kernel.op.decodes else part.tokens
            kernel.run(size, q[rows], cache, kernel.told(step, part, layer), out[rows])
            served = kernel.range(size)
            assert served is not None
            kernel.counts.array[1 + served] += 1
        return True

    def choose(self, q: torch.Tensor, cache: Cache, step: Step, out: torch.Tensor) -> list[tuple[Kernel, Part]] | str:
        """Kernels of a step's parts, or why it is stock's."""
        parts, found = step.parts(), list[tuple[Kernel, Part]]()
        if isinstance(parts, str):
            return parts
        if not (q.is_contiguous() and out.is_contiguous()):
            return "rows that do not follow one another"
        for part in parts:
            kernel = self._kernel(part, cache, step)
            if kernel is None:
                return f"no kernel of such a {'decoding step' if part.decodes else 'prompt'}"
            if not (cache.lies_as(kernel.op) and kernel.reads(cache)):
                return "a cache that lies otherwise"
            found.append((kernel, part))
        return found

    def _kernel(self, part: Part, cache: Cache, step: Step) -> Kernel | None:
        size, page = part.last - part.first if part.decodes else part.tokens, cache.size("j")
        return next(
            (
                k for k in self.kernels
                if k.op.decodes == part.decodes and k.op.page == page and k.range(size) is not None and k.reaches(step)
            ), None,
        )  # fmt: skip

    def lines(self) -> Iterator[str]:
        """Who serves what, a line each."""
        yield f"attention {self.shape}: {self.n_layers} layer{'s' * (self.n_layers != 1)}, {self.backend}"
        for k in self.kernels:
            sizes = ", ".join(r.sizes or "any" for r in k.case.ranges if r.code)
            yield f"  Emmy {f'decoding of {sizes} requests' if k.op.decodes else f'prompts of {sizes} tokens'}: {k.op.key}"
        yield from (f"  stock: {why}" for why in self.left)
        if not self.kernels and not self.left:
            yield "  stock: the pack has no kernel for it"


def attended(
    pack: Pack, shape: Shape, backend: str, device: torch.device, instance: str, most: Callable[[ServedAttention], int]
) -> Attended:
    """What the pack has for layers of a shape, each kernel tried once.

    A range is used where it was raced with the kernel of that backend, and won. instance: the engine's id; most: the largest size
    that steps ask of an op
    """
    kernels, left = list[Kernel](), list[str]()
    for case in pack.cases:
        op = parse_op(case.op)
        if not isinstance(op, ServedAttention) or not shape.fits(op):
            continue
        plan = pack.plan(op, partial(_why_left, backend, pack.unmeasured))
        if plan is None:
            left.append(f"{case.op}: {_why_none(pack, case, backend)}")
            continue
        kernel = Kernel(op, plan.case, plan, device, instance)
        if wrong := wrong_answer(kernel, device, most(op)):
            log.error("%s: WRONG ANSWER, left to stock: %s", case.op, wrong)
            left.append(f"{case.op}: {wrong}")
            continue
        kernels.append(kernel)
    kernels.sort(key=lambda k: k.op.keys)
    return Attended(shape, backend, kernels, left, instance)


def _why_left(backend: str, unmeasured: bool, r: Served) -> str:
    """Why a range is stock's beside this backend; "" when it is not."""
    won = r.evidence.rivals.get(f"vllm:{backend}") if r.evidence else None
    if won is None:
        return "" if unmeasured else f"it was never raced with {backend}"
    return "" if won > 1 else f"no win: {won:.3f} times as fast as {backend}"


def _why_none(pack: Pack, case: Case, backend: str) -> str:
    whys = (_why_left(backend, False, r) for r in case.ranges if r.code)
    return pack.why_stock(case.op) or next(filter(None, whys), "nothing of it is served")
