"""Likelihood-free Bayesian optimisation: a classifier of "among the best" in the place of a model of times.

After Song et al., "A General Recipe for Likelihood-free Bayesian Optimization" (2022). A threshold cuts off the best
tenth of the trials. A LightGBM classifier tells these, each weighted by how much it is better than the threshold, from all
trials; with such weights its odds grow as expected improvement does. Trees do as they are: no distances, no scales.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from emmy.search.space import Point, Space, Trial
from emmy.search.strategy import Ranker, Strategy
from emmy.search.walk import around

if TYPE_CHECKING:
    import lightgbm

Floats = NDArray[np.float64]

LISTABLE = 60_000  # points, ranked whole; of a larger space those that are gathered
_BEST = 0.1  # of the trials are "among the best"
_DESIGN = 32  # trials before the classifier is trusted
_RANDOM_SHARE = 0.1  # of proposals, whatever the classifier says
_REFIT = 0.04  # growth of the trials that asks for another classifier
_MOST = 4_000  # candidates that are gathered
_ELITE = 8  # points whose neighbourhoods are looked at
_ROUNDS = 80
_SETTINGS = {
    "objective": "binary", "learning_rate": 0.15, "num_leaves": 15, "min_data_in_leaf": 2, "min_sum_hessian_in_leaf": 1e-3,
    "bagging_fraction": 0.8, "bagging_freq": 1, "feature_fraction": 0.8,
    "num_threads": 1, "deterministic": True, "force_row_wise": True, "verbosity": -1,
}  # fmt: skip


class LfboStrategy(Strategy):
    """The candidates with the best odds of being among the best, and a few random ones.

    Each classifier sees another part of the trials and of the features, so that what one overlooks another one finds. With a
    cost model its prediction is a feature more, and leads while trials are few.
    """

    name: ClassVar[str] = "lfbo"

    def __init__(
        self, space: Space, *, seed: int = 0, model: Ranker | None = None, known: Sequence[Trial] = ()
    ) -> None:
        super().__init__(space, seed=seed, model=model, known=known)
        self._points: list[Point] = []
        self._row: dict[str, int] = {}
        self._x: Floats = np.empty((0, 0))
        self._time: dict[int, float | None] = {}  # log2 by row, None = failed
        self._classifier: lightgbm.Booster | None = None
        self._refit_at, self._fits = _DESIGN, 0
        self._odds: Floats = np.empty(0)  # of the candidates that the classifier was asked about
        self._is_listed = space.size(LISTABLE) is not None
        if self._is_listed:
            self._add(list(space.points()))

    def propose(self, n: int) -> Iterable[Point]:
        if not self._is_listed:
            elite = sorted((t, row) for row, t in self._time.items() if t is not None)[:_ELITE]
            self._add(around(self.space, self.rng, [self._points[row] for _, row in elite], n))
            self._trim()
        if (score := self._score()) is None:
            return ()
        open_ = np.array([p.key not in self.seen for p in self._points])
        order = np.argsort(np.where(open_, -score, np.inf), kind="stable")[: min(n, int(open_.sum()))]
        return [self._points[row] for row in order if self.rng.random() >= _RANDOM_SHARE or not len(self._time)]

    def learn(self, trials: Sequence[Trial]) -> None:
        self._add([t.point for t in trials])
        for t in trials:
            self._time[self._row[t.point.key]] = None if t.time_us is None else math.log2(t.time_us)

    def _add(self, points: Sequence[Point]) -> None:
        new = list({p.key: p for p in points if p.key not in self._row}.values())
        if not new:
            return
        x = self.space.features(new)
        if self.model is not None:
            x = np.column_stack([x, self.model.predict(x)[0]])
        self._row |= {p.key: i for i, p in enumerate(new, len(self._points))}
        self._points += new
        self._x = np.concatenate([self._x, x]) if len(self._x) else x

    def _trim(self) -> None:
        """Forgets the worse half of the candidates that wait when there are too many; rows change."""
        if len(self._points) <= _MOST or (score := self._score()) is None:
            return
        waiting = [row for row in np.argsort(-score, kind="stable").tolist() if row not in self._time]
        kept = sorted([*self._time, *waiting[: _MOST // 2]])
        place = {row: i for i, row in enumerate(kept)}
        self._points = [self._points[row] for row in kept]
        self._row = {p.key: i for i, p in enumerate(self._points)}
        self._x, self._odds = self._x[kept], self._odds[kept] if len(self._odds) else self._odds
        self._time = {place[row]: t for row, t in self._time.items()}

    def _score(self) -> Floats | None:
        """Of every candidate, the higher the better; None while nothing is known."""
        timed = [t for t in self._time.values() if t is not None]
        if len(self._time) < _DESIGN or len(set(timed)) < 2:
            return -self._x[:, -1] if self.model is not None else None
        if self._classifier is None or len(self._time) >= self._refit_at:
            self._classifier, self._odds = self._fit(max(timed)), np.empty(0)
            self._refit_at = len(self._time) + max(1, int(_REFIT * len(self._time)))
        if len(self._odds) < len(self._x):
            new = np.asarray(self._classifier.predict(self._x[len(self._odds) :], num_threads=1, raw_score=True))
            self._odds = np.concatenate([self._odds, new])
        return self._odds

    def _fit(self, worst: float) -> lightgbm.Booster:
        import lightgbm

        rows = list(self._time)
        y = np.array([worst if (t := self._time[row]) is None else t for row in rows])
        threshold = np.quantile(np.unique(y), _BEST)
        good = np.flatnonzero(y <= threshold)
        gain = np.unique(y)[np.searchsorted(np.unique(y), threshold, side="right")] - y[good]
        all_x = self._x[rows]
        x = np.concatenate([all_x[good], all_x])
        label = np.repeat([1.0, 0.0], [len(good), len(y)])
        n = len(label)
        weight = np.concatenate([gain / gain.mean() * n / len(good), np.full(len(y), n / len(y))])
        self._fits += 1
        data = lightgbm.Dataset(x, label, weight=weight)
        return lightgbm.train({**_SETTINGS, "seed": self.seed * 1000 + self._fits}, data, num_boost_round=_ROUNDS)
