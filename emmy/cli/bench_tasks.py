"""`emmy bench kernels`, `accum-error` and `report`: the chart of a set of cases, and what is read off it."""

from __future__ import annotations

import os
import signal
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from emmy.cli.verb import VerbParser, add_gpu, add_home, add_threads, count, file, folder, positive, seconds
from emmy.errors import UsageError
from emmy.report import Bar, Screen, counted, number, record_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from emmy.benchmark.results import LaneRow
    from emmy.benchmark.summary import CaseLanes

LANES = "eager,compile,max-autotune,emmy,emmy-hybrid"
INTERRUPTED, WRONG = 130, 4
NO_RATIO = (
    "no ratio yet: of {} none has a time of Emmy and one of torch of the same heat. `emmy bench kernels` measures them"
)
EXAMPLES = (
    "bench kernels @gemma4-12b --gpu h200 --seconds 420 --out chart/",
    "bench accum-error --gpu h200",
    "bench report chart/ --html chart.html --svg chart.svg",
)
TASKS = tuple(example.split()[1] for example in EXAMPLES)


def add(parser: VerbParser) -> None:
    sub = parser.add_task("kernels", kernels, "measure every case of a set with all lanes in turns", EXAMPLES[0])
    sub.add_argument("op", nargs="+", help="ops, or sets: @gemma4-12b, @gemma4-12b/q_proj*, @config:PATH")
    sub.add_argument(
        "--out",
        type=folder,
        required=True,
        metavar="DIR",
        help="folder of the results; what it holds is not measured again",
    )
    add_gpu(sub)
    add_threads(sub)
    sub.add_argument("--lanes", default=LANES, metavar="A,B", help=f"of {LANES} (default: all)")
    sub.add_argument(
        "--seconds", type=seconds, metavar="N", help="begin no case later than that (default: until all are done)"
    )
    sub.add_argument("--rounds", type=positive, default=7, metavar="N", help="samples of each lane (default: 7)")
    sub.add_argument(
        "--again", action="store_true", help="also what was measured with another schedule than is stored now"
    )
    sub.add_argument(
        "--compilers",
        type=count,
        metavar="N",
        help="processes that compile torch's kernels ahead; 0: none (default: one a core)",
    )
    sub.add_argument("--wait", action="store_true", help="queue behind whoever measures on the device")
    add_home(sub)
    sub = parser.add_task("accum-error", accum_error, "the error of sums in f32, hybrid and f16 by K", EXAMPLES[1])
    add_gpu(sub)
    sub.add_argument(
        "--k", type=positive, nargs="+", default=[], metavar="K", help="lengths of the sums, multiples of 128"
    )
    sub.add_argument(
        "--size", type=positive, default=0, metavar="N", help="rows and columns (default: 512; emulated 64)"
    )
    sub.add_argument(
        "--seeds", type=positive, default=0, metavar="N", help="draws of the operands (default: 3; emulated 1)"
    )
    sub.add_argument("--emulate", action="store_true", help="run the kernels' text on the emulator; no GPU is needed")
    sub = parser.add_task("report", report, "sum up results, and draw them", EXAMPLES[2])
    sub.add_argument("results", type=Path, help="the folder of `bench kernels`, or a file of one")
    sub.add_argument("--gpu", default="", metavar="NAME", help="only rows of this target")
    sub.add_argument("--html", type=file, metavar="FILE", help="write one page with everything, that needs no network")
    sub.add_argument("--svg", type=file, metavar="FILE", help="write the chart: bars a case, normalised to eager")
    add_home(sub)


def kernels(args: Namespace, screen: Screen) -> int:
    from emmy import api
    from emmy.benchmark.lanes import parse_lanes
    from emmy.benchmark.summary import case_lanes
    from emmy.search.tuner import Stop

    stop, bar = Stop(), Bar(screen)

    def ask(number: int, frame: object) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True
        bar.say("finishing the case in flight; Ctrl-C again stops at once")

    def told(what: str, done: int, of: int, rows: Sequence[LaneRow]) -> None:
        bar("compiling ahead" if not rows else "cases", done, of, what)
        for row in rows:
            screen.record("lane", row)

    before = signal.signal(signal.SIGINT, ask)
    try:
        with bar:
            results, left = api.bench_kernels(
                args.op,
                args.out,
                gpu=args.gpu,
                threads=args.threads,
                lanes=parse_lanes(args.lanes),
                seconds=args.seconds,
                rounds=args.rounds,
                again=args.again,
                compilers=len(os.sched_getaffinity(0)) if args.compilers is None else args.compilers,
                wait=args.wait,
                home=args.home,
                told=told,
                stop=stop,
            )
    finally:
        signal.signal(signal.SIGINT, before)
    cases = case_lanes(_of(args.gpu, results.rows, screen))
    _sum_up(cases, screen)
    if left:
        screen.say(f"{counted(left, 'case')} left: the same command goes on")
    if any(r.status == "correctness" for c in cases for r in c.lanes.values() if r.runs == "emmy"):
        return WRONG
    return INTERRUPTED if stop.asked else 0


def accum_error(args: Namespace, screen: Screen) -> int:
    from emmy.benchmark.accumulation import sum_errors
    from emmy.ir.target import load_target

    found = []
    for e in sum_errors(load_target(args.gpu), args.k, args.size, args.seeds, emulate=args.emulate):
        screen.say(f"K {e.k}, {e.sums}: relative L2 error {e.relative_l2:.3g}")
        found.append(e)
    columns = {"k": "K", "sums": "sums", "l2": "relative L2", "worst": "largest / mean magnitude", "where": "where"}
    told = ({**record_of(e), "l2": f"{e.relative_l2:.3g}", "worst": f"{e.largest:.3g}"} for e in found)
    screen.rows("sum_error", told, columns)
    return 0


def report(args: Namespace, screen: Screen) -> int:
    from emmy.benchmark.results import read
    from emmy.benchmark.summary import case_lanes

    rows = read(args.results)
    if args.gpu and args.gpu not in (there := sorted({r.target for r in rows})):
        raise UsageError(f"{args.results} holds no rows of {args.gpu!r}, only of {', '.join(there) or 'nothing'}")
    cases = case_lanes(_of(args.gpu, rows, screen))
    _sum_up(cases, screen)
    if args.svg:
        from emmy.benchmark.chart import chart_svg

        _write(args.svg, chart_svg(cases))
    if args.html:
        from emmy.benchmark.evidence import evidence
        from emmy.benchmark.page import page

        with Bar(screen) as bar:
            known = evidence(cases, args.home, bar)
        _write(args.html, page(cases, known))
    for path in (args.svg, args.html):
        if path:
            screen.say(f"written: {path}")
            screen.record("file", {"path": path})
    return 0


def _of(gpu: str, rows: Sequence[LaneRow], screen: Screen) -> Sequence[LaneRow]:
    """The rows of a target, or all; says when they are of several products, whose ratios no mean should mix."""
    rows = [r for r in rows if gpu in ("", r.target)]
    products = sorted({f"{r.product} ({r.target})" for r in rows})
    if len(products) > 1:
        screen.say(
            f"note: rows of {', '.join(products)}: a case counts where it was measured last; --gpu takes one target's"
        )
    return rows


def _write(path: Path, text: str) -> None:
    from emmy.codegen.files import appearing

    with appearing(path) as new:
        new.write_text(text, encoding="utf-8")


def _sum_up(cases: Sequence[CaseLanes], screen: Screen) -> None:
    """Ratios by kind and tier, the worst ten, and what failed."""
    from emmy.benchmark.summary import BEHIND, failures, groups, worst

    found = groups(cases)
    columns = {"lane": "lane", "rival": "against", "by": "by", "name": "", "cases": "cases", "mean": "geometric mean",
               "least": "least", "greatest": "greatest", "behind": f"below {BEHIND}"}  # fmt: skip
    screen.rows("group", map(record_of, found), columns)
    for lane, rival in dict.fromkeys((g.lane, g.rival) for g in found):
        screen.show(f"\nthe worst of {lane} against {rival}")
        lowest = (
            {"lane": lane, "rival": rival, "case": c.case, "kind": c.kind, "tier": c.tier, "ratio": ratio,
             "time_us": c.time_us(lane), "rival_us": r.time_us if (r := c.stands_for(rival)) else None,
             "origin": c.lanes[lane].origin, "schedule": c.lanes[lane].schedule}
            for c, ratio in worst(cases, lane, rival)
        )  # fmt: skip
        screen.rows("worst", lowest, {"case": "case", "kind": "kind", "tier": "tier", "ratio": "ratio", "time_us": "us",
                                      "rival_us": "rival us", "origin": "schedule is"})  # fmt: skip
    if not found:
        screen.say(NO_RATIO.format(counted(len(cases), "case")))
    for r in failures(cases):
        screen.say(f"{r.case}, {r.lane}: {r.status}: {number(r.time_us)} {r.message}")
