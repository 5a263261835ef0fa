"""`emmy data`: look at the dataset, move rows in and out of it, check it."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from emmy.cli import data_exchange
from emmy.cli.verb import Verb, add_home, add_tasks, folder
from emmy.report import Screen, counted, record_of, table

if TYPE_CHECKING:
    from emmy.costmodel.dataset import Dataset
    from emmy.costmodel.snapshot import Best

Task = Callable[[Namespace, "Dataset", Screen], int]
SHOWN_FAULTS = 20  # different ones
GRAVE = ("conflict", "implausible")  # faults that a sound dataset does not have


def configure(parser: ArgumentParser) -> None:
    add_task = add_tasks(parser, EXAMPLES)

    def task(name: str, run_task: Task, summary: str) -> ArgumentParser:
        sub = add_task(name, run_task, summary)
        add_home(sub)
        return sub

    def gpu(sub: ArgumentParser, required: bool = False) -> None:
        sub.add_argument("--gpu", type=_target, metavar="NAME", required=required, help="only rows of this target")

    sub = task("stats", _stats, "count rows by kind of op, or list the best of each op")
    gpu(sub)
    sub.add_argument(
        "--ops", metavar="TEXT", help="list the best of each op whose text has this in it, such as matmul:512x"
    )
    sub.add_argument("--full", action="store_true", help="list the best of every op, and what became of the other rows")
    task("query", _query, "answer SQL over measurement, ok, best and stored").add_argument("sql", help="one statement")
    sub = task("export", _export, "write the rows measured here as a shard folder")
    gpu(sub, required=True)
    sub.add_argument(
        "--out", type=folder, required=True, metavar="DIR", help="the shard is DIR/NAME; new rows are added to it"
    )
    sub.add_argument(
        "--provenance", default="", help="whence the rows are, in a sentence (default: the devices' names)"
    )
    task("verify", _verify, "check every shard: digests, columns, values").add_argument(
        "folder", type=folder, nargs="*", help="shard folders, or folders of them (default: all of the dataset)"
    )
    gpu(task("doctor", _doctor, "list rows that should not be believed, each with the reason"))
    task("rebuild", _rebuild, "make the database anew from the journals, keeping the old one")
    data_exchange.configure(task, gpu)
    sub = task("ingest", _ingest, "take finished journals into the database")
    sub.add_argument("--dead", action="store_true", help="also those of runs that were killed and will not be resumed")


def run(args: Namespace, screen: Screen) -> int:
    from emmy import config
    from emmy.costmodel.dataset import Dataset

    done: int = args.task(args, Dataset.of(args.home or config.home()), screen)
    return done


def _target(name: str) -> str:
    """The name when a target has it. A misspelt one would look like a target without rows."""
    from emmy.errors import NoSuchDevice
    from emmy.ir.target import load_target, target_names

    if name in target_names():  # also one that this machine is not
        return name
    try:
        return load_target(name).name
    except NoSuchDevice as e:
        raise ArgumentTypeError(str(e)) from None


def _stats(args: Namespace, dataset: Dataset, screen: Screen) -> int:
    from emmy.costmodel.stats import data_stats

    dataset.ingest()
    with dataset.snapshot() as snapshot:
        stats = data_stats(snapshot, target=args.gpu)
    screen.say(
        f"{stats.rows} rows{' of all targets' if args.gpu else ''} in {dataset.home}"
        + (f", {stats.duplicate_rows} stored twice" if stats.duplicate_rows else "")
    )
    bests = [b for b in stats.bests if args.ops is None or args.ops in b.row.op]
    if args.full or screen.json:
        screen.rows("group", map(record_of, stats.groups))
        screen.show("")
    data_exchange.say_held(dataset, screen)
    if args.ops is None:
        screen.rows("kind", map(record_of, stats.kinds))
    if args.full or args.ops is not None or screen.json:
        screen.show("")
        screen.rows("best", map(_best, bests))
    elif bests:
        screen.say(
            f"{counted(len({b.row.op for b in bests}), 'op')} with a best: --ops TEXT lists those with TEXT in them, --full all of them"
        )
    if args.ops is not None and not bests:
        screen.say(f"no op with a best has {args.ops!r} in its text")
    if stats.groups and not stats.bests:
        screen.say(
            "no best is listed: none of these rows is right, measured here and undisturbed; `emmy data doctor` has the reasons"
        )
    return 0


def _best(b: Best) -> dict[str, object]:
    return {
        "op": b.row.op,
        "target": b.row.device.target,
        "device": b.row.device.uuid_hash[:6],  # several cards of a kind each have their best
        "threads": b.row.protocol.threads,
        "time_us": b.time_us,
        "stock": b.baseline or None,
        "stock_us": b.baseline_us,
        "ratio": b.ratio,
        "rows": b.n_rows,
        "schedule": b.row.schedule,
    }


def _query(args: Namespace, dataset: Dataset, screen: Screen) -> int:
    dataset.ingest()
    with dataset.snapshot() as snapshot:
        answer = snapshot.query(args.sql)
    screen.show(table(answer.columns, answer.rows))
    for row in answer.rows:
        screen.record("row", {"cells": dict(zip(answer.columns, row, strict=True))})
    return 0


def _export(args: Namespace, dataset: Dataset, screen: Screen) -> int:
    from emmy.costmodel.exchange import export_shard

    dataset.ingest()
    report = export_shard(dataset, args.gpu, args.out, provenance=args.provenance)
    screen.show(f"{report.rows} rows written to {report.part or report.folder}; {report.already} were there")
    screen.record("export", report)
    return 0


def _verify(args: Namespace, dataset: Dataset, screen: Screen) -> int:
    from emmy.costmodel.shards import shard_folders, shard_folders_at, verify

    folders = shard_folders(dataset.roots)
    if args.folder:  # each is a shard folder or, as for import, a folder of them; verify says what is wrong with others
        folders = tuple(found for given in args.folder for found in shard_folders_at(given) or (given,))
    faults = [f for folder in folders for f in verify(folder)]
    screen.rows("fault", map(record_of, faults))
    screen.say(f"{len(folders)} shard folders, {len(faults)} faults")
    return int(bool(faults))


def _doctor(args: Namespace, dataset: Dataset, screen: Screen) -> int:
    from emmy.api import diagnose_data

    found = diagnose_data(dataset, args.gpu)
    for fault in found.faults:
        screen.record("fault", fault)
    alike = Counter((f.kind, f.target, f.op, f.detail) for f in found.faults)
    if alike:
        lines = [(kind, n, *rest) for (kind, *rest), n in alike.items()]
        screen.show(table(("fault", "rows", "target", "op", "detail"), lines[:SHOWN_FAULTS]))
        if len(lines) > SHOWN_FAULTS:
            screen.show(f"and {len(lines) - SHOWN_FAULTS} more: --json lists them")
    kinds = dict.fromkeys(f.kind for f in found.faults)
    listed = ", ".join(f"{found.count(k)} {k}" for k in kinds)
    screen.say(f"{found.checked} rows looked at: {listed or 'nothing wrong'}")
    return int(any(f.kind in GRAVE for f in found.faults))


def _rebuild(args: Namespace, dataset: Dataset, screen: Screen) -> int:
    report = dataset.rebuild()
    lost = (
        "; the old database could not be read"
        if report.salvaged is None
        else f", {report.salvaged} from the old database"
    )
    screen.show(f"{report.rows} rows from {report.journals} journals{lost}. The old one is kept as {report.kept_as}")
    screen.record("rebuild", report)
    return _damaged(report.damaged, screen)


def _ingest(args: Namespace, dataset: Dataset, screen: Screen) -> int:
    report = dataset.ingest(dead=args.dead)
    screen.show(f"{report.new_rows} new rows of {report.rows} in {report.journals} journals")
    screen.record("ingest", report)
    return _damaged(report.damaged, screen)


def _damaged(damaged: tuple[str, ...], screen: Screen) -> int:
    for what in damaged:
        screen.say(f"damaged: {what}")
    return int(bool(damaged))


EXAMPLES = {
    "stats": "data stats --gpu h200 --ops rms_norm",
    "query": 'data query "SELECT op, min(time_us) FROM ok GROUP BY op"',
    **data_exchange.EXAMPLES,
    "export": "data export --gpu cpu --out datasets/",
    "verify": "data verify datasets/cpu",
    "doctor": "data doctor",
    "rebuild": "data rebuild",
    "ingest": "data ingest --dead",
}

VERB = Verb(
    "data", "look at the dataset, move rows, check them", tuple(EXAMPLES.values()), configure, run, has_tasks=True
)
