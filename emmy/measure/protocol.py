"""The messages between a measurer and its worker, as lines of JSON. Knows no devices and no processes.

A request is a `Job`, the answer a `Report` with one `Outcome` a library, in the job's order. Nothing is unpickled: a
kernel that scribbles over its process can make a line unreadable (the parser then gives None), never run code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from emmy.ir.ops.op import Accumulate

VERSION = 1
# Exit codes of a worker that gives up by itself; the last it prints says why.
# In the place of a library's number: the first of the rivals is loaded or checked; of the next it is one less.
STOCK = -2
FAULTED, LOST = 81, 82  # a candidate made the device unusable for this process; the device failed


@dataclass(frozen=True, slots=True)
class Job:
    """Check the libraries, then time those that passed, interleaved. All of them compute `op`."""

    id: int
    op: str
    libraries: tuple[str, ...]
    run_limit_s: float  # longer than this for one run is a hang
    samples: int = 7
    thorough: bool = False  # always all samples; otherwise slow or hopeless candidates get fewer
    rivals: tuple[str, ...] = ()  # stock kernels to time among them, by name; "" = the usual
    best_us: float | None = None  # the best time known for the op
    patience_s: float | None = None  # a candidate whose run took longer is given up, though it came back
    accumulate: tuple[Accumulate, ...] = ()  # how each library keeps its sums; () = all in f32

    def to_json(self) -> str:
        return _line(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Job:
        """The job a line holds. The worker trusts its parent, so that a bad line is a bug (KeyError, TypeError)."""
        raw = json.loads(line)
        assert raw.pop("v") == VERSION
        return cls(**{**raw, **{k: tuple(raw[k]) for k in ("libraries", "accumulate", "rivals")}})


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one library did. `status` is one of records.Status; samples are in the order they were taken."""

    status: str
    message: str = ""
    error_norm: float | None = None  # None too when an answer was not a number at all
    samples_us: tuple[float, ...] = ()
    warm_us: float | None = None  # the same on operands just used
    sustained_us: float | None = None  # the same under lasting load, where that is another state


@dataclass(frozen=True, slots=True)
class Rival:
    """What the stock kernel that was asked for as `asked` did; `name` says which one it is: "torch", "numpy"."""

    asked: str
    name: str
    outcome: Outcome  # not ok: it computes something else


@dataclass(frozen=True, slots=True)
class Report:
    """The answer to the job of that id."""

    id: int
    outcomes: tuple[Outcome, ...]
    rivals: tuple[Rival, ...] = ()  # in the job's order; those that do not exist here for the op are left out
    cpu_s: float = 0.0  # CPU time the worker used for the whole job
    displaced: float = 0.0  # share of the timed wall time that this process was kept from running
    switches: int = 0  # involuntary context switches while timed
    buffer_sets: int = 0  # how many sets of operands the timing rotated over
    circumstances: Mapping[str, float] = field(default_factory=dict)  # the device's readings after the timing

    def to_json(self) -> str:
        return _line(asdict(self))


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker's first line: it can take jobs."""

    pid: int

    def to_json(self) -> str:
        return _line({"ready": self.pid})


def parse_answer(line: bytes) -> Report | Ready | None:
    """The answer a line holds; None when it is none, which only a kernel that wrote where it must not can cause."""
    try:
        raw = json.loads(line)
        if raw.pop("v") != VERSION:
            return None
        if "ready" in raw:
            return Ready(int(raw["ready"]))
        outcomes = tuple(_outcome(o) for o in raw["outcomes"])
        circumstances = {str(k): float(v) for k, v in raw["circumstances"].items()}
        rivals = tuple(Rival(str(r["asked"]), str(r["name"]), _outcome(r["outcome"])) for r in raw["rivals"])
        known = {"outcomes": outcomes, "circumstances": circumstances, "rivals": rivals}
        return Report(**{**raw, **known})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _outcome(raw: dict[str, object]) -> Outcome:
    samples = raw["samples_us"]
    if not isinstance(samples, list) or not all(isinstance(x, float) and x > 0 and math.isfinite(x) for x in samples):
        raise ValueError("samples_us must be positive times")
    return Outcome(**{**raw, "samples_us": tuple(samples)})  # type: ignore[arg-type]  # a wrong type fails the parse


def _line(body: dict[str, object]) -> str:
    return json.dumps({"v": VERSION, **body}, separators=(",", ":"), allow_nan=False) + "\n"


@dataclass(frozen=True, slots=True)
class Progress:
    """What the worker is doing now and until when it may take (CLOCK_MONOTONIC, which all processes share)."""

    phase: str
    index: int  # of the library in the job; -1: none of them is at work; STOCK or less
    deadline_s: float

    SIZE = 512

    def to_bytes(self) -> bytes:
        """A record of fixed size: the worker overwrites it in place, the parent reads it only when it must."""
        body = json.dumps([self.phase[:200], self.index, self.deadline_s]).encode()
        assert len(body) < Progress.SIZE
        return body.ljust(Progress.SIZE)

    @classmethod
    def from_bytes(cls, record: bytes) -> Progress | None:
        """None when nothing readable was written, as when the parent reads in the middle of a write."""
        try:
            phase, index, deadline_s = json.loads(record)
            return cls(str(phase), int(index), float(deadline_s))
        except (ValueError, TypeError):
            return None
