"""Strategies replayed on recorded spaces and scored against random search. Measures nothing but the strategies' own time.

The score is that of the methodology of Willemsen et al. ("A Methodology for Comparing Auto-Tuning Optimization
Algorithms", 2024), over the number of evaluations k = 1..budget:

    P(k) = (S_baseline(k) - F(k)) / (S_baseline(k) - S_opt)          score = mean of P(k) over k

F(k) is the mean over seeds of the best time after k evaluations and S_opt the fastest time of the space. S_baseline(k) is
calculated, not run: the expected best of k points drawn without replacement from all N. With times f_1 <= ... <= f_N,

    S_baseline(k) = sum over i of f_i * (C(N-i+1, k) - C(N-i, k)) / C(N, k)

So random search scores 0 up to chance, 1 is the optimum at once, and worse than random is negative. Only configurations
that ran are points; a strategy never gets the same one twice. Where k >= N the baseline has found the optimum: P(k) = 1.
Kernel Tuner's own strategies (`kernel_tuner.py`) count the same way: a configuration asked again is no evaluation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import islice
from multiprocessing import get_context

import numpy as np
from numpy.typing import NDArray

from emmy import config
from emmy.errors import UsageError
from emmy.search import kernel_tuner
from emmy.search.recorded_space import RecordedSpace, load_recorded
from emmy.search.registry import STRATEGIES, make_strategy
from emmy.workloads import recorded

Floats = NDArray[np.float64]

COUNTS = (20, 50, 100, 200, 400)  # evaluations the table shows
BUDGET = 400
_WITH_MODEL = "+model"
_RANDOM = "random"  # stands beside whatever is scored
# Lists of the points, measured from the top: no strategies, for they learn nothing, and no chance in them.
COPY = "copy-nearest"  # by the times on the kernel's other devices
LIST = "list+model"  # by the model that those trained
SLOW_SEEDS = 5  # of strategies that take long where evaluations are many
_LISTS = frozenset({COPY, LIST})
_SLOW = frozenset({"optuna", *(kernel_tuner.PREFIX + name for name in kernel_tuner.SLOW)})


@dataclass(frozen=True, slots=True)
class SearchScore:
    """One strategy on one space, over all seeds. `at`: (evaluations, P there); n95, n99: median evaluations until a time
    within 95 or 99 % of the optimum's speed, None when the median run did not get there."""

    space: str
    strategy: str
    points: int
    seeds: int
    budget: int
    batch: int
    score: float
    at: tuple[tuple[int, float], ...]
    n95: float | None
    n99: float | None
    seconds: float  # processor time of a run, mean
    speed: tuple[float, ...] = ()  # after 1, 2, ... evaluations: optimum / best time so far, mean over seeds


@dataclass(frozen=True, slots=True)
class Standing:
    """One strategy over all spaces: means of scores, seconds and speed, the least score and where, medians of n95 and n99 (None:
    the median space was not reached)."""

    strategy: str
    spaces: int
    seeds: int
    score: float
    worst: float
    worst_space: str
    at: tuple[tuple[int, float], ...]
    n95: float | None
    n99: float | None
    seconds: float
    speed: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class _Replay:
    best_us: tuple[float, ...]  # after 1, 2, ... evaluations
    seconds: float


def evaluate(
    strategies: Sequence[str] = tuple(STRATEGIES),
    spaces: Sequence[str] = (),
    *,
    seeds: int = 20,
    slow_seeds: int = SLOW_SEEDS,
    budget: int = BUDGET,
    batch: int = 1,
    processes: int = 2,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[SearchScore]:
    """A row a space and strategy, in that order; random search is always among them. Seeds are 0..seeds-1.

    strategies  names of the registry, copy-nearest or list+model; `name+model` gives it a model trained on the same kernel's
                other recorded spaces; `kt:name` is a strategy of Kernel Tuner, `kt:all` each of them
    spaces      names of recorded spaces, or paths of Kernel Tuner's caches or T4 results; none means all shipped ones
    slow_seeds  at most so many seeds of strategies that take long where evaluations are many
    batch       points a call of `ask`
    processes   runs at a time, of one thread each; each is timed by its processor time
    on_progress called with (runs done, runs in all)
    Raises UsageError for unknown names and for counts below 1.
    """
    names = tuple(spaces) or recorded.names()
    for what, value in (("seeds", seeds), ("budget", budget), ("batch", batch), ("processes", processes)):
        if value < 1:
            raise UsageError(f"{what} must be at least 1, got {value}")
    chosen = _chosen(strategies)
    for name in names:
        recorded.load(name)
    own_seeds = {s: 1 if s in _LISTS else min(seeds, slow_seeds) if s in _SLOW else seeds for s in chosen}
    cells = [(n, s, own_seeds[s]) for n in names for s in chosen]
    todo = [(n, s, seed, budget, batch) for n, s, own in cells for seed in range(own)]
    done: list[_Replay] = []
    with (
        config.inherited(**config.ONE_THREAD),
        ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool,
    ):
        for result in pool.map(_run, todo):
            done.append(result)
            if on_progress is not None:
                on_progress(len(done), len(todo))
    runs = iter(done)
    return [_score(_space(n), s, list(islice(runs, own)), budget, batch) for n, s, own in cells]


def _chosen(strategies: Sequence[str]) -> tuple[str, ...]:
    """The strategies that names stand for, random search at the end if it is not named. Raises UsageError for an unknown one."""
    out: dict[str, None] = {}
    for name in strategies:
        if name == kernel_tuner.ALL:
            out |= dict.fromkeys(kernel_tuner.PREFIX + n for n in kernel_tuner.NAMES)
        elif name in _LISTS or name.startswith(kernel_tuner.PREFIX) or name.removesuffix(_WITH_MODEL) in STRATEGIES:
            out[name] = None
        else:
            known = f"{', '.join(STRATEGIES)}, {_WITH_MODEL} added or not, {COPY}, {LIST}, or kt: and a strategy of Kernel Tuner, or kt:all"
            raise UsageError(f"strategy {name!r} is not one of {known}")
    for name in out:
        if name.startswith(kernel_tuner.PREFIX):
            kernel_tuner.check(name)
    return tuple(out | {_RANDOM: None})


def standings(rows: Sequence[SearchScore]) -> list[Standing]:
    """The strategies in the order of their mean scores, best first. Rows must be of one `evaluate`."""
    by_strategy: dict[str, list[SearchScore]] = {}
    for row in rows:
        by_strategy.setdefault(row.strategy, []).append(row)
    return sorted((_standing(strategy, own) for strategy, own in by_strategy.items()), key=lambda s: -s.score)


def _standing(strategy: str, own: Sequence[SearchScore]) -> Standing:
    worst = min(own, key=lambda r: r.score)
    return Standing(
        strategy,
        len(own),
        own[0].seeds,
        float(np.mean([r.score for r in own])),
        worst.score,
        worst.space,
        tuple((k, float(np.mean([dict(r.at)[k] for r in own]))) for k, _ in own[0].at),
        _median(np.inf if r.n95 is None else r.n95 for r in own),
        _median(np.inf if r.n99 is None else r.n99 for r in own),
        float(np.mean([r.seconds for r in own])),
        tuple(map(float, np.mean([r.speed for r in own], axis=0))),
    )


def replay(space: RecordedSpace, strategy: str, seed: int, budget: int, batch: int) -> tuple[float, ...]:
    """Best time in microseconds after 1, 2, ... evaluations, until the budget or the space is spent."""
    from emmy.search.siblings import copied, listed, sibling_model

    if strategy in _LISTS:
        order = copied(space.name) if strategy == COPY else listed(space.name)
        times = [space.trial(p).time_us for p in order[:budget]]
        return tuple(map(float, np.minimum.accumulate(np.array(times, dtype=np.float64))))
    model = sibling_model(space.name) if strategy.endswith(_WITH_MODEL) else None
    searcher = make_strategy(strategy.removesuffix(_WITH_MODEL), space, seed=seed, model=model)
    best: list[float] = []
    while len(best) < budget and (points := searcher.ask(min(batch, budget - len(best)))):
        trials = [space.trial(p) for p in points]
        searcher.tell(trials)
        for trial in trials:
            assert trial.time_us is not None  # failures are no points of a recorded space
            best.append(min(trial.time_us, best[-1]) if best else trial.time_us)
    return tuple(best)


def baseline_us(times_us: Floats, budget: int) -> Floats:
    """S_baseline(k) for k = 1..budget: the expected best of k times drawn without replacement."""
    ordered = np.sort(times_us)
    n = len(ordered)
    i = np.arange(n + 1)
    expected = np.empty(budget)
    missed = np.ones(n + 1)  # chance that k draws miss the i fastest: C(N-i, k) / C(N, k)
    for k in range(min(budget, n)):
        missed = missed * np.maximum(n - i - k, 0) / (n - k)
        expected[k] = (missed[:-1] - missed[1:]) @ ordered
    expected[n:] = ordered[0]
    return expected


def performance(times_us: Floats, best_us: Floats) -> Floats:
    """P(k) for k = 1..budget, from the best times [seeds, budget]."""
    budget = best_us.shape[1]
    room = baseline_us(times_us, budget) - times_us.min()
    gain = baseline_us(times_us, budget) - best_us.mean(axis=0)
    real = (np.arange(1, budget + 1) < len(times_us)) & (room > 0)
    return np.asarray(np.divide(gain, room, out=np.ones(budget), where=real))


def _score(space: RecordedSpace, strategy: str, replays: Sequence[_Replay], budget: int, batch: int) -> SearchScore:
    best = np.array([[*r.best_us, *[r.best_us[-1]] * (budget - len(r.best_us))] for r in replays])
    p = performance(space.times_us, best)
    return SearchScore(
        space.name,
        strategy,
        len(space.times_us),
        len(replays),
        budget,
        batch,
        float(p.mean()),
        tuple((k, float(p[k - 1])) for k in COUNTS if k <= budget),
        _evaluations_to(0.95, best, space.times_us),
        _evaluations_to(0.99, best, space.times_us),
        float(np.mean([r.seconds for r in replays])),
        tuple(float(x) for x in (space.times_us.min() / best).mean(axis=0)),
    )


def _evaluations_to(share: float, best_us: Floats, times_us: Floats) -> float | None:
    """Median over runs of the first evaluation with a time of at most optimum / share."""
    there = best_us * share <= times_us.min()
    return _median(np.where(there.any(axis=1), there.argmax(axis=1) + 1.0, np.inf))


def _median(values: Iterable[float]) -> float | None:
    """Of values of which some may be infinite; None where the median is."""
    ordered = sorted(values)
    half = len(ordered) // 2
    median = ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
    return float(median) if math.isfinite(median) else None


def _run(job: tuple[str, str, int, int, int]) -> _Replay:
    name, strategy, seed, budget, batch = job
    space = _space(name)
    began = time.process_time()
    if strategy.startswith(kernel_tuner.PREFIX):
        return _Replay(kernel_tuner.replay(space, strategy, seed, budget), time.process_time() - began)
    best = replay(space, strategy, seed, budget, batch)
    return _Replay(best, time.process_time() - began)


@cache
def _space(name: str) -> RecordedSpace:
    return load_recorded(name)
