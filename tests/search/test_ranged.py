"""Tuning an op by ranges of its size: each range as an op, then races between neighbours; the table follows from the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from emmy import api
from emmy.costmodel.dataset import Dataset
from emmy.ir.ops import Op, parse_op
from emmy.ir.parts import span_of
from emmy.ir.program import upper
from emmy.ir.target import load_target
from emmy.measure.fake import FakeMeasurer
from emmy.ranged import Measured as Rows
from emmy.ranged import Predicted, settle
from emmy.records import Candidate, Device, Measurement, Protocol, Status
from emmy.search.events import Event, Measured, Note, Racing
from emmy.search.predictions import Prediction
from emmy.search.ranges import LEAST_TRIALS
from emmy.search.tuner import INTERRUPTED, Stop, TuneResult
from tests.search.by_size import WIDE, BySize

OP = "matmul:m(17..128)x64x96:f32"  # three ranges to begin with


class Flat(BySize):
    """All schedules that pack, or that do not, tie."""

    def time_us(self, candidate: Candidate) -> float:
        return 100.0 * (4 if super().time_us(candidate) > 2 * FakeMeasurer.time_us(self, candidate) else 1)


def is_merged(lo: int, hi: int) -> bool:
    """Whether the range is wider than those that a search begins with."""
    return hi > 2 * (lo - 1)


class FailsOverAll(Flat):
    """What is raced over merged ranges gives a wrong answer there."""

    def _status(self, candidate: Candidate) -> Status:
        span = span_of(parse_op(OP), candidate.op)
        assert span is not None
        return "correctness" if is_merged(*span) else super()._status(candidate)


def tune(home: Path, measurer: FakeMeasurer, **options: object) -> TuneResult:
    options = {"budget": "45", "strategy": "random", "home": home, "measurer": measurer, **options}
    result = api.tune(OP, **options)  # type: ignore[call-overload]
    assert isinstance(result, TuneResult)
    return result


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BySize, TuneResult]:
    home, measurer = tmp_path_factory.mktemp("ranged"), BySize()
    return home, measurer, tune(home, measurer)


def test_ranges_come_from_what_was_measured(tuned: tuple[Path, BySize, TuneResult]) -> None:
    _, _, found = tuned
    assert found.op == OP and found.dispatch is not None and found.raced
    below = [r for r in found.dispatch.ranges if r.hi <= WIDE]
    above = [r for r in found.dispatch.ranges if r.lo > WIDE]
    assert len(below) + len(above) == len(found.dispatch.ranges) and above
    assert not any("stage(B,pack" in r.schedule for r in below) and all("stage(B,pack" in r.schedule for r in above)
    assert (found.dispatch.lo, found.dispatch.hi) == (17, 128)


def test_a_table_is_found_again_in_the_rows(tuned: tuple[Path, BySize, TuneResult]) -> None:
    home, _, found = tuned
    again = api.table(OP, home=home)
    assert [(w.range, w.op) for w in again] == [(w.range, w.op) for w in found.ranges]
    assert all(w.row is not None and w.row.op == w.op and w.row.schedule == w.range.schedule for w in again)
    subjects = api.subjects(OP, home=home)
    assert [(s.title, s.schedule, s.origin) for s in subjects] == [(w.op, w.range.schedule, "measured") for w in again]


def test_rows_are_of_the_ranges_ops_and_the_budget_is_divided(tuned: tuple[Path, BySize, TuneResult]) -> None:
    home, _, found = tuned
    rows = Dataset.of(home).rows(target="cpu")
    n = len({r.run_id for r in rows}) - 1  # one run holds the races between neighbours
    assert n == 3 and found.trials == 45 and OP not in {r.op for r in rows}
    assert not any("|" in r.schedule for r in rows)


def test_neighbours_were_raced_in_each_other_s_range(tuned: tuple[Path, BySize, TuneResult]) -> None:
    _, measurer, found = tuned
    assert found.dispatch is not None
    raced: dict[str, set[str]] = {}
    for op, schedules in measurer.raced:
        raced.setdefault(op, set()).update(schedules)
    top = found.dispatch.ranges[-1]
    below = found.dispatch.ranges[-2]
    assert {top.schedule, below.schedule} <= raced["matmul:m(65..128)x64x96:f32"]
    assert {top.schedule, below.schedule} <= raced["matmul:m(65..96)x64x96:f32"], "the boundary might have been higher"


@pytest.mark.slow
def test_a_range_that_was_merged_is_checked_as_a_whole(tmp_path: Path) -> None:
    right, wrong = tune(tmp_path / "right", Flat(), budget="21"), tune(tmp_path / "wrong", FailsOverAll(), budget="21")
    assert right.dispatch is not None and wrong.dispatch is not None
    assert any(is_merged(r.lo, r.hi) for r in right.dispatch.ranges)
    assert not any(is_merged(r.lo, r.hi) for r in wrong.dispatch.ranges)
    assert (wrong.dispatch.lo, wrong.dispatch.hi) == (17, 128)
    assert {w.row.status for w in wrong.ranges if w.row} == {"ok"}


def test_an_open_size_is_tuned_after_fixed_ones_whose_winners_its_ranges_begin_with(tmp_path: Path) -> None:
    fixed, seen = "matmul:128x64x96:f32", list[Event]()
    results = api.tune([OP, fixed], budget="8", home=tmp_path, measurer=BySize(), on_event=seen.append)
    assert [r.op for r in results] == [fixed, OP]
    best = results[0].best
    assert best is not None
    last = [e.row for e in seen if isinstance(e, Measured) and span_of(parse_op(OP), e.row.op) == (65, 128)]
    assert best.schedule in [row.schedule for row in last[:2]]  # beside the default


def test_a_shorter_run_of_an_interrupted_one_ends_in_no_worse_a_table(tmp_path: Path) -> None:
    stop, seen = Stop(), list[Event]()

    def in_the_second_range(event: Event) -> None:
        seen.append(event)
        stop.asked |= sum(isinstance(e, Racing) for e in seen) == 1 and isinstance(event, Measured) and event.n == 35

    tune(tmp_path, BySize(), budget="120", stop=stop, on_event=in_the_second_range)
    best: dict[str, Measurement] = {}
    for row in (e.row for e in seen if isinstance(e, Measured)):
        best[row.op] = min(best.get(row.op, row), row, key=lambda r: r.time_us or inf)
    assert len(best) == 2
    tune(tmp_path, BySize(), budget="3", on_event=seen.append)
    table, measurer = api.table(OP, home=tmp_path), BySize()
    told = f"3 to begin with is searched for {LEAST_TRIALS} (the least: {LEAST_TRIALS}"
    assert any(isinstance(e, Note) and told in e.text for e in seen)
    for op, stored in best.items():
        lo, hi = span_of(parse_op(OP), op) or (0, 0)
        (serving,) = (w for w in table if w.range.lo <= lo and hi <= w.range.hi)
        serving_us, stored_us = (measurer.time_us(Candidate(op, s)) for s in (serving.range.schedule, stored.schedule))
        assert serving_us <= stored_us * 1.01


def test_a_race_against_another_rival_tells_nothing_of_the_ratio_to_the_stock_kernel() -> None:
    whole, target = parse_op(OP), load_target("cpu")

    def row(schedule: str, us: float, rival: str, rival_us: float) -> Measurement:
        ratio = dict.fromkeys(("speedup", "speedup_low", "speedup_high"), rival_us / us)
        device = Device("cpu", target.product, "", "", "")
        return Measurement(
            OP, schedule, "", device, "ok", (us,), Protocol(), baseline=rival, baseline_us=rival_us, static=ratio
        )

    rows = [row("a", 100.0, "stock", 100.0), row("b", 110.0, "stock", 100.0), row("a", 100.0, "a faster one", 50.0)]
    known = Rows(whole, target, {(17, 128): rows}).known()
    assert {s: c.value for s, c in known.costs[17, 128].items()} == {"a": 100.0, "b": pytest.approx(110.0)}
    assert [r.schedule for r in known.ranges] == ["a"]


def test_one_schedule_may_be_asked_for(tmp_path: Path) -> None:
    found = tune(tmp_path, BySize(), by_range=False, budget="5")
    assert found.ranges == () and found.dispatch is None and found.best is not None and found.best.op == OP
    assert api.table(OP, home=tmp_path) == () and api.subject(OP, home=tmp_path).schedule == found.best.schedule


def test_ranges_that_all_tie_are_one_schedule(tmp_path: Path) -> None:
    class Even(BySize):
        def time_us(self, candidate: Candidate) -> float:
            return 100.0

    found = tune(tmp_path, Even(), budget="12")
    assert found.ranges == () and found.best is not None and found.best.op == OP, "it was raced over all sizes"
    assert api.table(OP, home=tmp_path) == () and api.winner(OP, home=tmp_path) is not None


@pytest.mark.slow
def test_an_interruption_leaves_the_ranges_that_are_done_and_the_command_goes_on(tmp_path: Path) -> None:
    stop, heard = Stop(), list[Event]()

    def listen(event: Event) -> None:
        heard.append(event)
        stop.asked |= sum(isinstance(e, Racing) for e in heard) == 2

    options = {"budget": "30", "strategy": "random", "home": tmp_path, "measurer": BySize()}
    first = api.tune([OP], stop=stop, on_event=listen, **options)  # type: ignore[call-overload]
    assert [r.op for r in first] == ["matmul:m(65..128)x64x96:f32", "matmul:m(33..64)x64x96:f32"]
    assert all(r.ranges == () for r in first) and api.table(OP, home=tmp_path) == ()
    (rest,) = api.tune([OP], **options)  # type: ignore[call-overload]
    assert rest.op == OP and rest.trials == 10 and rest.why != INTERRUPTED and api.table(OP, home=tmp_path)


def test_the_latest_predictions_that_do_not_overlap_are_the_table(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    whole = parse_op("matmul:m(1..32)x64x64:f16")
    options = {"gpu": "rtx4090", "budget": "3", "strategy": "random", "home": tmp_path}
    pick = api.tune(whole.within("m", 1, 16), by_range=False, **options).predicted  # type: ignore[call-overload]
    assert pick is not None and api.table(whole, gpu="rtx4090", home=tmp_path) == ()
    evidence = Predicted.stored(tmp_path, whole, load_target("rtx4090"))
    later = [replace(pick, op=whole.within("m", lo, hi).key) for lo, hi in ((17, 32), (9, 16), (1, 16))]
    evidence.picks = {(17, 32): later[0], (1, 16): later[2], (9, 16): later[1]}
    assert [(w.range.lo, w.range.hi) for w in evidence.stored_table()] == [(1, 16), (17, 32)]
    evidence.picks = {(9, 16): later[1], (17, 32): later[0], (1, 16): later[2]}
    assert evidence.stored_table() == (), "what is older and overlaps fills no gap"


class _Guessing:
    """Predicts that `a` is the faster one up to 16 rows, and finds it wrong in every range but the one where it is the pick."""

    def __init__(self, op: Op) -> None:
        self.rows = upper(op.program().dim("m"))

    def times_us(self, schedules: Sequence[str]) -> dict[str, float]:
        return {s: 7.0 if s == "c" else 5.0 if self.rows <= 16 else 9.0 for s in schedules}

    def confirm(self, schedule: str) -> None:
        assert schedule == "a", "the other one is the pick of all ranges that it can win"


def test_a_schedule_that_was_raced_alone_is_still_checked_before_it_serves_a_range() -> None:
    whole = parse_op("matmul:m(1..32)x64x64:f16")

    def pick(span: tuple[int, int], schedule: str, us: float) -> Prediction:
        op = whole.within("m", *span).key
        return Prediction(op, "rtx4090", schedule, "", us, us, us, 0.8, False, "", 1.0, "", "", op, "0", "")

    picks = {(1, 8): pick((1, 8), "a", 5.0), (9, 32): pick((9, 32), "c", 7.0), (17, 32): pick((17, 32), "c", 7.0)}
    evidence = Predicted(whole, picks, _Guessing)  # type: ignore[arg-type]
    settle(evidence, Stop())
    assert [(w.range.lo, w.range.hi, w.range.schedule) for w in evidence.table()] == [(1, 8, "a"), (9, 32, "c")]
    assert all(w.predicted is not None for w in evidence.table())
