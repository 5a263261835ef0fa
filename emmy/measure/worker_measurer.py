"""Measures candidates in a worker process: compile, check, time, one row each. Knows no searches, no datasets.

What differs between devices is handed in: who the device is, how candidates are built, what its circumstances mean.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from types import MappingProxyType

from emmy.measure.compile_pool import Built, Compiled, CompilePool, NotBuilt
from emmy.measure.lock import DeviceLock
from emmy.measure.measurer import Heat, Look, Measurer, Ready, Rivalled, ignore, speedup
from emmy.measure.protocol import STOCK, Job, Outcome, Report, Rival
from emmy.measure.worker import Fault, Worker
from emmy.records import STATUSES, Candidate, Device, Measurement, Protocol, Status, new_id, now_utc

log = logging.getLogger("emmy.measure")

ROUNDS = 7  # of a race
IMPLAUSIBLE = 0.95  # of the least time the device can take: what is faster has not done the work


@dataclass(frozen=True, slots=True)
class RunLimit:
    """How long one run may take before it counts as a hang: `times` what is known to be enough, at least `least_s`."""

    least_s: float = 2.0
    times: float = 50.0
    unknown_s: float = 60.0  # at least, while nothing of the op has been measured yet
    patience: tuple[float, float] | None = None  # (times, least seconds): a run that took longer need not be looked at

    def seconds(self, floor_us: float | None, known_us: float | None) -> float:
        """The limit for an op with that least time and that best time known."""
        enough_s = self.times * max(floor_us or 0.0, known_us or 0.0) / 1e6
        return max(self.least_s, enough_s) if known_us is not None else max(self.unknown_s, enough_s)

    def patience_seconds(self, known_us: float | None) -> float | None:
        """How long a run may take to be of any interest; None while there is nothing to compare it with."""
        if self.patience is None or known_us is None:
            return None
        times, least_s = self.patience
        return max(least_s, times * known_us / 1e6)


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Under which circumstances the times of one row were taken. `contended`: they may be off."""

    contended: bool
    static: Mapping[str, float] = field(default_factory=dict)
    clock_mhz: float | None = None
    temperature_c: float | None = None


class Surroundings(ABC):
    """Watches what goes on around measurements."""

    @abstractmethod
    def start(self) -> None:
        """A job begins."""

    @abstractmethod
    def stop(self, report: Report) -> None:
        """The job ended."""

    @abstractmethod
    def judge(self, report: Report, samples_us: tuple[float, ...]) -> Circumstances:
        """What it was like while these samples of the job that ended last were taken."""


class WorkerMeasurer(Measurer):
    """Owns a device from its making to `close`: holds its lock, a worker process and a pool of compilers.

    Several threads may measure at once: they compile beside one another, and take turns on the device.

    timing:   what rows say of how they are timed; its `repeats` is how many samples a row gets
    floor_us: op text -> the least time the device can take (a roofline); faster rows become `implausible`
    stock:    time the stock kernel beside every candidate, not in races only
    owns_pool: close `pool` in the end; other devices share it otherwise

    Raises DeviceBusy when another process holds the lock, unless told to `wait`.
    """

    def __init__(
        self,
        device: Device,
        lock: DeviceLock,
        worker: Worker,
        pool: CompilePool,
        surroundings: Surroundings,
        timing: Protocol,
        *,
        floor_us: Callable[[str], float] | None,
        limit: RunLimit,
        wait: bool,
        stock: bool = False,
        owns_pool: bool = True,
    ) -> None:
        self._owns_pool = owns_pool
        self._device, self._lock, self._worker, self._pool = device, lock, worker, pool
        self._surroundings, self._timing, self._stock = surroundings, timing, stock
        self.limit, self.floor_us = limit, floor_us
        self._known_us: dict[str, float] = {}  # best time of each op so far
        self._n_jobs = 0
        self._turn = threading.Lock()
        lock.acquire(wait=wait)

    @property
    def device(self) -> Device:
        return self._device

    @property
    def worker(self) -> Worker:
        """The worker, for whoever wants to know whether it lives."""
        return self._worker

    def close(self) -> None:
        self._worker.stop()
        if self._owns_pool:
            self._pool.close()
        self._lock.release()

    def prepare(self, candidates: Sequence[Candidate], ready: Ready = ignore) -> None:
        self._pool.begin(candidates, ready)

    def stream(
        self, candidates: Sequence[Candidate], best_us: float | None = None, look: Look | None = None
    ) -> Iterator[Measurement]:
        for compiled in self._pool.compile(candidates):
            if isinstance(compiled.result, NotBuilt):
                yield self._unbuilt(compiled, compiled.result)
                continue
            known = (best_us, self._known_us.get(compiled.candidate.op))
            best_known = min((t for t in known if t is not None), default=None)
            if look and (us := look(compiled.candidate.schedule, compiled.result.static, best_known)) is not None:
                yield self._row(
                    compiled, "passed_over", f"predicted {us:.4g} us once compiled", static={"predicted_us": us}
                )
                continue
            rivals = ("",) if self._stock else ()
            op = compiled.candidate.op
            job = self._job(op, [compiled], samples=self._timing.repeats, rivals=rivals, best_us=best_known)
            yield self._ask(job, [compiled])[0][0]

    def heat(self, op: str, schedules: Sequence[str], rivals: Sequence[str] = ("",), rounds: int = ROUNDS) -> Heat:
        candidates = [Candidate(op, s) for s in schedules]
        rows: dict[int, Measurement] = {}
        running: dict[int, Compiled] = {}
        for i, compiled in enumerate(self._pool.compile(candidates)):
            if isinstance(compiled.result, NotBuilt):
                rows[i] = self._unbuilt(compiled, compiled.result)
            else:
                running[i] = compiled
        beside: dict[str, Rivalled] = {}
        alone = bool(rivals) and not candidates  # nothing but stock kernels is asked for
        while running or alone:
            places = list(running)
            job = self._job(op, list(running.values()), samples=rounds, thorough=True, rivals=tuple(rivals))
            done, timed = self._ask(job, list(running.values()))
            beside, alone = beside | {r.asked: r for r in timed}, False
            # After a fault only the guilty has a row; the others are checked and timed anew, in the new process.
            for k, row in done.items():
                rows[places[k]] = row
                del running[places[k]]
        return Heat(tuple(rows[i] for i in range(len(candidates))), tuple(beside[x] for x in rivals if x in beside))

    def _job(
        self,
        op: str,
        compiled: Sequence[Compiled],
        *,
        samples: int,
        thorough: bool = False,
        rivals: tuple[str, ...],
        best_us: float | None = None,
    ) -> Job:
        known_us = best_us or self._known_us.get(op)
        self._n_jobs += 1
        return Job(
            id=self._n_jobs,
            op=op,
            libraries=tuple(str(_binary(c).library) for c in compiled),
            run_limit_s=self.limit.seconds(self._floor(op), known_us),
            patience_s=self.limit.patience_seconds(known_us),
            accumulate=tuple(_binary(c).accumulate for c in compiled),
            samples=samples,
            thorough=thorough,
            rivals=rivals,
            best_us=best_us,
        )

    def _ask(self, job: Job, compiled: Sequence[Compiled]) -> tuple[dict[int, Measurement], list[Rivalled]]:
        """Rows by place in the job: all of them, or only the guilty's when the worker was lost to one; and the rivals."""
        with self._turn:
            return self._ask_now(job, compiled)

    def _ask_now(self, job: Job, compiled: Sequence[Compiled]) -> tuple[dict[int, Measurement], list[Rivalled]]:
        self._surroundings.start()
        begin_s = time.perf_counter()
        answer = self._worker.ask(job)
        wall_s = (time.perf_counter() - begin_s) / max(1, len(compiled))
        if isinstance(answer, Fault):
            return self._faulted(job, compiled, answer, wall_s)
        for r in answer.rivals:
            if r.outcome.status != "ok":
                log.warning("%s: no ratio to %s, which does not compute it: %s", job.op, r.name, r.outcome.message)
        self._surroundings.stop(answer)
        rows = {i: self._measured(c, job, i, answer, wall_s) for i, c in enumerate(compiled)}
        return rows, [self._rivalled(r, answer) for r in answer.rivals]

    def _faulted(
        self, job: Job, compiled: Sequence[Compiled], fault: Fault, wall_s: float
    ) -> tuple[dict[int, Measurement], list[Rivalled]]:
        """What is known when the worker was lost. To a rival: it is no candidate's fault, and they are measured without it."""
        if fault.index <= STOCK:
            asked = job.rivals[STOCK - fault.index]
            log.warning("%s: no ratio to %s: %s", job.op, asked or "the stock kernel", fault.message)
            lost = Rivalled(asked, asked, _status(fault.status), fault.message)
            rest = tuple(r for r in job.rivals if r != asked)
            rows, timed = self._ask_now(replace(job, rivals=rest), compiled) if compiled or rest else ({}, [])
            return rows, [lost, *timed]
        if fault.index >= 0 or len(compiled) == 1:
            guilty = max(fault.index, 0)
            return {guilty: self._row(compiled[guilty], fault.status, fault.message, wall_s=wall_s)}, []
        lost_rows = {i: self._row(c, "device_lost", fault.message, wall_s=wall_s) for i, c in enumerate(compiled)}
        return lost_rows, [Rivalled(r, r, "device_lost", fault.message) for r in job.rivals]

    def _rivalled(self, rival: Rival, report: Report) -> Rivalled:
        o = rival.outcome
        around = self._surroundings.judge(report, o.samples_us) if o.samples_us else Circumstances(contended=False)
        return Rivalled(
            rival.asked,
            rival.name,
            _status(o.status),
            o.message,
            o.samples_us,
            o.warm_us,
            o.sustained_us,
            o.error_norm,
            around.contended,
            around.static,
            around.clock_mhz,
            around.temperature_c,
        )

    def _measured(self, compiled: Compiled, job: Job, place: int, report: Report, wall_s: float) -> Measurement:
        outcome = report.outcomes[place]
        if outcome.status != "ok":
            return self._row(compiled, _status(outcome.status), outcome.message, outcome=outcome, wall_s=wall_s)
        around = self._surroundings.judge(report, outcome.samples_us)
        stock = report.rivals[0] if report.rivals else None
        static = {"buffer_sets": float(report.buffer_sets), **around.static, **_ratios(outcome, stock)}
        stock_us = stock.outcome.samples_us if stock else ()
        time_us, floor_us = median(outcome.samples_us), self._floor(job.op)
        status, message = outcome.status, ""
        if floor_us is not None and time_us < IMPLAUSIBLE * floor_us:
            status = "implausible"
            message = f"{time_us:.4g} us is less than the {floor_us:.4g} us that the device's peaks allow"
        else:  # contended or not: as a limit, a time that is too long does no harm
            self._known_us[job.op] = min(time_us, self._known_us.get(job.op, time_us))
        return self._row(
            compiled,
            _status(status),
            message,
            outcome=outcome,
            static=static,
            around=around,
            baseline_us=median(stock_us) if stock_us else None,
            baseline=stock.name if stock and stock_us else "",
            samples=job.samples,
            wall_s=wall_s,
        )

    def _row(
        self,
        compiled: Compiled,
        status: Status,
        message: str,
        *,
        outcome: Outcome | None = None,
        static: Mapping[str, float] = MappingProxyType({}),
        around: Circumstances = Circumstances(contended=False),
        baseline_us: float | None = None,
        baseline: str = "",
        samples: int | None = None,
        wall_s: float = 0.0,
    ) -> Measurement:
        built = compiled.result if isinstance(compiled.result, Built) else None
        return Measurement(
            op=compiled.candidate.op,
            schedule=compiled.candidate.schedule,
            source_digest=built.digest if built else "",
            device=self._device,
            status=status,
            samples_us=outcome.samples_us if outcome else (),
            protocol=replace(self._timing, repeats=samples or self._timing.repeats),
            error_norm=outcome.error_norm if outcome else None,
            static={**(built.static if built else {}), **static},
            message=message,
            clock_mhz=around.clock_mhz,
            temperature_c=around.temperature_c,
            contended=around.contended,
            compile_s=compiled.compile_s,
            wall_s=wall_s,
            baseline_us=baseline_us,
            baseline=baseline,
            id=new_id(),
            time_utc=now_utc(),
        )

    def _unbuilt(self, compiled: Compiled, why: NotBuilt) -> Measurement:
        return self._row(compiled, why.status, why.message)

    def _floor(self, op: str) -> float | None:
        return self.floor_us(op) if self.floor_us else None


def _ratios(own: Outcome, rival: Rival | None) -> dict[str, float]:
    """What a row says besides its samples: the other states of the device, and ratios to the stock kernel in each."""
    found: dict[str, float | None] = {"warm_us": own.warm_us, "sustained_us": own.sustained_us}
    if rival is not None and (ratio := speedup(own.samples_us, rival.outcome.samples_us)):
        stock = rival.outcome
        found |= {"speedup": ratio.median, "speedup_low": ratio.low, "speedup_high": ratio.high}
        found |= {"baseline_warm_us": stock.warm_us, "baseline_sustained_us": stock.sustained_us}
    return {name: x for name, x in found.items() if x is not None}


def _binary(compiled: Compiled) -> Built:
    assert isinstance(compiled.result, Built)
    return compiled.result


def _status(text: str) -> Status:
    assert text in STATUSES
    return text
