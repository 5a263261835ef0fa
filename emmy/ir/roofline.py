"""The least time a computation can take on a device, by its figures alone. Knows no schedule and no measurement.

Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", CACM 52(4), 2009: a kernel takes at
least its arithmetic at the peak rate, and at least its data at the memory's rate. The figures are the target's, which
name their sources; they are upper bounds of what the device does, so that the time is a lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from emmy.errors import PlanError
from emmy.ir.dtype import DType
from emmy.ir.ops.op import Work
from emmy.ir.target import Target


@dataclass(frozen=True, slots=True)
class RooflineBound:
    """The bound and its two parts in microseconds; `time_us` is the larger one."""

    compute_us: float
    dram_us: float

    @property
    def time_us(self) -> float:
        return max(self.compute_us, self.dram_us)

    @property
    def binding(self) -> Literal["compute", "dram"]:
        return "compute" if self.compute_us >= self.dram_us else "dram"


def roofline_us(
    work: Work,
    target: Target,
    dtype: DType,
    threads: int = 0,
    *,
    cache: Literal["cold", "warm"] = "cold",
    clock_mhz: float | None = None,
) -> RooflineBound:
    """The least time of `work` on inputs of `dtype`. Raises PlanError when the target has no rate for `dtype`.

    threads:   cores of a CPU that may work; 0 = all. Arithmetic and, since the figure is per core, bandwidth scale with it
    cache:     "warm" = operands may still lie in the last-level cache, so that only what exceeds it must come from memory
    clock_mhz: the clock a time was measured at; a card that ran above its rated boost clock has a higher peak
    """
    share = min(threads, target.cores) / target.cores if target.is_cpu and threads else 1.0
    overclock = max(1.0, (clock_mhz or 0.0) / target.boost_mhz)
    compute_us = work.flops / (peak_tflops(target, dtype) * share * overclock * 1e6)
    last_level = target.l3_bytes or target.l2_bytes
    moved = max(0.0, work.bytes - last_level) if cache == "warm" else work.bytes
    return RooflineBound(compute_us, moved / (target.dram_gbs * share * 1e3))


def peak_tflops(target: Target, dtype: DType) -> float:
    """The target's highest rate for inputs of `dtype`, whatever it accumulates in."""
    rates = [rate for kind, rate in target.peak_tflops.items() if kind.split("->")[0] == dtype]
    if not rates:
        known = ", ".join(sorted(target.peak_tflops))
        raise PlanError(f"target {target.name} names no peak rate for {dtype}; its file has {known}")
    return max(rates)
