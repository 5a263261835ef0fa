"""Hands what is asked to whichever device is free, and again to another when a device is lost. Knows no rows, no Ray.

Each thing asked is answered once. What a device was at when it was lost is tried once more on another; an answer that comes
after a device was given up is dropped.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar, cast

from emmy.errors import NoSuchDevice
from emmy.measure.member import Member, MemberLost
from emmy.records import Device

T = TypeVar("T")

ATTEMPTS = 2
LOOK_S = 0.2  # how often whoever waits looks for devices that hang

_numbers = count()


@dataclass(slots=True, eq=False)
class Ticket(Generic[T]):
    """One thing that is asked, in the order of their making.

    ask:      hands it to a device
    is_lost:  whether an answer says that the device was lost to something else than what was asked
    lost:     the answer when it is lost for good: by which device, and why
    finish:   the answer as whoever asked gets it, called once, in any thread
    patience: how much longer than usual it may take
    """

    ask: Callable[[Member], Future[T]]
    is_lost: Callable[[T], bool]
    lost: Callable[[Device, str], T]
    finish: Callable[[T], T]
    patience: float = 1.0
    n: int = field(default_factory=lambda: next(_numbers))
    was_on: list[Member] = field(default_factory=list)
    until_s: float | None = None
    unwanted: bool = False
    answer: Future[T] = field(default_factory=Future)

    def __lt__(self, other: Ticket[T]) -> bool:
        return self.n < other.n


@dataclass(frozen=True, slots=True)
class Seat:
    """What is known of a device of a pool, for whoever shows it."""

    device: Device
    place: str
    busy: bool
    answered: int
    here_s: float  # since it joined


@dataclass(frozen=True, slots=True)
class Census:
    """Who is there and what is asked. `lost`: times that a device was lost with something; `again`: of them tried again."""

    seats: tuple[Seat, ...]
    waiting: int
    lost: int
    again: int
    left: int  # devices that went away


class Dispatcher:
    """Devices that may join and leave at any time, and what waits for them.

    patience_s: until a device that does not answer is given up; None where devices see to it themselves
    wait_s:     how long work waits where there is no device, until it fails
    say:        is told of devices that leave, in sentences
    """

    def __init__(self, patience_s: float | None, wait_s: float, say: Callable[[str], None]) -> None:
        self.patience_s, self.wait_s, self._say = patience_s, wait_s, say
        self._lock = threading.RLock()
        self._here: dict[Member, float] = {}  # since when
        self._idle: list[Member] = []  # who has rested longest comes first
        self._busy: dict[Member, Ticket[object]] = {}
        self._waiting: list[Ticket[object]] = []  # a heap
        self._answered: Counter[Member] = Counter()
        self._n_lost = self._n_again = self._n_left = 0
        self._alone_since_s, self._why_alone = time.monotonic(), "none has joined"

    # ------------------------------------------------------------ devices
    def join(self, member: Member) -> None:
        """One more device, which gets work at once."""
        with self._lock:
            self._here[member] = time.monotonic()
            self._idle.append(member)
            self._dispatch()

    def leave(self, member: Member, why: str) -> None:
        """The device is gone, and what it was at with it. Does nothing when it had left."""
        with self._lock:
            if self._here.pop(member, None) is None:
                return
            self._n_left += 1
            self._alone_since_s, self._why_alone = time.monotonic(), why
            if member in self._idle:
                self._idle.remove(member)
            ticket = self._busy.pop(member, None)
        self._say(f"{member.device.target} at {member.place} left: {why}")
        member.close()
        if ticket is not None:
            self._again(ticket, member, why, None)

    @property
    def members(self) -> tuple[Member, ...]:
        with self._lock:
            return tuple(self._here)

    def census(self) -> Census:
        now = time.monotonic()
        with self._lock:
            seats = tuple(
                Seat(m.device, m.place, m in self._busy, self._answered[m], now - since)
                for m, since in self._here.items()
            )
            waiting = sum(not t.answer.cancelled() for t in self._waiting)
            return Census(seats, waiting, self._n_lost, self._n_again, self._n_left)

    def close(self) -> None:
        """Gives all devices back, and answers nothing any more."""
        with self._lock:
            members = tuple(self._here)
            for ticket in (*self._waiting, *self._busy.values()):
                if not ticket.answer.cancel():  # it had begun: whoever waits in another thread must not wait for ever
                    ticket.answer.set_exception(CancelledError())
            for kept in (self._here, self._idle, self._busy, self._waiting):
                kept.clear()
        for member in members:
            member.close()

    # ------------------------------------------------------------ what is asked
    def submit(self, ticket: Ticket[T]) -> None:
        """Nothing but a device is needed for it."""
        with self._lock:
            heappush(self._waiting, cast(Ticket[object], ticket))
            self._dispatch()

    def wait(self, ticket: Ticket[T]) -> T:
        """The answer. Raises NoSuchDevice when there is no device that could give one."""
        while True:
            try:
                return ticket.answer.result(timeout=LOOK_S)
            except NotYet:
                if ticket.answer.done():
                    raise
                self._look_around()

    def give_up(self, ticket: Ticket[T]) -> None:
        """It is not wanted: a device that is at it ends it, and nobody begins it."""
        with self._lock:
            ticket.unwanted = True
            if ticket.answer.cancel():
                return
            if ticket in self._waiting:  # to be tried again, on a device that may never come
                self._waiting = sorted(t for t in self._waiting if t is not ticket)
                ticket.answer.set_exception(CancelledError())
                return
        try:
            self.wait(ticket)
        except (CancelledError, NoSuchDevice):
            return

    # ------------------------------------------------------------ inside
    def _dispatch(self) -> None:
        with self._lock:
            passed: list[Ticket[object]] = []
            while self._idle and self._waiting:
                ticket = heappop(self._waiting)
                if ticket.answer.cancelled():
                    continue
                member = next((m for m in self._idle if m not in ticket.was_on), None)
                if member is None:
                    passed.append(ticket)
                else:
                    self._hand(ticket, member)
            for ticket in passed:
                heappush(self._waiting, ticket)

    def _hand(self, ticket: Ticket[object], member: Member) -> None:
        if not ticket.was_on and not ticket.answer.set_running_or_notify_cancel():
            return
        self._idle.remove(member)
        self._busy[member] = ticket
        if self.patience_s is not None:
            ticket.until_s = time.monotonic() + self.patience_s * ticket.patience
        _asked(ticket, member).add_done_callback(partial(self._answer, ticket, member))

    def _answer(self, ticket: Ticket[object], member: Member, got: Future[object]) -> None:
        with self._lock:
            if self._busy.get(member) is not ticket:  # it had been given up
                return
            error = got.exception() if not got.cancelled() else MemberLost("it was closed")
            if not isinstance(error, MemberLost):
                del self._busy[member]
                self._idle.append(member)
                self._answered[member] += 1
                self._dispatch()
        if isinstance(error, MemberLost):
            self.leave(member, str(error))
        elif error is not None:
            ticket.answer.set_exception(error)
        elif ticket.is_lost(answer := got.result()):
            self._again(ticket, member, "", answer)
        else:
            _finish(ticket, answer)

    def _again(self, ticket: Ticket[object], member: Member, why: str, answer: object | None) -> None:
        """Tries it once more elsewhere, where there is an elsewhere; or says that it is lost."""
        with self._lock:
            self._n_lost += 1
            ticket.was_on.append(member)
            others = [m for m in self._here if m not in ticket.was_on]
            if len(ticket.was_on) < ATTEMPTS and not ticket.unwanted and (others or not self._here):
                self._n_again += 1
                heappush(self._waiting, ticket)
                self._dispatch()
                return
        _finish(ticket, ticket.lost(member.device, why) if answer is None else answer)

    def _look_around(self) -> None:
        """Gives up devices that hang, and fails what no device is there for."""
        now = time.monotonic()
        with self._lock:
            hung = [(m, t) for m, t in self._busy.items() if t.until_s is not None and t.until_s < now]
            alone = not self._here and now - self._alone_since_s >= self.wait_s
            stranded = [t for t in self._waiting if alone or (self._here and t.was_on and not self._others(t))]
            self._waiting = sorted(t for t in self._waiting if t not in stranded)
        for member, ticket in hung:
            self.leave(member, f"no answer in {(self.patience_s or 0) * ticket.patience:g} s")
        for ticket in stranded:
            if not alone:
                _finish(ticket, ticket.lost(ticket.was_on[-1].device, "no other device is left to try it on"))
            elif not ticket.answer.cancelled():
                ticket.answer.set_exception(NoSuchDevice(f"no device is left to measure on: {self._why_alone}"))

    def _others(self, ticket: Ticket[object]) -> bool:
        return any(m not in ticket.was_on for m in self._here)


def _asked(ticket: Ticket[object], member: Member) -> Future[object]:
    try:
        return ticket.ask(member)
    except Exception as e:  # noqa: BLE001  # whoever waits is told, not whoever freed the device
        failed: Future[object] = Future()
        failed.set_exception(e)
        return failed


def _finish(ticket: Ticket[object], answer: object) -> None:
    try:
        ticket.answer.set_result(ticket.finish(answer))
    except CancelledError:
        raise
    except Exception as e:  # noqa: BLE001  # a full disk, say: whoever waits is told, in whichever thread that is
        ticket.answer.set_exception(e)
