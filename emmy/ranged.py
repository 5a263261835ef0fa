"""Tables by ranges of a size, found in what is stored and made better by races. Tunes nothing: each range is tuned as an op.

Two kinds of evidence give one kind of table: rows measured of the ranges' ops, and, of a card that is not here, predictions.
A table is never stored. It follows from the rows, so that whatever is measured later counts at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from emmy.costmodel.dataset import WAIT_S, Dataset
from emmy.costmodel.evaluate import TOLERANCE
from emmy.costmodel.recording import Keep
from emmy.ir.dispatch import Range
from emmy.ir.ops import Op
from emmy.ir.parts import Span, span_of, symbol_of
from emmy.ir.program import Sym
from emmy.ir.target import Target
from emmy.measure.measurer import Measurer, Withdrawn
from emmy.records import Candidate, Measurement
from emmy.search.budget import Budget
from emmy.search.events import Listener, Note
from emmy.search.finished import Finished
from emmy.search.predict import Predicting
from emmy.search.predictions import Prediction, find_prediction, predicted_ops
from emmy.search.predictions import keep as keep_prediction
from emmy.search.ranges import (
    LEAST_TRIALS,
    Challenge,
    Cost,
    Known,
    RangeWinner,
    share,
    starting_ranges,
)
from emmy.search.session import Request
from emmy.search.tuner import INTERRUPTED, Stop, TuneResult
from emmy.winner import believed, is_raced, sums_wanted, undisturbed, with_sums

SETTLED = "settled"  # why a result ended that only races between ranges were held for
_NO_FAULT = ("ok", "device_lost")  # of the schedule


# ---------------------------------------------------------------- what is tuned
@dataclass(frozen=True, slots=True)
class Group:
    """An op and the requests that tune it: one, or one a range, the largest sizes first."""

    op: Op
    requests: tuple[Request, ...]

    @classmethod
    def of(
        cls, op: Op, by_range: bool, budget: Budget, target: Target, strategy: str, seed: int, threads: int, fresh: bool,
        ahead: int = 0,
    ) -> Group:  # fmt: skip
        parts = starting_ranges(op) if by_range else (op,)
        each = share(budget, len(parts))
        sums = sums_wanted()
        return cls(
            op, tuple(Request(p, target, strategy, seed, each, threads, fresh, sums, ahead) for p in reversed(parts))
        )

    @property
    def table_key(self) -> str | None:
        """What stands for the races between its ranges; None where there is one range."""
        return self.op.key if len(self.requests) > 1 else None

    @property
    def keys(self) -> tuple[str, ...]:
        """Of all that is to be done."""
        table = (self.table_key,) if self.table_key is not None else ()
        return (*(r.op.key for r in self.requests), *table)

    def is_in(self, finished: Finished) -> bool:
        """Whether nothing of it is left to do."""
        return all(k in finished for k in self.keys)

    @property
    def said(self) -> str | None:
        """How the budget is divided, in a sentence; None where it is not."""
        n, each = len(self.requests), self.requests[0].budget
        if n == 1:
            return None
        least = f" (the least: {LEAST_TRIALS} trials each)" if each.trials == LEAST_TRIALS else ""
        return f"{self.op}: a table of schedules by ranges; each of the {n} to begin with is searched for {each}{least}"

    @property
    def target(self) -> Target:
        return self.requests[0].target

    @property
    def threads(self) -> int:
        return self.requests[0].threads

    def result(
        self, found: Sequence[TuneResult], settled: Callable[[Group], tuple[RangeWinner, ...]]
    ) -> tuple[TuneResult, ...]:
        """The op's one result; those of its ranges while some of them were not tuned, or nothing serves some size.

        found: of those of the ranges that the present command tuned, which may have been interrupted behind the last of them
        """
        whole = len(self.requests) > 1 and not (found and found[-1].why == INTERRUPTED)
        table = settled(self) if whole else ()
        if not table:
            return tuple(found)
        top = table[-1]
        counts: Counter[str] = Counter()
        for r in found:
            counts.update(r.counts)
        one = TuneResult(
            op=self.op.key, target=self.target.name, best=top.row, finalists=(), default=found[0].default if found else None,
            trials=sum(r.trials for r in found), counts=counts, elapsed_s=sum(r.elapsed_s for r in found),
            why=found[-1].why if found else SETTLED,
            run_id="", raced=top.row is not None and is_raced(top.row), resumed=sum(r.resumed for r in found),
            predicted=top.predicted, rejected=tuple(x for r in found for x in r.rejected),
            ranges=table if len(table) > 1 else (),
        )  # fmt: skip
        return (one,)


# ---------------------------------------------------------------- evidence
class Evidence(ABC):
    """What is known of an op's ranges, and how to learn more."""

    op: Op

    @property
    def symbol(self) -> Sym:
        return self.op.program().syms[0]

    @property
    def span(self) -> Span:
        return self.symbol.lo, self.symbol.hi

    def part(self, span: Span) -> Op:
        """The op of a range."""
        return self.op.within(self.symbol.name, *span)

    @abstractmethod
    def known(self) -> Known: ...

    @abstractmethod
    def winner(self, r: Range) -> RangeWinner: ...

    @abstractmethod
    def is_checked(self, r: Range) -> bool:
        """Whether the range's schedule is known to be right in all of it, not only in parts."""

    @abstractmethod
    def hold(self, race: Challenge, *, last: bool) -> None:
        """Makes each schedule of the race known in its range, be it as failed. `last`: it is to be the range's winner."""

    def table(self) -> tuple[RangeWinner, ...]:
        """The winner of each range, ascending; () while some size is served by nothing."""
        return tuple(self.winner(r) for r in self.known().ranges)


def settle(evidence: Evidence, stop: Stop) -> None:
    """Holds races until the table cannot become shorter or better by those between neighbours, and each of its ranges, as
    the table has it, was checked as a whole.
    """
    held: set[tuple[Challenge, bool]] = set()
    while not stop.asked:
        known = evidence.known()
        whole = [Challenge(r.lo, r.hi, (r.schedule,)) for r in known.ranges if not evidence.is_checked(r)]
        races = ((race, False) for race in known.challenges())
        todo = [x for x in races if x not in held] or [x for x in ((race, True) for race in whole) if x not in held]
        if not todo:
            return
        held.update(todo)
        for race, last in todo:
            if stop.asked:
                return
            try:
                evidence.hold(race, last=last)
            except Withdrawn:
                return


# ---------------------------------------------------------------- measured
@dataclass(slots=True)
class Measured(Evidence):
    """Rows by range. `here` and `keep`: who measures more, and who stores it."""

    op: Op
    target: Target
    rows: dict[Span, list[Measurement]]
    here: Measurer | None = None
    keep: Keep = lambda row: row
    on_event: Listener = lambda event: None
    _lost: set[tuple[Span, str]] = field(default_factory=set)

    @classmethod
    def stored(cls, home: Path, op: Op, target: Target, threads: int, wait_s: float = WAIT_S) -> Measured:
        """What the dataset holds of the op's ranges on that many threads; the op itself is one."""
        dataset = Dataset.of(home, wait_s)
        dataset.ingest()
        rows: dict[Span, list[Measurement]] = {}
        with dataset.snapshot() as s:
            ops = s.query(f"SELECT DISTINCT op FROM measurement WHERE target = '{target.name}' ORDER BY op").rows
            for (key,) in ops:
                if (span := span_of(op, str(key))) is not None:
                    found = s.rows(op=str(key), target=target.name, origins=("measured",))
                    rows[span] = list(with_sums([r for r in found if r.protocol.threads == threads], sums_wanted()))
        return cls(op, target, rows)

    def known(self) -> Known:
        product = self.here.device.product if self.here else self.target.product
        pools = {span: believed(rows, product) for span, rows in self.rows.items()}
        stock = {hi: _stock_us([r for (_, b), rows in pools.items() if b == hi for r in rows]) for _, hi in pools}
        costs = {span: _costs(pool, stock[span[1]]) for span, pool in pools.items() if pool}
        failed = {
            (span, r.schedule)
            for span, rows in self.rows.items()
            for r in rows
            if r.status not in _NO_FAULT and r.schedule not in costs.get(span, {})
        }
        return Known(*self.span, costs, frozenset(failed | self._lost))

    def is_checked(self, r: Range) -> bool:
        rows = self.rows.get((r.lo, r.hi), ())
        return any(x.schedule == r.schedule and x.time_us is not None for x in rows)

    def winner(self, r: Range) -> RangeWinner:
        """With the latest row of the range's schedule under its own op, else of a part that ends where it ends."""
        spans = sorted((s for s in self.rows if s[1] == r.hi), key=lambda s: (s != (r.lo, r.hi), s))
        own = (x for s in spans for x in reversed(self.rows[s]) if x.schedule == r.schedule and x.time_us is not None)
        found = list(own)
        raced = [x for x in found if is_raced(x)]
        return RangeWinner(self.symbol.name, r, self.part((r.lo, r.hi)).key, row=next(iter(raced or found), None))

    def hold(self, race: Challenge, *, last: bool) -> None:
        assert self.here is not None
        op = self.part((race.lo, race.hi)).key
        self.on_event(Note(f"{op}: racing {_these(race)} and the stock kernel, in turns"))
        for row in self.here.race([Candidate(op, s) for s in race.schedules]):
            kept = self.keep(row)
            self.rows.setdefault((race.lo, race.hi), []).append(kept)
            if kept.time_us is None:
                self._lost.add(((race.lo, race.hi), kept.schedule))


def _these(race: Challenge) -> str:
    n = len(race.schedules)
    return f"the best of {n - 1 or 'its'} neighbour{'s' * (n > 2)}" if n > 1 else "its schedule"


def _stock_us(rows: Sequence[Measurement]) -> dict[str, float]:
    """The time at one size of each kernel that schedules were raced against: a ratio says nothing of another one's."""
    of: dict[str, list[float]] = {}
    for r in rows:
        of.setdefault(r.baseline, []).append(r.baseline_us or 1.0)
    return {name: median(us) for name, us in of.items()}


def _costs(pool: Sequence[Measurement], stock_us: Mapping[str, float]) -> dict[str, Cost]:
    """Of each schedule its time, told through the ratio to the kernel that it was raced against: that of another day counts."""
    by_schedule: dict[str, list[Cost]] = {}
    for r in undisturbed([r for r in pool if is_raced(r)] or pool):
        if is_raced(r):
            s = r.static
            ends = (s["speedup"], s["speedup_high"], s["speedup_low"])
            cost = Cost(*(stock_us[r.baseline] / x for x in ends))
        else:
            us = r.time_us or 0.0
            cost = Cost(us, us, us)
        by_schedule.setdefault(r.schedule, []).append(cost)
    return {s: replace(c[-1], value=median(x.value for x in c)) for s, c in by_schedule.items()}


# ---------------------------------------------------------------- predicted
@dataclass(slots=True)
class Predicted(Evidence):
    """Picks for a card that is not here. `predicting`: what predicts more of a range's op."""

    op: Op
    picks: dict[Span, Prediction]
    predicting: Callable[[Op], Predicting] | None = None
    _guesses: dict[Span, dict[str, Cost]] = field(default_factory=dict)
    _failed: set[tuple[Span, str]] = field(default_factory=set)

    @classmethod
    def stored(cls, home: Path, op: Op, target: Target) -> Predicted:
        """The picks of the op's ranges that still hold, the latest first."""
        picks: dict[Span, Prediction] = {}
        symbol = op.program().syms[0].name
        for key in predicted_ops(home, target):
            if (span := span_of(op, key)) is not None:
                pick = find_prediction(home, op.within(symbol, *span), target)
                picks |= {span: pick} if pick is not None else {}
        return cls(op, picks)

    def known(self) -> Known:
        costs = {span: dict(guesses) for span, guesses in self._guesses.items()}
        for span, p in self.picks.items():
            costs.setdefault(span, {}).setdefault(p.schedule, _cost(p.predicted_us))
        return Known(*self.span, costs, frozenset(self._failed))

    def is_checked(self, r: Range) -> bool:
        pick = self.picks.get((r.lo, r.hi))
        return pick is not None and pick.schedule == r.schedule

    def winner(self, r: Range) -> RangeWinner:
        pick = self.picks[(r.lo, r.hi)] if self.is_checked(r) else None
        return RangeWinner(self.symbol.name, r, self.part((r.lo, r.hi)).key, predicted=pick)

    def keep_table(self, home: Path) -> None:
        """Makes the picks of the table the latest ones stored: of predictions that overlap the later counts."""
        for w in self.table():
            if w.predicted is not None:
                keep_prediction(home, w.predicted)

    def stored_table(self) -> tuple[RangeWinner, ...]:
        """The latest picks whose ranges do not overlap, ascending; () when they leave a gap."""
        taken: list[Span] = []
        for lo, hi in self.picks:
            if all(hi < a or b < lo for a, b in taken):
                taken.append((lo, hi))
        taken.sort()
        if sum(hi - lo + 1 for lo, hi in taken) < self.span[1] - self.span[0] + 1:
            return ()
        return tuple(self.winner(Range(*span, self.picks[span].schedule)) for span in taken)

    def hold(self, race: Challenge, *, last: bool) -> None:
        assert self.predicting is not None
        span = (race.lo, race.hi)
        predicting = self.predicting(self.part(span))
        times = predicting.times_us(race.schedules)
        if last:
            pick = predicting.confirm(race.schedules[0])
            self.picks |= {span: pick} if pick is not None else {}
            times = times if pick is not None else {}
        self._guesses.setdefault(span, {}).update({s: _cost(us) for s, us in times.items()})
        self._failed |= {(span, s) for s in race.schedules if s not in times}


def _cost(us: float) -> Cost:
    """Predictions that differ by less than the model can tell tie."""
    return Cost(us, us / (1 + TOLERANCE), us)


# ---------------------------------------------------------------- look up
def find_table(home: Path, op: Op, target: Target, threads: int) -> tuple[RangeWinner, ...]:
    """The stored table of the op: measured, else predicted; () for an op without an open size, or without a table."""
    if symbol_of(op) is None:
        return ()
    return Measured.stored(home, op, target, threads).table() or Predicted.stored(home, op, target).stored_table()
