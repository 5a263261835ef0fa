"""The parent's end of the worker: starts it, asks it, and replaces it after any fault. Knows no ops and no rows.

A fault is an answer: which library was at work, what it was doing, and a status. Nothing is ever tried again here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from emmy import config
from emmy.errors import NoSuchDevice
from emmy.measure.protocol import FAULTED, LOST, Job, Progress, Ready, Report, parse_answer
from emmy.measure.worker_main import Arguments
from emmy.records import Status

log = logging.getLogger("emmy.measure.worker")

START_LIMIT_S = 120.0
LOOK_S = 0.25  # how often the worker's progress is looked at; a sleeping parent does not disturb a measurement
MOST_UNREADABLE = 5  # one may fall into the middle of a write
KEPT_OUTPUT = 4096  # bytes of what kernels print that are kept, to be shown after a fault
MOST_ANSWER = 16 << 20

# Its thread starts the workers, and ends with this process: a worker dies with the thread that started it (`die_with_parent`),
# and who asks first may be the thread of a search that is over long before the others.
_STARTER = ThreadPoolExecutor(1, thread_name_prefix="emmy-starter")

_MEANING = {
    signal.SIGSEGV: "touched memory that is not its own",
    signal.SIGBUS: "touched memory that cannot be accessed",
    signal.SIGILL: "ran an instruction this processor does not have",
    signal.SIGFPE: "divided by zero",
    signal.SIGABRT: "gave up by itself",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """How the worker was lost. `index` is the library whose code ran; -1 when it was none of the job's, STOCK when stock's."""

    status: Status
    message: str
    index: int


class Worker:
    """A worker process that is there whenever it is asked; at most one exists at a time."""

    def __init__(self, target: str, threads: int, references: Path, environment: Mapping[str, str] = {}) -> None:
        """`environment`: variables that the process is given besides this one's."""
        self.target, self.threads, self.references, self.environment = target, threads, references, dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._requests = self._answers = self._output = -1
        self._progress: IO[bytes] | None = None
        self._printed = b""
        self._unreadable = 0  # looks at the progress in a row that showed no record
        self.n_started = 0

    @property
    def pid(self) -> int | None:
        """The process's id; None while there is none."""
        return self._process.pid if self._process else None

    def ask(self, job: Job) -> Report | Fault:
        """The report on the job, or what became of the worker. Raises NoSuchDevice when no worker can be started."""
        self._ensure()
        self._announce(Progress("starting the job", -1, time.monotonic() + START_LIMIT_S))
        try:
            if not self._send(job.to_json().encode()):
                return self._lost()
            answer = self._receive()
        except BaseException:  # Ctrl-C: an answer may still come, and must not be taken for the next job's
            self.stop()
            raise
        match answer:
            case Report(id=job.id, outcomes=outcomes) if len(outcomes) == len(job.libraries):
                return answer
            case Fault():
                return answer
            case _:
                return self._fault("runtime", "wrote on the channel between worker and tuner")

    def stop(self) -> None:
        """Ends the process, its children and everything it holds; does nothing when there is none."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # it leads its own group
        self._process.wait()
        for fd in (self._requests, self._answers, self._output):
            os.close(fd)
        if self._progress:
            self._progress.close()
        self._process = None

    def _ensure(self) -> None:
        """A live worker with nothing left to say. One that died or spoke while idle is replaced: no job is to blame."""
        if self._process is not None:
            with selectors.DefaultSelector() as idle:
                idle.register(self._answers, selectors.EVENT_READ)
                if self._process.poll() is None and not idle.select(0):
                    return
            log.warning("the worker died while idle; another is started")
            self.stop()
        self._start()
        answer = self._receive()
        if not isinstance(answer, Ready):
            said = answer.message if isinstance(answer, Fault) else self._tail()  # a fault has closed the pipes
            self.stop()
            raise NoSuchDevice(f"the measuring worker for {self.target} does not start: {said}. Try `emmy doctor`.")

    def _start(self) -> None:
        request_r, self._requests = os.pipe()
        self._answers, answer_w = os.pipe()
        self._output, output_w = os.pipe()
        self._progress = tempfile.TemporaryFile(prefix="emmy-progress-")  # noqa: SIM115  # closed by stop
        progress_fd = self._progress.fileno()
        args = Arguments(request_r, answer_w, progress_fd, os.getpid(), self.threads, self.target, str(self.references))
        self._printed = b""
        self._announce(Progress("starting", -1, time.monotonic() + START_LIMIT_S))
        count = str(self.threads)
        try:
            starting = _STARTER.submit(
                subprocess.Popen,
                [sys.executable, "-P", "-m", "emmy.measure.worker_main", *args.to_words()],
                stdin=subprocess.DEVNULL,
                stdout=output_w,
                stderr=output_w,
                pass_fds=(request_r, answer_w, progress_fd),
                start_new_session=True,
                env=config.child_env(
                    PYTHONPATH=os.pathsep.join(p for p in sys.path if p),
                    OMP_NUM_THREADS=count,
                    MKL_NUM_THREADS=count,
                    OPENBLAS_NUM_THREADS=count,
                    # A pool that spins at its barriers would eat the core of the next kernel in the round.
                    OMP_WAIT_POLICY="passive",
                    **self.environment,
                ),
            )
            try:
                self._process = starting.result()
            except BaseException:  # Ctrl-C: nobody would end it; or it could not be started, which is raised again
                starting.result().kill()
                raise
        except OSError as e:
            raise NoSuchDevice(f"the measuring worker cannot be started: {e.strerror}") from e
        finally:
            for fd in (request_r, answer_w, output_w):
                os.close(fd)
        self.n_started += 1

    def _send(self, data: bytes) -> bool:
        """Whether the worker took the request; it reads nothing when it is dead."""
        try:
            while data:
                data = data[os.write(self._requests, data) :]
        except BrokenPipeError:
            return False
        return True

    def _receive(self) -> Report | Ready | Fault | None:
        """The next line the worker answers, parsed; None when it is garbage."""
        line = b""
        with selectors.DefaultSelector() as ready:
            ready.register(self._answers, selectors.EVENT_READ)
            ready.register(self._output, selectors.EVENT_READ)
            while True:
                left_s = self._deadline_s() - time.monotonic()
                # A record read in the middle of a write is whole the next time; one that never is was written over.
                if self._unreadable > MOST_UNREADABLE or (left_s <= 0 and self._unreadable):
                    return self._fault("runtime", "wrote where the worker notes its progress")
                if left_s <= 0:
                    return self._hung()
                events = ready.select(min(left_s, LOOK_S))
                if not events and self._is_dead():  # a process that a kernel forked may hold the pipe open
                    return self._lost()
                for key, _ in events:
                    data = os.read(key.fd, 1 << 16)
                    if key.fd == self._output:
                        self._printed = (self._printed + data)[-KEPT_OUTPUT:]
                        if not data:
                            ready.unregister(self._output)
                        continue
                    line += data
                    if not data:
                        return self._lost()
                    if line.endswith(b"\n") or len(line) > MOST_ANSWER:
                        return parse_answer(line)

    def _is_dead(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def _state(self) -> Progress | None:
        assert self._progress is not None
        return Progress.from_bytes(os.pread(self._progress.fileno(), Progress.SIZE, 0))

    def _announce(self, progress: Progress) -> None:
        assert self._progress is not None
        os.pwrite(self._progress.fileno(), progress.to_bytes(), 0)
        self._last = progress

    def _deadline_s(self) -> float:
        """Until when the worker may take, by what it noted last that can be read."""
        state = self._state()
        self._unreadable = self._unreadable + 1 if state is None else 0
        self._last = state or self._last
        return self._last.deadline_s

    def _hung(self) -> Fault:
        return self._fault("timeout", "did not come back in the time allowed")

    def _lost(self) -> Fault:
        """The fault of a worker that closed its pipe: dead, or about to be."""
        assert self._process is not None
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return self._fault("runtime", "closed the channel between worker and tuner")
        if code in (FAULTED, LOST):
            return self._fault("runtime" if code == FAULTED else "device_lost", "the device gave up")
        if code == -signal.SIGKILL:
            return self._fault("device_lost", "the worker was killed from outside, or memory ran out")
        if code < 0:
            name = signal.Signals(-code).name
            return self._fault("runtime", f"{name}: {_MEANING.get(signal.Signals(-code), 'ended by this signal')}")
        return self._fault("runtime", f"ended the worker with exit code {code}")

    def _fault(self, status: Status, what: str) -> Fault:
        """Stops the worker and says what happened, while doing what, and what was printed last."""
        state = self._state() or self._last
        printed = self._tail()
        self.stop()
        message = f"{what}, while {state.phase}" + (f"; the last it printed: {printed}" if printed else "")
        log.info("worker lost: %s", message)
        return Fault(status, message, state.index)

    def _tail(self) -> str:
        """The last line that was printed, made harmless."""
        os.set_blocking(self._output, False)
        with contextlib.suppress(BlockingIOError):
            # Once, which is all that a pipe holds: a kernel that prints for ever would keep us here for ever.
            self._printed = (self._printed + os.read(self._output, 1 << 16))[-KEPT_OUTPUT:]
        lines = self._printed.decode("utf-8", "replace").strip().splitlines()
        return "".join(c for c in lines[-1] if c.isprintable())[:300] if lines else ""
