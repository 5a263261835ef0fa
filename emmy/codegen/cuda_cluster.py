"""Sums of a tile that blocks of a cluster folded shares of: each block's to its shared memory, all blocks' from there.

A block finishes every so-many-th vector of the tile's elements, and reads them in the memory of each block in turn, so the
order of adding is fixed (PTX ISA: shared::cluster). Sums of swapped factors come this way also without a cluster: a thread's
stand below one another, and are taken in vectors along rows. Waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from emmy.codegen.cuda_scope import Walk
from emmy.codegen.cuda_values import Spread, States
from emmy.codegen.kernel import Call, Int, Load, Num, Store, Whole, minus, plus, times
from emmy.codegen.kernel_gpu import SMEM, Do, Ref, Regs, Stmt, counter, unrolled
from emmy.ir.gpu import exchange_pitch, exchanged_bytes
from emmy.ir.program import Stage, swapped

_WORDS = 4  # of the widest load


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Places for a block's sums of a stage, from byte `base` on, in rows `pitch` words apart."""

    w: Walk
    stage: Stage
    base: int
    pitch: int

    def _place(self, spot: Mapping[str, Whole]) -> Whole:
        """Byte of an element's sum; its row and column are those inside the block."""
        row, column = (minus(spot[a], self.w.scope[a].lo) for a in self.stage.axes[-2:])
        return plus(times(plus(times(row, Int(self.pitch)), column), Int(4)), Int(self.base))

    def give(self, spread: Spread, sums: Ref) -> tuple[Stmt, ...]:
        """This thread's sums to their places, also those of elements that do not exist."""
        words, e = self.w.fresh("words"), counter("e", spread.width)
        word = Call("as_b32", (Load(sums.view, plus(sums.at, e)),))
        place = self._place(spread.spot)
        write: tuple[Stmt, ...] = (Do(f"emmy_sts_b{32 * spread.width}", (Ref(SMEM, place), Ref(words, Int(0)))),)
        if swapped(self.stage):  # a vector stands in so many rows
            below = plus(place, times(e, Int(4 * self.pitch)))
            write = unrolled("e", spread.width, (Do("emmy_sts_b32", (Ref(SMEM, below), Ref(words, e))),))
        body: tuple[Stmt, ...] = (
            Regs(words, "b32", spread.width),
            *unrolled("e", spread.width, (Store(words, e, word),)),
            *write,
        )
        for var, count in reversed((*spread.columns, *spread.rows)):
            body = unrolled(var, count, body)
        return body

    def take(self) -> States:
        """What makes a vector of complete sums."""
        assert self.stage.monoid is not None
        component, blocks = self.stage.monoid.state[0][0], self.w.sharing

        def make(w: Walk, spread: Spread) -> tuple[tuple[Stmt, ...], Mapping[str, str]]:
            name, words, n = w.fresh(f"{self.stage.out}_all"), w.fresh("words"), spread.width
            part, e = counter("part_no", blocks), counter("e", n)
            wide = min(n, _WORDS)
            from_ = plus(self._place(spread.spot), times(counter("v", n // wide), Int(4 * wide)))
            to = Ref(words, plus(times(part, Int(n)), times(counter("v", n // wide), Int(wide))))
            load = Do(f"emmy_ld_rank_b{32 * wide}", (to, Ref(SMEM, from_), part))
            if blocks == 1:
                load = Do(f"emmy_lds_b{32 * wide}", (to, Ref(SMEM, from_)))
            more = Call("add", (Load(name, e), Call("as_f32", (Load(words, plus(times(part, Int(n)), e)),))))
            return (
                Regs(words, "b32", blocks * n),
                *unrolled("part_no", blocks, unrolled("v", n // wide, (load,))),
                Regs(name, "f32", n),
                *unrolled("e", n, (Store(name, e, Num(0.0)),)),
                *unrolled("part_no", blocks, unrolled("e", n, (Store(name, e, more),))),
            ), {component: name}

        return make


def exchanged(w: Walk, stage: Stage) -> Exchanged | None:
    """Places for the sums of a launch whose blocks share folds, or whose factors are swapped; else None."""
    if w.sharing == 1 and not swapped(stage):
        return None
    base = w.allocate(exchanged_bytes(w.plan, w.launch.tile, stage))
    return Exchanged(w, stage, base, exchange_pitch(w.scope[stage.axes[-1]].size, swapped(stage)))
