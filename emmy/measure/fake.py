"""A measurer without a device, for trying out searches and for tests of what surrounds one.

Times follow from the text of op and schedule alone, so any two runs agree on every row, whatever was killed in between.
They are shaped like real ones: each number in a schedule has a best value, and distance from it, in octaves, costs time.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import log2
from statistics import median

from emmy.measure.measurer import Heat, Look, Measurer, Rivalled, speedup
from emmy.records import Candidate, Device, Measurement, Protocol, Status

_MOVE = re.compile(r"(?P<path>\S+)\((?P<args>[^()]*)\)")
_COST = 0.05  # share of the time that one octave from the best value adds, squared


class FakeMeasurer(Measurer):
    """Rows by formula. `delay_s` is spent on each candidate; `faults` gives some schedules another status.

    `fault_share` of all other candidates fail as well, picked by their text. `product` is what the device calls itself,
    `name` tells it from others of its product, which give the same times.
    """

    def __init__(
        self,
        target: str = "cpu",
        *,
        seed: int = 0,
        delay_s: float = 0.0,
        faults: Mapping[str, Status] | None = None,
        fault_share: float = 0.0,
        threads: int = 1,
        product: str = "fake",
        name: str = "device",
    ) -> None:
        self.seed, self.delay_s, self.fault_share, self.threads = seed, delay_s, fault_share, threads
        self.faults = dict(faults or {})
        self._device = Device(target, product, _hex(name)[:16], "fake", "fake")
        self.n_measured = 0

    @property
    def device(self) -> Device:
        return self._device

    def stream(
        self, candidates: Sequence[Candidate], best_us: float | None = None, look: Look | None = None
    ) -> Iterator[Measurement]:
        for candidate in candidates:
            time.sleep(self.delay_s)
            self.n_measured += 1
            yield self._row(candidate)

    def source_digest(self, candidate: Candidate) -> str:
        return _hex(f"{candidate.op}\n{candidate.schedule}")

    def heat(self, op: str, schedules: Sequence[str], rivals: Sequence[str] = ("",), rounds: int = 7) -> Heat:
        rows = tuple(self._raced(row) for row in self.stream([Candidate(op, s) for s in schedules]))
        return Heat(rows, tuple(Rivalled(x, x or "fake", "ok", "", self._stock_us(op)) for x in rivals))

    def time_us(self, candidate: Candidate) -> float:
        """The time the formula gives, faults aside."""
        scale = 1.0
        for move in _MOVE.finditer(candidate.schedule):
            for i, word in enumerate(move["args"].split(",")):
                if word.strip().isdigit() and int(word) > 0:
                    best = self._unit(f"best {move['path']} {i}") * 8
                    scale += _COST * (log2(int(word)) - best) ** 2
                else:
                    scale += _COST * self._unit(f"word {move['path']} {i} {word}")
        base_us = 100.0 * (1 + self._unit(f"op {candidate.op}"))
        return base_us * scale * (1 + 0.01 * self._unit(f"noise {candidate.op} {candidate.schedule}"))

    def _row(self, candidate: Candidate) -> Measurement:
        status = self._status(candidate)
        time_us = self.time_us(candidate)
        spread = [1 + 0.002 * self._unit(f"{i} {candidate.op} {candidate.schedule}") for i in range(7)]
        return Measurement(
            op=candidate.op,
            schedule=candidate.schedule,
            source_digest=self.source_digest(candidate),
            device=self._device,
            status=status,
            samples_us=tuple(time_us * s for s in spread) if status == "ok" else (),
            protocol=Protocol(threads=self.threads),
            error_norm=0.5 if status == "ok" else None,
            message="" if status == "ok" else f"this candidate is meant to end as {status}",
        )

    def _raced(self, row: Measurement) -> Measurement:
        if row.status != "ok":
            return row
        stock_us = self._stock_us(row.op)
        ratio = speedup(row.samples_us, stock_us)
        assert ratio is not None
        static = {**row.static, "speedup": ratio.median, "speedup_low": ratio.low, "speedup_high": ratio.high}
        return replace(row, baseline_us=median(stock_us), baseline="fake", static=static)

    def _stock_us(self, op: str) -> tuple[float, ...]:
        return (150.0 * (1 + self._unit(f"op {op}")),) * 7

    def _status(self, candidate: Candidate) -> Status:
        if candidate.schedule in self.faults:
            return self.faults[candidate.schedule]
        is_fault = self._unit(f"fault {candidate.op} {candidate.schedule}") < self.fault_share
        return "runtime" if is_fault else "ok"

    def _unit(self, text: str) -> float:
        """A number in [0, 1) that the seed and the text alone decide."""
        return int(_hex(f"{self.seed} {text}")[:12], 16) / 16**12


def _hex(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
