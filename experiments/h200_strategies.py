"""Strategies against each other on Emmy's own space of schedules, at equal numbers of measurements on one device.

    python experiments/h200_strategies.py --out OUT --seconds 230

Ten matmuls of the catalogue are searched by each arm of --arms for --trials candidates, all measured by one process in turns
(`emmy.measure.served`), a few searches at a time. Nothing is known beforehand but the model, which arms named `+model` have:

    mcts+model    tree search, led by the model            list+model    a random sample, measured in the model's order
    optuna        TPE over the flattened space             random        the yardstick

OUT gets summary.md (best time after 8, 16, 32, ... measurements, over the best that any arm found), curves.json,
log.txt and rows.tar.gz, a shard folder. --fake tries it out without a device, --target cpu on this processor.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from h200_matmul import ONE_THREAD, Counting, Tally, gather, make_measurer, set_up_logging, slug

from emmy import __version__, config
from emmy.costmodel.model import CostModel
from emmy.costmodel.registry import find, model_roots
from emmy.ir.ops import parse_op
from emmy.ir.target import load_target
from emmy.measure.journal import Journal, RunHeader, journal_path
from emmy.measure.measurer import Measurer
from emmy.measure.served import Served, ServedMeasurer, Turns
from emmy.records import Candidate, new_id, now_utc
from emmy.search.registry import STRATEGIES, make_strategy
from emmy.search.schedule_space import ScheduleSpace
from emmy.search.space import Point, Space, Trial
from emmy.search.strategy import Ranker, Strategy

log = logging.getLogger("experiment")
OPS = (
    "matmul:1x4096x3840:f16:nk", "matmul:16x3840x15360:f16", "matmul:32x8192x3840:f16:nk", "matmul:64x2048x3840:f16",
    "matmul:256x4096x3840:f16:nk", "matmul:256x3840x15360:f16", "matmul:512x8192x3840:f16:nk", "matmul:2048x3840x4096:f16",
    "matmul:2048x8704x3840:f16:nk", "matmul:4096x4096x3840:f16",
)  # fmt: skip
ARMS = ("mcts+model", "list+model", "optuna", "random")
BATCH = 8
SAMPLE = 2000  # of the list's random points
LAST_S = 20.0  # kept for the shard


class ListStrategy(Strategy):
    """A random sample of the space, ranked once by the model: what a search is worth beyond that."""

    name: ClassVar[str] = "list"

    def __init__(self, space: Space, *, seed: int, model: Ranker, deadline_s: float) -> None:
        super().__init__(space, seed=seed, model=model)
        drawn = {}
        while len(drawn) < SAMPLE and time.monotonic() < deadline_s:
            point = space.sample(self.rng)
            drawn[point.key] = point
        points = list(drawn.values())
        predicted = model.predict(space.features(points))[0]
        self.ranked = [points[i] for i in predicted.argsort(kind="stable")]

    def propose(self, n: int) -> Iterable[Point]:
        unseen = (p for p in self.ranked if p.key not in self.seen)
        return [p for p, _ in zip(unseen, range(n), strict=False)]

    def learn(self, trials: Sequence[Trial]) -> None:
        pass


def search(args: argparse.Namespace) -> int:
    """One arm on one op, through the pipe that standard input and output are. Writes its times beside its rows."""
    answers, requests = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not speak to the device
    measurer = ServedMeasurer(answers, requests)
    op_text, arm = args.search
    deadline_s = time.monotonic() + args.seconds
    target, home = load_target(args.target), Path(args.work)
    name, led = arm.removesuffix("+model"), arm.endswith("+model")
    model = model_of(args) if led else None
    space = ScheduleSpace(parse_op(op_text), target)
    strategy: Strategy
    if name == "list":
        assert model is not None, "a list is ranked by a model"
        strategy = ListStrategy(space, seed=args.seed, model=model, deadline_s=deadline_s - args.seconds / 2)
    else:
        strategy = make_strategy(name, space, seed=args.seed, model=model)
    digest = model.digest if model else ""
    run_id = f"{slug(op_text)}-{slug(arm)}-{args.seed}"
    header = RunHeader(
        run_id, op_text, args.target, arm, args.seed, f"{args.trials}", digest, 0, __version__, now_utc(), "{}"
    )
    journal = Journal.create(journal_path(home, run_id), header)
    times: list[float | None] = []
    best: float | None = None
    begin_s, own_s = time.monotonic(), 0.0
    while len(times) < args.trials and time.monotonic() < deadline_s:
        asked_s = time.process_time()
        by_key = {p.key: p for p in strategy.ask(min(BATCH, args.trials - len(times)))}
        own_s += time.process_time() - asked_s
        if not by_key:
            break
        trials = []
        for row in measurer.stream([Candidate(op_text, k) for k in by_key], best):
            named = replace(
                row, run_id=run_id, id=row.id or new_id(), time_utc=row.time_utc or now_utc(), emmy_version=__version__
            )
            journal.append(named, time.monotonic() - begin_s)
            times.append(row.time_us)
            best = min((t for t in (best, row.time_us) if t is not None), default=None)
            trials.append(Trial(by_key[row.schedule], row.time_us))
        asked_s = time.process_time()
        strategy.tell(trials)
        own_s += time.process_time() - asked_s
    journal.close()
    record = {"op": op_text, "arm": arm, "times_us": times, "seconds": time.monotonic() - begin_s, "own_s": own_s}
    if len(times) == args.trials:  # one that was cut short would be compared at fewer measurements
        (home / "curve.json").write_text(json.dumps(record))
    return 0


def model_of(args: argparse.Namespace) -> CostModel:
    """The model that leads: of --model, else the deployed one."""
    if args.model:
        return CostModel.load(Path(args.model))
    found = find(args.target, model_roots(config.home()))
    if found is None:
        raise SystemExit(
            f"no model of {args.target} is deployed; name one with --model, or leave out the arms with +model"
        )
    return found


def compare(args: argparse.Namespace) -> int:
    """Every arm on every op, a few at a time; then the table and the shard."""
    begin_s, out, work = time.monotonic(), Path(args.out), Path(args.work)
    out.mkdir(parents=True, exist_ok=True)
    set_up_logging(out / "log.txt")
    if any(arm.endswith("+model") for arm in args.arms):
        log.info("model %s", model_of(args).digest)
    todo: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    cells = [(op, arm) for op in args.ops for arm in args.arms]
    random.Random(args.seed).shuffle(cells)  # what the time does not suffice for is missing anywhere
    for cell in cells:
        todo.put(cell)
    tally, deadline_s = Tally(), begin_s + args.seconds - LAST_S
    with make_measurer(args) as device:
        log.info("measuring on %s; %d searches of %d candidates", device.device, len(cells), args.trials)
        counting = Counting(device, tally)
        with ThreadPoolExecutor(args.searches) as lanes:
            for f in [lanes.submit(lane, args, todo, counting, work, deadline_s) for _ in range(args.searches)]:
                f.result()
    log.info("%s", tally)
    records = [json.loads(p.read_text()) for p in sorted((work / "runs").glob("*/curve.json"))]
    (out / "curves.json").write_text(json.dumps(records))
    (out / "summary.md").write_text(f"{table(records, args)}\n\nMeasured on {device.device}. {tally}.\n")
    if tally.statuses:
        gather(args, out, work)
    sys.stdout.write((out / "summary.md").read_text())
    return 0


def lane(
    args: argparse.Namespace,
    todo: queue.SimpleQueue[tuple[str, str]],
    measurer: Measurer,
    work: Path,
    deadline_s: float,
) -> None:
    """One search after another in a process of its own, until there are none, or no time."""
    while (left_s := deadline_s - time.monotonic()) > 5:
        try:
            op, arm = todo.get_nowait()
        except queue.Empty:
            return
        home = work / "runs" / f"{slug(op)}-{slug(arm)}"
        home.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable, __file__, "--search", op, arm, "--target", args.target, "--work", str(home), "--out", "-",
            "--trials", str(args.trials), "--seconds", f"{left_s:.1f}", "--seed", str(args.seed), "--model", args.model,
        ]  # fmt: skip
        with (home / "log.txt").open("ab") as errors:
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=config.child_env(**ONE_THREAD),
            )
        assert child.stdin is not None and child.stdout is not None
        late = threading.Timer(left_s + 5, child.kill)  # a proposal that takes too long
        late.start()
        try:
            Served(measurer, child.stdout, child.stdin, Turns(lambda: False)).serve()
        except BrokenPipeError:
            pass
        finally:
            child.stdout.close()
            child.wait()
            late.cancel()
        if child.returncode:
            tail = (home / "log.txt").read_text(errors="replace").strip().splitlines()[-1:]
            log.warning("%s by %s ended with %d: %s", op, arm, child.returncode, tail)


def table(records: Sequence[dict[str, object]], args: argparse.Namespace) -> str:
    """Best times after so many measurements over the best that any arm found: geometric mean and worst over the ops."""
    whole = {(str(r["op"]), str(r["arm"])): bests(r, args.trials) for r in records}
    ops = [op for op in args.ops if all((op, arm) in whole for arm in args.arms)]
    at = [n for n in (8, 16, 32, 64, 128, 256) if n < args.trials] + [args.trials]
    least = {op: min(whole[op, arm][-1] for arm in args.arms) for op in ops}
    head = ["arm", *(f"after {n}" for n in at), "worst", "first or tied (1 %)", "own s / search"]
    lines = [
        f"{len(ops)} of {len(args.ops)} ops were searched by every arm. Time over the best found, geometric mean:",
        "",
    ]
    lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for arm in args.arms:
        over = {n: [whole[op, arm][n - 1] / least[op] for op in ops] for n in at}
        means = [f"{math.exp(sum(map(math.log, x)) / len(x)):.3f}" if x else "-" for x in over.values()]
        last = over[at[-1]]
        own = [float(str(r["own_s"])) for r in records if r["arm"] == arm]
        cells = [arm, *means, f"{max(last, default=math.nan):.3f}", f"{sum(x <= 1.01 for x in last)} of {len(ops)}"]
        lines.append("| " + " | ".join([*cells, f"{sum(own) / max(len(own), 1):.1f}"]) + " |")
    lines += ["", "| op | " + " | ".join(f"{arm} us" for arm in args.arms) + " |", "|" + "---|" * (len(args.arms) + 1)]
    for op in ops:
        lines.append(f"| {op} | " + " | ".join(f"{whole[op, arm][-1]:.2f}" for arm in args.arms) + " |")
    return "\n".join(lines)


def bests(record: dict[str, object], trials: int) -> list[float]:
    """The best time after 1, 2, ... measurements; a failure has none."""
    out: list[float] = []
    times = record["times_us"]
    assert isinstance(times, list)
    for t in times:
        out.append(min(t if t is not None else math.inf, out[-1] if out else math.inf))
    return out + [out[-1] if out else math.inf] * (trials - len(out))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder for the few files that are wanted")
    parser.add_argument("--work", default="/tmp/emmy-strategies", help="folder for journals, best a new one")
    parser.add_argument("--seconds", type=float, default=230.0, help="for everything")
    parser.add_argument("--target", default="h200")
    parser.add_argument("--ops", nargs="*", default=OPS)
    parser.add_argument("--arms", nargs="*", default=ARMS, help=f"{', '.join(STRATEGIES)} or list, +model added or not")
    parser.add_argument("--trials", type=int, default=64, help="candidates of each search")
    parser.add_argument("--model", default="", help="a model's file (default: the deployed one)")
    parser.add_argument("--searches", type=int, default=10, help="processes that search at a time")
    parser.add_argument("--compilers", type=int, default=0, help="processes that compile; 0 = one a core")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fake", action="store_true", help="times by a formula, to try the script out")
    parser.add_argument("--search", nargs=2, metavar=("OP", "ARM"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    return search(args) if args.search else compare(args)


if __name__ == "__main__":
    sys.exit(main())
