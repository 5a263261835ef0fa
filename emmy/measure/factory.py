"""Who measures on a target on this machine. Must not know searches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from emmy.errors import NoSuchDevice, UsageError
from emmy.ir.target import Target, load_target
from emmy.measure.device_pool import SEVERAL, DevicePool
from emmy.measure.measurer import Measurer
from emmy.measure.member import LocalMember
from emmy.runtime.cuda_driver import Gpu, gpus, why_no_gpu


def measurer_for(
    target: Target, threads: int = 1, *, floor_us: Callable[[str], float] | None = None, wait: bool = False
) -> Measurer:
    """A measurer that holds the target's device until it is closed.

    floor_us: op text -> the least time the device can take; faster rows become `implausible`
    wait:     queue behind whoever holds the device

    Raises NoSuchDevice when the target is not on this machine, DeviceBusy when another process measures on it.
    """
    if target.is_cpu:
        from emmy.measure.cpu import CpuMeasurer

        return CpuMeasurer(target, threads=threads, floor_us=floor_us, wait=wait)
    if threads != 1:
        raise UsageError(f"threads is {threads}: a GPU is driven by one; --threads counts cores of a CPU")
    from emmy.measure.cuda import CudaMeasurer

    return CudaMeasurer(target, floor_us=floor_us, wait=wait)


def gpus_here() -> Mapping[str, tuple[Gpu, ...]]:
    """The GPUs of this machine by the target that describes them. Raises NoSuchDevice when there are none."""
    from emmy.measure.cuda import target_of

    found: dict[str, tuple[Gpu, ...]] = {}
    for gpu in gpus():
        if (name := target_of(gpu)) is not None:
            found[name] = (*found.get(name, ()), gpu)
    if not found:
        raise NoSuchDevice(
            f"no GPU that a target describes is here: {why_no_gpu() or 'those that are have no target'}. "
            "`emmy tune --gpu cpu` measures on this machine's processor."
        )
    return found


def gpu_pool(
    name: str,
    found: tuple[Gpu, ...],
    floor_us: Callable[[str], float],
    *,
    wait: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> DevicePool:
    """GPUs of one target as one measurer: a worker process and a lock each, and one pool of compilers.

    Raises DeviceBusy when one of them is taken, and holds none then.
    """
    from emmy.measure.cuda import CudaMeasurer, compilers

    target = load_target(name)
    pool = compilers(target)
    held: list[CudaMeasurer] = []
    try:
        for gpu in found:
            held.append(CudaMeasurer(target, gpu=gpu, pool=pool, floor_us=floor_us, wait=wait))
    except BaseException:
        for measurer in held:
            measurer.close()
        pool.close()
        raise
    device = held[0].device if len(held) == 1 else replace(held[0].device, uuid_hash=SEVERAL)
    return DevicePool(device, [LocalMember(m) for m in held], prepare=pool.begin, say=say, on_close=pool.close)
