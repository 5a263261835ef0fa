"""kill -9 and Ctrl-C of a tuner process: nothing that was written is lost, and the same command goes on from there."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from emmy import api
from emmy.costmodel.dataset import Dataset
from emmy.measure.fake import FakeMeasurer
from emmy.measure.journal import journal_path, open_journals, read_journal
from emmy.measure.lock import DeviceLock
from emmy.records import Measurement
from emmy.search.tuner import TuneResult

ROOT = Path(__file__).resolve().parents[2]
FAKE = (sys.executable, str(Path(__file__).with_name("fake_tune.py")))
REAL = (sys.executable, "-m", "emmy", "tune")
OP = "matmul:64x96x128:f32"
DELAY_S = 0.005
LIMIT_S = 120.0


def start(command: Sequence[str], home: Path, **variables: str) -> subprocess.Popen[str]:
    """A process of its own group, so that nothing sent to it reaches the tests."""
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    env = {
        **os.environ,
        "PYTHONPATH": path,
        "EMMY_HOME": str(home),
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def fake_tune(home: Path, budget: int, *arguments: str) -> subprocess.Popen[str]:
    command = (*FAKE, str(DELAY_S), OP, "--budget", str(budget), *arguments)
    return start(command, home)


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL, which must find the process still at work."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == -signal.SIGKILL, f"it ended by itself: {said}"


def written(home: Path) -> int:
    """Bytes of the journal in progress."""
    return sum(path.stat().st_size for path in open_journals(home))


def wait_until(reached: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not reached() and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.002)


def kill_at_random(process: subprocess.Popen[str], home: Path, rng: random.Random, most_rows: int) -> None:
    """Lets the process write a random number of rows and some part of the next, or kills it while it still starts."""
    if rng.random() < 0.25:
        time.sleep(rng.uniform(0.0, 1.0))
        kill(process)
        return
    row_bytes = 900
    goal = written(home) + rng.randrange(1, most_rows) * row_bytes
    wait_until(lambda: written(home) >= goal, process)
    time.sleep(rng.uniform(0.0, 2 * DELAY_S))
    kill(process)


def finished_rows(home: Path) -> list[Measurement]:
    (path,) = (home / "journal" / "ingested").glob("*.jsonl")
    return list(read_journal(path).rows)


def told(rows: Sequence[Measurement]) -> list[tuple[str, str, tuple[float, ...]]]:
    return [(r.schedule, r.status, r.samples_us) for r in rows]


def killed_and_resumed(home: Path, kills: int, budget: int, *arguments: str) -> list[Measurement]:
    """The rows of a run that was killed that many times at random moments before it could end."""
    rng = random.Random(kills)
    for _ in range(kills):
        kill_at_random(fake_tune(home, budget, *arguments), home, rng, max(2, budget // kills))
    last = fake_tune(home, budget, *arguments)
    _, said = last.communicate(timeout=LIMIT_S)
    assert last.returncode == 0, said
    return finished_rows(home)


def uninterrupted(home: Path, budget: int, strategy: str) -> list[Measurement]:
    measurer = FakeMeasurer(fault_share=0.1)
    result = api.tune(OP, budget=str(budget), strategy=strategy, home=home, measurer=measurer)
    assert isinstance(result, TuneResult) and result.raced
    return finished_rows(home)


def check_kills(tmp_path: Path, kills: int, budget: int, strategy: str) -> None:
    rows = killed_and_resumed(tmp_path / "killed", kills, budget, "--strategy", strategy)
    assert told(rows) == told(uninterrupted(tmp_path / "whole", budget, strategy))
    assert len({r.id for r in rows}) == len(rows)
    stored = Dataset.of(tmp_path / "killed").rows()
    assert sorted(r.id for r in stored) == sorted(r.id for r in rows)


@pytest.mark.slow
def test_a_tuner_killed_a_few_times_ends_with_the_rows_of_one_that_was_not(tmp_path: Path) -> None:
    check_kills(tmp_path, kills=4, budget=80, strategy="random")


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "kills"), [("random", 50), ("evolve", 20)])
def test_a_tuner_killed_many_times_ends_with_the_rows_of_one_that_was_not(
    tmp_path: Path, strategy: str, kills: int
) -> None:
    check_kills(tmp_path, kills=kills, budget=8 * kills, strategy=strategy)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "mcts", "optuna"])
def test_strategies_that_think_longer_replay_their_course_too(tmp_path: Path, strategy: str) -> None:
    check_kills(tmp_path, kills=8, budget=48, strategy=strategy)


@pytest.mark.slow
@pytest.mark.serial
def test_killing_a_tuner_of_the_real_processor_loses_no_row_that_was_written(tmp_path: Path) -> None:
    rng, before = random.Random(0), list[str]()
    command = (*REAL, OP, "--budget", "80", "--strategy", "random", "--seed", "3")
    for _ in range(6):
        process = start(command, tmp_path)
        goal = written(tmp_path) + rng.randrange(1, 9) * 900
        wait_until(lambda at=goal: written(tmp_path) >= at, process)  # type: ignore[misc]
        time.sleep(rng.uniform(0.0, 0.3))
        kill(process)
        rows = [r for path in open_journals(tmp_path) for r in read_journal(path).rows]
        assert [r.id for r in rows][: len(before)] == before
        before = [r.id for r in rows]
    assert before
    last = start(command, tmp_path)
    _, said = last.communicate(timeout=LIMIT_S)
    assert last.returncode == 0, said
    rows = finished_rows(tmp_path)
    assert [r.id for r in rows][: len(before)] == before
    search = [r.schedule for r in rows][:80]
    assert len(set(search)) == len(search) == 80, "no candidate was measured again"


# ---------------------------------------------------------------- Ctrl-C
def objects(text: str) -> list[dict[str, object]]:
    found = [json.loads(line) for line in text.splitlines()]
    assert all(o["v"] == 1 for o in found)
    return found


@pytest.mark.slow
def test_ctrl_c_finishes_the_measurement_prints_the_best_and_leaves_a_run_to_resume(tmp_path: Path) -> None:
    process = fake_tune(tmp_path, 5000, "--strategy", "random", "--json")
    wait_until(lambda: written(tmp_path) > 20_000, process)
    os.kill(process.pid, signal.SIGINT)
    out, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, said
    (best,) = objects(out)
    (path,) = open_journals(tmp_path)
    rows = read_journal(path).rows
    assert (best["why"], best["verdict"], best["trials"]) == ("interrupted", "not raced", len(rows))
    assert best["time_us"] == min(r.time_us for r in rows if r.time_us is not None)
    again = fake_tune(tmp_path, len(rows) + 5, "--strategy", "random", "--json")
    out, said = again.communicate(timeout=LIMIT_S)
    assert again.returncode == 0, said
    (best,) = objects(out)
    assert (best["resumed"], best["trials"], best["verdict"]) == (len(rows), len(rows) + 5, best["verdict"])
    assert path == journal_path(tmp_path, str(best["run_id"]))


@pytest.mark.slow
@pytest.mark.serial
def test_ctrl_c_in_a_terminal_reaches_the_compilers_and_makes_no_candidate_look_broken(tmp_path: Path) -> None:
    """A terminal signals the whole group: tuner, worker and every compiler at work."""
    command = (*REAL, OP, "--budget", "400", "--strategy", "random")
    for n in range(3):
        process = start(command, tmp_path / "home", EMMY_CACHE=str(tmp_path / "cache"))
        goal = written(tmp_path / "home") + 3000
        wait_until(lambda at=goal: written(tmp_path / "home") >= at, process)  # type: ignore[misc]
        time.sleep(0.02 * n)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 130, said
    (path,) = open_journals(tmp_path / "home")
    assert {r.status for r in read_journal(path).rows} == {"ok"}


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once_and_loses_nothing(tmp_path: Path) -> None:
    process = start((*FAKE, "30", OP, "--budget", "50", "--strategy", "random"), tmp_path)  # 30 s a measurement
    wait_until(lambda: written(tmp_path) > 0, process)
    os.kill(process.pid, signal.SIGINT)
    assert process.stderr is not None
    for line in process.stderr:  # the first one is acknowledged, and waits for the measurement
        if "Ctrl-C again stops at once" in line:
            break
    os.kill(process.pid, signal.SIGINT)
    began = time.monotonic()
    process.communicate(timeout=LIMIT_S)
    # A signal that meets Python outside its own code ends the process by that signal; a shell reports both as 130.
    assert process.returncode in (130, -signal.SIGINT) and time.monotonic() - began < 25
    (path,) = open_journals(tmp_path)
    assert read_journal(path).torn_bytes == 0


# ---------------------------------------------------------------- one device, one tuner
@pytest.mark.slow
def test_a_second_tuner_of_a_device_is_told_who_holds_it(tmp_path: Path) -> None:
    with DeviceLock(tmp_path / "cache" / "locks", "cpu"):
        process = start((*REAL, OP, "--budget", "5", "--json"), tmp_path / "home", EMMY_CACHE=str(tmp_path / "cache"))
        out, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 3
    (error,) = objects(out)
    assert error["error"] == "DeviceBusy" and str(os.getpid()) in str(error["message"])
    assert str(os.getpid()) in said and "--wait" in said
    assert not open_journals(tmp_path / "home")
