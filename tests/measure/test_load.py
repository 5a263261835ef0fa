"""Telling a quiet device from a busy or throttled one."""

from __future__ import annotations

import sys

import pytest

from emmy.measure.load import Load, Snapshot, between, is_contended, snapshot, spread

QUIET = Load(others_cores=0.1, steal=0.0, clock_ratio=1.0)
EVEN = (100.0, 100.4, 100.2, 100.1, 100.3, 100.0, 100.2)


def judge(
    load: Load | None = QUIET,
    samples: tuple[float, ...] = EVEN,
    clock: str = "thread_cpu",
    threads: int = 1,
    displaced: float = 0.0,
) -> bool:
    return is_contended(load, samples, clock=clock, threads=threads, cores=2, displaced=displaced)


def test_even_samples_on_a_quiet_device_are_not_contended() -> None:
    assert not judge()
    assert not judge(clock="wall", threads=2)
    assert not judge(load=None)


def test_samples_that_scatter_are_contended_whatever_the_load_says() -> None:
    assert judge(samples=(100, 110, 130, 100, 95, 120, 104))
    assert not judge(samples=(100, 100, 100, 100, 100, 100, 180))  # one outlier does not move a median


@pytest.mark.parametrize(
    "load",
    [Load(0.1, 0.2, 1.0), Load(0.1, 0.0, 0.7)],
    ids=["the hypervisor ran others", "the clock fell"],
)
def test_steal_and_throttling_are_contended(load: Load) -> None:
    assert judge(load=load)


def test_other_processes_count_when_they_take_cores_that_the_wall_clock_needs() -> None:
    busy = Load(others_cores=0.6, steal=0.0, clock_ratio=1.0)
    assert judge(load=busy, clock="wall", threads=2)
    assert not judge(load=busy, clock="wall", threads=1)
    assert not judge(load=busy)  # the thread's own clock stands still meanwhile


def test_a_thread_that_ran_less_than_half_the_time_is_contended() -> None:
    assert judge(displaced=0.6)
    assert not judge(displaced=0.3)


def test_the_load_of_others_leaves_out_our_own() -> None:
    begin = Snapshot(wall_s=10, busy_s=100, steal_s=1, emmy_s=5, clock_mhz=3000)
    end = Snapshot(wall_s=12, busy_s=104, steal_s=1, emmy_s=6, clock_mhz=2400)
    load = between(begin, end, worker_cpu_s=2.0)
    assert load is not None
    assert load.others_cores == pytest.approx(0.5)
    assert load.clock_ratio == pytest.approx(0.8)


def test_too_short_a_window_says_nothing() -> None:
    begin = Snapshot(10, 100, 1, 5, None)
    assert between(begin, Snapshot(10.05, 100.1, 1, 5, None), 0.0) is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_this_machine_tells_its_totals() -> None:
    now = snapshot()
    assert now is not None
    assert now.busy_s > 0


def test_spread_is_the_distance_between_the_quartiles() -> None:
    assert spread((1.0, 2.0, 3.0, 4.0, 5.0)) == pytest.approx(2 / 3)
