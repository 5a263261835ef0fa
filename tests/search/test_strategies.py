"""Every registered strategy keeps the contract; what each promises beyond it."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from emmy.errors import UsageError
from emmy.search.lfbo import LfboStrategy
from emmy.search.optuna_strategy import OptunaStrategy
from emmy.search.pool import Pool
from emmy.search.registry import COLLECT, STRATEGIES, make_strategy
from emmy.search.space import Space, Trial
from emmy.search.strategy import Ranker, Strategy
from emmy.testing.strategy_contract import StrategyContract, ToySpace


class _Registered(StrategyContract):
    name: ClassVar[str]

    def make(self, space: Space, seed: int = 0, model: Ranker | None = None, known: Sequence[Trial] = ()) -> Strategy:
        return make_strategy(self.name, space, seed=seed, model=model, known=known)


class TestRandom(_Registered):
    name, learns = "random", False


class TestEvolve(_Registered):
    name = "evolve"


class TestMcts(_Registered):
    name, follows_model = "mcts", True


class TestOptuna(_Registered):
    name = "optuna"


class TestAuto(_Registered):
    name, follows_model = "auto", True


class TestLfbo(_Registered):
    name, follows_model = "lfbo", True


class TestCollect(_Registered):
    name, learns = "collect", False


def test_lfbo_forgets_candidates_of_an_unlisted_space_and_none_that_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("emmy.search.lfbo._MOST", 40)
    space = ToySpace(listed=False)
    strategy = LfboStrategy(space)
    contract = TestLfbo()
    done = contract.run(strategy, space, 60, 4)
    rows = strategy._row
    assert {t.point.key for t in done} <= set(rows) and len(rows) <= 60 + 40 + 16 * 4
    assert [strategy._points[i].key for i in rows.values()] == list(rows) and len(strategy._x) == len(rows)
    assert all(strategy._time[rows[t.point.key]] == (t.time_us and math.log2(t.time_us)) for t in done)
    np.testing.assert_array_equal(strategy._x, space.features(strategy._points))


@pytest.mark.parametrize("name", [pytest.param("mcts", marks=pytest.mark.slow), "auto"])
def test_the_pool_of_an_unlisted_space_stays_small_and_the_search_still_sees_all_of_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emmy.search.pool.MOST", 30)
    sizes: list[int] = []
    choose = Pool.choose

    def watched(pool: Pool, n: int) -> list[int]:
        sizes.append(len(pool.points))
        return choose(pool, n)

    monkeypatch.setattr(Pool, "choose", watched)
    space = ToySpace(sizes=(1, 2, 4, 8), limit=100, listed=False)
    strategy, trials = make_strategy(name, space), list[Trial]()
    while points := strategy.ask(2):
        trials += [space.trial(p) for p in points]
        strategy.tell(trials[-len(points) :])
    everything = list(space.points())
    assert {t.point.key for t in trials} == {p.key for p in everything}
    assert min(sizes[20:30]) < len(everything) - 5  # candidates were let go


def test_every_registered_strategy_is_tested_here() -> None:
    assert {cls.name for cls in _Registered.__subclasses__()} == {*STRATEGIES, COLLECT}


def test_an_unknown_strategy_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(UsageError, match=r"'annealing' is not one of auto, mcts"):
        make_strategy("annealing", ToySpace())


def test_all_but_optuna_work_without_the_libraries_of_the_tune_extra() -> None:
    program = """
import sys
for absent in ("lightgbm", "optuna", "scipy", "sklearn"):
    sys.modules[absent] = None
from emmy.search.pool import Pool
from emmy.search.registry import make_strategy
from emmy.testing.strategy_contract import ToySpace
space = ToySpace()
for name in ("random", "evolve", "mcts", "auto"):
    strategy = make_strategy(name, space)
    for _ in range(4):
        strategy.tell([space.trial(p) for p in strategy.ask(6)])
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])


def test_optunas_study_is_a_journal_that_another_process_can_open(tmp_path: Path) -> None:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    space, path = ToySpace(), tmp_path / "studies" / "toy.journal"
    for _ in range(2):  # the second run replaces the first one's study
        strategy = OptunaStrategy(space, storage=path)
        told: list[Trial] = []
        for _ in range(3):
            trials = [space.trial(p) for p in strategy.ask(6)]
            strategy.tell(trials)
            told += trials
    storage = JournalStorage(JournalFileBackend(str(path)))
    assert optuna.get_all_study_names(storage) == ["toy"]
    study = optuna.load_study(study_name="toy", storage=storage)
    complete = [t for t in study.get_trials() if t.state == optuna.trial.TrialState.COMPLETE]
    assert len(complete) == sum(t.time_us is not None for t in told)
    assert study.best_value == pytest.approx(
        min(space.log2_time(space.features([t.point]))[0] for t in told if t.time_us)
    )


def test_optuna_keeps_away_from_what_fails_even_where_times_say_nothing() -> None:
    space, failed = ToySpace(), 0
    for seed in range(2):
        strategy = OptunaStrategy(space, seed=seed)
        for i in range(70):
            (point,) = strategy.ask(1)
            fails = space.trial(point).time_us is None
            strategy.tell([Trial(point, None if fails else 100.0)])
            failed += fails and i >= 30
    assert failed <= 4  # of 80; 18 in 100 points of the space fail
