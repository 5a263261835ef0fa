"""Child processes that may be killed at any moment: a group of their own, a log, an end with ours. Knows not what they do."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from types import FrameType

from emmy import config
from emmy.errors import ServingError

FIRST_LINES, TAIL_LINES, LOOK_BYTES = 4, 25, 1 << 20
_ERROR = re.compile(r"(?:^|\s)(?:\w+\.)*\w*(?:Error|Exception)\b: ")
GRACE_S = 20.0  # what vLLM gets to end its workers
POLL_S = 0.25
DYING_S = 0.5  # a process that closed its connections because it ends
# Replaced by the command it is given; the request to end it with its parent stays in force (prctl(2), PR_SET_PDEATHSIG).
_UNTIL_PARENT_ENDS = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(143)
os.execvp(sys.argv[2], sys.argv[2:])
"""


@dataclass(slots=True)
class Child:
    """A process that was started here, and the file that holds all it says."""

    process: subprocess.Popen[bytes]
    log: Path
    what: str  # in errors: "the server of lane emmy"

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def has_died(self) -> bool:
        """Whether it has ended; who lost its connection hears of that a moment before the system says so."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(DYING_S)
        return self.code is not None

    def tail(self) -> str:
        """The end of its log, for an error's message; before it the first error in it, which vLLM's own ends seldom show."""
        with contextlib.suppress(OSError), self.log.open("rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - LOOK_BYTES))
            lines = f.read().decode(errors="replace").splitlines()
            at = next((i for i, line in enumerate(lines[:-TAIL_LINES]) if _ERROR.search(line)), None)
            first = [] if at is None else [*lines[at:-TAIL_LINES][:FIRST_LINES], "[...]"]
            return "\n".join([*first, *lines[-TAIL_LINES:]])
        return ""

    def died(self, doing: str) -> ServingError:
        return ServingError(
            f"{self.what} ended with code {self.code} while {doing}. The end of {self.log}:\n{self.tail()}"
        )

    def wait(self, limit_s: float) -> int:
        """Its exit code. Raises ServingError when it runs longer than that."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise ServingError(
                f"{self.what} did not end within {limit_s:.0f} s. The end of {self.log}:\n{self.tail()}"
            ) from None

    def stop(self) -> None:
        """Ends it and every process it started: politely, then not, at once where Ctrl-C comes meanwhile."""
        try:
            if self.code is None:
                self.process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(GRACE_S)
        finally:
            with _uninterrupted():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)  # it leads its own group; stragglers go too
                self.process.wait()


@contextmanager
def running(
    command: Sequence[str],
    log: Path,
    what: str,
    environment: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: int | None = None,
) -> Iterator[Child]:
    """The command as a child until the block is left, however that happens; SIGTERM to us counts as Ctrl-C meanwhile.

    stdout: instead of the log, where what it says on stderr goes all the same
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out, _terminated_like_interrupted():
        child = None
        try:
            with _uninterrupted():  # else it could have been started, and nobody know of it
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _UNTIL_PARENT_ENDS, str(os.getpid()), *command],
                    stdin=stdin,
                    stdout=out if stdout is None else stdout,
                    stderr=out,
                    start_new_session=True,
                    env=config.child_env(**(environment or {})),
                )
                child = Child(process, log, what)
            yield child
        finally:
            if child is not None:
                child.stop()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """SIGINT and SIGTERM that come within count when the block is left."""
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    try:
        before = {n: signal.signal(n, lambda number, frame: came.append(number)) for n in numbers}
    except ValueError:  # not the main thread, which alone is interrupted
        yield
        return
    try:
        yield
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
        for number in came[:1]:
            signal.raise_signal(number)


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread: whoever runs that one decides
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def kept_when_it_fails(prefix: str) -> Iterator[Path]:
    """A temporary folder. It stays after a ServingError, which names logs in it; else it is deleted."""
    folder, keep = Path(tempfile.mkdtemp(prefix=prefix)), False
    try:
        yield folder
    except ServingError:
        keep = True
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def is_free(port: int) -> bool:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def is_ready(child: Child, url: str, took_s: float, limit_s: float) -> bool:
    """Whether the server answers GET url/health with 200. Raises ServingError when it has ended, or took longer than that."""
    if took_s >= limit_s:
        raise ServingError(f"{child.what} was not ready after {took_s:.0f} s. The end of {child.log}:\n{child.tail()}")
    if child.code is not None:
        raise child.died("starting")
    return _healthy(url)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, HTTPException):  # it does not listen yet, or what listens speaks otherwise
        return False
