"""Measuring on this processor: every way a kernel can go wrong becomes the right row, and the next one still measures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from emmy.errors import DeviceBusy, NoSuchDevice, UsageError
from emmy.ir.target import load_target
from emmy.measure.cpu import CpuMeasurer
from emmy.measure.protocol import STOCK, Job, Report
from emmy.measure.worker import Fault
from emmy.measure.worker_measurer import RunLimit
from emmy.records import Candidate, Status
from tests.measure import kernels
from tests.measure.contract import MeasurerContract

LIMIT = RunLimit(least_s=1.0, times=50.0, unknown_s=1.0)
RIGHT = Candidate(kernels.OP, "right")

# kernel -> the status and a piece of the message of its row
EXPECTED: dict[str, tuple[Status, str]] = {
    "slow": ("ok", ""),
    "prints": ("ok", ""),
    "refused": ("constraints", "move 0 k0/split(m,core,0): a step of 0"),
    "no_such_syntax": ("compile", "error: unknown type name"),
    "hang": ("timeout", "did not come back in the time allowed, while checking integer inputs"),
    "hang_printing": ("timeout", "the last it printed: still here"),
    "hang_with_child": ("timeout", "did not come back"),
    "segfault": ("runtime", "SIGSEGV"),
    "abort": (
        "runtime",
        "SIGABRT: gave up by itself, while checking integer inputs, seed 0; the last it printed: no more",
    ),
    "exit": ("runtime", "exit code 7"),
    "kill": ("device_lost", "killed from outside"),
    "writes_on_every_descriptor": ("runtime", "channel between worker and tuner"),
    "answers_half_a_line": ("runtime", "where the worker notes its progress"),
    "closes_every_descriptor": ("runtime", "Bad file descriptor"),
    "past_the_end": ("correctness", "out of bounds of C: 4 bytes past its end were written, the nearest 1 away"),
    "far_past_the_end": ("runtime", "SIGSEGV"),
    "before_the_start": ("correctness", "out of bounds of C: 4 bytes before its start"),
    "far_before_the_start": ("runtime", "SIGSEGV"),
    "past_an_input": ("correctness", "out of bounds of B"),
    "reads_past_an_input": ("correctness", "C[0,0] was never written (or computed from what lies outside an operand)"),
    "modifies_an_input": ("correctness", "input A was modified: the first change is at [2,1]"),
    "reorders_an_input": ("correctness", "input B was modified: the first change is at [0,3]"),
    "leaves_a_row": ("correctness", "C[32,0] was never written"),
    "off_by_one": ("correctness", "C[5,2] is"),
    "slightly_off": ("correctness", "times the error allowed"),
    "constant": ("correctness", "C[0,0] is 1, want"),
    "answers_once": ("correctness", "normal inputs, seed 1: C[0,0] was never written"),
    "remembers_by_address": ("correctness", "normal inputs, seed 1"),
    "wrong_after_a_while": ("correctness", "right at first, wrong after"),
}


def make(folder: Path, limit: RunLimit = LIMIT) -> CpuMeasurer:
    return CpuMeasurer(load_target("cpu"), build=kernels.builder(folder), cache=folder, limit=limit)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuMeasurer]:
    with make(tmp_path_factory.mktemp("cpu")) as measurer:
        yield measurer


class TestCpuMeasurer(MeasurerContract):
    good, bad = RIGHT, Candidate(kernels.OP, "off_by_one")

    @pytest.fixture
    def measurer(self, shared: CpuMeasurer) -> CpuMeasurer:
        return shared


def test_every_kernel_has_an_expected_row() -> None:
    assert set(EXPECTED) | {"right"} == set(kernels.KERNELS) | {"refused"}


# One of each way to fail in the first tier; the others differ in what they say.
LATER = {
    "prints", "hang_printing", "hang_with_child", "abort", "answers_half_a_line", "closes_every_descriptor",
    "far_past_the_end", "before_the_start", "far_before_the_start", "past_an_input", "reorders_an_input", "leaves_a_row",
    "slightly_off", "constant", "answers_once", "writes_on_every_descriptor", "remembers_by_address", "exit", "kill",
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LATER)) for n in EXPECTED])
def test_a_bad_kernel_becomes_the_right_row_and_the_next_measures_right(name: str, shared: CpuMeasurer) -> None:
    row, after = shared.measure([Candidate(kernels.OP, name), RIGHT])
    status, message = EXPECTED[name]
    assert (row.status, message in row.message) == (status, True), row.message
    assert after.status == "ok"
    assert after.error_norm is not None
    assert after.error_norm <= 1


def test_a_child_that_a_hanging_kernel_forked_dies_with_it(shared: CpuMeasurer) -> None:
    shared.measure([RIGHT])
    group = shared.worker.pid
    assert group is not None
    shared.measure([Candidate(kernels.OP, "hang_with_child")])
    assert eventually(lambda: not members(group))


def test_a_row_carries_source_facts_and_circumstances(shared: CpuMeasurer) -> None:
    (row,) = shared.measure([RIGHT])
    assert row.source_digest == "digest of right"
    assert row.static["code_bytes"] > 0
    assert {"warm_us", "buffer_sets", "displaced", "switches"} <= set(row.static)
    assert (row.protocol.clock, row.protocol.threads, row.protocol.cache) == ("thread_cpu", 1, "cold")
    assert row.wall_s > 0
    assert row.id != shared.measure([RIGHT])[0].id


@pytest.mark.slow
def test_a_race_loses_only_the_guilty(shared: CpuMeasurer) -> None:
    names = ["right", "segfault", "slow", "refused", "off_by_one"]
    rows = shared.race([Candidate(kernels.OP, n) for n in names], rounds=3)
    assert [r.status for r in rows] == ["ok", "runtime", "ok", "constraints", "correctness"]
    assert [r.schedule for r in rows] == names
    assert [len(r.samples_us) for r in rows] == [3, 0, 3, 0, 0]


def test_a_race_between_different_ops_is_refused(shared: CpuMeasurer) -> None:
    with pytest.raises(UsageError, match="one op"):
        shared.race([RIGHT, Candidate("matmul:8x8x8:f32", "right")])


def test_what_is_faster_than_the_device_can_be_is_implausible(tmp_path: Path) -> None:
    with CpuMeasurer(
        load_target("cpu"), build=kernels.builder(tmp_path), cache=tmp_path, floor_us=lambda op: 1e9, limit=LIMIT
    ) as measurer:
        (row,) = measurer.measure([RIGHT])
    assert row.status == "implausible"
    assert row.samples_us
    assert row.time_us is None


def test_a_worker_killed_while_measuring_costs_one_row(tmp_path: Path) -> None:
    with make(tmp_path, RunLimit(least_s=60, unknown_s=60)) as measurer:
        measurer.measure([RIGHT])
        victim = measurer.worker.pid
        assert victim is not None
        killer = threading.Thread(
            target=lambda: eventually((tmp_path / "hanging").exists) and os.kill(victim, signal.SIGKILL)
        )
        killer.start()
        lost, after = measurer.measure([Candidate(kernels.OP, "hang"), RIGHT])
        killer.join()
        assert lost.status == "device_lost"
        assert after.status == "ok"
        assert measurer.worker.pid != victim


def test_a_worker_killed_while_idle_costs_nothing(tmp_path: Path) -> None:
    with make(tmp_path) as measurer:
        measurer.measure([RIGHT])
        assert measurer.worker.pid is not None
        os.kill(measurer.worker.pid, signal.SIGKILL)
        time.sleep(0.1)
        assert measurer.measure([RIGHT])[0].status == "ok"
        assert measurer.worker.n_started == 2


def test_a_worker_outlives_the_thread_that_needed_it_first(tmp_path: Path) -> None:
    with make(tmp_path) as measurer:
        first = threading.Thread(target=measurer.measure, args=([RIGHT],))
        first.start()
        first.join()
        time.sleep(0.1)
        assert measurer.measure([RIGHT])[0].status == "ok"
        assert measurer.worker.n_started == 1


@pytest.mark.slow
def test_an_interruption_ends_the_worker_so_that_no_answer_comes_late(tmp_path: Path) -> None:
    class Interrupted(BaseException):
        pass

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with make(tmp_path, RunLimit(least_s=60, unknown_s=60)) as measurer:
            sender = threading.Thread(
                target=lambda: eventually((tmp_path / "hanging").exists) and os.kill(os.getpid(), signal.SIGUSR1)
            )
            sender.start()
            with pytest.raises(Interrupted):
                measurer.measure([Candidate(kernels.OP, "hang")])
            sender.join()
            assert measurer.worker.pid is None
            assert measurer.measure([RIGHT])[0].status == "ok"
    finally:
        signal.signal(signal.SIGUSR1, before)


PARENT = """
import sys
from pathlib import Path
from emmy.ir.target import load_target
from emmy.measure.cpu import CpuMeasurer
from emmy.measure.protocol import STOCK, Job, Report
from emmy.measure.worker import Fault
from emmy.measure.worker_measurer import RunLimit
from emmy.records import Candidate
from tests.measure import kernels
folder = Path(sys.argv[1])
m = CpuMeasurer(load_target("cpu"), build=kernels.builder(folder), cache=folder, limit=RunLimit(60, 50, 60))
m.measure([Candidate(kernels.OP, "right")])
print(m.worker.pid, flush=True)
m.measure([Candidate(kernels.OP, sys.argv[2])] * 1000)
"""


@pytest.mark.parametrize("doing", ["hang", "right"])
def test_a_killed_tuner_leaves_neither_worker_nor_lock(doing: str, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), doing],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    assert members(worker)
    with pytest.raises(DeviceBusy, match=f"process {process.pid} "):
        make(tmp_path)
    if doing == "hang":
        assert eventually((tmp_path / "hanging").exists)
    process.kill()
    process.wait()
    assert eventually(lambda: not members(worker))
    make(tmp_path).close()


def test_closing_ends_the_worker_and_gives_the_device_back(tmp_path: Path) -> None:
    measurer = make(tmp_path)
    measurer.measure([RIGHT])
    worker = measurer.worker.pid
    assert worker is not None
    measurer.close()
    assert not members(worker)
    make(tmp_path).close()


def test_a_launcher_that_cannot_be_built_stops_the_run_and_blames_no_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMMY_CXX", "/nowhere/c++")
    with make(tmp_path) as measurer, pytest.raises(NoSuchDevice, match="no compiler '/nowhere/c"):
        measurer.measure([RIGHT])


@pytest.mark.slow
def test_an_op_too_large_for_memory_blames_no_kernel(tmp_path: Path) -> None:
    large = Candidate("matmul:16777216x16777216x1:f32", "")
    with CpuMeasurer(load_target("cpu"), cache=tmp_path) as measurer:
        (row,) = measurer.measure([large])
    assert row.status == "device_lost" and "out of memory" in row.message


def test_more_threads_than_cores_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="threads is 9999, allowed 1"):
        CpuMeasurer(load_target("cpu"), threads=9999, cache=tmp_path)


def test_a_gpu_is_not_measured_here(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="rtx4090"):
        CpuMeasurer(load_target("rtx4090"), cache=tmp_path)


@pytest.mark.parametrize(
    ("floor", "known", "seconds"),
    [(None, None, 60.0), (1e7, None, 500.0), (100.0, 200.0, 2.0), (1e5, 2e5, 10.0), (3e5, 2e5, 15.0)],
)
def test_the_limit_follows_from_what_is_known(floor: float | None, known: float | None, seconds: float) -> None:
    assert RunLimit().seconds(floor, known) == pytest.approx(seconds)


@pytest.mark.serial
def test_a_larger_problem_takes_longer_and_the_two_clocks_agree(tmp_path: Path) -> None:
    small, large = Candidate("matmul:33x17x9:f32", "right"), Candidate("matmul:330x170x9:f32", "right")
    with make(tmp_path) as measurer:
        rows = measurer.measure([small, large, small, large])
    times = [r.time_us for r in rows]
    assert all(t is not None for t in times)
    a, b, c, d = (t or 0.0 for t in times)
    assert min(b, d) > 20 * max(a, c)  # 100 times the work


@pytest.mark.serial
def test_generated_kernels_are_measured_by_several_threads_beside_the_stock_kernel(tmp_path: Path) -> None:
    target = load_target("cpu")
    if target.cores < 2:
        pytest.skip("one core")
    with CpuMeasurer(target, threads=2, cache=tmp_path) as measurer:
        rows = measurer.measure([Candidate("matmul:64x64x64:f32", s) for s in ("", "k0/split(m,core,32)")])
    for row in rows:
        assert row.status == "ok", row.message
        assert (row.protocol.clock, row.protocol.threads) == ("wall", 2)
        assert row.baseline_us is not None
        assert row.static["speedup"] > 0


def members(group: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


def eventually(holds: object) -> bool:
    """Whether it comes to hold within ten seconds."""
    assert callable(holds)
    for _ in range(200):
        if holds():
            return True
        time.sleep(0.05)
    return False


def test_a_stock_kernel_that_ends_the_worker_costs_the_ratio_and_no_candidate(
    shared: CpuMeasurer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, asked = shared.worker.ask, list[bool]()

    def ends_with_stock(job: Job) -> Report | Fault:
        asked.append(bool(job.rivals))
        return Fault("runtime", "exit code 1, while checking the stock kernel", STOCK) if job.rivals else ask(job)

    monkeypatch.setattr(shared.worker, "ask", ends_with_stock)
    (row,) = shared.race([RIGHT], rounds=3)
    assert asked == [True, False]
    assert row.status == "ok" and row.baseline_us is None and "speedup" not in row.static


def test_what_a_look_has_a_time_for_is_compiled_and_not_run(shared: CpuMeasurer) -> None:
    pair = [RIGHT, Candidate(kernels.OP, "segfault")]
    right, other = shared.stream(pair, look=lambda schedule, static, best_us: None if schedule == "right" else 5.0)
    assert right.status == "ok" and other.status == "passed_over" and other.static["predicted_us"] == 5.0
    assert other.source_digest and other.time_us is None and other.message == "predicted 5 us once compiled"
