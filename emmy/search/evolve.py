"""Evolution without a model: a small population, operators that earn their share, islands against standing still.

Steady state: each proposal is one child. Nothing here needs more than the standard library.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from emmy.search.space import Decision, Point, Space, Trial, Value
from emmy.search.strategy import Ranker, Strategy
from emmy.search.walk import Order, descend, nearest, toward, varied

_FOUNDERS = 8  # random points an island begins with
_POPULATION = 8
_PATIENCE = 40  # trials without progress until an island is left
_TRIES = 8  # children that were seen before, until an operator counts as fruitless
_FADING = 0.9  # weight of an operator's past success against its latest
_LEAST_CREDIT = 0.08
_DOUBT = 2.0  # trials that a value's average is drawn to the general average by
_HEAT = 0.5


@dataclass(frozen=True, slots=True)
class _Member:
    point: Point
    score: float  # log2 of the time


class EvolveStrategy(Strategy):
    """Children of the fittest by steps, crossover, differences, and the values that did well on average.

    An island that stands still is left for a new one; when that stands still too, the best of all islands meet.
    """

    name: ClassVar[str] = "evolve"

    def __init__(
        self, space: Space, *, seed: int = 0, model: Ranker | None = None, known: Sequence[Trial] = ()
    ) -> None:
        super().__init__(space, seed=seed, model=model, known=known)
        self._population: list[_Member] = []
        self._retired: list[_Member] = []
        self._operators: dict[str, Callable[[], Order]] = {
            "step": self._step,
            "steps": self._steps,
            "cross": self._cross,
            "differ": self._differ,
            "habit": self._habit,
        }
        self._credit = dict.fromkeys(self._operators, 0.5)
        self._born: dict[str, tuple[str, float]] = {}  # by key: operator, and the parent's score
        self._sums: dict[tuple[str, Value], list[float]] = defaultdict(lambda: [0.0, 0.0])  # count, sum of scores
        self._all = [0.0, 0.0]
        self._founders = _FOUNDERS
        self._is_meeting = False
        self._idle = 0

    # ------------------------------------------------------------ the loop
    def propose(self, n: int) -> Iterable[Point]:
        found = [self._child() for _ in range(n)]
        return [p for p in found if p is not None]

    def _child(self) -> Point | None:
        if self._idle >= _PATIENCE:
            self._move_on()
        if self._founders > 0 or len(self._population) < 2:
            self._founders -= 1
            return None  # a random point takes its place
        names = list(self._operators)
        for _ in range(4):
            name = self.rng.choices(names, [self._credit[k] + _LEAST_CREDIT for k in names])[0]
            for _ in range(_TRIES):
                point = descend(self.space, self._operators[name]())
                if point is not None and point.key not in self.seen and point.key not in self._born:
                    self._born[point.key] = (name, self._parent.score)
                    return point
            self._reward(name, 0.0)
        return None

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
        worst = max((m.score for m in self._population), default=0.0)
        for trial in trials:
            name, bar = self._born.pop(trial.point.key, ("", math.inf))
            best = self._population[0].score if self._population else math.inf
            score = math.log2(trial.time_us) if trial.time_us is not None else max(worst, self._mean()) + 1.0
            for choice in trial.point.choices:
                self._sums[choice][0] += 1.0
                self._sums[choice][1] += score
            self._all[0] += 1.0
            self._all[1] += score
            if trial.time_us is None:
                score = math.inf
            if name:
                self._reward(name, 1.0 if score < best else 0.5 if score < bar else 0.0)
            self._idle = 0 if score < best else self._idle + 1
            if score < math.inf:
                self._population.append(_Member(trial.point, score))
                self._population.sort(key=lambda m: m.score)
                del self._population[_POPULATION:]

    def _reward(self, name: str, amount: float) -> None:
        self._credit[name] = _FADING * self._credit[name] + (1 - _FADING) * amount

    def _mean(self) -> float:
        return self._all[1] / self._all[0] if self._all[0] else 0.0

    # ------------------------------------------------------------ operators
    def _pick(self) -> _Member:
        """A member, the fitter the likelier."""
        n = len(self._population)
        return self._population[min(self.rng.randrange(n) for _ in range(2))]

    def _step(self) -> Order:
        self._parent = self._pick()
        return varied(self._parent.point, self.rng, 1, 0.3)

    def _steps(self) -> Order:
        self._parent = self._pick()
        return varied(self._parent.point, self.rng, 2 + (self.rng.random() < 0.5), 0.3)

    def _cross(self) -> Order:
        """Each decision from one of two members."""
        self._parent, other = self._pick(), self._pick()
        theirs = other.point.as_dict()
        mixed = [(d, theirs.get(d, v) if self.rng.random() < 0.4 else v) for d, v in self._parent.point.choices]
        return toward(mixed, self.rng)

    def _differ(self) -> Order:
        """Ordered decisions move by the difference of two other members, counted in values."""
        self._parent, a, b = self._pick(), self._pick(), self._pick()
        mine, one, two = self._parent.point.as_dict(), a.point.as_dict(), b.point.as_dict()
        keep = toward(self._parent.point.choices, self.rng)

        def order(d: Decision, i: int) -> Iterable[Value]:
            ranked = list(keep(d, i))
            m, x, y = mine.get(d.name), one.get(d.name), two.get(d.name)
            if m is None or x is None or y is None or x == y or not d.ordered or self.rng.random() < 0.3:
                return ranked
            i0, ix, iy = (d.values.index(nearest(d.values, v)[0]) for v in (m, x, y))
            j = min(max(i0 + ix - iy, 0), len(d.values) - 1)
            return [d.values[j], *(v for v in ranked if v != d.values[j])]

        return order

    def _habit(self) -> Order:
        """About two decisions take the value that did best on average, give or take."""
        self._parent = self._pick()
        keep = toward(self._parent.point.choices, self.rng)
        rate = 2.0 / max(len(self._parent.point.choices), 2)

        def order(d: Decision, i: int) -> Iterable[Value]:
            ranked = list(keep(d, i))
            if self.rng.random() > rate:
                return ranked
            return sorted(ranked, key=lambda v: self._average(d.name, v) + _HEAT * self.rng.gauss(0.0, 1.0))

        return order

    def _average(self, name: str, value: Value) -> float:
        count, total = self._sums.get((name, value), (0.0, 0.0))
        return (total + _DOUBT * self._mean()) / (count + _DOUBT)
