"""One tuner a device: a lock file that says who holds it. Knows nothing of what the holder does.

The lock is an flock, which the system releases when its holder dies however it dies, so a stale lock cannot exist; what
the file *says* is only for people and may be old.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from emmy.errors import DeviceBusy, EmmyError


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
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            holder = _holder(os.pread(fd, 4096, 0))
            os.close(fd)
            raise DeviceBusy(
                f"{self.path.stem} is being measured by {holder}; two at once would spoil both one's times. "
                "Let it end, or queue behind it with --wait."
            ) from None
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


def _holder(text: bytes) -> str:
    try:
        said = json.loads(text)
        return f"process {int(said['pid'])} ({said['command']})"
    except (ValueError, KeyError, TypeError):
        return "another process"
