"""Carries out a job in the worker: load, check, time in turns, look at the answers once more. Knows no processes.

Of its device it uses the seam only, so a job on a GPU is this file too.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from statistics import median

from emmy.errors import EmmyError, UsageError
from emmy.ir.dtype import epsilon, size_bytes
from emmy.ir.ops import parse_op
from emmy.ir.ops.op import Accumulate, Op
from emmy.measure import timing
from emmy.measure.answers import Verdict
from emmy.measure.check import Checker, TooSlow, operands
from emmy.measure.device import Buffer, Device, Runnable
from emmy.measure.protocol import FAULTED, LOST, STOCK, Job, Outcome, Report, Rival
from emmy.measure.references import Case
from emmy.measure.timing import Participant

Announce = Callable[[str, int, float], None]  # phase, index of the library, seconds it may take

HOST_LIMIT_S = 120.0  # for what is not the candidate's code: inputs, references, comparing ...
HOST_FLOPS = 1e9  # ... besides a reference at no less than this rate
SUSTAINED = 2  # candidates of a race whose sustained times are taken
SLACK = 20.0  # times its estimate that a sample may take, on top of the limit of one run
# The stock kernel may round to the op's type after each step, so it may be off by a few roundings of what lies between
# inputs and outputs, numbers near 1.
STOCK_ERROR_NORM, STOCK_ROUNDINGS = 4.0, 8.0


class DeviceFault(EmmyError):
    """The device can no longer be used by this process. `exit_code` says whose fault it is (see protocol)."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(slots=True)
class Workbench:
    """Everything about one op that a worker keeps between candidates."""

    device: Device
    op: Op
    checker: Checker
    case: Case  # the inputs that timing runs on
    sets: list[dict[str, Buffer]] = field(default_factory=list)
    stocks: dict[str, tuple[str, Runnable, Verdict] | None] = field(default_factory=dict)  # by what was asked for

    @property
    def host_limit_s(self) -> float:
        return HOST_LIMIT_S + self.op.work().flops / HOST_FLOPS

    def timing_sets(self, participants: int) -> list[dict[str, Buffer]]:
        """Sets of operands to rotate over: the same numbers in different memory, outputs poisoned once."""
        d, forms = self.device, operands(self.op, self.case.sizes)
        set_bytes = sum(prod(shape) * size_bytes(dtype) for shape, dtype in forms.values())
        n = timing.set_count(d.cold_bytes, set_bytes, d.memory_bytes // 2, participants)
        while len(self.sets) < n:
            fresh = {name: d.plain(*form) for name, form in forms.items()}
            self.checker.answers.write(self.case, fresh)
            self.sets.append(fresh)
        return self.sets[:n]


class Jobs:
    """Carries out jobs one after another on one device. `announce` is told what is being done and for how long."""

    def __init__(self, device: Device, announce: Announce) -> None:
        self.device, self._announce = device, announce
        self._benches: dict[str, Workbench] = {}  # by op, the one used last at the end

    def run(self, job: Job) -> Report:
        """The report on the job. A fault of a candidate ends the process instead; the parent knows whose it was.

        Raises DeviceFault when the device reported it, rather than the system.
        """
        try:
            return self._run(job)
        except EmmyError as e:
            state = self.device.after(e)
            if state == "usable":
                raise
            raise DeviceFault(str(e), FAULTED if state == "faulted" else LOST) from e

    def _run(self, job: Job) -> Report:
        begin_s = time.process_time()
        bench = self._workbench(job)
        outcomes: dict[int, Outcome] = {}
        passed: dict[int, tuple[Runnable, Verdict]] = {}
        for index, library in enumerate(job.libraries):
            self._announce("loading", index, bench.host_limit_s)
            try:
                plan = self.device.load(library)
                announce = self._checking(bench, job, index)
                verdict = bench.checker.check(plan, announce, _sums(job, index), job.patience_s)
            except TooSlow as e:
                outcomes[index] = Outcome(
                    "timeout", f"one run took {e.run_s:.3g} s, allowed are {job.patience_s:.3g} s"
                )
                continue
            except EmmyError as e:  # it does not load, or takes other operands
                if self.device.after(e) != "usable":
                    raise
                outcomes[index] = Outcome("runtime", str(e))
                continue
            if verdict.wrong:
                outcomes[index] = Outcome("correctness", verdict.wrong, verdict.error_norm)
            else:
                passed[index] = (plan, verdict)
        named: dict[int, str] = {}  # of the rivals, which come after the libraries
        for place, asked in enumerate(job.rivals if passed or not job.libraries else ()):
            if (stock := self._stock(bench, place, asked)) is None:
                continue
            index = len(job.libraries) + place
            named[index], kernel, verdict = stock
            if verdict.wrong:
                outcomes[index] = Outcome("correctness", verdict.wrong, verdict.error_norm)
            else:
                passed[index] = kernel, verdict
        timed = self._time(bench, job, passed)
        outcomes |= timed.outcomes
        own = tuple(outcomes[i] for i in range(len(job.libraries)))
        return Report(
            job.id,
            own,
            rivals=tuple(Rival(job.rivals[i - len(job.libraries)], name, outcomes[i]) for i, name in named.items()),
            cpu_s=time.process_time() - begin_s,
            displaced=timed.displaced,
            switches=timed.switches,
            buffer_sets=timed.buffer_sets,
            circumstances=timed.circumstances,
        )

    def _workbench(self, job: Job) -> Workbench:
        bench = self._benches.pop(job.op, None)
        if bench is None:
            while len(self._benches) >= self.device.kept_ops:  # their memory first
                del self._benches[next(iter(self._benches))]
            op = parse_op(job.op)
            checker = Checker(self.device, self.device.answers(op), op)
            bench = Workbench(self.device, op, checker, Case("normal", 1, op.typical_sizes()))
        self._benches[job.op] = bench
        return bench

    def _checking(self, bench: Workbench, job: Job, index: int) -> Callable[[str, bool], None]:
        def announce(phase: str, is_candidate: bool) -> None:
            self._announce(phase, index, job.run_limit_s if is_candidate else bench.host_limit_s)

        return announce

    def _sampling(self, job: Job, index: int) -> Callable[[float], None]:
        def announce(expected_s: float) -> None:
            at_work = index if index < len(job.libraries) else -1
            self._announce("timing", at_work, job.run_limit_s + SLACK * expected_s)

        return announce

    def _stock(self, bench: Workbench, place: int, against: str) -> tuple[str, Runnable, Verdict] | None:
        """The stock kernel and what its answer is worth: a ratio to a kernel that computes something else is none."""
        if against not in bench.stocks:
            self._announce("loading the stock kernel", STOCK - place, bench.host_limit_s)
            found = self.device.stock(bench.op, against)
            self._announce("checking the stock kernel", STOCK - place, bench.host_limit_s)
            bench.stocks[against] = (*found, _try_stock(bench, found[1])) if found else None
        return bench.stocks[against]

    def _time(self, bench: Workbench, job: Job, passed: Mapping[int, tuple[Runnable, Verdict]]) -> _Timed:
        if not passed:
            return _Timed({}, 0.0, 0, 0, {})
        self._announce("preparing to time", -1, bench.host_limit_s)
        sets = bench.timing_sets(len(passed))
        sizes = bench.case.sizes
        participants = {
            index: Participant(
                tuple(plan.bind(buffers, sizes) for buffers in sets), self._sampling(job, index), verdict.run_ns
            )
            for index, (plan, verdict) in passed.items()
        }
        session = self.device.timing(tuple(participants.values()), thorough=job.thorough)
        before, wall_s, cpu_s = _switches(), time.perf_counter(), time.process_time()
        session.cold(job.samples, job.best_us)
        wall_s, cpu_s, switches = time.perf_counter() - wall_s, time.process_time() - cpu_s, _switches() - before
        circumstances = self.device.circumstances()
        for p in participants.values():  # before anything heats the card
            if job.thorough or not timing.is_hopeless(p, job.best_us):
                session.warm(p)
        if job.thorough:
            session.sustained(_contenders(participants, len(job.libraries)))
        outcomes = {
            index: self._finish(bench, job, index, p, passed[index][1], sets[0]) for index, p in participants.items()
        }
        displaced = max(0.0, 1 - cpu_s / wall_s) if self.device.clock == "thread_cpu" else 0.0
        return _Timed(outcomes, displaced, switches, len(sets), circumstances)

    def _finish(
        self,
        bench: Workbench,
        job: Job,
        index: int,
        p: Participant,
        checked: Verdict,
        warm: Mapping[str, Buffer],
    ) -> Outcome:
        """The timed participant's outcome, its answer compared again after so many runs."""
        samples = tuple(p.samples_us)
        if not job.thorough and timing.is_hopeless(p, job.best_us):
            return Outcome("ok", "", checked.error_norm, samples)
        for name in bench.op.program().outputs:
            warm[name].poison()
        self.device.time_ns([p.calls[0]])
        is_stock = index >= len(job.libraries)
        self._announce("comparing after timing", -1, bench.host_limit_s)
        verdict = bench.checker.compare(bench.case, warm, "f32" if is_stock else _sums(job, index))
        if verdict.wrong and not is_stock:
            bench.sets.clear()
            message = f"right at first, wrong after {len(samples) * p.repeats} runs: {verdict.wrong}"
            return Outcome("correctness", message, verdict.error_norm)
        return Outcome("ok", "", checked.error_norm, samples, p.warm_us, p.sustained_us)


@dataclass(frozen=True, slots=True)
class _Timed:
    outcomes: Mapping[int, Outcome]
    displaced: float
    switches: int
    buffer_sets: int
    circumstances: Mapping[str, float]


def _contenders(participants: Mapping[int, Participant], libraries: int) -> list[Participant]:
    """The fastest candidates and the stock kernels: whose sustained times somebody wants to know, a second for ten of them."""
    own = sorted((p for i, p in participants.items() if i < libraries), key=lambda p: median(p.samples_us))
    return [*own[:SUSTAINED], *(p for i, p in participants.items() if i >= libraries)]


def _sums(job: Job, index: int) -> Accumulate:
    """How the library keeps its sums."""
    return job.accumulate[index] if job.accumulate else "f32"


def _try_stock(bench: Workbench, stock: Runnable) -> Verdict:
    """What the stock kernel's answer is worth."""
    buffers = bench.checker.buffers(bench.case)
    try:
        call = stock.bind(buffers, bench.case.sizes)
    except UsageError as e:  # it does not compute this op here
        return Verdict(str(e), None)
    run_ns = bench.device.time_ns([call])
    verdict = bench.checker.compare(bench.case, buffers)
    few_roundings = verdict.error_norm is not None and verdict.error_norm <= stock_error_norm(bench.op)
    return Verdict(None if few_roundings else verdict.wrong, verdict.error_norm, run_ns)


def stock_error_norm(op: Op) -> float:
    """The largest error norm with which a stock kernel still computes the op, rounding what is between its stages."""
    program = op.program()
    if len(program.stages) == 1:
        return STOCK_ERROR_NORM
    rounding = STOCK_ROUNDINGS * max(epsilon(v.dtype) for v in map(program.value, program.outputs))
    return max(STOCK_ERROR_NORM, *(1 + rounding / op.tolerance(output=o)[0] for o in program.outputs))


def _switches() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
