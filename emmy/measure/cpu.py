"""Measures candidates on this machine's processor: compile, check, time, one row each. Knows no searches, no datasets."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Literal

from emmy import config
from emmy.errors import UsageError
from emmy.ir.target import Target
from emmy.measure import load
from emmy.measure.compile_pool import Builder, Built, Compiled, CompilePool, NotBuilt, builder
from emmy.measure.identity import cpu_device
from emmy.measure.lock import DeviceLock
from emmy.measure.measurer import Measurer, speedup
from emmy.measure.protocol import Job, Outcome, Report
from emmy.measure.worker import Fault, Worker
from emmy.records import STATUSES, Candidate, Device, Measurement, Protocol, Status, new_id, now_utc

log = logging.getLogger("emmy.measure.cpu")

SAMPLES = 7  # of a row, both when screening (slow candidates get fewer) and in a race
IMPLAUSIBLE = 0.95  # of the least time the device can take: what is faster has not done the work


@dataclass(frozen=True, slots=True)
class RunLimit:
    """How long one run may take before it counts as a hang: `times` what is known to be enough, at least `least_s`."""

    least_s: float = 2.0
    times: float = 50.0
    unknown_s: float = 60.0  # at least, while nothing of the op has been measured yet

    def seconds(self, floor_us: float | None, known_us: float | None) -> float:
        """The limit for an op with that least time and that best time known."""
        enough_s = self.times * max(floor_us or 0.0, known_us or 0.0) / 1e6
        return max(self.least_s, enough_s) if known_us is not None else max(self.unknown_s, enough_s)


class CpuMeasurer(Measurer):
    """Owns the processor from its making to `close`: holds its lock, a worker process and a pool of compilers.

    floor_us:        op text -> the least time the device can take (a roofline); faster rows become `implausible`
    compile_workers: compilers at work beside the measurement, at low priority
    wait:            queue behind whoever holds the device instead of raising DeviceBusy
    build:           candidate -> binary; Emmy's code generator unless a test brings its own

    Raises DeviceBusy, and NoSuchDevice without a compiler.
    """

    def __init__(
        self,
        target: Target,
        *,
        threads: int = 1,
        compile_workers: int = 2,
        floor_us: Callable[[str], float] | None = None,
        limit: RunLimit = RunLimit(),
        wait: bool = False,
        build: Builder | None = None,
        cache: Path | None = None,
    ) -> None:
        if not target.is_cpu:
            raise UsageError(f"target {target.name} is no CPU of this machine; CpuMeasurer measures cpu targets only")
        if not 1 <= threads <= target.cores:
            raise UsageError(f"threads is {threads}, allowed 1..{target.cores} on this machine")
        cache = cache or config.cache_dir()
        self.target, self.threads, self.limit, self.floor_us = target, threads, limit, floor_us
        self._device = cpu_device(target)
        # All CPU targets are one device, whatever instructions they are kept to.
        self._lock = DeviceLock(cache / "locks", "cpu")
        self._lock.acquire(wait=wait)
        self._worker = Worker(target.name, threads, cache / "references")
        self._pool = CompilePool(build or builder(target), compile_workers)
        self._meter = load.LoadMeter()
        self._known_us: dict[str, float] = {}  # best time of each op so far
        self._n_jobs = 0

    @property
    def device(self) -> Device:
        return self._device

    @property
    def worker(self) -> Worker:
        """The worker, for whoever wants to know whether it lives."""
        return self._worker

    def close(self) -> None:
        self._worker.stop()
        self._pool.close()
        self._lock.release()

    def stream(self, candidates: Sequence[Candidate], best_us: float | None = None) -> Iterator[Measurement]:
        for compiled in self._pool.compile(candidates):
            if isinstance(compiled.result, NotBuilt):
                yield self._unbuilt(compiled, compiled.result)
                continue
            known = (best_us, self._known_us.get(compiled.candidate.op))
            job = self._job(
                [compiled],
                # Several threads are timed by the wall clock, which only means something beside the stock kernel.
                stock=self.threads > 1,
                best_us=min((t for t in known if t is not None), default=None),
            )
            yield self._ask(job, [compiled])[0]

    def race(self, candidates: Sequence[Candidate], rounds: int = SAMPLES) -> list[Measurement]:
        if len({c.op for c in candidates}) > 1:
            raise UsageError(
                f"a race is between schedules of one op, got {', '.join(sorted({c.op for c in candidates}))}"
            )
        rows: dict[int, Measurement] = {}
        running: dict[int, Compiled] = {}
        for i, compiled in enumerate(self._pool.compile(candidates)):
            if isinstance(compiled.result, NotBuilt):
                rows[i] = self._unbuilt(compiled, compiled.result)
            else:
                running[i] = compiled
        while running:
            places = list(running)
            done = self._ask(
                self._job(list(running.values()), samples=rounds, thorough=True, stock=True), list(running.values())
            )
            # After a fault only the guilty has a row; the others are checked and timed anew, in the new process.
            for k, row in done.items():
                rows[places[k]] = row
                del running[places[k]]
        return [rows[i] for i in range(len(candidates))]

    def _job(
        self,
        compiled: Sequence[Compiled],
        *,
        samples: int = SAMPLES,
        thorough: bool = False,
        stock: bool,
        best_us: float | None = None,
    ) -> Job:
        op = compiled[0].candidate.op
        self._n_jobs += 1
        return Job(
            id=self._n_jobs,
            op=op,
            libraries=tuple(str(_binary(c).library) for c in compiled),
            run_limit_s=self.limit.seconds(self._floor(op), best_us or self._known_us.get(op)),
            samples=samples,
            thorough=thorough,
            stock=stock,
            best_us=best_us,
        )

    def _ask(self, job: Job, compiled: Sequence[Compiled]) -> dict[int, Measurement]:
        """Rows by place in the job: all of them, or only the guilty's when the worker was lost to one."""
        self._meter.start()
        begin_s = time.perf_counter()
        answer = self._worker.ask(job)
        wall_s = (time.perf_counter() - begin_s) / len(compiled)
        if isinstance(answer, Fault):
            if answer.index >= 0 or len(compiled) == 1:
                guilty = max(answer.index, 0)
                return {guilty: self._row(compiled[guilty], answer.status, answer.message, wall_s=wall_s)}
            return {i: self._row(c, "device_lost", answer.message, wall_s=wall_s) for i, c in enumerate(compiled)}
        if answer.stock and answer.stock.status != "ok":
            log.warning(
                "%s: no ratio to %s, which computes something else: %s", job.op, answer.stock_name, answer.stock.message
            )
        around = self._meter.stop(answer.cpu_s)
        return {i: self._measured(c, job, i, answer, around, wall_s) for i, c in enumerate(compiled)}

    def _measured(
        self, compiled: Compiled, job: Job, place: int, report: Report, around: load.Load | None, wall_s: float
    ) -> Measurement:
        outcome = report.outcomes[place]
        if outcome.status != "ok":
            return self._row(compiled, _status(outcome.status), outcome.message, outcome=outcome, wall_s=wall_s)
        static = {
            "buffer_sets": float(report.buffer_sets),
            "displaced": report.displaced,
            "switches": float(report.switches),
        }
        if outcome.warm_us is not None:
            static["warm_us"] = outcome.warm_us
        if around is not None:
            static |= {"others_cores": around.others_cores, "steal": around.steal}
        stock_us = report.stock.samples_us if report.stock else ()
        if ratio := speedup(outcome.samples_us, stock_us):
            static |= {"speedup": ratio.median, "speedup_low": ratio.low, "speedup_high": ratio.high}
        protocol = self._protocol(job.samples)
        contended = load.is_contended(
            around,
            outcome.samples_us,
            clock=protocol.clock,
            threads=self.threads,
            cores=self.target.cores,
            displaced=report.displaced,
        )
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
            contended=contended,
            baseline_us=median(stock_us) if stock_us else None,
            baseline=report.stock_name if stock_us else "",
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
        contended: bool = False,
        baseline_us: float | None = None,
        baseline: str = "",
        samples: int = SAMPLES,
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
            protocol=self._protocol(samples),
            error_norm=outcome.error_norm if outcome else None,
            static={**(built.static if built else {}), **static},
            message=message,
            clock_mhz=load.clock_mhz(),
            temperature_c=load.temperature_c(),
            contended=contended,
            compile_s=compiled.compile_s,
            wall_s=wall_s,
            baseline_us=baseline_us,
            baseline=baseline,
            id=new_id(),
            time_utc=now_utc(),
        )

    def _unbuilt(self, compiled: Compiled, why: NotBuilt) -> Measurement:
        return self._row(compiled, why.status, why.message)

    def _protocol(self, samples: int) -> Protocol:
        clock: Literal["thread_cpu", "wall"] = "thread_cpu" if self.threads == 1 else "wall"
        return Protocol(cache="cold", clock=clock, threads=self.threads, repeats=samples)

    def _floor(self, op: str) -> float | None:
        return self.floor_us(op) if self.floor_us else None


def _binary(compiled: Compiled) -> Built:
    assert isinstance(compiled.result, Built)
    return compiled.result


def _status(text: str) -> Status:
    assert text in STATUSES
    return text
