"""The command `emmy`: the list of verbs, and the edge where errors become sentences and exit codes."""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence

from emmy import __version__
from emmy.cli import (
    bench,
    cache,
    data,
    deploy,
    doctor,
    evaluate,
    explain,
    export,
    fleet,
    pack,
    serve,
    show,
    train,
    tune,
    verify,
)
from emmy.cli.verb import Verb, VerbParser, add_output
from emmy.errors import EmmyError
from emmy.report import Screen

VERBS: tuple[Verb, ...] = (
    tune.VERB,
    show.VERB,
    bench.VERB,
    verify.VERB,
    explain.VERB,
    export.VERB,
    pack.VERB,
    serve.VERB,
    deploy.VERB,
    fleet.VERB,
    train.VERB,
    evaluate.VERB,
    data.VERB,
    cache.VERB,
    doctor.VERB,
)
INTERRUPTED = 130
_BY_CTRL_C = "Query interrupted"  # what DuckDB makes of a KeyboardInterrupt within a query: a RuntimeError
EXIT_CODES = "exit codes: 0 ok, 1 failed, 2 usage, 3 no such device, 4 wrong answer found, 130 interrupted"
# Packages of the extras, by the name they are imported under.
EXTRAS = {
    "duckdb": "tune", "kernel_tuner": "eval", "lightgbm": "tune", "matplotlib": "eval", "optuna": "tune",
    "prometheus_client": "fleet", "ray": "fleet", "rich": "tune",
    "sklearn": "tune", "torch": "torch",
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of the command line `argv`; everything it has to say is said."""
    try:
        args = parser().parse_args(argv)
    except SystemExit as e:  # argparse has printed help (0) or what is wrong (2)
        return e.code if isinstance(e.code, int) else 2
    _open_missing_streams()
    screen = Screen(args.json)
    logging.basicConfig(level=logging.INFO if args.verbose else logging.ERROR, format="%(name)s: %(message)s")
    try:
        return _run(args, screen)
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(args: Namespace, screen: Screen) -> int:
    verb: Verb = args.verb
    try:
        return verb.run(args, screen)
    except EmmyError as e:
        return screen.fail(e)
    except KeyboardInterrupt:
        return _interrupted(screen)
    except BrokenPipeError:
        raise
    except Exception as e:  # noqa: BLE001  # the edge: a user gets a sentence, `--verbose` the trace
        if str(e) == _BY_CTRL_C:
            return _interrupted(screen)
        if args.verbose:
            traceback.print_exc()
        return screen.fail(EmmyError(_sentence(e, verb)))


def _interrupted(screen: Screen) -> int:
    screen.say("interrupted; everything that was measured is kept")
    return INTERRUPTED


def _open_missing_streams() -> None:
    """Gives a process that was started with stdout or stderr closed somewhere to write to."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  # for as long as the process lives
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def _sentence(error: Exception, verb: Verb) -> str:
    """What to tell a user of an error that is not Emmy's own."""
    if isinstance(error, OSError) and error.strerror:  # a full disk, a path that cannot be written
        where = f"{error.filename}: " if error.filename is not None else ""
        full = "Free space, or name" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Name"
        return f"{where}{error.strerror}. {full} a place that can be written: the option it came from, --home, EMMY_HOME or EMMY_CACHE."
    if isinstance(error, MemoryError):
        return f"`emmy {verb.name}` got no more memory. Ask for less at once, or end what else takes memory here."
    if isinstance(error, ModuleNotFoundError) and (extra := EXTRAS.get((error.name or "").partition(".")[0])):
        return f"`emmy {verb.name}` needs the package {error.name}. Install it: pip install 'emmy[{extra}]'"
    return f"a fault in Emmy: {type(error).__name__}: {error}. `--verbose` shows where; please report it."


class _Formatter(RawDescriptionHelpFormatter):
    """Descriptions as written, and room for the longest verb beside its summary."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)


def parser() -> ArgumentParser:
    """The whole command line."""
    top = ArgumentParser(
        "emmy",
        description="Searches for fast kernels: names a computation and a device, measures candidates, keeps the winner.",
        epilog="example:\n  emmy tune matmul:512x1024x3840:f32 --budget 60s\n\n"
        f"`emmy VERB --help` shows a verb's options and examples.\n{EXIT_CODES}",
        formatter_class=_Formatter,
    )
    top.add_argument("--version", action="version", version=f"emmy {__version__}")
    verbs = top.add_subparsers(title="verbs", metavar="VERB", required=True, parser_class=VerbParser)
    for verb in VERBS:
        shown = "\n".join(f"  emmy {e}" for e in verb.examples)
        sub = verbs.add_parser(
            verb.name,
            help=verb.summary,
            description=f"{verb.summary[0].upper()}{verb.summary[1:]}.",
            epilog=f"examples:\n{shown}\n\n{EXIT_CODES}",
            formatter_class=_Formatter,
        )
        sub.pass_on(verb.passes_on)
        verb.configure(sub)
        if not verb.has_tasks:
            add_output(sub)
        sub.set_defaults(verb=verb)
    return top
