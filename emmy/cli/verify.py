"""`emmy verify`: the best stored schedules compiled and checked against the reference once more."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from emmy.cli.verb import Verb, add_gpu, add_home, add_threads, positive
from emmy.errors import WrongAnswer
from emmy.report import Bar, Screen, counted


def configure(parser: ArgumentParser) -> None:
    add_gpu(parser)
    add_threads(parser)
    parser.add_argument(
        "--op", help="only this op, or each range of a table, or those of a set (default: all that are stored)"
    )
    parser.add_argument(
        "--top", type=positive, default=5, metavar="N", help="schedules of each op, the best first (default: 5)"
    )
    parser.add_argument("--wait", action="store_true", help="queue behind whoever measures on the device")
    add_home(parser)


def run(args: Namespace, screen: Screen) -> int:
    from emmy import api

    with Bar(screen) as bar:
        report = api.verify(
            args.op,
            gpu=args.gpu,
            threads=args.threads,
            top=args.top,
            wait=args.wait,
            home=args.home,
            on_progress=bar,
        )
    keys = ("op", "status", "error_norm", "schedule", "message")
    columns = {"op": "op", "status": "status", "error_norm": "error / allowed", "schedule": "schedule"}
    screen.rows("verified", ({key: getattr(r, key) for key in keys} for r in report.rows), columns)
    for r in report.rows:
        if r.message:
            screen.say(f"{r.status}: {r.op}: {r.message}")
    counts = [f"{counted(len(report.rows), 'schedule')} checked", f"{len(report.wrong)} wrong"]
    counts += [f"{len(report.failed)} without an answer"] if report.failed else []
    screen.say(", ".join(counts))
    if n := len(report.unbelieved):
        screen.say(
            f"note: {n} right, but faster than the device's peaks allow: such times are kept and used by nothing"
        )
    return WrongAnswer.exit_code if report.wrong else int(bool(report.failed))


VERB = Verb(
    "verify",
    "check the best stored schedules against the reference again",
    ("verify", "verify --op matmul:512x1024x3840:f32 --top 20"),
    configure,
    run,
)
