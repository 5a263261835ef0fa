"""This machine's processor as a device to measure on. Knows no schedules."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from emmy.ir.dtype import DType
from emmy.ir.ops.op import Op
from emmy.ir.target import Target
from emmy.measure import guarded
from emmy.measure.answers import Answers, HostAnswers
from emmy.measure.device import Buffer, Call, Device, Runnable
from emmy.measure.references import References
from emmy.measure.timing import HostTiming, Participant, Timing
from emmy.runtime import launcher
from emmy.runtime.launcher import LoadedPlan


class CpuDevice(Device):
    """One thread: the thread's CPU clock, which other processes barely move. Several: the wall clock."""

    MEMORY_SHARE: ClassVar[int] = 6  # operands may use a sixth of the machine's memory

    def __init__(self, target: Target, threads: int, references: References) -> None:
        """Raises CompileError or BrokenToolchain when the launcher cannot be built."""
        launcher.build()
        self.threads, self.references = threads, references
        self.clock = "thread_cpu" if threads == 1 else "wall"
        self.cold_bytes = 2 * target.l3_bytes
        self.memory_bytes = target.dram_bytes // self.MEMORY_SHARE

    def load(self, library: str) -> Runnable:
        return _CpuPlan(LoadedPlan(library), self.threads)

    def stock(self, op: Op, against: str = "") -> tuple[str, Runnable] | None:
        from emmy.measure.stock import stock  # may import torch

        return stock(op, self.threads, against)

    def answers(self, op: Op) -> Answers:
        return HostAnswers(op, self.references, self.memory_bytes // 4)

    def guarded(self, shape: tuple[int, ...], dtype: DType) -> Buffer:
        return guarded.guarded(shape, dtype)

    def plain(self, shape: tuple[int, ...], dtype: DType) -> Buffer:
        return guarded.plain(shape, dtype)

    def time_ns(self, calls: Sequence[Call]) -> int:
        # The whole process's CPU clock equals the thread's while a kernel keeps to its one thread, and a kernel that
        # does not cannot hide work in another.
        clock_id = time.CLOCK_PROCESS_CPUTIME_ID if self.threads == 1 else time.CLOCK_MONOTONIC
        begin = time.clock_gettime_ns(clock_id)
        for call in calls:
            call()
        return time.clock_gettime_ns(clock_id) - begin

    def timing(self, participants: Sequence[Participant], *, thorough: bool) -> Timing:
        return HostTiming(participants, self.time_ns, thorough=thorough)


@dataclass(frozen=True, slots=True)
class _CpuPlan:
    """A plan loaded by the launcher, run by this device's threads."""

    plan: LoadedPlan
    threads: int

    def bind(self, buffers: Mapping[str, Buffer], sizes: Mapping[str, int]) -> Call:
        return self.plan.bind({name: b.read() for name, b in buffers.items()}, sizes, self.threads)
