"""Tuning for a card that is not here: ranked, compiled, emulated, marked as predicted, kept apart from the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import pytest

from emmy import api
from emmy.codegen import gpu_build
from emmy.codegen.build import SourceUnit, plan_source
from emmy.codegen.gpu_build import GpuLibrary
from emmy.errors import CompileError
from emmy.ir.ops import parse_op
from emmy.ir.plan import Plan
from emmy.ir.schedule import replay
from emmy.ir.target import Target, load_target
from emmy.search.budget import parse_budget
from emmy.search.emulator_check import Check, check, reduced
from emmy.search.events import Event, Finished, Note, Scored, Started
from emmy.search.predict import Build, Checker, Predicting, prior_model
from emmy.search.predictions import Prediction, find_prediction, keep
from emmy.search.session import Request
from emmy.search.tuner import INTERRUPTED, Stop, TuneResult

OP = "matmul:64x64x64:f16"
RIGHT = Check(OP)

Predict = Callable[..., TuneResult]


def _built(unit: SourceUnit, target: Target) -> GpuLibrary:
    """A compiler that finds nothing to say."""
    return GpuLibrary(Path("none"), {"registers": 40.0})


@pytest.fixture
def predict(tmp_path: Path) -> Predict:
    def run(
        gpu: str = "rtx4090",
        op: str = OP,
        budget: str = "6",
        build: Build = _built,
        checker: Checker = lambda op, schedule, target: RIGHT,
        on_event: Callable[[Event], None] = lambda e: None,
        stop: Stop | None = None,
    ) -> TuneResult:
        request = Request(parse_op(op), load_target(gpu), "random", 0, parse_budget(budget), 1, sums="f32")
        return Predicting(request, None, tmp_path, "0", on_event, stop or Stop(), build, checker).go()

    return run


def test_a_pick_is_predicted_and_never_a_measurement(predict: Predict, tmp_path: Path) -> None:
    found = predict()
    pick = found.predicted
    assert found.best is None and not found.raced and pick is not None and found.trials == 6
    assert pick.roof_us <= pick.low_us < pick.predicted_us < pick.high_us
    assert not pick.calibrated and "no model" in pick.basis and pick.model == ""
    assert [p.name for p in tmp_path.iterdir()] == ["predictions"], "no journal, no row, no database"


def test_the_same_request_gives_the_same_pick(predict: Predict) -> None:
    one, two = predict().predicted, predict().predicted
    assert one is not None and two is not None
    assert replace(one, time_utc="") == replace(two, time_utc="")


def test_a_shorter_search_leaves_the_better_pick(predict: Predict, tmp_path: Path) -> None:
    long, short = predict(budget="30").predicted, predict(budget="2").predicted
    stored = find_prediction(tmp_path, parse_op(OP), load_target("rtx4090"))
    assert long is not None and short is not None and stored is not None
    assert short.schedule == stored.schedule == long.schedule and short.predicted_us == long.predicted_us


def test_what_happens_is_told_as_it_happens(predict: Predict) -> None:
    told: list[Event] = []
    found = predict(on_event=told.append)
    scored = [e for e in told if isinstance(e, Scored)]
    assert isinstance(told[0], Started) and isinstance(told[-1], Finished) and len(scored) == found.trials
    assert [e.best_us for e in scored] == sorted((e.best_us for e in scored), reverse=True)
    assert scored[0].is_best and any(isinstance(e, Note) for e in told)


def test_a_schedule_that_the_compiler_refuses_is_passed_over(predict: Predict) -> None:
    first = predict().predicted
    assert first is not None

    def spills(unit: SourceUnit, target: Target) -> GpuLibrary:
        if unit.digest == first.source_digest:
            raise CompileError("ptxas: spills 64 bytes a thread at 255 registers")
        return _built(unit, target)

    found = predict(build=spills)
    assert found.predicted is not None and found.predicted.schedule != first.schedule
    assert [(r.schedule, r.by) for r in found.rejected] == [(first.schedule, "compiler")]
    assert "spills 64 bytes" in found.rejected[0].reason


def test_nothing_is_claimed_where_no_schedule_compiles(predict: Predict, tmp_path: Path) -> None:
    def broken(unit: SourceUnit, target: Target) -> GpuLibrary:
        raise CompileError("no")

    found = predict(build=broken)
    assert found.predicted is None and {r.by for r in found.rejected} == {"compiler"}
    assert not list(tmp_path.iterdir())


def test_a_kernel_with_a_wait_left_out_is_rejected_by_the_emulator(predict: Predict) -> None:
    first = predict(budget="1").predicted
    assert first is not None

    def hasty(plan: Plan, target: Target) -> SourceUnit:
        unit = plan_source(plan, target)
        assert "emmy_cp_async_wait<2>();" in unit.text
        return replace(unit, text=unit.text.replace("emmy_cp_async_wait<2>();", ""))

    checker = partial(check, source=hasty)
    found = predict(budget="1", checker=checker)
    assert found.predicted is None and [(r.schedule, r.by) for r in found.rejected] == [(first.schedule, "emulator")]
    assert OP in found.rejected[0].reason
    assert not check(parse_op(OP), first.schedule, load_target("rtx4090")).wrong


@pytest.mark.parametrize(("gpu", "transport"), [("rtx4090", "cp_async"), ("rtx5090", "tma")])
def test_transports_that_are_predicted_alike_give_way_to_the_one_with_the_fewest_issue_slots(
    predict: Predict, gpu: str, transport: str
) -> None:
    pick = predict(gpu, budget="12").predicted
    assert pick is not None and f"stage(A,{transport}," in pick.schedule


def test_an_interrupted_search_keeps_the_best_so_far(predict: Predict) -> None:
    stop = Stop()

    def ask(e: Event) -> None:
        stop.asked = stop.asked or (isinstance(e, Scored) and e.n == 3)

    found = predict(budget="1000", on_event=ask, stop=stop)
    assert (found.why, found.trials) == (INTERRUPTED, 3) and found.predicted is not None


def test_the_real_compiler_and_the_emulator_agree_to_a_pick(predict: Predict) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    found = predict("rtx5090", budget="2", build=gpu_build.build, checker=check)
    pick = found.predicted
    assert pick is not None and pick.checked == OP and pick.static["spill_bytes"] == 0 and pick.static["registers"] > 0


def test_without_a_deployed_model_of_any_card_there_is_no_prior(tmp_path: Path) -> None:
    assert prior_model(load_target("rtx4090"), tmp_path) is None


# ---------------------------------------------------------------- the reduced op
CASES = [
    ("matmul:512x4096x3840:f16", "k0/split(m,grid,128) k0/split(n,grid,128) k0/split(k,serial,32) k0/split(m,warp,32) "
     "k0/split(n,warp,64) k0/stage(A,cp_async,3) k0/stage(B,cp_async,3) k0.C/atom(mma,16,8,16)"),
    ("matmul:1000x1000x1000:f16:bias", "k0/split(m,grid,128) k0/split(n,grid,128) k0/split(k,serial,64) "
     "k0/split(m,warp,64) k0/split(n,warp,32) k0/stage(A,cp_async,2) k0/stage(B,cp_async,2) k0.C/atom(hybrid,16,8,64)"),
    ("matmul:m(1..4096)x4096x3840:f16", "k0/split(m,grid,64) k0/split(n,grid,128) k0/split(k,serial,64) "
     "k0/split(m,warp,32) k0/split(n,warp,64) k0/stage(A,cp_async,2) k0/stage(B,cp_async,2) k0.C/atom(mma,16,8,16)"),
    ("matmul:512x4096x3840:f16", "k0/splitk(C,6) k0/split(m,grid,192) k0/split(n,grid,80) k0/split(k,serial,16) "
     "k0/split(m,warp,48) k0/split(n,warp,40) k1/split(m,grid,8) k1/split(n,grid,64) k0/stage(A,cp_async,5) "
     "k0/stage(B,cp_async,5) k0.C/atom(hybrid,16,8,16)"),
    ("bmm:16x500x512x256:f16:nk", "k0/split(b,grid,1) k0/split(m,grid,128) k0/split(n,grid,128) k0/split(k,serial,32) "
     "k0/split(m,warp,32) k0/split(n,warp,64) k0/stage(A,cp_async,3) k0/stage(B,cp_async,3) k0.C/atom(mma,16,8,16)"),
]  # fmt: skip


def test_a_reduced_op_of_rows_keeps_its_short_name_where_its_columns_stay() -> None:
    schedule = "k0/split(m,grid,2) k0/split(n,warp,1920) k0/split(m,warp,1) k0/split(m,lane,1)"
    found = reduced(parse_op("rms_norm:512x3840:f16"), schedule, load_target("rtx4090"))
    assert found is not None and found[0].key == "rms_norm:4x3840:f16"


@pytest.mark.parametrize(("op", "schedule"), CASES, ids=["plain", "ragged", "symbolic", "splitk", "batched"])
def test_a_reduced_op_is_small_and_keeps_loops_rings_and_raggedness(op: str, schedule: str) -> None:
    target, whole = load_target("rtx4090"), parse_op(op)
    found = reduced(whole, schedule, target)
    assert found is not None and found[1] == schedule
    small = found[0]
    assert small.work().flops <= 5e8 < whole.work().flops * 10
    a, b = (replay(o.program(), schedule, target) for o in (whole, small))
    assert len(a.launches) == len(b.launches) and a.workspaces == b.workspaces
    for one, two in zip(a.launches, b.launches, strict=True):
        assert one.tile.channels == two.tile.channels and one.tile.works == two.tile.works
        for i, loop in enumerate(one.tile.nest):
            n, m = a.count(one.tile.nest, i), b.count(two.tile.nest, i)
            assert loop.level == two.tile.nest[i].level and m >= min(n, 2), loop
    for axis in "mnk":
        loops = [x for x in a.launches[0].tile.nest if x.axis == axis and x.level in ("grid", "serial")]
        sizes = [o.program().sizes(o.typical_sizes())[axis] for o in (whole, small)]
        assert len({size % loops[-1].step for size in sizes}) == 1


def test_an_op_that_is_small_already_is_checked_as_it_is() -> None:
    op = parse_op(OP)
    assert reduced(op, "", load_target("rtx4090")) == (op, "")


WALKS = (
    "k0/split(m,grid,128) k0/split(n,grid,256) k0/split(k,serial,64) k0/split(m,warpgroup,64) k0/split(n,warpgroup,256) "
    "k0/raster(16) k0/stage(A,tma,4) k0/stage(B,tma,4) k0/specialize(2,40,232)"
)


@pytest.mark.parametrize("walk", ["persist(132)", "persist(264)", "streamk(132)"])
def test_of_workers_that_walk_tiles_a_few_stay_and_each_still_goes_on_to_a_third_tile(walk: str) -> None:
    schedule = f"{WALKS} k0/{walk} k0.C/atom(wgmma,64,256,16)"
    found = reduced(parse_op("matmul:4096x4096x3840:f16"), schedule, load_target("h200"))
    assert found is not None and found[0].work().flops < 1e9
    la = replay(found[0].program(), found[1], load_target("h200")).launches[0]
    tiles = prod(-(-found[0].program().sizes()[x.axis] // x.step) for x in la.tile.nest if x.level == "grid")
    assert la.tile.order.workers == 2 and tiles > 4 and la.tile.order.group == 2


# ---------------------------------------------------------------- what is kept
@pytest.fixture
def pick(predict: Predict) -> Prediction:
    found = predict(budget="3").predicted
    assert found is not None
    return found


def test_the_latest_pick_of_an_op_is_found_again(pick: Prediction, tmp_path: Path) -> None:
    op, target = parse_op(OP), load_target("rtx4090")
    assert find_prediction(tmp_path, op, target) == pick
    keep(tmp_path, replace(pick, predicted_us=1.5))
    keep(tmp_path, replace(pick, op="matmul:64x64x128:f16", predicted_us=2.5))
    found = find_prediction(tmp_path, op, target)
    assert found is not None and found.predicted_us == 1.5
    assert find_prediction(tmp_path, op, load_target("rtx5090")) is None


def test_a_pick_whose_schedule_generates_another_source_now_holds_no_longer(pick: Prediction, tmp_path: Path) -> None:
    keep(tmp_path, replace(pick, source_digest="of another Emmy"))
    assert find_prediction(tmp_path, parse_op(OP), load_target("rtx4090")) is None
    keep(tmp_path, replace(pick, schedule="k0/split(q,grid,1)"))
    assert find_prediction(tmp_path, parse_op(OP), load_target("rtx4090")) is None
    assert "tune again" in api.subject(OP, gpu="rtx4090", home=tmp_path).note


def test_a_torn_line_takes_no_other_with_it(pick: Prediction, tmp_path: Path) -> None:
    path = tmp_path / "predictions" / "rtx4090.jsonl"
    with path.open("a", encoding="utf-8") as f:
        f.write('{"v":1,"op":"matm\n[]\n{"v":1}\n')
    assert find_prediction(tmp_path, parse_op(OP), load_target("rtx4090")) == pick
