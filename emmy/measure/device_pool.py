"""Several devices of one product behind the seam of one: whoever is free takes the next candidate. Knows no searches, no Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from math import ceil

from emmy.measure.dispatch import Census, Dispatcher, Ticket
from emmy.measure.measurer import BATCH, Heat, Keep, Look, Measurer, Ready, Rows, ignore
from emmy.measure.member import Member
from emmy.records import Candidate, Device, Measurement, Protocol, new_id, now_utc

SEVERAL = "several"  # in the place of a device's hash: a run goes on with whichever devices of the product are there
_OUT = 2  # candidates that should be out for each device, so that none waits while the oldest batch is finished
_MOST_AHEAD = 16  # batches: more than a search proposes in a second, and all of them are asked before the first is told
_HEAT = 10.0  # times the patience with one candidate

Prepare = Callable[[Sequence[Candidate], Ready], None]


class DevicePool(Measurer):
    """Measures on its members, which it closes in the end, each candidate on whichever is free; a heat is held on one of them.

    device:   the product the members share; rows name the member that measured them
    prepare:  as `Measurer.prepare`, for all members; None = a candidate needs nothing but a device
    on_close: called when all members are closed

    The other arguments are those of `Dispatcher`.
    """

    def __init__(
        self,
        device: Device,
        members: Sequence[Member] = (),
        *,
        prepare: Prepare | None = None,
        patience_s: float | None = None,
        wait_s: float = 0.0,
        say: Callable[[str], None] = lambda text: None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._device, self._prepare, self._on_close = device, prepare, on_close
        self._desk = Dispatcher(patience_s, wait_s, say)
        for member in members:
            self.join(member)

    @property
    def device(self) -> Device:
        return self._device

    @property
    def ahead(self) -> int:
        n = len(self._desk.members)
        return min(_MOST_AHEAD, 1 + ceil(_OUT * n / BATCH)) if n > 1 else 1

    @property
    def at_once(self) -> int:
        return max(1, len(self._desk.members))

    def join(self, member: Member) -> None:
        """One more device, which gets work at once."""
        self._desk.join(member)

    def leave(self, member: Member, why: str) -> None:
        """The device is gone; what it was measuring is measured elsewhere."""
        self._desk.leave(member, why)

    @property
    def members(self) -> tuple[Member, ...]:
        """The devices that are there."""
        return self._desk.members

    def census(self) -> Census:
        """Who is there, and what became of what was asked."""
        return self._desk.census()

    def begin(self, candidates: Sequence[Candidate], best_us: float | None, look: Look | None, keep: Keep) -> Rows:
        tickets = [self._ticket(c, best_us, look, keep) for c in candidates]
        waiting: dict[Candidate, list[Ticket[Measurement]]] = {}
        for candidate, ticket in zip(candidates, tickets, strict=True):
            waiting.setdefault(candidate, []).append(ticket)

        def ready(candidate: Candidate) -> None:
            for ticket in waiting.pop(candidate, ()):
                self._desk.submit(ticket)

        if self._prepare is not None:
            self._prepare(candidates, ready)
        else:
            for candidate in candidates:
                ready(candidate)
        return _Rows(self._desk, tickets)

    def _ticket(self, c: Candidate, best_us: float | None, look: Look | None, keep: Keep) -> Ticket[Measurement]:
        def ask(member: Member) -> Future[Measurement]:
            return member.measure(c, best_us, look)

        return Ticket(ask, _is_lost, lambda device, why: _lost(c, device, why), keep)

    def stream(
        self, candidates: Sequence[Candidate], best_us: float | None = None, look: Look | None = None
    ) -> Iterator[Measurement]:
        rows = self.begin(candidates, best_us, look, lambda row: row)
        try:
            yield from rows
        finally:
            rows.close()

    def heat(self, op: str, schedules: Sequence[str], rivals: Sequence[str] = ("",), rounds: int = 7) -> Heat:
        listed, beside = tuple(schedules), tuple(rivals)

        def lost(device: Device, why: str) -> Heat:
            return Heat(tuple(_lost(Candidate(op, s), device, why) for s in listed), ())

        ticket: Ticket[Heat] = Ticket(
            lambda member: member.heat(op, listed, beside, rounds), lambda heat: False, lost, lambda heat: heat, _HEAT
        )
        self._desk.submit(ticket)
        return self._desk.wait(ticket)

    def prepare(self, candidates: Sequence[Candidate], ready: Ready = ignore) -> None:
        if self._prepare is not None:
            self._prepare(candidates, ready)

    def close(self) -> None:
        self._desk.close()
        self._on_close()


class _Rows:
    """Rows of a batch in the order of its candidates."""

    def __init__(self, desk: Dispatcher, tickets: Sequence[Ticket[Measurement]]) -> None:
        self._desk, self._tickets, self._next = desk, tickets, 0

    def __iter__(self) -> Iterator[Measurement]:
        return self

    def __next__(self) -> Measurement:
        if self._next == len(self._tickets):
            raise StopIteration
        ticket = self._tickets[self._next]
        row = self._desk.wait(ticket)
        self._next += 1
        return row

    def close(self) -> None:
        left, self._next = self._tickets[self._next :], len(self._tickets)
        for ticket in reversed(left):  # the last ones first, so that no device begins one while others are given up
            self._desk.give_up(ticket)


def _is_lost(row: Measurement) -> bool:
    return row.status == "device_lost"


def _lost(candidate: Candidate, device: Device, why: str) -> Measurement:
    """The row of a measurement that was lost with its device, twice or where there was no other."""
    return Measurement(
        candidate.op,
        candidate.schedule,
        "",
        device,
        "device_lost",
        protocol=Protocol(),
        message=f"the device was lost: {why}",
        id=new_id(),
        time_utc=now_utc(),
    )
