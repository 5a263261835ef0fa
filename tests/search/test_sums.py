"""EMMY_FAST_MATH selects schedules with hybrid sums, everywhere; without it none is chosen."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from emmy import api
from emmy.costmodel.recording import recording
from emmy.ir.ops import parse_op
from emmy.ir.schedule import sums_of
from emmy.ir.target import load_target
from emmy.measure.fake import FakeMeasurer
from emmy.records import Candidate
from emmy.search.budget import parse_budget
from emmy.search.schedule_space import ScheduleSpace
from emmy.search.session import at_stake

OP = "matmul:64x256x256:f16:nk"


@pytest.fixture(autouse=True)
def _no_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EMMY_FAST_MATH", raising=False)
    monkeypatch.setenv("EMMY_SHIPPED", "0")


def default(op: str, gpu: str, sums: str | None) -> str:
    return ScheduleSpace(parse_op(op), load_target(gpu), 1, sums).default().key  # type: ignore[arg-type]


def test_sums_are_read_off_a_schedule_where_they_are_the_least_exact() -> None:
    assert sums_of("k0/split(k,serial,16) k0.C/atom(mma,16,8,16)") == "f32"
    assert sums_of("k0.S/atom(mma,16,8,16) k0.O/atom(hybrid,16,8,32)") == "hybrid"
    assert sums_of("k0.S/atom(f16,16,8,16) k0.O/atom(hybrid,16,8,32)") == "f16"
    assert sums_of("not a schedule") == "f32"


@pytest.mark.parametrize("gpu", ["h200", "rtx5090"])
def test_a_space_has_schedules_with_the_sums_asked_for_alone(gpu: str) -> None:
    for sums in ("hybrid", "f32"):
        space, rng = ScheduleSpace(parse_op(OP), load_target(gpu), 1, sums), random.Random(0)  # type: ignore[arg-type]
        assert {sums_of(space.sample(rng).key) for _ in range(3)} == {sums} == {sums_of(space.default().key)}


def test_what_sums_no_products_of_f16_has_the_schedules_that_it_has_without() -> None:
    for op in ("rms_norm:64x256:f16", "matmul:64x256x256:bf16:nk"):
        assert default(op, "h200", "hybrid") == default(op, "h200", None)


def test_the_stored_winner_is_of_the_lane_that_is_switched_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact, hybrid = (default(OP, "h200", sums) for sums in ("f32", "hybrid"))
    with recording(tmp_path, "test", OP, "h200", "0") as keep:
        for schedule, us in ((exact, 20.0), (hybrid, 10.0)):
            (row,) = FakeMeasurer("h200").measure([Candidate(OP, schedule)])
            keep(replace(row, samples_us=(us,) * 3))
    found = api.winner(OP, gpu="h200", home=tmp_path)
    assert found is not None and found.schedule == exact
    monkeypatch.setenv("EMMY_FAST_MATH", "1")
    assert api.subject(OP, gpu="h200", home=tmp_path).schedule == hybrid
    nothing = api.subject("matmul:64x256x512:f16:nk", gpu="h200", home=tmp_path)
    assert nothing.origin == "default" and sums_of(nothing.schedule) == "hybrid"


def test_a_search_keeps_to_its_lane_and_neither_resumes_nor_replaces_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tune() -> str:
        result = api.tune(OP, gpu="h200", budget="2", strategy="random", home=tmp_path, measurer=FakeMeasurer("h200"))
        assert result.best is not None
        assert {sums_of(r.schedule) for r in (*result.rows, *result.finalists)} == {sums_of(result.best.schedule)}
        return sums_of(result.best.schedule)

    assert tune() == "f32"
    monkeypatch.setenv("EMMY_FAST_MATH", "1")
    assert tune() == "hybrid"


def test_a_search_ends_where_it_reaches_the_share_of_the_roofline_asked_for(tmp_path: Path) -> None:
    budget = parse_budget("50,roof=0.000001")
    assert str(budget) == "50,roof=1e-06" and budget.spent(1, 1.0, 0, 0.5) == "50% of the roofline reached"
    result = api.tune("matmul:64x96x128:f32", budget=budget, home=tmp_path, measurer=FakeMeasurer(), strategy="random")
    assert result.trials == 1 and "of the roofline" in result.why


def test_the_op_with_the_most_time_beyond_its_roofline_is_the_most_valuable(tmp_path: Path) -> None:
    small, large = "matmul:64x96x128:f32", "matmul:128x96x128:f32"
    never = at_stake(load_target("cpu"), 1, tmp_path)
    assert never(parse_op(large)) > never(parse_op(small)) > 0
    api.tune(large, budget="2", home=tmp_path, measurer=FakeMeasurer(), strategy="random")
    known = at_stake(load_target("cpu"), 1, tmp_path)
    best = api.winner(large, home=tmp_path)
    assert best is not None and known(parse_op(small)) == never(parse_op(small))
    assert known(parse_op(large)) == pytest.approx(best.time_us - api.roof_us(large, "cpu", 1), rel=0.05)
