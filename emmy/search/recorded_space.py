"""A recorded table as a search space: a trie of its parameters, and the times to look up. Must not let times into the tree.

Only configurations that ran are points, as in the published comparisons of search strategies; parameters with one value are
left out. Nothing a strategy can see (order of decisions, default, features) is derived from the times.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emmy.errors import UsageError
from emmy.search.space import Decision, Node, Point, Trial, Value
from emmy.workloads import recorded

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Prefix:
    """A node: the rows [first, last) of the sorted table share these choices."""

    key: str
    choices: tuple[tuple[str, Value], ...]
    decision: Decision | None
    first: int
    last: int


class RecordedSpace:
    """Points are rows of a table; `key` is `parameter=value ...`. Decisions with fewer values come first.

    parameters   names of the columns of `values`
    values       int64 [n, len(parameters)]
    time_us      float64 [n]; NaN = the configuration failed, and is no point of the space
    """

    def __init__(self, name: str, parameters: Sequence[str], values: NDArray[np.int64], time_us: Floats) -> None:
        """Raises UsageError when no configuration ran, none differs from another, or two are the same."""
        ran = np.isfinite(time_us)
        rows = values[ran]
        counts = [len(np.unique(column)) for column in rows.T]
        order = sorted((j for j, c in enumerate(counts) if c > 1), key=lambda j: (counts[j], j))
        if not order:
            raise UsageError(f"recorded space {name}: no parameter has two values among the {len(rows)} valid rows")
        rows = rows[:, order]
        by_choice = np.lexsort(rows.T[::-1])
        self.name = name
        self._names = tuple(parameters[j] for j in order)
        self._rows = rows[by_choice]
        self._times = time_us[ran][by_choice]
        if (np.diff(self._rows, axis=0) == 0).all(axis=1).any():
            raise UsageError(f"recorded space {name}: two rows have the same parameters")
        self._decisions = tuple(
            Decision(n, tuple(int(v) for v in np.unique(c))) for n, c in zip(self._names, self._rows.T, strict=True)
        )
        self._points: dict[int, Point] = {}
        self._below: dict[tuple[int, int, int], Node] = {}
        self._columns, self._features = _features(self._names, self._rows)
        self._row_of = {self._text(self._rows[i]): i for i in range(len(self._rows))}

    # ------------------------------------------------------------ the tree
    def root(self) -> Node:
        return self._node((), 0, len(self._rows))

    def child(self, node: Node, value: Value) -> Node:
        assert isinstance(node, _Prefix)
        depth = len(node.choices)
        assert not isinstance(value, str)
        at = (depth, node.first, int(value))
        if at not in self._below:
            column = self._rows[node.first : node.last, depth]
            lo, hi = np.searchsorted(column, value, "left"), np.searchsorted(column, value, "right")
            choices = (*node.choices, (self._names[depth], value))
            self._below[at] = self._node(choices, node.first + int(lo), node.first + int(hi))
        return self._below[at]

    def _node(self, choices: tuple[tuple[str, Value], ...], first: int, last: int) -> _Prefix:
        depth = len(choices)
        decision = None
        if depth < len(self._names):
            values = tuple(int(v) for v in np.unique(self._rows[first:last, depth]))
            decision = Decision(self._names[depth], values)
        return _Prefix(" ".join(f"{n}={v}" for n, v in choices), choices, decision, first, last)

    def point(self, leaf: Node) -> Point:
        assert isinstance(leaf, _Prefix) and leaf.decision is None
        return self._point(leaf.first)

    def _point(self, row: int) -> Point:
        if row not in self._points:
            values = (int(v) for v in self._rows[row])
            self._points[row] = Point(self._text(self._rows[row]), tuple(zip(self._names, values, strict=True)))
        return self._points[row]

    def _text(self, row: NDArray[np.int64]) -> str:
        return " ".join(f"{n}={v}" for n, v in zip(self._names, row, strict=True))

    # ------------------------------------------------------------ the space as a whole
    def domains(self) -> tuple[Decision, ...]:
        return self._decisions

    def size(self, limit: int) -> int | None:
        return len(self._rows) if len(self._rows) <= limit else None

    def points(self) -> Iterator[Point]:
        return (self._point(i) for i in range(len(self._rows)))

    def sample(self, rng: random.Random) -> Point:
        """Uniform over the points."""
        return self._point(rng.randrange(len(self._rows)))

    def default(self) -> Point:
        """The point whose parameters are nearest the middle of their domains, the first in tree order among equals."""
        place = np.stack([np.unique(c, return_inverse=True)[1] / (len(np.unique(c)) - 1) for c in self._rows.T])
        return self._point(int(np.abs(place - 0.5).sum(axis=0).argmin()))

    @property
    def feature_names(self) -> tuple[str, ...]:
        return self._columns

    def features(self, points: Sequence[Point]) -> Floats:
        """A column a parameter (its log2 where all values are positive), and one more where factors of two vary by themselves."""
        return self._features[[self._row_of[p.key] for p in points]]

    # ------------------------------------------------------------ what the strategies do not see
    @property
    def times_us(self) -> Floats:
        """Times of `points()`, in their order."""
        return self._times

    def trial(self, point: Point) -> Trial:
        """The recorded outcome of a point: the measurement, without a device."""
        return Trial(point, float(self._times[self._row_of[point.key]]))


def _features(names: Sequence[str], rows: NDArray[np.int64]) -> tuple[tuple[str, ...], Floats]:
    """Names and columns. The exponent of two in a value is what vector widths, banks and warps see of it: 48 -> 4, 50 -> 1."""
    columns: dict[str, Floats] = {}
    for name, column in zip(names, rows.T, strict=True):
        if column.min() <= 0:
            columns[name] = column.astype(np.float64)
            continue
        columns[f"log2 {name}"] = np.log2(column)
        twos = np.log2(column & -column)
        if len(np.unique(column)) > 2 and (columns[f"log2 {name}"] != twos).any():
            columns[f"twos {name}"] = twos
    return tuple(columns), np.stack(list(columns.values()), axis=1)


def load_recorded(name: str) -> RecordedSpace:
    """The shipped space of that name (`gemm.rtx3090`), or that of a file. Raises as `recorded.load` does."""
    table = recorded.load(name)
    return RecordedSpace(name, table.parameters, table.values, table.time_ms * 1000.0)
