"""From samples to a judged model: folds, baselines, the final fit, and whether it may replace the deployed one.

Folds are split by workload, so that a model is only ever judged on shapes it has not seen. From sixteen workloads on, an
eighth (chosen by a hash of the op's text, always the same ones) is held out of every final fit too: on those the new
model and the deployed one sit the same exam.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emmy import __version__
from emmy.costmodel.built import NAMES as BUILT
from emmy.costmodel.donors import DonorSamples, with_donors
from emmy.costmodel.evaluate import TOLERANCE, ProblemScore, RankerScore, score, summary, unfit
from emmy.costmodel.fit import SEEDS, Samples, ensemble, fit
from emmy.costmodel.heldout import folds, problems_of, scores_of
from emmy.costmodel.model import CostModel, Donor, Ensemble, ModelCard, member_of
from emmy.errors import UsageError
from emmy.records import now_utc

Floats = NDArray[np.float64]
Progress = Callable[[str, int, int], None]  # what is done, steps done, steps in all

FOLDS = 5
EXAM_FROM = 16  # workloads
EXAM_SHARE = 8
MIN_SAMPLES = 50
PICKS = 10  # of a problem
MIN_JUDGED = 5  # held-out problems that quantiles of errors need


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model and its scores on held-out problems: over all of them, and one by one."""

    model: CostModel
    scores: tuple[RankerScore, ...]
    problems: tuple[ProblemScore, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a new model may be deployed, and why; the exam's mean top-10 regrets, where one was held."""

    deploy: bool
    why: str
    new_top10: float | None = None
    old_top10: float | None = None
    exam_problems: int = 0


def train(
    samples: Samples,
    target: str,
    *,
    seeds: Sequence[int] = SEEDS,
    on_progress: Progress = lambda what, done, of: None,
    donors: Sequence[DonorSamples] = (),
) -> TrainedModel:
    """A model of `samples`, judged by folds. Raises UsageError when there are too few.

    donors: other cards' samples, in every fit and in no judgement
    """
    check_enough(samples, target)
    splits = list(folds(samples, FOLDS))
    problems: list[ProblemScore] = []
    errors: list[Floats] = []
    picked: list[Floats] = []
    for i, (known, unseen) in enumerate(splits):
        on_progress("folds judged", i, len(splits))
        own, held = samples.take(known), samples.take(unseen)
        model = ensemble(with_donors(own, donors), seeds)
        problems += scores_of(own, held, model)
        errors.append(_ratio_errors(held, model))
        picked += _pick_errors(held, model)
    on_progress("folds judged", len(splits), len(splits))
    study = samples.take(np.flatnonzero(~is_exam(samples)))
    texts = fit(with_donors(study, donors), seeds)
    scores = summary(problems)
    ids = "\n".join(sorted(study.ids))
    card = ModelCard(
        target=target,
        feature_names=samples.features.names,
        feature_digest=samples.features.digest,
        offset=samples.offset,
        members=tuple(member_of(role, seed, text) for role, seed, text in texts),
        rows=len(study),
        rows_digest=hashlib.sha256(ids.encode()).hexdigest()[:16],
        workloads=tuple(sorted({samples.workloads[i] for i in study.workload})),
        residual_log2=float(np.sqrt(np.mean(np.concatenate(errors) ** 2))) if errors else None,
        scores=scores,
        emmy_version=__version__,
        time_utc=now_utc(),
        pick_error_log2=_quantiles(picked),
        donors=tuple(Donor(d.target, len(d.samples), d.weight) for d in donors),
        built_names=BUILT if any(role == "built" for role, _, _ in texts) else (),
    )
    model_ = CostModel(card, "".join(text for _, _, text in texts), f"the new model of {target}")
    return TrainedModel(model_, scores, tuple(problems))


def check_enough(samples: Samples, target: str) -> None:
    """Raises UsageError when there are too few samples to train on, or to judge by."""
    if len(samples) < MIN_SAMPLES:
        raise UsageError(
            f"{len(samples)} usable samples of target {target}, at least {MIN_SAMPLES} are needed. "
            f"Measure more: `emmy tune --gpu {target} ...`"
        )


def judge(new: TrainedModel, samples: Samples, old: CostModel | None) -> Verdict:
    """Whether `new` may replace `old`: it must beat picking at random, and not be worse on problems neither has seen."""
    if why := unfit(new.scores):
        return Verdict(False, why)
    found = {s.ranker: s for s in new.scores}
    model, random = found["model"], found["random"]
    beats = f"top-10 regret {model.top10:.1%} on held-out problems against {random.top10:.1%} at random"
    if old is None:
        return Verdict(True, f"{beats}; no model was deployed")
    seen = {*new.model.card.workloads, *old.card.workloads}
    fresh = np.flatnonzero([samples.workloads[i] not in seen for i in samples.workload])
    exam = samples.take(fresh)
    ours, theirs = (_exam_scores(exam, m.ensemble) for m in (new.model, old))
    what = "unseen problems"
    if (
        not ours
    ):  # few ops, or a deployed model that knew the exam: what it has not seen, and the new one's folds had not
        ours, theirs = _by_folds(new, samples, old)
        what = "problems unseen by the deployed model, and held out by folds of the new one"
    if not ours:
        return Verdict(True, f"{beats}; no problem is unseen by both it and the deployed model")
    new_top10, old_top10 = float(np.mean(ours)), float(np.mean(theirs))
    deploy = new_top10 <= old_top10 + TOLERANCE
    why = f"exam of {len(ours)} {what}: top-10 regret {new_top10:.1%}, the deployed model has {old_top10:.1%}"
    return Verdict(deploy, why, new_top10, old_top10, len(ours))


def _by_folds(new: TrainedModel, samples: Samples, old: CostModel) -> tuple[list[float], list[float]]:
    """Top-10 regrets on problems of ops that the old model was not trained on: of the new one's folds, and of the old one."""
    held = {p.problem: p.scores["model"].top10 for p in new.problems}
    unseen = np.flatnonzero([samples.workloads[i] not in old.card.workloads for i in samples.workload])
    both = [(p, here) for p, here in problems_of(samples.take(unseen)) if samples.problems[p] in held]
    ours = [held[samples.problems[p]] for p, _ in both]
    return ours, [score(here.time_us, old.ensemble.predict(here.x)[0]).top10 for _, here in both]


def is_exam(samples: Samples) -> NDArray[np.bool_]:
    """Which samples every final fit leaves out; none while there are few workloads."""
    exam = [zlib.crc32(w.encode()) % EXAM_SHARE == 0 for w in samples.workloads]
    if len(samples.workloads) < EXAM_FROM or all(exam):
        return np.zeros(len(samples), dtype=np.bool_)
    return np.asarray(exam, dtype=np.bool_)[samples.workload]


def _ratio_errors(held: Samples, model: Ensemble) -> Floats:
    """Errors of log2(time) on unseen problems, less each problem's mean error, which changes no order."""
    error = model.predict(held.x)[0] - np.log2(held.time_us)
    for p in np.unique(held.problem):
        error[held.problem == p] -= error[held.problem == p].mean()
    return np.asarray(error)


def _pick_errors(held: Samples, model: Ensemble) -> Iterator[Floats]:
    """log2(time / predicted) of the ten best predicted on each unseen problem: as a pick is chosen, so is it judged."""
    for _, here in problems_of(held):
        predicted = model.predict(here.x)[0]
        best = np.argsort(predicted, kind="stable")[:PICKS]
        yield np.log2(here.time_us[best]) - predicted[best]


def _quantiles(errors: Sequence[Floats]) -> tuple[float, float, float] | None:
    """10 %, 50 % and 90 %; None while there are too few problems to tell."""
    if len(errors) < MIN_JUDGED:
        return None
    low, middle, high = np.quantile(np.concatenate(errors), (0.1, 0.5, 0.9))
    return float(low), float(middle), float(high)


def _exam_scores(exam: Samples, model: Ensemble) -> list[float]:
    return [score(here.time_us, model.predict(here.x)[0]).top10 for _, here in problems_of(exam)]
