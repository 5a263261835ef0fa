"""Candidates to binaries, several at once, while others are measured. Knows the code generator, no devices.

What cannot be built is a value with the status its row will have; nothing is raised for a bad candidate.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from emmy.codegen import gcc
from emmy.codegen.build import source
from emmy.errors import CompileError, PlanError, UsageError
from emmy.hostcc import CompilerKilled
from emmy.ir.ops import parse_op
from emmy.ir.ops.op import Accumulate
from emmy.ir.target import Target
from emmy.measure.measurer import Ready, ignore
from emmy.records import Candidate, Status

NICENESS = 10  # compilers give way to the kernel that is being measured
MOST_DIAGNOSTICS = 1500  # characters of a compiler's output that a row keeps


@dataclass(frozen=True, slots=True)
class Built:
    """A candidate's binary. `digest` is the source's; `static` is what the compiler tells of the result.

    accumulate: how its sums are kept, which decides how far off its answers may be
    """

    library: Path
    digest: str
    static: Mapping[str, float] = field(default_factory=dict)
    accumulate: Accumulate = "f32"


@dataclass(frozen=True, slots=True)
class NotBuilt:
    """Why there is none: "constraints" when the schedule is refused, "compile" when the compiler fails.

    "device_lost" when something killed the compiler: the candidate is not known to be guilty.
    """

    status: Status
    message: str


Builder = Callable[[Candidate], Built]  # raises CompileError, or PlanError or UsageError for a refused schedule


def builder(target: Target) -> Builder:
    """Builds candidates for `target` with Emmy's code generator."""

    def build(candidate: Candidate) -> Built:
        unit = source(parse_op(candidate.op), candidate.schedule, target)
        library = gcc.build(unit, target)
        return Built(library.path, unit.digest, library.static)

    return build


@dataclass(frozen=True, slots=True)
class Compiled:
    """What came of a candidate, and the seconds it took."""

    candidate: Candidate
    result: Built | NotBuilt
    compile_s: float


class CompilePool:
    """Threads that each run one compiler at a time, at low priority. `on_close`: called when all have ended."""

    def __init__(self, build: Builder, workers: int, on_close: Callable[[], None] = lambda: None) -> None:
        self._build, self._on_close = build, on_close
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="emmy-compile", initializer=_give_way)
        self._ahead: dict[Candidate, Future[Compiled]] = {}

    def begin(self, candidates: Sequence[Candidate], ready: Ready = ignore) -> None:
        """Compiles these from now on, for a later `compile`, which takes each once. `ready`: told of each that is done."""
        for candidate in candidates:
            future = self._ahead.get(candidate)
            if future is None:
                future = self._ahead[candidate] = self._pool.submit(self._one, candidate)
            future.add_done_callback(lambda done, c=candidate: ready(c))  # type: ignore[misc]

    def compile(self, candidates: Sequence[Candidate]) -> Iterator[Compiled]:
        """Results in the candidates' order, as they come. Leaving the iterator early drops what has not begun."""
        futures = [self._taken(c) or self._pool.submit(self._one, c) for c in candidates]
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()

    def _taken(self, candidate: Candidate) -> Future[Compiled] | None:
        try:
            return self._ahead.pop(candidate)
        except KeyError:
            return None

    def close(self) -> None:
        """Waits for the compilers that run and drops what has not begun."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._on_close()

    def _one(self, candidate: Candidate) -> Compiled:
        return compiled(self._build, candidate)


def compiled(build: Builder, candidate: Candidate) -> Compiled:
    """What comes of the candidate."""
    begin_s = time.perf_counter()
    try:
        result: Built | NotBuilt = build(candidate)
    except CompilerKilled as e:
        result = NotBuilt("device_lost", str(e)[:MOST_DIAGNOSTICS])
    except CompileError as e:
        result = NotBuilt("compile", str(e)[:MOST_DIAGNOSTICS])
    except (PlanError, UsageError) as e:  # IllegalMove is a PlanError
        result = NotBuilt("constraints", str(e)[:MOST_DIAGNOSTICS])
    return Compiled(candidate, result, time.perf_counter() - begin_s)


def _give_way() -> None:
    """Lowers the priority of this thread alone (Linux counts it by thread), which the compilers it starts inherit."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
