"""`emmy train-costmodel`: a LightGBM model from the stored rows, judged on problems it has not seen; its versions."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from emmy.cli.learnt import show_reviewed, show_trained
from emmy.cli.verb import Verb, add_home, folder, positive
from emmy.report import Bar, Screen

if TYPE_CHECKING:
    from emmy.costmodel.registry import Version

INTERRUPTED = 130
POLL_S = 10


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--gpu", metavar="NAME", help="only this target (default: every target with rows)")
    parser.add_argument(
        "--models", type=folder, metavar="DIR", help="where models are kept and deployed (default: with the home)"
    )
    parser.add_argument(
        "--force", action="store_true", help="deploy the model whatever its verdict; roll back to whatever version"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--watch",
        action="store_true",
        help="stay, and train again whenever enough new rows have arrived; Ctrl-C ends it",
    )
    what.add_argument("--list", action="store_true", help="list the versions that are kept; trains nothing")
    what.add_argument(
        "--rollback",
        nargs="?",
        const="",
        metavar="VERSION",
        help="deploy the version before the deployed one, or the one that begins so; trains nothing",
    )
    parser.add_argument(
        "--every", type=positive, metavar="N", help="with --watch: train after N new rows (default: 5 %%, 50 at least)"
    )
    parser.add_argument(
        "--poll",
        type=positive,
        default=POLL_S,
        metavar="S",
        help=f"with --watch: look every S seconds (default: {POLL_S})",
    )
    add_home(parser)


def run(args: Namespace, screen: Screen) -> int:
    from emmy import api

    if args.list:
        return _list(args, screen)
    if args.rollback is not None:
        card = api.rollback_costmodel(args.gpu, args.rollback, models=args.models, home=args.home, force=args.force)
        screen.show(f"deployed: version {card.digest} of {card.target}, trained {card.time_utc} on {card.rows} samples")
        screen.record("rollback", {"target": card.target, "version": card.digest, "time_utc": card.time_utc})
        return 0
    if args.watch:
        return _watch(args, screen)
    with Bar(screen) as bar:
        reports = api.train_costmodel(args.gpu, models=args.models, force=args.force, home=args.home, on_progress=bar)
    for r in reports:
        show_trained(r, args.force, screen)
    return int(all(r.trained is None for r in reports))


def _watch(args: Namespace, screen: Screen) -> int:
    from emmy import config
    from emmy.costmodel.upkeep import Watch

    home = args.home or config.home()
    trained = 0

    def rest() -> bool:
        time.sleep(args.poll)
        return True

    screen.say(f"watching {home} for new rows; Ctrl-C ends it")
    try:
        with Bar(screen) as bar:
            watch = Watch(
                home, args.gpu, args.every, args.models, on_progress=bar, on_reviewed=lambda r: show_reviewed(r, screen)
            )
            for report in watch.reports(rest):
                show_trained(report, False, screen)
                trained += report.trained is not None
    except KeyboardInterrupt:
        screen.say(
            f"stopped watching; models trained: {trained}. A training that was under way left everything as it was"
        )
        return INTERRUPTED
    return 0


def _list(args: Namespace, screen: Screen) -> int:
    from emmy import api

    versions = api.costmodel_versions(args.gpu, models=args.models, home=args.home)
    screen.rows("version", map(_version, versions))
    for v in versions:
        if v.fault:
            screen.say(f"{v.standing}: {v.fault}")
    if not versions:
        screen.say("no version is kept; `emmy train-costmodel` makes the first")
    return 0


def _version(v: Version) -> dict[str, object]:
    model = next((s for s in v.card.scores if s.ranker == "model"), None) if v.card else None
    return {
        "target": v.target,
        "version": v.digest,
        "standing": v.standing,
        "trained": v.card.time_utc if v.card else None,
        "samples": v.card.rows if v.card else None,
        "donors": sum(d.samples for d in v.card.donors) if v.card else None,
        "top1_share": model.top1 if model else None,
        "top10_share": model.top10 if model else None,
        "spearman": model.spearman if model else None,
        "replaces": v.card.replaces or None if v.card else None,
    }


VERB = Verb(
    "train-costmodel",
    "train the cost model from the stored rows, judge it, keep versions",
    (
        "train-costmodel",
        "train-costmodel --gpu cpu --json",
        "train-costmodel --gpu h200 --watch --every 500",
        "train-costmodel --gpu h200 --list",
        "train-costmodel --gpu h200 --rollback",
        "train-costmodel --gpu h200 --rollback 3f2a81c0",
    ),
    configure,
    run,
)
