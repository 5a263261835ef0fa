"""Counts of the parts that blocks left of a statistic, by which a block learns that it is the last to leave one.

One thread counts for all that made the tile, and tells them through a word of shared memory. Decides no wait: those are steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from emmy.codegen.cuda_scope import Walk
from emmy.codegen.kernel import Int, IntVar, Whole, over, plus, same, times
from emmy.codegen.kernel_gpu import SMEM, Do, If, LetFrom, Ref, Regs, Stmt
from emmy.codegen.left import counts_name, tiles_along
from emmy.ir.gpu import parts_counted


@dataclass(frozen=True, slots=True)
class Count:
    """The count of the tile's row of tiles. base: first byte of a word for each team of threads."""

    w: Walk
    stage: str
    base: int

    @property
    def _word(self) -> Ref:
        return Ref(SMEM, plus(times(self.w.team(), Int(4)), Int(self.base)))

    @property
    def _count(self) -> Ref:
        """Rows of tiles are numbered by where they begin."""
        at: Whole = Int(0)
        for a in self.w.plan.program.stage(self.stage).axes:
            piece = self.w.scope[a]
            at = plus(times(at, tiles_along(self.w.plan, self.w.launch, a)), over(piece.lo, Int(piece.size)))
        return Ref(counts_name(self.stage), at)

    def up(self) -> tuple[Stmt, ...]:
        """One more part is there; who finds how many were before shares it."""
        name = self.w.fresh(f"{self.stage}_before")
        told = Do("emmy_count", (Ref(name, Int(0)), self._count)), Do("emmy_sts_b32", (self._word, Ref(name, Int(0))))
        return (If(same(self.w.thread(), Int(0)), (Regs(name, "b32", 1), *told)),)

    def if_last(self, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        name, most = self.w.fresh(f"{self.stage}_count"), parts_counted(self.w.plan, self.w.launch.tile, self.stage)
        return LetFrom(name, "emmy_lds_word", (self._word,)), If(same(IntVar(name), Int(most - 1)), body)

    def reset(self) -> tuple[Stmt, ...]:
        return (If(same(self.w.thread(), Int(0)), (Do("emmy_flag_lower", (self._count,)),)),)


def count_of(w: Walk, stage: str) -> Count:
    """The count of a stage's parts, with a place in shared memory."""
    return Count(w, stage, w.allocate(4 * w.teams))
