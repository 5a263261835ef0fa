"""`emmy explain`: why the stored schedule of an op is as it is."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections import Counter
from shlex import quote
from typing import TYPE_CHECKING

from emmy.cli.verb import Verb, add_gpu, add_home, add_threads, measured_where
from emmy.report import Screen, number, percent, schedule_text

if TYPE_CHECKING:
    from emmy.explanation import Explanation

SHOWN_VARIANTS = 3
SHOWN_REFUSALS = 3  # of each move of the schedule


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("op", help="an op that was tuned, or a set: @gemma4-12b, @config:PATH")
    parser.add_argument("--schedule", metavar="S", help="explain this one, or this table, instead of what is stored")
    add_gpu(parser)
    add_threads(parser)
    add_home(parser)


def run(args: Namespace, screen: Screen) -> int:
    from emmy import api

    where = {"gpu": args.gpu, "threads": args.threads, "home": args.home}
    for op in api.expand(args.op):
        ranges = [(w.op, w.range.schedule) for w in api.table(op, args.schedule, **where)]
        for part, schedule in ranges or [(op.key, args.schedule)]:
            found = api.explain(part, schedule, **where)
            screen.show("\n".join(_lines(found)))
            screen.record("explanation", found)
    return 0


def _lines(e: Explanation) -> list[str]:
    from emmy.ir.target import load_target

    counts = ", ".join(f"{n} {status}" for status, n in e.statuses.items())
    threads = f", threads: {e.threads}" * load_target(e.target).is_cpu
    out = [f"{e.op} on {e.target}{threads}", f"  schedule  {schedule_text(e.schedule)}"]
    if e.predicted:
        out += [f"  {e.predicted}{f' ({counts})' if counts else ''}", f"  interval  {e.predicted.basis}"]
    elif e.time_us is None:
        out.append(
            f"  nothing right is measured {'of it ' * e.given}yet{f' ({counts})' if counts else ''}"
            f"{'. ' if e.given else ': this is the default. '}"
            f"Tune it: emmy tune {quote(e.op)} {measured_where(e.target, e.threads)}"
        )
    else:
        out.append(
            f"  time      {number(e.time_us)} us, the best of {e.schedules} schedules with a time (measurements: {counts})"
        )
    if e.speedup:
        verdict = "tie" if e.speedup.is_tie else "win" if e.speedup.median > 1 else "loss"
        out.append(
            f"  ratio     the stock kernel takes {number(e.speedup.median)} x as long "
            f"({number(e.speedup.low)}..{number(e.speedup.high)} over the rounds): {verdict}"
        )
    if e.default_factor:
        out.append(f"  default   the schedule that is measured first takes {e.default_factor:.2f} x as long")
    out.append(
        f"  roofline  bound by {'arithmetic' if e.roof.binding == 'compute' else 'memory'}: arithmetic takes at least "
        f"{number(e.roof.compute_us)} us, the data {number(e.roof.dram_us)} us"
        + (f"; {percent(e.roof_share)} of the bound is reached" if e.time_us else "")
    )
    if e.model:
        m = e.model
        out.append(
            f"  model     {m.digest} predicts {number(m.predicted_us)} us, give or take a factor of {m.factor:.2f}, "
            f"and ranks it {m.rank} of {m.of}"
        )
    out.append("\nwhat each move brings (time with the change, over the time without it)")
    explained: set[str] = set()
    for move in e.moves:
        out.append(f"  {move.move}")
        if move.meaning not in explained:  # once for each kind of move
            explained.add(move.meaning)
            out.append(f"      its kind, by an example: {move.meaning}")
        shown = [v for v in move.variants if v.change == "left out"]
        shown += [v for v in move.variants if v.change != "left out"][:SHOWN_VARIANTS]
        out += [f"      {v.factor:6.3f} x  {v.change}{'' if v.measured else '  (predicted)'}" for v in shown]
        if not shown:
            out.append("      nothing one change away was measured")
    out.append("\nwhat is refused, and why")
    shown_of: Counter[str] = Counter()
    for r in e.refusals:
        shown_of[r.instead_of] += 1
        if not r.instead_of or shown_of[r.instead_of] <= SHOWN_REFUSALS:
            out.append(f"  {r.move}\n      {r.reason}")
        elif shown_of[r.instead_of] == SHOWN_REFUSALS + 1:
            out.append(f"  and more instead of {r.instead_of}: --json lists them")
    return out


VERB = Verb(
    "explain",
    "say why the stored schedule of an op is as it is",
    ("explain matmul:512x1024x3840:f32", "explain matmul:512x1024x3840:f32 --threads 2 --json"),
    configure,
    run,
)
