"""One tuning run: ask a strategy, measure, journal, tell, until the budget is spent; then race the finalists.

A run is a deterministic function of (op, target, strategy, seed, model, known trials, measurements). Its journal holds the
measurements, so a killed run resumes by replaying the strategy against the journal and going on where it ends.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path

from emmy.errors import DataError
from emmy.ir.dispatch import Dispatch
from emmy.ir.roofline import roofline_us
from emmy.measure.journal import Journal, RunHeader, closed_path, journal_path
from emmy.measure.measurer import Measurer, Speedup
from emmy.records import Candidate, Measurement, new_id, now_utc
from emmy.search.budget import Budget
from emmy.search.events import Finished, Listener, Measured, Note, Racing, Started, ignore
from emmy.search.predictions import Prediction, Rejection
from emmy.search.ranges import RangeWinner, dispatch_of
from emmy.search.schedule_space import ScheduleSpace
from emmy.search.second_look import SecondLook
from emmy.search.space import Point, Trial
from emmy.search.strategy import Strategy

log = logging.getLogger("emmy.search.tuner")

FINALISTS = 5
INTERRUPTED = "interrupted"  # why a run ended that can be resumed
BATCH = 8
PASSED_OVER = "passed_over"

_Timed = tuple[Measurement, float]  # a row, and the seconds that had been spent on the run when it was stored


@dataclass(frozen=True, slots=True)
class Start:
    """What earlier runs give a new one; kept in its journal, since its course depends on it."""

    first: tuple[str, ...] = ()  # schedules measured after the default: winners of near problems
    known: tuple[tuple[str, float | None], ...] = ()  # (schedule, time_us) of this op
    done: tuple[str, ...] = ()  # ops that the same command had finished before
    best: tuple[
        str, ...
    ] = ()  # the stored winner: raced whatever the search finds, so that nothing worse takes its place
    elsewhere: tuple[str, ...] = ()  # winners of other cards, for a run that collects
    shares: Mapping[str, float] = field(default_factory=dict)  # what its proposals are dealt by

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
            first, done = (tuple(map(str, raw[k])) for k in ("first", "done"))
            return cls(first, known, done, **texts, shares=shares)
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
    _journal: Journal | None = None
    _recorded: dict[str, deque[_Timed]] = field(default_factory=lambda: defaultdict(deque))  # by schedule
    _resumed: int = 0
    _spent_s: float = 0.0  # by earlier sittings
    _elapsed_s: float = 0.0  # at the last row
    _began: float = 0.0  # of this sitting, on the monotonic clock
    _best: Measurement | None = None
    _since_best: int = 0
    _passed_over: int = 0

    def go(self) -> TuneResult:
        """Run to the end of the budget, the space, or an interruption."""
        self._open()
        plan = self.plan
        self.on_event(
            Started(
                plan.op,
                plan.target,
                plan.strategy,
                plan.budget,
                self.run_id,
                self._resumed,
                len(plan.start.known),
                plan.model,
            )
        )
        self._began = time.monotonic()
        try:
            why = self._search()
            finalists = self._race() if self.races and why != INTERRUPTED else ()
        except BaseException:
            assert self._journal is not None
            self._journal.leave()
            raise
        assert self._journal is not None
        if why == INTERRUPTED:
            self._journal.leave()
        else:
            self._journal.close()
        self.on_event(Finished(plan.op, why, len(self.rows), self._elapsed_s))
        return self._result(why, finalists)

    # ------------------------------------------------------------ journal
    def _open(self) -> None:
        path = journal_path(self.home, self.run_id)
        if path.exists():
            self._journal, old = Journal.reopen(path)
            for row, elapsed_s in zip(old.rows, old.elapsed_s, strict=True):
                self._recorded[row.schedule].append((row, elapsed_s))
            self._resumed, self._spent_s = len(old.rows), max(old.elapsed_s, default=0.0)
            return
        p = self.plan
        header = RunHeader(
            self.run_id,
            p.op,
            p.target,
            p.strategy,
            p.seed,
            str(p.budget),
            p.model,
            0,
            self.emmy_version,
            now_utc(),
            p.start.to_text(),
        )
        self._journal = Journal.create(path, header)

    def _keep(self, row: Measurement) -> _Timed:
        """The row as it is stored, and when: what is decided after it must be decided again when the run is resumed."""
        row = replace(
            row,
            run_id=self.run_id,
            id=row.id or new_id(),
            emmy_version=self.emmy_version,
            time_utc=row.time_utc or now_utc(),
            static={**row.static, **self.strategy.marks(row.schedule)},
        )
        assert self._journal is not None
        elapsed_s = self._spent_s + time.monotonic() - self._began
        self._journal.append(row, elapsed_s)
        return row, elapsed_s

    # ------------------------------------------------------------ search
    def _search(self) -> str:
        if self.stop.asked:
            return INTERRUPTED
        default = self.space.default()
        opening = [default, *self._donors(default)]
        why = self._measure(opening)
        while why is None:
            points = self.strategy.ask(BATCH)
            if not points:
                return "exhausted"
            why = self._measure(points, self.look)
        return why

    def _donors(self, default: Point) -> list[Point]:
        found = [self.space.locate(s) for s in self.plan.start.first]
        keys = {default.key, *(k for k, _ in self.plan.start.known)}
        return [p for p in {q.key: q for q in found if q is not None}.values() if p.key not in keys]

    def _measure(self, points: Sequence[Point], look: SecondLook | None = None) -> str | None:
        """Measure a batch and tell the strategy; the reason to stop, when there is one.

        What is passed over once compiled counts as measured at its prediction, and as no trial.
        """
        trials, why = [], None
        by_key = {p.key: p for p in points}
        for row, elapsed_s in self._stream(points, look):
            self._take(row, elapsed_s)
            predicted = row.static.get("predicted_us") if row.status == PASSED_OVER else None
            trials.append(Trial(by_key[row.schedule], row.time_us or predicted))
            spent = self.plan.budget.spent(self._n_trials, elapsed_s, self._since_best, self._reached())
            why = INTERRUPTED if self.stop.asked else spent
            if why:
                break
        self.strategy.tell(trials)
        return why

    @property
    def _n_trials(self) -> int:
        return len(self.rows) - self._passed_over

    def _stream(self, points: Sequence[Point], look: SecondLook | None) -> Iterator[_Timed]:
        """Rows in the order of `points`: from the journal while it has them, then from the device."""
        todo, best_us = deque(points), self._best.time_us if self._best else None
        while todo and self._recorded.get(todo[0].key):
            yield self._recorded[todo.popleft().key].popleft()
        candidates = [Candidate(self.plan.op, p.key) for p in todo]
        looks = (look,) if look else ()
        for row in self.measurer.stream(candidates, best_us, *looks) if todo else ():
            yield self._keep(row)

    def _take(self, row: Measurement, elapsed_s: float) -> None:
        self.rows.append(row)
        self._elapsed_s = elapsed_s
        self._passed_over += row.status == PASSED_OVER
        if self.look:
            self.look.learn(row)
        is_best = row.time_us is not None and row.time_us < _time(self._best)
        self._best, self._since_best = (row, 0) if is_best else (self._best, self._since_best + 1)
        best_us = self._best.time_us if self._best else None
        self.on_event(Measured(row, len(self.rows), best_us, is_best, elapsed_s, self._eta()))

    def _reached(self) -> float:
        """The share of the roofline that the best time reaches. A disturbed time is too long, so that it misleads nobody."""
        s = self.space
        least = roofline_us(s.op.work(), s.target, s.op.program().dtype, s.threads).time_us
        return least / _time(self._best)

    def _eta(self) -> float | None:
        n, b = self._n_trials, self.plan.budget
        left = []
        if b.seconds is not None:
            left.append(b.seconds - self._elapsed_s)
        if b.trials is not None and n > self._resumed:
            left.append((b.trials - n) * (self._elapsed_s - self._spent_s) / (n - self._resumed))
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
        raced = {k: self._recorded[k].popleft()[0] for k in keys if self._recorded.get(k)}
        missing = [k for k in keys if k not in raced]
        if missing:
            self.on_event(Racing(self.plan.op, len(missing)))
            for row in self.measurer.race([Candidate(self.plan.op, k) for k in missing]):
                raced[row.schedule], self._elapsed_s = self._keep(row)
        return tuple(raced[k] for k in keys if k in raced)

    def _beyond(self) -> list[Measurement]:
        """The journal's rows of the search that this one did not come to, taken out of what is recorded: not of a race."""
        seen = {r.schedule for r in self.rows}
        left = [k for k, rows in self._recorded.items() if rows and k not in seen and not speedup_of(rows[0][0])]
        return [self._recorded[k].popleft()[0] for k in left]

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
            resumed=self._resumed,
            rows=tuple(self.rows),
        )


def _time(row: Measurement | None) -> float:
    """Orders rows. One that was disturbed is too slow if anything, so that a fast one deserves its place in the race."""
    return inf if row is None or row.time_us is None else row.time_us


def is_complete(home: Path, run_id: str) -> bool:
    """True when a run with that id has ended: its journal is closed, or already in the database."""
    closed = closed_path(journal_path(home, run_id))
    return closed.exists() or (closed.parent / "ingested" / closed.name).exists()
