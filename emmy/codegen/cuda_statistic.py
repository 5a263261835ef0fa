"""Statistics of rows: folds of elements that are in registers anyway, on their way to memory.

A thread folds what it holds of each row, lanes that hold other elements of the row join theirs by shuffles, and warps that do
meet in shared memory. What is left is one state for each row of the block. It waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from emmy.codegen.cuda_atoms import Fold
from emmy.codegen.cuda_copy import only
from emmy.codegen.cuda_scope import Walk
from emmy.codegen.cuda_values import Folds, Spread, over_states
from emmy.codegen.kernel import Call, Int, Load, Num, Number, Store, Whole, both, minus, over, plus, same, times
from emmy.codegen.kernel_gpu import SMEM, Do, Ref, Regs, Stmt, bits, counter, unrolled
from emmy.ir.gpu import sharers, statistic_bytes
from emmy.ir.plan import AGENTS
from emmy.ir.program import Stage


@dataclass(slots=True)
class Statistic(Fold):
    """A stage that folds the last axis of elements which are dealt to threads as `elements` says.

    parts: warps, or groups of them, of which each has other elements of a row; base: first byte of the states they share
    """

    w: Walk
    stage: Stage
    elements: Spread
    parts: int
    base: int = 0

    @property
    def shared(self) -> bool:  # type: ignore[override]
        return self.parts > 1

    @property
    def widest(self) -> int:  # type: ignore[override]
        return 1  # there are few rows, and many threads

    @property
    def states(self) -> str:
        return f"{self.stage.out}_states"

    def _combined(self, a: Number, b: Number) -> Number:
        assert self.stage.monoid is not None
        return over_states(self.stage.monoid.combine[0], {"a_x": a, "b_x": b})

    @property
    def _row(self) -> Whole:
        """The state's number among a thread's, inside the loops over its rows."""
        at: Whole = Int(0)
        for var, n in self.elements.rows:
            at = plus(times(at, Int(n)), counter(var, n))
        return at

    def _rows(self, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        for var, n in reversed(self.elements.rows):
            body = unrolled(var, n, body)
        return body

    def open(self) -> tuple[Stmt, ...]:
        assert self.stage.monoid is not None
        count = prod(n for _, n in self.elements.rows)
        nothing = Store(self.states, counter("e", count), Num(self.stage.monoid.identity[0]))
        return (Regs(self.states, "f32", count), *unrolled("e", count, (nothing,)))

    def take(self, element: Number) -> Stmt:
        """One more element of the row at hand."""
        return Store(self.states, self._row, self._combined(Load(self.states, self._row), element))

    def compute(self) -> tuple[Stmt, ...]:
        raise self.w.cannot(f"{self.stage.out} folds elements where they are made")

    def preload(self) -> tuple[Stmt, ...]:
        raise self.w.cannot(f"{self.stage.out} reads no operands from memory")

    def close(self) -> tuple[Stmt, ...]:
        """Lanes of a row join their states: all of them have it then."""
        mine = Load(self.states, self._row)
        joined = (
            Store(self.states, self._row, self._combined(mine, Call(f"across<{bit}>", (mine,))))
            for bit in self.elements.across
        )
        return self._rows(tuple(joined))

    @property
    def _first(self) -> Whole:
        """Whether a lane speaks for those that have other elements of its rows."""
        others = sum(self.elements.across)
        return same(bits(self.w.lane(), others), Int(0)) if others else Int(1)

    def spread(self) -> tuple[Spread, Mapping[str, Ref]]:
        spot = {a: self.elements.spot[a] for a in self.stage.axes}
        exists = both(self.elements.exists, self._first)
        return Spread(self.stage.axes, (), self.elements.rows, spot, 1, exists), {
            self.stage.out: Ref(self.states, self._row)
        }

    # ------------------------------------------------------------ warps with other columns
    def _place(self, part: Whole, spot: Mapping[str, Whole]) -> Ref:
        """A row's state of a part, in shared memory."""
        at = part
        for a in self.stage.axes:
            piece = self.w.scope[a]
            at = plus(times(at, Int(piece.size)), minus(spot[a], piece.lo))
        return Ref(SMEM, plus(times(at, Int(4)), Int(self.base)))

    def share(self) -> tuple[Stmt, ...]:
        if not self.shared:
            return ()
        (axis,), word = self.stage.folded, self.w.fresh("word")
        step = next(x.step for x in self.w.nest if x.level in AGENTS and x.axis == axis)
        part = self.w.let(f"part_of_{axis}", over(self.w.warp_offset(axis), Int(step)))
        give = (
            Regs(word, "b32", 1),
            Store(word, Int(0), Call("as_b32", (Load(self.states, self._row),))),
            Do("emmy_sts_b32", (self._place(part, self.elements.spot), Ref(word, Int(0)))),
        )
        return (*self.close(), *only(self._first, self._rows(give)))

    def gathered(self) -> Folds:
        assert self.stage.monoid is not None
        component, identity = self.stage.monoid.state[0][0], self.stage.monoid.identity[0]

        def make(w: Walk, spread: Spread) -> tuple[tuple[Stmt, ...], Mapping[str, str]]:
            name, words, part = w.fresh(f"{self.stage.out}_all"), w.fresh("words"), counter("part_no", self.parts)
            load = Do("emmy_lds_b32", (Ref(words, part), self._place(part, spread.spot)))
            more = self._combined(Load(name, Int(0)), Call("as_f32", (Load(words, part),)))
            return (
                Regs(words, "b32", self.parts),
                *unrolled("part_no", self.parts, (load,)),
                Regs(name, "f32", 1),
                Store(name, Int(0), Num(identity)),
                *unrolled("part_no", self.parts, (Store(name, Int(0), more),)),
            ), {component: name}

        return {self.stage.out: make}


def statistic(w: Walk, stage: Stage, elements: Spread, *, whole: bool) -> Statistic:
    """The fold of a row of elements. `whole`: a warp has all of the block's elements of its rows."""
    parts = 1 if whole else sharers(w.plan, w.nest, stage)
    base = w.allocate(statistic_bytes(w.plan, w.launch.tile, stage)) if parts > 1 else 0
    return Statistic(w, stage, elements, parts, base)
