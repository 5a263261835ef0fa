"""Cost models as a whole: trained, judged, listed, rolled back. The part of `emmy.api` that measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from emmy import config
from emmy.costmodel.evaluate import ProblemScore
from emmy.costmodel.exam import CurvePoint, Exam
from emmy.costmodel.model import ModelCard
from emmy.costmodel.registry import ModelStore, Version, model_roots
from emmy.costmodel.retrain import TrainReport
from emmy.costmodel.retrain import train_costmodel as retrain
from emmy.costmodel.stored_exam import judge_across_gpus, judge_stored, stored_curve
from emmy.costmodel.train import Progress
from emmy.errors import UsageError


def train_costmodel(
    gpu: str | None = None,
    *,
    models: Path | None = None,
    force: bool = False,
    home: Path | None = None,
    on_progress: Progress = lambda what, done, of: None,
) -> tuple[TrainReport, ...]:
    """A cost model of the target, or of every target with rows: trained, judged, and deployed when it is better."""
    return retrain(home or config.home(), gpu, models=models, force=force, on_progress=on_progress)


def costmodel_versions(
    gpu: str | None = None, *, models: Path | None = None, home: Path | None = None
) -> tuple[Version, ...]:
    """Every version of the target's model, or of all targets' models, oldest first, each with its standing."""
    store = ModelStore(models or model_roots(home or config.home())[0])
    return tuple(v for name in ([gpu] if gpu else store.targets()) for v in store.history(name))


def rollback_costmodel(
    gpu: str | None = None,
    version: str = "",
    *,
    models: Path | None = None,
    home: Path | None = None,
    force: bool = False,
) -> ModelCard:
    """The card of the version that is deployed again: the one before, or that whose digest begins with `version`.

    gpu: may be left out where only one target has a model. Raises as `ModelStore.rollback` does.
    """
    store = ModelStore(models or model_roots(home or config.home())[0])
    targets = (gpu,) if gpu else store.targets()
    if not targets:
        raise UsageError(
            f"{store.root} holds no model, so that there is none to go back to. Train one: `emmy train-costmodel`"
        )
    if len(targets) != 1:
        raise UsageError(f"{store.root} has models of {', '.join(targets)}: say of which with --gpu NAME")
    with store.training(targets[0], wait=False):
        return store.rollback(targets[0], version, force=force)


def evaluate_costmodel(
    gpu: str,
    *,
    folds: int | None = 5,
    home: Path | None = None,
    on_progress: Progress = lambda what, done, of: None,
) -> Exam:
    """How well a model of the stored rows ranks problems it has not seen, beside rankings that need none. Deploys nothing.

    folds: so many groups of ops, each held out once; None = every op by itself, which trains a model an op
    """
    return judge_stored(home or config.home(), gpu, folds, on_progress)


def evaluate_across_gpus(
    *, home: Path | None = None, on_progress: Progress = lambda what, done, of: None
) -> tuple[ProblemScore, ...]:
    """How well a model of other cards' rows ranks a card's problems: of stored rows, and of the recorded spaces."""
    return judge_across_gpus(home or config.home(), on_progress)


def costmodel_curve(
    gpu: str,
    *,
    donors: Sequence[str] = ("cpu", "recorded"),
    folds: int = 5,
    home: Path | None = None,
    on_progress: Progress = lambda what, done, of: None,
) -> tuple[CurvePoint, ...]:
    """Regret on held-out problems with 0, 10, 25, 50 and 100 % of the card's other rows, alone and beside the donors' rows."""
    return stored_curve(home or config.home(), gpu, donors, folds, on_progress)
