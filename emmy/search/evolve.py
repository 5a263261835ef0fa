"""Evolution without a model: a small population, operators that earn their share, islands against standing still.

Steady state: each proposal is one child, the most promising of a brood. Promise is the weighted time of the nearest points
measured so far, nearness being that of features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from emmy.search.space import Decision, Point, Space, Trial, Value
from emmy.search.strategy import Ranker, Strategy
from emmy.search.surrogate import Columns
from emmy.search.walk import Order, descend, nearest, toward, varied

_FOUNDERS = 8  # points an island begins with
_DRAWN = 32  # random points of which a founder is one
_POPULATION = 8
_BROOD = 6  # children of which one is proposed
_UNJUDGED = 0.1  # proposals that take the first child instead
_NEIGHBOURS = 5  # that a child is judged by
_PATIENCE = 40  # trials without progress until an island is left
_TRIES = 4  # children looked at for each of a brood, since most may have been seen
_FADING = 0.9  # weight of an operator's past success against its latest
_LEAST_CREDIT = 0.08
_REFERENCE = 128  # random points that set the scale of the features


@dataclass(frozen=True, slots=True)
class _Member:
    point: Point
    score: float  # log2 of the time


@dataclass(frozen=True, slots=True)
class _Birth:
    operator: str
    parent: _Member


class EvolveStrategy(Strategy):
    """Children of the fittest by steps, crossover and differences.

    An island that stands still is left for a new one; when that stands still too, the best of all islands meet.
    """

    name: ClassVar[str] = "evolve"

    def __init__(
        self, space: Space, *, seed: int = 0, model: Ranker | None = None, known: Sequence[Trial] = ()
    ) -> None:
        super().__init__(space, seed=seed, model=model, known=known)
        self._population: list[_Member] = []
        self._retired: list[_Member] = []
        self._operators: dict[str, Callable[[_Member], Order]] = {
            "step": self._step,
            "steps": self._steps,
            "cross": self._cross,
            "differ": self._differ,
        }
        self._credit = dict.fromkeys(self._operators, 0.5)
        self._births: dict[str, _Birth] = {}  # by key, of children that were proposed
        self._columns = Columns.of(space.features([space.sample(self.rng) for _ in range(_REFERENCE)]))
        self._past = np.empty((0, len(self._columns.kept)))
        self._scores: list[float] = []
        self._founders = _FOUNDERS
        self._is_meeting = False
        self._idle = 0

    # ------------------------------------------------------------ the loop
    def propose(self, n: int) -> Iterable[Point]:
        found = [self._child() for _ in range(n)]
        return [p for p in found if p is not None]

    def _child(self) -> Point | None:
        """The best of a brood; while an island is founded, a point far from all that were measured."""
        if self._idle >= _PATIENCE:
            self._move_on()
        if self._founders > 0 or len(self._population) < 2:
            self._founders -= 1
            return self._founder()
        names = list(self._operators)
        brood: dict[str, tuple[Point, _Birth]] = {}
        for _ in range(_BROOD * _TRIES):
            name = self.rng.choices(names, [self._credit[k] + _LEAST_CREDIT for k in names])[0]
            birth = _Birth(name, self._pick())
            point = descend(self.space, self._operators[name](birth.parent))
            if point is None or point.key in self.seen or point.key in self._births:
                self._reward(name, 0.0)
                continue
            brood.setdefault(point.key, (point, birth))
            if len(brood) == _BROOD:
                break
        if not brood:
            return None
        children = list(brood.values())
        promise = self._promise([p for p, _ in children])
        point, birth = children[0 if self.rng.random() < _UNJUDGED else int(promise.argmin())]
        self._births[point.key] = birth
        return point

    def _founder(self) -> Point | None:
        """The farthest of a few random points; None when all were seen, and chance takes over."""
        drawn = {p.key: p for p in (self.space.sample(self.rng) for _ in range(_DRAWN))}
        fresh = [p for k, p in drawn.items() if k not in self.seen and k not in self._births]
        if not fresh or not len(self._past):
            return fresh[0] if fresh else None
        z = self._columns(self.space.features(fresh))
        return fresh[int(((z[:, None] - self._past[None]) ** 2).sum(axis=2).min(axis=1).argmax())]

    def _promise(self, points: Sequence[Point]) -> NDArray[np.float64]:
        """Scores of the nearest points measured, weighted by the inverse square of their distance."""
        apart = np.abs(self._columns(self.space.features(points))[:, None] - self._past[None]).sum(axis=2)
        near = np.argsort(apart, axis=1, kind="stable")[:, :_NEIGHBOURS]
        weight = 1.0 / (np.take_along_axis(apart, near, axis=1) ** 2 + 1e-6)
        return np.asarray((weight * np.array(self._scores)[near]).sum(axis=1) / weight.sum(axis=1))

    def _move_on(self) -> None:
        """Leave the island: for a meeting of the best, and from a meeting for a new island."""
        self._retired = sorted([*self._retired, *self._population], key=lambda m: m.score)
        self._is_meeting = not self._is_meeting and len(self._retired) > _POPULATION
        if self._is_meeting:
            self._population = self._retired[:_POPULATION]
        else:
            self._population, self._founders = [], _FOUNDERS
        self._idle = 0

    def learn(self, trials: Sequence[Trial]) -> None:
        if not trials:
            return
        past = self._columns(self.space.features([t.point for t in trials]))
        self._past = np.concatenate([self._past, past])
        for trial in trials:
            birth = self._births.pop(trial.point.key, None)
            best = self._population[0].score if self._population else math.inf
            score = math.inf if trial.time_us is None else math.log2(trial.time_us)
            self._scores.append(score if trial.time_us else max(self._scores, default=0.0))
            if birth is not None:
                self._reward(birth.operator, 1.0 if score < best else 0.5 if score < birth.parent.score else 0.0)
            self._idle = 0 if score < best else self._idle + 1
            if trial.time_us is not None:
                self._population.append(_Member(trial.point, score))
                self._population.sort(key=lambda m: m.score)
                del self._population[_POPULATION:]

    def _reward(self, name: str, amount: float) -> None:
        self._credit[name] = _FADING * self._credit[name] + (1 - _FADING) * amount

    # ------------------------------------------------------------ operators
    def _pick(self) -> _Member:
        """A member, the fitter the likelier."""
        n = len(self._population)
        return self._population[min(self.rng.randrange(n), self.rng.randrange(n))]

    def _step(self, parent: _Member) -> Order:
        return varied(parent.point, self.rng, 1, 0.3)

    def _steps(self, parent: _Member) -> Order:
        return varied(parent.point, self.rng, self.rng.choice((2, 3)), 0.3)

    def _cross(self, parent: _Member) -> Order:
        """Each decision from one of two members."""
        theirs = self._pick().point.as_dict()
        mixed = [(d, theirs.get(d, v) if self.rng.random() < 0.4 else v) for d, v in parent.point.choices]
        return toward(mixed, self.rng)

    def _differ(self, parent: _Member) -> Order:
        """Ordered decisions move by the difference of two other members, counted in values."""
        mine, one, two = parent.point.as_dict(), self._pick().point.as_dict(), self._pick().point.as_dict()
        keep = toward(parent.point.choices, self.rng)

        def order(d: Decision, i: int) -> Iterable[Value]:
            ranked = list(keep(d, i))
            m, x, y = mine.get(d.name), one.get(d.name), two.get(d.name)
            if (
                not d.values
                or m is None
                or x is None
                or y is None
                or x == y
                or not d.ordered
                or self.rng.random() < 0.3
            ):
                return ranked
            i0, ix, iy = (d.values.index(nearest(d.values, v)[0]) for v in (m, x, y))
            j = min(max(i0 + ix - iy, 0), len(d.values) - 1)
            return [d.values[j], *(v for v in ranked if v != d.values[j])]

        return order
