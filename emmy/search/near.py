"""Which problems are near one, and what of their winners is worth trying on it. Knows no device and no strategy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log2, prod

from emmy.errors import UsageError
from emmy.ir.beside import groups
from emmy.ir.expr import Read, factors
from emmy.ir.moves.splitk import SplitK
from emmy.ir.moves.swap import Swap
from emmy.ir.ops import Op, parse_op
from emmy.ir.plan import Work
from emmy.ir.program import SUM, Program, Stage, upper
from emmy.ir.schedule import parse_schedule
from emmy.search.carry import carried, openings
from emmy.search.schedule_space import ScheduleSpace
from emmy.search.space import Point

_OTHER_DTYPE, _OTHER_STAGES, _OTHER_LAYOUT, _OTHER_KIND = 2.0, 1.0, 1.0, 0.5  # as many octaves of a size


def near_winners(op: Op, winners: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Those (op, schedule) of other problems whose schedules may carry over to this one, the nearest first."""
    near = sorted((d, s, other) for other, s in winners if (d := distance(op, other)) is not None)
    return tuple((other, s) for _, s, other in near)


def carried_winners(space: ScheduleSpace, winners: Sequence[tuple[str, str]]) -> Iterator[tuple[str, Point]]:
    """(op, the point of `space` most like its schedule) of near problems, each point once, the nearest first.

    A problem of another kind says nothing of how this one begins: its schedule is tried behind each way there is, first
    behind that of the default schedule.
    """
    found = set[str]()
    ways: list[tuple[str, ...]] | None = None
    for other, schedule in near_winners(space.op, winners):
        op = parse_op(other)
        if op.kind != space.op.kind and ways is None:
            plain = (m for m in parse_schedule(space.default().key) if m.phase < SplitK.phase and m.name != Swap.name)
            ways = list(dict.fromkeys((tuple(map(str, plain)), *openings(space, SplitK.phase))))
        for opening in ((),) if op.kind == space.op.kind or ways is None else ways:
            point = carried(space, op.program(), schedule, opening)
            if point is not None and point.key not in found:
                found.add(point.key)
                yield other, point


def distance(op: Op, other_key: str) -> float | None:
    """How far another problem is: the sum of |log2| of the ratios of its sizes; None when its schedules do not carry over.

    Those of problems that make one product each do, of whatever kind: a tile's columns count once for each of the sums that
    it folds side by side.
    """
    try:
        other = parse_op(other_key)
    except UsageError:
        return None
    a, b = op.program(), other.program()
    if other.key == op.key:
        return None
    ours, theirs = _products(a), _products(b)
    apart = _OTHER_DTYPE * (a.dtype != b.dtype)
    if op.kind == other.kind:
        apart += _OTHER_STAGES * (len(a.stages) != len(b.stages))
    elif len(ours) == len(theirs) == 1:
        apart += _OTHER_KIND
    else:
        return None
    if ours and theirs:
        sizes = zip(_sizes(a, ours[-1]), _sizes(b, theirs[-1]), strict=True)
        apart += _OTHER_LAYOUT * (_layout(ours[-1][0]) != _layout(theirs[-1][0]))
    elif [x for x, _ in a.dims] == [x for x, _ in b.dims] and not ours and not theirs:
        sizes = zip((upper(x) for _, x in a.dims), (upper(x) for _, x in b.dims), strict=True)
    else:
        return None
    return apart + sum(abs(log2(x / y)) for x, y in sizes)


def _products(p: Program) -> tuple[tuple[Stage, ...], ...]:
    """The products that a program makes, those that a tile folds side by side together."""
    return tuple(
        tuple(p.stage(w.stage) for w in group)
        for group in groups(p, (Work(s.out) for s in p.stages))
        if _is_product(p.stage(group[0].stage))
    )


def _is_product(s: Stage) -> bool:
    reads = [f for f in factors(s.body) if isinstance(f, Read)]
    return s.monoid == SUM and len(s.axes) > 1 and len({f.index for f in reads}) > 1


def _sizes(p: Program, product: tuple[Stage, ...]) -> tuple[int, ...]:
    """Matrices, rows, columns and folded elements of a product."""
    s = product[0]
    *batch, m, n = (upper(p.dim(a)) for a in s.axes)
    return (prod(batch), m, n * len(product), prod(upper(p.dim(a)) for a in s.folded))


def _layout(s: Stage) -> tuple[bool, ...]:
    """Of each factor, whether it is contiguous along what is folded."""
    return tuple(f.index[-1] in s.folded for f in factors(s.body) if isinstance(f, Read))
