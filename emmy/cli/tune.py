"""`emmy tune`: search for the fastest kernels of some ops on a device, or predict them for one that is not here."""

from __future__ import annotations

import os
import signal
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from shlex import quote
from types import FrameType
from typing import TYPE_CHECKING, Any

from emmy.cli.verb import Verb, add_home, add_seed, add_threads, count, measured_where, positive, seconds
from emmy.progress import TuneProgress
from emmy.report import (
    Screen,
    counted,
    number,
    percent,
    race_record,
    record_of,
    schedule_text,
    show_races,
    show_ranges,
)

if TYPE_CHECKING:
    from emmy.errors import EmmyError
    from emmy.ir.ops import Op
    from emmy.search.predictions import Prediction
    from emmy.search.tuner import Stop, TuneResult

INTERRUPTED = 130
MOST_SEARCHES = 12  # that one machine's devices keep busy


def configure(parser: ArgumentParser) -> None:
    parser.add_argument(
        "op",
        nargs="+",
        help="ops such as matmul:512x1024x3840:f32, or a set: @projections, @gemma4-12b, @config:PATH[:widths=1,8][:tp=2]",
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="target: cpu, h200, rtx4090, ...; all: every GPU of this machine at once, each kind searched for by itself "
        "(default: cpu; with --fleet all its kinds, or those named, with commas)",
    )
    add_threads(parser)
    parser.add_argument(
        "--budget",
        default="60s",
        metavar="B",
        help="of each op: 60s, 5m, 300 (trials), patience=80, roof=0.9 (share of the roofline), or several with commas (default: 60s)",
    )
    parser.add_argument(
        "--strategy", default="auto", metavar="S", help="auto, mcts, optuna, evolve, lfbo or random (default: auto)"
    )
    parser.add_argument(
        "--model", metavar="PATH", help="a cost model's file, or roofline for none (default: the deployed one)"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="begin anew: neither resume nor use earlier rows of the op"
    )
    parser.add_argument(
        "--one-schedule",
        action="store_true",
        help="of an op such as matmul:m(1..4096)x4096x3840:f16: one schedule for all sizes, instead of a table by ranges",
    )
    parser.add_argument(
        "--collect",
        action="store_true",
        help="look for no winner: spend the budget, of all ops together, on rows that teach the cost model",
    )
    parser.add_argument(
        "--searches",
        type=positive,
        metavar="N",
        help="ops that are searched at a time, each in a process of its own (default: 1 on a CPU, and of one op; for GPUs half "
        f"of the cores, at most {MOST_SEARCHES})",
    )
    _fleet_options(parser)
    parser.add_argument("--wait", action="store_true", help="queue behind whoever measures on the device")
    add_seed(parser)
    add_home(parser)


def _fleet_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--fleet",
        metavar="ADDRESS",
        help="measure on the devices of a Ray cluster: auto, HOST:6379 or ray://HOST:10001",
    )
    parser.add_argument(
        "--ahead",
        type=count,
        default=0,
        metavar="N",
        help="batches of 8 proposals that may be out at once; the course of a search depends on it (default: as many as keep "
        "the devices busy, 1 for one device)",
    )
    parser.add_argument(
        "--lost-after",
        type=seconds,
        default=300.0,
        metavar="S",
        help="seconds until a device of a fleet that does not answer is given up (default: 300)",
    )
    parser.add_argument(
        "--metrics-port",
        type=positive,
        metavar="N",
        help="with several devices: tell Prometheus how it goes, at this port",
    )


def run(args: Namespace, screen: Screen) -> int:
    from emmy import api
    from emmy.errors import UsageError
    from emmy.search.tuner import Stop

    ops, stop = api.expand(args.op), Stop()
    several = args.fleet is not None or args.gpu == "all"
    args.gpu = args.gpu or ("all" if several else "cpu")
    if several and args.collect:
        raise UsageError("--collect measures on one device: name it with --gpu, and leave out --fleet")
    if args.metrics_port and not several:
        raise UsageError("--metrics-port tells of several devices: add --gpu all or --fleet ADDRESS")
    if args.searches and args.searches > 1 and args.gpu == "cpu" and not several:
        raise UsageError("--searches on a CPU would disturb what is timed there: leave it out")
    if args.collect and (args.searches or args.ahead):
        raise UsageError("--collect takes one op after another: leave out --searches and --ahead")
    if args.collect:
        return _collect(ops, args, stop, screen)
    failed: Mapping[str, EmmyError] = {}
    with TuneProgress(screen) as progress, _ctrl_c(stop, progress):
        asked = _asked(args, stop, progress)
        asked |= {"strategy": args.strategy, "by_range": not args.one_schedule, "ahead": args.ahead}
        asked |= {"searches": args.searches or _searches(args.gpu)}
        if several:
            done = api.tune_fleet(
                ops, fleet=args.fleet, metrics_port=args.metrics_port or 0, lost_after_s=args.lost_after, **asked
            )
            results, failed = done.results, done.failed
        else:
            results = api.tune(ops, **asked)
    _render(results, args, screen)
    for target, error in failed.items():
        screen.record("stopped", {"target": target, "error": type(error).__name__, "message": str(error)})
    if stop.asked:
        kept = "everything that was measured is kept; what was not finished goes on by the same command"
        predicted = any(r.predicted for r in results)
        screen.say(f"interrupted: {'the best prediction so far is kept' if predicted else kept}")
        return INTERRUPTED
    return int(bool(failed) or any(r.best is None and r.predicted is None for r in results))


def _searches(gpu: str) -> int:
    """How many searches keep devices busy without slowing the compilers, which need the other cores."""
    return 1 if gpu == "cpu" else max(1, min(MOST_SEARCHES, len(os.sched_getaffinity(0)) // 2))


def _asked(args: Namespace, stop: Stop, progress: TuneProgress) -> dict[str, Any]:
    """What `api.tune` and `api.collect` both take."""
    named = ("gpu", "threads", "budget", "model", "seed", "fresh", "wait", "home")
    return {name: getattr(args, name) for name in named} | {"on_event": progress, "stop": stop}


def _collect(ops: Sequence[Op], args: Namespace, stop: Stop, screen: Screen) -> int:
    from emmy import api
    from emmy.errors import UsageError

    if args.strategy != "auto" or args.one_schedule:
        raise UsageError("--collect deals its proposals by shares of its own: leave out --strategy and --one-schedule")
    with TuneProgress(screen) as progress, _ctrl_c(stop, progress):
        done = api.collect(ops, **_asked(args, stop, progress))
    total = sum(c.rows for c in done.ops)
    reasons = tuple(done.dealt)
    screen.rows(
        "collected",
        (
            {"op": c.op, "kind": c.kind, "rows": c.rows, "ok": c.counts.get("ok", 0)}
            | {reason: c.reasons.get(reason, 0) for reason in reasons}
            | {"seconds": c.elapsed_s, "resumed": c.resumed, "why": c.why, "run_id": c.run_id}
            for c in done.ops
        ),
    )
    got = ", ".join(
        f"{reason} {percent(n / total)}" + (f" (of {percent(done.planned[reason])})" if reason in done.planned else "")
        for reason, n in done.dealt.items()
    )
    kinds = ", ".join(f"{n} of {kind}" for kind, n in done.kinds.items())
    screen.show(f"\n{counted(total, 'row')}: {kinds}; dealt: {got or 'none'}")
    screen.record("collection", {k: v for k, v in record_of(done).items() if k != "ops"} | {"rows": total})
    if done.interrupted:
        screen.say("interrupted: everything that was measured is kept; the same command goes on")
        return INTERRUPTED
    return int(total == 0)


@contextmanager
def _ctrl_c(stop: Stop, progress: TuneProgress) -> Iterator[None]:
    """Within: Ctrl-C ends the run after the measurement in flight, a second one at once (KeyboardInterrupt)."""

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True
        progress.say("finishing the measurement in flight; Ctrl-C again stops at once")

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _render(results: tuple[TuneResult, ...], args: Namespace, screen: Screen) -> None:
    from emmy.api import roof_us

    done: list[dict[str, object]] = []
    for r in results:
        if r.ranges:
            done += _render_ranges(r, args, screen)
            continue
        if r.predicted is not None or r.rejected:
            _render_predicted(r, args, screen)
            continue
        counts = ", ".join(f"{n} {status}" for status, n in r.counts.items())
        if r.best is None:
            screen.show(f"{r.op}: no right answer in {r.trials} trials ({counts})")
            screen.record("tune", {"op": r.op, "verdict": "no right answer", "trials": r.trials, "statuses": r.counts})
            continue
        default_us = r.default.time_us if r.default else None
        reproduce = f"emmy bench {quote(r.op)}{_options(r.target, args)}"
        sizes, beside = _of_all_sizes(r, args)
        reproduce += f" --schedule {quote(r.best.schedule)}" if beside else ""
        screen.show(f"{r.op}: {counts}; the default schedule took {number(default_us)} us")
        screen.show(f"  schedule   {schedule_text(r.best.schedule)}{sizes}\n  reproduce  {reproduce}\n{beside}")
        done.append(
            {
                **race_record(r.best, roof_us(r.op, r.target, args.threads)),
                "default_us": default_us,
                "trials": r.trials,
                "seconds": r.elapsed_s,
                "statuses": r.counts,
                "why": r.why,
                "resumed": r.resumed,
                "run_id": r.run_id,
                "reproduce": reproduce,
            }
        )
    cards = {"target": "card"} if len({r.target for r in results}) > 1 else {}
    show_races(screen, "tune", done, {**cards, "trials": "trials", "seconds": "s"})


def _options(target: str, args: Namespace) -> str:
    """What names the device and the home in a command to run next."""
    return f" {measured_where(target, args.threads)}" + (f" --home {args.home}" if args.home else "")


def _of_all_sizes(r: TuneResult, args: Namespace) -> tuple[str, str]:
    """(which sizes the one schedule serves, what is to be known of a table stored beside it); empty where nothing is to be said."""
    from emmy.api import as_op, table
    from emmy.ir.parts import symbol_of

    if r.best is None or (symbol := symbol_of(as_op(r.op))) is None:
        return "", ""
    n = len(table(r.op, gpu=r.target, threads=args.threads, home=args.home))
    sizes = (
        f"\n  sizes      one schedule for all of {symbol}, {number(r.best.time_us)} us at {symbol.name} = {symbol.hi}"
    )
    beside = f"  note       a table of {n} ranges is stored too, and serves where no schedule is named\n" if n else ""
    return sizes, beside


def _render_ranges(r: TuneResult, args: Namespace, screen: Screen) -> list[dict[str, object]]:
    """The table of an op by ranges; what is returned are the races of those that were measured, to be shown with others."""
    from emmy.api import roof_us

    how = ", ".join(f"{n} {status}" for status, n in r.counts.items()) if r.best else "predicted, not measured"
    about = f"{r.trials} trials in {r.elapsed_s:.0f} s"
    screen.show(f"{r.op} on {r.target}: {counted(len(r.ranges), 'range')} ({how}; {about})")
    show_ranges(screen, r.ranges)
    screen.show(f"\n  table      {r.dispatch}\n  {_what_next(r, args)}\n")
    facts = {"op": r.op, "target": r.target, "dispatch": str(r.dispatch), "trials": r.trials, "seconds": r.elapsed_s}
    screen.record("dispatch", {**facts, "statuses": r.counts, "rejected": r.rejected})
    return [
        {**race_record(w.row, roof_us(w.op, r.target, args.threads)), "trials": None, "seconds": None}
        for w in r.ranges
        if w.row is not None
    ]


def _what_next(r: TuneResult, args: Namespace) -> str:
    """The command that repeats what is claimed here: a measurement, or of a card that is not here what is predicted."""
    if r.best is not None:
        return f"reproduce  emmy bench {quote(r.op)}{_options(r.target, args)}"
    return f"inspect    emmy show {quote(r.op)}{_options(r.target, args)}; where the card is, emmy bench takes the same"


def _render_predicted(r: TuneResult, args: Namespace, screen: Screen) -> None:
    """What is claimed of a card that is not here; each line says that it is predicted."""
    rejected = Counter(x.by for x in r.rejected)
    turned_down = (
        ", ".join(f"{counted(n, 'schedule')} rejected by the {by}" for by, n in rejected.items()) or "none rejected"
    )
    p = r.predicted
    if p is None:
        screen.show(f"{r.op}: nothing to predict for {r.target}: {r.trials} schedules scored, {turned_down}")
        record = {
            "op": r.op,
            "target": r.target,
            "verdict": "nothing passed",
            "trials": r.trials,
            "rejected": r.rejected,
        }
        screen.record("tune", record)
        return
    home = f" --home {args.home}" if args.home else ""
    inspect = f"emmy show {quote(r.op)} --gpu {r.target} --ir source{home}"
    model = f"model {p.model} of {p.model_target}" if p.model else "no model"
    mark = "calibrated" if p.calibrated else "uncalibrated"
    screen.show(
        f"{r.op} on {r.target}: predicted, not measured ({counted(r.trials, 'schedule')} scored in {r.elapsed_s:.0f} s, {turned_down})\n"
        f"  predicted  {number(p.predicted_us)} us, {percent(p.confidence)} interval {number(p.low_us)}..{number(p.high_us)} us, {mark}\n"
        f"  from       {model} x roofline; interval: {p.basis}\n"
        f"  roofline   {number(p.roof_us)} us, {percent(p.roof_us / p.predicted_us)} of it predicted to be reached\n"
        f"  compiled   {_binary(p)}\n"
        f"  emulator   right on {p.checked}\n"
        f"  schedule   {schedule_text(p.schedule)}\n"
        f"  inspect    {inspect}\n"
    )
    about = {"trials": r.trials, "seconds": r.elapsed_s, "why": r.why, "rejected": r.rejected, "inspect": inspect}
    screen.record("tune", {"verdict": "predicted", **record_of(p), **about})


def _binary(p: Prediction) -> str:
    facts = ("registers", "spill_bytes", "smem_bytes", "threads")
    from emmy.ir.target import load_target

    arch = load_target(p.target).arch
    return f"for {arch}: " + ", ".join(f"{p.static[f]:.0f} {f.replace('_', ' ')}" for f in facts if f in p.static)


VERB = Verb(
    "tune",
    "search for the fastest kernels, or predict them",
    (
        "tune matmul:512x1024x3840:f32",
        "tune matmul:512x1024x3840:f32 --threads 2 --budget 5m --strategy mcts",
        "tune matmul:512x1024x3840:f32 --budget 300,patience=80 --json",
        "tune @projections --budget 2m",
        "tune matmul:512x4096x3840:f16 --gpu rtx4090",
        "tune @projections --collect --budget 30m",
        "tune 'matmul:m(1..4096)x4096x3840:f16:nk' --gpu h200 --budget 5m",
        "tune @gemma4-12b --gpu all --budget 2m",
        "tune @gemma4-12b --fleet auto --metrics-port 9100",
    ),
    configure,
    run,
)
