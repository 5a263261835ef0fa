"""`emmy eval`: how good the strategies and the cost model are, on problems whose answers are known."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from emmy.cli.verb import Verb, add_home, add_tasks, folder, positive
from emmy.report import COVERAGE_COLUMNS, CURVE_COLUMNS, RANKING_COLUMNS, Bar, Screen, percent, record_of, table

if TYPE_CHECKING:
    from emmy.costmodel.evaluate import ProblemScore
    from emmy.search.evaluate import SearchScore, Standing


def configure(parser: ArgumentParser) -> None:
    task = add_tasks(parser, EXAMPLES)
    sub = task("search", _search, "replay the strategies on recorded spaces, and score them against random search")
    sub.add_argument(
        "--strategies",
        type=_words,
        default=(),
        metavar="S,S",
        help="by name, +model added or not; lists without a search: copy-nearest, list+model; "
        "kt:NAME or kt:all are Kernel Tuner's own (default: all of ours)",
    )
    sub.add_argument(
        "--spaces",
        type=_words,
        default=(),
        metavar="S,S",
        help="recorded spaces, or files: Kernel Tuner's caches, T4 results (default: all that are shipped)",
    )
    sub.add_argument("--seeds", type=positive, default=20, metavar="N", help="runs of each, seeds 0..N-1 (default: 20)")
    sub.add_argument(
        "--slow-seeds",
        type=positive,
        default=5,
        metavar="N",
        help="at most so many of optuna and kt:bayes_opt (default: 5)",
    )
    sub.add_argument("--budget", type=positive, default=400, metavar="N", help="evaluations of a run (default: 400)")
    sub.add_argument("--batch", type=positive, default=1, metavar="N", help="points asked for at once (default: 1)")
    sub.add_argument("--processes", type=positive, default=2, metavar="N", help="runs at a time (default: 2)")
    _add_plot(sub, "best time so far against evaluations, a picture a space and one of their mean")
    sub = task("costmodel", _costmodel, "train on the stored rows and judge by problems held out; deploys nothing")
    sub.add_argument("--gpu", metavar="NAME", default="cpu", help="rows of this target (default: cpu)")
    sub.add_argument(
        "--leave-out",
        choices=("fold", "problem", "gpu"),
        default="fold",
        help="what is held out at a time: a fold of ops (default), each op by itself, or a card's rows, here and recorded",
    )
    sub.add_argument("--folds", type=positive, default=5, metavar="N", help="folds of ops (default: 5)")
    sub.add_argument(
        "--curve",
        action="store_true",
        help="regret with 0, 10, 25, 50 and 100 %% of the card's rows, with donors and without",
    )
    sub.add_argument(
        "--donors",
        type=_words,
        default=("cpu", "recorded"),
        metavar="D,D",
        help="whose rows stand beside the card's in --curve: targets, or recorded spaces (default: cpu,recorded)",
    )
    _add_plot(sub, "the calibration, or the curve")
    add_home(sub)


def run(args: Namespace, screen: Screen) -> int:
    if args.plot:
        from emmy.plots import need_matplotlib

        need_matplotlib()
    done: int = args.task(args, screen)
    return done


def _search(args: Namespace, screen: Screen) -> int:
    from emmy.search.evaluate import evaluate, standings
    from emmy.search.registry import STRATEGIES

    with Bar(screen) as bar:
        rows = evaluate(
            args.strategies or tuple(STRATEGIES),
            args.spaces,
            seeds=args.seeds,
            slow_seeds=args.slow_seeds,
            budget=args.budget,
            batch=args.batch,
            processes=args.processes,
            on_progress=lambda done, of: bar("replaying", done, of, f"{done} of {of} runs"),
        )
    screen.rows("space", map(_scores, rows))
    screen.show("")
    means = standings(rows)
    screen.rows("strategy", map(_scores, means))
    if args.plot:
        from emmy.plots import best_so_far

        _say_drawn(best_so_far(rows, means, args.plot), screen)
    screen.say(
        "score: 0 = random search, 1 = the optimum at once; at N: the same after N evaluations; seconds: of a processor, a run"
    )
    screen.say(
        "n95, n99: evaluations to 95, 99 % of the optimum's speed, the median run's (below the median space's); -: not reached"
    )
    return 0


def _scores(row: SearchScore | Standing) -> dict[str, object]:
    return {k: v for k, v in record_of(row).items() if k not in ("at", "speed")} | {f"at_{n}": p for n, p in row.at}


def _costmodel(args: Namespace, screen: Screen) -> int:
    if args.curve:
        return _curve(args, screen)
    if args.leave_out == "gpu":
        return _across_gpus(args, screen)
    from emmy import api
    from emmy.costmodel.evaluate import by_kind

    folds = None if args.leave_out == "problem" else args.folds
    with Bar(screen) as bar:
        exam = api.evaluate_costmodel(args.gpu, folds=folds, home=args.home, on_progress=bar)
    screen.rows("problem", map(_problem, exam.problems))
    screen.show("")
    screen.rows("ranking", map(record_of, exam.scores), RANKING_COLUMNS)
    screen.show("")
    kinds = ({"kind": k, **record_of(s)} for k, scores in by_kind(exam.problems).items() for s in scores)
    screen.rows("kind", kinds, {"kind": "kind", **RANKING_COLUMNS})
    screen.show("")
    screen.rows("coverage", map(record_of, exam.coverage), COVERAGE_COLUMNS)
    if args.plot:
        from emmy.plots import calibration

        _say_drawn([calibration(args.gpu, exam, args.plot)], screen)
    return 0


def _across_gpus(args: Namespace, screen: Screen) -> int:
    from emmy import api
    from emmy.costmodel.evaluate import summary

    with Bar(screen) as bar:
        problems = api.evaluate_across_gpus(home=args.home, on_progress=bar)
    for p in problems:
        ranked = {r.ranker: r for r in summary((p,))}
        for name in ranked:
            screen.record("problem", {"problem": p.problem, "candidates": p.candidates, **record_of(ranked[name])})
    screen.show(_regrets(problems))
    screen.show("")
    screen.rows("ranking", map(record_of, summary(problems)), RANKING_COLUMNS)
    screen.say(
        "each problem was ranked by what its kernel's or op's other cards of the same vendor teach; the card's own rows had no part"
    )
    return 0


def _regrets(problems: Sequence[ProblemScore]) -> str:
    """A line a problem: top-1 and top-10 regret, and Spearman, of each ranking."""
    rankers = list(problems[0].scores) if problems else []
    cells = [
        (
            p.problem,
            p.candidates,
            *(f"{percent(s.top1)} / {percent(s.top10)} / {s.spearman:.2f}" for s in p.scores.values()),
        )
        for p in problems
    ]
    return table(("problem: top-1 / top-10 regret / Spearman", "candidates", *rankers), cells)


def _curve(args: Namespace, screen: Screen) -> int:
    from emmy import api

    with Bar(screen) as bar:
        points = api.costmodel_curve(args.gpu, donors=args.donors, folds=args.folds, home=args.home, on_progress=bar)
    screen.rows("point", map(record_of, points), CURVE_COLUMNS)
    if args.plot:
        from emmy.plots import learning_curve

        _say_drawn([learning_curve(args.gpu, points, args.plot)], screen)
    return 0


def _problem(p: ProblemScore) -> dict[str, object]:
    """Top-10 regret of each ranking: how much slower than the best the best of its first ten is."""
    top10 = {ranker: s.top10 for ranker, s in p.scores.items()}
    return {"problem": p.problem, "candidates": p.candidates, "best_us": p.best_us} | top10


def _add_plot(sub: ArgumentParser, what: str) -> None:
    sub.add_argument("--plot", type=folder, metavar="DIR", help=f"draw {what}, into this folder (needs matplotlib)")


def _say_drawn(paths: Sequence[Path], screen: Screen) -> None:
    for path in paths:
        screen.say(f"drawn: {path}")
        screen.record("plot", {"path": str(path)})


def _words(text: str) -> tuple[str, ...]:
    return tuple(w for w in text.split(",") if w)


EXAMPLES = {
    "search": "eval search --spaces gemm.rtx3090 --strategies auto,kt:genetic_algorithm --seeds 5 --plot curves/",
    "costmodel": "eval costmodel --gpu h200 --leave-out problem --plot pictures/",
}

VERB = Verb("eval", "score the strategies or the cost model", tuple(EXAMPLES.values()), configure, run, has_tasks=True)
