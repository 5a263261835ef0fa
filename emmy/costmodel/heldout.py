"""Problems held out: how samples are split, and how a model and rankings that need none do on what they have not seen."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from emmy.costmodel.evaluate import MIN_CANDIDATES, ProblemScore, copy_nearest, fixed_list, random_score, scaled, score
from emmy.costmodel.fit import Samples
from emmy.costmodel.model import Ensemble

Floats = NDArray[np.float64]
Split = tuple[NDArray[np.int64], NDArray[np.int64]]  # indices that a model is trained on, and those that judge it


def folds(samples: Samples, most: int | None = None) -> Iterator[Split]:
    """Splits into (known, unseen); no workload is on both sides. `most` of them, or each workload by itself."""
    there = len(np.unique(samples.workload))
    n = there if most is None else min(most, there)
    if n < 2:
        return
    from sklearn.model_selection import GroupKFold

    yield from GroupKFold(n).split(samples.x, groups=samples.workload)


def each_op(samples: Samples) -> Iterator[Split]:
    """Splits whose unseen side is one workload, of those that have a problem to judge by."""
    return (split for split in folds(samples) if any(problems_of(samples.take(split[1]))))


def scores_of(donors: Samples, held: Samples, model: Ensemble) -> Iterator[ProblemScore]:
    """Every ranker on each problem of `held` that has enough candidates; `donors` is what those without a model know."""
    known = np.unique(donors.problem)
    by_shape = _problem_shapes(donors, held)
    over_best = np.log2(donors.over_best)
    for p, here in problems_of(held):
        near = int(known[np.argmin([np.sum((by_shape[p] - by_shape[q]) ** 2) for q in known])])
        donor = donors.take(np.flatnonzero(donors.problem == near))
        rankings = {
            "model": model.predict(here.x)[0],
            "pick": model.pick(here.x),
            "nearest": copy_nearest(here.x, here.schedules, donor.x, donor.schedules, donor.time_us),
            "fixed": fixed_list(here.schedules, donors.schedules, over_best),
        }
        if here.built is not None and model.sees_binaries:
            rankings["built"] = model.predict_built(here.x, here.built)
        scores = {name: score(here.time_us, ranking) for name, ranking in rankings.items()}
        scores["random"] = random_score(here.time_us)
        yield ProblemScore(held.problems[p], len(here), float(here.time_us.min()), scores)


def problems_of(samples: Samples) -> Iterator[tuple[int, Samples]]:
    """The problems that have enough candidates, each with its samples."""
    for p in np.unique(samples.problem):
        here = np.flatnonzero(samples.problem == p)
        if len(here) >= MIN_CANDIDATES:
            yield int(p), samples.take(here)


def _problem_shapes(*parts: Samples) -> dict[int, Floats]:
    """A problem's features, those that do not vary within any problem, scaled: what makes two problems near."""
    x = np.vstack([s.x for s in parts])
    problem = np.concatenate([s.problem for s in parts])
    filled = np.nan_to_num(x)
    constant = np.ones(x.shape[1], dtype=np.bool_)
    for p in np.unique(problem):
        constant &= np.ptp(filled[problem == p], axis=0) == 0
    shapes = scaled(x[:, constant])
    return {int(p): shapes[problem == p][0] for p in np.unique(problem)}
