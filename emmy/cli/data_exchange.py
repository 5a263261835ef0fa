"""The tasks of `emmy data` by which rows travel: import, push, pull, quarantine."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from emmy.cli.learnt import show_reviewed, show_trained
from emmy.cli.verb import folder
from emmy.report import Bar, Screen, counted

if TYPE_CHECKING:
    from emmy.costmodel.dataset import Dataset
    from emmy.costmodel.pull import PullReport
    from emmy.costmodel.quarantine import Arrival
    from emmy.costmodel.review import Reviewed

AddTask = Callable[[str, Callable[[Namespace, "Dataset", Screen], int], str], ArgumentParser]
AddGpu = Callable[[ArgumentParser], None]

EXAMPLES = {
    "import": "data import ~/downloads/h200",
    "push": "data push s3://our-bucket/emmy",
    "pull": "data pull https://example.org/emmy",
    "quarantine": "data quarantine release h200-3f2a",
}
_PLACE = "a folder, or a URL: s3://..., gs://..., whatever fsspec opens"


def configure(task: AddTask, gpu: AddGpu) -> None:
    sub = task("import", _import, "take in shard folders that others exported, once they are calibrated")
    sub.add_argument("folder", type=folder, help="a shard folder, or a folder of them")
    _add_taking_in(sub)
    sub = task("push", _push, "send the rows measured here to where others pull them from")
    sub.add_argument("place", metavar="DIR-or-URL", help=_PLACE)
    gpu(sub)
    sub.add_argument(
        "--provenance", default="", help="whence the rows are, in a sentence (default: the devices' names)"
    )
    sub = task("pull", _pull, "take in the rows that others pushed, once they are calibrated")
    sub.add_argument("place", metavar="DIR-or-URL", help=f"{_PLACE}, http://..., https://...")
    _add_taking_in(sub)
    sub = task(
        "quarantine", _quarantine, "list sets of rows that are not calibrated, judge them again, or decide on one"
    )
    sub.add_argument("action", nargs="?", default="list", choices=("list", "check", "release", "drop"))
    sub.add_argument("set", nargs="?", metavar="SET", help="the set whose name begins so")
    sub.add_argument("--no-train", action="store_true", help="train no model on rows that come in")


def say_held(dataset: Dataset, screen: Screen) -> None:
    """One line on what waits in quarantine."""
    from emmy.costmodel.quarantine import Quarantine

    if held := Quarantine(dataset).arrivals("held"):
        n = sum(a.n_rows for a in held)
        screen.say(f"{n} more rows wait in quarantine, in {counted(len(held), 'set')}: `emmy data quarantine` says why")


_NEXT = "`emmy data quarantine check` judges again; `... release SET` takes a set in on your word, `... drop SET` deletes its rows"


def _add_taking_in(sub: ArgumentParser) -> None:
    sub.add_argument(
        "--own",
        action="store_true",
        help="the rows are mine, from another machine: they stay `measured`, and need no calibration",
    )
    sub.add_argument("--no-train", action="store_true", help="train no model on rows that come in")


def _push(args: Namespace, dataset: Dataset, screen: Screen) -> int:
    from emmy.costmodel.place import place_at
    from emmy.costmodel.push import push

    dataset.ingest()
    with Bar(screen) as bar:
        report = push(dataset, place_at(args.place), target=args.gpu, provenance=args.provenance, on_progress=bar)
    screen.show(
        f"{counted(report.rows, 'row')} sent to {report.place} in {counted(report.sent, 'file')}; "
        f"{counted(report.already, 'file')} were there"
    )
    for why, n in report.held_back.items():
        screen.say(f"{counted(n, 'row')} stay here, each would name this machine: {why}")
    screen.record("push", report)
    return 0


def _import(args: Namespace, dataset: Dataset, screen: Screen) -> int:
    return _take_in(str(args.folder), args, dataset, screen)


def _pull(args: Namespace, dataset: Dataset, screen: Screen) -> int:
    return _take_in(args.place, args, dataset, screen)


def _take_in(place: str, args: Namespace, dataset: Dataset, screen: Screen) -> int:
    from emmy.costmodel.place import place_at
    from emmy.costmodel.pull import pull
    from emmy.costmodel.quarantine import Quarantine

    dataset.ingest()
    with Bar(screen) as bar:
        report = pull(dataset, place_at(place), on_progress=bar)
    _show_pulled(report, screen)
    if args.own:
        releases = [Quarantine(dataset).release(a, "one's own", own=True) for a in report.arrivals]
        n, known = sum(r.new for r in releases), sum(r.known for r in releases)
        screen.show(f"{counted(n, 'row')} taken in as measured; {known} were known")
        screen.record("own", {"rows": n, "known": known})
    else:
        _judge(report.arrivals, args, dataset, screen)
    return int(bool(report.refused))


def _show_pulled(report: PullReport, screen: Screen) -> None:
    n = sum(a.n_rows for a in report.arrivals)
    said = f"{counted(n, 'row')} came from {report.place} in {counted(len(report.arrivals), 'set')}"
    screen.show(said + (f"; {counted(report.already, 'manifest')} brought nothing new" if report.already else ""))
    for refused in report.refused:
        screen.say(f"not taken: {refused.manifest}: {'; '.join(refused.reasons[:5])}")
    record = {"place": report.place, "sets": len(report.arrivals), "rows": n, "already": report.already}
    screen.record("pull", {**record, "refused": [{"manifest": r.manifest, "why": r.reasons} for r in report.refused]})


def _judge(arrivals: Sequence[Arrival], args: Namespace, dataset: Dataset, screen: Screen) -> None:
    """Calibrates sets, says what came of it, and trains on what came in."""
    from emmy.costmodel.review import review

    with Bar(screen) as bar:
        reviewed = review(dataset, arrivals, on_progress=bar)
    for r in reviewed:
        show_reviewed(r, screen)
    if any(r.release is None for r in reviewed):
        screen.say(_NEXT)
    _train(reviewed, args, dataset, screen)


def _train(reviewed: Sequence[Reviewed], args: Namespace, dataset: Dataset, screen: Screen) -> None:
    from emmy.costmodel.upkeep import train_after

    if args.no_train:
        return
    with Bar(screen) as bar:
        for report in train_after(dataset.home, reviewed, on_progress=bar):
            show_trained(report, False, screen)


def _quarantine(args: Namespace, dataset: Dataset, screen: Screen) -> int:
    from emmy.costmodel.calibrate import Verdict
    from emmy.costmodel.quarantine import Quarantine
    from emmy.costmodel.review import Reviewed
    from emmy.errors import UsageError

    quarantine = Quarantine(dataset)
    if args.action in ("release", "drop") and args.set is None:
        raise UsageError(f"name the set to {args.action}; `emmy data quarantine` lists them")
    if args.action == "list":
        _list([a for a in quarantine.arrivals("held") if a.name.startswith(args.set or "")], screen)
    elif args.action == "check":
        _judge([quarantine.find(args.set)] if args.set else quarantine.arrivals("held"), args, dataset, screen)
    elif args.action == "drop":
        dropped = quarantine.drop(quarantine.find(args.set), "dropped by hand")
        screen.show(
            f"{dropped.name}: dropped; a pull will not bring it again. To have it back, delete {dropped.folder}"
        )
        screen.record("drop", {"set": dropped.name})
    else:
        release = quarantine.release(quarantine.find(args.set), "released by hand")
        screen.show(f"{release.arrival.name}: {counted(release.new, 'row')} taken in, {release.known} were known")
        screen.record("release", {"set": release.arrival.name, "rows": release.new, "known": release.known})
        _train([Reviewed(release.arrival, Verdict(()), release)], args, dataset, screen)
    return 0


def _list(held: Sequence[Arrival], screen: Screen) -> None:
    screen.rows("held", map(_record, held), {"set": "set", "rows": "rows", "cards": "cards", "source": "source"})
    for a in held:
        screen.show(f"{a.name}: {a.standing.why}")
    screen.say(_NEXT if held else "nothing is in quarantine")


def _record(a: Arrival) -> dict[str, object]:
    return {
        "set": a.name,
        "rows": a.n_rows,
        "cards": ", ".join(sorted({c.product for c in a.manifest.cards})),
        "source": a.standing.source,
        "licence": a.manifest.licence,
        "provenance": a.manifest.provenance,
        "why": a.standing.why,
        "time_utc": a.standing.time_utc,
    }
