"""`emmy tune` for a card that is not here, and what the other verbs say of the schedule afterwards."""

from __future__ import annotations

import json
import os
import random
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from emmy import api, config, tuning
from emmy.codegen.build import SourceUnit
from emmy.codegen.gpu_build import GpuLibrary
from emmy.costmodel.dataset import Dataset
from emmy.costmodel.features import ROOF, feature_set
from emmy.costmodel.fit import Samples
from emmy.costmodel.model import CostModel
from emmy.costmodel.train import train
from emmy.errors import CompileError
from emmy.ir.ops import Op, parse_op
from emmy.ir.target import Target, load_target
from emmy.measure.fake import FakeMeasurer
from emmy.search.emulator_check import Check
from emmy.search.predict import Predicting
from emmy.search.schedule_space import ScheduleSpace
from emmy.search.space import Point
from tests.cli.conftest import Emmy, FakeDevice

OP = "matmul:64x64x64:f16"
ARGUMENTS = ("tune", OP, "--gpu", "rtx4090", "--budget", "4", "--strategy", "random")

pytest.importorskip("cuda.bindings.nvrtc")


@pytest.fixture
def predicted(emmy: Emmy) -> Path:
    """A home with a pick for OP on the RTX 4090."""
    assert emmy(*ARGUMENTS).code == 0
    return config.home()


def test_a_card_that_is_not_here_gets_a_prediction_with_interval_roofline_and_what_was_checked(emmy: Emmy) -> None:
    said = emmy(*ARGUMENTS)
    assert said.code == 0, said.err
    for word in ("predicted, not measured", "80 % interval", "uncalibrated", "no model x roofline", "roofline  ",
                 "for sm_89", "0 spill bytes", f"right on {OP}", "stage(A,cp_async,"):  # fmt: skip
        assert word in said.out, word
    assert "rtx4090 is not here" in said.err and "predicted, not measured" in said.err and "best predicted" in said.err


def test_json_says_predicted_with_every_number(emmy: Emmy) -> None:
    (record,) = emmy(*ARGUMENTS, "--json").of("tune")
    assert (record["verdict"], record["calibrated"], record["checked"]) == ("predicted", False, OP)
    low, us, high, roof = (float(str(record[k])) for k in ("low_us", "predicted_us", "high_us", "roof_us"))
    assert 0 < roof <= low < us < high and record["confidence"] == 0.8 and record["trials"] == 4
    assert "time_us" not in record and "best" not in record


def test_a_prediction_is_no_row(emmy: Emmy, predicted: Path) -> None:
    dataset = Dataset.of(predicted)
    dataset.ingest()
    assert not dataset.rows(target="rtx4090")
    assert not list(predicted.glob("journal/**/*.jsonl")) and emmy("data", "stats").out.strip() == ""


def test_show_takes_the_pick_and_says_on_stderr_that_it_is_predicted(emmy: Emmy, predicted: Path) -> None:
    pick = api.prediction(OP, gpu="rtx4090")
    assert pick is not None
    text = emmy("show", OP, "--gpu", "rtx4090", "--ir", "source")
    assert "cp_async" in text.out and "predicted" not in text.out
    assert "predicted" in text.err and "never measured" in text.err and "uncalibrated" in text.err
    (level,) = emmy("show", OP, "--gpu", "rtx4090", "--ir", "tile", "--json").of("level")
    assert (level["origin"], level["schedule"]) == ("predicted", pick.schedule)
    assert emmy("show", OP, "--gpu", "rtx5090", "--ir", "tile", "--json").of("level")[0]["origin"] == "default"


def test_explain_says_that_the_schedule_is_predicted(emmy: Emmy, predicted: Path) -> None:
    said = emmy("explain", OP, "--gpu", "rtx4090")
    assert said.code == 0 and "predicted" in said.out and "never measured" in said.out
    (record,) = emmy("explain", OP, "--gpu", "rtx4090", "--json").of("explanation")
    assert record["time_us"] is None and isinstance(record["predicted"], dict)


def test_nothing_can_be_timed_on_a_card_that_is_not_here(emmy: Emmy, predicted: Path) -> None:
    for op in (OP, "matmul:64x64x128:f16"):
        said = emmy("bench", op, "--gpu", "rtx4090")
        assert said.code == 3 and "rtx4090 is not here" in said.err and said.out == ""


def test_a_card_that_is_here_measures_the_pick_and_compares(
    emmy: Emmy, predicted: Path, fake_device: FakeDevice
) -> None:
    pick = api.prediction(OP, gpu="rtx4090")
    fake_device()
    said = emmy("bench", OP, "--gpu", "rtx4090", "--json")
    (record,) = said.of("bench")
    assert said.code == 0 and pick is not None and record["schedule"] == pick.schedule
    assert record["predicted_us"] == pick.predicted_us and "prediction" in said.err


def test_a_measured_winner_takes_the_place_of_a_prediction(emmy: Emmy, predicted: Path) -> None:
    api.tune(OP, gpu="rtx4090", budget="4", strategy="random", measurer=FakeMeasurer("rtx4090"))
    assert "is stored and stays the winner" in emmy(*ARGUMENTS).err
    (level,) = emmy("show", OP, "--gpu", "rtx4090", "--ir", "tile", "--json").of("level")
    assert level["origin"] == "measured"
    assert api.prediction(OP, gpu="rtx4090") is not None, "kept, and of no account"
    (record,) = emmy("explain", OP, "--gpu", "rtx4090", "--json").of("explanation")
    assert record["predicted"] is None and record["time_us"]


def test_a_cpu_s_model_predicts_no_gpu(emmy: Emmy, trained: CostModel, tmp_path: Path) -> None:
    model = _saved(trained, "cpu-portable", tmp_path)
    said = emmy(*ARGUMENTS, "--model", model)
    assert said.code == 2 and "cannot be told from a CPU's" in said.err


@pytest.mark.parametrize("gpu", ["rtx5090", "h200"])
def test_a_model_of_one_card_leads_on_another_and_is_calibrated_on_its_own_only(
    emmy: Emmy, trained: CostModel, tmp_path: Path, gpu: str
) -> None:
    model = _saved(trained, "h200", tmp_path)
    said = emmy("tune", OP, "--gpu", gpu, *ARGUMENTS[4:], "--model", model, "--json")
    (record,) = said.of("tune")
    assert said.code == 0 and record["model_target"] == "h200" and record["calibrated"] == (gpu == "h200")
    assert ("no row is of" in str(record["basis"])) == (gpu != "h200")


@pytest.fixture(scope="module")
def trained() -> CostModel:
    """A model of a few schedules of one op, with made-up times."""
    op = parse_op("matmul:128x128x128:f16")
    space = ScheduleSpace(op, load_target("h200"))
    keys = list(dict.fromkeys(space.sample(random.Random(i)).key for i in range(40)))
    rows = np.repeat(np.arange(len(keys)), 2)
    x, n = space.features([Point(k, ()) for k in keys])[rows], np.zeros(len(rows), dtype=np.int64)
    times, texts = np.asarray(10.0 + rows, dtype=np.float64), tuple(keys[i] for i in rows)
    samples = Samples(x, times, n, ("p",), n, (op.key,), texts, ("",) * len(rows), feature_set(), ROOF)
    return train(samples, "h200", seeds=(0,)).model


def _saved(model: CostModel, target: str, folder: Path) -> Path:
    """The model's file, given out as a judged one of the target."""
    path = folder / "model.txt"
    CostModel(replace(model.card, target=target, residual_log2=0.3), model.text, "").save(path)
    return path


def test_where_everything_spills_the_command_fails_and_says_so(emmy: Emmy, monkeypatch: pytest.MonkeyPatch) -> None:
    def spills(unit: SourceUnit, target: Target) -> GpuLibrary:
        raise CompileError("ptxas: spills 8 bytes a thread at 255 registers")

    monkeypatch.setattr(tuning, "Predicting", partial(Predicting, build=spills))
    said = emmy(*ARGUMENTS, "--json")
    (record,) = said.of("tune")
    assert said.code == 1 and record["verdict"] == "nothing passed"
    assert "spills 8 bytes" in json.dumps(record["rejected"]) and "rejected by the compiler" in said.err


def test_ctrl_c_ends_the_search_and_keeps_the_best_so_far(emmy: Emmy, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(op: Op, schedule: str, target: Target) -> Check:
        os.kill(os.getpid(), signal.SIGINT)
        return Check(op.key)

    monkeypatch.setattr(tuning, "Predicting", partial(Predicting, checker=interrupted))
    said = emmy("tune", OP, "matmul:64x64x128:f16", *ARGUMENTS[2:], "--json")
    assert said.code == 130 and "the best prediction so far is kept" in said.err
    assert [r["op"] for r in said.of("tune")] == ["matmul:64x64x128:f16"], "the one in flight, and no further op"


def test_threads_are_of_a_cpu(emmy: Emmy) -> None:
    said = emmy("tune", OP, "--gpu", "rtx4090", "--threads", "2")
    assert said.code == 2 and "a GPU is driven by one" in said.err


def test_a_set_that_was_interrupted_goes_on_behind_the_ops_that_had_ended(
    emmy: Emmy, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = (OP, "matmul:64x64x128:f16", "matmul:64x64x32:f16")

    def interrupted(op: Op, schedule: str, target: Target) -> Check:
        if op.key == OP:
            os.kill(os.getpid(), signal.SIGINT)
        return Check(op.key)

    monkeypatch.setattr(tuning, "Predicting", partial(Predicting, checker=interrupted))
    assert emmy("tune", *ops, *ARGUMENTS[2:]).code == 130
    monkeypatch.setattr(tuning, "Predicting", partial(Predicting, checker=lambda op, *_: Check(op.key)))
    again = emmy("tune", *ops, *ARGUMENTS[2:], "--json")
    assert [r["op"] for r in again.of("tune")] == [OP, ops[2]] and "had been finished" in again.err
    assert len(emmy("tune", *ops, *ARGUMENTS[2:], "--json").of("tune")) == 3, "it had ended, and begins anew"


@pytest.mark.slow
def test_ops_predicted_at_once_get_the_picks_that_they_get_in_turn(emmy: Emmy, tmp_path: Path) -> None:
    ops = ("matmul:64x64x64:f16", "matmul:64x64x128:f16", "rms_norm:64x128:f16")
    picks = [
        {r["op"]: (r["schedule"], r["predicted_us"]) for r in said.of("tune")}
        for n in ("1", "2")
        for said in [emmy("tune", *ops, *ARGUMENTS[2:], "--searches", n, "--home", str(tmp_path / n), "--json")]
    ]
    assert picks[0] == picks[1] and set(picks[0]) == set(ops)
    assert sorted((tmp_path / "2" / "predictions").glob("*.jsonl")) and not list((tmp_path / "2" / "journal").glob("*"))
