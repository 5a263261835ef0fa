"""Several devices, one course: what a run measures follows from what was answered, not from when or by whom."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from emmy import api
from emmy.measure.device_pool import DevicePool
from emmy.measure.fake import FakeMeasurer
from emmy.measure.journal import read_journal
from emmy.measure.measurer import Look
from emmy.measure.member import LocalMember
from emmy.records import Candidate, Measurement
from emmy.search.events import Event, Measured
from emmy.search.random_strategy import RandomStrategy
from emmy.search.registry import STRATEGIES
from emmy.search.space import Trial
from emmy.search.tuner import Stop, TuneResult

OP = "matmul:64x96x128:f32"


class HeedsStrategy(RandomStrategy):
    """Random points, and other ones after anything else that it was told: cheap, and as easily led astray as can be."""

    name = "heeds"

    def learn(self, trials: Sequence[Trial]) -> None:
        self.rng.seed(f"{self.rng.random()} {[(t.point.key, t.time_us) for t in trials]}")


@pytest.fixture(autouse=True)
def heeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STRATEGIES, "heeds", (__name__, "HeedsStrategy"))


class Uneven(FakeMeasurer):
    """Takes up to 3 ms for a candidate, as chance has it."""

    def stream(
        self, candidates: Sequence[Candidate], best_us: float | None = None, look: Look | None = None
    ) -> Iterator[Measurement]:
        for row in super().stream(candidates, best_us):
            time.sleep(random.uniform(0, 0.003))
            yield row


def pool(n: int) -> DevicePool:
    return DevicePool(FakeMeasurer(fault_share=0.1).device, [LocalMember(Uneven(fault_share=0.1)) for _ in range(n)])


def tune(home: Path, measurer: DevicePool | FakeMeasurer, ahead: int = 0, **options: object) -> TuneResult:
    asked: dict[str, object] = {
        "budget": "24",
        "strategy": "evolve",
        "home": home,
        "measurer": measurer,
        "ahead": ahead,
    }
    return api.tune(OP, **(asked | options))  # type: ignore[call-overload, no-any-return]


def course(result: TuneResult) -> list[tuple[str, str, float | None]]:
    return [(r.schedule, r.status, r.time_us) for r in result.rows]


@pytest.mark.slow
def test_several_devices_give_the_rows_and_the_winner_of_one(tmp_path: Path) -> None:
    one = tune(tmp_path / "one", FakeMeasurer(fault_share=0.1), ahead=3)
    with pool(5) as devices:
        many = tune(tmp_path / "many", devices, ahead=3)
    assert course(many) == course(one) and len(one.rows) == 24
    assert many.best is not None and one.best is not None and many.best.schedule == one.best.schedule
    assert [r.schedule for r in many.finalists] == [r.schedule for r in one.finalists]


@pytest.mark.slow
def test_how_far_ahead_a_run_asks_follows_the_devices_and_stays_when_it_is_resumed(tmp_path: Path) -> None:
    with pool(8) as devices:
        whole = tune(tmp_path / "whole", devices, budget="24")
    stop = Stop()

    def listen(event: Event) -> None:
        stop.asked = stop.asked or (isinstance(event, Measured) and event.n >= 9)

    with pool(8) as devices:
        assert tune(tmp_path / "parts", devices, budget="24", on_event=listen, stop=stop).why == "interrupted"
    with pool(2) as devices:
        rest = tune(tmp_path / "parts", devices, budget="24")
    one = tune(tmp_path / "one", FakeMeasurer(fault_share=0.1), budget="24")
    assert course(rest) == course(whole) != course(one)


@pytest.mark.slow
def test_rows_that_came_before_their_turn_are_kept_when_the_run_is_cut_short(tmp_path: Path) -> None:
    """And each row is stored once, though several of them were out."""
    stop = Stop()

    def listen(event: Event) -> None:
        stop.asked = stop.asked or (isinstance(event, Measured) and event.n >= 11)

    with pool(4) as devices:
        first = tune(tmp_path, devices, on_event=listen, stop=stop)
        asked = sum(m.measurer.n_measured for m in devices.members if isinstance(m, LocalMember))
    (path,) = (tmp_path / "journal").glob("*.jsonl")
    stored = read_journal(path).rows
    assert first.trials == 11 and len({r.schedule for r in stored}) == len(stored) == asked > 11


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["20", "patience=6"])
def test_the_end_of_a_budget_does_not_depend_on_the_devices(budget: str, tmp_path: Path) -> None:
    results = []
    for n in (1, 4):
        with pool(n) as devices:
            results.append(tune(tmp_path / str(n), devices, ahead=2, budget=budget))
    assert course(results[0]) == course(results[1]) and results[0].why == results[1].why
    assert [r.schedule for r in results[0].finalists] == [r.schedule for r in results[1].finalists]
