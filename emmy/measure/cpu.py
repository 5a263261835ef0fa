"""Measures candidates on this machine's processor. Knows no searches, no datasets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from emmy import config
from emmy.errors import UsageError
from emmy.ir.target import Target
from emmy.measure import load
from emmy.measure.compile_pool import Builder, CompilePool, builder
from emmy.measure.identity import cpu_device
from emmy.measure.lock import DeviceLock
from emmy.measure.protocol import Report
from emmy.measure.stock_warm import inductor_cache
from emmy.measure.worker import Worker
from emmy.measure.worker_measurer import Circumstances, RunLimit, Surroundings, WorkerMeasurer
from emmy.records import Protocol

LIMIT = RunLimit()
SAMPLES = 7  # of a row while screening; slow candidates get fewer


class CpuMeasurer(WorkerMeasurer):
    """Measures on all cores' one device.

    floor_us:        see WorkerMeasurer
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
        limit: RunLimit = LIMIT,
        wait: bool = False,
        build: Builder | None = None,
        cache: Path | None = None,
    ) -> None:
        if not target.is_cpu:
            raise UsageError(f"target {target.name} is no CPU of this machine; CpuMeasurer measures cpu targets only")
        if not 1 <= threads <= target.cores:
            raise UsageError(f"threads is {threads}, allowed 1..{target.cores} on this machine")
        cache = cache or config.cache_dir()
        super().__init__(
            cpu_device(target),
            DeviceLock(
                cache / "locks", "cpu"
            ),  # all CPU targets are one device, whatever instructions they are kept to
            Worker(target.name, threads, cache / "references", inductor_cache(cache)),
            CompilePool(build or builder(target), compile_workers),
            _Load(threads, target.cores),
            Protocol("cold", "burst", "thread_cpu" if threads == 1 else "wall", threads, SAMPLES),
            floor_us=floor_us,
            limit=limit,
            wait=wait,
            stock=threads > 1,  # timed by the wall clock, which only means something beside the stock kernel
        )


class _Load(Surroundings):
    """Other processes on the machine, as the system counts them."""

    def __init__(self, threads: int, cores: int) -> None:
        self._threads, self._cores, self._meter = threads, cores, load.LoadMeter()
        self._around: load.Load | None = None

    def start(self) -> None:
        self._meter.start()

    def stop(self, report: Report) -> None:
        self._around = self._meter.stop(report.cpu_s)

    def judge(self, report: Report, samples_us: tuple[float, ...]) -> Circumstances:
        static = {"displaced": report.displaced, "switches": float(report.switches)}
        if self._around is not None:
            static |= {"others_cores": self._around.others_cores, "steal": self._around.steal}
        contended = load.is_contended(
            self._around,
            samples_us,
            clock="thread_cpu" if self._threads == 1 else "wall",
            threads=self._threads,
            cores=self._cores,
            displaced=report.displaced,
        )
        return Circumstances(contended, static, load.clock_mhz(), load.temperature_c())
