"""The Gaussian process: textbook formulas, one observation at a time, on tiny tables."""

from __future__ import annotations

import math

import numpy as np
import pytest

from emmy.search.surrogate import Columns, Hyper, Posterior, _loss, fit, log_improvement

HYPER = Hyper(np.array([0.2, -0.5]), 0.3, -4.0)


def table(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, 2))


def matern(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    apart = (a[:, None] - b[None]) * np.exp(HYPER.inverse_lengths)
    r = np.sqrt(5 * (apart**2).sum(axis=2))
    return math.exp(HYPER.signal) * (1 + r + r * r / 3) * np.exp(-r)


def textbook(x: np.ndarray, observed: list[int], y: list[float]) -> tuple[np.ndarray, np.ndarray]:
    noise = (math.exp(HYPER.noise) + 1e-6) * np.eye(len(observed))
    cross, within = matern(x, x[observed]), np.linalg.inv(matern(x[observed], x[observed]) + noise)
    return cross @ within @ np.array(y), np.sqrt(math.exp(HYPER.signal) - ((cross @ within) * cross).sum(axis=1))


def test_the_posterior_is_the_textbooks_however_it_is_built() -> None:
    x, observed, y = table(30), [3, 17, 8, 25], [0.5, -1.0, 2.0, 0.1]
    mean, spread = textbook(x, observed, y)
    at_once = Posterior(x, HYPER, observed, room=8)
    one_by_one = Posterior(x, HYPER, observed[:1], room=8)
    for row in observed[1:]:
        one_by_one.observe(row)
    growing = Posterior(x[:18], HYPER, observed[:2], room=8)
    growing.observe(observed[2])
    growing.extend(x[18:20])
    growing.extend(x[20:])
    growing.observe(observed[3])
    for posterior in (at_once, one_by_one, growing):
        got_mean, got_spread = posterior.predict(y)
        np.testing.assert_allclose(got_mean, mean, atol=2e-4)
        np.testing.assert_allclose(got_spread, spread, atol=2e-3)
        some_mean, some_spread = posterior.predict(y, [4, 9])
        np.testing.assert_allclose(some_mean, got_mean[[4, 9]], rtol=1e-6)
        np.testing.assert_allclose(some_spread, got_spread[[4, 9]], rtol=1e-6)


def test_a_point_in_flight_narrows_the_spread_and_leaves_the_mean() -> None:
    x = table(20)
    posterior = Posterior(x, HYPER, [1, 2], room=4)
    before_mean, before_spread = posterior.predict([1.0, -1.0])
    posterior.observe(7)
    mean, spread = posterior.predict([1.0, -1.0, None])
    np.testing.assert_allclose(mean, before_mean, atol=1e-5)
    assert spread[7] < 0.5 * before_spread[7] and (spread <= before_spread + 1e-6).all()


def test_fitting_finds_the_column_that_matters() -> None:
    x = np.random.default_rng(1).normal(size=(60, 3)) * 0.3
    y = np.sin(6 * x[:, 1])
    found = fit(x, (y - y.mean()) / y.std(), Hyper.prior(3))
    others = np.delete(found.inverse_lengths, 1)
    assert (found.inverse_lengths[1] > others + 1.0).all() and found.noise < -4.0


def test_the_gradient_of_the_likelihood_is_its_slope() -> None:
    x, y = table(12), np.random.default_rng(2).normal(size=12)
    squares = np.stack([(c[:, None] - c[None]) ** 2 for c in x.T]).reshape(2, -1)
    theta = np.array([0.2, -0.5, 0.3, -2.0])
    _, slope = _loss(squares, y, theta)
    for i, step in enumerate(np.eye(4) * 1e-5):
        up, down = _loss(squares, y, theta + step)[0], _loss(squares, y, theta - step)[0]
        assert slope[i] == pytest.approx((up - down) / 2e-5, rel=1e-5)


def test_columns_that_say_nothing_or_nothing_new_are_left_out() -> None:
    one = np.arange(6.0)
    gaps = np.array([1.0, np.nan, 1.0, 1.0, np.nan, 1.0])
    columns = Columns.of(np.stack([one, np.full(6, 3.0), 2 * one + 1, gaps, np.full(6, np.nan)], axis=1))
    assert list(columns.kept) == [0, 3]
    z = columns(np.array([[1e9, 0, 0, np.nan, 0], [2.5, 0, 0, 1.0, 0]]))
    np.testing.assert_allclose(z[1], 0.0, atol=1e-12)
    assert z[0, 0] == pytest.approx(0.9) and z[0, 1] == pytest.approx(-0.6)  # clipped; "not applicable" is a place


@pytest.mark.parametrize(("mean", "spread", "best"), [(0.0, 1.0, 0.0), (1.0, 0.5, 0.2), (-2.0, 0.3, 1.0)])
def test_expected_improvement_is_the_integral_it_stands_for(mean: float, spread: float, best: float) -> None:
    t = np.linspace(mean - 12 * spread, mean + 12 * spread, 200_001)
    density = np.exp(-0.5 * ((t - mean) / spread) ** 2) / (spread * math.sqrt(2 * math.pi))
    integral = float((np.maximum(best - t, 0) * density).sum() * (t[1] - t[0]))
    got = log_improvement(np.array([mean]), np.array([spread]), best)[0]
    assert math.exp(got) == pytest.approx(integral, rel=1e-4)


def test_hopeless_candidates_still_have_an_order() -> None:
    gain = log_improvement(np.array([5.0, 10.0, 20.0, 28.0]), np.ones(4), 0.0)
    assert (np.diff(gain) < 0).all() and np.isfinite(gain).all()
