"""Taking samples, on a clock that the calls themselves move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emmy.measure.device import Call
from emmy.measure.timing import FEW_SAMPLES, SAMPLE_NS, Participant, set_count, take, take_warm


@dataclass
class Machine:
    """Runs calls that take as long as they say, and remembers who ran on which set."""

    now_ns: int = 0
    runs: list[tuple[str, int]] = field(default_factory=list)

    def participant(self, name: str, run_ns: int, sets: int) -> Participant:
        def call(i: int) -> Call:
            def run() -> None:
                self.now_ns += run_ns
                self.runs.append((name, i))

            return run

        return Participant(tuple(call(i) for i in range(sets)), lambda seconds: None)

    def clock(self, calls: Sequence[Call]) -> int:
        begin = self.now_ns
        for call in calls:
            call()
        return self.now_ns - begin


@pytest.mark.parametrize("run_ns", [300, 99_000, 5_000_000, 400_000_000])
def test_samples_say_what_one_run_takes_however_many_make_a_sample(run_ns: int) -> None:
    machine = Machine()
    p = machine.participant("a", run_ns, 3)
    take([p], machine.clock, 7, thorough=True)
    assert p.samples_us == pytest.approx([run_ns / 1e3] * 7)
    assert p.repeats * run_ns >= min(SAMPLE_NS, 10_000 * run_ns)


def test_participants_take_turns_and_meet_every_set() -> None:
    machine = Machine()
    a, b = machine.participant("a", 2_000_000, 3), machine.participant("b", 2_000_000, 3)
    take([a, b], machine.clock, 6, thorough=True)
    assert [name for name, _ in machine.runs] == ["a", "b"] * 7
    assert [i for _, i in machine.runs] == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1]
    assert {i for name, i in machine.runs if name == "a"} == {0, 1, 2}


def test_a_hopeless_candidate_gets_one_sample() -> None:
    machine = Machine()
    p = machine.participant("a", 2_000_000, 1)
    take([p], machine.clock, 7, thorough=False, best_us=600.0)
    assert len(p.samples_us) == 1


def test_a_long_candidate_gets_few_samples_and_no_warm_up_after_a_check() -> None:
    machine = Machine()
    p = machine.participant("a", 200_000_000, 2)
    p.estimate_ns = 210_000_000
    take([p], machine.clock, 7, thorough=False)
    assert len(p.samples_us) == FEW_SAMPLES
    assert len(machine.runs) == FEW_SAMPLES


def test_a_race_takes_all_samples_whatever_the_best() -> None:
    machine = Machine()
    p = machine.participant("a", 200_000_000, 2)
    take([p], machine.clock, 7, thorough=True, best_us=1.0)
    assert len(p.samples_us) == 7


def test_warm_runs_stay_on_one_set() -> None:
    machine = Machine()
    p = machine.participant("a", 2_000_000, 5)
    assert take_warm(p, machine.clock, thorough=True) == pytest.approx(2000)
    assert {i for _, i in machine.runs} == {0}


@given(st.integers(1, 1 << 26), st.integers(1, 1 << 30), st.integers(1, 1 << 34), st.integers(1, 8))
def test_sets_are_as_many_as_cold_needs_and_memory_allows(cold: int, size: int, memory: int, participants: int) -> None:
    n = set_count(cold, size, memory, participants)
    assert n >= 1
    assert gcd(n, participants) == 1
    assert n == 1 or n * size <= memory
    affordable = min(2048, memory // size)
    assert (n - 1) * size >= cold or n >= affordable - participants
