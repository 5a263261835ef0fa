"""Who measures on a target on this machine. Must not know searches."""

from __future__ import annotations

from collections.abc import Callable

from emmy.errors import UsageError
from emmy.ir.target import Target
from emmy.measure.measurer import Measurer


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
