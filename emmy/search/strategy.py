"""The contract of a search strategy: ask for points, tell what became of them. Knows spaces, not devices."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from emmy.search.space import Point, Space, Trial
from emmy.search.walk import leaves

_TRIES = 32  # random points that were all seen before, until the tree is walked systematically


class Ranker(Protocol):
    """A model that predicts times from features. `emmy.costmodel` implements it."""

    def predict(self, x: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(log2 time or score, spread in the same unit) for each row of x [n, n_features]; lower is better."""
        ...


class Strategy(ABC):
    """Proposes points. Deterministic: the same space, seed, model and told trials give the same asks.

    `ask(n)` returns at most n distinct points it never returned before and none that `known` or a told trial holds; an
    empty list means the space is exhausted. `tell` may carry trials of points that were not asked (a warm start, the
    default, the stock). A strategy implements `propose` and `learn`; what keeps the promises above is here.
    """

    name: ClassVar[str]

    def __init__(
        self, space: Space, *, seed: int = 0, model: Ranker | None = None, known: Sequence[Trial] = ()
    ) -> None:
        self.space, self.seed, self.model, self.known = space, seed, model, tuple(known)
        self.rng = random.Random(f"{self.name} {seed}")
        self.seen = {t.point.key for t in known}
        self._unlearnt: tuple[Trial, ...] = self.known
        self._remaining = leaves(space, self.rng)

    def ask(self, n: int) -> list[Point]:
        self._catch_up()
        asked: list[Point] = []
        for point in self.propose(n):
            if point.key not in self.seen and len(asked) < n:
                self.seen.add(point.key)
                asked.append(point)
        while len(asked) < n and (other := self._another()) is not None:
            self.seen.add(other.key)
            asked.append(other)
        return asked

    def tell(self, trials: Sequence[Trial]) -> None:
        self._catch_up()
        self.seen.update(t.point.key for t in trials)
        self.learn(trials)

    @abstractmethod
    def propose(self, n: int) -> Iterable[Point]:
        """Points worth measuring next, best first. Those seen before are skipped; what is missing to n is drawn at random."""

    @abstractmethod
    def learn(self, trials: Sequence[Trial]) -> None:
        """Take in what became of points; `known` comes first, before any other call."""

    def marks(self, key: str) -> Mapping[str, float]:
        """What is noted with the measurement of a point that was asked, by name: why it was. Nothing, as a rule."""
        return {}

    def _another(self) -> Point | None:
        """A random point not seen yet; when those are hard to hit, the next of a systematic walk. None: exhausted."""
        for _ in range(_TRIES):
            point = self.space.sample(self.rng)
            if point.key not in self.seen:
                return point
        return next((p for p in self._remaining if p.key not in self.seen), None)

    def _catch_up(self) -> None:
        waiting, self._unlearnt = self._unlearnt, ()
        if waiting:
            self.learn(waiting)
