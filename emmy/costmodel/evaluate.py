"""How good a ranking is, per problem, beside rankings that need no model. Knows arrays; trains nothing.

A problem is one op on one device under one protocol: only its own candidates compete. The first figure is regret: how
much slower than the best known candidate the best of the first k in the ranking is, as a fraction (0 = found it).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MIN_CANDIDATES = 20  # below that, ten picks are half of the problem and say little
ENOUGH = 0.97  # of the best known speed
TOLERANCE = 0.02  # differences below 2 % at top-1 are noise: two measurements of one card differ by as much


@dataclass(frozen=True, slots=True)
class Score:
    """One ranking of one problem."""

    top1: float
    top10: float
    spearman: float
    to97: float  # measurements, in the ranking's order, until one is within 97 % of the best known speed


@dataclass(frozen=True, slots=True)
class ProblemScore:
    """One held-out problem under every ranker: "model", "pick", "random", "nearest", "fixed", and "built" where binaries are known."""

    problem: str
    candidates: int
    best_us: float
    scores: Mapping[str, Score]


@dataclass(frozen=True, slots=True)
class RankerScore:
    """A ranker over all held-out problems: mean regrets, the worst top-1 regret, mean Spearman, and how many measurements it
    takes to 97 % of the best known speed (geometric mean; 0 = not counted)."""

    ranker: str
    top1: float
    top10: float
    worst_top1: float
    spearman: float
    problems: int
    to97: float = 0.0


def unfit(scores: Sequence[RankerScore]) -> str:
    """Why a model with these scores on held-out problems may not be deployed; "" when it may."""
    found = {s.ranker: s for s in scores}
    if "model" not in found:
        return f"uncalibrated: no fold had a held-out problem of {MIN_CANDIDATES} candidates or more"
    ours, random = found["model"].top10, found["random"].top10
    if ours >= random:
        return f"top-10 regret {ours:.1%} on held-out problems, picking at random has {random:.1%}"
    return ""


def score(time_us: Floats, ranking: Floats, seed: int = 0) -> Score:
    """The score of a ranking (lower = better) of candidates whose times are known; ties are broken at random."""
    order = np.lexsort((np.random.default_rng(seed).random(len(ranking)), ranking))
    best = time_us.min()

    def regret(k: int) -> float:
        return float(time_us[order[:k]].min() / best - 1.0)

    first = int(np.argmax(time_us[order] * ENOUGH <= best)) + 1
    return Score(regret(1), regret(10), spearman(time_us, ranking), float(first))


def random_score(time_us: Floats) -> Score:
    """What picking at random gives on average, exactly."""
    good = int((time_us * ENOUGH <= time_us.min()).sum())
    until = (len(time_us) + 1) / (good + 1)  # of draws without replacement, on average
    return Score(_random_regret(time_us, 1), _random_regret(time_us, 10), 0.0, until)


def _random_regret(time_us: Floats, k: int) -> float:
    """Mean over all choices of k candidates: the i-th fastest is the fastest chosen in C(n-1-i, k-1) of C(n, k)."""
    ordered, n = np.sort(time_us), len(time_us)
    k = min(k, n)
    chance = [comb(n - 1 - i, k - 1) / comb(n, k) for i in range(n - k + 1)]
    return float(np.dot(chance, ordered[: n - k + 1]) / ordered[0] - 1.0)


def spearman(a: Floats, b: Floats) -> float:
    """Rank correlation, ties given their mean rank; 0 when one side is constant."""
    x, y = _ranks(a), _ranks(b)
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / scale if scale else 0.0


def _ranks(values: Floats) -> Floats:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2.0)[inverse], dtype=np.float64)


def fixed_list(schedules: Sequence[str], donors: Sequence[str], donor_log2_ratio: Floats) -> Floats:
    """A ranking by each schedule's mean slowdown (log2 of time / best) over donor problems; unknown ones come last."""
    sums: dict[str, tuple[float, int]] = {}
    for text, ratio in zip(donors, donor_log2_ratio, strict=True):
        total, n = sums.get(text, (0.0, 0))
        sums[text] = (total + float(ratio), n + 1)
    return np.array([total / n if n else np.inf for total, n in (sums.get(s, (0.0, 0)) for s in schedules)])


def copy_nearest(
    x: Floats, schedules: Sequence[str], donor_x: Floats, donors: Sequence[str], donor_time_us: Floats
) -> Floats:
    """A ranking by the time, in the donor problem, of the same schedule, or else of the most similar candidate there.

    Similar: least Euclidean distance over features scaled to unit deviation; what does not apply counts as average.
    """
    known = dict(zip(donors, donor_time_us, strict=True))
    both = scaled(np.vstack([x, donor_x]))
    ours, theirs = both[: len(x)], both[len(x) :]
    squares = (theirs**2).sum(axis=1)
    ranking = np.empty(len(x))
    for i, text in enumerate(schedules):
        nearest = int(np.argmin(squares - 2.0 * theirs @ ours[i]))
        ranking[i] = known.get(text, donor_time_us[nearest])
    return ranking


def scaled(x: Floats) -> Floats:
    """Columns with mean 0 and deviation 1; NaN and constant columns become 0."""
    known = np.isfinite(x)
    count = np.maximum(known.sum(axis=0), 1)
    filled = np.where(known, x, 0.0)
    mean = filled.sum(axis=0) / count
    centred = np.where(known, x - mean, 0.0)
    deviation = np.sqrt((centred**2).sum(axis=0) / count)
    return np.asarray(centred / np.where(deviation > 0, deviation, 1.0), dtype=np.float64)


def summary(problems: Sequence[ProblemScore]) -> tuple[RankerScore, ...]:
    """Every ranker over all problems, in the order in which the first problem names them."""
    out = []
    for ranker in problems[0].scores if problems else ():
        of = [p.scores[ranker] for p in problems]
        top1 = [s.top1 for s in of]
        out.append(
            RankerScore(
                ranker,
                float(np.mean(top1)),
                float(np.mean([s.top10 for s in of])),
                float(max(top1)),
                float(np.mean([s.spearman for s in of])),
                len(of),
                float(np.exp(np.mean(np.log([s.to97 for s in of])))),
            )
        )
    return tuple(out)


def by_kind(problems: Sequence[ProblemScore]) -> dict[str, tuple[RankerScore, ...]]:
    """The summary of each kind of op by itself, those with the most problems first."""
    kinds = Counter(p.problem.partition(":")[0] for p in problems)
    return {kind: summary([p for p in problems if p.problem.startswith(f"{kind}:")]) for kind, _ in kinds.most_common()}
