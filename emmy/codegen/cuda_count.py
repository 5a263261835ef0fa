"""Counts of the parts that blocks leave of a statistic, by which a block learns that it is the last to leave one, or to begin.

One thread counts for all that make a tile, and tells them through a word of shared memory. Decides no wait: those are steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from emmy.codegen.cuda_scope import Walk
from emmy.codegen.kernel import Int, IntVar, Whole, over, plus, same, times
from emmy.codegen.kernel_gpu import BLOCK, SMEM, Do, For, If, LetFrom, Ref, Regs, Stmt
from emmy.codegen.left import counts_name, tiles_along
from emmy.ir.gpu import parts_counted, told_bytes


@dataclass(frozen=True, slots=True)
class Count:
    """The count of the tile's row of tiles.

    base: first byte of a word for each team of threads; marked: for each of the block's tiles instead
    """

    w: Walk
    stage: str
    base: int
    marked: bool

    @property
    def _word(self) -> Ref:
        tile = over(self.w.block, Int(self.w.launch.tile.order.workers)) if self.w.block != BLOCK else Int(0)
        return Ref(SMEM, plus(times(tile if self.marked else self.w.team(), Int(4)), Int(self.base)))

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
        return (If(same(self.w.thread(), Int(0)), self._told("emmy_count")),)

    def begun(self) -> tuple[Stmt, ...]:
        """One more part will be there, of a tile for which one thread does this."""
        return self._told("emmy_count_begun")

    def _told(self, helper: str) -> tuple[Stmt, ...]:
        before = Ref(self.w.fresh(f"{self.stage}_before"), Int(0))
        return Regs(before.view, "b32", 1), Do(helper, (before, self._count)), Do("emmy_sts_b32", (self._word, before))

    def if_last(self, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        name, most = self.w.fresh(f"{self.stage}_count"), parts_counted(self.w.plan, self.w.launch.tile, self.stage)
        return LetFrom(name, "emmy_lds_word", (self._word,)), If(same(IntVar(name), Int(most - 1)), body)

    def reset(self) -> tuple[Stmt, ...]:
        return (If(same(self.w.thread(), Int(0)), (Do("emmy_flag_lower", (self._count,)),)),)


def count_of(w: Walk, stage: str) -> Count:
    """The count of a stage's parts, with a place in shared memory."""
    space = w.plan.workspace(stage)
    assert space is not None
    n_bytes = told_bytes(w.plan, w.launch.tile, space) if space.marked else 4 * w.teams
    return Count(w, stage, w.allocate(n_bytes), space.marked)


def each_tile(w: Walk, tiles: Whole, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """The body for each of the team's tiles, by another thread. Instructions of whole warps may follow."""
    order, n, meet = w.launch.tile.order, w.teams, Do("emmy_syncwarp")
    if w.block == BLOCK:
        return If(same(w.thread(), Int(0)), body), meet
    mine = plus(BLOCK, times(plus(w.team(), times(w.thread(), Int(n))), Int(order.workers)))
    return For(w.block.name, mine, tiles, n * order.workers * w.threads, (*w.tile_head, *body)), meet
