"""`emmy bench`: a stored winner measured again, in turns with the stock kernel."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from emmy.cli import bench_serving, bench_tasks
from emmy.cli.verb import Verb, VerbParser, add_gpu, add_home, add_threads, positive
from emmy.errors import EmmyError, UsageError
from emmy.measure.rivals import RIVALS
from emmy.report import Screen, race_record, show_races

if TYPE_CHECKING:
    from emmy.ir.ops import Op


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("op", nargs="+", help="ops, or a set: @projections, @gemma4-12b, @config:PATH")
    add_gpu(parser)
    add_threads(parser)
    parser.add_argument("--schedule", metavar="S", help="measure this one, or this table, instead of what is stored")
    parser.add_argument("--rounds", type=positive, default=7, metavar="N", help="samples of each side (default: 7)")
    parser.add_argument("--against", default="", choices=RIVALS, metavar="NAME", help=f"of {', '.join(RIVALS)}")
    parser.add_argument("--wait", action="store_true", help="queue behind whoever measures on the device")
    add_home(parser)
    assert isinstance(parser, VerbParser)
    bench_tasks.add(parser)
    bench_serving.add(parser)


def run(args: Namespace, screen: Screen) -> int:
    from emmy import api

    if "task" in args:
        done_by: int = args.task(args, screen)
        return done_by
    if strays := [word for word in args.op if ":" not in word and not word.startswith("@")]:
        raise UsageError(
            f"{strays[0]!r} is no op, which has a colon or begins with @, nor a task, of which the first word after `emmy bench` is one: "
            f"{', '.join((*bench_tasks.TASKS, *bench_serving.TASKS))}"
        )
    done, code, ops = [], 0, api.expand(args.op)
    where = {"gpu": args.gpu, "threads": args.threads, "home": args.home}
    served = [api.serving(op, **where) for op in ops]
    for op, schedule in _what(ops, args):
        screen.say(
            f"measuring {op} on {args.gpu}, {args.rounds} rounds in turns with {args.against or 'the stock kernel'}"
        )
        try:
            b = api.bench(
                op,
                schedule,
                gpu=args.gpu,
                threads=args.threads,
                rounds=args.rounds,
                against=args.against,
                wait=args.wait,
                home=args.home,
            )
        except EmmyError as e:  # the other ops are still worth measuring
            code = max(code, screen.fail(e))
            continue
        predicted_us = b.predicted.predicted_us if b.predicted else None
        if b.predicted:
            screen.say(f"note: {op}: the schedule is a prediction's: {b.predicted}")
        done.append({**race_record(b.row, b.roof_us), "stored_us": b.stored_us, "predicted_us": predicted_us})
        if b.row.status != "ok":
            screen.say(f"{b.row.status}: {b.row.message}")
            code = max(code, 1)
    predicted = {"predicted_us": "predicted us"} if any(d["predicted_us"] for d in done) else {}
    show_races(screen, "bench", done, {"stored_us": "stored us"} | predicted)
    for named, before in zip(ops, served, strict=True):
        if (after := api.serving(named, **where)) != before:
            what = f"instead of {before}" if before else "where nothing was stored"
            screen.say(f"note: {named}: with these times what serves it is now {after}, {what}")
            screen.record("serving", {"op": named.key, "before": before, "after": after})
    return code


def _what(ops: Sequence[Op], args: Namespace) -> Iterator[tuple[str, str | None]]:
    """Each op and the schedule to measure, None for what is stored; of an op that a table serves, each range's."""
    from emmy import api

    for op in ops:
        ranges = api.table(op, args.schedule, gpu=args.gpu, threads=args.threads, home=args.home)
        if ranges:
            yield from ((w.op, w.range.schedule) for w in ranges)
        else:
            yield op.key, args.schedule


VERB = Verb(
    "bench",
    "measure stored winners again, beside the stock kernel",
    (
        "bench matmul:512x1024x3840:f32",
        "bench matmul:512x1024x3840:f32 --threads 2 --rounds 15 --json",
        *bench_tasks.EXAMPLES,
        *bench_serving.EXAMPLES,
    ),
    configure,
    run,
)
