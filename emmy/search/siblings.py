"""A model of a recorded space from the same kernel's other recorded spaces: a warm start to evaluate with. Deploys nothing.

It stands for the cost model on recorded spaces, whose features are parameters. What it may see of the space it ranks is the
names of its features; never its times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from emmy.errors import UsageError
from emmy.search.recorded_space import RecordedSpace, load_recorded
from emmy.search.space import Point, Value
from emmy.workloads import recorded
from emmy.workloads.recorded.files import is_path

if TYPE_CHECKING:
    import lightgbm

Floats = NDArray[np.float64]

_AMD = ("mi250x", "w6600")  # times of one vendor's devices say little of the other's
_ROUNDS = 300
_LEAST_SPREAD = 0.25  # log2; what agreement between few donors does not prove


class SiblingModel:
    """The mean over donors of log2(time / median time); implements `Ranker`. The spread is the donors' disagreement."""

    def __init__(self, donors: Sequence[lightgbm.Booster]) -> None:
        self._donors = donors

    def predict(self, x: Floats) -> tuple[Floats, Floats]:
        each = np.stack([np.asarray(d.predict(x, num_threads=1), dtype=np.float64) for d in self._donors])
        return each.mean(axis=0), np.maximum(each.std(axis=0), _LEAST_SPREAD)


def siblings(name: str) -> list[str]:
    """Other recorded spaces of the kernel, on devices of the same vendor."""
    if is_path(name):
        return []
    kernel, device = name.rsplit(".", 1)
    others = (n.rsplit(".", 1) for n in recorded.names() if n != name)
    return [f"{k}.{d}" for k, d in others if k == kernel and (d in _AMD) == (device in _AMD)]


@cache
def sibling_model(name: str) -> SiblingModel:
    """Raises UsageError when the space has no sibling."""
    space = load_recorded(name)
    return SiblingModel([_train(load_recorded(d), space.feature_names) for d in _donors(name)])


@cache
def copied(name: str) -> tuple[Point, ...]:
    """The points of a space by their times on the kernel's other devices, those that no donor ran last: copy-nearest.

    Of several donors the mean of log2(time / median time) counts. Raises UsageError when there is none.
    """
    space, told = load_recorded(name), defaultdict[frozenset[tuple[str, Value]], list[float]](list)
    for donor in map(load_recorded, _donors(name)):
        for point, log2_time in zip(donor.points(), np.log2(donor.times_us / np.median(donor.times_us)), strict=True):
            told[frozenset(point.choices)].append(float(log2_time))
    mean = {key: sum(times) / len(times) for key, times in told.items()}
    return tuple(sorted(space.points(), key=lambda p: mean.get(frozenset(p.choices), np.inf)))


@cache
def listed(name: str) -> tuple[Point, ...]:
    """The points of a space in the order of the siblings' model, the fastest first. Raises UsageError when there is no sibling."""
    space = load_recorded(name)
    points = list(space.points())
    predicted, _ = sibling_model(name).predict(space.features(points))
    return tuple(points[i] for i in predicted.argsort(kind="stable"))


def _donors(name: str) -> list[str]:
    if found := siblings(name):
        return found
    raise UsageError(f"recorded space {name} has no other device of its vendor to learn from; evaluate it without")


def _train(donor: RecordedSpace, feature_names: tuple[str, ...]) -> lightgbm.Booster:
    import lightgbm

    if donor.feature_names != feature_names:
        raise UsageError(f"recorded space {donor.name} has features {donor.feature_names}, not {feature_names}")
    y = np.log2(donor.times_us / np.median(donor.times_us))
    data = lightgbm.Dataset(donor.features(list(donor.points())), label=y)
    options = {"objective": "regression", "num_leaves": 31, "learning_rate": 0.1, "min_data_in_leaf": 5}
    exact = {"num_threads": 1, "deterministic": True, "force_row_wise": True, "seed": 0, "verbosity": -1}
    return lightgbm.train({**options, **exact}, data, num_boost_round=_ROUNDS)
