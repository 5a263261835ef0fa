"""LightGBM models of timed candidates, as texts. Knows arrays; knows neither rows nor plans nor files.

"time" members regress log2(time) less an offset (the roofline): comparable across problems, a prior for a search.
"pick" members rank within a problem (lambdarank): better at the top, meaningless across problems. A "built" member is a
"time" member that also sees what the compiler made of the candidate (`built.py`). One thread and fixed seeds, so that the same
samples give the same text; a second thread only spins on a busy machine.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from emmy.costmodel.built import NAMES as BUILT
from emmy.costmodel.features import FeatureSet
from emmy.costmodel.model import Ensemble, Role, in_precision
from emmy.costmodel.model_text import compact
from emmy.errors import UsageError

Floats = NDArray[np.float64]

SEEDS = (0, 1, 2)
SEEN = 60_000  # samples at most that one tree sees, others each time: so 200,000 are fitted within a minute
MAX_GROUP = 5_000  # LightGBM refuses lambdarank groups above 10,000
# A candidate within GRADES[i] of its problem's best gets the grade len(GRADES) - i; the rest get 0.
GRADES = (1.01, 1.03, 1.06, 1.12, 1.25, 1.5, 2.0, 4.0)


@dataclass(frozen=True, slots=True)
class Samples:
    """Timed candidates. `problem[i]` indexes `problems`; a fold must not split a `workload`, an index into `workloads`."""

    x: Floats  # [n, n_features]
    time_us: Floats
    problem: NDArray[np.int64]
    problems: tuple[str, ...]
    workload: NDArray[np.int64]
    workloads: tuple[str, ...]
    schedules: tuple[str, ...]
    ids: tuple[str, ...]
    features: FeatureSet
    offset: str = ""  # name of the feature that predicts log2(time) up to a factor
    weight: Floats | None = None  # [n], of each in a fit; None = all alike
    built: Floats | None = None  # [n, len(built.NAMES)], from the binaries; None = of none

    def __len__(self) -> int:
        return len(self.time_us)

    def take(self, which: NDArray[np.int64]) -> Samples:
        """The samples at these indices."""
        return replace(
            self,
            x=self.x[which],
            time_us=self.time_us[which],
            problem=self.problem[which],
            workload=self.workload[which],
            schedules=tuple(self.schedules[i] for i in which),
            ids=tuple(self.ids[i] for i in which),
            weight=None if self.weight is None else self.weight[which],
            built=None if self.built is None else self.built[which],
        )

    def join(self, other: Samples, weight: float) -> Samples:
        """These, and those of another device, which count `weight` each beside ours. Raises UsageError for other features."""
        if (other.features, other.offset) != (self.features, self.offset):
            raise UsageError("samples of two feature sets cannot train one model")
        if not len(other):
            return self
        own = np.ones(len(self)) if self.weight is None else self.weight
        return Samples(
            np.concatenate([self.x, other.x]),
            np.concatenate([self.time_us, other.time_us]),
            np.concatenate([self.problem, other.problem + len(self.problems)]),
            (*self.problems, *other.problems),
            np.concatenate([self.workload, other.workload + len(self.workloads)]),
            (*self.workloads, *other.workloads),
            (*self.schedules, *other.schedules),
            (*self.ids, *other.ids),
            self.features,
            self.offset,
            np.concatenate([own, np.full(len(other), weight)]),
            None if self.built is None is other.built else np.concatenate([self._of_binaries, other._of_binaries]),
        )

    @property
    def _of_binaries(self) -> Floats:
        return np.full((len(self), len(BUILT)), np.nan) if self.built is None else self.built

    @property
    def offset_column(self) -> int | None:
        return self.features.names.index(self.offset) if self.offset else None

    @property
    def log2_over_offset(self) -> Floats:
        y = np.log2(self.time_us)
        return y if self.offset_column is None else np.asarray(y - self.x[:, self.offset_column])

    @property
    def over_best(self) -> Floats:
        """Each time over the best of its problem."""
        best = np.full(len(self.problems), np.inf)
        np.minimum.at(best, self.problem, self.time_us)
        return np.asarray(self.time_us / best[self.problem])


def fit(samples: Samples, seeds: Sequence[int] = SEEDS) -> list[tuple[Role, int, str]]:
    """(role, seed, model text) of an ensemble: a "time" member a seed, one "pick", one "built" where binaries are known."""
    out: list[tuple[Role, int, str]] = [("time", seed, _fit_time(samples, seed)) for seed in seeds]
    out.append(("pick", seeds[0], _fit_pick(samples, seeds[0])))
    if samples.built is not None and np.isfinite(samples.built).any():
        names = (*samples.features.names, *BUILT)
        both = replace(
            samples,
            x=np.hstack([samples.x, samples.built]),
            features=replace(samples.features, names=names),
            built=None,
        )
        out.append(("built", seeds[0], _fit_time(both, seeds[0])))
    return out


def ensemble(samples: Samples, seeds: Sequence[int] = SEEDS) -> Ensemble:
    """The fitted ensemble, to predict with at once."""
    return Ensemble([(role, text) for role, _, text in fit(samples, seeds)], samples.offset_column)


def _fit_time(samples: Samples, seed: int) -> str:
    """Members differ by the rows and features each tree sees; where they disagree, little is known."""
    share = min(0.7, SEEN / max(len(samples), 1))
    settings: dict[str, object] = {"objective": "regression", "bagging_fraction": share, "bagging_freq": 1}
    return _train(samples, np.arange(len(samples)), samples.log2_over_offset, None, settings, seed)


def _fit_pick(samples: Samples, seed: int) -> str:
    order, sizes = _groups(samples, np.random.default_rng(seed))
    grade = len(GRADES) - np.searchsorted(GRADES, samples.over_best, side="left")
    settings: dict[str, object] = {"objective": "lambdarank", "lambdarank_truncation_level": 20}
    if len(samples) > SEEN:  # whole problems
        settings |= {"bagging_fraction": SEEN / len(samples), "bagging_freq": 1, "bagging_by_query": True}
    return _train(samples, order, grade.astype(np.float64), sizes, settings, seed)


def _groups(samples: Samples, rng: np.random.Generator) -> tuple[NDArray[np.int64], list[int]]:
    """Indices sorted by problem, with the group sizes; a problem too large for one group is dealt to several at random."""
    order: list[NDArray[np.int64]] = []
    for p in np.unique(samples.problem):
        members = rng.permutation(np.flatnonzero(samples.problem == p))
        order += np.array_split(members, -(-len(members) // MAX_GROUP))
    return np.concatenate(order), [len(g) for g in order]


def _train(
    samples: Samples,
    order: NDArray[np.int64],
    label: Floats,
    group: list[int] | None,
    settings: dict[str, object],
    seed: int,
) -> str:
    import lightgbm

    lightgbm.register_logger(logging.getLogger("emmy.costmodel.lightgbm"))
    parameters = {
        "learning_rate": 0.08,
        "num_leaves": 31,
        "min_data_in_leaf": min(10, max(1, len(samples) // 20)),
        "feature_fraction": 0.7,
        "seed": seed,
        "num_threads": 1,
        "deterministic": True,
        "force_row_wise": True,
        "verbosity": -1,
        **settings,
    }
    names = list(samples.features.names)
    weight = None if samples.weight is None else samples.weight[order]
    data = lightgbm.Dataset(
        in_precision(samples.x[order]), label[order], weight=weight, group=group, feature_name=names
    )
    return compact(lightgbm.train(parameters, data, num_boost_round=150).model_to_string())
