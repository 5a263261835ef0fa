"""Contractions by warpgroups: wgmma reads both operands from shared memory while its threads go on to the next.

What the descriptors need follows from the layout of a slot alone: rows of at most 128 bytes, swizzled as the copy engine
does it, eight rows to a period (PTX ISA: Asynchronous Warpgroup Level Matrix Shared Memory Layout).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from emmy.codegen.cuda_atoms import Contraction, Product, fragments
from emmy.codegen.cuda_layout import PERIOD
from emmy.codegen.cuda_scope import Ring, Walk
from emmy.codegen.cuda_values import Spread
from emmy.codegen.kernel import Call, Int, IntVar, LetInt, Num, Store, Whole, over, plus, times
from emmy.codegen.kernel_gpu import (
    SMEM,
    THREAD,
    Do,
    Further,
    LetUniform,
    LetWide,
    Ref,
    Regs,
    Stmt,
    bits,
    counter,
    shifted,
    unrolled,
)
from emmy.codegen.ptx.wgmma import wgmma_name
from emmy.ir.gpu import GROUP, loaded_sets

_K = 16  # elements that one instruction folds
_ROWS = 16  # of a warp's share of an instruction's 64


def check_described(w: Walk, ring: Ring) -> None:
    """Raises PlanError when warpgroups' instructions cannot read a ring's slots."""
    if ring.channel.transport != "tma" or not ring.layout.swizzle:
        how = f"{ring.value} has rows of {ring.layout.pitch} bytes in layout {ring.channel.layout}, by {ring.channel.transport}"
        raise w.cannot(f"wgmma reads swizzled rows that tma wrote; {how}")


def descriptor(w: Walk, ring: Ring, own: str, k: str, out: list[Stmt]) -> str:
    """The word that describes this warpgroup's rows of a slot, at its first step of k.

    Where the slot begins is passed through a shuffle: otherwise each instruction moves both descriptors from every
    lane's registers to the warp's (measured on an H200: a third of the time of a 64 x 128 tile).
    """
    layout = ring.layout
    off = w.warp_offset(own)
    along_k = ring.columns == k
    # Pieces of warpgroups begin at whole periods of rows, or at whole panels.
    where = times(off, Int(layout.pitch)) if along_k else times(over(off, Int(layout.panel)), Int(layout.panel_bytes))
    now, name = w.fresh(f"{ring.value}_now"), w.fresh(f"{ring.value}_desc")
    out.append(LetUniform(now, plus(ring.slot(w.further.get(ring.channel.at, 0)), where)))
    args: tuple[Ref | Whole, ...] = (Ref(SMEM, IntVar(now)),)
    if not along_k:
        args = (*args, Int(layout.panel_bytes))
    out.append(LetWide(name, f"emmy_desc_{'k' if along_k else 'mn'}_sw{layout.pitch}", args))
    return name


def further(ring: Ring, k_axis: str, along: int, k: int) -> Whole:
    """Bytes from the start to the element `along` its own axis and `k` along k: whole periods, or inside a row."""
    row, column = (along, k) if ring.columns == k_axis else (k, along)
    layout = ring.layout
    assert row % PERIOD == 0
    inside = column % layout.panel * layout.item
    return Int(column // layout.panel * layout.panel_bytes + row * layout.pitch + inside)


@dataclass(slots=True)
class Wgmma(Contraction):
    """wgmma m64nNk16 (PTX ISA), sums in f32: thread t holds rows 16 (t / 32) + lane / 4 and 8 more, columns as in mma.sync."""

    any_major: ClassVar[bool] = True

    def open(self) -> tuple[Stmt, ...]:
        for ring in self._described:
            check_described(self.w, ring)
        return self._cleared(self.mt * self.nt * self._each)

    @property
    def _described(self) -> tuple[Ring, ...]:
        """Operands that the instruction reads from shared memory."""
        return *self.firsts, *self.seconds

    @property
    def _each(self) -> int:
        """Sums that a thread has of one instruction."""
        return self.atom.n // 2

    def compute(self) -> tuple[Stmt, ...]:
        """All instructions of the current fills, of all products, as one group that is under way when this ends."""
        out: list[Stmt] = []
        at = {r.value: self._descriptor(r, self.m, out) for r in self.firsts}
        at |= {r.value: self._descriptor(r, self.n, out) for r in self.seconds}
        out.append(Do("emmy_wgmma_fence"))
        for kk in range(self.kt):
            for i in range(self.mt):
                for j in range(self.nt):
                    for p in self.products:
                        sums = Ref(p.sums, Int((i * self.nt + j) * self._each))
                        left = Further(at[p.a.value], self._step(p.a, self.m, i * self.atom.m, kk * _K))
                        right = Further(at[p.b.value], self._step(p.b, self.n, j * self.atom.n, kk * _K))
                        out.append(Do(self._helper(p), (sums, left, right, Int(int(kk > 0 or not self.anew)))))
        return (*out, Do("emmy_wgmma_commit"))

    def _helper(self, p: Product) -> str:
        dtype = self.w.plan.program.value(p.a.value).dtype
        a_mn, b_mn = p.a.columns == self.m, p.b.columns == self.n
        return "emmy_" + wgmma_name(self.atom.n, dtype, "smem", a_mn=a_mn, b_mn=b_mn)

    def settle(self, pending: int) -> tuple[Stmt, ...]:
        return (Do(f"emmy_wgmma_wait<{pending}>"),)

    def _descriptor(self, ring: Ring, own: str, out: list[Stmt]) -> str:
        return descriptor(self.w, ring, own, self.k, out)

    def _step(self, ring: Ring, own: str, along: int, k: int) -> Whole:
        return further(ring, self.k, along, k)

    def close(self) -> tuple[Stmt, ...]:
        return ()

    def spread(self) -> tuple[Spread, Mapping[str, Ref]]:
        own = times(bits(shifted(THREAD, 5), GROUP - 1), Int(_ROWS))
        return fragments(self, own, self.atom.m, self.nt * self.atom.n // 8)


@dataclass(slots=True)
class LoadedWgmma(Wgmma):
    """wgmma with A in registers, whence ldmatrix brings each warp's 16 rows: a step of k is a group of its own.

    Several sets of registers take turns. Before one is loaded, all groups but those of the other sets are done: so the load
    stands while they multiply, in a loop that need not be written out for the sets to have names. Registers are pinned where
    their group is done, lest the compiler should give them to something else before (PTX ISA: wgmma.mma_async, registers).
    """

    @property
    def _described(self) -> tuple[Ring, ...]:
        return self.seconds

    @property
    def _sets(self) -> int:
        return loaded_sets(self.kt * _K)

    @property
    def _words(self) -> int:
        """Registers of a set."""
        return 4 * self.mt

    def open(self) -> tuple[Stmt, ...]:
        count, out = self._sets * self._words, list[Stmt]()
        for r in self.firsts:
            zero = Store(_registers(r), IntVar("e"), Call("as_b32", (Num(0.0),)))
            out += (Regs(_registers(r), "b32", count), *unrolled("e", count, (zero,)))
        return (*Wgmma.open(self), *out)

    def compute(self) -> tuple[Stmt, ...]:
        """All instructions of the current fills, of all products, a group for each step of k."""
        out: list[Stmt] = []
        now = {r.value: IntVar(self.w.fresh(f"{r.value}_now")) for r in self.firsts}
        out += (LetInt(now[r.value].name, r.slot(0)) for r in self.firsts)
        at = {r.value: self._descriptor(r, self.n, out) for r in self.seconds}
        for kk in range(self.kt):
            first = kk % self._sets * self._words
            out += (Do(f"emmy_wgmma_wait<{self._sets - 1}>"), *self._pinned(first, self._words))
            for r in self.firsts:
                out += self._load(r, kk, first, now[r.value])
            out.append(Do("emmy_wgmma_fence"))
            for i in range(self.mt):
                for j in range(self.nt):
                    for p in self.products:
                        sums = Ref(p.sums, Int((i * self.nt + j) * self._each))
                        right = Further(at[p.b.value], self._step(p.b, self.n, j * self.atom.n, kk * _K))
                        out.append(Do(self._helper(p), (sums, Ref(_registers(p.a), Int(first + 4 * i)), right, Int(1))))
            out.append(Do("emmy_wgmma_commit"))
        return tuple(out)

    def _helper(self, p: Product) -> str:
        dtype = self.w.plan.program.value(p.a.value).dtype
        return "emmy_" + wgmma_name(self.atom.n, dtype, "reg", b_mn=p.b.columns == self.n)

    def settle(self, pending: int) -> tuple[Stmt, ...]:
        pinned = () if pending else self._pinned(0, self._sets * self._words)
        return (Do(f"emmy_wgmma_wait<{pending * self.kt}>"), *pinned)

    def _pinned(self, first: int, count: int) -> tuple[Stmt, ...]:
        each = ((r, at) for r in self.firsts for at in range(first, first + count, 4))
        return tuple(Do("emmy_pin_b32x4", (Ref(_registers(r), Int(at)),)) for r, at in each)

    def _load(self, ring: Ring, kk: int, first: int, now: Whole) -> tuple[Stmt, ...]:
        """A first operand's rows and 16 of k of each instruction, to registers from `first` on."""
        lane, i, layout = self.w.lane(), counter("i", self.mt), ring.layout
        m, k = times(i, Int(self.atom.m)), Int(kk * _K)
        if ring.columns == self.k:  # matrices: rows and 8 more, then the same 8 further along k
            at = layout.beyond(self._lane(ring, self.m, bits(lane, 15), times(shifted(lane, 4), Int(8))), m, k)
        else:
            row = plus(bits(lane, 7), times(shifted(lane, 4), Int(8)))
            at = layout.beyond(self._lane(ring, self.m, row, times(bits(shifted(lane, 3), 1), Int(8))), k, m)
        to = Ref(_registers(ring), plus(times(i, Int(4)), Int(first)))
        helper = "emmy_ldmatrix_x4" + ("" if ring.columns == self.k else "_trans")
        return unrolled("i", self.mt, (Do(helper, (to, Ref(SMEM, plus(at, now)))),))

    def _lane(self, ring: Ring, own: str, row: Whole, column: Whole) -> Whole:
        """As for warps, each of which has 16 rows of its warpgroup's instruction."""
        mine = times(bits(shifted(THREAD, 5), GROUP - 1), Int(_ROWS))
        along_k = ring.columns == self.k
        at = Contraction._lane(self, ring, own, row, column)
        moved = ring.layout.beyond(at, mine, Int(0)) if along_k else ring.layout.beyond(at, Int(0), mine)
        return self.w.let("mine_at", moved)


def _registers(ring: Ring) -> str:
    return f"{ring.value}_frag"
