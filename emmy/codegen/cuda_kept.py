"""What a lift reads of each element: kept in registers as the atom that made it leaves its sums, masks applied. Knows no lift."""

from __future__ import annotations

from math import prod

from emmy.codegen.cuda_atoms import Contraction
from emmy.codegen.cuda_scope import Walk
from emmy.codegen.cuda_values import Chain, Spread
from emmy.codegen.kernel import Given, Int, Load, Num, Store, Whole, below, over, plus, same
from emmy.codegen.kernel_gpu import If, Regs, Stmt, counter, unrolled
from emmy.codegen.steps import Compute
from emmy.ir.expr import Read
from emmy.ir.masks import Place, compared, layers
from emmy.ir.plan import AGENTS

_ABSENT = -3e38  # in place of an element that does not exist: below every maximum


def keep(w: Walk, chain: Chain, fold: Contraction, value: str, to: str, folded: str) -> tuple[Stmt, ...]:
    """The chain's last value in the registers `to`, its own or those of the sums it is made of, masked where the mask hides any."""
    if fold.n != folded:
        raise w.cannot(f"{value} lies along {fold.n} in registers, a lift folds it along {folded}")
    spread, sums_at = fold.spread()
    stage, first = w.plan.program.stage(value), w.plan.program.stage(chain.steps[0].stage)
    assert first.monoid is not None
    sums, e = sums_at[first.out], counter("e", spread.width)
    place = plus(sums.at, e)
    inner, masks = layers(w.plan.program, stage.body)
    made = Chain(w, tuple(s for s in chain.steps if s != Compute(value)))
    body: list[Stmt] = [*made.make(spread, {first.out: {c: sums for c, _ in first.monoid.state}})]
    if Compute(value) in chain.steps:
        body += made.made(stage, inner, spread)
    here = made.held[Read(value, stage.axes)]
    if (here.view, here.at) != (to, sums.at):
        body += unrolled("e", spread.width, (Store(to, place, Load(here.view, plus(here.at, e))),))
    own = (Regs(to, "f32", prod(n for _, n in (*spread.rows, *spread.columns)) * spread.width),)
    ends = {"": (Int(0), Int(0))} | {a: _ends(w, fold, a) for a in stage.axes[-2:]}

    def at(place: Place, along: Whole) -> Whole:
        return plus(over(along, Int(place.over)), w.index(place.read) if place.read else Int(0))

    def element(place: Place) -> Whole:
        if not place.axis:
            return at(place, Int(0))
        spot = spread.spot[place.axis]
        return at(place, plus(spot, e) if place.axis == spread.axes[-1] else spot)

    def hidden(some: Whole, shown: Whole, otherwise: float) -> Stmt:
        """Where `some` elements are hidden, another number for each that is not shown."""
        number = Given(shown, Load(to, place), Num(otherwise))
        return If(some, _everywhere(spread, unrolled("e", spread.width, (Store(to, place, number),))))

    out = [*(own if to != sums.view else ()), *_everywhere(spread, tuple(body))]
    for cond, otherwise in masks:
        found = compared(cond)
        assert found is not None
        x, y, offset = found
        if x.axis not in ends or y.axis not in ends:
            raise w.cannot(f"{value} is masked along {x.axis} and {y.axis}, an atom has {', '.join(ends)}")
        clear = below(at(x, ends[x.axis][1]), plus(at(y, ends[y.axis][0]), Int(offset + 1)))
        out.append(hidden(same(clear, Int(0)), below(element(x), plus(element(y), Int(offset + 1))), otherwise))
    if not w.scope[folded].full:
        end = w.scope[folded].end
        out.append(hidden(below(plus(end, Int(-1)), ends[folded][1]), below(element(Place(folded)), end), _ABSENT))
    return tuple(out)


def _ends(w: Walk, fold: Contraction, axis: str) -> tuple[Whole, Whole]:
    """The first and the last position of a warp's block along an axis."""
    size = w.plan.extent(tuple(x for x in w.nest if x.level in ("grid", "cluster", "serial", *AGENTS)), axis)
    first = plus(w.scope[axis].lo, w.warp_offset(axis))
    return first, plus(first, Int(size - 1))


def _everywhere(spread: Spread, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    for var, count in reversed((*spread.columns, *spread.rows)):
        body = unrolled(var, count, body)
    return body
