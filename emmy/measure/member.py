"""One device of a pool: measures what it is handed, one thing at a time, and answers later. Knows no pool and no searches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from emmy.errors import EmmyError, NoSuchDevice
from emmy.measure.measurer import Heat, Look, Measurer
from emmy.records import Candidate, Device, Measurement


class MemberLost(EmmyError):
    """A device of a pool is gone, and with it what it was measuring."""


class Member(ABC):
    """A device. What it was asked last is answered before it is asked again, by its future: MemberLost when it is gone."""

    @property
    @abstractmethod
    def device(self) -> Device: ...

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return self.device.uuid_hash

    @abstractmethod
    def measure(self, candidate: Candidate, best_us: float | None, look: Look | None) -> Future[Measurement]:
        """The candidate's row; the arguments are those of `Measurer.stream`."""

    @abstractmethod
    def heat(self, op: str, schedules: Sequence[str], rivals: Sequence[str], rounds: int) -> Future[Heat]:
        """What `Measurer.heat` gives."""

    @abstractmethod
    def close(self) -> None:
        """Gives the device back. Waits for nothing that hangs."""


class LocalMember(Member):
    """A device of this process, with a thread of its own."""

    def __init__(self, measurer: Measurer) -> None:
        self.measurer = measurer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="emmy-device")

    @property
    def device(self) -> Device:
        return self.measurer.device

    def measure(self, candidate: Candidate, best_us: float | None, look: Look | None) -> Future[Measurement]:
        return self._thread.submit(self._measure, candidate, best_us, look)

    def _measure(self, candidate: Candidate, best_us: float | None, look: Look | None) -> Measurement:
        try:
            (row,) = self.measurer.stream([candidate], best_us, *((look,) if look else ()))
        except NoSuchDevice as e:
            raise MemberLost(str(e)) from None
        return row

    def heat(self, op: str, schedules: Sequence[str], rivals: Sequence[str], rounds: int) -> Future[Heat]:
        return self._thread.submit(self._heat, op, schedules, rivals, rounds)

    def _heat(self, op: str, schedules: Sequence[str], rivals: Sequence[str], rounds: int) -> Heat:
        try:
            return self.measurer.heat(op, schedules, rivals, rounds)
        except NoSuchDevice as e:
            raise MemberLost(str(e)) from None

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.measurer.close()
