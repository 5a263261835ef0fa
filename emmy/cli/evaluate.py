"""`emmy eval`: how good the strategies and the cost model are, on problems whose answers are known."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from emmy.cli.verb import Verb, add_home
from emmy.report import Bar, Screen, record_of

if TYPE_CHECKING:
    from emmy.costmodel.evaluate import ProblemScore


def configure(parser: ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=("search", "costmodel"),
        help="search: strategies on recorded spaces; costmodel: held-out problems",
    )
    parser.add_argument("--gpu", metavar="NAME", default="cpu", help="costmodel: rows of this target (default: cpu)")
    add_home(parser)


def run(args: Namespace, screen: Screen) -> int:
    from emmy import api

    with Bar(screen) as bar:
        trained = api.evaluate_costmodel(args.gpu, home=args.home, on_progress=bar)
    screen.rows("problem", map(_problem, trained.problems))
    screen.show("")
    screen.rows("ranking", map(record_of, trained.scores))
    return 0


def _problem(p: ProblemScore) -> dict[str, object]:
    """Top-10 regret of each ranking: how much slower than the best the best of its first ten is."""
    return {"problem": p.problem, "candidates": p.candidates, "best_us": p.best_us} | {
        r: s.top10 for r, s in p.scores.items()
    }


VERB = Verb(
    "eval",
    "score the strategies or the cost model",
    ("eval search", "eval costmodel --gpu cpu"),
    configure,
    run,
)
