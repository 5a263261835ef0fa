"""A lane's elements of a row of A for the direct atom: what is loaded of them, what is made of that, what is summed of it beside.

A lane has 8 elements along k of one row in each step. They are A's own, or those of values that A is made of; then A's are
made in f32 and rounded to its dtype. Sums of rows take the elements on the way; lanes of a row, then warps, join theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from emmy.codegen.cuda_scope import Walk
from emmy.codegen.cuda_statistic import Statistic
from emmy.codegen.cuda_values import Chain, Spread
from emmy.codegen.cuda_vector import packed, unpacked
from emmy.codegen.kernel import Int, Whole, least, plus, times
from emmy.codegen.kernel_gpu import Ref, Regs, Stmt, shifted
from emmy.codegen.steps import Compute
from emmy.ir.expr import Read
from emmy.ir.gpu import sharers, statistic_bytes
from emmy.ir.on_the_way import made_here, rides, row_values
from emmy.ir.program import Stage, read

ELEMENTS = 8  # of a lane in a step
WORDS = ELEMENTS // 2
_LANES = (1, 2)  # bits in which lanes of one row differ


@dataclass(slots=True)
class SumOfRows(Statistic):
    """A sum of what a product's lanes have of its rows: taken where they make the product's operand."""

    def compute(self) -> tuple[Stmt, ...]:
        return ()


@dataclass(slots=True)
class Rows:
    """The rows of a product whose first factor is `a`.

    made:  the stage that makes A on the way; None when it is loaded as it is
    loads: values whose elements are loaded, 16 bytes a step each
    sums:  sums of rows, by stage
    """

    w: Walk
    a: str
    made: Stage | None
    loads: tuple[str, ...]
    m: str
    k: str
    sums: dict[str, SumOfRows] = field(default_factory=dict)
    once: dict[Read, Ref] = field(default_factory=dict)  # numbers of the row itself, once loaded

    def held(self, value: str) -> str:
        return f"{value}_held"

    def regs(self, slots: int) -> Iterator[Stmt]:
        return (Regs(self.held(v), "b32", slots * WORDS) for v in self.loads)

    @property
    def place(self) -> Whole:
        """The row of a lane, of those that the tile has place for."""
        return plus(self.w.scope[self.m].lo, shifted(self.w.lane(), 2))

    @property
    def row(self) -> Whole:
        """The same, or the last one that exists."""
        piece = self.w.scope[self.m]
        return self.place if piece.full else least(self.place, plus(piece.end, Int(-1)))

    def spread(self, row: Whole) -> Spread:
        """What a lane has of that row in a step."""
        spot = {self.m: row, self.k: Int(0)}
        return Spread((self.m, self.k), (), (), spot, ELEMENTS, Int(1), None, _LANES)

    def begin(self) -> tuple[Stmt, ...]:
        """Numbers that all elements of the row share."""
        if self.made is None:
            return ()
        chain, out = Chain(self.w, (Compute(self.made.out),)), list[Stmt]()
        for r in chain.unheld((self.m,)):
            out += chain.load(r, self.spread(self.row))
        self.once = dict(chain.held)
        return tuple(out)

    def operand(self, slot: Whole) -> tuple[tuple[Stmt, ...], Ref]:
        """(what makes A's words of a slot, where they begin)."""
        first = times(slot, Int(WORDS))
        if self.made is None and not self.sums:
            return (), Ref(self.held(self.a), first)
        p, out = self.w.plan.program, list[Stmt]()
        steps = (*((self.made.out,) if self.made else ()), *self.sums)
        chain = Chain(self.w, tuple(map(Compute, steps)), dict(self.once), statistics=dict(self.sums))
        for v in self.loads:
            name = self.w.fresh(f"{v}_here")
            chain.held[read(p.value(v))] = Ref(name, Int(0))
            out += [
                Regs(name, "f32", ELEMENTS),
                *unpacked(Ref(name, Int(0)), p.value(v).dtype, ELEMENTS, Ref(self.held(v), first)),
            ]
        out += chain.make(self.spread(self.row), {})
        if self.made is None:
            return tuple(out), Ref(self.held(self.a), first)
        words = self.w.fresh(f"{self.a}_words")
        out += [
            Regs(words, "b32", WORDS),
            *packed(Ref(words, Int(0)), p.value(self.a).dtype, ELEMENTS, chain.held[read(p.value(self.a))]),
        ]
        return tuple(out), Ref(words, Int(0))


def rows(w: Walk, stage: Stage, a: str) -> Rows:
    """The rows of a product whose first factor is `a`."""
    made = next(iter(made_here(w.plan, w.launch, stage)), None)
    m, k = stage.axes[-2], stage.folded[-1]
    found = Rows(w, a, made, row_values(w.plan, w.launch, stage), m, k)
    for x in rides(w.plan, w.launch, stage):
        base = w.allocate(statistic_bytes(w.plan, w.launch.tile, x))
        found.sums[x.out] = SumOfRows(w, x, found.spread(found.place), sharers(w.plan, w.nest, x), base)
    return found
