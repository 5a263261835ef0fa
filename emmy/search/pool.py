"""Candidates of one space, ranked by expected improvement. What `auto` and `mcts` share; knows no tree.

The belief is a Gaussian process on log2 of the time over the space's features. Under a model the process learns only what
the model misses: time = a + b * predicted + residual, with b drawn to 1 as long as trials are few.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from emmy.search.space import Point, Space, Trial
from emmy.search.strategy import Ranker
from emmy.search.surrogate import Columns, Hyper, Posterior, fit, log_improvement

Floats = NDArray[np.float64]

_DESIGN = 8  # spread-out points before the process is trusted
_DESIGN_FROM = 512  # random candidates they are chosen from
_WITH_MODEL = 4  # trials before the process corrects a model
_ROOM = 448  # observations the process holds ...
_KEPT = 384  # ... and keeps when it is full: the better half, then the latest
_MODEL_WEIGHT = 4.0  # trials that b = 1 counts for
MOST = 6_000  # candidates, where they are gathered one after another
_LEAST_SPREAD = 1e-3  # log2; identical times


class Pool:
    """Points with features, the trials told of them, and the posterior over all; `choose` is the acquisition."""

    def __init__(self, space: Space, reference: Sequence[Point], rng: random.Random, model: Ranker | None) -> None:
        """`reference`: points whose features set the scale; they are the first candidates."""
        self._space, self._rng, self._model = space, rng, model
        self.points: list[Point] = []
        self._row: dict[str, int] = {}
        x = space.features(reference)
        self._columns = Columns.of(x)
        self._z, self._predicted, self._doubt = np.empty((0, len(self._columns.kept))), np.empty(0), np.empty(0)
        self._open = np.empty(0, dtype=bool)  # may be chosen
        self._values: dict[int, float | None] = {}  # log2 of the time by row, None = failed; in the order told
        self._posterior: Posterior | None = None
        self._refit_at = 0
        self._hyper = Hyper.prior(len(self._columns.kept))
        self._append(reference, x)

    def add(self, points: Iterable[Point]) -> list[int]:
        """Rows of the points, which are new candidates unless they were there."""
        asked = list(points)
        new = list({p.key: p for p in asked if p.key not in self._row}.values())
        if new:
            self._append(new, self._space.features(new))
        return [self._row[p.key] for p in asked]

    def _append(self, points: Sequence[Point], x: Floats) -> None:
        z = self._columns(x)
        for point in points:
            self._row[point.key] = len(self.points)
            self.points.append(point)
        self._z = np.concatenate([self._z, z])
        self._open = np.concatenate([self._open, np.ones(len(points), dtype=bool)])
        if self._model is not None:
            predicted, doubt = self._model.predict(x)
            self._predicted = np.concatenate([self._predicted, predicted])
            self._doubt = np.concatenate([self._doubt, doubt])
        if self._posterior is not None:
            self._posterior.extend(z)

    def learn(self, trials: Sequence[Trial]) -> None:
        """Trials of any points of the space; those that are no candidates yet become ones."""
        rows = self.add(t.point for t in trials)
        for row, trial in zip(rows, trials, strict=True):
            self._open[row] = False
            self._values[row] = None if trial.time_us is None else float(np.log2(trial.time_us))
            self._observe(row)

    def close(self, rows: Iterable[int]) -> None:
        """These are not to be chosen."""
        self._open[list(rows)] = False

    def trim(self) -> None:
        """Forget the less promising candidates when there are too many; rows change. What was measured or chosen stays."""
        if len(self.points) <= MOST or not self.is_informed:
            return
        mean, spread = self.predict()
        gain = log_improvement(mean, spread, self._best(mean))
        hopeful = np.flatnonzero(self._open)
        hopeful = hopeful[np.argsort(-gain[hopeful], kind="stable")][: MOST // 2]
        kept = np.sort(np.concatenate([hopeful, np.flatnonzero(~self._open)]))
        place = {int(row): i for i, row in enumerate(kept)}
        self.points = [self.points[row] for row in kept]
        self._row = {p.key: i for i, p in enumerate(self.points)}
        self._values = {place[row]: v for row, v in self._values.items()}
        self._z, self._open = self._z[kept], self._open[kept]
        if self._model is not None:
            self._predicted, self._doubt = self._predicted[kept], self._doubt[kept]
        self._posterior = None

    @property
    def is_informed(self) -> bool:
        """Whether a prediction rests on more than the prior: a model, or enough trials."""
        return self._model is not None or len(self._values) >= _DESIGN

    @property
    def elite(self) -> list[int]:
        """Rows that were measured, fastest first."""
        timed = [(v, row) for row, v in self._values.items() if v is not None]
        return [row for _, row in sorted(timed)]

    # ------------------------------------------------------------ choosing
    def choose(self, n: int) -> list[int]:
        """Up to n rows to measure next, best first; a point chosen counts as measured at its prediction for the next."""
        if not self.is_informed:
            return self._spread_out(n)
        chosen: list[int] = []
        for _ in range(n):
            if not self._open.any():
                break
            mean, spread = self.predict()
            gain = np.where(self._open, log_improvement(mean, spread, self._best(mean)), -np.inf)
            row = int(gain.argmax())
            chosen.append(row)
            self._open[row] = False
            self._observe(row)
        return chosen

    def predict(self, rows: Sequence[int] | None = None) -> tuple[Floats, Floats]:
        """(mean, spread) of log2 of the time, for every candidate or for these."""
        posterior = self._fitted()
        offset = self._offset()
        known = self._known()
        residuals = np.array([known[row] - offset[row] for row in known])
        middle = float(residuals.mean()) if known else 0.0
        scale = self._scale(residuals)
        values = [(known[row] - offset[row] - middle) / scale if row in known else None for row in posterior.observed]
        mean, spread = posterior.predict(values, rows)
        return (offset if rows is None else offset[rows]) + middle + scale * mean, scale * spread

    def _known(self) -> dict[int, float]:
        """Values by row; a failure counts as the slowest time seen."""
        worst = max((v for v in self._values.values() if v is not None), default=0.0)
        return {row: worst if v is None else v for row, v in self._values.items()}

    def _best(self, mean: Floats) -> float:
        return min((v for v in self._values.values() if v is not None), default=float(mean.min()))

    def _scale(self, residuals: Floats) -> float:
        if self._model is not None and len(residuals) < _WITH_MODEL:
            return max(float(self._doubt.mean()), 0.25)
        return max(float(residuals.std()), _LEAST_SPREAD)

    def _offset(self) -> Floats:
        """What the model says of every candidate, scaled to fit the trials; 0 without a model."""
        if self._model is None:
            return np.zeros(len(self.points))
        known = self._known()
        if not known:
            return self._predicted
        p, y = self._predicted[list(known)], np.array(list(known.values()))
        weight = _MODEL_WEIGHT * max(float(self._predicted.var()), 1e-6)
        dp, dy = p - p.mean(), y - y.mean()
        b = max((float(dp @ dy) + weight) / (float(dp @ dp) + weight), 0.0)
        return np.asarray(y.mean() + b * (self._predicted - p.mean()))

    # ------------------------------------------------------------ the process
    def _fitted(self) -> Posterior:
        """The posterior, its parameters fitted anew when the trials have grown by a quarter."""
        n = len(self._values)
        if self._posterior is not None and n < self._refit_at and not self._posterior.is_full:
            return self._posterior
        known, offset = self._known(), self._offset()
        if n >= _WITH_MODEL:
            rows = list(known)
            y = np.array([known[r] - offset[r] for r in rows])
            self._hyper = fit(self._z[rows], (y - y.mean()) / self._scale(y), self._hyper)
        self._refit_at = max(n + 4, n + n // 4)
        pending = [r for r in self._posterior.observed if r not in known] if self._posterior else []
        rows = list(known)
        if len(rows) + len(pending) > _KEPT:
            best = sorted(rows, key=known.__getitem__)[: _KEPT // 2]
            late = [r for r in rows if r not in set(best)][-(_KEPT // 2) :]
            rows, pending = [*best, *late], pending[-(_ROOM - _KEPT) // 2 :]
        self._posterior = Posterior(self._z, self._hyper, [*rows, *pending], _ROOM)
        return self._posterior

    def _observe(self, row: int) -> None:
        """Let the posterior, if there is one, know of the row's location; a full one is made anew at the next prediction."""
        posterior = self._posterior
        if posterior is not None and not posterior.is_full and row not in posterior.observed:
            posterior.observe(row)

    def _spread_out(self, n: int) -> list[int]:
        """Candidates far from each other and from all that was told or chosen (greedy maximin over a random part)."""
        open_ = [int(r) for r in np.flatnonzero(self._open)]
        part = self._rng.sample(open_, min(len(open_), _DESIGN_FROM))
        if not part:
            return []
        z, taken = self._z[part], self._z[~self._open]
        chosen: list[int] = []
        gap = np.full(len(part), np.inf)
        for other in taken:
            gap = np.minimum(gap, ((z - other) ** 2).sum(axis=1))
        for _ in range(min(n, len(part))):
            k = int(gap.argmax())
            chosen.append(part[k])
            self._open[part[k]] = False
            gap = np.minimum(gap, ((z - z[k]) ** 2).sum(axis=1))
            gap[k] = -np.inf
        return chosen
