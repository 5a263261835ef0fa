"""What checks and timing need of a device: memory, a loaded plan, a clock. `CpuDevice` is this machine's processor.

Everything above this file (checks, timing, worker, rows) is the same for every device. It must not know schedules.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from emmy.ir.dtype import DType
from emmy.ir.ops.op import Op, Storage
from emmy.ir.target import Target
from emmy.measure import guarded
from emmy.runtime.launcher import LoadedPlan

Call = Callable[[], None]  # one whole run of a plan on the buffers it was bound to, complete on return


class Buffer(Protocol):
    """One operand in the device's memory."""

    def write(self, data: Storage) -> None: ...

    def read(self) -> Storage:
        """What it holds; may be a view, so not to be kept across a run."""
        ...

    def poison(self) -> None:
        """Overwrites it with a pattern that is NaN in every dtype."""
        ...

    def damage(self) -> str | None:
        """What happened to the red zones around it, or None."""
        ...


class Runnable(Protocol):
    """A plan, or the stock kernel, that is loaded."""

    def bind(self, buffers: Mapping[str, Buffer], sizes: Mapping[str, int]) -> Call:
        """The call that computes the outputs among `buffers` (by value name); `sizes` gives each symbol's value.

        Raises EmmyError when they do not fit what was built.
        """
        ...


class Device(ABC):
    """Owned by one worker process, which dies with it when a kernel does."""

    clock: Literal["thread_cpu", "wall", "event"]
    cold_bytes: int  # traffic after which an operand is no longer in a cache
    memory_bytes: int  # that operands may use

    @abstractmethod
    def load(self, library: str) -> Runnable:
        """The plan built into the file `library`."""

    @abstractmethod
    def stock(self, op: Op) -> tuple[str, Runnable] | None:
        """Name and call of what a user would run without Emmy; None when there is nothing such here."""

    @abstractmethod
    def guarded(self, shape: tuple[int, ...], dtype: DType) -> Buffer:
        """A poisoned buffer between red zones."""

    @abstractmethod
    def plain(self, shape: tuple[int, ...], dtype: DType) -> Buffer:
        """A poisoned buffer for timing."""

    @abstractmethod
    def time_ns(self, calls: Sequence[Call]) -> int:
        """Nanoseconds, by `clock`, of the calls one after another."""


class CpuDevice(Device):
    """One thread: the thread's CPU clock, which other processes barely move. Several: the wall clock."""

    MEMORY_SHARE: ClassVar[int] = 6  # operands may use a sixth of the machine's memory

    def __init__(self, target: Target, threads: int) -> None:
        self.threads = threads
        self.clock = "thread_cpu" if threads == 1 else "wall"
        self.cold_bytes = 2 * target.l3_bytes
        self.memory_bytes = target.dram_bytes // self.MEMORY_SHARE

    def load(self, library: str) -> Runnable:
        return _CpuPlan(LoadedPlan(library), self.threads)

    def stock(self, op: Op) -> tuple[str, Runnable] | None:
        from emmy.measure.stock import stock  # may import torch

        return stock(op, self.threads)

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


@dataclass(frozen=True, slots=True)
class _CpuPlan:
    """A plan loaded by the launcher, run by this device's threads."""

    plan: LoadedPlan
    threads: int

    def bind(self, buffers: Mapping[str, Buffer], sizes: Mapping[str, int]) -> Call:
        return self.plan.bind({name: b.read() for name, b in buffers.items()}, sizes, self.threads)
