"""What the tuner itself costs, in processor time of this process, so that a busy machine counts less. Measures no kernel.

    python experiments/tuner_speed.py [--op OP] [--target h200] [--trials 96] [--rows 200000]

Scored: features and a model's prediction, of schedules that are known as text. Drawn: random schedules, legality included.
Searched: proposals of each strategy against made-up times, by batches of eight, with the deployed model and without. Trained:
one fit of all members on so many made-up rows of as many features, 100 a problem.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable

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


def searched(space: ScheduleSpace, name: str, model: Ranker | None, trials: int) -> float:
    """Seconds a trial."""
    measurer, spent_s, done = FakeMeasurer(space.target.name), 0.0, 0
    strategy = make_strategy(name, space, model=model)
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
    return spent_s / max(done, 1)


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", default="matmul:512x4096x3840:f16:nk")
    parser.add_argument("--target", default="h200")
    parser.add_argument("--points", type=int, default=600)
    parser.add_argument("--trials", type=int, default=96)
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES))
    parser.add_argument("--rows", type=int, default=200_000)
    args = parser.parse_args()
    model = find(args.target, model_roots(config.home()))
    space = ScheduleSpace(parse_op(args.op), load_target(args.target))
    points: list[Point] = []
    drawn_s = timed(lambda: points.extend(drawn(space, args.points)))
    say(f"drawn: {1e3 * drawn_s / len(points):.2f} ms a schedule")
    part, rest = points[: args.points // 3], points[args.points // 3 :]
    space.features(part)
    features_s = timed(lambda: space.features(rest))
    each = features_s / len(rest)
    if model is not None:
        x = space.features(rest)
        model.predict(x)
        each += timed(lambda: model.predict(x)) / len(rest)
    say(f"scored: {1e3 * each:.2f} ms a schedule, {60 / each:.0f} a minute on one core, twice that on two")
    if args.rows:
        samples = made_up(args.rows)
        texts = []
        fit_s = timed(lambda: texts.extend(fit(samples)))
        say(f"trained: {args.rows} rows, {len(texts)} members, {fit_s:.1f} s")
    for name in args.strategies:
        for led in (None, model):
            if led is None or model is not None:
                s = searched(ScheduleSpace(parse_op(args.op), space.target), name, led, args.trials)
                say(f"searched: {name}{'' if led is None else '+model'} {1e3 * s:.1f} ms a trial")
    return 0


if __name__ == "__main__":
    sys.exit(main())
