"""What `emmy train-costmodel` does: bring in new rows, train a model a target, judge it, deploy it if it may be."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from emmy.costmodel.dataset import Dataset
from emmy.costmodel.model import CostModel
from emmy.costmodel.registry import ModelStore, model_roots
from emmy.costmodel.samples import SourceDigest, generated_digest, prepare
from emmy.costmodel.train import MIN_SAMPLES, Progress, TrainedModel, Verdict, judge, train
from emmy.errors import DataError, NoSuchDevice, StaleModel, UsageError
from emmy.ir.target import load_target
from emmy.records import Measurement


@dataclass(frozen=True, slots=True)
class TrainReport:
    """One target's outcome. `trained` is None when there was too little to train on; `verdict` says so then."""

    target: str
    rows: int
    samples: int
    contended: int  # samples measured only while others used the machine
    dropped: Mapping[str, int]  # rows left out, by reason
    trained: TrainedModel | None
    verdict: Verdict
    path: Path | None = None  # the model's text file: in use when it was deployed, else among the versions
    seconds: float = 0.0


def train_costmodel(
    home: Path,
    gpu: str | None = None,
    *,
    source_digest: SourceDigest = generated_digest,
    models: Path | None = None,
    force: bool = False,
    on_progress: Progress = lambda what, done, of: None,
) -> tuple[TrainReport, ...]:
    """A report a target: of `gpu`, or of every target with rows. Raises UsageError when no target has any.

    models: where to keep and deploy them; default: the home's folder of models
    force:  deploy whatever the verdict
    """
    dataset = Dataset.of(home)
    dataset.ingest()
    with dataset.snapshot() as snapshot:
        known = [
            str(name) for (name,) in snapshot.query("SELECT DISTINCT target FROM measurement ORDER BY target").rows
        ]
    targets = [gpu] if gpu else known
    if not set(targets) & set(known):
        raise UsageError(
            f"{home} has no measurements{f' of {gpu}' if gpu else ''}. Measure some: `emmy tune --gpu {gpu or 'cpu'} ...`, "
            "or bring some in: `emmy data import FOLDER`"
        )
    store = ModelStore(models or model_roots(home)[0])
    reports = []
    for name in targets:
        began = time.monotonic()
        report = _train_one(dataset.rows(target=name), name, store, source_digest, force, on_progress)
        reports.append(replace(report, seconds=time.monotonic() - began))
    return tuple(reports)


def _train_one(
    rows: Sequence[Measurement],
    name: str,
    store: ModelStore,
    source_digest: SourceDigest,
    force: bool,
    on_progress: Progress,
) -> TrainReport:
    nothing = TrainReport(name, len(rows), 0, 0, {}, None, Verdict(False, ""))
    try:
        target = load_target(name)
    except NoSuchDevice as e:
        return replace(nothing, verdict=Verdict(False, str(e)))
    found = prepare(rows, target, source_digest, lambda done, of: on_progress("schedules replayed", done, of))
    n = len(found.samples)
    report = replace(nothing, samples=n, contended=found.contended, dropped=found.dropped)
    if n < MIN_SAMPLES:
        why = f"{n} usable samples, at least {MIN_SAMPLES} are needed: measure more with `emmy tune`"
        return replace(report, verdict=Verdict(False, why))
    trained = train(found.samples, name, on_progress=on_progress)
    verdict = judge(trained, found.samples, _comparable(store, name))
    path = store.deploy(trained.model) if verdict.deploy or force else store.keep(trained.model)
    return replace(report, trained=trained, verdict=verdict, path=path)


def _comparable(store: ModelStore, name: str) -> CostModel | None:
    """The deployed model; None when there is none this Emmy can use, so that any sound one is better."""
    try:
        return store.deployed(name)
    except (StaleModel, DataError):
        return None
