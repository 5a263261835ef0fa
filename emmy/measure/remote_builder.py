"""Builds GPU candidates in processes of their own: Python's lock would make threads take turns, and a compiler may crash.

Used from as many threads as there are processes. A process that dies or hangs costs one candidate and is replaced.
"""

from __future__ import annotations

import json
import os
import queue
import selectors
import subprocess
import sys
import tempfile
import time
from typing import NoReturn

from emmy import config
from emmy.errors import CompileError
from emmy.ir.target import Target
from emmy.measure.build_main import read_answer
from emmy.measure.compile_pool import Built
from emmy.records import Candidate

LIMIT_S = 60.0  # for one candidate
MOST_CANDIDATES = 500  # until a process is replaced: what it remembers of schedules grows


class RemoteBuilder:
    """A `Builder` that hands each candidate to one of `workers` processes."""

    def __init__(self, target: Target, workers: int) -> None:
        self._idle: queue.SimpleQueue[_Compiler] = queue.SimpleQueue()
        self._all = [_Compiler(target.name) for _ in range(workers)]
        for compiler in self._all:
            self._idle.put(compiler)

    def __call__(self, candidate: Candidate) -> Built:
        """Raises CompileError, or PlanError for a refused schedule."""
        compiler = self._idle.get()
        try:
            return read_answer(compiler.ask(candidate))
        finally:
            self._idle.put(compiler)

    def close(self) -> None:
        """Ends the processes. Nobody may be building."""
        for compiler in self._all:
            compiler.stop()


class _Compiler:
    """One process, started when it is first asked."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._process: subprocess.Popen[bytes] | None = None
        self._printed = tempfile.TemporaryFile(prefix="emmy-compiler-")  # noqa: SIM115  # lives as long as this
        self._asked = 0

    def ask(self, candidate: Candidate) -> str:
        """The line it answers. Raises CompileError when it dies or takes too long."""
        if self._asked >= MOST_CANDIDATES:
            self.stop()
        process = self._process or self._start()
        assert process.stdin is not None
        self._asked += 1
        try:
            process.stdin.write(json.dumps({"op": candidate.op, "schedule": candidate.schedule}).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            self._fail("ended by itself")
        return self._read(process)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        self._asked = 0
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "emmy.measure.build_main", self._target, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            env=config.child_env(PYTHONPATH=os.pathsep.join(p for p in sys.path if p), OMP_NUM_THREADS="1"),
            start_new_session=True,
        )
        return self._process

    def _read(self, process: subprocess.Popen[bytes]) -> str:
        assert process.stdout is not None
        end_s, line = time.monotonic() + LIMIT_S, b""
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not ready.select(max(0.0, end_s - time.monotonic())):
                    self._fail(f"was not done after {LIMIT_S:g} s; this source is too large, try a smaller tile")
                data = os.read(process.stdout.fileno(), 1 << 16)
                if not data:
                    self._fail(f"ended by itself with exit code {process.wait()}")
                line += data
        return line.decode()

    def _fail(self, what: str) -> NoReturn:
        self.stop()
        self._printed.seek(0)
        lines = self._printed.read().decode("utf-8", "replace").splitlines()
        self._printed.truncate(0)
        raise CompileError(
            f"the compiler's process {what}" + (f"; the last it printed: {lines[-1][:300]}" if lines else "")
        )
