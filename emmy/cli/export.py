"""`emmy export`: a plan as source that needs no Emmy."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from emmy.cli.verb import Verb, add_gpu, add_home, add_threads, folder
from emmy.errors import UsageError
from emmy.report import Screen


def configure(parser: ArgumentParser) -> None:
    parser.add_argument(
        "op", help="an op, or a set (@gemma4-12b, @config:PATH): each of its ops in a folder of its own below --out"
    )
    add_gpu(parser)
    add_threads(parser)
    parser.add_argument(
        "--schedule", metavar="S", help="moves or a table's text (default: what is stored, else the default)"
    )
    parser.add_argument(
        "--out",
        type=folder,
        required=True,
        metavar="DIR",
        help="folder for the files, made or empty; an earlier export of the same name is replaced",
    )
    parser.add_argument("--name", metavar="N", help="of the function (default: made of the op's text)")
    parser.add_argument("--data", action="store_true", help="also write inputs and answers for the main that checks")
    add_home(parser)


def run(args: Namespace, screen: Screen) -> int:
    from emmy import api
    from emmy.codegen.export import c_name

    ops = api.expand(args.op)
    if len(ops) > 1 and (args.name is not None or args.schedule is not None):
        raise UsageError(f"{args.op} holds {len(ops)} ops; --name and --schedule are of one op")
    for op in ops:
        out = args.out if len(ops) == 1 else args.out / c_name(op.key)
        where = {"gpu": args.gpu, "threads": args.threads, "home": args.home}
        made = api.export(op, args.schedule, out=out, name=args.name, data=args.data, **where)
        screen.record("export", {"op": op.key, "target": args.gpu, "folder": out, "function": made.name, "source": made.source,
                                 "compile": made.compiled_with, "link": made.linked_with})  # fmt: skip
        screen.show(f"cd {out}\n{made.compiled_with}\n{made.linked_with}")
        screen.say(f"{op} on {args.gpu}: {made.source.name}, {made.header.name}, {made.check.name}, README.md in {out}")
    return 0


VERB = Verb(
    "export",
    "write a plan as CUDA or C source that needs no Emmy",
    (
        "export matmul:512x4096x3840:f16:nk --gpu h200 --out q_proj/",
        "export 'matmul:m(1..64)x4096x3840:f16:nk' --gpu rtx5090 --out q_proj/ --name q_proj --data",
        "export matmul:512x1024x3840:f32 --out linear/ --data",
    ),
    configure,
    run,
)
