"""One device, many searches: a measurer for a process that has none, asked through a pipe. Knows no searches and no devices.

Lines of JSON. The client asks for a batch, then for one row at a time, so that rows it does not want are not measured:

    {"stream": [[op, schedule], ...], "best_us": 12.5}    {"heat": op, "schedules": [...], "rivals": [""], "rounds": 7}
    "next" or "stop"

Of a heat the rivals come after the rows, in one line.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict
from typing import IO

from emmy.errors import DataError
from emmy.measure.measurer import Heat, Look, Measurer, Rivalled
from emmy.records import Candidate, Device, Measurement

_END = {"end": True}


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
        self._say({"stream": [[c.op, c.schedule] for c in candidates], "best_us": best_us})
        yield from self._rows()

    def heat(self, op: str, schedules: Sequence[str], rivals: Sequence[str] = ("",), rounds: int = 7) -> Heat:
        self._say({"heat": op, "schedules": list(schedules), "rivals": list(rivals), "rounds": rounds})
        *rows, last = self._lines()
        beside = [Rivalled(**{**r, "samples_us": tuple(r["samples_us"])}) for r in json.loads(last)["rivals"]]
        return Heat(tuple(map(Measurement.from_json, rows)), tuple(beside))

    def _rows(self) -> Iterator[Measurement]:
        yield from map(Measurement.from_json, self._lines())

    def _lines(self) -> Iterator[str]:
        ended = False
        try:
            while True:
                self._say("next")
                line = self._line()
                if json.loads(line) == _END:
                    ended = True
                    return
                yield line
        finally:
            if not ended:
                self._say("stop")

    def _say(self, what: object) -> None:
        self._requests.write(json.dumps(what).encode() + b"\n")
        self._requests.flush()

    def _line(self) -> str:
        line = self._answers.readline()
        if not line.endswith(b"\n"):
            raise DataError("the process that holds the device is gone; its own log says why")
        return line.decode()


def serve(measurer: Measurer, requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answers one client until it closes its end. Raises DataError when it says something else."""

    def say(line: str) -> None:
        answers.write(line.encode() + b"\n")
        answers.flush()

    d = measurer.device
    say(json.dumps({name: getattr(d, name) for name in d.__slots__}))
    for line in requests:
        rows = _answers(measurer, line)
        for word in requests:
            if json.loads(word) != "next":
                break
            row = next(rows, None)
            say(json.dumps(_END) if row is None else row)
            if row is None:
                break
        rows.close()


def _answers(measurer: Measurer, request: bytes) -> Generator[str, None, None]:
    match json.loads(request):
        case {"stream": list(pairs), "best_us": best_us}:
            for row in measurer.stream([Candidate(op, schedule) for op, schedule in pairs], best_us):
                yield row.to_json()
        case {"heat": str(op), "schedules": list(schedules), "rivals": list(rivals), "rounds": int(rounds)}:
            found = measurer.heat(op, schedules, rivals, rounds)
            yield from (row.to_json() for row in found.rows)
            yield json.dumps({"rivals": [asdict(r) for r in found.rivals]})
        case other:
            raise DataError(f"a client of the device asked {str(other)[:100]!r}, which is no request")
