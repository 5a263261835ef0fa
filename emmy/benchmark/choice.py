"""Which schedule runs in Emmy's lanes: the best that is stored, else what is predicted, near, or plain. Measures nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from emmy.benchmark.cases import BenchCase
from emmy.costmodel.dataset import Dataset
from emmy.errors import PlanError, UsageError
from emmy.ir.ops import Attention, Op, Products
from emmy.ir.ops.op import Accumulate
from emmy.ir.parts import span_of
from emmy.ir.schedule import replay, sums_of
from emmy.ir.target import Target
from emmy.ranged import Measured, Predicted
from emmy.records import Measurement
from emmy.search.near import near_winners
from emmy.search.predictions import find_prediction
from emmy.search.ranges import RangeWinner
from emmy.search.schedule_space import ScheduleSpace
from emmy.winner import find_winner

Origin = Literal["measured", "predicted", "near", "default"]


@dataclass(frozen=True, slots=True)
class Pick:
    """The schedule of a lane, and the op that it is timed as. `note`: where it comes from."""

    op: Op
    schedule: str
    origin: Origin
    note: str


@dataclass(slots=True)
class Stored:
    """The right answers stored on a target, read once for all cases."""

    home: Path
    target: Target
    threads: int
    rows: dict[str, list[Measurement]] = field(default_factory=dict)  # by op
    _plain: list[tuple[str, str]] = field(default_factory=list)  # (op, its default) of hybrid sums
    _refused: set[object] = field(default_factory=set)
    _fastest: dict[Accumulate, tuple[tuple[str, str], ...]] = field(default_factory=dict)

    @classmethod
    def read(cls, home: Path, target: Target, threads: int) -> Stored:
        dataset = Dataset.of(home)
        dataset.ingest()
        rows: dict[str, list[Measurement]] = defaultdict(list)
        for r in dataset.rows(target=target.name, origins=("measured",)):
            if r.protocol.threads == threads:
                rows[r.op].append(r)
        return cls(home, target, threads, dict(rows))

    def known_us(self, case: BenchCase) -> float | None:
        """The best time stored of the op that is timed; None without one."""
        found = find_winner(self.rows.get(case.at().key, ()), self.target.product)
        return found.time_us if found else None

    def pick(self, case: BenchCase, sums: Accumulate) -> Pick | None:
        """The schedule for the case that keeps its sums so; None where no schedule of the op does."""
        if sums != "f32" and not _halves(case.op):
            return None
        return self._ranged(case, sums) or self._measured(case, sums) or self._unmeasured(case.at(), sums)

    def _ranged(self, case: BenchCase, sums: Accumulate) -> Pick | None:
        """Of an open size: the schedule that the stored table has for the hint."""
        if case.hint is None:
            return None
        for w in self._table(case.op):
            if w.range.lo <= case.hint <= w.range.hi and sums_of(w.range.schedule) == sums:
                origin: Origin = "measured" if w.row else "predicted"
                note = f"the table's, for {w.symbol} {w.range.sizes}"
                return Pick(case.at(w.range.lo), w.range.schedule, origin, note)
        return None

    def _table(self, op: Op) -> tuple[RangeWinner, ...]:
        """The stored table of the op, as `emmy.ranged.find_table` finds it, from the rows at hand; () where one schedule serves."""
        spans = {key: span_of(op, key) for key in self.rows if key.partition(":")[0] == op.kind}
        found = Measured(op, self.target, {span: self.rows[key] for key, span in spans.items() if span}).table()
        found = found or Predicted.stored(self.home, op, self.target).stored_table()
        return found if len(found) > 1 else ()

    def _measured(self, case: BenchCase, sums: Accumulate) -> Pick | None:
        """The winner of the op as it is timed, else of the op as the set names it, which is another only in its largest size."""
        for op in dict.fromkeys((case.at(), case.op)):
            own = [r for r in self.rows.get(op.key, ()) if sums_of(r.schedule) == sums]
            best = find_winner(own, self.target.product)
            if best is not None and self._replays(case.at(), best.schedule):
                return Pick(case.at(), best.schedule, "measured", f"the stored winner of {op.key}")
        return None

    def _unmeasured(self, op: Op, sums: Accumulate) -> Pick | None:
        said = find_prediction(self.home, op, self.target)
        if said is not None and sums_of(said.schedule) == sums:
            return Pick(op, said.schedule, "predicted", str(said))
        for other, schedule in near_winners(op, self._winners(sums)):
            if other.partition(":")[0] == op.kind and self._replays(op, schedule):
                return Pick(op, schedule, "near", f"as {other}")
        default = self._default(op, sums)
        return Pick(op, default, "default", "the schedule that a search measures first") if default else None

    def _default(self, op: Op, sums: Accumulate) -> str | None:
        """The plain schedule with such sums, which of others than f32 takes seconds to find: that of an op of other sizes
        serves where it replays, and where one op is refused those of other sizes are too.
        """
        for other, schedule in near_winners(op, self._plain) if sums != "f32" else ():
            if other.partition(":")[0] == op.kind and self._replays(op, schedule):
                return schedule
        form = (op.kind, tuple(v.axes for v in op.program().inputs), sums)
        if form in self._refused:
            return None
        try:
            default = ScheduleSpace(op, self.target, self.threads, sums).default().key
        except PlanError:
            default = ""
        if not default or sums_of(default) != sums:
            self._refused.add(form)
            return None
        self._plain += [(op.key, default)] if sums != "f32" else []
        return default

    def _winners(self, sums: Accumulate) -> tuple[tuple[str, str], ...]:
        if sums not in self._fastest:
            own = {op: [r for r in rows if sums_of(r.schedule) == sums] for op, rows in self.rows.items()}
            best = {op: find_winner(rows, self.target.product) for op, rows in own.items()}
            self._fastest[sums] = tuple((op, w.schedule) for op, w in best.items() if w is not None)
        return self._fastest[sums]

    def _replays(self, op: Op, schedule: str) -> bool:
        try:
            replay(op.program(), schedule, self.target)
        except (PlanError, UsageError):
            return False
        return True


def _halves(op: Op) -> bool:
    """Whether the op folds products of f16, whose sums a tensor core can keep in f16."""
    return isinstance(op, Products | Attention) and op.program().dtype == "f16"


def known_cases(stored: Stored, cases: Sequence[BenchCase]) -> frozenset[str]:
    """Ids of the cases whose winner is stored."""
    return frozenset(c.id for c in cases if c.op.key in stored.rows or c.at().key in stored.rows)
