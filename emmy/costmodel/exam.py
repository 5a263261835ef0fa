"""A cost model judged in full, as `emmy eval costmodel` does: held out by op, or by card; calibrated; with few rows. Deploys nothing.

Every figure has random, copy-nearest and a fixed list beside it. The card's own rows are never in a fit that they judge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from emmy.costmodel.donors import DonorSamples, with_donors
from emmy.costmodel.evaluate import MIN_CANDIDATES, ProblemScore, RankerScore, summary
from emmy.costmodel.fit import SEEDS, Samples, ensemble
from emmy.costmodel.heldout import Split, folds, scores_of
from emmy.costmodel.train import MIN_SAMPLES
from emmy.errors import UsageError

Floats = NDArray[np.float64]
Progress = Callable[[str, int, int], None]

LEVELS = (0.5, 0.8, 0.9, 0.95)  # of intervals whose coverage is counted
SHARES = (0.0, 0.1, 0.25, 0.5, 1.0)  # of a card's rows, for the curve


@dataclass(frozen=True, slots=True)
class Coverage:
    """How many held-out times lie in the interval that the model gives as `level` likely; equal shares are calibrated.

    time: of the times themselves; ratio: of times against the mean of their problem, which is what a ranking needs
    """

    level: float
    time: float
    ratio: float
    samples: int


@dataclass(frozen=True, slots=True, eq=False)
class Exam:
    """Scores on held-out problems, and the predictions they rest on, all log2 of microseconds, a row a held-out sample."""

    problems: tuple[ProblemScore, ...]
    scores: tuple[RankerScore, ...]
    coverage: tuple[Coverage, ...]
    predicted: Floats
    spread: Floats
    measured: Floats


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A ranker on held-out problems when a model knew `share` of the card's other rows, with or without other devices' rows."""

    share: float
    rows: int  # of the card, in a fit, on average
    donors: int  # rows of other devices
    ranker: str
    top1: float
    top10: float
    spearman: float
    problems: int


def examine(
    samples: Samples,
    splits: Sequence[Split],
    *,
    donors: Sequence[DonorSamples] = (),
    seeds: Sequence[int] = SEEDS,
    on_progress: Progress = lambda what, done, of: None,
) -> Exam:
    """The exam of models that are each trained on one side of a split, and judged by the other. Raises UsageError without any."""
    if not splits:
        raise _too_few(samples)
    problems: list[ProblemScore] = []
    parts: list[tuple[Floats, Floats, Floats, NDArray[np.int64]]] = []
    for i, (known, unseen) in enumerate(splits):
        on_progress("held out", i, len(splits))
        own, held = samples.take(known), samples.take(unseen)
        model = ensemble(with_donors(own, donors), seeds)
        problems += scores_of(own, held, model)
        parts.append((*model.predict(held.x), np.log2(held.time_us), held.problem))
    on_progress("held out", len(splits), len(splits))
    residuals = [_rms(_less_problems_mean(m - p, q)) for p, _, m, q in parts]
    spread = [
        np.hypot(s, _rms(np.array([r for j, r in enumerate(residuals) if j != i] or residuals)))
        for i, (_, s, _, _) in enumerate(parts)  # of the other splits: what a deployed model would have known
    ]
    predicted, measured, problem = (np.concatenate([part[k] for part in parts]) for k in (0, 2, 3))
    sigma = np.concatenate(spread)
    return Exam(
        tuple(problems),
        summary(problems),
        tuple(_coverage(predicted, sigma, measured, problem)),
        predicted,
        sigma,
        measured,
    )


def leave_gpu_out(
    cards: Sequence[tuple[str, Samples]],
    donors_of: Callable[[str], Iterable[str]],
    *,
    seeds: Sequence[int] = SEEDS,
    on_progress: Progress = lambda what, done, of: None,
) -> tuple[ProblemScore, ...]:
    """Every problem of every card, ranked by a model of its donors alone. Cards without a donor are left out.

    Times count against the median of their problem: what another card's rows can tell is an order.
    """
    by_name = dict(cards)
    out: list[ProblemScore] = []
    for i, (name, held) in enumerate(cards):
        on_progress("cards held out", i, len(cards))
        known = [_relative(by_name[d]) for d in donors_of(name)]
        if known:
            donors = known[0]
            for other in known[1:]:
                donors = donors.join(other, 1.0)
            out += scores_of(donors, held, ensemble(donors, seeds))
    on_progress("cards held out", len(cards), len(cards))
    return tuple(out)


def _too_few(samples: Samples) -> UsageError:
    n_ops = len(np.unique(samples.workload))
    least = f"at least {MIN_SAMPLES} of two ops, {MIN_CANDIDATES} of them of one problem, are needed, so that one can be held out"
    return UsageError(f"{len(samples)} usable samples of {n_ops} ops; {least}. Measure more: `emmy tune ...`")


def learning_curve(
    samples: Samples,
    donors: Sequence[DonorSamples] = (),
    *,
    shares: Sequence[float] = SHARES,
    n_folds: int = 5,
    seed: int = 0,
    seeds: Sequence[int] = SEEDS,
    on_progress: Progress = lambda what, done, of: None,
) -> tuple[CurvePoint, ...]:
    """Points for each share of a card's rows, drawn at random and nested, without the donors and with them.

    The problems that judge are the same everywhere: the folds' unseen ones. Without own rows the donors are all there is.
    """
    splits = list(folds(samples, n_folds))
    if not splits:
        raise _too_few(samples)
    n_donors = sum(len(d.samples) for d in donors)
    ways = [
        (share, helped) for share in shares for helped in (False, True) if (share or helped) and (donors or not helped)
    ]
    out: list[CurvePoint] = []
    for done, (share, helped) in enumerate(ways):
        on_progress("points of the curve", done, len(ways))
        problems: list[ProblemScore] = []
        rows = 0
        for known, unseen in splits:
            order = np.random.default_rng(seed).permutation(known)
            own = samples.take(np.sort(order[: round(share * len(known))]))
            told = with_donors(own, donors) if helped else own
            if not len(told):
                continue
            rows += len(own)
            problems += scores_of(own if len(own) else told, samples.take(unseen), ensemble(told, seeds))
        out += [
            CurvePoint(
                share, rows // len(splits), n_donors if helped else 0, s.ranker, s.top1, s.top10, s.spearman, s.problems
            )
            for s in summary(problems)
        ]
    on_progress("points of the curve", len(ways), len(ways))
    return tuple(out)


def _coverage(predicted: Floats, spread: Floats, measured: Floats, problem: NDArray[np.int64]) -> Iterable[Coverage]:
    error = measured - predicted
    ratio = _less_problems_mean(error, problem)
    for level in LEVELS:
        reach = NormalDist().inv_cdf(0.5 + level / 2) * spread
        within = [float(np.mean(np.abs(e) <= reach)) for e in (error, ratio)]
        yield Coverage(level, within[0], within[1], len(error))


def _less_problems_mean(error: Floats, problem: NDArray[np.int64]) -> Floats:
    """The errors less each problem's mean, which changes no order."""
    out = error.copy()
    for p in np.unique(problem):
        out[problem == p] -= error[problem == p].mean()
    return out


def _rms(x: Floats) -> float:
    return float(np.sqrt(np.mean(x**2)))


def _relative(samples: Samples) -> Samples:
    """The samples with each problem's median as the unit of time, and without an offset in other units."""
    median = {int(p): float(np.median(samples.time_us[samples.problem == p])) for p in np.unique(samples.problem)}
    unit = np.array([median[int(p)] for p in samples.problem])
    return replace(samples, time_us=samples.time_us / unit, offset="")
