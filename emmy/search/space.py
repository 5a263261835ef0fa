"""What a strategy may know of a search space: a tree of named decisions with points as leaves. No ops, no devices.

Two spaces implement it: `ScheduleSpace` (moves and knobs of an op on a target) and `RecordedSpace` (a measured table).
A strategy that works on one works on the other, so strategies are compared offline on recorded spaces.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Value = int | float | str


@dataclass(frozen=True, slots=True)
class Decision:
    """One choice on the way to a point. `ordered`: neighbouring values behave alike (a tile size, not a layout)."""

    name: str
    values: tuple[Value, ...]
    ordered: bool = True


@dataclass(frozen=True, slots=True)
class Point:
    """A complete choice. `key` identifies it (a schedule's text); `choices` are (decision, value) in tree order."""

    key: str
    choices: tuple[tuple[str, Value], ...]

    def as_dict(self) -> dict[str, Value]:
        return dict(self.choices)


class Node(Protocol):
    """A partial choice. Equal `key` means the same subtree (transposition), whatever path led there."""

    @property
    def key(self) -> str: ...

    @property
    def choices(self) -> tuple[tuple[str, Value], ...]: ...

    @property
    def decision(self) -> Decision | None:
        """The next choice with its legal values only; None at a leaf, () values at a dead end."""
        ...


class Space(Protocol):
    """A finite space of points below a tree of decisions."""

    @property
    def name(self) -> str: ...

    def root(self) -> Node: ...

    def child(self, node: Node, value: Value) -> Node:
        """The node after choosing `value` at `node.decision`."""
        ...

    def point(self, leaf: Node) -> Point: ...

    def domains(self) -> tuple[Decision, ...]:
        """Every decision that can occur, with the union of its values: the flattened space, for Optuna."""
        ...

    def size(self, limit: int) -> int | None:
        """Number of points, or None when it exceeds `limit` or is not known."""
        ...

    def points(self) -> Iterator[Point]:
        """All points; only called when `size` gave a number."""
        ...

    def sample(self, rng: random.Random) -> Point:
        """A random point: uniform over points where the space can, else uniform over choices along the tree."""
        ...

    def default(self) -> Point:
        """A point that is valid for certain; measured first."""
        ...

    def features(self, points: Sequence[Point]) -> np.ndarray:
        """float64 [len(points), n_features]; columns follow `feature_names`. NaN = not applicable."""
        ...

    @property
    def feature_names(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of a point: its time in microseconds, or None when it failed (whatever the reason)."""

    point: Point
    time_us: float | None
