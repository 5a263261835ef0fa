"""Ways down a space's tree: every leaf, a leaf like a wanted one, a leaf a little different. Knows no times.

All of them survive dead ends: they go back and take the next best value.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from emmy.search.space import Decision, Node, Point, Space, Value

Choices = Sequence[tuple[str, Value]]
Order = Callable[[Decision, int], Iterable[Value]]  # the values to try, best first, at this decision and depth

_MOST_NODES = 400  # visited on one way down, going back included
_RANDOM, _NEIGHBOURS = 4, 12  # of `around`, a proposal


def leaves(space: Space, rng: random.Random) -> Iterator[Point]:
    """Every point, depth first with branches in random order; one that several paths lead to comes several times."""
    stack = [iter([space.root()])]
    while stack:
        node = next(stack[-1], None)
        if node is None:
            stack.pop()
        elif node.decision is None:
            yield space.point(node)
        else:
            values = node.decision.values
            stack.append(_children(space, node, rng.sample(values, len(values))))


def descend(space: Space, order: Order, start: Node | None = None) -> Point | None:
    """The first leaf below `start` (default: the root) when each decision's values are tried in that order.

    None when none is found within a few hundred nodes: the walk is meant for spaces whose dead ends are rare.
    """
    top = space.root() if start is None else start
    stack = [iter([top])]
    for _ in range(_MOST_NODES):
        while stack:
            node = next(stack[-1], None)
            if node is not None:
                break
            stack.pop()
        if not stack or node is None:
            return None
        if node.decision is None:
            return space.point(node)
        stack.append(_children(space, node, order(node.decision, len(node.choices))))
    return None


def around(space: Space, rng: random.Random, elite: Sequence[Point], n: int) -> list[Point]:
    """Candidates for n proposals: random points, and neighbours of the elite, one or two decisions away."""
    found = [space.sample(rng) for _ in range(n * _RANDOM)]
    if elite:
        orders = (varied(rng.choice(elite), rng, 1 + i % 2, 0.3) for i in range(n * _NEIGHBOURS))
        found += [p for p in (descend(space, o) for o in orders) if p is not None]
    return found


def _children(space: Space, node: Node, values: Iterable[Value]) -> Iterator[Node]:
    return (space.child(node, v) for v in values)


def at_random(rng: random.Random) -> Order:
    """Values in random order."""
    return lambda d, _: rng.sample(d.values, len(d.values))


def toward(wanted: Choices, rng: random.Random) -> Order:
    """Values nearest the wanted ones first: illegal wishes are repaired to the nearest legal value along the way.

    A decision is recognised by its name. Decisions whose names differ only in a closing number ("move 2", "move 3") are
    places in one sequence: there the wanted values that are still to come are tried in their order.
    """
    by_name = dict(wanted)
    series: dict[str, list[Value]] = {}
    for name, value in wanted:
        series.setdefault(_stem(name), []).append(value)
    taken: set[tuple[str, Value]] = set()

    def order(d: Decision, _: int) -> Iterable[Value]:
        wish = by_name.get(d.name)
        if d.ordered:
            return nearest(d.values, wish) if wish is not None else rng.sample(d.values, len(d.values))
        stem = _stem(d.name)
        legal = set(d.values)
        to_come = [v for v in series.get(stem, ()) if v in legal and (stem, v) not in taken]
        rest = [v for v in d.values if v not in to_come]
        ranked = [*to_come, *rng.sample(rest, len(rest))]
        if wish in legal and d.name == stem:
            ranked.sort(key=lambda v: v != wish)
        taken.add((stem, ranked[0])) if ranked else None
        return ranked

    return order


def varied(point: Point, rng: random.Random, changes: int, reach: float) -> Order:
    """Like `toward` the point, but `changes` of its decisions take another value.

    Ordered values move by one step, or further with probability `reach` each step; unordered ones are redrawn.
    """
    depth = len(point.choices)
    at = set(rng.sample(range(depth), min(changes, depth)))
    keep = toward(point.choices, rng)
    by_name = point.as_dict()

    def order(d: Decision, i: int) -> Iterable[Value]:
        ranked = list(keep(d, i))
        if i not in at or len(ranked) < 2:
            return ranked
        if not d.ordered:
            other = rng.choice(ranked[1:])
        else:
            other = _step(d.values, by_name.get(d.name, ranked[0]), rng, reach)
        return [other, *(v for v in ranked if v != other)]

    return order


def _step(values: tuple[Value, ...], here: Value, rng: random.Random, reach: float) -> Value:
    """Another of the values, a geometric number of steps up or down from `here`; turns round at the ends."""
    i = values.index(nearest(values, here)[0])
    far = 1
    while rng.random() < reach:
        far += 1
    up = rng.random() < 0.5
    j = i + far if up else i - far
    if not 0 <= j < len(values):
        j = i - far if up else i + far
    j = min(max(j, 0), len(values) - 1)
    return values[j] if j != i else values[i - 1 if i else i + 1]


def nearest(values: Sequence[Value], wish: Value) -> list[Value]:
    """The values by distance from `wish`: of logarithms where both are positive numbers, else of numbers; then as given."""

    def apart(v: Value) -> float:
        if v == wish:
            return -1.0
        if isinstance(v, str) or isinstance(wish, str):
            return math.inf
        return abs(math.log2(v / wish)) if v > 0 and wish > 0 else abs(v - wish)

    return sorted(values, key=apart)


def _stem(name: str) -> str:
    return re.sub(r"\s*\d+$", "", name)
