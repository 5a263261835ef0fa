"""What a measurement is, as a row. Plain frozen data with a JSON form; must not know how rows are made or stored.

A row holds all that is needed to judge it: what ran (op, schedule, source digest), where (device, driver, toolkit),
how (protocol, clocks, load), and what came out (status, all samples in microseconds, error norm).
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import Literal, get_args

from emmy.errors import DataError

SCHEMA_VERSION = 1
# Digits that a row keeps of the SHA-256 of its source, of 64: told apart are the texts that one schedule gave over time.
SOURCE_DIGITS = 16

Status = Literal[
    "ok", "constraints", "compile", "runtime", "correctness", "timeout", "device_lost", "implausible", "passed_over"
]
Origin = Literal["measured", "imported", "derived"]
STATUSES: tuple[Status, ...] = get_args(Status)
ORIGINS: tuple[Origin, ...] = get_args(Origin)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One thing to measure: op and schedule text replay to the same source for a given Emmy version and target."""

    op: str
    schedule: str


@dataclass(frozen=True, slots=True)
class Device:
    """Where a row was measured. `uuid_hash` is a hash: it tells devices apart and reveals none."""

    target: str  # name of the target TOML: "cpu", "h200", "rtx4090"
    product: str  # as the device names itself
    uuid_hash: str
    driver: str
    toolkit: str  # compiler and version that built the binary

    @property
    def identity(self) -> str:
        """This one device, whatever drives it and compiles for it."""
        return f"{self.product} {self.uuid_hash}"


@dataclass(frozen=True, slots=True)
class Protocol:
    """How a row was timed. Ratios are taken only between rows of one protocol."""

    cache: Literal["cold", "warm"] = "cold"
    clocks: Literal["burst", "sustained"] = "burst"
    clock: Literal["thread_cpu", "wall", "event"] = "wall"
    threads: int = 1
    repeats: int = 7


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row of the dataset. Times are microseconds of one whole plan (every launch counts)."""

    op: str
    schedule: str
    source_digest: str  # `source_mark` of the source that ran; a longer digest is cut to it
    device: Device
    status: Status
    samples_us: tuple[float, ...] = ()
    protocol: Protocol = Protocol()
    origin: Origin = "measured"
    error_norm: float | None = None  # max |got - reference| / tolerance scale of the op
    static: Mapping[str, float] = field(default_factory=dict)  # registers, code bytes, ...
    message: str = ""  # why, when the status is not ok
    clock_mhz: float | None = None
    temperature_c: float | None = None
    contended: bool = False  # another process used the device, or it was throttled
    compile_s: float = 0.0
    wall_s: float = 0.0  # seconds this measurement took, compilation excluded
    baseline_us: float | None = None  # stock kernel, interleaved with this one in the same process
    baseline: str = ""  # its name: "torch", "numpy"
    run_id: str = ""
    emmy_version: str = ""
    id: str = ""
    time_utc: str = ""

    def __post_init__(self) -> None:
        if len(self.source_digest) > SOURCE_DIGITS:  # as rows were written before
            object.__setattr__(self, "source_digest", source_mark(self.source_digest))

    @property
    def time_us(self) -> float | None:
        """Median of the samples; None unless the status is ok."""
        if self.status != "ok" or not self.samples_us:
            return None
        ordered = sorted(self.samples_us)
        n = len(ordered)
        return ordered[n // 2] if n % 2 else 0.5 * (ordered[n // 2 - 1] + ordered[n // 2])

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.op, self.schedule)

    def to_json(self) -> str:
        """One line of JSON, the form a journal stores."""
        return json.dumps({"v": SCHEMA_VERSION, **asdict(self)}, separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, line: str) -> Measurement:
        """The row a journal line holds. Raises DataError naming the bad field."""
        try:
            raw = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise DataError(f"journal line is not JSON: {e}") from None
        if not isinstance(raw, dict) or raw.get("v") != SCHEMA_VERSION:
            got = raw.get("v") if isinstance(raw, dict) else type(raw).__name__
            raise DataError(f"journal line has schema version {got}, this Emmy reads {SCHEMA_VERSION}")
        unknown = set(raw) - {f.name for f in fields(cls)} - {"v"}
        if unknown:
            raise DataError(f"journal line has unknown fields {sorted(unknown)}")
        try:
            row = cls(
                **{
                    **{k: v for k, v in raw.items() if k != "v"},
                    "device": Device(**raw["device"]),
                    "protocol": Protocol(**raw["protocol"]),
                    "samples_us": tuple(float(x) for x in raw["samples_us"]),
                }
            )
        except (KeyError, TypeError, ValueError) as e:
            raise DataError(f"journal line lacks or mistypes a field: {e}") from None
        if row.status not in STATUSES or row.origin not in ORIGINS:
            raise DataError(f"status {row.status!r} / origin {row.origin!r} is not one of {STATUSES} / {ORIGINS}")
        if any(not math.isfinite(x) or x <= 0 for x in row.samples_us):
            raise DataError(f"samples_us must be positive and finite, got {row.samples_us}")
        return row


def source_mark(digest: str) -> str:
    """What a row keeps of its source's digest; two digests are compared by it."""
    return digest[:SOURCE_DIGITS]


def new_id() -> str:
    """A fresh measurement or run id: 16 hexadecimal digits, so that of a million rows two are alike once in 30 million datasets."""
    return secrets.token_hex(8)


def now_utc() -> str:
    """The present time as ISO 8601 in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
