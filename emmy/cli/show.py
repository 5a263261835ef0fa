"""`emmy show`: an op, a worked plan or a set of ops, level by level."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from emmy.cli.verb import Verb, add_gpu, add_home, add_threads, folder, measured_where
from emmy.errors import UsageError
from emmy.report import Screen, dispatch_text, paint, show_ranges

if TYPE_CHECKING:
    from emmy.levels import Level, Subject
    from emmy.search.ranges import RangeWinner
    from emmy.workloads import AnyCase


def configure(parser: ArgumentParser) -> None:
    parser.add_argument(
        "op",
        help="an op, plan:NAME (pingpong, attention, norm_linear, splitk, cpu_packed, all), or a set: @gemma4-12b, "
        "@config:PATH[:widths=1,8,1..64][:tp=2][:dtype=f16][:only=qkv*]",
    )
    parser.add_argument(
        "schedule", nargs="?", help="moves in one quoted word (default: the stored winner, else the predicted one)"
    )
    parser.add_argument("--schedule", dest="named", metavar="S", help="the same as an option, wherever it stands")
    add_gpu(parser)
    add_threads(parser)
    parser.add_argument(
        "--ir",
        metavar="LEVEL",
        help="op, loop, tile, steps, kernel, source, static, asm, or all; several with commas (default: all; of an op "
        "that a table of ranges serves, the table)",
    )
    parser.add_argument("--dump", type=folder, metavar="DIR", help="write each level to a numbered file instead")
    add_home(parser)


def run(args: Namespace, screen: Screen) -> int:
    if args.named is not None:
        if args.schedule is not None:
            raise UsageError(f"two schedules are named, {args.schedule!r} and --schedule {args.named!r}: leave one out")
        args.schedule = args.named
    if args.op.startswith("@"):
        return _list(args.op, screen)
    from emmy import levels

    wanted = levels.level_names(args.ir or "all")
    if args.op.startswith("plan:"):
        if args.schedule is not None:
            raise UsageError(
                "a worked plan has its own schedule; to try another, name an op: emmy show matmul:256x64x160:f16 '...'"
            )
        name = args.op.removeprefix("plan:")
        subjects = levels.examples() if name == "all" else (levels.example(name),)
    else:
        from emmy import api

        where = {"gpu": args.gpu, "threads": args.threads, "home": args.home}
        ranges = api.table(args.op, args.schedule, **where)
        if ranges and args.ir is None and args.dump is None:
            return _table(ranges, args, screen)
        subjects = api.subjects(args.op, args.schedule, **where)
    failed = False
    for s in subjects:
        shown = levels.describe(s, wanted)
        failed |= len(shown) == 1 and shown[0].missing
        if s.origin == "predicted":  # said even where stdout holds a text and nothing else
            screen.say(f"note: {s.title} on {s.target.name}: {s.note}")
        if args.dump:
            _dump(args.dump / s.title.removeprefix("plan:") if len(subjects) > 1 else args.dump, shown, screen)
        else:
            _print(s, shown, screen, alone=len(subjects) == 1)
        for level in shown:
            screen.record(
                "level",
                {
                    "subject": s.title,
                    "target": s.target.name,
                    "schedule": s.schedule,
                    "origin": s.origin,
                    "note": s.note,
                    "level": level.name,
                    "text": level.text,
                    "missing": level.missing,
                },
            )
    return int(failed)


def _table(ranges: tuple[RangeWinner, ...], args: Namespace, screen: Screen) -> int:
    """The ranges, and the table as the text that other commands take: read back first, so that what is shown can be run."""
    from emmy import api

    api.table(args.op, dispatch_text(ranges), gpu=args.gpu, threads=args.threads, home=args.home)
    show_ranges(screen, ranges)
    screen.show(f"\ntable: {dispatch_text(ranges)}")
    where = measured_where(args.gpu, args.threads)
    given = f" --schedule '{ranges[-1].range.schedule}'" if args.schedule is not None else ""
    screen.say(f"levels of one range: emmy show {quote(ranges[-1].op)} {where}{given}; of all: --ir LEVEL")
    return 0


def _print(s: Subject, shown: tuple[Level, ...], screen: Screen, *, alone: bool) -> None:
    if len(shown) == 1 and alone:  # for a pipe: the text and nothing else
        if shown[0].missing:
            screen.say(f"{s.title} on {s.target.name}: {shown[0].name} is {shown[0].text}")
        else:
            screen.show(shown[0].text)
        return
    screen.show(paint(f"{s.title} on {s.target.name}", "bold", screen.colour) + (f": {s.note}" if s.note else ""))
    for level in shown:
        screen.show(f"\n{paint(f'== {level.name} ==', 'bold', screen.colour)} {level.heading}\n")
        screen.show(level.text)
    screen.show("")


def _dump(folder: Path, shown: tuple[Level, ...], screen: Screen) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for level in shown:
        (folder / level.file_name).write_text(level.text + "\n", encoding="utf-8")
    screen.say(f"wrote {len(shown)} files to {folder}")


def _list(name: str, screen: Screen) -> int:
    from emmy.workloads import OPS, load

    if name in OPS:
        screen.rows("case", ({"op": text} for text in OPS[name]))
        return 0
    cases = load(name)
    screen.rows("case", (_case(c) for c in cases))
    unnamed = sum(c.op_text() is None for c in cases)
    screen.say(
        f"{len(cases)} cases" + (f", {unnamed} of them (-) of a kind that has no op text yet" if unnamed else "")
    )
    return 0


def _case(c: AnyCase) -> dict[str, object]:
    """A case as a row; one of a whole model's also says how often a step runs it, and instead of what."""
    from emmy.workloads import DecoderCase

    out: dict[str, object] = {"case": c.id, "kind": c.kind, "op": c.op_text()}
    if not isinstance(c, DecoderCase):
        return out
    return {"case": c.id, "part": c.part, "form": c.form or "one", "count": c.count, "kind": c.kind, "op": c.op_text()}


VERB = Verb(
    "show",
    "print a computation at every level, down to machine code",
    (
        "show matmul:512x1024x3840:f32",
        "show matmul:512x1024x3840:f32 --ir source",
        "show matmul:64x64x64:f32 'k0/split(k,serial,32) k0.C/atom(fma,4,16,1,8)' --ir tile,kernel",
        "show plan:pingpong",
        "show matmul:512x1024x3840:f16 --gpu h200 --dump levels/",
        "show matmul:512x4096x3840:f16 --gpu rtx5090 --ir source",
        "show @gemma4-12b",
        "show @config:models/llama/config.json:widths=1,8,512:tp=2",
    ),
    configure,
    run,
)
