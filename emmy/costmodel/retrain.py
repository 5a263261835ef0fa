"""What `emmy train-costmodel` does: bring in new rows, train a model a target, judge it, deploy it if it may be.

A training is incremental: what rows replay to is remembered (`replayed.py`), so that it costs the new rows' replays and a
fit, and other cards' rows carry less weight as the card's own arrive (`donors.py`). The fit itself begins anew, so that the
same rows give the same model, whatever trainings were between.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from emmy.costmodel.dataset import Dataset
from emmy.costmodel.donors import DonorSamples, worth
from emmy.costmodel.model import CostModel
from emmy.costmodel.registry import ModelStore, model_roots
from emmy.costmodel.replayed import Replays, SourceDigest
from emmy.costmodel.samples import Prepared, generated_digest, prepare
from emmy.costmodel.train import MIN_SAMPLES, Progress, TrainedModel, Verdict, judge, train
from emmy.errors import DataError, NoSuchDevice, StaleModel, UsageError
from emmy.ir.target import Target, load_target
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
    wait: bool = True,
    on_progress: Progress = lambda what, done, of: None,
) -> tuple[TrainReport, ...]:
    """A report a target: of `gpu`, or of every target with rows. Raises UsageError when no target has any.

    models: where to keep and deploy them; default: the home's folder of models
    force:  deploy whatever the verdict
    wait:   for another process that trains a model of the target; otherwise raises TrainingBusy
    """
    dataset = Dataset.of(home)
    dataset.ingest()
    known = tuple(usable_rows(dataset))
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
        with store.training(name, wait=wait):
            report = _Training(dataset, name, store, source_digest, known, on_progress).run(force)
        reports.append(replace(report, seconds=time.monotonic() - began))
    return tuple(reports)


def usable_rows(dataset: Dataset) -> dict[str, int]:
    """Rows by target that could train a model, those without any included: 0."""
    with dataset.snapshot() as snapshot:
        rows = snapshot.query(
            "SELECT target, count(*) FILTER (status = 'ok' AND origin <> 'derived') FROM measurement "
            "GROUP BY target ORDER BY target"
        ).rows
    return {str(target): int(str(n)) for target, n in rows}


@dataclass(frozen=True, slots=True)
class _Training:
    """One target's."""

    dataset: Dataset
    name: str
    store: ModelStore
    source_digest: SourceDigest
    known: Sequence[str]  # targets with rows
    on_progress: Progress

    def run(self, force: bool) -> TrainReport:
        began = time.monotonic()
        rows = self.dataset.rows(target=self.name)
        nothing = TrainReport(self.name, len(rows), 0, 0, {}, None, Verdict(False, ""))
        try:
            target = load_target(self.name)
        except NoSuchDevice as e:
            return replace(nothing, verdict=Verdict(False, str(e)))
        found = self._prepared(rows, target)
        n = len(found.samples)
        report = replace(nothing, samples=n, contended=found.contended, dropped=found.dropped)
        if n < MIN_SAMPLES:
            why = f"{n} usable samples, at least {MIN_SAMPLES} are needed: measure more with `emmy tune`"
            return replace(report, verdict=Verdict(False, why))
        trained = train(found.samples, self.name, on_progress=self.on_progress, donors=self._donors(target))
        usable = sum(r.status == "ok" and r.origin != "derived" for r in rows)
        card = replace(trained.model.card, rows_stored=usable, train_s=round(time.monotonic() - began, 3))
        trained = replace(trained, model=CostModel(card, trained.model.text, f"the new model of {self.name}"))
        verdict = judge(trained, found.samples, _comparable(self.store, self.name))
        path = self.store.deploy(trained.model) if verdict.deploy or force else self.store.keep(trained.model)
        return replace(report, trained=trained, verdict=verdict, path=path)

    def _donors(self, of: Target) -> list[DonorSamples]:
        """Samples of every other card whose rows are worth something."""
        out = []
        for name in self.known:
            try:
                donor = load_target(name)
            except NoSuchDevice:
                continue
            if (rows_worth := worth(donor, of)) > 0:
                samples = self._prepared(self.dataset.rows(target=name), donor).samples
                out += [DonorSamples(name, samples, rows_worth)] if len(samples) else []
        return out

    def _prepared(self, rows: Sequence[Measurement], target: Target) -> Prepared:
        replays = Replays.of(target, self.source_digest)
        try:
            return prepare(
                rows,
                target,
                self.source_digest,
                lambda done, of: self.on_progress("schedules replayed", done, of),
                replays,
            )
        finally:  # also when it is interrupted: what was replayed need not be again
            replays.save()


def _comparable(store: ModelStore, name: str) -> CostModel | None:
    """The deployed model; None when there is none this Emmy can use, so that any sound one is better."""
    try:
        return store.deployed(name)
    except (StaleModel, DataError):
        return None
