"""One device, many searches: a measurer for a process that has none, asked through a pipe. Knows no searches and no devices.

Lines of JSON. The client asks for a batch, then for one row at a time, so that rows it does not want are not measured. It gets
each as soon as it was measured, which on several devices may be before its turn, and stores it then:

    {"rows": [[op, schedule], ...], "best_us": 12.5}      "next" ... "stop"
    {"heat": op, "schedules": [...], "rivals": [""], "rounds": 7}

Of a heat the rivals come after the rows, in one line; or one line says that it was withdrawn.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import IO

from emmy.errors import DataError, EmmyError
from emmy.measure.measurer import Heat, Keep, Look, Measurer, Rivalled, Rows, Withdrawn
from emmy.records import Candidate, Device, Measurement

_END = {"end": True}
_WITHDRAWN = {"withdrawn": True}
_LOOK_S = 0.2


def _as_it_is(row: Measurement) -> Measurement:
    return row


class ServedMeasurer(Measurer):
    """Measures by asking whoever holds the device at the other end. Used by one thread."""

    def __init__(self, answers: IO[bytes], requests: IO[bytes]) -> None:
        """Raises DataError when the other end says nothing."""
        self._answers, self._requests = answers, requests
        self._device = Device(**json.loads(self._line()))

    @property
    def device(self) -> Device:
        return self._device

    def stream(
        self, candidates: Sequence[Candidate], best_us: float | None = None, look: Look | None = None
    ) -> Iterator[Measurement]:
        yield from self.begin(candidates, best_us, look, _as_it_is)

    def begin(self, candidates: Sequence[Candidate], best_us: float | None, look: Look | None, keep: Keep) -> Rows:
        here: dict[Candidate, deque[Measurement]] = defaultdict(deque)  # rows that were not taken yet
        self._say({"rows": [[c.op, c.schedule] for c in candidates], "best_us": best_us})
        try:
            for candidate in candidates:
                self._say("next")
                while not here[candidate]:
                    row = keep(Measurement.from_json(self._line()))
                    here[row.candidate].append(row)
                yield here[candidate].popleft()
        except EmmyError:  # it cannot be kept, or nobody is there any more: what still comes is not kept either
            keep = _as_it_is
            raise
        finally:
            self._say("stop")
            while json.loads(line := self._line()) != _END:
                keep(Measurement.from_json(line))

    def heat(self, op: str, schedules: Sequence[str], rivals: Sequence[str] = ("",), rounds: int = 7) -> Heat:
        self._say({"heat": op, "schedules": list(schedules), "rivals": list(rivals), "rounds": rounds})
        rows = []
        while "rivals" not in (last := json.loads(line := self._line())):
            if last == _WITHDRAWN:
                raise Withdrawn(f"{op}: the race had not begun when it was told to stop; the same command holds it")
            rows.append(Measurement.from_json(line))
        beside = (Rivalled(**{**r, "samples_us": tuple(r["samples_us"])}) for r in last["rivals"])
        return Heat(tuple(rows), tuple(beside))

    def _say(self, what: object) -> None:
        self._requests.write(json.dumps(what).encode() + b"\n")
        self._requests.flush()

    def _line(self) -> str:
        line = self._answers.readline()
        if not line.endswith(b"\n"):
            raise DataError("the process that holds the device is gone; its own log says why")
        return line.decode()


class Turns:
    """Whose heat is next, of several clients of one measurer: one a device at a time, so that those that wait can be withdrawn.

    is_over: whether no more are to begin
    """

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self._is_over, self._held, self._free = is_over, 0, threading.Condition()

    @contextmanager
    def turn(self, measurer: Measurer) -> Iterator[None]:
        """Within: a heat may be held. Raises Withdrawn instead, once none is to begin."""
        with self._free:
            while not self._is_over() and self._held >= measurer.at_once:
                self._free.wait(_LOOK_S)
            if self._is_over():
                raise Withdrawn("no more races are begun")
            self._held += 1
        try:
            yield
        finally:
            with self._free:
                self._held -= 1
                self._free.notify()


class Served:
    """The other end: answers one client."""

    def __init__(self, measurer: Measurer, requests: IO[bytes], answers: IO[bytes], turns: Turns) -> None:
        self._measurer, self._turns = measurer, turns
        self._requests, self._answers, self._lock = requests, answers, threading.Lock()

    def serve(self) -> None:
        """Until the client closes its end, or is killed. Raises DataError when it says something else."""
        d = self._measurer.device
        self._say(json.dumps({name: getattr(d, name) for name in d.__slots__}))
        for line in self._requests:
            match json.loads(line):
                case {"rows": list(pairs), "best_us": best_us}:
                    self._rows([Candidate(op, schedule) for op, schedule in pairs], best_us)
                case {"heat": str(op), "schedules": list(schedules), "rivals": list(rivals), "rounds": int(rounds)}:
                    self._heat(op, schedules, rivals, rounds)
                case other:
                    raise DataError(f"a client of the device asked {str(other)[:100]!r}, which is no request")

    def _rows(self, candidates: Sequence[Candidate], best_us: float | None) -> None:
        rows = self._measurer.begin(candidates, best_us, None, self._pass_on)
        try:
            for word in self._requests:
                if json.loads(word) != "next":
                    break
                next(rows)
        finally:
            rows.close()
        self._say(json.dumps(_END))

    def _pass_on(self, row: Measurement) -> Measurement:
        """From whatever thread."""
        self._say(row.to_json())
        return row

    def _heat(self, op: str, schedules: Sequence[str], rivals: Sequence[str], rounds: int) -> None:
        try:
            with self._turns.turn(self._measurer):
                found = self._measurer.heat(op, schedules, rivals, rounds)
        except Withdrawn:
            self._say(json.dumps(_WITHDRAWN))
            return
        for row in found.rows:
            self._say(row.to_json())
        self._say(json.dumps({"rivals": [asdict(r) for r in found.rivals]}))

    def _say(self, line: str) -> None:
        """Of a client that was killed whoever reads its requests sees the end."""
        with self._lock, suppress(BrokenPipeError):
            self._answers.write(line.encode() + b"\n")
            self._answers.flush()
