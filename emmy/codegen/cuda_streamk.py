"""Stream-K on a GPU: which steps of which tiles a block walks, and how sums of a tile pass from block to block.

Workers are numbered against the blocks: a block waits only for blocks before it, which begin no later. What a worker leaves of
a tile lies in its own place in memory, each thread's sums in vectors side by side with its neighbours', so that the same thread
of the owner reads them as they stand in its registers; edges do not matter. Decides no wait: those are steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from emmy.codegen.cuda_atoms import Fold
from emmy.codegen.cuda_scope import Walk
from emmy.codegen.kernel import (
    Call,
    Int,
    IntOp,
    IntVar,
    LetInt,
    Load,
    Store,
    Whole,
    below,
    least,
    minus,
    over,
    plus,
    rest,
    same,
    times,
)
from emmy.codegen.kernel_gpu import BLOCK, THREAD, Do, For, If, Ref, Regs, SetInt, Stmt, counter, unrolled
from emmy.codegen.left import flags_name, sums_name
from emmy.ir.moves.streamk import steps_of_tile, whole_rounds

_WORDS = 4  # of the widest load


def _rounds(tiles: Whole, workers: int) -> Whole:
    """How many tiles each worker makes whole."""
    if isinstance(tiles, Int):
        return Int(whole_rounds(tiles.value, workers))
    return IntOp("max", plus(over(tiles, Int(workers)), Int(-1)), Int(0))


@dataclass(frozen=True, slots=True)
class Shares:
    """Whole tiles, `rounds` for each worker, then equal shares of the steps of the others, `each` of a tile.

    tiles: made whole; length: of a share, which is one step longer for the first `longer` workers
    """

    w: Walk
    workers: Whole
    each: int
    rounds: Whole
    tiles: Whole
    length: Whole
    longer: Whole

    @classmethod
    def of(cls, w: Walk, tiles: Whole) -> Shares:
        """The shares of a launch; from now on its ring loop runs over the block's part of the tile."""
        each = steps_of_tile(w.plan, w.launch)
        most = w.launch.tile.order.workers
        rounds = w.let("rounds", _rounds(tiles, most))
        whole = w.let("whole_tiles", times(rounds, Int(most)))
        steps = w.let("steps", times(minus(tiles, whole), Int(each)))
        workers = w.let("workers", least(Int(most), steps))
        length, longer = w.let("share", over(steps, workers)), w.let("longer", rest(steps, workers))
        out = cls(w, workers, each, rounds, whole, length, longer)
        loop = w.nest[w.launch.tile.n_block_loops]
        first, end = (
            w.let(name, minus(x, out._before())) for name, x in (("first_step", out.lo), ("end_step", out.hi))
        )
        begin = IntOp("max", first, Int(0))
        if rounds != Int(0):
            begin = IntOp(
                "*", begin, below(plus(whole, Int(-1)), w.block)
            )  # what is made whole begins at its first step
        lo = w.let(f"{loop.axis}_begin", times(begin, Int(loop.step)))
        hi = w.let(f"{loop.axis}_end", times(least(end, Int(each)), Int(loop.step)))
        w.shares[loop.axis] = (lo, hi)
        return out

    def _before(self) -> Whole:
        """Steps of the shared tiles before the one that is made."""
        return times(minus(self.w.block, self.tiles), Int(self.each))

    @property
    def worker(self) -> Whole:
        return self.w.let("worker", minus(plus(self.workers, Int(-1)), BLOCK))

    def _begin(self, worker: Whole) -> Whole:
        return plus(times(worker, self.length), least(worker, self.longer))

    @property
    def lo(self) -> Whole:
        return self.w.let("share_lo", self._begin(self.worker))

    @property
    def hi(self) -> Whole:
        return self.w.let("share_hi", self._begin(plus(self.worker, Int(1))))

    def walked(self, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        """The body for each tile of which the block has a share, of a step at least.

        Unless the compiler knows this, sums that no step made reach what reads them, and it puts wgmma in sequence (ptxas C7514).
        """
        end = plus(over(plus(self.hi, Int(-1)), Int(self.each)), Int(1))
        some = Do("emmy_assume", (below(*self.w.shares[self.w.nest[self.w.launch.tile.n_block_loops].axis]),))
        tile, first = self.w.block.name, over(self.lo, Int(self.each))
        body = (*self.w.tile_head, some, *body)
        if self.rounds == Int(0):
            return (For(tile, first, end, 1, body),)
        nth, shared = IntVar("nth"), plus(self.tiles, first)
        begins = LetInt(tile, plus(self.worker, times(nth, self.workers)))
        later = If(below(plus(self.rounds, Int(-1)), nth), (SetInt(tile, minus(plus(shared, nth), self.rounds)),))
        return (For(nth.name, Int(0), minus(plus(self.rounds, end), first), 1, (begins, later, *body)),)

    @property
    def _begun(self) -> Whole:
        """How far along the folded axis the block's share of the tile begins."""
        return self.w.shares[self.w.nest[self.w.launch.tile.n_block_loops].axis][0]

    @property
    def helps(self) -> Whole:
        return below(Int(0), self._begun)

    @property
    def owns(self) -> Whole:
        return same(self._begun, Int(0))

    def for_helpers(self, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        """The body for each later worker with a share of the tile: up to the one that has its last step.

        Step p is the worker's with number p / (length + 1) among those of the longer shares, (p - longer) / length behind.
        """
        last = plus(self._before(), Int(self.each - 1))
        behind = over(minus(last, self.longer), self.length)
        worker = IntOp("max", over(last, plus(self.length, Int(1))), behind)
        return (For("helper", plus(self.worker, Int(1)), plus(worker, Int(1)), 1, body),)

    # ------------------------------------------------------------ sums and flags
    def _flag(self, stage: str, worker: Whole) -> Ref:
        return Ref(flags_name(stage), worker)

    def raise_flag(self, stage: str) -> tuple[Stmt, ...]:
        return (If(same(THREAD, Int(0)), (Do("emmy_flag_raise", (self._flag(stage, self.worker),)),)),)

    def await_flag(self, stage: str) -> tuple[Stmt, ...]:
        return (If(same(THREAD, Int(0)), (Do("emmy_flag_await", (self._flag(stage, IntVar("helper")),)),)),)

    def lower_flag(self, stage: str) -> tuple[Stmt, ...]:
        return (If(same(THREAD, Int(0)), (Do("emmy_flag_lower", (self._flag(stage, IntVar("helper")),)),)),)

    def leave(self, stage: str, fold: Fold) -> tuple[Stmt, ...]:
        """This thread's sums to the worker's place."""
        sums, count = self._held(stage, fold)
        words, at, e = self.w.fresh("words"), counter("v", count // _WORDS), counter("e", _WORDS)
        word = Call("as_b32", (Load(sums, plus(times(at, Int(_WORDS)), e)),))
        store = Do(f"emmy_stg_b{32 * _WORDS}", (self._place(stage, self.worker, at, count), Ref(words, Int(0))))
        body = (Regs(words, "b32", _WORDS), *unrolled("e", _WORDS, (Store(words, e, word),)), store)
        return unrolled("v", count // _WORDS, body)

    def take(self, stage: str, fold: Fold) -> tuple[Stmt, ...]:
        """The helper's sums, added to this thread's."""
        sums, count = self._held(stage, fold)
        words, at, e = self.w.fresh("words"), counter("v", count // _WORDS), counter("e", _WORDS)
        load = Do(f"emmy_ldg_b{32 * _WORDS}", (Ref(words, Int(0)), self._place(stage, IntVar("helper"), at, count)))
        here = plus(times(at, Int(_WORDS)), e)
        more = Call("add", (Load(sums, here), Call("as_f32", (Load(words, e),))))
        body = (Regs(words, "b32", _WORDS), load, *unrolled("e", _WORDS, (Store(sums, here, more),)))
        return unrolled("v", count // _WORDS, body)

    def _held(self, stage: str, fold: Fold) -> tuple[str, int]:
        """(the registers of a thread's sums, how many they are)."""
        spread, sums = fold.spread()
        count = spread.width
        for _, n in (*spread.columns, *spread.rows):
            count *= n
        if count % _WORDS:
            raise self.w.cannot(f"a thread has {count} sums, which pass from block to block by {_WORDS}")
        return sums[stage].view, count

    def _place(self, stage: str, worker: Whole, vector: Whole, count: int) -> Ref:
        w = self.w
        mine = plus(times(worker, Int(count * w.threads)), times(w.thread(), Int(_WORDS)))
        return Ref(sums_name(stage), plus(mine, times(vector, Int(_WORDS * w.threads))))
