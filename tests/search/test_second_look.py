"""What is compiled may be passed over: told to the search at its prediction, and never timed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from emmy import api
from emmy.ir.ops import parse_op
from emmy.ir.target import load_target
from emmy.measure.fake import FakeMeasurer
from emmy.measure.measurer import Look
from emmy.records import Candidate, Measurement
from emmy.search.schedule_space import ScheduleSpace
from emmy.search.second_look import SecondLook
from emmy.search.tuner import PASSED_OVER, Stop

OP = "matmul:64x96x128:f32"


class SeesRegisters:
    """Predicts 8 us, and 80 us where a thread takes more than half of the registers."""

    is_calibrated = True
    card = SimpleNamespace(built_names=("built_registers",))

    def predict_built(self, x: np.ndarray, built: np.ndarray) -> np.ndarray:
        return np.log2(np.where(built[:, 0] > 0.5, 80.0, 8.0))


def test_only_what_is_far_behind_is_passed_over_and_predictions_learn_from_rows() -> None:
    space = ScheduleSpace(parse_op("matmul:64x64x64:f16"), load_target("h200"))
    schedule, few, many = space.default().key, {"registers": 40.0}, {"registers": 200.0}
    look = SecondLook.of(space, SeesRegisters())  # type: ignore[arg-type]
    assert look is not None and look.as_of(8.0) is None, "without rows of the op nothing is passed over"
    row = FakeMeasurer("h200").measure([Candidate(space.op.key, schedule)])[0]
    for _ in range(4):
        look.learn(replace(row, status="ok", samples_us=(16.0,), static=few))  # twice as slow as predicted
    now, later = look.as_of(16.0), look.as_of(120.0)
    assert now is not None and later is not None and look.as_of(None) is None
    slow = now(schedule, many, 16.0)
    assert slow is not None and 80 < slow <= 160
    assert later(schedule, many, 120.0) is None and now(schedule, few, 16.0) is None
    look.learn(replace(row, status="ok", samples_us=(16.0,), static=many))
    assert now(schedule, many, 16.0) == slow, "what is learnt later does not change what a batch is looked at with"
    blind = SimpleNamespace(is_calibrated=True, card=SimpleNamespace(built_names=()))
    assert SecondLook.of(space, blind) is None and SecondLook.of(space, None) is None  # type: ignore[arg-type]


class Compiles(FakeMeasurer):
    """Asks the look about each candidate, as a measurer with a compiler does."""

    def stream(
        self, candidates: Sequence[Candidate], best_us: float | None = None, look: Look | None = None
    ) -> Iterator[Measurement]:
        for row in super().stream(candidates, best_us):
            us = look(row.schedule, {}, best_us) if look else None
            yield row if us is None else replace(row, status=PASSED_OVER, samples_us=(), static={"predicted_us": us})


class EveryThird:
    """Passes over every third schedule, and remembers what it was taught."""

    def __init__(self) -> None:
        self.learnt: list[str] = []

    def as_of(self, best_us: float | None) -> Look:
        return self._passes

    def _passes(self, schedule: str, static: Mapping[str, float], best_us: float | None) -> float | None:
        return 1e6 if sum(map(ord, schedule)) % 3 == 0 else None

    def learn(self, row: Measurement) -> None:
        self.learnt.append(row.schedule)


@pytest.mark.slow
def test_a_run_counts_what_was_timed_and_goes_on_after_an_interruption_as_if_there_was_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emmy.search.session.SecondLook.of", lambda space, model: EveryThird())

    def tune(home: Path, stop: Stop | None = None, most: int = 10**6) -> api.TuneResult:
        def listen(event: object) -> None:
            if stop is not None and getattr(event, "n", 0) >= most:
                stop.asked = True

        return api.tune(OP, budget="24", strategy="evolve", home=home, measurer=Compiles(), stop=stop, on_event=listen)

    whole = tune(tmp_path / "whole")
    assert whole.trials == 24 and whole.counts[PASSED_OVER] > 2 and len(whole.rows) == 24 + whole.counts[PASSED_OVER]
    first = tune(tmp_path / "parts", Stop(), 12)
    assert first.why == "interrupted"
    second = tune(tmp_path / "parts")
    assert [(r.schedule, r.status) for r in second.rows] == [(r.schedule, r.status) for r in whole.rows]
    assert not {r.schedule for r in whole.rows if r.status == PASSED_OVER} & {r.schedule for r in whole.finalists}
