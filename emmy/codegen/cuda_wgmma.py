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
from emmy.codegen.cuda_scope import Ring
from emmy.codegen.cuda_values import Spread
from emmy.codegen.kernel import Int, IntVar, Whole, over, plus, times
from emmy.codegen.kernel_gpu import (
    SMEM,
    THREAD,
    Do,
    Further,
    LetUniform,
    LetWide,
    Ref,
    Stmt,
    bits,
    shifted,
)
from emmy.codegen.ptx.wgmma import wgmma_name
from emmy.ir.gpu import GROUP

_K = 16  # elements that one instruction folds
_ROWS = 16  # of a warp's share of an instruction's 64


@dataclass(slots=True)
class Wgmma(Contraction):
    """wgmma m64nNk16 (PTX ISA), sums in f32: thread t holds rows 16 (t / 32) + lane / 4 and 8 more, columns as in mma.sync."""

    any_major: ClassVar[bool] = True

    def open(self) -> tuple[Stmt, ...]:
        for ring in (*self.firsts, *self.seconds):
            if ring.channel.transport != "tma" or not ring.layout.swizzle:
                how = f"{ring.value} has rows of {ring.layout.pitch} bytes in layout {ring.channel.layout}, by {ring.channel.transport}"
                raise self.w.cannot(f"wgmma reads swizzled rows that tma wrote; {how}")
        return self._cleared(self.mt * self.nt * self._each)

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
                        out.append(Do(self._helper(p), (sums, left, right, Int(1))))
        return (*out, Do("emmy_wgmma_commit"))

    def _helper(self, p: Product) -> str:
        dtype = self.w.plan.program.value(p.a.value).dtype
        a_mn, b_mn = p.a.columns == self.m, p.b.columns == self.n
        return "emmy_" + wgmma_name(self.atom.n, dtype, "smem", a_mn=a_mn, b_mn=b_mn)

    def settle(self, pending: int) -> tuple[Stmt, ...]:
        return (Do(f"emmy_wgmma_wait<{pending}>"),)

    def _descriptor(self, ring: Ring, own: str, out: list[Stmt]) -> str:
        """The word that describes this warpgroup's rows of a slot, at its first step of k.

        Where the slot begins is passed through a shuffle: otherwise each instruction moves both descriptors from every
        lane's registers to the warp's (measured on an H200: a third of the time of a 64 x 128 tile).
        """
        layout = ring.layout
        off = self.w.warp_offset(own)
        along_k = ring.columns == self.k
        # Pieces of warpgroups begin at whole periods of rows, or at whole panels.
        where = (
            times(off, Int(layout.pitch)) if along_k else times(over(off, Int(layout.panel)), Int(layout.panel_bytes))
        )
        now, name = self.w.fresh(f"{ring.value}_now"), self.w.fresh(f"{ring.value}_desc")
        out.append(LetUniform(now, plus(ring.slot(0), where)))
        args: tuple[Ref | Whole, ...] = (Ref(SMEM, IntVar(now)),)
        if not along_k:
            args = (*args, Int(layout.panel_bytes))
        out.append(LetWide(name, f"emmy_desc_{'k' if along_k else 'mn'}_sw{layout.pitch}", args))
        return name

    def _step(self, ring: Ring, own: str, along: int, k: int) -> Whole:
        """Bytes from the start to the element `along` its own axis and `k` along k: whole periods, or inside a row."""
        row, column = (along, k) if ring.columns == self.k else (k, along)
        layout = ring.layout
        assert row % PERIOD == 0
        inside = column % layout.panel * layout.item
        return Int(column // layout.panel * layout.panel_bytes + row * layout.pitch + inside)

    def close(self) -> tuple[Stmt, ...]:
        return ()

    def spread(self) -> tuple[Spread, Mapping[str, Ref]]:
        own = times(bits(shifted(THREAD, 5), GROUP - 1), Int(_ROWS))
        return fragments(self, own, self.atom.m, self.nt * self.atom.n // 8)
