"""Measures candidates on a GPU of this machine. Knows no searches, no datasets."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from emmy import config
from emmy.codegen.nvrtc import nvrtc_version
from emmy.errors import NoSuchDevice, UsageError
from emmy.ir.target import Target, load_target, target_names
from emmy.measure import load
from emmy.measure.compile_pool import Builder, CompilePool
from emmy.measure.identity import gpu_device
from emmy.measure.lock import DeviceLock
from emmy.measure.protocol import Report
from emmy.measure.remote_builder import RemoteBuilder
from emmy.measure.stock_warm import inductor_cache
from emmy.measure.worker import Worker
from emmy.measure.worker_measurer import Circumstances, RunLimit, Surroundings, WorkerMeasurer
from emmy.records import Protocol
from emmy.runtime.cuda_driver import Gpu, gpus

SAMPLES = 3  # of a row while screening
# A kernel that hangs costs the worker, some seconds; one that is merely slow costs its runs, so it is let go earlier.
LIMIT = RunLimit(least_s=2.0, times=50.0, unknown_s=5.0, patience=(30.0, 0.02))


class CudaMeasurer(WorkerMeasurer):
    """Measures on one GPU, which nobody else may use meanwhile.

    floor_us:        see WorkerMeasurer
    compile_workers: processes that compile beside the measurement; 0 = one a core
    wait:            queue behind whoever holds the device instead of raising DeviceBusy
    gpu:             the GPU; default: the first one that is the target's product
    build:           candidate -> plan file; Emmy's code generator unless somebody brings another
    pool:            compilers that are shared with other devices, and not closed; `compile_workers` and `build` do not count then

    Raises NoSuchDevice when the target is not on this machine, DeviceBusy when it is taken.
    """

    def __init__(
        self,
        target: Target,
        *,
        compile_workers: int = 0,
        floor_us: Callable[[str], float] | None = None,
        limit: RunLimit = LIMIT,
        wait: bool = False,
        gpu: Gpu | None = None,
        build: Builder | None = None,
        pool: CompilePool | None = None,
        cache: Path | None = None,
    ) -> None:
        if target.is_cpu:
            raise UsageError(f"target {target.name} is no GPU; CudaMeasurer measures GPUs only")
        gpu = gpu or find_gpu(target)
        cache = cache or config.cache_dir()
        device = gpu_device(gpu, target.name, f"nvrtc {nvrtc_version()}")
        super().__init__(
            device,
            DeviceLock(cache / "locks", gpu_lock_name(gpu)),
            Worker(target.name, 1, cache / "references", {"CUDA_VISIBLE_DEVICES": gpu.uuid, **inductor_cache(cache)}),
            pool or compilers(target, compile_workers, build),
            GpuState(),
            Protocol("cold", "burst", "event", 1, SAMPLES),
            floor_us=floor_us,
            limit=limit,
            wait=wait,
            owns_pool=pool is None,
        )


class GpuState(Surroundings):
    """The GPU's own readings, taken by the worker right after timing. The host's load does not count: graphs run alone."""

    def start(self) -> None:
        pass

    def stop(self, report: Report) -> None:
        pass

    def judge(self, report: Report, samples_us: tuple[float, ...]) -> Circumstances:
        facts = dict(report.circumstances)
        contended = facts.get("slowdown", 0) > 0 or facts.get("others", 0) > 0
        if len(samples_us) >= 3 and load.spread(samples_us) > load.MOST_SPREAD["event"]:
            contended = True
        clock_mhz, temperature_c = facts.pop("sm_mhz", None), facts.pop("temperature_c", None)
        return Circumstances(contended, facts, clock_mhz, temperature_c)


def compilers(target: Target, workers: int = 0, build: Builder | None = None) -> CompilePool:
    """Compilers of the target's candidates, in processes of their own unless `build` is given; 0 = one a core."""
    workers = workers or len(os.sched_getaffinity(0))
    if build is not None:
        return CompilePool(build, workers)
    remote = RemoteBuilder(target, workers)
    return CompilePool(remote, workers, remote.close)


def find_gpu(target: Target) -> Gpu:
    """The first GPU here that is the target's product. Raises NoSuchDevice that lists what there is."""
    found = gpus()
    for gpu in found:
        if gpu.product == target.product:
            return gpu
    if not found:
        raise NoSuchDevice(
            f"{target.name} is not here: no NVIDIA driver, or no GPU that this process may see. "
            "`emmy tune --gpu cpu` measures on this machine's processor."
        )
    names = ", ".join(f"{g.product} ({target_of(g) or 'no target describes it'})" for g in found)
    raise NoSuchDevice(f"{target.name} ({target.product}) is not here; this machine has {names}")


def gpu_lock_name(gpu: Gpu) -> str:
    """The name that a GPU is locked under, whatever is measured on it."""
    return f"gpu-{gpu_device(gpu, '', '').uuid_hash}"


def target_of(gpu: Gpu) -> str | None:
    """The name of the target that describes the GPU; None when no file does."""
    return next(
        (n for n in target_names() if load_target(n).product == gpu.product and not load_target(n).is_cpu), None
    )
