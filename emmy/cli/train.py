"""`emmy train-costmodel`: a LightGBM model from the stored rows, judged on problems it has not seen."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from emmy.cli.verb import Verb, add_home
from emmy.report import RANKING_COLUMNS, Bar, Screen, record_of


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--gpu", metavar="NAME", help="only this target (default: every target with rows)")
    parser.add_argument(
        "--models", type=Path, metavar="DIR", help="where models are kept and deployed (default: with the home)"
    )
    parser.add_argument("--force", action="store_true", help="deploy the model whatever its verdict")
    add_home(parser)


def run(args: Namespace, screen: Screen) -> int:
    from emmy import api

    with Bar(screen) as bar:
        reports = api.train_costmodel(args.gpu, models=args.models, force=args.force, home=args.home, on_progress=bar)
    for r in reports:
        dropped = "".join(f"; {n} rows left out: {why}" for why, n in r.dropped.items())
        screen.show(f"{r.target}: {r.samples} samples of {r.rows} rows in {r.seconds:.1f} s{dropped}")
        screen.rows("ranking", map(record_of, r.trained.scores if r.trained else ()), RANKING_COLUMNS)
        screen.show(f"{'deployed' if r.verdict.deploy or args.force else 'not deployed'}: {r.verdict.why}")
        if r.path:
            screen.show(str(r.path))
        screen.record("train", {k: v for k, v in record_of(r).items() if k != "trained"})
    return int(all(r.trained is None for r in reports))


VERB = Verb(
    "train-costmodel",
    "train the cost model from the stored rows, and judge it",
    ("train-costmodel", "train-costmodel --gpu cpu --json"),
    configure,
    run,
)
