"""The measurer without a device."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from emmy.measure.fake import FakeMeasurer
from emmy.records import Candidate
from tests.measure.contract import MeasurerContract

OP = "matmul:512x1024x3840:f32"


def candidate(step: int) -> Candidate:
    return Candidate(OP, f"k0/split(m,core,{step}) k0/stage(B,pack,1)")


class TestFakeMeasurer(MeasurerContract):
    good, bad = candidate(64), candidate(7)

    @pytest.fixture
    def measurer(self) -> Iterator[FakeMeasurer]:
        with FakeMeasurer(faults={self.bad.schedule: "runtime"}) as m:
            yield m


def test_the_same_candidate_gets_the_same_row_in_every_run_and_order() -> None:
    candidates = [candidate(2**i) for i in range(10)]
    forward = FakeMeasurer(seed=3).measure(candidates)
    backward = FakeMeasurer(seed=3).measure(candidates[::-1])
    assert forward == backward[::-1]


def test_another_seed_gives_another_device() -> None:
    assert FakeMeasurer(seed=1).time_us(candidate(64)) != FakeMeasurer(seed=2).time_us(candidate(64))


def test_each_number_in_a_schedule_has_one_best_value_and_neighbours_behave_alike() -> None:
    m = FakeMeasurer(seed=5)
    times = [m.time_us(candidate(2**i)) for i in range(12)]
    best = times.index(min(times))
    # The noise is 1 %; far from the best value an octave costs more than that.
    assert all(a > b for a, b in pairwise(times[:best]))
    assert all(a < b for a, b in pairwise(times[best + 1 :]))


def test_the_share_of_faults_is_about_what_was_asked_for() -> None:
    rows = FakeMeasurer(fault_share=0.25).measure([candidate(i) for i in range(1, 401)])
    assert 60 < sum(r.status == "runtime" for r in rows) < 140


def test_a_named_fault_keeps_its_status() -> None:
    row = FakeMeasurer(faults={candidate(7).schedule: "timeout"}).measure([candidate(7)])[0]
    assert row.status == "timeout"
