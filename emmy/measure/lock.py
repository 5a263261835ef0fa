"""One tuner a device: a lock file that says who holds it. Knows nothing of what the holder does.

The lock is an flock, which the system releases when its holder dies however it dies, so a stale lock cannot exist; what
the file *says* is only for people and may be old.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from emmy.errors import DeviceBusy, EmmyError

_LEFT_S = 2.0  # at most, on a busy machine, until what a killed holder was starting lets go


class LockUnavailable(EmmyError):
    """The folder of locks cannot be written. The device may be free, and nobody can be sure of it."""


class DeviceLock:
    """Held from `acquire` (or entering) to `release`. `name` tells devices apart: "cpu", a GPU's hashed uuid."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{name}.lock"
        self._fd = -1

    @property
    def held(self) -> bool:
        return self._fd >= 0

    def acquire(self, *, wait: bool = False) -> None:
        """Takes the lock; with `wait`, when its holder lets go, otherwise it raises DeviceBusy naming the holder.

        Raises LockUnavailable when the folder cannot be written.
        """
        assert not self.held
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Not inherited: a worker that outlived us must not keep the device locked.
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as e:
            raise LockUnavailable(
                f"{self.path.parent}: the lock {self.path.name} cannot be opened there: {e.strerror}. "
                "Make the folder writable, or name another cache with EMMY_CACHE."
            ) from e
        try:
            if wait:
                fcntl.flock(fd, fcntl.LOCK_EX)
            elif not _taken(fd):
                raise DeviceBusy(
                    f"{self.path.stem} is being measured by {_holder(fd)}; two at once would spoil both one's times. "
                    "Let it end, or queue behind it with --wait."
                )
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps({"pid": os.getpid(), "command": " ".join(sys.argv)[:1000]}).encode(), 0)

    def release(self) -> None:
        """Lets the device go. The file stays: removing it would let two processes lock two files of one name."""
        if self.held:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


def _taken(fd: int) -> bool:
    """Whether the lock is taken now. Of a holder that was killed while it started a process that one's copy is waited for,
    which lasts until it runs a program of its own."""
    deadline = time.monotonic() + _LEFT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            said = _said(fd)
            if said is None or _lives(said[0]) or time.monotonic() > deadline:
                return False
            time.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def _holder(fd: int) -> str:
    said = _said(fd)
    return f"process {said[0]} ({said[1]})" if said else "another process"


def _said(fd: int) -> tuple[int, str] | None:
    """The holder's number and command, as the file has them."""
    try:
        said = json.loads(os.pread(fd, 4096, 0))
        return int(said["pid"]), str(said["command"])
    except (ValueError, KeyError, TypeError):
        return None
