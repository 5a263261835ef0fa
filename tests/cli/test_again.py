"""`emmy tune`, `bench`, `verify` and `explain` on a device that answers by formula."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from emmy import api
from emmy.codegen.build import source
from emmy.costmodel.dataset import Dataset
from emmy.errors import IllegalMove, UsageError, WrongAnswer
from emmy.ir.ops import parse_op
from emmy.ir.schedule import replay
from emmy.ir.target import load_target
from emmy.measure.fake import FakeMeasurer
from emmy.measure.journal import open_journals
from emmy.records import Candidate
from emmy.search.events import Event, Measured
from emmy.search.tuner import Stop
from tests.cli.conftest import OP, Emmy, FakeDevice


def test_tune_prints_one_table_and_how_to_reproduce_it(emmy: Emmy, fake_device: FakeDevice) -> None:
    fake_device()
    said = emmy("tune", OP, "--budget", "20", "--strategy", "random")
    assert said.code == 0
    for heading in ("us", "stock us", "ratio", "verdict", "of roofline", "trials"):
        assert heading in said.out
    assert f"reproduce  emmy bench {OP} --threads 1" in said.out and "20 ok" in said.out
    assert "strategy random, budget 20" in said.err and "stopped (20 trials)" in said.err
    assert "\x1b" not in said.out + said.err and "\r" not in said.err, "plain lines where there is no terminal"


def test_tune_in_json_is_one_object_an_op(emmy: Emmy, fake_device: FakeDevice) -> None:
    fake_device()
    said = emmy("tune", OP, "matmul:16x32x64:f32", "--budget", "6", "--strategy", "random", "--json", "--seed", "4")
    ours = said.of("tune")
    assert [o["op"] for o in ours] == [OP, "matmul:16x32x64:f32"]
    for o in ours:
        assert o["verdict"] in ("win", "loss") and o["stock"] == "fake" and o["trials"] == 6
        assert math.isclose(float(str(o["ratio"])), float(str(o["stock_us"])) / float(str(o["time_us"])), rel_tol=1e-3)
        assert float(str(o["low"])) <= float(str(o["ratio"])) <= float(str(o["high"]))


def test_a_tune_without_a_right_answer_fails(emmy: Emmy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeMeasurer, "_status", lambda self, candidate: "correctness")
    result = api.tune(OP, budget="4", strategy="random", measurer=FakeMeasurer())
    assert result.best is None
    monkeypatch.setattr(api, "tune", lambda *_, **__: (result,))
    said = emmy("tune", OP)
    assert said.code == 1 and "no right answer in 4 trials (4 correctness)" in said.out


def test_bench_measures_the_stored_winner_again_and_keeps_the_row(
    emmy: Emmy, tuned: Path, fake_device: FakeDevice
) -> None:
    fake_device()
    best = api.winner(OP)
    before = len(Dataset.of(tuned).rows())
    (row,) = emmy("bench", OP, "--json").of("bench")
    assert best is not None and row["schedule"] == best.schedule
    assert row["time_us"] == pytest.approx(row["stored_us"])
    assert len(Dataset.of(tuned).rows()) == before + 1 and not open_journals(tuned)
    assert "stored us" in emmy("bench", OP).out


def test_bench_takes_a_schedule_that_is_not_stored(emmy: Emmy, fake_device: FakeDevice) -> None:
    fake_device()
    (row,) = emmy("bench", OP, "--schedule", "k0.C/atom(fma,4,16,1,8)", "--json").of("bench")
    assert row["schedule"] == "k0.C/atom(fma,4,16,1,8)" and row["stored_us"] is None


def test_a_bench_of_another_schedule_does_not_take_the_place_of_a_better_one_that_was_never_raced(
    tmp_path: Path,
) -> None:
    product = load_target("cpu").product
    stop, measurer = Stop(), FakeMeasurer(product=product)

    def listen(event: Event) -> None:
        stop.asked |= isinstance(event, Measured) and event.n == 20

    part = api.tune(OP, strategy="random", home=tmp_path, measurer=measurer, stop=stop, on_event=listen)
    api.tune(
        OP, strategy="random", budget="1", seed=1, home=tmp_path, measurer=FakeMeasurer(product=product, fault_share=1)
    )
    default = part.default
    assert part.best is not None and default is not None and part.best.schedule != default.schedule
    api.bench(OP, default.schedule, home=tmp_path, measurer=measurer)
    best = api.winner(OP, home=tmp_path)
    assert best is not None and best.raced and best.schedule == part.best.schedule


def test_bench_of_several_ops_measures_those_it_can(emmy: Emmy, tuned: Path, fake_device: FakeDevice) -> None:
    fake_device()
    said = emmy("bench", "matmul:3x5x7:f32", OP, "--json")
    assert said.code == 2 and [r["op"] for r in said.of("bench")] == [OP]
    assert "nothing is stored of matmul:3x5x7:f32" in str(said.of("error")[0]["message"])


def test_a_wrong_answer_in_bench_is_exit_code_4_and_is_kept(emmy: Emmy, tuned: Path, fake_device: FakeDevice) -> None:
    best = api.winner(OP)
    assert best is not None
    fake_device(**{best.schedule: "correctness"})
    said = emmy("bench", OP)
    assert said.code == 4 and best.schedule in said.err
    assert len(Dataset.of(tuned).rows(statuses=("correctness",))) == 1
    with pytest.raises(WrongAnswer):
        api.bench(OP)


def test_verify_checks_the_best_and_finds_the_wrong_one(emmy: Emmy, tuned: Path, fake_device: FakeDevice) -> None:
    best = api.winner(OP)
    assert best is not None
    fake_device()
    rows = emmy("verify", "--top", "3", "--json").of("verified")
    assert len(rows) == 3 and rows[0]["schedule"] == best.schedule and {r["status"] for r in rows} == {"ok"}
    fake_device(**{best.schedule: "correctness"})
    said = emmy("verify", "--op", OP, "--top", "2")
    assert said.code == 4 and "2 schedules checked, 1 wrong" in said.err


def test_verify_with_a_schedule_that_fails_otherwise_is_exit_code_1(
    emmy: Emmy, tuned: Path, fake_device: FakeDevice
) -> None:
    best = api.winner(OP)
    assert best is not None
    fake_device(**{best.schedule: "timeout"})
    assert emmy("verify").code == 1


def test_a_right_answer_faster_than_the_roofline_is_no_failure_of_verify_and_is_chosen_by_nothing(
    emmy: Emmy, tuned: Path, fake_device: FakeDevice
) -> None:
    best = api.winner(OP)
    assert best is not None
    fake_device(**{best.schedule: "implausible"})
    said = emmy("verify", "--op", OP, "--top", "2")
    assert said.code == 0 and "2 schedules checked, 0 wrong" in said.err and "1 right, but faster than" in said.err
    assert len(Dataset.of(tuned).rows(statuses=("implausible",))) == 1
    after = api.winner(OP)
    assert after is not None and after.row.status == "ok" and after.row == best.row


def test_explain_says_what_binds_what_moves_bring_and_what_is_refused(emmy: Emmy, tuned: Path) -> None:
    best = api.winner(OP)
    said = emmy("explain", OP)
    assert best is not None and said.code == 0
    for mark in (
        best.schedule,
        "bound by arithmetic",
        "of the bound is reached",
        "ratio     ",
        "what is refused",
        "default   ",
    ):
        assert mark in said.out
    assert "cpu has no mma" in said.out
    (told,) = emmy("explain", OP, "--json").of("explanation")
    assert told["schedule"] == best.schedule and told["model"] is None


def test_explain_without_rows_explains_the_default(emmy: Emmy) -> None:
    said = emmy("explain", "matmul:32x32x32:f32")
    assert said.code == 0 and "nothing right is measured yet" in said.out


def test_explain_takes_a_schedule_that_is_not_the_stored_one(emmy: Emmy, tuned: Path) -> None:
    best = api.winner(OP)
    schedule = "k0/split(k,serial,32)   k0.C/atom(fma,3,16,1,8)"  # spaces as a person types them
    assert best is not None and best.schedule != " ".join(schedule.split())
    told = api.explain(OP, schedule)
    assert told.given and [m.move for m in told.moves] == schedule.split() and told.time_us is None
    assert api.explain(OP, best.schedule).time_us == best.time_us
    said = emmy("explain", OP, "--schedule", schedule)
    assert said.code == 0 and "nothing right is measured of it yet" in said.out and "default." not in said.out
    assert emmy("explain", OP, "--schedule", "k0/split(z,serial,32)").code == 2


def test_what_explain_calls_one_change_away_is_legal_and_was_measured(tmp_path: Path) -> None:
    base = "k0/split(k,serial,64) k0/stage(B,pack,1) k0.C/atom(fma,4,16,1,8)"
    measurer = FakeMeasurer()
    others = (
        "k0/split(k,serial,32) k0/stage(B,pack,1) k0.C/atom(fma,4,16,1,8)",
        "k0/split(k,serial,64) k0.C/atom(fma,4,16,1,8)",
        "k0/split(k,serial,64) k0/stage(B,pack,1) k0.C/atom(fma,6,16,1,8)",
    )
    times = {s: measurer.time_us(Candidate(OP, s)) for s in (base, *others)}
    for schedule in times:
        api.bench(OP, schedule, home=tmp_path, measurer=measurer)
    told = api.explain(OP, home=tmp_path)
    best = min(times, key=lambda s: times[s])
    assert told.schedule == best
    found = {(m.move, v.change): v for m in told.moves for v in m.variants}
    assert all(v.measured for v in found.values())
    if best == base:
        assert len(found) == 3
        factor = found["k0/stage(B,pack,1)", "left out"].factor
        assert factor == pytest.approx(times[others[1]] / times[base], rel=1e-2)
    assert all(v.factor >= 1 for v in found.values())


def test_what_explain_calls_refused_is_refused() -> None:
    op, target = parse_op(OP), load_target("cpu")
    told = api.explain(OP)
    assert {r.reason for r in told.refusals} and not any(r.move in told.schedule.split() for r in told.refusals)
    replay(op.program(), told.schedule, target)
    for r in (r for r in told.refusals if r.instead_of):
        with pytest.raises(IllegalMove) as refused:
            replay(op.program(), told.schedule.replace(r.instead_of, r.move), target)
        assert r.reason in str(refused.value)


@pytest.mark.parametrize(("op", "gpu"), [(OP, "cpu"), ("matmul:512x4096x3840:f16:nk", "h200")])
def test_what_explain_calls_one_change_away_has_code(op: str, gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Legal is not enough: a nest that divides among two warpgroups is refused by the generator where a role has one."""
    scored: list[str] = []
    monkeypatch.setattr(
        "emmy.explanation._Judge.factors", lambda _, base, them: [scored.append(s) or 1.0 for s in them]
    )
    told, target = api.explain(op, gpu=gpu), load_target(gpu)
    for schedule in scored:
        assert source(parse_op(op), schedule, target).text
    assert len(scored) > 10 and any("no code is generated" in r.reason for r in told.refusals) == (gpu == "h200")


def test_a_screening_never_beats_a_race(tmp_path: Path) -> None:
    """The stored winner is the best raced schedule, also when a lucky single measurement was faster."""
    product = load_target("cpu").product
    api.tune(OP, budget="30", strategy="random", home=tmp_path, measurer=FakeMeasurer())
    rows = Dataset.of(tmp_path).rows(op=OP)
    from dataclasses import replace

    from emmy.winner import find_winner, is_raced

    here = [replace(r, device=replace(r.device, product=product)) for r in rows]
    lucky = replace(next(r for r in here if not is_raced(r)), samples_us=(0.001,))
    best = find_winner([*here, lucky], product)
    assert best is not None and best.raced and best.schedule != lucky.schedule
    assert find_winner([lucky], product) is not None
    assert find_winner([], product) is None


def test_expand_names_each_op_once_and_refuses_unknown_ones() -> None:
    assert [o.key for o in api.expand([OP, OP, "matmul:1x2x3:f32"])] == [OP, "matmul:1x2x3:f32"]
    assert len(api.expand("@gemma4-12b")) > 20 and len(api.expand(["@projections", OP])) == 6
    with pytest.raises(UsageError):
        api.expand("@nothing")
