"""Scores are what a reader would count by hand, and the baselines are no strawmen."""

from __future__ import annotations

from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emmy.costmodel.evaluate import copy_nearest, fixed_list, random_score, score, spearman

# Apart enough to be told apart by their logarithms.
times = st.lists(st.integers(1, 10**6).map(float), min_size=2, max_size=9, unique=True).map(np.array)


def test_regret_is_how_much_slower_the_best_of_the_first_picks_is() -> None:
    t = np.array([10.0, 12.0, 11.0, *range(20, 40)])
    ranking = np.array([5.0, 1.0, 2.0, *range(10, 30)])  # picks 12, then 11, then 10
    s = score(t, ranking)
    assert s.top1 == pytest.approx(0.2) and s.top10 == 0.0


@given(times)
def test_a_perfect_ranking_has_no_regret_and_correlation_one(t: np.ndarray) -> None:
    s = score(t, np.log2(t))
    assert (s.top1, s.top10) == (0.0, 0.0) and s.spearman == pytest.approx(1.0)
    assert spearman(t, -t) == pytest.approx(-1.0)


@given(times)
def test_random_regret_is_the_mean_over_every_choice(t: np.ndarray) -> None:
    by_hand = np.mean([min(c) for c in combinations(t, 1)]) / t.min() - 1
    assert random_score(t).top1 == pytest.approx(by_hand)


def test_random_top10_is_the_mean_over_every_choice_of_ten() -> None:
    t = np.arange(1.0, 14.0) ** 2
    by_hand = np.mean([min(c) for c in combinations(t, 10)]) - 1
    assert random_score(t).top10 == pytest.approx(by_hand)


def test_measurements_to_97_percent_are_the_place_of_the_first_fast_one_and_at_random_its_mean() -> None:
    t = np.array([5.0, 1.02, 3.0, 1.0, 4.0])
    assert score(t, np.arange(5.0)).to97 == 2.0  # 1.02 is within 97 % of the best speed
    at = [min(order.index(1), order.index(3)) + 1 for order in permutations(range(5))]
    assert random_score(t).to97 == pytest.approx(np.mean(at))


def test_spearman_gives_ties_their_mean_rank_and_a_constant_nothing() -> None:
    assert spearman(np.array([1.0, 2.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0, 4.0])) == pytest.approx(0.9486833)
    assert spearman(np.array([1.0, 2.0, 3.0]), np.zeros(3)) == 0.0


def test_ties_in_a_ranking_are_broken_at_random_not_by_the_order_of_rows() -> None:
    t = np.arange(1.0, 101.0)
    picked = {score(t, np.zeros(100), seed).top1 for seed in range(8)}
    assert len(picked) > 4


def test_a_fixed_list_ranks_by_mean_slowdown_and_puts_the_unknown_last() -> None:
    ranking = fixed_list(["a", "b", "new"], ["a", "a", "b"], np.array([1.0, 3.0, 1.5]))
    assert ranking.tolist() == [2.0, 1.5, np.inf]


def test_copying_the_nearest_uses_the_same_schedule_or_else_the_most_similar_one() -> None:
    donor_x = np.array([[0.0, 5.0], [10.0, 5.0]])
    x = np.array([[9.0, 5.0], [9.0, np.nan], [1.0, 5.0]])
    ranking = copy_nearest(x, ["slow", "new", "new too"], donor_x, ["slow", "fast"], np.array([100.0, 1.0]))
    assert ranking.tolist() == [100.0, 1.0, 100.0]
