"""Versions, what triggers a training, what a training remembers, and what other cards' rows count in it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from emmy.costmodel import replayed
from emmy.costmodel.donors import OTHER_ARCHITECTURE, SAME_ARCHITECTURE, DonorSamples, with_donors, worth
from emmy.costmodel.fit import Samples, fit
from emmy.costmodel.model import CostModel, member_of
from emmy.costmodel.model_files import read_text, write_text
from emmy.costmodel.model_text import MAX_BYTES
from emmy.costmodel.registry import ModelStore, TrainingBusy
from emmy.costmodel.replayed import Replays, SourceDigest
from emmy.costmodel.retrain import TrainReport, train_costmodel
from emmy.costmodel.samples import Prepared, prepare
from emmy.costmodel.train import judge, train
from emmy.costmodel.upkeep import Upkeep, Watch, enough
from emmy.errors import DataError, StaleModel, UsageError
from emmy.ir.ops import parse_op
from emmy.ir.target import Target, load_target
from emmy.measure.journal import Journal, RunHeader, journal_path
from emmy.records import Device, Measurement, Protocol
from emmy.search.schedule_space import ScheduleSpace

Synthetic = Callable[..., list[Measurement]]
PrepareRows = Callable[[list[Measurement]], Prepared]

TARGET = "cpu-portable"
MORE = ((320, 256, 384), (256, 640, 256), (160, 384, 512))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMMY_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def samples(synthetic_rows: Synthetic, prepare_rows: PrepareRows) -> Samples:
    return prepare_rows(synthetic_rows(25)).samples


@pytest.fixture(scope="module")
def models(samples: Samples) -> tuple[CostModel, CostModel, CostModel]:
    """Three of one target, each trained on more than the one before, a second apart."""
    made = []
    card = train(samples.take(np.arange(100)), TARGET, seeds=(0,)).model.card
    for i, n in enumerate((100, 125, 150)):
        texts = fit(samples.take(np.arange(n)), (0,))
        members = tuple(member_of(role, seed, text) for role, seed, text in texts)
        dated = replace(card, members=members, time_utc=f"2026-01-01T00:00:0{i}.000+00:00")
        made.append(CostModel(dated, "".join(text for _, _, text in texts), "m"))
    return made[0], made[1], made[2]


def _journal(home: Path, rows: list[Measurement], run: str = "run") -> None:
    with Journal.create(journal_path(home, run), RunHeader(run, "some", TARGET, "random", 0, "1 trial")) as j:
        for row in rows:
            j.append(row, elapsed_s=0.0)


# ---------------------------------------------------------------- versions
def test_a_rollback_takes_the_version_before_or_the_one_that_is_named(
    tmp_path: Path, models: tuple[CostModel, ...]
) -> None:
    store = ModelStore(tmp_path)
    for model in models:
        store.deploy(model)
    first, second, third = (m.digest for m in models)
    assert [(v.digest, v.standing) for v in store.history(TARGET)] == [
        (first, "superseded"), (second, "superseded"), (third, "deployed"),
    ]  # fmt: skip
    assert store.rollback(TARGET, first[:6]).digest == first
    deployed = store.deployed(TARGET)
    assert deployed is not None and deployed.digest == first
    assert store.rollback(TARGET).digest == third  # what was in use before the rollback
    with pytest.raises(UsageError, match=r"has no version of cpu-portable that begins with 'zz'.*--list"):
        store.rollback(TARGET, "zz")


def test_a_damaged_deployment_can_be_left_for_a_version_that_is_whole(
    tmp_path: Path, models: tuple[CostModel, ...]
) -> None:
    store = ModelStore(tmp_path)
    store.deploy(models[0])
    (tmp_path / f"{TARGET}.json").write_text("{")
    with pytest.raises(DataError):
        store.deployed(TARGET)
    assert store.rollback(TARGET, models[0].digest[:8]).digest == models[0].digest
    assert (back := store.deployed(TARGET)) is not None and back.digest == models[0].digest


def test_a_model_that_came_with_emmy_is_kept_before_it_is_replaced(
    tmp_path: Path, models: tuple[CostModel, ...]
) -> None:
    store = ModelStore(tmp_path)
    plain = tmp_path / f"{TARGET}.txt"
    models[0].save(plain)  # without versions, as one is shipped, and not compressed
    assert store.targets() == (TARGET,) and store.history(TARGET)[0].standing == "deployed"
    path = store.deploy(models[1])
    assert path.name == f"{TARGET}.txt.xz" and not plain.exists() and path.stat().st_size < len(models[1].text) / 2
    assert CostModel.load(plain).digest == models[1].digest  # the other name is meant
    assert store.rollback(TARGET).digest == models[0].digest


def test_damaged_foreign_stale_and_uncalibrated_versions_are_named_and_refused(
    tmp_path: Path, models: tuple[CostModel, ...]
) -> None:
    store = ModelStore(tmp_path)
    good, damaged, last = models
    store.keep(damaged)
    store.deploy(good)
    text = tmp_path / "versions" / f"{TARGET}-{damaged.digest}.txt.xz"
    write_text(text, read_text(text, MAX_BYTES).replace("leaf_value=", "leaf_value=9", 1))
    foreign = tmp_path / "versions" / f"{TARGET}-{'f' * 16}.txt.xz"
    CostModel(replace(last.card, target="h200"), last.text, "m").save(foreign)
    uncalibrated = CostModel(replace(last.card, residual_log2=None), last.text, "m")
    store.keep(uncalibrated)
    standing = {v.digest: v.standing for v in store.history(TARGET)}
    assert standing == {
        good.digest: "deployed", damaged.digest: "damaged", "f" * 16: "damaged", last.digest: "not deployed",
    }  # fmt: skip
    with pytest.raises(DataError, match="is not the text its card describes"):
        store.rollback(TARGET, damaged.digest)
    with pytest.raises(DataError, match=r"its card is of h200, version .*a foreign model"):
        store.rollback(TARGET, "ffff")
    with pytest.raises(UsageError, match="uncalibrated"):
        store.rollback(TARGET, last.digest)
    scores = tuple(replace(s, top10=9.0) if s.ranker == "model" else s for s in last.card.scores)
    store.keep(CostModel(replace(last.card, scores=scores), last.text, "m"))
    with pytest.raises(UsageError, match=r"may not be deployed: top-10 regret 900.0%.*--force"):
        store.rollback(TARGET, last.digest)
    assert (now := store.deployed(TARGET)) is not None and now.digest == good.digest
    assert store.rollback(TARGET, last.digest, force=True).digest == last.digest


def test_a_version_of_other_features_is_refused_unless_forced(
    tmp_path: Path, models: tuple[CostModel, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ModelStore(tmp_path)
    store.deploy(models[0])
    store.deploy(models[1])
    other = replace(replayed.feature_set(), digest="0" * 16)
    for module in ("registry", "model"):
        monkeypatch.setattr(f"emmy.costmodel.{module}.feature_set", lambda: other)
    assert {v.standing for v in store.history(TARGET)} == {"stale"}
    with pytest.raises(StaleModel, match="was trained on feature set"):
        store.rollback(TARGET)
    assert store.rollback(TARGET, force=True).digest == models[0].digest


def test_of_two_trainings_at_once_the_second_waits_or_is_refused(tmp_path: Path) -> None:
    store = ModelStore(tmp_path)
    with (
        store.training(TARGET),
        pytest.raises(TrainingBusy, match="another process trains"),
        store.training(TARGET, wait=False),
    ):
        pass
    with store.training(TARGET, wait=False):
        pass


# ---------------------------------------------------------------- what a training remembers
def test_a_second_training_replays_only_new_rows_and_gives_what_one_from_nothing_gives(
    tmp_path: Path, synthetic_rows: Synthetic, target: Target, plan_digest: SourceDigest
) -> None:
    rows = synthetic_rows(8)
    calls: list[str] = []

    def counted(op: object, schedule: str, target: Target) -> str:
        calls.append(schedule)
        return plan_digest(op, schedule, target)  # type: ignore[arg-type]

    replays = Replays(tmp_path / "r.npz", "code 1")
    prepare(rows[:30], target, counted, replays=replays)
    replays.save()
    assert len(calls) == 30
    again = Replays(tmp_path / "r.npz", "code 1")
    remembered = prepare(rows, target, counted, replays=again)
    assert len(calls) == len(rows) and len(again) == len(rows)
    afresh = prepare(rows, target, plan_digest)
    np.testing.assert_array_equal(remembered.samples.x, afresh.samples.x)
    assert remembered.samples.ids == afresh.samples.ids and remembered.dropped == afresh.dropped
    assert len(Replays(tmp_path / "r.npz", "code 2")) == 0
    (tmp_path / "r.npz").write_bytes(b"PK\x03\x04 no archive")
    assert len(Replays(tmp_path / "r.npz", "code 1")) == 0


@pytest.mark.slow
def test_what_is_remembered_holds_in_another_process_and_not_for_another_target() -> None:
    code = (
        "from emmy.costmodel.replayed import Replays; from emmy.costmodel.samples import generated_digest;"
        "from emmy.ir.target import load_target; print(Replays.of(load_target('h200'), generated_digest).tag)"
    )
    env = os.environ | {"PYTHONHASHSEED": "7"}
    there = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    from emmy.costmodel.samples import generated_digest

    assert there.stdout.strip() == Replays.of(load_target("h200"), generated_digest).tag
    assert there.stdout.strip() != Replays.of(load_target("rtx4090"), generated_digest).tag


# ---------------------------------------------------------------- donors
def test_a_donor_counts_as_so_many_rows_whatever_it_has_and_vendors_stay_apart(samples: Samples) -> None:
    h200, h100, ada, cpu = (load_target(n) for n in ("h200", "h100", "rtx4090", TARGET))
    assert worth(h100, h200) == SAME_ARCHITECTURE > worth(ada, h200) == OTHER_ARCHITECTURE
    assert worth(cpu, h200) == worth(ada, cpu) == worth(h200, h200) == 0.0
    donor = DonorSamples("rtx4090", samples, OTHER_ARCHITECTURE)
    joined = with_donors(samples.take(np.arange(40)), [donor])
    assert joined.weight is not None and len(joined) == 40 + len(samples)
    assert joined.weight[:40].sum() == 40 and joined.weight[40:].sum() == pytest.approx(OTHER_ARCHITECTURE)
    assert len({joined.problems[p] for p in joined.problem}) == 6  # the names are the same ones ...
    assert not set(joined.problem[:40]) & set(joined.problem[40:])  # ... and the problems are not
    assert DonorSamples("x", samples.take(np.arange(5)), SAME_ARCHITECTURE).weight == 1.0


@pytest.mark.slow
def test_a_donor_of_the_same_law_improves_a_model_of_few_rows_and_is_on_its_card(samples: Samples) -> None:
    rng = np.random.default_rng(0)
    few = samples.take(np.sort(rng.choice(len(samples), 60, replace=False)))
    alone = train(few, TARGET, seeds=(0,)).model
    helped = train(few, TARGET, seeds=(0,), donors=[DonorSamples("other", samples, SAME_ARCHITECTURE)]).model
    assert helped.card.residual_log2 is not None and alone.card.residual_log2 is not None
    assert helped.card.residual_log2 < 0.7 * alone.card.residual_log2
    (d,) = helped.card.donors
    assert (d.target, d.samples, d.weight) == ("other", len(samples), 1.0) and helped.card.rows == 60


# ---------------------------------------------------------------- the gate
@pytest.mark.slow
def test_where_few_ops_leave_no_exam_the_folds_of_the_new_model_are_compared_with_the_old_one(
    synthetic_rows: Synthetic, prepare_rows: PrepareRows, samples: Samples
) -> None:
    old = train(samples, TARGET, seeds=(0,)).model
    more = prepare_rows([*synthetic_rows(25), *synthetic_rows(25, seed=1, shapes=MORE)]).samples
    new = train(more, TARGET, seeds=(0,))
    verdict = judge(new, more, old)
    assert verdict.deploy and verdict.exam_problems == len(MORE) and "held out by folds" in verdict.why
    bad = replace(
        new,
        problems=tuple(
            replace(p, scores={k: replace(s, top10=9.0) for k, s in p.scores.items()}) for p in new.problems
        ),
    )
    assert not judge(bad, more, old).deploy


# ---------------------------------------------------------------- when
@pytest.mark.slow
def test_a_watch_trains_when_enough_rows_have_come_and_not_before(
    tmp_path: Path, synthetic_rows: Synthetic, plan_digest: SourceDigest
) -> None:
    watch = Watch(tmp_path, source_digest=plan_digest)
    assert list(watch.look()) == []
    rows = [replace(r, id=f"{i:032x}") for i, r in enumerate([*synthetic_rows(25), *synthetic_rows(25, 1, MORE)])]
    _journal(tmp_path, rows[:40], "a")
    assert list(watch.look()) == []  # too few to train on
    _journal(tmp_path, rows[40:150], "b")
    (first,) = watch.look()
    assert (
        first.trained is not None
        and first.trained.model.card.rows_stored == 150
        and first.trained.model.card.train_s > 0
    )
    assert list(watch.look()) == []
    _journal(tmp_path, rows[150:190], "c")
    assert list(watch.look()) == [] and enough(150) == 50
    again = Watch(tmp_path, source_digest=plan_digest)  # as after kill -9: the cards say what was seen
    assert list(again.look()) == []
    _journal(tmp_path, rows[190:], "d")
    (second,) = again.look()
    assert second.trained is not None and second.trained.model.card.rows_stored == 225
    assert [c.rows_stored for c in ModelStore(tmp_path / "models").versions(TARGET)] == [150, 225]


def test_an_attempt_that_left_no_model_is_not_made_again_for_the_same_rows(
    tmp_path: Path, synthetic_rows: Synthetic
) -> None:
    _journal(tmp_path, synthetic_rows(10))
    watch = Watch(tmp_path, every=10, source_digest=lambda op, schedule, target: "another")
    (report,) = watch.look()
    assert report.trained is None and "0 usable samples" in report.verdict.why
    watch._looked = None
    assert list(watch.look()) == []


@pytest.mark.slow
def test_a_watch_leaves_a_target_to_whoever_trains_it_and_comes_back(
    tmp_path: Path, synthetic_rows: Synthetic, plan_digest: SourceDigest
) -> None:
    _journal(tmp_path, synthetic_rows(10))
    watch = Watch(tmp_path, source_digest=plan_digest)
    with ModelStore(tmp_path / "models").training(TARGET):
        assert list(watch.look()) == []
    assert len(list(watch.look())) == 1


class _Clock:
    """Seconds that pass only when told, and a little at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.01
        return self.now


@pytest.mark.slow
def test_a_tune_trains_between_ops_within_a_tenth_of_its_time(
    tmp_path: Path, synthetic_rows: Synthetic, plan_digest: SourceDigest
) -> None:
    _journal(tmp_path, synthetic_rows(25))
    clock = _Clock()
    upkeep = Upkeep(tmp_path, TARGET, source_digest=plan_digest, clock=clock)
    assert "10 new rows, 50 are needed" in str(upkeep.after(10))
    clock.now += 2.0
    cut = upkeep.after(100)  # 160 looks at the clock take 1.6 s of the 0.2 s allowed
    assert "cut off after" in str(cut) and not ModelStore(tmp_path / "models").versions(TARGET)
    assert upkeep.spent_s < 0.1 * clock.now + 0.02
    assert "allowed now" in str(upkeep.after(0))
    clock.now += 1000.0
    assert upkeep.after(0, lambda: True) == "stopped" and not ModelStore(tmp_path / "models").versions(TARGET)
    done = upkeep.after(0)
    assert isinstance(done, TrainReport) and done.verdict.deploy and upkeep.spent_s < 0.1 * clock.now
    assert "0 new rows" in str(upkeep.after(0))


def test_a_tune_does_not_end_for_a_training_that_cannot_be(tmp_path: Path) -> None:
    clock = _Clock()
    upkeep = Upkeep(tmp_path, TARGET, clock=clock)
    clock.now += 1000.0
    assert "has no measurements" in str(upkeep.after(60))


# ---------------------------------------------------------------- kill -9 and Ctrl-C
def _watching(home: Path) -> subprocess.Popen[str]:
    arguments = ["train-costmodel", "--watch", "--poll", "1", "--home", str(home)]
    code = f"import sys; from emmy.cli import main; sys.exit(main({arguments!r}))"
    env = os.environ | {"EMMY_CACHE": str(home / "cache")}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _until(process: subprocess.Popen[str], text: str) -> list[str]:
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if text in line:
            return said
    raise AssertionError(f"{text!r} was not said: {''.join(said)}")


@pytest.mark.slow
@pytest.mark.serial
def test_a_watcher_killed_while_it_trains_leaves_nothing_half_done_and_the_next_one_trains(
    tmp_path: Path, synthetic_rows: Synthetic
) -> None:
    from emmy.costmodel.samples import generated_digest

    target = load_target(TARGET)
    rows = [replace(r, source_digest=generated_digest(parse_op(r.op), r.schedule, target)) for r in synthetic_rows(25)]
    _journal(tmp_path, rows)
    first = _watching(tmp_path)
    _until(first, "folds judged")
    first.send_signal(signal.SIGKILL)
    first.wait()
    store = ModelStore(tmp_path / "models")
    assert not store.versions(TARGET) and store.deployed(TARGET) is None
    second = _watching(tmp_path)
    began = time.monotonic()
    while not store.versions(TARGET) and time.monotonic() - began < 120:
        time.sleep(0.2)
    time.sleep(1.0)
    second.send_signal(signal.SIGINT)
    out, err = second.communicate(timeout=180)
    assert second.returncode == 130 and "models trained: 1" in err and "deployed: top-10 regret" in out
    straight = train_costmodel(tmp_path, TARGET)[0].trained
    assert straight is not None and straight.model.digest == store.versions(TARGET)[0].digest


@pytest.mark.slow
def test_rows_of_another_card_train_along_with_their_weight_and_a_processors_do_not(
    tmp_path: Path, synthetic_rows: Synthetic, plan_digest: SourceDigest
) -> None:
    rows = list(synthetic_rows(5))
    for name in ("h200", "rtx4090"):
        card, rng = load_target(name), random.Random(name)
        for op in ("matmul:512x512x512:f16", "matmul:256x512x1024:f16"):
            space = ScheduleSpace(parse_op(op), card)
            for text in sorted({space.sample(rng).key for _ in range(40)}):
                digest = plan_digest(parse_op(op), text, card)
                device = Device(name, card.product, "ab", "", "nvrtc")
                us = 5.0 + 0.1 * len(text)
                rows.append(
                    Measurement(op, text, digest, device, "ok", (us,), Protocol(clock="event"), id=f"{len(rows):032x}")
                )
    _journal(tmp_path, [replace(r, id=f"{i:032x}") for i, r in enumerate(rows)])
    (report,) = train_costmodel(tmp_path, "h200", source_digest=plan_digest)
    assert report.trained is not None
    (donor,) = report.trained.model.card.donors
    there = sum(r.device.target == "rtx4090" for r in rows)
    assert (donor.target, donor.samples) == ("rtx4090", there)
    assert donor.weight == pytest.approx(OTHER_ARCHITECTURE / there)
    saved = ModelStore(tmp_path / "models").versions("h200")[0]
    assert saved.donors == (donor,) and saved.rows <= report.samples == sum(r.device.target == "h200" for r in rows)
