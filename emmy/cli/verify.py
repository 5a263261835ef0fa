"""`emmy verify`: stored schedules compiled and checked against the reference once more; of a card that is not here, what would
be loaded, in the emulator.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Sequence
from os import sched_getaffinity
from typing import TYPE_CHECKING

from emmy.cli.verb import Verb, add_home, add_threads, positive
from emmy.errors import NoSuchDevice, WrongAnswer
from emmy.report import Bar, Screen, counted, record_of

if TYPE_CHECKING:
    from emmy.emulation import Emulated
    from emmy.workloads import NamedOp

INTERRUPTED = 130
KEYS = ("op", "status", "error_norm", "schedule", "message")
COLUMNS = {"op": "op", "status": "status", "error_norm": "error / allowed", "schedule": "schedule"}


def configure(parser: ArgumentParser) -> None:
    parser.add_argument(
        "ops", nargs="*", metavar="OP", help="ops, or a set: @gemma4-12b (default: all that are stored of the target)"
    )
    parser.add_argument(
        "--gpu", default="cpu", metavar="NAMES", help="targets: cpu, h200, or several: rtx4090,rtx5090 (default: cpu)"
    )
    add_threads(parser)
    parser.add_argument("--op", help="one more op, or each range of a table, or those of a set")
    parser.add_argument(
        "--top", type=positive, default=5, metavar="N", help="schedules of each op, the best first (default: 5)"
    )
    parser.add_argument(
        "--emulate", action="store_true", help="in the emulator, as of a card that is not here, although it may be"
    )
    parser.add_argument(
        "--orders", type=positive, default=2, metavar="N", help="orders of the emulated threads, up to 6 (default: 2)"
    )
    parser.add_argument(
        "--jobs", type=positive, default=len(sched_getaffinity(0)), metavar="N", help="processes that emulate"
    )
    parser.add_argument("--wait", action="store_true", help="queue behind whoever measures on the device")
    add_home(parser)


def run(args: Namespace, screen: Screen) -> int:
    ops, absent, code = [*args.ops, *([args.op] if args.op else [])], [], 0
    for gpu in args.gpu.split(","):
        if args.emulate:
            absent.append(gpu)
            continue
        try:
            code = max(code, _measured(gpu, ops, args, screen))
        except NoSuchDevice as e:
            if gpu == "cpu" or not _is_known(gpu):
                raise
            screen.say(f"note: {e} What follows of {gpu} is from the emulator.")
            absent.append(gpu)
    return max(code, _emulated(absent, ops, args, screen)) if absent else code


def _is_known(gpu: str) -> bool:
    from emmy.ir.target import target_names

    return gpu in target_names()


def _measured(gpu: str, ops: Sequence[str], args: Namespace, screen: Screen) -> int:
    from emmy import api

    with Bar(screen) as bar:
        report = api.verify(
            ops, gpu=gpu, threads=args.threads, top=args.top, wait=args.wait, home=args.home, on_progress=bar
        )
    screen.rows("verified", ({key: getattr(r, key) for key in KEYS} for r in report.rows), COLUMNS)
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


# ---------------------------------------------------------------- in the emulator
def _emulated(gpus: Sequence[str], ops: Sequence[str], args: Namespace, screen: Screen) -> int:
    from emmy import api

    work = api.emulated(ops, gpus, orders=args.orders, jobs=args.jobs, home=args.home)
    of_op: dict[str, list[NamedOp]] = {}
    for n in work.cases:
        of_op.setdefault(n.op, []).append(n)
    rows: list[tuple[NamedOp, Emulated]] = []
    interrupted = False
    with Bar(screen) as bar:
        try:
            for done, found in enumerate(work.results):
                bar("emulating", done, work.count)
                rows += [(case, found) for case in of_op[found.asked]]
                for case in of_op[found.asked]:
                    screen.record("emulated", {"case": case.name, "kind": case.kind, **record_of(found)})
                if found.verdict != "ok":
                    bar.say(f"{found.verdict}: {found.op} on {found.target}: {found.message}  {found.schedule}")
        except KeyboardInterrupt:
            interrupted = True
    _table(rows, screen)
    bad = list({(r.op, r.target): r for _, r in rows if r.verdict != "ok"}.values())
    screen.say(
        f"{counted(len(work.cases), 'case')} on {', '.join(gpus)}: {counted(len(bad), 'failure')} of {counted(work.count, 'op')} on cards, "
        f"{args.orders} orders of the threads"
    )
    if interrupted:
        screen.say("interrupted: what was found is kept; the same command goes on")
        return INTERRUPTED
    return WrongAnswer.exit_code if any(r.verdict == "wrong" for r in bad) else int(bool(bad))


def _table(rows: Sequence[tuple[NamedOp, Emulated]], screen: Screen) -> None:
    """A line for each kind of case and card."""
    groups: dict[tuple[str, str], list[tuple[NamedOp, Emulated]]] = {}
    for case, r in rows:
        groups.setdefault((case.kind, r.target), []).append((case, r))
    columns = {"error": "error / allowed", "wall_s": "seconds"}
    if lines := [_line(*key, group) for key, group in groups.items()]:
        screen.rows("kind", lines, {key: columns.get(key, key.replace("_", " ")) for key in lines[0]})


def _line(kind: str, card: str, group: Sequence[tuple[NamedOp, Emulated]]) -> dict[str, object]:
    names = {case.name for case, _ in group}
    failed = {case.name for case, r in group if r.verdict != "ok"}
    origins = Counter(r.origin for _, r in group if r.schedule)
    distinct = {(r.op, r.schedule): r for _, r in group}.values()

    def most(fact: str) -> float | None:
        return max((r.static[fact] for r in distinct if fact in r.static), default=None)

    return {
        "kind": kind,
        "card": card,
        "cases": len(names),
        "ok": len(names) - len(failed),
        "schedules": ", ".join(f"{n} {origin}" for origin, n in sorted(origins.items())),
        "error": max((r.error for r in distinct if r.error is not None), default=None),
        "registers": most("registers"),
        "spill_bytes": most("spill_bytes"),
        "smem_bytes": most("smem_bytes"),
        "wall_s": sum(r.wall_s for r in distinct),
    }


VERB = Verb(
    "verify",
    "check stored schedules against the reference again, or in the emulator",
    (
        "verify",
        "verify matmul:512x1024x3840:f32 --top 20",
        "verify @gemma4-12b --gpu rtx4090,rtx5090,h100,h200 --emulate",
    ),
    configure,
    run,
)
