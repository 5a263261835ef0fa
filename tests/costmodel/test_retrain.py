"""`train_costmodel` from journals to a deployed model that another process could load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from emmy.costmodel import replayed
from emmy.costmodel.registry import ModelStore, find, model_roots
from emmy.costmodel.replayed import SourceDigest
from emmy.costmodel.retrain import train_costmodel
from emmy.costmodel.samples import CHANGED
from emmy.errors import UsageError
from emmy.measure.journal import Journal, RunHeader, journal_path
from emmy.records import Measurement

Synthetic = Callable[..., list[Measurement]]


def _journal(home: Path, rows: list[Measurement]) -> None:
    with Journal.create(
        journal_path(home, "run"), RunHeader("run", "some", "cpu-portable", "random", 0, "1 trial")
    ) as j:
        for row in rows:
            j.append(row, elapsed_s=0.0)


@pytest.mark.slow
def test_a_home_with_a_journal_gets_a_calibrated_model_for_its_target(
    tmp_path: Path, synthetic_rows: Synthetic, plan_digest: SourceDigest
) -> None:
    _journal(tmp_path, synthetic_rows(25))
    steps: list[str] = []
    (report,) = train_costmodel(
        tmp_path, source_digest=plan_digest, on_progress=lambda what, done, of: steps.append(what)
    )
    assert (report.target, report.rows, report.samples, report.dropped) == ("cpu-portable", 150, 150, {})
    assert (
        report.verdict.deploy
        and report.path == tmp_path / "models" / "cpu-portable.txt.xz"
        and {"schedules replayed", "folds judged"} == set(steps)
    )
    found = find("cpu-portable", model_roots(tmp_path)[:1])
    assert found is not None and found.is_calibrated and found.card.rows == 150
    assert report.trained is not None and found.digest == report.trained.model.digest
    again = train_costmodel(tmp_path, "cpu-portable", source_digest=plan_digest)[0]
    assert again.trained is not None and again.trained.model.digest == found.digest
    assert "no problem is unseen" in again.verdict.why


def test_a_model_that_may_not_be_deployed_is_kept_aside_unless_forced(
    tmp_path: Path, synthetic_rows: Synthetic, plan_digest: SourceDigest
) -> None:
    _journal(tmp_path, synthetic_rows(60, shapes=((128, 256, 256),)))
    (report,) = train_costmodel(tmp_path, "cpu-portable", source_digest=plan_digest)
    store = ModelStore(tmp_path / "models")
    assert not report.verdict.deploy and store.deployed("cpu-portable") is None
    assert report.path is not None and report.path.parent.name == "versions" and report.path.exists()
    (forced,) = train_costmodel(tmp_path, "cpu-portable", source_digest=plan_digest, force=True)
    deployed = store.deployed("cpu-portable")
    assert not forced.verdict.deploy and deployed is not None and not deployed.is_calibrated


def test_too_few_rows_give_a_report_and_no_model(tmp_path: Path, synthetic_rows: Synthetic) -> None:
    _journal(tmp_path, synthetic_rows(5))
    (report,) = train_costmodel(tmp_path, source_digest=lambda op, schedule, target: "another source")
    assert report.trained is None and report.path is None and report.dropped == {CHANGED: 30}
    assert "0 usable samples" in report.verdict.why


def test_without_rows_the_error_says_how_to_get_some(tmp_path: Path, synthetic_rows: Synthetic) -> None:
    with pytest.raises(UsageError, match=r"has no measurements\. Measure some: `emmy tune --gpu cpu"):
        train_costmodel(tmp_path)
    _journal(tmp_path, [replace(r, status="timeout", samples_us=()) for r in synthetic_rows(2)])
    with pytest.raises(UsageError, match="no measurements of h200"):
        train_costmodel(tmp_path, "h200")
    with pytest.raises(UsageError, match="no measurements of rtx1"):
        train_costmodel(tmp_path, "rtx1")


def test_rows_of_a_target_this_emmy_does_not_know_are_reported_and_hold_nothing_up(
    tmp_path: Path, synthetic_rows: Synthetic, plan_digest: SourceDigest
) -> None:
    rows = synthetic_rows(2)
    strange = [replace(r, id=f"x{r.id}", device=replace(r.device, target="abacus")) for r in rows]
    _journal(tmp_path, [*rows, *strange])
    abacus, known = train_costmodel(tmp_path, source_digest=plan_digest)
    assert abacus.target == "abacus" and "no target is named 'abacus'" in abacus.verdict.why
    assert known.samples == 12


def test_what_is_remembered_of_replays_depends_on_the_code_that_replays_and_on_no_other() -> None:
    known = set(replayed._reached(replayed.__name__))
    needed = {
        "ir.moves.split",
        "ir.moves.streamk",
        "codegen.cuda_wgmma",
        "codegen.ptx.memory",
        "costmodel.gpu_features",
    }
    assert {f"emmy.{name}" for name in needed} <= known
    assert not {x for x in known if x.split(".")[1] in ("search", "measure", "cli", "api")}
    assert not {"emmy.costmodel.fit", "emmy.costmodel.retrain", "emmy.codegen.emulator.build"} & known
