"""The strategy to use when in doubt: what can be listed is ranked whole, what cannot is ranked as far as the tree finds it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from emmy.search.mcts import MctsStrategy
from emmy.search.pool import Pool
from emmy.search.space import Point, Space, Trial
from emmy.search.strategy import Ranker, Strategy
from emmy.search.walk import around

LISTABLE = 60_000  # points
_SCALE = 256  # random points that set the scale of the features of an unlisted space
_ELITE = 6  # points whose neighbourhoods are looked at


class AutoStrategy(Strategy):
    """Expected improvement over all candidates: every point of a small space; of a large one the leaves that tree search
    proposes, the neighbours of the best points, and random ones."""

    name: ClassVar[str] = "auto"

    def __init__(
        self, space: Space, *, seed: int = 0, model: Ranker | None = None, known: Sequence[Trial] = ()
    ) -> None:
        super().__init__(space, seed=seed, model=model, known=known)
        self._tree: MctsStrategy | None = None
        if space.size(LISTABLE) is not None:
            self._pool = Pool(space, list(space.points()), self.rng, model)
            return
        reference = {p.key: p for p in (space.sample(self.rng) for _ in range(_SCALE))}
        self._pool = Pool(space, list(reference.values()), self.rng, model)
        self._tree = MctsStrategy(space, seed=seed, model=model, pool=self._pool)

    def propose(self, n: int) -> Iterable[Point]:
        if self._tree is not None and self._pool.is_informed:
            self._tree.seen = self.seen
            self._tree.grow(n)  # its leaves join the pool
            elite = [self._pool.points[row] for row in self._pool.elite[:_ELITE]]
            self._pool.add(around(self.space, self.rng, elite, n))
            self._pool.close(row for row, p in enumerate(self._pool.points) if p.key in self.seen)
        return [self._pool.points[row] for row in self._pool.choose(n)]

    def learn(self, trials: Sequence[Trial]) -> None:
        self._pool.learn(trials)
        if self._tree is not None:
            self._tree.learn(trials)
