"""Files that several processes make and read at once: a lock to make one thing once, and writes that are whole or absent."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from emmy.errors import FolderBusy


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock that other processes and threads respect. The file stays: removing it would let two hold the lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Holds a folder of results, which is made, against whoever wants it so too; lets go however the process ends.

    Raises FolderBusy: rows that two write at once would be lost, and measured twice.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderBusy(
                f"{folder}: another command writes its results there. Let it end, or name another folder"
            ) from None
        yield


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A name in the same folder to write to; on leaving without an exception, the file takes the place of `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{secrets.token_hex(8)}{path.suffix}")
    temporary.touch(exist_ok=False)  # as readable as any file that the user makes, which mkstemp's are not
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Adds lines, without their ends, to a file; they are on disk when this returns."""
    with path.open("a", encoding="utf-8") as out:
        out.write("".join(f"{line}\n" for line in lines))
        out.flush()
        os.fsync(out.fileno())


def whole_lines(path: Path) -> list[str]:
    """The lines of a file that were written to their end: what a kill tore is left out. [] where there is no file."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return text.split("\n")[:-1]
