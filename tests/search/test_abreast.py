"""Several ops searched at once, in processes that ask this one to measure: the same rows as in turn, whatever is lost meanwhile."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from _thread import interrupt_main
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from pathlib import Path

import pytest

from emmy import api
from emmy.abreast import Asked, Lost, Searches, _Process
from emmy.cli import main
from emmy.costmodel.dataset import Dataset
from emmy.errors import EmmyError, IllegalMove, NoSuchDevice, UsageError
from emmy.ir.ops import parse_op
from emmy.ir.target import load_target
from emmy.measure.fake import FakeMeasurer
from emmy.measure.journal import (
    Journal,
    RunHeader,
    closed_journals,
    closed_path,
    is_live,
    journal_path,
    open_journals,
    read_journal,
)
from emmy.measure.measurer import Heat, Look, Measurer
from emmy.measure.served import Turns
from emmy.ranged import Group
from emmy.records import Candidate, Measurement
from emmy.search import session
from emmy.search.budget import parse_budget
from emmy.search.events import Event, Listener, Measured, Note, Racing, ignore
from emmy.search.events import Finished as RunEnded
from emmy.search.finished import Finished
from emmy.search.session import Request
from emmy.search.tuner import INTERRUPTED, Stop, TuneResult
from tests.search.test_kill import FAKE, LIMIT_S, ROOT, kill, start, wait_until

OPS = ("matmul:64x96x128:f32", "matmul:32x96x128:f32", "matmul:16x96x128:f32")
BUDGET = 12


def tune(
    home: Path,
    searches: int,
    measurer: Measurer | None = None,
    on_event: Listener = ignore,
    stop: Stop | None = None,
    fresh: bool = False,
) -> tuple[TuneResult, ...]:
    return api.tune(
        OPS, budget=str(BUDGET), strategy="random", home=home, measurer=measurer or FakeMeasurer(delay_s=0.002),
        on_event=on_event, stop=stop, fresh=fresh, searches=searches,
    )  # fmt: skip


def rows(home: Path) -> list[Measurement]:
    """Those of all runs, raced ones left out."""
    found = [r for p in sorted((home / "journal").rglob("*.jsonl")) for r in read_journal(p).rows]
    return [r for r in found if r.baseline_us is None]


def children(parent: int | None = None) -> list[int]:
    """The processes of that one, or of this, that search."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words, stat = (folder / "cmdline").read_bytes(), (folder / "stat").read_text()
        except OSError:
            continue
        if b"emmy.search_main" in words and int(stat.rpartition(")")[2].split()[1]) == (parent or os.getpid()):
            found.append(int(folder.name))
    return found


def test_ops_searched_at_once_get_the_rows_that_they_get_in_turn(tmp_path: Path) -> None:
    heard: list[Event] = []
    in_turn = tune(tmp_path / "a", 1, fresh=True)
    at_once = tune(tmp_path / "b", 2, fresh=True, on_event=heard.append)
    assert [r.op for r in at_once] == [r.op for r in in_turn]
    for one, other in zip(in_turn, at_once, strict=True):
        assert [(r.schedule, r.time_us) for r in one.rows] == [(r.schedule, r.time_us) for r in other.rows]
        assert one.best and other.best and other.raced and one.best.schedule == other.best.schedule
    assert Counter(e.row.op for e in heard if isinstance(e, Measured)) == dict.fromkeys(OPS, BUDGET)
    assert not children()


@pytest.mark.slow
def test_a_process_that_is_killed_is_followed_by_one_that_goes_on_with_its_rows(tmp_path: Path) -> None:
    heard: list[Event] = []

    def kill_one(event: Event) -> None:
        heard.append(event)
        if isinstance(event, Measured) and event.n == 5 and not any("killed" in e.text for e in notes(heard)):
            for pid in children():
                os.kill(pid, signal.SIGKILL)

    results = tune(tmp_path, 2, on_event=kill_one)
    assert any("killed by signal 9" in e.text for e in notes(heard))
    assert [r.trials for r in results] == [BUDGET] * len(OPS)
    assert set(Counter((r.op, r.schedule) for r in rows(tmp_path)).values()) == {1}, "nothing is measured twice"


def notes(heard: Sequence[Event]) -> list[Note]:
    return [e for e in heard if isinstance(e, Note)]


@pytest.mark.slow
def test_what_was_interrupted_goes_on_and_what_had_ended_is_left_out(tmp_path: Path) -> None:
    stop = Stop()

    def after_the_first(event: Event) -> None:
        if isinstance(event, Measured) and event.row.op == OPS[2] and event.n == 4:
            stop.asked = True

    first = tune(tmp_path, 2, on_event=after_the_first, stop=stop)
    ended = [r.op for r in first if r.why != INTERRUPTED]
    assert any(r.why == INTERRUPTED for r in first) and len(rows(tmp_path)) < BUDGET * len(OPS)
    heard: list[Event] = []
    second = tune(tmp_path, 2, on_event=heard.append)
    assert {r.op for r in second} == set(OPS) - set(ended)
    assert all(any(op in n.text for n in notes(heard)) for op in ended)
    assert Counter(r.op for r in rows(tmp_path)) == dict.fromkeys(OPS, BUDGET)
    assert not list((tmp_path / "sittings").iterdir()), "once it has ended, the same command begins anew"


def test_a_set_goes_on_behind_what_ended_on_another_card_of_the_product(tmp_path: Path) -> None:
    stop = Stop()

    def at_the_second(event: Event) -> None:
        stop.asked |= isinstance(event, Measured) and event.row.op == OPS[1]

    def asked(name: str, on_event: Listener, stop: Stop | None = None) -> set[str]:
        device = FakeMeasurer(name=name)
        results = api.tune(
            OPS[:2], budget="8", strategy="random", home=tmp_path, measurer=device, on_event=on_event, stop=stop
        )
        return {r.op for r in results if r.why != INTERRUPTED}

    assert asked("one card", at_the_second, stop) == {OPS[0]}
    heard: list[Event] = []
    assert asked("another card", heard.append) == {OPS[1]}
    assert any(OPS[0] in n.text and "had been finished" in n.text for n in notes(heard))
    cards = Counter((r.op, r.device.uuid_hash) for r in rows(tmp_path))
    assert len(cards) == 3 and max(cards.values()) == 8, (
        "what was not finished is searched anew: times of two cards are not mixed"
    )


@pytest.mark.parametrize("searches", [1, 2])
def test_an_op_that_is_asked_for_twice_is_searched_once(tmp_path: Path, searches: int) -> None:
    """As a size of its own, and as a range of another op."""
    heard: list[Event] = []
    results = api.tune(
        (OPS[0], OPS[0], OPS[1]), budget=str(BUDGET), strategy="random", home=tmp_path,
        measurer=FakeMeasurer(delay_s=0.002), on_event=heard.append, searches=searches,
    )  # fmt: skip
    assert [r.op for r in results] == [OPS[0], OPS[1]]
    assert Counter(r.op for r in rows(tmp_path)) == {OPS[0]: BUDGET, OPS[1]: BUDGET}
    assert any("had been finished" in n.text for n in notes(heard))


class Gone(FakeMeasurer):
    """A device that is unplugged after some rows."""

    left = 5

    def stream(
        self, candidates: Sequence[Candidate], best_us: float | None = None, look: Look | None = None
    ) -> Iterator[Measurement]:
        for row in super().stream(candidates, best_us, look):
            self.left -= 1
            if self.left < 0:
                raise NoSuchDevice("it was unplugged")
            yield row


@pytest.mark.slow
def test_a_device_that_is_gone_ends_all_searches_with_its_own_error_and_keeps_their_rows(tmp_path: Path) -> None:
    with pytest.raises(NoSuchDevice, match="it was unplugged"):
        tune(tmp_path, 2, Gone())
    assert len(rows(tmp_path)) == 5 and not children()
    assert [r.trials for r in tune(tmp_path, 2)] == [BUDGET] * len(OPS)
    assert len(rows(tmp_path)) == BUDGET * len(OPS)


@pytest.mark.slow
def test_an_error_of_a_search_is_raised_here(tmp_path: Path) -> None:
    def spoil(event: Event) -> None:
        if isinstance(event, RunEnded):
            (tmp_path / "emmy.duckdb").write_text("no database")

    with pytest.raises(EmmyError, match=r"emmy\.duckdb"):
        tune(tmp_path, 2, on_event=spoil)
    assert not children()


@pytest.mark.parametrize("error", [IllegalMove(2, "k0/unroll(k)", "k is no loop"), NoSuchDevice("gone")])
def test_an_error_comes_over_as_it_was(error: EmmyError) -> None:
    here, there = Pipe()
    there.send(error)
    found = here.recv()
    assert type(found) is type(error) and str(found) == str(error) and vars(found) == vars(error)


def test_several_searches_on_a_cpu_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *OPS, "--searches", "2", "--home", str(tmp_path)]) == 2
    assert "--searches on a CPU would disturb" in capsys.readouterr().err


@pytest.mark.slow
def test_when_the_command_is_killed_its_searches_end_and_it_can_be_resumed(tmp_path: Path) -> None:
    ops = [f"matmul:{m}x4096x3840:f16:nk" for m in (64, 128, 256)]
    words = (*FAKE, "0.01", *ops, "--gpu", "h200", "--budget", "60", "--strategy", "random", "--searches", "3")
    process = start(words, tmp_path)
    wait_until(lambda: len(rows(tmp_path)) > 30, process)
    searching = children(process.pid)
    assert len(searching) == 3
    kill(process)
    deadline = time.monotonic() + LIMIT_S
    while any(Path(f"/proc/{pid}").exists() for pid in searching) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in searching)
    before = len(rows(tmp_path))
    again = start(words, tmp_path)
    said, errors = again.communicate(timeout=LIMIT_S)
    assert again.returncode == 0, errors
    assert before < len(rows(tmp_path)) == 60 * len(ops) and "resumed after" in errors, said


@pytest.mark.slow
def test_commands_whose_processes_are_killed_and_stopped_at_random_end_with_each_row_once(tmp_path: Path) -> None:
    """An op among them is a size of its own and one of another op's ranges."""
    rng, ops = random.Random(1), ("matmul:m(1..16)x96x128:f16", "matmul:1x96x128:f16", "matmul:64x96x128:f16")
    words = (*FAKE, "0.03", *ops, "--gpu", "h200", "--budget", "40", "--strategy", "random", "--searches", "3")
    for how in ("all", "command", "one", "stop", "command", "all"):
        process, goal = start((*words, "--model", "roofline"), tmp_path), len(rows(tmp_path)) + rng.randrange(1, 16)
        wait_until(lambda goal=goal: len(rows(tmp_path)) >= goal, process)  # type: ignore[misc]
        for pid in {"all": children(process.pid), "one": children(process.pid)[:1]}.get(how, []):
            os.kill(pid, signal.SIGKILL)
        if how != "command":
            time.sleep(rng.uniform(0.0, 0.5))
            os.kill(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 130, errors
        else:
            kill(process)
    last = start((*words, "--model", "roofline"), tmp_path)
    _, errors = last.communicate(timeout=LIMIT_S)
    assert last.returncode == 0, errors
    found = Counter((r.op, r.schedule) for r in rows(tmp_path))
    assert set(found.values()) == {1} and sum(op == ops[2] for op, _ in found) == 40
    written = [r for p in (tmp_path / "journal").rglob("*.jsonl") for r in read_journal(p).rows]
    assert len(Dataset(tmp_path).rows()) == len(written)
    assert not open_journals(tmp_path) and not list((tmp_path / "sittings").iterdir())


def test_a_command_that_was_killed_behind_its_last_op_begins_anew_and_a_torn_line_counts_for_nothing(
    tmp_path: Path,
) -> None:
    requests = [Request(parse_op(op), load_target("cpu"), "random", 0, parse_budget("3"), 1, fresh=False) for op in OPS]
    device = FakeMeasurer().device.uuid_hash
    Finished.of(requests, device, tmp_path, "1").add(OPS[0])
    (path,) = (tmp_path / "sittings").iterdir()
    assert OPS[0] in Finished.of(requests, device, tmp_path, "1")
    assert OPS[0] not in Finished.of(requests[1:], device, tmp_path, "1"), "another command"
    path.write_text(f"{OPS[0]}\n{OPS[1]}")
    again = Finished.of(requests[::-1], device, tmp_path, "1")
    assert OPS[0] in again and OPS[1] not in again
    again.add(OPS[1])
    again.add(OPS[2])
    assert not any(op in Finished.of(requests, device, tmp_path, "1") for op in OPS) and not path.exists()


# ---------------------------------------------------------------- what was broken once
def test_a_process_that_dies_between_two_ops_is_lost_and_nothing_else(tmp_path: Path) -> None:
    process = _Process(FakeMeasurer(), Turns(lambda: False))
    os.kill(process._process.pid, signal.SIGKILL)
    process._process.wait()
    requests = [Request(parse_op(op), load_target("cpu"), "random", 0, parse_budget("3"), 1) for op in OPS]
    searches = Searches(FakeMeasurer(), (), 1, Finished(), ignore, Stop())
    with pytest.raises(Lost, match="killed by signal 9"):
        process.search(Asked(Group(requests[0].op, tuple(requests)), tmp_path, None), searches)
    process.close()


@pytest.mark.slow
def test_an_op_that_had_ended_when_its_process_was_killed_is_not_searched_again(tmp_path: Path) -> None:
    heard: list[Event] = []

    def kill_all(event: Event) -> None:
        if isinstance(event, RunEnded) and not any(isinstance(e, RunEnded) for e in heard):
            for pid in children():
                os.kill(pid, signal.SIGKILL)
        heard.append(event)

    tune(tmp_path, 2, on_event=kill_all)
    assert Counter(e.op for e in heard if isinstance(e, RunEnded)) == dict.fromkeys(OPS, 1)
    assert Counter(r.op for r in rows(tmp_path)) == dict.fromkeys(OPS, BUDGET)


@pytest.mark.slow
def test_nothing_goes_on_behind_a_program_that_was_interrupted(tmp_path: Path) -> None:
    heard: list[Event] = []

    def interrupt(event: Event) -> None:
        heard.append(event)
        if isinstance(event, Measured) and event.n == 3:
            interrupt_main()

    with pytest.raises(KeyboardInterrupt):
        tune(tmp_path, 2, on_event=interrupt)
    for thread in threading.enumerate():
        if thread.name.startswith("emmy-search-") and thread.name != "emmy-search-device":
            thread.join(LIMIT_S)
    assert not children() and len(rows(tmp_path)) < BUDGET * len(OPS)


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_while_the_searches_start_reaches_none_of_them(tmp_path: Path) -> None:
    ops = [f"matmul:{m}x4096x3840:f16:nk" for m in (64, 128)]
    words = (*FAKE, "0.01", *ops, "--gpu", "h200", "--budget", "60", "--strategy", "random", "--searches", "2")
    process = start(words, tmp_path)
    wait_until(lambda: bool(children(process.pid)), process)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130 and "Traceback" not in errors, errors


_SCRIPT = """
import sys
sys.path = [p for p in sys.path if "emmy" not in p]
sys.path.insert(1, {root!r})
from pathlib import Path
from emmy import api
from emmy.measure.fake import FakeMeasurer
found = api.tune({ops!r}, budget="3", strategy="random", home=Path({home!r}), measurer=FakeMeasurer(), searches=2)
print([r.trials for r in found])
"""


@pytest.mark.slow
def test_a_program_of_another_folder_needs_no_main_guard_and_may_have_a_module_named_as_one_of_ours(
    tmp_path: Path,
) -> None:
    """The searches import what their program imports, and not what lies where it was started."""
    (tmp_path / "queue.py").write_text("raise RuntimeError('no queue')")
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / "it.py").write_text(_SCRIPT.format(root=str(ROOT), ops=OPS[:2], home=str(tmp_path / "home")))
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(folder / "it.py")], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.stdout == "[3, 3]\n", done.stderr


@pytest.mark.slow
def test_an_error_of_the_system_is_told_as_it_is_told_in_turn(tmp_path: Path) -> None:
    (tmp_path / "studies").write_text("no folder")
    for searches in (1, 2):
        with pytest.raises(FileExistsError, match="studies"):
            api.tune(OPS, budget="30", strategy="optuna", home=tmp_path, measurer=FakeMeasurer(), searches=searches)


class SlowRaces(FakeMeasurer):
    """A device whose races wait until all searches have come to theirs."""

    def __init__(self, over: Stop) -> None:
        super().__init__()
        self.over, self.n_races = over, 0

    def heat(self, op: str, schedules: Sequence[str], rivals: Sequence[str] = ("",), rounds: int = 7) -> Heat:
        self.n_races += 1
        deadline = time.monotonic() + LIMIT_S
        while not self.over.asked and time.monotonic() < deadline:
            time.sleep(0.01)
        return super().heat(op, schedules, rivals, rounds)


@pytest.mark.slow
def test_races_that_wait_when_the_command_is_stopped_are_held_when_it_goes_on(tmp_path: Path) -> None:
    heard, stop = list[Event](), Stop()

    def stop_in_races(event: Event) -> None:
        heard.append(event)
        stop.asked = stop.asked or len([e for e in heard if isinstance(e, Racing)]) == len(OPS)

    device = SlowRaces(stop)
    first = tune(tmp_path, 3, device, stop_in_races, stop)
    assert device.n_races == 1 == sum(r.raced for r in first), "the one that was being held"
    n = len(rows(tmp_path))
    second = tune(tmp_path, 3)
    assert [r.raced for r in second] == [True, True] and len(rows(tmp_path)) == n, "nothing but races was left"


def test_searches_are_counted_from_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="searches is 0"):
        tune(tmp_path, 0)


def test_collecting_takes_one_op_after_another_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *OPS, "--collect", "--gpu", "h200", "--searches", "2", "--home", str(tmp_path)]) == 2
    assert "--collect takes one op after another" in capsys.readouterr().err


def test_what_another_search_closes_or_goes_on_with_first_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several searches of one command set the same op's dead journals aside."""
    said: list[Event] = []
    for name, meanwhile in (("closed", lambda path: Journal.reopen(path)[0].close()), ("taken", Journal.reopen)):
        path = journal_path(tmp_path, name)
        Journal.create(path, RunHeader(name, OPS[0], "cpu", "random", 0, "3 trials")).leave()
        held: list[object] = []

        def late(path: Path, held: list[object] = held, act: Callable[[Path], object] = meanwhile) -> bool:
            live = is_live(path)
            if not held:
                held.append(act(path))
            return live

        monkeypatch.setattr(session, "is_live", late)
        session.close_dead(tmp_path, lambda _: True, said.append)
    assert [p.name for p in closed_journals(tmp_path)] == [closed_path(journal_path(tmp_path, "closed")).name]
    assert len(open_journals(tmp_path)) == 1 and not said
