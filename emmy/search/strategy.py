"""The contract of a search strategy: ask for points, tell what became of them. Knows spaces, not devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

import numpy as np

from emmy.search.space import Point, Space, Trial


class Ranker(Protocol):
    """A model that predicts times from features. `emmy.costmodel` implements it."""

    def predict(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(log2 time or score, spread in the same unit) for each row of x [n, n_features]; lower is better."""
        ...


class Strategy(ABC):
    """Proposes points. Deterministic: the same space, seed, model and told trials give the same asks.

    `ask(n)` returns at most n distinct points it never returned before and none of `known`; an empty list means the
    space is exhausted. `tell` may carry trials of points that were not asked (a warm start, the default, the stock).
    """

    name: ClassVar[str]

    def __init__(
        self, space: Space, *, seed: int = 0, model: Ranker | None = None, known: Sequence[Trial] = ()
    ) -> None:
        self.space, self.seed, self.model, self.known = space, seed, model, tuple(known)

    @abstractmethod
    def ask(self, n: int) -> list[Point]: ...

    @abstractmethod
    def tell(self, trials: Sequence[Trial]) -> None: ...
