"""What checks and timing need of a device: memory, a loaded plan, right answers, a clock. The seam between devices.

Everything above this file (checks, jobs, worker, rows) is the same for every device. It must not know schedules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from emmy.errors import EmmyError
from emmy.ir.dtype import DType
from emmy.ir.ops.op import Op, Storage

if TYPE_CHECKING:
    from emmy.measure.answers import Answers
    from emmy.measure.timing import Participant, Timing

Call = Callable[[], None]  # one whole run of a plan on the buffers it was bound to; Device.time_ns waits for it
State = Literal["usable", "faulted", "lost"]


class Buffer(Protocol):
    """One operand in the device's memory."""

    @property
    def n_bytes(self) -> int: ...

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
    memory_bytes: int  # that the operands of one op may use
    kept_ops: int = 1  # for how many ops operands are kept at once

    @abstractmethod
    def load(self, library: str) -> Runnable:
        """The plan built into the file `library`."""

    @abstractmethod
    def stock(self, op: Op, against: str = "") -> tuple[str, Runnable] | None:
        """Name and call of what a user would run without Emmy; None when there is nothing such here.

        against: the name of one of several (`emmy.measure.rivals.RIVALS`), "" for the usual.
        """

    @abstractmethod
    def answers(self, op: Op) -> Answers:
        """Who knows what is right."""

    @abstractmethod
    def guarded(self, shape: tuple[int, ...], dtype: DType) -> Buffer:
        """A poisoned buffer between red zones."""

    @abstractmethod
    def plain(self, shape: tuple[int, ...], dtype: DType) -> Buffer:
        """A poisoned buffer for timing."""

    @abstractmethod
    def time_ns(self, calls: Sequence[Call]) -> int:
        """Nanoseconds, by `clock`, of the calls one after another; returns when they are done."""

    @abstractmethod
    def timing(self, participants: Sequence[Participant], *, thorough: bool) -> Timing:
        """How kernels are timed here."""

    def circumstances(self) -> Mapping[str, float]:
        """Readings of the device right after a measurement: clocks, temperature ... What is not known is left out."""
        return {}

    def after(self, error: EmmyError) -> State:
        """What an error that a candidate caused left behind; "faulted": only a new process helps, "lost": the device failed."""
        return "usable"
