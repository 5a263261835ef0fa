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
from typing import Any, Self

from emmy.codegen.files import appearing
from emmy.errors import DeviceBusy
from emmy.measure.device_pool import DevicePool
from emmy.measure.lock import DeviceLock
from emmy.records import now_utc
from emmy.search.courses import Courses
from emmy.search.events import Event, Measured, Note

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
class SearchStatus:
    """One search that is under way. `eta_s`: until its budget is spent; None before its first trial, and where only patience
    limits it.
    """

    op: str
    phase: str  # search, race
    trials: int
    best_us: float | None
    eta_s: float | None


@dataclass(frozen=True, slots=True)
class KindStatus:
    """One kind of card, and the searches that run on it now: none between two of them, and `abreast` at most.

    per_minute:  rows of the last minute;  waiting: candidates that are ready and find no free device
    lost, again: times that a device was lost with a measurement, and of them tried on another one
    ops:         searches that are asked for, an op or a range of its sizes each; ops_done: of them ended, those included that
                 ended before the command was interrupted
    eta_all_s:   until all of them have ended, `abreast` at a time; None while nothing says how long one takes
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
    searches: tuple[SearchStatus, ...]
    abreast: int
    ops_done: int
    ops: int
    eta_all_s: float | None


@dataclass(frozen=True, slots=True)
class Status:
    """One command. Times are seconds."""

    pid: int
    began_utc: str
    time_utc: str
    kinds: tuple[KindStatus, ...]


@dataclass(slots=True)
class _Kind:
    """What events have told of one target."""

    pool: DevicePool
    courses: Courses = field(default_factory=Courses)
    statuses: Counter[str] = field(default_factory=Counter)
    arrived_s: deque[float] = field(default_factory=deque)


class Board:
    """A listener that knows how it goes; its file below `home` is written each second while it is entered."""

    def __init__(self, home: Path, pools: Mapping[str, DevicePool]) -> None:
        """`pools`: by target."""
        self._folder = home / "fleet"
        self._kinds = {name: _Kind(pool) for name, pool in pools.items()}
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
        if isinstance(event, Note) or (kind := self._kinds.get(event.target)) is None:
            return
        with self._lock:
            course = kind.courses.hear(event)
            if isinstance(event, Measured) and course is not None and course.is_new:
                kind.statuses[event.row.status] += 1
                kind.arrived_s.append(time.monotonic())

    def status(self) -> Status:
        """How it goes now."""
        with self._lock:
            kinds = tuple(_status(name, kind) for name, kind in self._kinds.items())
        return Status(os.getpid(), self._began_utc, now_utc(), kinds)

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


def _status(target: str, k: _Kind) -> KindStatus:
    now, census, courses = time.monotonic(), k.pool.census(), k.courses
    while k.arrived_s and k.arrived_s[0] < now - WINDOW_S:
        k.arrived_s.popleft()
    span_s = max(1.0, now - k.arrived_s[0]) if k.arrived_s else 1.0
    devices = tuple(
        DeviceStatus(s.place, "busy" if s.busy else "idle", s.answered, round(60 * s.answered / max(s.here_s, 1.0), 1))
        for s in census.seats
    )
    searches = tuple(SearchStatus(c.op, c.phase, c.trials, c.best_us, c.eta_s) for c in courses.under_way.values())
    return KindStatus(
        target, k.pool.device.product, devices, census.left, round(60 * len(k.arrived_s) / span_s, 1), census.waiting,
        dict(k.statuses), census.lost, census.again, searches, courses.abreast, courses.ended, courses.runs, courses.eta_s,
    )  # fmt: skip


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
        kinds = tuple(_read_kind(k) for k in raw["kinds"])
        return Status(raw["pid"], raw["began_utc"], raw["time_utc"], kinds)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read_kind(raw: Mapping[str, Any]) -> KindStatus:
    devices = tuple(DeviceStatus(**d) for d in raw["devices"])
    searches = tuple(SearchStatus(**s) for s in raw["searches"])
    return KindStatus(**{**raw, "devices": devices, "searches": searches})
