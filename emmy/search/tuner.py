"""One tuning run: ask a strategy, measure, journal, tell, until the budget is spent; then race the finalists.

A run is a deterministic function of (op, target, strategy, seed, model, known trials, measurements). Its journal holds the
measurements, so a killed run resumes by replaying the strategy against the journal and going on where it ends.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path

from emmy.errors import DataError
from emmy.ir.dispatch import Dispatch
from emmy.ir.roofline import roofline_us
from emmy.measure.journal import RunHeader, closed_path, ingested_path, journal_path
from emmy.measure.measurer import BATCH, Measurer, Rows, Speedup, Withdrawn
from emmy.records import Candidate, Measurement, now_utc
from emmy.search.budget import Budget
from emmy.search.events import Finished, Listener, Measured, Note, Racing, Started, ignore
from emmy.search.predictions import Prediction, Rejection
from emmy.search.ranges import RangeWinner, dispatch_of
from emmy.search.run_journal import RunJournal
from emmy.search.schedule_space import ScheduleSpace
from emmy.search.second_look import SecondLook
from emmy.search.space import Point, Trial
from emmy.search.strategy import Strategy

log = logging.getLogger("emmy.search.tuner")

FINALISTS = 3  # of 477 races of four or more on an H200 the others won 14 by 0.3 % and more, and one by 3 %
INTERRUPTED = "interrupted"  # why a run ended that can be resumed
PASSED_OVER = "passed_over"


@dataclass(frozen=True, slots=True)
class Start:
    """What earlier runs give a new one; kept in its journal, since its course depends on it."""

    first: tuple[str, ...] = ()  # schedules measured after the default: winners of near problems
    known: tuple[tuple[str, float | None], ...] = ()  # (schedule, time_us) of this op
    best: tuple[
        str, ...
    ] = ()  # the stored winner: raced whatever the search finds, so that nothing worse takes its place
    elsewhere: tuple[str, ...] = ()  # winners of other cards, for a run that collects
    shares: Mapping[str, float] = field(default_factory=dict)  # what its proposals are dealt by
    ahead: int = 1  # batches that are out at once

    def to_text(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Start:
        """Raises DataError when a journal's header holds something else."""
        try:
            raw = json.loads(text)
            known = tuple((str(k), None if t is None else float(t)) for k, t in raw["known"])
            shares = {str(k): float(x) for k, x in raw.get("shares", {}).items()}
            texts = {k: tuple(map(str, raw.get(k, ()))) for k in ("best", "elsewhere")}
            first = tuple(map(str, raw["first"]))
            return cls(first, known, **texts, shares=shares, ahead=int(raw.get("ahead", 1)))
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise DataError(f"journal header: start is not what a search writes: {e}") from None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run sets out to do; everything its course depends on besides measurements."""

    op: str
    target: str
    strategy: str
    seed: int
    budget: Budget
    model: str = ""  # digest
    start: Start = Start()

    def run_id(self, protocol: str, generation: int, emmy_version: str) -> str:
        """The same for the same plan: what lets a second command find the first one's journal."""
        text = "\n".join(
            (self.op, self.target, self.strategy, str(self.seed), self.model, protocol, str(generation), emmy_version)
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class TuneResult:
    """The outcome for one op. Rows are under the final protocol when the race was held (`raced`).

    Of an op tuned by ranges of its size, `ranges` is the table, ascending and without gaps, each with its schedule and the
    row or prediction that it rests on; `best`, `default` and `predicted` are of the last one, and the counts are of the search
    in all of them. It is () for an op that one schedule serves: of all ranges where they tie, or with `by_range=False`.

    On a card that is not here nothing is measured: `best` is None, `predicted` the pick, and `rejected` says of schedules
    that were predicted to be faster why they are not the pick.
    """

    op: str
    target: str
    best: Measurement | None
    finalists: tuple[Measurement, ...]
    default: Measurement | None
    trials: int
    counts: Mapping[str, int]  # rows by status
    elapsed_s: float
    why: str
    run_id: str
    raced: bool
    resumed: int = 0
    predicted: Prediction | None = None
    rejected: tuple[Rejection, ...] = ()
    ranges: tuple[RangeWinner, ...] = ()
    rows: tuple[Measurement, ...] = ()  # of the search, in order; not of the race

    @property
    def dispatch(self) -> Dispatch | None:
        """Which schedule serves which sizes: `ranges` as a table, whose text `emmy.load`, `show` and `bench` take where they
        take a schedule. None for an op that one schedule serves.
        """
        return dispatch_of(self.ranges)

    @property
    def speedup(self) -> Speedup | None:
        """Stock time over the winner's, round by round; None without a race, or without a stock kernel."""
        return speedup_of(self.best) if self.best else None


def speedup_of(row: Measurement) -> Speedup | None:
    """What a raced row says of its ratio to the stock kernel; None when the row was not raced."""
    s = row.static
    return Speedup(s["speedup"], s["speedup_low"], s["speedup_high"]) if "speedup" in s else None


@dataclass(slots=True)
class Stop:
    """Set from a signal handler: the run ends after the measurement in flight."""

    asked: bool = False


@dataclass(frozen=True, slots=True)
class _Batch:
    """Points that are out: rows that were recorded of them, by key, and those that come in the points' order."""

    points: Sequence[Point]
    recorded: Mapping[str, Measurement]
    rows: Rows | None

    def __iter__(self) -> Iterator[tuple[Point, Measurement]]:
        for point in self.points:
            row = self.recorded.get(point.key)
            if row is None:
                assert self.rows is not None
                row = next(self.rows)
            yield point, row

    def close(self) -> None:
        if self.rows is not None:
            self.rows.close()


@dataclass(slots=True)
class Run:
    """One run over one space. `strategy` must be fresh; `plan` says what it was built from."""

    plan: Plan
    run_id: str
    space: ScheduleSpace
    strategy: Strategy
    measurer: Measurer
    home: Path
    emmy_version: str
    on_event: Listener = ignore
    stop: Stop = field(default_factory=Stop)
    races: bool = True  # whether the best few are measured again at the end
    look: SecondLook | None = None  # at what was compiled, before it is timed
    rows: list[Measurement] = field(default_factory=list)
    _journal: RunJournal = field(init=False)
    _elapsed_s: float = 0.0  # at the last row
    _best: Measurement | None = None
    _since_best: int = 0
    _passed_over: int = 0

    def go(self) -> TuneResult:
        """Run to the end of the budget, the space, or an interruption."""
        plan = self.plan
        self._journal = RunJournal(self.home, self._header())
        self.on_event(
            Started(
                plan.op,
                plan.target,
                plan.strategy,
                plan.budget,
                self.run_id,
                self._journal.resumed,
                len(plan.start.known),
                plan.model,
            )
        )
        self._journal.begin()
        try:
            why, finalists = self._search_and_race()
        except BaseException:
            self._journal.leave()
            raise
        if why == INTERRUPTED:
            self._journal.leave()
        else:
            self._journal.close()
        self.on_event(Finished(plan.op, why, len(self.rows), self._elapsed_s, plan.target))
        return self._result(why, finalists)

    def _search_and_race(self) -> tuple[str, tuple[Measurement, ...]]:
        why = self._search()
        if not self.races or why == INTERRUPTED:
            return why, ()
        if self.stop.asked:  # the same command comes to this point again
            return INTERRUPTED, ()
        try:
            return why, self._race()
        except Withdrawn:
            return INTERRUPTED, ()

    def _header(self) -> RunHeader:
        p = self.plan
        start, made = p.start.to_text(), now_utc()
        return RunHeader(
            self.run_id, p.op, p.target, p.strategy, p.seed, str(p.budget), p.model, 0, self.emmy_version, made, start
        )

    def _keep(self, row: Measurement) -> Measurement:
        return self._journal.keep(row, lambda schedule: dict(self.strategy.marks(schedule)))

    # ------------------------------------------------------------ search
    def _search(self) -> str:
        if self.stop.asked:
            return INTERRUPTED
        default = self.space.default()
        why = self._tell(self._begin([default, *self._donors(default)], None))
        out: deque[_Batch] = deque()  # in the order they were asked for
        while why is None:
            while len(out) < self.plan.start.ahead and (points := self._ask(out)):
                out.append(self._begin(points, self.look))
            why = self._tell(out.popleft()) if out else "exhausted"
        for batch in out:
            batch.close()
        return why

    def _ask(self, out: Sequence[_Batch]) -> list[Point]:
        """The next batch; not more than the budget's trials leave beside those that are out."""
        trials = self.plan.budget.trials
        left = BATCH if trials is None else trials - self._n_trials - sum(len(b.points) for b in out)
        return self.strategy.ask(BATCH)[:left] if left > 0 else []

    def _donors(self, default: Point) -> list[Point]:
        found = [self.space.locate(s) for s in self.plan.start.first]
        keys = {default.key, *(k for k, _ in self.plan.start.known)}
        return [p for p in {q.key: q for q in found if q is not None}.values() if p.key not in keys]

    def _begin(self, points: Sequence[Point], look: SecondLook | None) -> _Batch:
        """A batch whose rows come from the journal where it has them, else from the device."""
        best_us = self._best.time_us if self._best else None
        recorded = {p.key: row for p in points if (row := self._journal.take(p.key)) is not None}
        todo = [Candidate(self.plan.op, p.key) for p in points if p.key not in recorded]
        fixed = look.as_of(best_us) if look else None
        return _Batch(points, recorded, self.measurer.begin(todo, best_us, fixed, self._keep) if todo else None)

    def _tell(self, batch: _Batch) -> str | None:
        """Tell the strategy what became of a batch; the reason to stop, when there is one.

        What is passed over once compiled counts as measured at its prediction, and as no trial.
        """
        trials, why = [], None
        for point, row in batch:
            self._take(row)
            predicted = row.static.get("predicted_us") if row.status == PASSED_OVER else None
            trials.append(Trial(point, row.time_us or predicted))
            spent = self.plan.budget.spent(self._n_trials, self._elapsed_s, self._since_best, self._reached())
            why = INTERRUPTED if self.stop.asked else spent
            if why:
                break
        batch.close()
        self.strategy.tell(trials)
        return why

    @property
    def _n_trials(self) -> int:
        return len(self.rows) - self._passed_over

    def _take(self, row: Measurement) -> None:
        self.rows.append(row)
        self._elapsed_s = max(self._elapsed_s, self._journal.elapsed_s(row))
        self._passed_over += row.status == PASSED_OVER
        if self.look:
            self.look.learn(row)
        is_best = row.time_us is not None and row.time_us < _time(self._best)
        self._best, self._since_best = (row, 0) if is_best else (self._best, self._since_best + 1)
        best_us = self._best.time_us if self._best else None
        self.on_event(Measured(row, len(self.rows), best_us, is_best, self._elapsed_s, self._eta()))

    def _reached(self) -> float:
        """The share of the roofline that the best time reaches. A disturbed time is too long, so that it misleads nobody."""
        s = self.space
        least = roofline_us(s.op.work(), s.target, s.op.program().dtype, s.threads).time_us
        return least / _time(self._best)

    def _eta(self) -> float | None:
        n, b, journal = self._n_trials, self.plan.budget, self._journal
        left = []
        if b.seconds is not None:
            left.append(b.seconds - self._elapsed_s)
        if b.trials is not None and n > journal.resumed:
            left.append((b.trials - n) * (self._elapsed_s - journal.spent_s) / (n - journal.resumed))
        return max(0.0, min(left)) if left else None

    # ------------------------------------------------------------ race
    def _race(self) -> tuple[Measurement, ...]:
        """The best few again, under the final protocol; the stock kernel runs among them.

        Rows of a race that a kill cut short count, each being taken in turns with the stock kernel; the others are raced.
        So does what an interrupted run measured beyond the budget that it is resumed with.
        """
        times = {k: t for k, t in self.plan.start.known if t is not None}
        rows = (*self._beyond(), *self.rows)
        times |= {r.schedule: r.time_us for r in rows if r.time_us is not None}
        keys = list(dict.fromkeys((*sorted(times, key=times.__getitem__)[:FINALISTS], *self.plan.start.best)))
        if not keys:
            self.on_event(Note("no candidate gave a right answer: nothing to race"))
            return ()
        raced = {k: row for k in keys if (row := self._journal.take(k)) is not None}
        missing = [k for k in keys if k not in raced]
        if missing:
            self.on_event(Racing(self.plan.op, len(missing), self.plan.target))
            for row in self.measurer.race([Candidate(self.plan.op, k) for k in missing]):
                raced[row.schedule] = kept = self._keep(row)
                self._elapsed_s = max(self._elapsed_s, self._journal.elapsed_s(kept))
        return tuple(raced[k] for k in keys if k in raced)

    def _beyond(self) -> list[Measurement]:
        """The journal's rows of the search that this one did not come to, taken out of what is recorded: not of a race."""
        seen = {r.schedule for r in self.rows}
        left = [r.schedule for r in self._journal.left() if r.schedule not in seen and not speedup_of(r)]
        return [row for k in left if (row := self._journal.take(k)) is not None]

    def _result(self, why: str, finalists: tuple[Measurement, ...]) -> TuneResult:
        placed = sorted((r for r in finalists if r.time_us is not None), key=_time)
        return TuneResult(
            op=self.plan.op,
            target=self.plan.target,
            best=placed[0] if placed else self._best,
            finalists=tuple(placed),
            default=self.rows[0] if self.rows else None,
            trials=self._n_trials,
            counts=Counter(r.status for r in self.rows),
            elapsed_s=self._elapsed_s,
            why=why,
            run_id=self.run_id,
            raced=bool(placed),
            resumed=self._journal.resumed,
            rows=tuple(self.rows),
        )


def _time(row: Measurement | None) -> float:
    """Orders rows. One that was disturbed is too slow if anything, so that a fast one deserves its place in the race."""
    return inf if row is None or row.time_us is None else row.time_us


def is_complete(home: Path, run_id: str) -> bool:
    """True when a run with that id has ended: its journal is closed, or already in the database."""
    closed = closed_path(journal_path(home, run_id))
    return closed.exists() or ingested_path(closed).exists()
