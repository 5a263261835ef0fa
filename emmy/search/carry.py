"""Schedules of one problem carried to another: the same moves where they mean the same, numbers as near as is legal there.

Names differ between problems: a product's sum is C in a matmul and Y behind a norm, its launch k0 or, after a cut, k1, its
weights B, or G and U side by side. What moves name is therefore compared by its part in the product that a launch makes.
What a schedule does not say, or says of something that is not there, is decided as in the default schedule. Knows no times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log2

from emmy.errors import EmmyError
from emmy.ir.beside import beside, operands
from emmy.ir.moves import Move, Site
from emmy.ir.moves.gpu_tiles import product_of
from emmy.ir.moves.split import Split
from emmy.ir.plan import Launch, Loop, Plan, naive
from emmy.ir.program import Program, swapped
from emmy.ir.schedule import apply_move, parse_schedule, replay
from emmy.ir.target import Target
from emmy.search.schedule_space import ScheduleSpace, TreeNode
from emmy.search.space import Point, Value
from emmy.search.walk import nearest

_MOST_NODES = 300  # visited for one schedule, going back included
Parts = Mapping[str, frozenset[str]]  # what a name stands for: the result of a product may also be its sum
Shape = tuple[frozenset[str], ...]  # a move without numbers: all that each of its words stands for


@dataclass(frozen=True, slots=True)
class _Wish:
    """A move of the schedule that is carried: where it stands there, and its numbers by field."""

    at: int
    shape: Shape
    numbers: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Walk:
    """A node, and the numbers wished for the open moves on the way to it, by their text."""

    node: TreeNode
    wished: tuple[tuple[str, Mapping[str, int]], ...] = ()


def carried(space: ScheduleSpace, program: Program, schedule: str, opening: Sequence[str] = ()) -> Point | None:
    """The point of `space` most like a schedule of `program`; None when none is found within some hundred nodes.

    opening: moves of the space's own problem that are taken before all others where they are legal
    """
    try:
        wishes = _wishes(program, parse_schedule(schedule), space.target)
    except EmmyError:
        return None
    stack: list[Iterator[_Walk]] = [iter([_Walk(space.root())])]
    for _ in range(_MOST_NODES):
        here = None
        while stack and (here := next(stack[-1], None)) is None:
            stack.pop()
        if here is None:
            return None
        if here.node.decision is None:
            return space.point(here.node)
        stack.append(_onward(space, here, wishes, opening))
    return None


def same_as(space: ScheduleSpace, schedule: str) -> Point | None:
    """The point that makes what a schedule of the space's problem makes, which may name its moves in another order.

    None when the tree does not reach it.
    """
    point = space.locate(schedule) or carried(space, space.program, schedule)
    if point is None or point.key == schedule:
        return point
    plan = replay(space.program, point.key, space.target)
    once = {f"{la.name}/split({x.axis},{x.level},{x.step})" for la in plan.launches for x in _once(plan, la)}
    return point if set(point.key.split()) - once == set(schedule.split()) - once else None


def _once(plan: Plan, la: Launch) -> Iterator[Loop]:
    """Loops of one iteration, with which a tile is as it is without."""
    return (x for i, x in enumerate(la.tile.nest) if plan.count(la.tile.nest, i) == 1)


def openings(space: ScheduleSpace, before: int) -> tuple[tuple[str, ...], ...]:
    """The ways to begin that the problem leaves no choice but to choose from: its mandatory moves of phases below `before`."""
    found, stack = dict[tuple[str, ...], None](), [space.root()]
    while stack:
        node = stack.pop()
        early = [s for s in space.sites(node) if s.move.phase < before and (s.mandatory or s.move.mandatory)]
        if not early:
            found[tuple(map(str, node.skeleton))] = None
        stack += [space.child(node, str(s.move)) for s in reversed(early)]
    return tuple(found)


# ---------------------------------------------------------------- one step on
def _onward(space: ScheduleSpace, here: _Walk, wishes: Sequence[_Wish], opening: Sequence[str]) -> Iterator[_Walk]:
    """The nodes behind this one, the most like the wishes first."""
    node = here.node
    assert node.decision is not None
    if node.closed:
        for value in _numbers(space, here):
            yield _Walk(space.child(node, value), here.wished)
        return
    names, parts = {str(s.move): s for s in space.sites(node)}, _parts(space.plan(node))
    found = {text: _of(site, parts, wishes) for text, site in names.items()}

    def rank(value: Value) -> tuple[float, ...]:
        site, wish = names.get(str(value)), found.get(str(value))
        if site is None:
            return (2, 0, 0)  # DONE
        if value in opening:
            return (0, site.move.phase, 0)
        if wish is None:
            return (1 if site.mandatory or site.move.mandatory else 3, 0, 0)
        return (0, site.move.phase, 0 if site.move.commutes else wish.at, _far(site, wish))

    for value in sorted(space.preferred(node), key=rank):  # stable: the rest as in the default schedule
        wish = found.get(str(value))
        wished = here.wished if wish is None else (*here.wished, (str(value), wish.numbers))
        yield _Walk(space.child(node, value, wish.numbers if wish else None), wished)


def _of(site: Site, parts: Parts, wishes: Sequence[_Wish]) -> _Wish | None:
    """The first wish that a site grants."""
    shape = _shape(site.move, parts)
    found = next((w for w in wishes if len(w.shape) == len(shape) and all(map(_meet, w.shape, shape))), None)
    shared = _sharing(site.move, parts)
    return found and replace(found, numbers={name: x // shared for name, x in found.numbers.items()})


def _far(site: Site, wish: _Wish) -> float:
    """How far the numbers that a site has or allows are from those wished for."""
    offered = dict(site.domains) | {name: (x,) for name, x in site.move.arguments if isinstance(x, int)}
    return sum(min(abs(log2((x + 1) / (wish.numbers.get(name, x) + 1))) for x in xs) for name, xs in offered.items())


def _meet(a: frozenset[str], b: frozenset[str]) -> bool:
    return bool(a & b)


def _numbers(space: ScheduleSpace, here: _Walk) -> list[Value]:
    """The values of a knob, nearest the wished one first."""
    d = here.node.decision
    assert d is not None
    for text, numbers in here.wished:
        for knob, number in numbers.items():
            if d.name in (text, f"{text} {knob}"):
                return nearest(d.values, number)
    return space.preferred(here.node)


# ---------------------------------------------------------------- what names stand for
def _wishes(program: Program, moves: Sequence[Move], target: Target) -> tuple[_Wish, ...]:
    """Raises IllegalMove where the schedule is none of `program`'s."""
    plan, out = naive(program), list[_Wish]()
    for i, move in enumerate(moves):
        parts = _parts(plan)
        numbers = {name: x * _sharing(move, parts) for name, x in move.arguments if isinstance(x, int)}
        out.append(_Wish(i, _shape(move, parts), numbers))
        plan = apply_move(plan, move, target, i)
    return tuple(out)


def _shape(move: Move, parts: Parts) -> Shape:
    words = (move.name, move.launch, move.work, *(x for _, x in move.arguments))
    return tuple(parts.get(x, frozenset({x})) if isinstance(x, str) else frozenset({""}) for x in words)


def _sharing(move: Move, parts: Parts) -> int:
    """Among how many sums that are folded side by side the columns of a loop are shared."""
    columns = isinstance(move, Split) and "own 0" in parts.get(move.axis, ())
    return sum("sum" in names for names in parts.values()) if columns else 1


def _parts(plan: Plan) -> Parts:
    """What launches, stages, values and axes of a plan are to the product that it makes; {} where it makes none."""
    found = next(((la, s) for la in plan.launches if (s := product_of(plan, la))), None)
    if found is None:
        return {}
    la, s = found
    out = dict[str, set[str]]()

    def call(name: str, names: Iterable[str]) -> None:
        for x in names:
            out.setdefault(x, set()).add(name)

    for i, a in enumerate(reversed(s.axes)):
        call(f"own {i}", (a,))
    for i, a in enumerate(reversed(s.folded)):
        call(f"folded {i}", (a,))
    together = beside(plan.program, la.tile, s.out)
    first, second = operands(plan.program, together)[:: -1 if swapped(s) else 1]
    call("first operand", first)
    call("second operand", second)
    call("sum", together)
    call("result", [w.stage for w in la.tile.works if plan.program.stage(w.stage).axes == s.axes][-1:])
    place = plan.launches.index(la)
    for i, x in enumerate(plan.launches):
        combines = any(w.combine and w.stage in together for w in x.tile.works)
        call("combining" if combines else f"launch {i - place}", (x.name,))
    return {x: frozenset(names) for x, names in out.items()}
