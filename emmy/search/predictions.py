"""Picks for cards that are not here: what is predicted of them, kept one line each. Predicts nothing, measures nothing.

    <home>/predictions/<target>.jsonl      one object a line; the latest line of an op counts

A prediction is no measurement: it is kept apart from the rows, enters no dataset, trains nothing, and gives way to any
measured winner. It holds only as long as its schedule still generates the source that was compiled and checked.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Literal

from emmy import config
from emmy.codegen.build import source
from emmy.costmodel.shards import check_target
from emmy.errors import CompileError, PlanError, UsageError
from emmy.ir.ops import Op
from emmy.ir.ops.op import Accumulate
from emmy.ir.schedule import sums_of
from emmy.ir.target import Target

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Prediction:
    """The schedule to use on a card until it is measured there. Times are microseconds.

    low_us..high_us: holds the time with probability `confidence`, as far as `basis` goes
    calibrated:      the model was judged on measured rows of this very target
    checked:         the op, this one or a smaller one, on which the emulator found the schedule's exact text right
    static:          facts of the binary
    """

    op: str
    target: str
    schedule: str
    source_digest: str
    predicted_us: float
    low_us: float
    high_us: float
    confidence: float
    calibrated: bool
    basis: str
    roof_us: float
    model: str  # digest; "" = roofline only
    model_target: str  # the card whose rows it learned from
    checked: str
    emmy_version: str
    time_utc: str
    static: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """The claim in a line, for whoever shows the schedule."""
        sure = "" if self.calibrated else ", uncalibrated"
        span = f"{self.low_us:.4g}..{self.high_us:.4g} us with {100 * self.confidence:.0f} %"
        return f"predicted {self.predicted_us:.4g} us ({span}{sure}), never measured"


@dataclass(frozen=True, slots=True)
class Rejection:
    """A schedule that is not run, and why. `by`: the code generator, the compiler or the emulator."""

    schedule: str
    by: Literal["generator", "compiler", "emulator"]
    reason: str


def keep(home: Path, prediction: Prediction) -> Path:
    """The file that now holds the prediction as its last line."""
    path = _path(home, prediction.target)
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"v": _VERSION, **asdict(prediction)}, separators=(",", ":"), allow_nan=False) + "\n"
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(out, line.encode())  # one write to the end: lines of two tuners do not mix
    finally:
        os.close(out)
    return path


def find_prediction(home: Path, op: Op, target: Target) -> Prediction | None:
    """The latest pick for the op on the target; None without one, or when its schedule generates another source now."""
    latest = _latest(home, op, target)
    return latest if latest is not None and _holds(latest, op, target) else None


def predicted_ops(home: Path, target: Target) -> tuple[str, ...]:
    """The ops that there are picks for on the target, the latest pick's first, whether they still hold or not."""
    return tuple(dict.fromkeys(p.op for p in reversed(_all(home, target))))


def has_stale_prediction(home: Path, op: Op, target: Target) -> bool:
    """Whether there is a pick for the op whose schedule generates another source now."""
    latest = _latest(home, op, target)
    return latest is not None and not _holds(latest, op, target)


def _latest(home: Path, op: Op, target: Target) -> Prediction | None:
    own = [p for p in reversed(_all(home, target)) if p.op == op.key]
    wanted: Accumulate = "hybrid" if config.fast_math() and any(sums_of(p.schedule) == "hybrid" for p in own) else "f32"
    return next((p for p in own if sums_of(p.schedule) == wanted), None)


def _all(home: Path, target: Target) -> list[Prediction]:
    """Every pick for the target, oldest first."""
    path = _path(home, target.name)
    if not path.exists():
        return []
    found = (_read(line) for line in path.read_text(encoding="utf-8", errors="replace").splitlines())
    return [p for p in found if p is not None and p.target == target.name]


def _holds(p: Prediction, op: Op, target: Target) -> bool:
    try:
        return source(op, p.schedule, target).digest == p.source_digest
    except (PlanError, UsageError, CompileError):
        return False


def _read(line: str) -> Prediction | None:
    """What a line holds; None for one that was torn, or written by another Emmy."""
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if (
        not isinstance(raw, dict)
        or raw.get("v") != _VERSION
        or raw.keys() != {f.name for f in fields(Prediction)} | {"v"}
    ):
        return None
    numbers = ("predicted_us", "low_us", "high_us", "confidence", "roof_us")
    texts = (
        "op",
        "target",
        "schedule",
        "source_digest",
        "basis",
        "model",
        "model_target",
        "checked",
        "emmy_version",
        "time_utc",
    )
    if not all(isinstance(raw[k], str) for k in texts) or not all(isinstance(raw[k], int | float) for k in numbers):
        return None
    return Prediction(**{k: v for k, v in raw.items() if k != "v"})


def _path(home: Path, target: str) -> Path:
    return home / "predictions" / f"{check_target(target)}.jsonl"
