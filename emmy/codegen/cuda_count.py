"""Counts of the parts that blocks leave of a statistic, by which a block learns that it is the last to leave one, or to begin.

One thread counts for all that make a tile, and tells them through a word of shared memory. Decides no wait: those are steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from emmy.codegen.cuda_scope import Walk
from emmy.codegen.cuda_values import index_of
from emmy.codegen.kernel import Call, Int, IntVar, Num, Store, Whole, over, plus, same, times
from emmy.codegen.kernel_gpu import BLOCK, SMEM, Do, For, If, LetFrom, Ref, Regs, Stmt, counter, unrolled
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
        return Ref(counts_name(self.stage), self._row)

    @property
    def _row(self) -> Whole:
        """Rows of tiles are numbered by where they begin."""
        at: Whole = Int(0)
        for a in self.w.plan.program.stage(self.stage).axes:
            piece = self.w.scope[a]
            at = plus(times(at, tiles_along(self.w.plan, self.w.launch, a)), over(piece.lo, Int(piece.size)))
        return at

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
        name = self.w.fresh(f"{self.stage}_count")
        return LetFrom(name, "emmy_lds_word", (self._word,)), If(same(IntVar(name), Int(self._most - 1)), body)

    @property
    def _most(self) -> int:
        return parts_counted(self.w.plan, self.w.launch.tile, self.stage)

    def reset(self) -> tuple[Stmt, ...]:
        return (If(same(self.w.thread(), Int(0)), (Do("emmy_flag_lower", (self._count,)),)),)


@dataclass(frozen=True, slots=True)
class Cleared(Count):
    """The count of parts that memory adds: a word for those that have begun, and one for those that know of zeros."""

    def _pair(self, word: int) -> Ref:
        return Ref(counts_name(self.stage), plus(times(self._row, Int(2)), Int(word)))

    def if_first(self, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        before = self.w.fresh(f"{self.stage}_before")
        count = LetFrom(before, "emmy_count_around", (self._pair(0), Int(self._most - 1)))
        return count, If(same(IntVar(before), Int(0)), body)

    def clear(self) -> tuple[Stmt, ...]:
        """One thread sets the tile's elements to zero, by vectors where rows have no rest."""
        w, axes = self.w, self.w.plan.program.stage(self.stage).axes
        n = w.plan.program.dim(axes[-1])
        width = gcd(4, w.scope[axes[-1]].size, n) if isinstance(n, int) else 1
        words, spot = w.fresh("zeros"), {a: IntVar(w.fresh(a)) for a in axes}
        body: tuple[Stmt, ...] = (
            Do(f"emmy_stg_b{32 * width}", (Ref(self.stage, index_of(w, axes, spot)), Ref(words, Int(0)))),
        )
        for a in reversed(axes):
            body = (For(spot[a].name, w.scope[a].lo, w.scope[a].hi, width if a == axes[-1] else 1, body),)
        nothing = Store(words, counter("e", width), Call("as_b32", (Num(0.0),)))
        return (Regs(words, "b32", width), *unrolled("e", width, (nothing,)), *body)

    def raise_flag(self) -> tuple[Stmt, ...]:
        return (Do("emmy_flag_raise", (self._pair(1),)),)

    def await_flag(self) -> tuple[Stmt, ...]:
        return (Do("emmy_flag_await", (self._pair(1),)),)

    def pass_on(self) -> tuple[Stmt, ...]:
        return (Do("emmy_pass_on", (self._pair(1), Int(self._most))),)


def count_of(w: Walk, stage: str) -> Count:
    """The count of a stage's parts, with a place in shared memory."""
    space = w.plan.workspace(stage)
    assert space is not None
    if space.added:
        return Cleared(w, stage, 0, False)
    n_bytes = told_bytes(w.plan, w.launch.tile, space) if space.marked else 4 * w.teams
    return Count(w, stage, w.allocate(n_bytes), space.marked)


def each_tile(w: Walk, tiles: Whole, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """The body for each of the team's tiles, by another thread. Instructions of whole warps may follow."""
    order, n, meet = w.launch.tile.order, w.teams, Do("emmy_syncwarp")
    if w.block == BLOCK:
        return If(same(w.thread(), Int(0)), body), meet
    mine = plus(BLOCK, times(plus(w.team(), times(w.thread(), Int(n))), Int(order.workers)))
    return For(w.block.name, mine, tiles, n * order.workers * w.threads, (*w.tile_head, *body)), meet
