"""How a command that tunes on several devices is doing: gathered from its events and its pools, told to a file and to readers.

The file lies in the home, so that `emmy fleet status` needs neither Ray nor a port. It is no data: rows are in the journals.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from emmy.codegen.files import appearing
from emmy.errors import DeviceBusy
from emmy.measure.device_pool import DevicePool
from emmy.measure.lock import DeviceLock
from emmy.records import now_utc
from emmy.search.events import Event, Finished, Measured, Racing, Started

WINDOW_S = 60.0  # that rates are taken over
_WRITE_S = 1.0


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """One device. `place`: its machine, and the beginning of its hash."""

    place: str
    state: str  # busy, idle
    answered: int
    per_minute: float  # since it joined


@dataclass(frozen=True, slots=True)
class KindStatus:
    """One kind of card, and the search that runs on it now.

    per_minute:  rows of the last minute;  waiting: candidates that are ready and find no free device
    lost, again: times that a device was lost with a measurement, and of them tried on another one
    eta_s:       until the op's budget is spent, and until that of all ops; None where only patience limits it
    """

    target: str
    product: str
    devices: tuple[DeviceStatus, ...]
    left: int
    per_minute: float
    waiting: int
    statuses: Mapping[str, int]
    lost: int
    again: int
    op: str
    phase: str  # search, race, done, or "" before the first
    trials: int
    best_us: float | None
    ops_done: int
    ops: int
    eta_s: float | None
    eta_all_s: float | None


@dataclass(frozen=True, slots=True)
class Status:
    """One command. Times are seconds."""

    pid: int
    began_utc: str
    time_utc: str
    kinds: tuple[KindStatus, ...]


@dataclass(slots=True)
class _Course:
    """What events have told of one target."""

    ops: int
    op: str = ""
    phase: str = ""
    resumed: int = 0
    trials: int = 0
    best_us: float | None = None
    eta_s: float | None = None
    took_s: list[float] = field(default_factory=list)  # by each op that has ended
    budget_s: float | None = None
    statuses: Counter[str] = field(default_factory=Counter)
    arrived_s: deque[float] = field(default_factory=deque)


class Board:
    """A listener that knows how it goes; its file below `home` is written each second while it is entered."""

    def __init__(self, home: Path, pools: Mapping[str, tuple[DevicePool, int]]) -> None:
        """`pools`: by target, with the number of searches that are to be done there."""
        self._folder, self._pools = home / "fleet", {name: pool for name, (pool, _) in pools.items()}
        self._courses = {name: _Course(ops) for name, (_, ops) in pools.items()}
        self._began_utc, self._lock, self._over = now_utc(), threading.Lock(), threading.Event()
        self._alive = DeviceLock(self._folder, f"{os.getpid()}")
        self._writer = threading.Thread(target=self._write, name="emmy-status", daemon=True)

    def __enter__(self) -> Self:
        self._alive.acquire()
        self._writer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        self._writer.join()
        self._file.unlink(missing_ok=True)
        self._alive.path.unlink(missing_ok=True)
        self._alive.release()

    def __call__(self, event: Event) -> None:
        with self._lock:
            match event:
                case Started(target=target) if course := self._courses.get(target):
                    course.op, course.phase, course.resumed = event.op, "search", event.resumed
                    course.trials, course.best_us, course.budget_s = 0, None, event.budget.seconds
                case Measured(row=row) if course := self._courses.get(row.device.target):
                    course.trials, course.best_us, course.eta_s = event.n, event.best_us, event.eta_s
                    if event.n > course.resumed:
                        course.statuses[row.status] += 1
                        course.arrived_s.append(time.monotonic())
                case Racing(target=target) if course := self._courses.get(target):
                    course.phase, course.eta_s = "race", 0.0
                case Finished(target=target) if course := self._courses.get(target):
                    course.phase = "done"
                    course.took_s.append(event.elapsed_s)

    def status(self) -> Status:
        """How it goes now."""
        with self._lock:
            kinds = tuple(self._kind(name, course) for name, course in self._courses.items())
        return Status(os.getpid(), self._began_utc, now_utc(), kinds)

    def _kind(self, name: str, c: _Course) -> KindStatus:
        now, census = time.monotonic(), self._pools[name].census()
        while c.arrived_s and c.arrived_s[0] < now - WINDOW_S:
            c.arrived_s.popleft()
        span_s = max(1.0, now - c.arrived_s[0]) if c.arrived_s else 1.0
        devices = tuple(
            DeviceStatus(
                s.place, "busy" if s.busy else "idle", s.answered, round(60 * s.answered / max(s.here_s, 1.0), 1)
            )
            for s in census.seats
        )
        return KindStatus(
            name, self._pools[name].device.product, devices, census.left, round(60 * len(c.arrived_s) / span_s, 1),
            census.waiting, dict(c.statuses), census.lost, census.again, c.op, c.phase, c.trials, c.best_us,
            len(c.took_s), c.ops, c.eta_s, _eta_all_s(c),
        )  # fmt: skip

    # ------------------------------------------------------------ the file
    @property
    def _file(self) -> Path:
        return self._folder / f"{os.getpid()}.json"

    def _write(self) -> None:
        while True:
            with appearing(self._file) as new:
                new.write_text(json.dumps({"v": 1, **asdict(self.status())}), encoding="utf-8")
            if self._over.wait(_WRITE_S):
                return


def _eta_all_s(c: _Course) -> float | None:
    """Until all ops are done: those to come take as long as their budget, or as those that ended did."""
    left = c.ops - len(c.took_s) - (c.phase != "done")
    each_s = c.budget_s if c.budget_s is not None else sum(c.took_s) / len(c.took_s) if c.took_s else None
    if c.phase == "done":
        return None if left and each_s is None else left * (each_s or 0.0)
    return None if c.eta_s is None or (left > 0 and each_s is None) else c.eta_s + left * (each_s or 0.0)


def running(home: Path) -> tuple[Status, ...]:
    """The commands that tune on several devices now, below this home. Removes what those that were killed left behind."""
    found = []
    for path in sorted((home / "fleet").glob("*.json")):
        lock = DeviceLock(path.parent, path.stem)
        try:
            lock.acquire()
        except DeviceBusy:
            if (status := _read(path)) is not None:
                found.append(status)
            continue
        path.unlink(missing_ok=True)
        lock.path.unlink(missing_ok=True)
        lock.release()
    return tuple(found)


def _read(path: Path) -> Status | None:
    """None for a file that has just gone, or is of another Emmy."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        kinds = tuple(
            KindStatus(**{**k, "devices": tuple(DeviceStatus(**d) for d in k["devices"])}) for k in raw["kinds"]
        )
        return Status(raw["pid"], raw["began_utc"], raw["time_utc"], kinds)
    except (OSError, ValueError, KeyError, TypeError):
        return None
