"""A Gaussian process over a growing table of candidates, conditioned one observation at a time. Knows no search space.

Covariance: Matern 5/2 with a length scale a column (Rasmussen and Williams 2006, ch. 4 and 5), its parameters at the maximum
of the posterior. After each observation the whole table is up to date at a cost of one pass over it (the rows of
L^-1 K[observed, table] are kept), so that a table of tens of thousands of candidates is ranked after every measurement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_STEPS = 30
_MOST_FITTED = 256
_LOG_NOISE = -5.0  # prior mode of the log noise variance, in units of the observations' variance
_JITTER = 1e-6
_U = np.linspace(-30.0, 10.0, 4001)  # for `log_improvement`


@dataclass(frozen=True, slots=True)
class Columns:
    """How features become coordinates: constant and repeated columns go, the others get mean 0 and spread 0.3."""

    kept: NDArray[np.intp]
    mean: Floats
    scale: Floats

    @classmethod
    def of(cls, x: Floats) -> Columns:
        """From a reference sample [n, n_features]; NaN (not applicable) is allowed."""
        filled = np.where(np.isfinite(x), x, np.nan)
        known = np.isfinite(filled)
        count = np.maximum(known.sum(axis=0), 1)
        mean = np.where(known, filled, 0.0).sum(axis=0) / count
        spread = np.sqrt(np.where(known, (filled - mean) ** 2, 0.0).sum(axis=0) / count)
        scale = np.where(spread > 1e-9 * (1 + np.abs(mean)), spread, 1.0)
        varies = (spread > 1e-9 * (1 + np.abs(mean))) | (known.any(axis=0) & ~known.all(axis=0))
        z = _filled((filled - mean) / scale)
        kept: list[int] = []
        for j in np.flatnonzero(varies):
            if not any(np.array_equal(np.round(z[:, j], 9), np.round(z[:, i], 9)) for i in kept):
                kept.append(int(j))
        index = np.array(kept, dtype=np.intp)
        return cls(index, mean[index], scale[index])

    def __call__(self, x: Floats) -> Floats:
        """Coordinates [n, n_kept] of features [n, n_features]."""
        x = x[:, self.kept]
        return 0.3 * _filled((np.where(np.isfinite(x), x, np.nan) - self.mean) / self.scale)


def _filled(z: Floats) -> Floats:
    return np.clip(np.where(np.isnan(z), -2.0, z), -3.0, 3.0)


@dataclass(frozen=True, slots=True)
class Hyper:
    """Logarithms of the inverse length scales, the signal variance and the noise variance."""

    inverse_lengths: Floats
    signal: float
    noise: float

    @classmethod
    def prior(cls, n_columns: int) -> Hyper:
        """Length scales grow with the root of the number of columns, so that distances do not (Hvarfner et al. 2024)."""
        return cls(np.full(n_columns, 0.5 * math.log(10.0 / max(n_columns, 1)) + 0.3), 0.0, _LOG_NOISE)


def fit(x: Floats, y: Floats, start: Hyper) -> Hyper:
    """Parameters at the maximum of the posterior of standardised observations y [n] at x [n, d], from `start`.

    The better half and a stride of the rest stand for more than a few hundred observations. Optimised by sign-based steps
    (Rprop: Riedmiller and Braun 1993), which need no line search and give the same result everywhere.
    """
    if len(y) > _MOST_FITTED:
        by_value = np.argsort(y, kind="stable")
        rest = by_value[_MOST_FITTED // 2 :]
        take = np.concatenate([by_value[: _MOST_FITTED // 2], rest[:: -(-len(rest) * 2 // _MOST_FITTED)]])
        x, y = x[take], y[take]
    n, d = x.shape
    squares = np.stack([(c[:, None] - c[None, :]) ** 2 for c in x.T]).reshape(d, -1) if d else np.zeros((0, n * n))
    prior = Hyper.prior(d)
    mode = np.append(prior.inverse_lengths, [prior.signal, prior.noise])
    width = np.append(np.ones(d + 1), 2.0)
    low, high = np.append(np.full(d, -4.0), [-3.0, -10.0]), np.append(np.full(d, 4.0), [3.0, 0.0])
    theta = np.append(start.inverse_lengths, [start.signal, start.noise])
    step, before = np.full(d + 2, 0.2), np.zeros(d + 2)
    best, best_loss = theta, math.inf
    for _ in range(_STEPS):
        loss, slope = _loss(squares, y, theta)
        loss += float((((theta - mode) ** 2) / (2 * width)).sum())
        slope = slope + (theta - mode) / width
        if loss < best_loss:
            best, best_loss = theta, loss
        turn = np.sign(slope) * before
        step = np.clip(np.where(turn > 0, step * 1.2, np.where(turn < 0, step * 0.5, step)), 1e-3, 0.7)
        before = np.where(turn < 0, 0.0, np.sign(slope))
        theta = np.clip(theta - before * step, low, high)
    return Hyper(best[:d], float(best[d]), float(best[d + 1]))


def _loss(squares: Floats, y: Floats, theta: Floats) -> tuple[float, Floats]:
    """Negative log marginal likelihood and its gradient."""
    n, d = len(y), len(squares)
    inverse2, signal, noise = np.exp(2 * theta[:d]), math.exp(theta[d]), math.exp(theta[d + 1])
    r = np.sqrt(5.0 * (inverse2 @ squares).reshape(n, n))
    decay = np.exp(-r)
    shape = (1.0 + r + r * r / 3.0) * decay
    lower = np.linalg.cholesky(signal * shape + (noise + _JITTER) * np.eye(n))
    inverse = np.linalg.inv(lower)
    inverse = inverse.T @ inverse
    alpha = inverse @ y
    loss = 0.5 * float(y @ alpha) + float(np.log(np.diag(lower)).sum())
    w = inverse - np.outer(alpha, alpha)
    slope = np.empty(d + 2)
    slope[:d] = squares @ (w * (signal * (-5.0 / 6.0) * (1.0 + r) * decay)).ravel() * inverse2
    slope[d] = 0.5 * signal * float((w * shape).sum())
    slope[d + 1] = 0.5 * noise * float(np.trace(w))
    return loss, slope


class Posterior:
    """The process given observations at rows of a table; `observe` adds one, `extend` adds candidates.

    Locations matter to the spread, values only to the mean: a row may be observed before its value is known (it is in
    flight), and then leaves the mean where it was. Single precision, since the table is large and times are noisy.
    """

    def __init__(self, table: Floats, hyper: Hyper, observed: Sequence[int], room: int) -> None:
        """`room`: observations at most, later ones included."""
        self.hyper, self.room = hyper, room
        self._x = (table * np.exp(hyper.inverse_lengths)).astype(np.float32)
        self._signal, self._noise = math.exp(hyper.signal), math.exp(hyper.noise) + _JITTER
        self.observed = list(observed)
        n = len(self.observed)
        self._lower, self._inverse = np.zeros((room, room)), np.zeros((room, room))
        at = self._x[self.observed]
        self._lower[:n, :n] = np.linalg.cholesky(self._kernel(at, at).astype(np.float64) + self._noise * np.eye(n))
        self._inverse[:n, :n] = np.linalg.inv(self._lower[:n, :n])
        self._rows = np.empty((room, len(table)), dtype=np.float32)
        self._rows[:n] = self._inverse[:n, :n].astype(np.float32) @ self._kernel(at, self._x)
        self._variance = self._signal - np.einsum("ij,ij->j", self._rows[:n], self._rows[:n])

    def _kernel(self, a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
        squares = (a * a).sum(axis=1)[:, None] + (b * b).sum(axis=1)[None, :] - np.float32(2.0) * (a @ b.T)
        r = np.sqrt(np.maximum(squares, 0.0) * np.float32(5.0))
        return np.asarray(np.float32(self._signal) * (1.0 + r + r * r / 3.0) * np.exp(-r), dtype=np.float32)

    @property
    def is_full(self) -> bool:
        return len(self.observed) >= self.room

    def observe(self, row: int) -> None:
        """Condition on the table's row; its value may follow later."""
        n = len(self.observed)
        weights = self._rows[:n, row].astype(np.float64)
        diagonal = math.sqrt(max(self._signal + self._noise - float(weights @ weights), self._noise))
        self._lower[n, :n], self._lower[n, n] = weights, diagonal
        self._inverse[n, :n] = -(weights @ self._inverse[:n, :n]) / diagonal
        self._inverse[n, n] = 1.0 / diagonal
        size = len(self._x)
        new = self._kernel(self._x[row : row + 1], self._x)[0] - weights.astype(np.float32) @ self._rows[:n, :size]
        self._rows[n, :size] = new / np.float32(diagonal)
        self._variance = self._variance - self._rows[n, :size] ** 2
        self.observed.append(row)

    def extend(self, table: Floats) -> None:
        """More candidates, at the end of the table."""
        n, old = len(self.observed), len(self._x)
        x = (table * np.exp(self.hyper.inverse_lengths)).astype(np.float32)
        rows = self._inverse[:n, :n].astype(np.float32) @ self._kernel(self._x[self.observed], x)
        if old + len(x) > self._rows.shape[1]:  # doubled, so that growing costs no more than filling
            wider = np.empty((self.room, 2 * (old + len(x))), dtype=np.float32)
            wider[:n, :old] = self._rows[:n, :old]
            self._rows = wider
        self._rows[:n, old : old + len(x)] = rows
        self._x = np.concatenate([self._x, x])
        self._variance = np.concatenate([self._variance, self._signal - np.einsum("ij,ij->j", rows, rows)])

    def predict(self, values: Sequence[float | None], rows: Sequence[int] | None = None) -> tuple[Floats, Floats]:
        """(mean, spread) of the table's rows, or of these; `values` of the observed rows in their order, None = in flight."""
        whitened = np.zeros(len(values))
        for i, value in enumerate(values):
            if value is not None:  # an observation that equals its prediction whitens to 0 and moves no mean
                whitened[i] = (value - self._lower[i, :i] @ whitened[:i]) / self._lower[i, i]
        n, size = len(values), len(self._x)
        among, variance = (
            (self._rows[:n, :size], self._variance) if rows is None else (self._rows[:n, rows], self._variance[rows])
        )
        mean = whitened.astype(np.float32) @ among
        return mean.astype(np.float64), np.sqrt(np.maximum(variance, 1e-9)).astype(np.float64)


def log_improvement(mean: Floats, spread: Floats, best: float) -> Floats:
    """Logarithm of the expected improvement on `best`, lower being better (Mockus 1978; in logarithms: Ament et al. 2023)."""
    return np.asarray(np.log(spread) + np.interp((best - mean) / spread, _U, _LOG_H))


def _log_h(u: float) -> float:
    """log(u Phi(u) + phi(u)): expected excess of a standard normal over -u."""
    density = math.exp(-0.5 * u * u) / math.sqrt(2 * math.pi)
    if u < -5.0:  # the two terms cancel; the first terms of the asymptotic series do not
        return math.log(density) - math.log(u * u + 3.0)
    return math.log(u * 0.5 * math.erfc(-u / math.sqrt(2.0)) + density)


_LOG_H = np.array([_log_h(float(u)) for u in _U])
