"""The contract of a measurer: candidates in, rows out, whatever becomes of them. Knows neither devices nor searches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from types import TracebackType
from typing import Protocol, Self

from emmy.codegen.build import source
from emmy.errors import EmmyError, UsageError
from emmy.ir.ops import parse_op
from emmy.ir.target import load_target
from emmy.records import Candidate, Device, Measurement, Status


@dataclass(frozen=True, slots=True)
class Rivalled:
    """What a stock kernel did in turns with candidates. `asked`: its name in the call; `name`: which one it is.

    Not ok: it does not compute the op here, or ended the worker, and `message` says so. The rest is as in a row.
    """

    asked: str
    name: str
    status: Status
    message: str = ""
    samples_us: tuple[float, ...] = ()
    warm_us: float | None = None
    sustained_us: float | None = None
    error_norm: float | None = None
    contended: bool = False
    static: Mapping[str, float] = field(default_factory=dict)
    clock_mhz: float | None = None
    temperature_c: float | None = None


@dataclass(frozen=True, slots=True)
class Heat:
    """What came of schedules and stock kernels that took turns in one process: rows in order, and the rivals there are."""

    rows: tuple[Measurement, ...]
    rivals: tuple[Rivalled, ...]


class Withdrawn(EmmyError):
    """What was asked had not begun when whoever asked was told to stop, and will not."""


# (schedule, static facts of its binary, best time so far) -> predicted time in microseconds of what need not be timed.
Look = Callable[[str, Mapping[str, float], float | None], float | None]


Ready = Callable[[Candidate], None]
Keep = Callable[[Measurement], Measurement]  # a row -> the row as it is stored


def ignore(candidate: Candidate) -> None:
    """What is done when a candidate is ready, where nobody waits for it."""


BATCH = 8  # candidates that a search asks for at once


class Rows(Protocol):
    """Rows in the order of what was asked for."""

    def __iter__(self) -> Iterator[Measurement]: ...

    def __next__(self) -> Measurement: ...

    def close(self) -> None:
        """Takes no more of them: what was not begun is not measured, what is being measured is still kept."""


class Measurer(ABC):
    """Measures candidates on one device. A candidate that fails is a row too; only a missing device raises."""

    @property
    @abstractmethod
    def device(self) -> Device:
        """What the rows will say they were measured on."""

    @abstractmethod
    def stream(
        self, candidates: Sequence[Candidate], best_us: float | None = None, look: Look | None = None
    ) -> Iterator[Measurement]:
        """A row for each candidate, in order, each as soon as it is measured and before the next one begins.

        `best_us`: the best time known for the op; much slower candidates get fewer samples. The caller may stop taking
        rows at any time; what was not begun is not measured.

        look: asked of each candidate that was compiled. One that it has a time for is not run: its row is `passed_over` and
        has that time as the static fact `predicted_us`. A measurer may do without.
        """

    @abstractmethod
    def heat(self, op: str, schedules: Sequence[str], rivals: Sequence[str] = ("",), rounds: int = 7) -> Heat:
        """Schedules of one op and stock kernels, timed in turns with one another in one process.

        rivals: stock kernels by name, such as "torch.compile" (`emmy.measure.rivals`); "" for the usual

        Where the first of the rivals is there, each row carries its median as `baseline_us` and, as static facts, the ratio
        over the rounds: `speedup` (above 1: the candidate wins), `speedup_low` and `speedup_high`.

        Raises Withdrawn where several searches share the device, and were told to stop before the heat began.
        """

    def race(self, candidates: Sequence[Candidate], rounds: int = 7, against: str = "") -> list[Measurement]:
        """Rows in order for candidates of *one* op, from a heat with one rival: `against`, by its name."""
        ops = sorted({c.op for c in candidates})
        if len(ops) > 1:
            raise UsageError(f"a race is between schedules of one op, got {', '.join(ops)}")
        return list(self.heat(ops[0], [c.schedule for c in candidates], (against,), rounds).rows) if ops else []

    def measure(self, candidates: Sequence[Candidate], best_us: float | None = None) -> list[Measurement]:
        """All rows of `stream`."""
        return list(self.stream(candidates, best_us))

    def source_digest(self, candidate: Candidate) -> str:
        """Of the source that it would time today. Raises PlanError or UsageError for a schedule that is refused."""
        return source(parse_op(candidate.op), candidate.schedule, load_target(self.device.target)).digest

    @property
    def ahead(self) -> int:
        """How many batches of `BATCH` candidates must be begun at once to keep it busy."""
        return 1

    @property
    def at_once(self) -> int:
        """How many things it measures at a time."""
        return 1

    def begin(self, candidates: Sequence[Candidate], best_us: float | None, look: Look | None, keep: Keep) -> Rows:
        """As `stream`, with each row as `keep` gives it back.

        Several devices begin at once, each keeps its rows in whatever order and thread they come, and the next batch may be
        begun before this one's rows are taken.
        """
        for row in self.stream(candidates, best_us, *((look,) if look else ())):
            yield keep(row)

    def prepare(self, candidates: Sequence[Candidate], ready: Ready = ignore) -> None:
        """Says what will be measured later, so that it may be compiled by then. Does not wait.

        ready: called of each, from whatever thread, as soon as it needs nothing but the device
        """
        for candidate in candidates:
            ready(candidate)

    def close(self) -> None:  # noqa: B027  # most have nothing to give back
        """Gives the device back. Nothing can be measured afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Speedup:
    """Stock time over candidate time, round by round."""

    median: float
    low: float
    high: float

    @property
    def is_tie(self) -> bool:
        """Whether the rounds leave open which of the two is faster."""
        return self.low <= 1 <= self.high


def speedup(candidate_us: Sequence[float], stock_us: Sequence[float]) -> Speedup | None:
    """The ratio of samples taken in turns. low..high leaves out the lowest and the highest of five rounds or more:
    of seven rounds it then holds the true median in 87.5 % of cases (order statistics, binomial with p = 1/2).
    """
    ratios = sorted(s / c for c, s in zip(candidate_us, stock_us, strict=False))
    if not ratios:
        return None
    inner = ratios[1:-1] if len(ratios) >= 5 else ratios
    return Speedup(median(ratios), inner[0], inner[-1])
