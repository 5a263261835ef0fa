"""Kernel Tuner's own strategies on recorded spaces, run by Kernel Tuner itself in its simulation mode. Proposes nothing.

Kernel Tuner (van Werkhoven, 2019; PyPI `kernel-tuner`) is an optional package. It gets the same points as our strategies:
the configurations that ran, as a cache file whose entries are the whole space. A strategy is named `kt:` and its name there.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import random
import tempfile
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np

from emmy.errors import UsageError
from emmy.search.recorded_space import RecordedSpace
from emmy.search.space import Value

PREFIX = "kt:"
ALL = "kt:all"
# Strategies of Kernel Tuner 1.5.0 for one objective that need no further package, without brute force.
NAMES = (
    "adaptive_tabu_greywolf", "basinhopping", "bayes_opt", "diff_evo", "dual_annealing", "firefly_algorithm",
    "genetic_algorithm", "greedy_ils", "greedy_mls", "hybrid_vndx", "minimize", "mls", "ordered_greedy_mls", "pso",
    "random_sample", "simulated_annealing",
)  # fmt: skip
SLOW = frozenset({"bayes_opt"})  # minutes a run: fewer seeds do

_folders: list[tempfile.TemporaryDirectory[str]] = []  # caches written for this process


def check(strategy: str) -> None:
    """Raises UsageError for an unknown name (`kt:` included), or where Kernel Tuner is not installed."""
    if strategy.removeprefix(PREFIX) not in NAMES:
        raise UsageError(f"strategy {strategy!r} is not one of {', '.join(PREFIX + n for n in NAMES)}")
    if importlib.util.find_spec("kernel_tuner") is None:
        raise UsageError(f"{strategy} is run by the package kernel-tuner. Install it: pip install 'emmy[eval]'")


def replay(space: RecordedSpace, strategy: str, seed: int, budget: int) -> tuple[float, ...]:
    """Best time in microseconds after 1, 2, ... different evaluations."""
    check(strategy)
    interface = importlib.import_module("kernel_tuner.interface")
    random.seed(seed)
    np.random.seed(seed)  # its strategies draw from the global generators
    names = [d.name for d in space.domains()]
    times: dict[tuple[Value, ...], float] = {}  # by settings, in the order of evaluation; what is returned is sorted

    def note(row: Mapping[str, Value]) -> float:
        times.setdefault(tuple(row[n] for n in names), float(row["time"]) * 1000.0)
        return 0.0

    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        interface.tune_cache(
            _cache_file(space),
            strategy=strategy.removeprefix(PREFIX),
            strategy_options={"max_fevals": budget},
            metrics={"noted": note},
            quiet=True,
            seed=seed,
        )
    return tuple(map(float, np.minimum.accumulate(list(times.values()))[:budget]))


@cache
def _cache_file(space: RecordedSpace) -> Path:
    """The space as a cache of Kernel Tuner, removed when this process ends."""
    names = [d.name for d in space.domains()]
    points = list(space.points())
    entries: dict[str, dict[str, Value]] = {}
    for point, time_us in zip(points, space.times_us, strict=True):
        settings = point.as_dict()
        key = ",".join(str(settings[n]) for n in names)
        free = {"compile_time": 0.0, "verification_time": 0.0, "benchmark_time": 0.0}
        entries[key] = {**{n: settings[n] for n in names}, "time": float(time_us) / 1000.0, **free}
    header = {
        "device_name": "recorded",
        "kernel_name": "recorded",
        "problem_size": [1],
        "tune_params_keys": names,
        "tune_params": {d.name: list(d.values) for d in space.domains()},
        "objective": "time",
    }
    folder = tempfile.TemporaryDirectory(prefix="emmy-kernel-tuner-")
    _folders.append(folder)
    path = Path(folder.name) / "cache.json"
    path.write_text(json.dumps({**header, "cache": entries}))
    return path
