"""Rows to store: plausible, each different, with every optional field both set and not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from emmy.measure.journal import Journal, RunHeader, journal_path
from emmy.records import Device, Measurement, Protocol

MakeRow = Callable[..., Measurement]
WriteJournal = Callable[..., Path]


def make_row(number: int, **changes: object) -> Measurement:
    """The same row for the same number; `changes` replace fields, `target` and `uuid_hash` those of the device."""
    rng = random.Random(number)
    failed = number % 5 == 4
    device = {
        "target": "cpu",
        "product": "O'Neil's CPU, 2 cores",
        "uuid_hash": "9f" * 8,
        "driver": "",
        "toolkit": "gcc 12.2",
    }
    device |= {k: str(changes.pop(k)) for k in ("target", "uuid_hash") if k in changes}
    fields: dict[str, object] = {
        "op": f"matmul:{64 * (1 + number % 3)}x256x256:f32",
        "schedule": f"k0/split(m,core,{number}) k0/stage(B,pack,1)",
        "source_digest": f"{number:08x}",
        "device": Device(**device),
        "status": "correctness" if failed else "ok",
        "samples_us": ()
        if failed
        else tuple(100 * rng.uniform(0.99, 1.01) * 10 ** rng.uniform(-0.01, 0.01) for _ in range(7)),
        "protocol": Protocol(cache="warm" if number % 2 else "cold", clock="thread_cpu"),
        "error_norm": math.inf if failed else rng.choice([None, rng.random() * 1e-17]),
        "static": {"code_bytes": 1234, "spills": 0.1 + 0.2, "tiny": 5e-324},
        "message": "line one\nline two, \"quoted\", 'ünï'" if failed else "",
        "clock_mhz": rng.choice([None, 3141.59]),
        "contended": False,
        "compile_s": rng.random(),
        "wall_s": rng.random(),
        "baseline_us": rng.choice([None, 110.0]),
        "baseline": "torch",
        "run_id": "run",
        "emmy_version": "0.1.0",
        "id": f"{number:032x}",
        "time_utc": f"2026-01-01T00:{number // 60 % 60:02d}:{number % 60:02d}.000+00:00",
    }
    return Measurement(**{**fields, **changes})  # type: ignore[arg-type]


def write_journal(home: Path, run_id: str, rows: list[Measurement], *, close: bool = True) -> Path:
    """The journal that now holds `rows`."""
    journal = Journal.create(journal_path(home, run_id), RunHeader(run_id, "matmul", "cpu", "random", 0, "10 trials"))
    for i, row in enumerate(rows):
        journal.append(row, elapsed_s=float(i))
    if close:
        return journal.close()
    journal.leave()
    return journal.path


@pytest.fixture(name="make_row")
def _make_row() -> MakeRow:
    return make_row


@pytest.fixture(name="write_journal")
def _write_journal() -> WriteJournal:
    return write_journal
