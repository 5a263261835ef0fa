"""Recorded spaces as trees, and the score: the calculated baseline against enumeration, and what 0 and 1 mean."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, pairwise

import numpy as np
import pytest

from emmy.errors import UsageError
from emmy.search.evaluate import COPY, LIST, SearchScore, baseline_us, evaluate, performance, replay, standings
from emmy.search.recorded_space import RecordedSpace, load_recorded
from emmy.search.siblings import copied, listed, sibling_model, siblings
from emmy.search.space import Point
from emmy.search.walk import leaves
from emmy.workloads import recorded

VALUES = np.array([[a, b, 7, s] for s in (0, 1) for b in (16, 48, 64) for a in (1, 2, 4, 8) if a * b < 300])


def toy() -> RecordedSpace:
    times = np.arange(1.0, len(VALUES) + 1)
    times[3] = np.nan
    return RecordedSpace("toy", ("a", "b", "fixed", "s"), VALUES, times)


def test_failed_configurations_and_constant_parameters_are_not_in_the_space() -> None:
    space = toy()
    assert [d.name for d in space.domains()] == ["s", "b", "a"]  # fewer values first
    assert len(list(space.points())) == len(VALUES) - 1 == space.size(1000)
    assert "s=0 b=16 a=8" not in {p.key for p in space.points()} and space.size(3) is None


def test_the_trie_leads_to_every_point_and_each_has_its_recorded_time() -> None:
    space = toy()
    found = list(leaves(space, random.Random(0)))
    assert sorted(p.key for p in found) == sorted(p.key for p in space.points())
    for point in found:
        at = point.as_dict()
        row = next(i for i, (a, b, _, s) in enumerate(VALUES) if (a, b, s) == (at["a"], at["b"], at["s"]))
        assert space.trial(point).time_us == row + 1.0


def test_features_are_logarithms_and_the_factors_of_two_that_vary_by_themselves() -> None:
    space = toy()
    assert space.feature_names == ("s", "log2 b", "twos b", "log2 a")
    point = next(p for p in space.points() if p.key == "s=1 b=48 a=4")
    np.testing.assert_allclose(space.features([point]), [[1.0, np.log2(48), 4.0, 2.0]])


def test_nothing_a_strategy_sees_depends_on_the_times() -> None:
    a = RecordedSpace("x", ("a", "b", "fixed", "s"), VALUES, np.arange(1.0, len(VALUES) + 1))
    b = RecordedSpace("x", ("a", "b", "fixed", "s"), VALUES, np.arange(1.0, len(VALUES) + 1)[::-1].copy())
    assert list(a.points()) == list(b.points()) and a.default() == b.default() and a.domains() == b.domains()
    np.testing.assert_array_equal(a.features(list(a.points())), b.features(list(b.points())))


def test_a_table_with_a_configuration_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="same parameters"):
        RecordedSpace("x", ("a",), np.array([[1], [2], [2]]), np.ones(3))


@pytest.mark.parametrize("name", recorded.names())
def test_shipped_spaces_have_as_many_points_as_valid_rows(name: str) -> None:
    space, table = load_recorded(name), recorded.load(name)
    assert space.size(10**6) == int(np.isfinite(table.time_ms).sum())
    assert space.times_us.min() == pytest.approx(table.best_ms * 1000)
    assert np.isfinite(space.features([space.default()])).all()


def test_the_baseline_is_the_mean_over_all_ways_to_draw() -> None:
    times = np.array([3.0, 1.0, 4.0, 1.5, 9.0, 2.6])
    exact = [np.mean([min(c) for c in combinations(times, k)]) for k in range(1, 7)]
    np.testing.assert_allclose(baseline_us(times, 8), [*exact, 1.0, 1.0])


def test_the_optimum_at_once_scores_one_and_the_baseline_itself_zero() -> None:
    times = np.random.default_rng(0).lognormal(size=500)
    np.testing.assert_allclose(performance(times, np.full((3, 50), times.min())), 1.0)
    np.testing.assert_allclose(performance(times, baseline_us(times, 50)[None]), 0.0, atol=1e-12)
    assert (performance(times, np.full((1, 50), times.max())) < 0).all()


def test_random_search_scores_zero_up_to_chance() -> None:
    space = load_recorded("dedispersion.a4000")
    best = np.array([replay(space, "random", seed, 100, 10) for seed in range(60)])
    assert abs(performance(space.times_us, best).mean()) < 0.15


def test_a_replay_ends_with_the_space() -> None:
    best = replay(toy(), "random", 0, 1000, 8)
    assert len(best) == len(VALUES) - 1 and best[-1] == 1.0 and all(b <= a for a, b in pairwise(best))


def test_rows_are_typed_and_in_order_and_standings_rank_them() -> None:
    rows = evaluate(
        ("random", "evolve"), ("convolution.w6600", "convolution.a100"), seeds=2, budget=20, batch=5, processes=1
    )
    assert [(r.space, r.strategy) for r in rows] == [
        (s, n) for s in ("convolution.w6600", "convolution.a100") for n in ("random", "evolve")
    ]
    assert all(isinstance(r, SearchScore) and [k for k, _ in r.at] == [20] and r.seeds == 2 for r in rows)
    ranked = standings(rows)
    assert ranked[0].score >= ranked[1].score
    own = [r for r in rows if r.strategy == ranked[0].strategy]
    assert ranked[0].score == pytest.approx(np.mean([r.score for r in own]))
    assert (ranked[0].worst, ranked[0].worst_space) == min((r.score, r.space) for r in own)
    np.testing.assert_allclose(ranked[0].speed, np.mean([r.speed for r in own], axis=0))


def test_the_middle_space_tells_how_soon_a_strategy_is_near_the_optimum() -> None:
    def row(space: str, n95: float | None, n99: float | None) -> SearchScore:
        return SearchScore(space, "s", 9, 1, 1, 1, 0.5, ((1, 0.5),), n95, n99, 1.0, (1.0,))

    (odd,) = standings([row("a", 4.0, None), row("b", None, None), row("c", 10.0, 20.0)])
    assert (odd.n95, odd.n99) == (10.0, None)
    (even,) = standings([row("a", 4.0, 30.0), row("b", None, None), row("c", 10.0, 20.0), row("d", 20.0, 40.0)])
    assert (even.n95, even.n99) == (15.0, 35.0)


def test_runs_have_a_thread_each_whatever_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    inherited: list[str | None] = []

    class Inline(ThreadPoolExecutor):
        def __init__(self, n: int, mp_context: object) -> None:
            super().__init__(n, initializer=lambda: inherited.append(os.environ.get("OPENBLAS_NUM_THREADS")))

    monkeypatch.setattr("emmy.search.evaluate.ProcessPoolExecutor", Inline)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "7")
    evaluate(("random",), ("convolution.w6600",), seeds=1, budget=3, processes=1)
    assert inherited == ["1"] and os.environ["OPENBLAS_NUM_THREADS"] == "7"


@pytest.mark.parametrize(
    ("strategies", "spaces", "seeds", "message"),
    [(("annealing",), (), 1, "annealing"), (("auto",), ("gemm.a64fx",), 1, "gemm.a64fx"), (("auto",), (), 0, "seeds")],
)
def test_what_cannot_be_evaluated_is_refused_before_anything_runs(
    strategies: tuple[str, ...], spaces: tuple[str, ...], seeds: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        evaluate(strategies, spaces, seeds=seeds)


def test_siblings_are_other_devices_of_the_kernel_and_the_vendor() -> None:
    assert siblings("convolution.a100") == ["convolution.a4000"]
    assert siblings("convolution.w6600") == ["convolution.mi250x"]
    assert all(siblings(n) and n not in siblings(n) for n in recorded.names())


@pytest.mark.slow
def test_copy_nearest_is_the_order_of_the_other_device_without_chance() -> None:
    order = copied("convolution.a4000")
    there = {frozenset(p.choices): t for p, t in _timed("convolution.a100")}
    times = [there.get(frozenset(p.choices), np.inf) for p in order]
    assert times == sorted(times) and len(set(order)) == len(load_recorded("convolution.a4000").times_us)
    rows = evaluate((COPY,), ("convolution.a4000",), seeds=3, budget=20, processes=1)
    assert [(r.strategy, r.seeds) for r in rows] == [(COPY, 1), ("random", 3)]


@pytest.mark.slow
def test_the_models_list_is_its_order_without_chance() -> None:
    space = load_recorded("convolution.w6600")
    order = listed(space.name)
    predicted, _ = sibling_model(space.name).predict(space.features(list(order)))
    assert (np.diff(predicted) >= 0).all() and set(order) == set(space.points())
    rows = evaluate((LIST,), (space.name,), seeds=3, budget=20, processes=1)
    assert [(r.strategy, r.seeds) for r in rows] == [(LIST, 1), ("random", 3)]
    best = min(t for p, t in _timed(space.name) if p in order[:20])
    assert rows[0].speed[-1] == pytest.approx(space.times_us.min() / best)


def _timed(name: str) -> Iterable[tuple[Point, float]]:
    space = load_recorded(name)
    return zip(space.points(), space.times_us, strict=True)


@pytest.mark.slow
def test_auto_reaches_its_score_and_a_siblings_model_improves_it() -> None:
    space = load_recorded("convolution.a4000")
    cold, warm = (
        performance(space.times_us, np.array([replay(space, name, seed, 200, 8) for seed in range(3)])).mean()
        for name in ("auto", "auto+model")
    )
    assert cold > 0.4 and warm > max(cold, 0.9)
