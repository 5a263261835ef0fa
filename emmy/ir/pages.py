"""Views whose rows lie in pages: so many follow one another in memory, and a number says where the next ones are. Knows no code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from emmy.ir.expr import Apply, Axis, Const, Expr, Read
from emmy.ir.gpu import block_axes
from emmy.ir.plan import Channel, Plan, Tile


@dataclass(frozen=True, slots=True)
class Paged:
    """Rows of a view's blocks follow one another in memory, `rows` of them at a time, along `axis` of the input it shows."""

    axis: str
    rows: int


def paged(plan: Plan, tile: Tile, c: Channel) -> Paged | None:
    """Pages of what a channel brings of a view, of which no loop cuts any; None where its rows do not lie so, or it is none.

    Positions are row % page along one axis, and depend on row // page alone along others.
    """
    view = plan.program.view(c.value)
    if view is None or not isinstance(view.body, Read):
        return None
    row, _ = block_axes(plan, tile, c)
    along = [(a, x) for a, x in zip(plan.program.value(view.body.value).axes, view.body.along, strict=True)]
    inside = [(a, x) for a, x in along if isinstance(x, Apply) and x.fn == "mod" and x.args[0] == Axis(row)]
    if len(inside) != 1 or not isinstance(by := inside[0][1].args[1], Const):
        return None
    page = Apply("floordiv", (Axis(row), by))
    loose = (x for a, x in along if a != inside[0][0] for y in _leaves(x, page) if y == Axis(row))
    if any(x == row for _, x in along) or next(loose, None) is not None:
        return None
    steps = (x.step for x in tile.nest[: c.at + 1] if x.axis == row)
    return Paged(inside[0][0], gcd(int(by.value), plan.extent(tile.nest[: c.at + 1], row), *steps))


def _leaves(x: str | Expr, but: Expr) -> Iterator[Expr]:
    """What an expression is made of, without what is in one."""
    if isinstance(x, str) or x == but:
        return
    yield x
    for part in x.args if isinstance(x, Apply) else x.computed if isinstance(x, Read) else ():
        yield from _leaves(part, but)
