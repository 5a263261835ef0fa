"""`emmy cache`: what compiled kernels and reference answers occupy, and removing them."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from emmy.cli.verb import Verb
from emmy.report import Screen


def configure(parser: ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        default="info",
        choices=("info", "clean"),
        help="info: sizes (default); clean: remove all of it (it is made again)",
    )


def run(args: Namespace, screen: Screen) -> int:
    from emmy import config

    cache = config.cache_dir()
    # Locks stay: a file that is removed while it is held would let a second tuner in.
    folders = sorted(p for p in cache.iterdir() if p.is_dir() and p.name != "locks") if cache.is_dir() else []
    sizes = {p.name: _size(p) for p in folders}
    if args.what == "clean":
        import shutil

        for p in folders:
            shutil.rmtree(p, ignore_errors=True)
    screen.rows(
        "cache",
        ({"folder": cache / name, "mib": n / 2**20} for name, n in sizes.items()),
        {"folder": "folder", "mib": "MiB"},
    )
    screen.say(f"{cache}: {'removed' if args.what == 'clean' else 'holds'} {sum(sizes.values()) / 2**20:.1f} MiB")
    return 0


def _size(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


VERB = Verb("cache", "show or clear compiled kernels and answers", ("cache info", "cache clean"), configure, run)
