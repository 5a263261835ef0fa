"""Rows in quarantine held against what is known here now: those that are calibrated come in. Trains nothing.

What is known grows, so a set that is held today may come in tomorrow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from emmy.costmodel.calibrate import Evidence, Finding, Predictor, Verdict, calibrate
from emmy.costmodel.dataset import Dataset
from emmy.costmodel.doctor import roof_us
from emmy.costmodel.donors import worth
from emmy.costmodel.exchange import other_licence
from emmy.costmodel.model import CostModel
from emmy.costmodel.quarantine import Arrival, Quarantine, Release
from emmy.costmodel.registry import find, model_roots
from emmy.costmodel.replayed import Outcome, Replays, SourceDigest, generated_digest, outcome_of
from emmy.costmodel.shards import MANIFEST, read_manifest
from emmy.errors import DataError, NoSuchDevice, StaleModel
from emmy.ir.target import Target, load_target, target_names
from emmy.records import Measurement

Progress = Callable[[str, int, int], None]


def _quiet(what: str, done: int, of: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Reviewed:
    """A set of rows, what was found of it, and what came in of it, if anything did."""

    arrival: Arrival
    verdict: Verdict
    release: Release | None = None


def review(
    dataset: Dataset,
    arrivals: Sequence[Arrival] | None = None,
    *,
    source_digest: SourceDigest = generated_digest,
    on_progress: Progress = _quiet,
) -> tuple[Reviewed, ...]:
    """Judges what is held, or these of it, and brings in what is calibrated. What one brings in is known to the next."""
    quarantine = Quarantine(dataset)
    out = []
    for arrival in quarantine.arrivals("held") if arrivals is None else arrivals:
        verdict = judge_arrival(dataset, arrival, source_digest, on_progress)
        if verdict.passed:
            release = quarantine.release(arrival, "calibrated: " + "; ".join(f.detail for f in verdict.findings))
            out.append(Reviewed(release.arrival, verdict, release))
        else:
            out.append(Reviewed(quarantine.hold(arrival, verdict.why), verdict))
    return tuple(out)


def judge_arrival(
    dataset: Dataset,
    arrival: Arrival,
    source_digest: SourceDigest = generated_digest,
    on_progress: Progress = _quiet,
) -> Verdict:
    """What is found of a held set. Changes nothing."""
    rows = arrival.rows()
    try:
        target = load_target(arrival.manifest.target)
    except NoSuchDevice as e:
        return Verdict((Finding("target", False, str(e)),))
    if target.is_cpu and any(r.device.product != target.product for r in rows):
        other = sorted({r.device.product for r in rows})[0]
        detail = f"rows of {other}; this processor is {target.product}, whose rows alone train a model here"
        return Verdict((Finding("target", False, detail),))
    if fault := _licence_fault(dataset, arrival):
        return Verdict((Finding("licence", False, fault),))
    replays = Replays.of(target, source_digest)
    try:
        return calibrate(rows, _evidence(dataset, target, replays, source_digest, len(rows), on_progress))
    finally:
        replays.save()  # the training that follows replays the same rows


def _licence_fault(dataset: Dataset, arrival: Arrival) -> str:
    folder = dataset.imported / arrival.manifest.target
    if not (folder / MANIFEST).exists():
        return ""
    there, here = read_manifest(folder).licence, arrival.manifest.licence
    return "" if there == here else other_licence(folder, there, here)


def _evidence(
    dataset: Dataset, target: Target, replays: Replays, source_digest: SourceDigest, n_rows: int, on_progress: Progress
) -> Evidence:
    done = 0

    def outcome(row: Measurement) -> Outcome:
        nonlocal done
        on_progress("schedules replayed", done, n_rows)
        done += 1
        threads = row.protocol.threads
        make = partial(outcome_of, row.op, row.schedule, target, threads, source_digest)
        return replays.get(row.op, row.schedule, threads, make)

    alike = tuple(name for name in target_names() if name != target.name and worth(load_target(name), target) > 0)
    known = [r for r in dataset.rows() if r.device.target in (target.name, *alike)]
    return Evidence(known, roof_us, outcome, _models(dataset, target, alike), alike.__contains__)


def _models(dataset: Dataset, target: Target, alike: Sequence[str]) -> tuple[Predictor, ...]:
    """Of the card itself, then of cards like it, those of the nearest architecture first."""
    nearest = sorted(alike, key=lambda name: (abs(_capability(load_target(name)) - _capability(target)), name))
    out = []
    for name in (target.name, *nearest):
        try:
            model = find(name, model_roots(dataset.home))
        except (StaleModel, DataError):
            continue
        if model is not None:
            out.append(Predictor(name, partial(_log2_us, model)))
    return tuple(out)


def _log2_us(model: CostModel, x: np.ndarray) -> np.ndarray:
    return model.predict(x)[0]


def _capability(target: Target) -> int:
    return int("".join(c for c in target.arch if c.isdigit()) or 0)
