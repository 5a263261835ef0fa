"""Which stored schedule of an op to use, among everything that was ever measured of it. Measures nothing.

A screening time is one sitting's; a raced one was taken in turns with the stock kernel and the other finalists. So a
schedule that was raced on this very product is believed first, whatever a faster screening says. A disturbed row counts:
a disturbance makes a kernel slower, never faster, so a disturbed row that wins would win undisturbed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from emmy import config
from emmy.costmodel.dataset import Dataset
from emmy.ir.ops.op import Accumulate
from emmy.ir.schedule import sums_of
from emmy.ir.target import Target
from emmy.measure.rivals import RIVALS
from emmy.records import Measurement


@dataclass(frozen=True, slots=True)
class Winner:
    """The schedule to use. `time_us` is the median over its `n_rows` rows that were believed; `row` is the latest one."""

    row: Measurement
    time_us: float
    n_rows: int

    @property
    def schedule(self) -> str:
        return self.row.schedule

    @property
    def raced(self) -> bool:
        return is_raced(self.row)


def is_raced(row: Measurement) -> bool:
    """Whether the row was timed in turns with the usual stock kernel, so that its ratio to it means something."""
    return "speedup" in row.static and row.baseline not in RIVALS[1:]


def sums_wanted() -> Accumulate:
    """How schedules are to keep their sums: hybrid with EMMY_FAST_MATH=1, else in f32."""
    return "hybrid" if config.fast_math() else "f32"


def with_sums(rows: Sequence[Measurement], sums: Accumulate) -> tuple[Measurement, ...]:
    """The rows whose schedules keep their sums so; where none does, as with ops that sum no products of f16, those in f32."""
    by = {r.schedule: sums_of(r.schedule) for r in rows}
    wanted = sums if sums in by.values() else "f32"
    return tuple(r for r in rows if by[r.schedule] == wanted)


def measured_rows(home: Path, op: str, target: Target, threads: int) -> tuple[Measurement, ...]:
    """Every row measured of the op on the target with that many threads, oldest first, whose sums are as wanted; journals
    come in first."""
    dataset = Dataset.of(home)
    dataset.ingest()
    rows = dataset.rows(target=target.name, op=op, origins=("measured",))
    return with_sums([r for r in rows if r.protocol.threads == threads], sums_wanted())


def find_winner(rows: Sequence[Measurement], product: str) -> Winner | None:
    """The best schedule among rows of one op, target and thread count; None when none gave a right answer."""
    pool = believed(rows, product)
    return _best(pool) if pool else None


def believed(rows: Sequence[Measurement], product: str) -> list[Measurement]:
    """The rows with a time that count: those raced on the product, else those timed on it, else those timed elsewhere."""
    timed = [r for r in rows if r.time_us is not None]
    here = [r for r in timed if r.device.product == product]
    return [r for r in here if is_raced(r)] or here or timed


def best_first(rows: Sequence[Measurement], product: str, threads: int) -> tuple[str, ...]:
    """The schedules with a time among an op's rows: the winner with that many threads, which a race may have decided; then by time."""
    own = with_sums([r for r in rows if r.protocol.threads == threads], sums_wanted())
    winner, times = find_winner(own, product), by_schedule(rows)
    first = (winner.schedule,) if winner else ()
    return tuple(dict.fromkeys((*first, *sorted(times, key=lambda s: times[s]))))


def undisturbed(rows: Sequence[Measurement]) -> list[Measurement]:
    """The rows without the disturbed ones of schedules that have others."""
    calm = {r.schedule for r in rows if not r.contended}
    return [r for r in rows if not r.contended or r.schedule not in calm]


def by_schedule(rows: Sequence[Measurement]) -> dict[str, float]:
    """The median time of each schedule among rows that have one."""
    times: dict[str, list[float]] = {}
    for row in rows:
        if row.time_us is not None:
            times.setdefault(row.schedule, []).append(row.time_us)
    return {schedule: median(us) for schedule, us in times.items()}


def _best(rows: Sequence[Measurement]) -> Winner:
    """The schedule with the least time, taken over its undisturbed rows where it has some."""
    times = by_schedule(undisturbed(rows))
    schedule = min(times, key=lambda s: (times[s], s))
    own = [r for r in rows if r.schedule == schedule]
    return Winner(own[-1], times[schedule], len(own))
