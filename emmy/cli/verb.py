"""What a verb is, and the options that many verbs share. Imports nothing heavy: `emmy --help` loads every verb."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from emmy.report import Screen

AddTask = Callable[[str, Callable[..., int], str], ArgumentParser]


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb. `run` gets the parsed options and the screen, and returns the exit code; errors it raises are rendered."""

    name: str
    summary: str
    examples: tuple[str, ...]
    configure: Callable[[ArgumentParser], None]
    run: Callable[[Namespace, Screen], int]
    has_tasks: bool = False  # its options are those of the tasks below it


def add_output(parser: ArgumentParser) -> None:
    """The options of every verb."""
    parser.add_argument("--json", action="store_true", help='data as JSON on stdout: one object a line, "v": 1')
    parser.add_argument("--verbose", action="store_true", help="say more on stderr, and where a fault happened")


def add_tasks(parser: ArgumentParser, examples: Mapping[str, str]) -> AddTask:
    """What adds a task below a verb: name, function, summary -> its parser, which has the options of every verb."""
    tasks = parser.add_subparsers(title="tasks", metavar="TASK", required=True)

    def add(name: str, run: Callable[..., int], summary: str) -> ArgumentParser:
        sub = tasks.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=f"example:\n  emmy {examples[name]}",
            formatter_class=parser.formatter_class,
        )
        sub.set_defaults(task=run)
        add_output(sub)
        return sub

    return add


def folder(text: str) -> Path:
    """A folder's name; an empty one, such as that of a variable that is not set, would mean the folder one is in."""
    if not text:
        raise ArgumentTypeError("the folder's name is empty; '.' is the one you are in")
    return Path(text)


def add_home(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--home", type=folder, metavar="DIR", help="folder of measurements (default: $EMMY_HOME, see docs)"
    )


def add_gpu(parser: ArgumentParser) -> None:
    parser.add_argument("--gpu", default="cpu", metavar="NAME", help="target: cpu, h200, rtx4090, ... (default: cpu)")


def add_threads(parser: ArgumentParser) -> None:
    parser.add_argument("--threads", type=positive, default=1, metavar="N", help="CPU threads (default: 1)")


def add_seed(parser: ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of every random choice (default: 0)")


def positive(text: str) -> int:
    """A whole number above 0; argparse shows the ValueError as a usage error."""
    n = int(text)
    if n < 1:
        raise ValueError(text)
    return n


def measured_where(gpu: str, threads: int) -> str:
    """The options with which a printed command speaks of the same target again."""
    return f"--threads {threads}" if gpu == "cpu" else f"--gpu {gpu}"
