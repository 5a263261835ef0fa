"""What `emmy train-costmodel` does: bring in new rows, train a model a target, judge it, deploy it if it may be."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from emmy.costmodel.dataset import Dataset
from emmy.costmodel.model import CostModel
from emmy.costmodel.registry import ModelStore, model_roots
from emmy.costmodel.samples import SourceDigest, generated_digest, prepare
from emmy.costmodel.train import MIN_SAMPLES, Progress, TrainedModel, Verdict, judge, train
from emmy.errors import DataError, StaleModel, UsageError
from emmy.ir.target import load_target


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
    path: Path | None  # the model's text file: in use when the verdict is to deploy, else among the versions
    seconds: float


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
    return tuple(_train_one(dataset, name, store, source_digest, force, on_progress) for name in targets)


def _train_one(
    dataset: Dataset,
    name: str,
    store: ModelStore,
    source_digest: SourceDigest,
    force: bool,
    on_progress: Progress,
) -> TrainReport:
    began = time.monotonic()
    rows = dataset.rows(target=name)
    on_progress(f"{name}: replaying {len(rows)} rows", 0, 1)
    prepared = prepare(rows, load_target(name), source_digest)
    n = len(prepared.samples)
    if n < MIN_SAMPLES:
        verdict = Verdict(
            False, f"{n} usable samples, at least {MIN_SAMPLES} are needed: measure more with `emmy tune`"
        )
        return TrainReport(
            name, len(rows), n, prepared.contended, prepared.dropped, None, verdict, None, time.monotonic() - began
        )
    trained = train(prepared.samples, name, on_progress=on_progress)
    verdict = judge(trained, prepared.samples, _comparable(store, name))
    path = store.deploy(trained.model) if verdict.deploy or force else store.keep(trained.model)
    return TrainReport(
        name, len(rows), n, prepared.contended, prepared.dropped, trained, verdict, path, time.monotonic() - began
    )


def _comparable(store: ModelStore, name: str) -> CostModel | None:
    """The deployed model; None when there is none this Emmy can use, so that any sound one is better."""
    try:
        return store.deployed(name)
    except (StaleModel, DataError):
        return None
