"""A tuning run: its course, its budget, its resumption. All with a measurer whose times follow from the text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import emmy
from emmy import api
from emmy.costmodel.dataset import Dataset
from emmy.errors import DataError, UsageError
from emmy.measure.fake import FakeMeasurer
from emmy.measure.journal import closed_journals, closed_path, journal_path, open_journals, read_journal
from emmy.records import Candidate, Measurement
from emmy.search.events import Event, Finished, Measured, Note, Planned, Racing, Started, ignore
from emmy.search.schedule_space import ScheduleSpace
from emmy.search.tuner import FINALISTS, Stop, TuneResult
from emmy.winner import is_raced

OP = "matmul:64x96x128:f32"


class Counting(FakeMeasurer):
    """Remembers what it was asked to measure and to race."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.measured: list[str] = []
        self.raced: list[list[str]] = []

    def stream(self, candidates: Sequence[Candidate], best_us: float | None = None) -> Iterator[Measurement]:
        for row in super().stream(candidates, best_us):
            self.measured.append(row.schedule)
            yield row

    def race(self, candidates: Sequence[Candidate], rounds: int = 7, against: str = "") -> list[Measurement]:
        self.raced.append([c.schedule for c in candidates])
        before = len(self.measured)
        rows = super().race(candidates, rounds, against)
        del self.measured[before:]
        return rows


def tune(home: Path, measurer: FakeMeasurer, budget: str = "30", **options: object) -> TuneResult:
    found = api.tune(OP, budget=budget, strategy="random", home=home, measurer=measurer, **options)  # type: ignore[call-overload]
    assert isinstance(found, TuneResult)
    return found


def journal_rows(home: Path) -> list[Measurement]:
    """Rows of all journals of a home, finished or not, in the order they were written."""
    folder = home / "journal"
    return [row for path in sorted(folder.rglob("*.jsonl")) for row in read_journal(path).rows]


def told(rows: Sequence[Measurement]) -> list[tuple[str, str, tuple[float, ...]]]:
    """What two runs must agree on."""
    return [(r.schedule, r.status, r.samples_us) for r in rows]


def stop_after(n: int, stop: Stop) -> object:
    def listen(event: Event) -> None:
        if isinstance(event, Measured) and event.n >= n:
            stop.asked = True

    return listen


# ---------------------------------------------------------------- the course of a run
def test_the_default_schedule_is_measured_first(tmp_path: Path) -> None:
    measurer = Counting()
    result = tune(tmp_path, measurer)
    space = ScheduleSpace(emmy.parse_op(OP), emmy.load_target("cpu"))
    assert measurer.measured[0] == space.default().key
    assert result.default is not None and result.default.schedule == space.default().key


def test_the_finalists_are_raced_with_the_stock_kernel_and_the_best_of_them_wins(tmp_path: Path) -> None:
    measurer = Counting()
    result = tune(tmp_path, measurer)
    times = {s: measurer.time_us(Candidate(OP, s)) for s in measurer.measured}
    assert measurer.raced == [sorted(times, key=lambda s: times[s])[:FINALISTS]]
    assert result.raced and result.best is not None and result.best.schedule == measurer.raced[0][0]
    assert result.speedup is not None
    assert result.speedup.median == pytest.approx((result.best.baseline_us or 0) / (result.best.time_us or 1), rel=1e-3)


def test_no_schedule_is_measured_twice_in_the_search(tmp_path: Path) -> None:
    measurer = Counting()
    tune(tmp_path, measurer, "80")
    assert len(set(measurer.measured)) == len(measurer.measured) == 80


def test_rows_carry_the_run_an_id_a_version_and_a_time(tmp_path: Path) -> None:
    result = tune(tmp_path, FakeMeasurer())
    rows = Dataset.of(tmp_path).rows(op=OP)
    assert len({r.id for r in rows}) == len(rows) == 30 + FINALISTS
    assert {(r.run_id, r.emmy_version) for r in rows} == {(result.run_id, emmy.__version__)}
    assert all(r.time_utc for r in rows)


def known(events: Sequence[Event]) -> int:
    """Trials that the only run knew when it began."""
    (started,) = (e for e in events if isinstance(e, Started))
    return started.known


def test_a_run_tells_its_course_in_events(tmp_path: Path) -> None:
    events: list[Event] = []
    tune(tmp_path, FakeMeasurer(), "20", on_event=events.append)
    kinds = [type(e) for e in events]
    assert kinds == [Planned, Started, *[Measured] * 20, Racing, Finished]
    measured = [e for e in events if isinstance(e, Measured)]
    assert [e.n for e in measured] == list(range(1, 21))
    best = [e.best_us for e in measured if e.best_us is not None]
    assert best == sorted(best, reverse=True)
    assert [e.is_best for e in measured if e.best_us == e.row.time_us].count(True) == len(set(best))


def test_when_nothing_is_right_there_is_no_winner_and_a_note_says_so(tmp_path: Path) -> None:
    events: list[Event] = []
    result = tune(tmp_path, FakeMeasurer(fault_share=1.0), "10", on_event=events.append)
    assert result.best is None and not result.raced and dict(result.counts) == {"runtime": 10}
    assert any(isinstance(e, Note) and "nothing to race" in e.text for e in events)


class Disturbed(FakeMeasurer):
    """Every row is taken on a busy machine."""

    def stream(self, candidates: Sequence[Candidate], best_us: float | None = None) -> Iterator[Measurement]:
        for row in super().stream(candidates, best_us):
            yield replace(row, contended=True)


def test_a_machine_that_is_always_busy_still_yields_a_winner(tmp_path: Path) -> None:
    calm, busy = tune(tmp_path / "calm", FakeMeasurer()), tune(tmp_path / "busy", Disturbed())
    assert calm.best is not None and busy.best is not None
    assert busy.raced and busy.best.contended and busy.best.schedule == calm.best.schedule
    measurer = Counting()
    tune(tmp_path / "busy", measurer, "10")
    rows = Dataset(tmp_path / "busy").rows()
    assert len({r.schedule for r in rows}) == 39, "what was measured on a busy machine is known too"


# ---------------------------------------------------------------- budgets
def test_a_budget_of_trials_is_kept_to_the_trial(tmp_path: Path) -> None:
    assert tune(tmp_path, FakeMeasurer(), "17").trials == 17


def test_patience_counts_trials_without_a_better_one(tmp_path: Path) -> None:
    events: list[Event] = []
    result = tune(tmp_path, FakeMeasurer(), "patience=12", on_event=events.append)
    since = [e.is_best for e in events if isinstance(e, Measured)]
    assert not any(since[-12:]) and since[-13]
    assert "12 trials without" in result.why


def test_a_space_that_is_used_up_ends_the_run(tmp_path: Path) -> None:
    tiny = "matmul:1x1x2:f32"
    space = ScheduleSpace(emmy.parse_op(tiny), emmy.load_target("cpu"))
    size = space.size(1000)
    assert size is not None
    result = api.tune(tiny, budget="1000", strategy="random", home=tmp_path, measurer=FakeMeasurer())
    assert (result.why, result.trials) == ("exhausted", size)


@pytest.mark.parametrize("text", ["", "0", "60", "60 s", "x", "5m,", "-3s", "patience=0", "1e3s"])
def test_a_budget_is_read_or_refused_with_the_form(text: str) -> None:
    from emmy.search.budget import parse_budget

    if text in ("60", "60 s"):
        assert str(parse_budget(text)) in ("60", "60s")
    else:
        with pytest.raises(UsageError, match="such as 60s"):
            parse_budget(text)


# ---------------------------------------------------------------- resuming
def test_an_interrupted_run_goes_on_where_it_ended_and_ends_with_the_same_rows(tmp_path: Path) -> None:
    whole = tune(tmp_path / "whole", FakeMeasurer(fault_share=0.2), "40")
    stop = Stop()
    part = tune(tmp_path / "parts", FakeMeasurer(fault_share=0.2), "40", stop=stop, on_event=stop_after(11, stop))
    assert part.why == "interrupted" and part.trials == 11 and not part.raced
    assert part.best is not None
    measurer = Counting(fault_share=0.2)
    rest = tune(tmp_path / "parts", measurer, "40")
    assert (rest.resumed, rest.trials, len(measurer.measured)) == (11, 40, 29)
    assert rest.run_id == part.run_id
    assert told(journal_rows(tmp_path / "parts")) == told(journal_rows(tmp_path / "whole"))
    assert rest.best is not None and whole.best is not None and rest.best.schedule == whole.best.schedule


def test_a_larger_budget_goes_on_with_an_interrupted_run(tmp_path: Path) -> None:
    stop = Stop()
    tune(tmp_path, FakeMeasurer(), "20", stop=stop, on_event=stop_after(5, stop))
    result = tune(tmp_path, FakeMeasurer(), "25")
    assert (result.resumed, result.trials) == (5, 25)


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "options"), [("2", {}), ("0.001s", {}), ("2", {"fresh": True}), ("2", {"seed": 1})])
def test_a_shorter_run_after_an_interrupted_one_leaves_the_best_that_is_stored(
    tmp_path: Path, budget: str, options: dict[str, object]
) -> None:
    stop = Stop()
    long = tune(tmp_path, FakeMeasurer(), "60", stop=stop, on_event=stop_after(40, stop))
    measurer = Counting()
    short = tune(tmp_path, measurer, budget, **options)
    assert long.best is not None and short.best is not None and short.raced
    assert short.best.schedule == long.best.schedule in measurer.raced[0] and short.speedup is not None
    best = api.winner(OP, home=tmp_path)
    assert best is not None and best.schedule == long.best.schedule
    assert all(is_raced(r) for r in short.finalists), "what was screened beyond the budget is not taken for a race"


def test_the_stored_winner_defends_its_place_in_every_race(tmp_path: Path) -> None:
    """By its own clock a later day may be faster: only what was raced beside the old winner has beaten it."""

    class Faster(Counting):
        def time_us(self, candidate: Candidate) -> float:
            return 0.5 * super().time_us(candidate)

    old = tune(tmp_path, FakeMeasurer(), "60").best
    for options in ({"fresh": True}, {}):
        measurer = Faster()
        new = tune(tmp_path, measurer, "8", **options).best
        assert old is not None and new is not None and old.schedule in measurer.raced[0]
        assert measurer.time_us(Candidate(OP, new.schedule)) <= measurer.time_us(Candidate(OP, old.schedule))
        best = api.winner(OP, home=tmp_path)
        assert best is not None and best.schedule == new.schedule


@pytest.mark.parametrize("lost", [1, FINALISTS - 1, FINALISTS + 1])
def test_a_run_killed_while_it_wrote_down_the_race_repeats_nothing_of_it(tmp_path: Path, lost: int) -> None:
    result = tune(tmp_path, FakeMeasurer(), "20")
    whole = journal_rows(tmp_path)
    path = journal_path(tmp_path, result.run_id)
    closed = path.parent / "ingested" / closed_path(path).name
    lines = closed.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: len(lines) - lost]))
    closed.unlink()
    measurer = Counting()
    again = tune(tmp_path, measurer, "20")
    assert again.run_id == result.run_id
    assert told(journal_rows(tmp_path)) == told(whole)
    assert [len(keys) for keys in measurer.raced] == ([min(lost, FINALISTS)] if lost else [])
    assert len(measurer.measured) == max(0, lost - FINALISTS)


@pytest.mark.slow
def test_a_run_by_the_clock_ends_at_the_same_trial_when_it_is_resumed_after_its_search(tmp_path: Path) -> None:
    """The seconds of the first sitting are in its journal: told again, they end the search where they ended it."""
    result = tune(tmp_path, FakeMeasurer(delay_s=0.02), "0.5s")
    whole = journal_rows(tmp_path)
    path = journal_path(tmp_path, result.run_id)
    closed = path.parent / "ingested" / closed_path(path).name
    lines = closed.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-2]))
    closed.unlink()
    measurer = Counting()
    again = tune(tmp_path, measurer, "0.5s")
    assert again.trials == result.trials > 1 and measurer.measured == []
    assert told(journal_rows(tmp_path)) == told(whole)


def test_a_finished_run_is_followed_by_one_that_knows_its_rows(tmp_path: Path) -> None:
    first, second = Counting(), Counting()
    a, b = tune(tmp_path, first), tune(tmp_path, second)
    assert a.run_id != b.run_id and b.resumed == 0
    assert set(first.measured) & set(second.measured) == {first.measured[0]}, "the default alone is measured again"
    both = {s: first.time_us(Candidate(OP, s)) for s in (*first.measured, *second.measured)}
    assert b.best is not None and b.best.schedule == min(both, key=lambda s: both[s])


def test_fresh_neither_resumes_nor_knows(tmp_path: Path) -> None:
    stop = Stop()
    part = tune(tmp_path, FakeMeasurer(), stop=stop, on_event=stop_after(5, stop))
    events: list[Event] = []
    result = tune(tmp_path, FakeMeasurer(), fresh=True, on_event=events.append)
    assert result.resumed == 0 and result.run_id != part.run_id
    assert known(events) == 0
    assert not open_journals(tmp_path), "the interrupted run's rows are taken in, not left behind"


def test_another_seed_does_not_resume_but_knows_the_interrupted_runs_rows(tmp_path: Path) -> None:
    stop = Stop()
    tune(tmp_path, FakeMeasurer(), stop=stop, on_event=stop_after(9, stop))
    events: list[Event] = []
    result = tune(tmp_path, FakeMeasurer(), seed=1, on_event=events.append)
    assert result.resumed == 0
    assert known(events) == 9


def test_rows_of_another_thread_count_are_not_known_trials(tmp_path: Path) -> None:
    tune(tmp_path, FakeMeasurer(threads=1))
    events: list[Event] = []
    tune(tmp_path, FakeMeasurer(threads=2), threads=2, on_event=events.append)
    assert known(events) == 0


def test_winners_of_near_problems_are_measured_right_after_the_default(tmp_path: Path) -> None:
    donor = tune(tmp_path, FakeMeasurer(), "60")
    measurer = Counting()
    api.tune("matmul:64x96x256:f32", budget="10", strategy="random", home=tmp_path, measurer=measurer)
    assert donor.best is not None and measurer.measured[1] == donor.best.schedule
    events: list[Event] = []
    api.tune(
        "rms_norm:64x96:f32",
        budget="5",
        strategy="random",
        home=tmp_path,
        measurer=FakeMeasurer(),
        on_event=events.append,
    )
    assert not any(isinstance(e, Note) and "near problems" in str(e) for e in events), "rows are near no matmul"


def test_ops_of_a_sequence_are_tuned_in_the_order_of_their_work(tmp_path: Path) -> None:
    events: list[Event] = []
    small, large = "matmul:16x32x64:f32", "matmul:128x256x64:f32"
    results = api.tune(
        [small, large], budget="5", strategy="random", home=tmp_path, measurer=FakeMeasurer(), on_event=events.append
    )
    assert [e.op for e in events if isinstance(e, Started)] == [large, small] == [r.op for r in results]


THREE = ("matmul:128x256x64:f32", "matmul:64x96x128:f32", "matmul:16x32x64:f32")  # the most time at stake first


def tune_three(home: Path, stop: Stop | None = None, on_event: object = ignore) -> tuple[TuneResult, ...]:
    found = api.tune(
        THREE, budget="5", strategy="random", home=home, measurer=FakeMeasurer(), stop=stop, on_event=on_event
    )  # type: ignore[call-overload]
    assert isinstance(found, tuple)
    return found


@pytest.mark.slow
def test_a_sequence_that_was_interrupted_goes_on_at_the_op_at_hand(tmp_path: Path) -> None:
    stop = Stop()

    def in_the_second(event: Event) -> None:
        if isinstance(event, Measured) and event.row.op == THREE[1] and event.n == 3:
            stop.asked = True

    first = tune_three(tmp_path, stop, in_the_second)
    assert [(r.op, r.why) for r in first] == [(THREE[0], "5 trials"), (THREE[1], "interrupted")]
    events: list[Event] = []
    second = tune_three(tmp_path, on_event=events.append)
    assert [(r.op, r.resumed, r.trials) for r in second] == [(THREE[1], 3, 5), (THREE[2], 0, 5)]
    assert any(isinstance(e, Note) and THREE[0] in e.text for e in events)
    assert {r.op for r in tune_three(tmp_path)} == set(THREE), "once it has ended, the same command begins anew"


def test_a_sequence_interrupted_between_two_ops_goes_on_with_the_next(tmp_path: Path) -> None:
    stop = Stop()

    def in_the_race(event: Event) -> None:
        stop.asked |= isinstance(event, Racing)

    assert [(r.op, r.why) for r in tune_three(tmp_path, stop, in_the_race)] == [(THREE[0], "5 trials")]
    assert [r.op for r in tune_three(tmp_path)] == list(THREE[1:])


@pytest.mark.parametrize("fails", [True, False])
def test_a_schedule_is_tried_again_only_when_its_source_has_changed(tmp_path: Path, fails: bool) -> None:
    """A wrong answer of a code generator that was mended since must not hide a schedule for ever, nor what was slow then."""

    class Failing(FakeMeasurer):
        mended = ""

        def stream(self, candidates: Sequence[Candidate], best_us: float | None = None) -> Iterator[Measurement]:
            for row in super().stream(candidates, best_us):
                row = replace(row, source_digest=self.mended + row.source_digest)
                yield replace(row, status="correctness", samples_us=()) if fails else row

    def known_in(home: Path) -> int:
        events: list[Event] = []
        tune(home, FakeMeasurer(), "3", seed=9, on_event=events.append)
        return known(events)

    tune(tmp_path / "same", Failing(), "6")
    assert known_in(tmp_path / "same") == 6
    mended = Failing()
    mended.mended = "x"
    tune(tmp_path / "mended", mended, "6")
    assert known_in(tmp_path / "mended") == 0


def test_a_damaged_journal_of_another_run_is_noted_and_left_alone(tmp_path: Path) -> None:
    stop = Stop()
    tune(tmp_path, FakeMeasurer(), stop=stop, on_event=stop_after(4, stop))
    (path,) = open_journals(tmp_path)
    damaged = path.read_bytes().replace(b'"status":"ok"', b'"status":"no"', 1)
    path.write_bytes(damaged)
    events: list[Event] = []
    tune(tmp_path, FakeMeasurer(), seed=1, on_event=events.append)
    assert any(isinstance(e, Note) and "damaged" in e.text for e in events)
    assert path.read_bytes() == damaged and not closed_journals(tmp_path)


def test_the_device_is_part_of_what_a_run_resumes(tmp_path: Path) -> None:
    stop = Stop()
    tune(tmp_path, FakeMeasurer(), stop=stop, on_event=stop_after(4, stop))
    other = FakeMeasurer()
    other._device = replace(other.device, product="another")
    assert tune(tmp_path, other).resumed == 0


def test_a_strategy_is_refused_before_the_device_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "device", None)
    with pytest.raises(UsageError, match="'luck' is not one of"):
        api.tune(OP, strategy="luck", home=tmp_path)


def test_what_was_lost_with_the_device_is_tried_again(tmp_path: Path) -> None:
    """Memory that ran out, a worker killed from outside: the candidate is not known to be guilty."""

    class Losing(FakeMeasurer):
        def stream(self, candidates: Sequence[Candidate], best_us: float | None = None) -> Iterator[Measurement]:
            for row in super().stream(candidates, best_us):
                yield replace(row, status="device_lost", samples_us=())

    tune(tmp_path, Losing(), "6")
    events: list[Event] = []
    assert tune(tmp_path, FakeMeasurer(), "3", seed=9, on_event=events.append).best is not None
    assert known(events) == 0


@pytest.mark.parametrize("card", ["{", "[" * 200_000, '{"v": 1}', ""])
def test_a_deployed_model_that_is_damaged_is_noted_and_left_out(tmp_path: Path, card: str) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "cpu.json").write_text(card)
    (tmp_path / "models" / "cpu.txt").write_text("tree")
    events: list[Event] = []
    assert tune(tmp_path, FakeMeasurer(), "3", on_event=events.append).trials == 3
    assert any(isinstance(e, Note) and "cpu.json" in e.text for e in events)
    with pytest.raises(DataError, match=r"cpu\.json"):
        tune(tmp_path, FakeMeasurer(), "3", model=str(tmp_path / "models" / "cpu.txt"))
