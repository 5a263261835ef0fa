"""Random search: the yardstick of all others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from emmy.search.space import Point, Trial
from emmy.search.strategy import Strategy


class RandomStrategy(Strategy):
    """Random points without replacement. Learns nothing."""

    name: ClassVar[str] = "random"

    def propose(self, n: int) -> Iterable[Point]:
        return ()

    def learn(self, trials: Sequence[Trial]) -> None:
        pass
