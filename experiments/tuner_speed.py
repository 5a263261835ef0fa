"""What the tuner itself costs, in processor time of this process, so that a busy machine counts less. Measures no kernel.

    python experiments/tuner_speed.py [--ops OP ...] [--target h200] [--trials 96] [--rows 200000]

Of each op: drawn: random schedules, legality included. Scored: features and a model's prediction, of schedules that are known as
text. Searched: proposals of each strategy against made-up times, by batches of eight, with the deployed model and without; what of
it goes to walks down the tree, to features, to the model's predictions, and to what is left: the strategy's own belief. Trained:
one fit of all members on so many made-up rows of as many features, 100 a problem. Compare figures of one run of each Emmy, side
by side on one machine.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from emmy import config
from emmy.costmodel.built import NAMES as BUILT
from emmy.costmodel.features import ROOF, feature_set
from emmy.costmodel.fit import Samples, fit
from emmy.costmodel.registry import find, model_roots
from emmy.ir.ops import parse_op
from emmy.ir.target import load_target
from emmy.measure.fake import FakeMeasurer
from emmy.records import Candidate
from emmy.search.registry import STRATEGIES, make_strategy
from emmy.search.schedule_space import ScheduleSpace
from emmy.search.space import Point, Trial
from emmy.search.strategy import Ranker

BATCH = 8
OPS = (
    "matmul:512x4096x3840:f16:nk",
    "matmul:32x3840x4096:f16:nk,bias,gelu_tanh,residual",
    "geglu_linear:2048x3840x15360:f16:nk",
    "norm_linear:2048x30720x3840:f16:nk",
    "attention:16x2048x2048x256:f16:causal",
    "rms_norm:2048x3840:f16",
)


def timed(what: Callable[[], object]) -> float:
    begin_s = time.process_time()
    what()
    return time.process_time() - begin_s


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def drawn(space: ScheduleSpace, n: int) -> list[Point]:
    rng = random.Random(0)
    return [space.sample(rng) for _ in range(n)]


class Phases:
    """Seconds that go to some functions, the outermost of them where one calls another."""

    def __init__(self) -> None:
        self.spent_s: dict[str, float] = {}
        self._is_inside = False

    def of(self, phase: str, what: Callable[..., Any]) -> Callable[..., Any]:
        def told(*args: Any) -> Any:
            if self._is_inside:
                return what(*args)
            self._is_inside, begin_s = True, time.process_time()
            try:
                return what(*args)
            finally:
                self._is_inside = False
                self.spent_s[phase] = self.spent_s.get(phase, 0.0) + time.process_time() - begin_s

        return told


class Told:
    """A model whose predictions are timed."""

    def __init__(self, model: Ranker, phases: Phases) -> None:
        self.predict = phases.of("model", model.predict)


def searched(space: ScheduleSpace, name: str, model: Ranker | None, trials: int) -> dict[str, float]:
    """Seconds a trial by phase, all of them together, and once at the beginning."""
    measurer, phases, done = FakeMeasurer(space.target.name), Phases(), 0
    for way in ("sample", "child"):
        setattr(space, way, phases.of("walks", getattr(space, way)))
    space.features = phases.of("features", space.features)  # type: ignore[method-assign]
    begin_s = time.process_time()
    strategy = make_strategy(name, space, model=model and Told(model, phases))
    first_s, spent_s = time.process_time() - begin_s, 0.0
    phases.spent_s.clear()
    while done < trials:
        begin_s = time.process_time()
        points = strategy.ask(BATCH)
        spent_s += time.process_time() - begin_s
        if not points:
            break
        rows = measurer.measure([Candidate(space.op.key, p.key) for p in points])
        told = [Trial(p, row.time_us) for p, row in zip(points, rows, strict=True)]
        spent_s += timed(lambda told=told: strategy.tell(told))  # type: ignore[misc]
        done += len(points)
    parts = {phase: s / max(done, 1) for phase, s in phases.spent_s.items()}
    each = spent_s / max(done, 1)
    return {"all": each, **parts, "belief": each - sum(parts.values()), "once": first_s}


def made_up(n: int) -> Samples:
    rng, names = np.random.default_rng(0), feature_set().names
    x = rng.random((n, len(names)))
    problem = np.arange(n) // 100
    listed = tuple(map(str, range(int(problem.max()) + 1)))
    time_us = 2 ** (3 * x[:, 0] + 2 * x[:, 1] * x[:, 2] + rng.normal(0, 0.1, n))
    texts = ("",) * n
    return Samples(
        x,
        time_us,
        problem,
        listed,
        problem,
        listed,
        texts,
        texts,
        feature_set(),
        ROOF,
        built=rng.random((n, len(BUILT))),
    )


def of_op(op: str, target: str, args: argparse.Namespace) -> None:
    model = find(target, model_roots(config.home()))
    space = ScheduleSpace(parse_op(op), load_target(target))
    points: list[Point] = []
    drawn_s = timed(lambda: points.extend(drawn(space, args.points)))
    say(f"{op}\n  drawn: {1e3 * drawn_s / len(points):.2f} ms a schedule")
    part, rest = points[: args.points // 3], points[args.points // 3 :]
    space.features(part)
    each = timed(lambda: space.features(rest)) / len(rest)
    if model is not None:
        x = space.features(rest)
        model.predict(x)
        each += timed(lambda: model.predict(x)) / len(rest)
    say(f"  scored: {1e3 * each:.2f} ms a schedule, {60 / each:.0f} a minute on one core")
    for name in args.strategies:
        for led in (None, model):
            if led is None or model is not None:
                found = searched(ScheduleSpace(parse_op(op), space.target), name, led, args.trials)
                parts = ", ".join(
                    f"{phase} {1e3 * s:.1f}" for phase, s in found.items() if phase not in ("all", "once")
                )
                ms, label = 1e3 * found["all"], f"{name}{'' if led is None else '+model'}"
                say(f"  searched: {label} {ms:.1f} ms a trial ({parts}), {found['once']:.2f} s to begin")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="*", default=OPS)
    parser.add_argument("--target", default="h200")
    parser.add_argument("--points", type=int, default=600)
    parser.add_argument("--trials", type=int, default=96)
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES))
    parser.add_argument("--rows", type=int, default=200_000)
    args = parser.parse_args()
    for op in args.ops:
        of_op(op, args.target, args)
    if args.rows:
        samples, texts = made_up(args.rows), list[str]()
        fit_s = timed(lambda: texts.extend(fit(samples)))
        say(f"trained: {args.rows} rows, {len(texts)} members, {fit_s:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
