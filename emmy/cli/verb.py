"""What a verb is, and the options that many verbs share. Imports nothing heavy: `emmy --help` loads every verb."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    passes_on: bool = False  # options it does not know are another program's, and come to `run` as `args.rest`


class VerbParser(ArgumentParser):
    """The options of a verb; or those of a task, where the first word is the name of one instead of an op."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # as argparse makes them
        super().__init__(*args, **kwargs)
        self.tasks: dict[str, ArgumentParser] = {}
        self.passes_on = False

    def pass_on(self, passes_on: bool = True) -> None:
        """Leaves options that it does not know, nor by the beginning of their names, in `rest`."""
        self.passes_on, self.allow_abbrev = passes_on, not passes_on

    def add_task(self, name: str, run: Callable[..., int], summary: str, example: str) -> VerbParser:
        """The parser of a task, which has the options of every verb."""
        epilog = f"example:\n  emmy {example}"
        said = f"{summary[0].upper()}{summary[1:]}."
        sub = VerbParser(f"{self.prog} {name}", description=said, epilog=epilog, formatter_class=self.formatter_class)
        sub.set_defaults(task=run)
        add_output(sub)
        self.tasks[name] = sub
        return sub

    def parse_known_args(  # type: ignore[override]  # one of its overloads
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None
    ) -> tuple[Namespace, list[str]]:
        if args and args[0] in self.tasks:
            found, rest = self.tasks[args[0]].parse_known_args(args[1:], namespace)
            return Namespace(**{**vars(found), "verb": self.get_default("verb")}), rest
        found, rest = super().parse_known_args(args, namespace)
        if self.passes_on:
            found.rest, rest = rest, []
        return found, rest

    def format_help(self) -> str:
        listed = "".join(f"  {name:14}{sub.description}\n" for name, sub in self.tasks.items())
        return super().format_help() + (
            f"\ntasks, in the place of OP ({self.prog} TASK --help):\n{listed}" if listed else ""
        )


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
    return _below_folders(Path(text), Path(text))


def file(text: str) -> Path:
    """The name of a file to write: refused before any work is done where a folder has that name, or a file that of a folder."""
    if not text:
        raise ArgumentTypeError("the file's name is empty")
    path = _below_folders(Path(text), Path(text).parent)
    if path.is_dir():
        raise ArgumentTypeError(f"{text} is a folder: name a file in it")
    return path


def _below_folders(path: Path, last: Path) -> Path:
    try:
        path.exists()
        str(path).encode()
        there = next((p for p in (last, *last.parents) if p.exists()), None)
    except OSError as e:  # a name that is too long, a folder that may not be looked into
        raise ArgumentTypeError(f"{str(path)[:120]}: {e.strerror}") from None
    except UnicodeEncodeError:
        raise ArgumentTypeError(f"{str(path)!a} is no UTF-8, which DuckDB needs of a name") from None
    if there is not None and not there.is_dir():
        raise ArgumentTypeError(f"{there} is a file: name a folder")
    return path


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


def seconds(text: str) -> float:
    """A number of seconds, 0 or more, endless ones included; argparse shows the ValueError as a usage error."""
    found = float(text)
    if not found >= 0:  # nor "nan"
        raise ValueError(text)
    return found


def count(text: str) -> int:
    """A whole number, 0 or above; argparse shows the ValueError as a usage error."""
    n = int(text)
    if n < 0:
        raise ValueError(text)
    return n


def measured_where(gpu: str, threads: int) -> str:
    """The options with which a printed command speaks of the same target again."""
    return f"--threads {threads}" if gpu == "cpu" else f"--gpu {gpu}"
