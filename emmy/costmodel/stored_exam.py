"""The exams of `emmy eval costmodel` on what is stored: which rows become samples, and whose rows stand in for whose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from emmy.costmodel.dataset import Dataset
from emmy.costmodel.donors import OTHER_ARCHITECTURE, DonorSamples, worth
from emmy.costmodel.evaluate import ProblemScore
from emmy.costmodel.exam import CurvePoint, Exam, Progress, examine, learning_curve, leave_gpu_out
from emmy.costmodel.fit import Samples
from emmy.costmodel.heldout import each_op, folds
from emmy.costmodel.recorded_samples import by_parameters, gemm_rows, siblings_of
from emmy.costmodel.replayed import Replays
from emmy.costmodel.retrain import usable_rows
from emmy.costmodel.samples import generated_digest, prepare
from emmy.costmodel.train import check_enough
from emmy.errors import NoSuchDevice, UsageError
from emmy.ir.target import load_target
from emmy.workloads import recorded

RECORDED = "recorded"  # as a donor


def judge_stored(home: Path, gpu: str, n_folds: int | None, on_progress: Progress) -> Exam:
    """The exam of the target's stored rows, by so many folds of ops, or by each op that has a problem to judge by.

    Raises UsageError when there is nothing to hold out.
    """
    samples = _samples(_ingested(home), gpu, on_progress)
    check_enough(samples, gpu)
    splits = each_op(samples) if n_folds is None else folds(samples, n_folds)
    return examine(samples, list(splits), on_progress=on_progress)


def judge_across_gpus(home: Path, on_progress: Progress) -> tuple[ProblemScore, ...]:
    """Each card's problems under a model of its vendor's other cards: those with stored rows, and those of recorded spaces."""
    dataset = _ingested(home)
    stored = [name for name in usable_rows(dataset) if _knows(name)]
    donors = {name: [d for d in stored if worth(load_target(d), load_target(name)) > 0] for name in stored}
    wanted = {n for name, ds in donors.items() if ds for n in (name, *ds)}
    cards = [(name, _samples(dataset, name, on_progress)) for name in stored if name in wanted]
    out = list(leave_gpu_out(cards, donors.__getitem__, on_progress=on_progress))
    spaces = [(name, by_parameters(name)) for name in recorded.names()]
    return (*out, *leave_gpu_out(spaces, siblings_of, on_progress=on_progress))


def stored_curve(
    home: Path, gpu: str, donors: Sequence[str], n_folds: int, on_progress: Progress
) -> tuple[CurvePoint, ...]:
    """The learning curve of the target's rows beside the donors': targets with rows, or `recorded`.

    Each donor's rows together count as OTHER_ARCHITECTURE rows of the card; alone, at 0 %, that is all there is.
    """
    dataset = _ingested(home)
    samples = _samples(dataset, gpu, on_progress)
    check_enough(samples, gpu)
    parts: list[tuple[str, Samples]] = []
    for name in donors:
        if name == gpu:
            raise UsageError(f"{gpu} cannot be a donor of itself")
        parts += gemm_rows() if name == RECORDED else [(name, _samples(dataset, name, on_progress))]
    weighed = [DonorSamples(name, part, OTHER_ARCHITECTURE) for name, part in parts if len(part)]
    return learning_curve(samples, weighed, n_folds=n_folds, on_progress=on_progress)


def _ingested(home: Path) -> Dataset:
    dataset = Dataset.of(home)
    dataset.ingest()
    return dataset


def _samples(dataset: Dataset, gpu: str, on_progress: Progress) -> Samples:
    target = load_target(gpu)
    replays = Replays.of(target, generated_digest)
    try:
        return prepare(
            dataset.rows(target=gpu),
            target,
            on_replayed=lambda n, of: on_progress("schedules replayed", n, of),
            replays=replays,
        ).samples
    finally:
        replays.save()


def _knows(name: str) -> bool:
    try:
        return bool(load_target(name))
    except NoSuchDevice:
        return False
