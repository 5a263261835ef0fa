"""Tuning for a card that is not here: search by forecast, compile the best few, check the winner in the emulator.

What comes out is a `Prediction`, marked so: nothing here is timed, and nothing becomes a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, log2
from pathlib import Path
from typing import Literal

from emmy.codegen import gpu_build
from emmy.codegen.build import SourceUnit, plan_source
from emmy.codegen.gpu_build import GpuLibrary
from emmy.costmodel.evaluate import TOLERANCE
from emmy.costmodel.model import CostModel
from emmy.costmodel.registry import find, model_roots
from emmy.errors import CompileError, DataError, PlanError, StaleModel
from emmy.ir.moves.stage import Stage
from emmy.ir.ops import Op
from emmy.ir.roofline import roofline_us
from emmy.ir.schedule import format_schedule, parse_schedule, replay
from emmy.ir.target import Target, load_target, target_names
from emmy.measure.measurer import BATCH
from emmy.records import now_utc
from emmy.search.emulator_check import Check, check
from emmy.search.events import Finished, Listener, Note, Scored, Started, ignore
from emmy.search.forecast import CONFIDENCE, EMPTY_US, Forecast, RatedSpace, launches_us
from emmy.search.predictions import Prediction, Rejection, find_prediction, keep
from emmy.search.registry import make_strategy
from emmy.search.session import Request
from emmy.search.space import Point, Trial
from emmy.search.strategy import Strategy
from emmy.search.tuner import FINALISTS, INTERRUPTED, Stop, TuneResult

Build = Callable[[SourceUnit, Target], GpuLibrary]
Checker = Callable[[Op, str, Target], Check]

_SEARCH_SHARE = 0.7  # of a budget in seconds; the rest is for compiling
_MOST_REJECTED = 40  # a space whose best schedules are all refused is given up
# Where the model cannot tell two transports apart, the one whose copies take fewer issue slots: tma is started by one thread
# for a whole box, cp_async takes an instruction of every warp for each 512 bytes, ldg two of them and registers.
_TRANSPORTS = ("tma", "cp_async", "ldg")


def prior_model(target: Target, home: Path, on_event: Listener = ignore) -> CostModel | None:
    """A deployed model of another NVIDIA card, of the nearest compute capability; None where no usable one is deployed."""
    others = [load_target(n) for n in target_names() if n != target.name]
    cards = [t for t in others if not t.is_cpu]
    for card in sorted(cards, key=lambda t: (abs(_capability(t) - _capability(target)), t.name)):
        try:
            model = find(card.name, model_roots(home))
        except (StaleModel, DataError) as e:
            on_event(Note(str(e)))
            continue
        if model is not None:
            return model
    return None


def _capability(target: Target) -> int:
    return int("".join(c for c in target.arch if c.isdigit()))


@dataclass(slots=True)
class Predicting:
    """One op's search on a card that is not here. `build` and `checker` are the compiler and the emulator unless a test
    brings its own.
    """

    request: Request
    model: CostModel | None
    home: Path
    emmy_version: str
    on_event: Listener = ignore
    stop: Stop = field(default_factory=Stop)
    build: Build = gpu_build.build
    checker: Checker = check
    _log2_us: dict[str, float] = field(default_factory=dict)  # by schedule
    _rejected: list[Rejection] = field(default_factory=list)
    _began: float = 0.0

    def go(self) -> TuneResult:
        """The pick, kept in the home, unless nothing passed the compiler and the emulator."""
        r, model = self.request, self.model
        space = self._space()
        strategy = make_strategy(r.strategy, space, seed=r.seed, model=space.forecast)
        digest = model.digest if model else ""
        self.on_event(Started(r.op.key, r.target.name, r.strategy, r.budget, "", 0, 0, digest))
        self._began = time.monotonic()
        why = self._search(space, strategy)
        pick = self._pick(space)
        if pick is not None:
            keep(self.home, pick)
        elapsed_s = time.monotonic() - self._began
        self.on_event(Finished(r.op.key, why, len(self._log2_us), elapsed_s, r.target.name))
        return TuneResult(
            op=r.op.key, target=r.target.name, best=None, finalists=(), default=None, trials=len(self._log2_us), counts={},
            elapsed_s=elapsed_s, why=why, run_id="", raced=False, predicted=pick, rejected=tuple(self._rejected),
        )  # fmt: skip

    def times_us(self, schedules: Sequence[str]) -> dict[str, float]:
        """What is predicted of the schedules, of those that are legal; they are neither compiled nor run."""
        space, out = self._space(), {}
        for schedule in schedules:
            try:
                log2_us, _ = space.forecast.predict(space.features([Point(schedule, ())]))
            except PlanError:
                continue
            least_us = launches_us(
                replay(self.request.op.program(), schedule, self.request.target), self.request.target
            )
            out[schedule] = max(float(2.0 ** log2_us[0]), least_us)
        return out

    def confirm(self, schedule: str) -> Prediction | None:
        """The schedule as the pick, kept in the home; None when it does not pass the compiler and the emulator."""
        promise = log2(self.times_us([schedule]).get(schedule, inf))
        built = self._built(schedule, promise) if promise < inf else None
        if built is None:
            return None
        found = self.checker(self.request.op, schedule, self.request.target)
        if found.wrong:
            self._reject(schedule, "emulator", f"{found.op or 'not run'}: {found.wrong}")
            return None
        pick = self._prediction(self._space(), built, found)
        keep(self.home, pick)
        return pick

    def _space(self) -> RatedSpace:
        prior = load_target(self.model.card.target) if self.model else None
        return RatedSpace(Forecast(self.request.op, self.request.target, self.model, prior), self.request.sums)

    # ------------------------------------------------------------ search
    def _search(self, space: RatedSpace, strategy: Strategy) -> str:
        """Scores schedules until the budget is spent; the reason to stop."""
        since_best, points = 0, [space.default(), *self._stored(space)]
        while points:
            log2_us, _ = space.forecast.predict(space.features(points))
            for point, value in zip(points, log2_us.tolist(), strict=True):
                is_best = value < min(self._log2_us.values(), default=inf)
                self._log2_us[point.key] = value
                since_best = 0 if is_best else since_best + 1
                self._tell(point, is_best)
                if (why := self._spent(since_best)) is not None:
                    return why
            strategy.tell([Trial(p, float(2.0**v)) for p, v in zip(points, log2_us.tolist(), strict=True)])
            points = strategy.ask(BATCH)
        return "exhausted"

    def _stored(self, space: RatedSpace) -> Iterator[Point]:
        """The pick that is stored: scored again, so that nothing that is predicted to be slower takes its place."""
        pick = None if self.request.fresh else find_prediction(self.home, self.request.op, self.request.target)
        point = space.locate(pick.schedule) if pick else None
        if point is not None and point.key != space.default().key:
            yield point

    def _spent(self, since_best: int) -> str | None:
        if self.stop.asked:
            return INTERRUPTED
        budget, elapsed_s = self.request.budget, time.monotonic() - self._began
        share = None if budget.seconds is None else _SEARCH_SHARE * budget.seconds
        return replace(budget, seconds=share).spent(len(self._log2_us), elapsed_s, since_best)

    def _tell(self, point: Point, is_best: bool) -> None:
        n, budget, elapsed_s = len(self._log2_us), self.request.budget, time.monotonic() - self._began
        left = [_SEARCH_SHARE * budget.seconds - elapsed_s] if budget.seconds is not None else []
        left += [(budget.trials - n) * elapsed_s / n] if budget.trials is not None else []
        eta_s = max(0.0, min(left)) if left else None
        best_us = max(
            2.0 ** min(self._log2_us.values()), EMPTY_US
        )  # they rank below it too; none is claimed to be faster
        self.on_event(
            Scored(self.request.op.key, self.request.target.name, point.key, n, best_us, is_best, elapsed_s, eta_s)
        )

    # ------------------------------------------------------------ the pick
    def _pick(self, space: RatedSpace) -> Prediction | None:
        """The most promising schedule that compiles well and that the emulator finds right."""
        waiting = self._by_promise(space)
        while len(self._rejected) < _MOST_REJECTED and (finalists := self._compile(waiting)):
            for f in _ties_first(finalists):
                found = self.checker(self.request.op, f.schedule, self.request.target)
                if not found.wrong:
                    return self._prediction(space, f, found)
                self._reject(f.schedule, "emulator", f"{found.op or 'not run'}: {found.wrong}")
        return None

    def _by_promise(self, space: RatedSpace) -> Iterator[tuple[float, tuple[str, ...]]]:
        """(log2 of the time, a schedule after those like it that are to be preferred), by time."""
        given: set[str] = set()
        for schedule in sorted(self._log2_us, key=lambda s: (self._log2_us[s], s)):
            if schedule not in given:
                alike = tuple(t for t in _cheaper(schedule) if t not in given and self._is_alike(t, schedule, space))
                given.update((*alike, schedule))
                yield self._log2_us[schedule], (*alike, schedule)

    def _is_alike(self, other: str, schedule: str, space: RatedSpace) -> bool:
        """Whether the other one is legal, and predicted no slower by more than the model can tell."""
        try:
            x = space.features([Point(other, ())])
        except PlanError:
            return False
        return float(space.forecast.predict(x)[0][0]) <= self._log2_us[schedule] + space.forecast.noise_log2

    def _compile(self, waiting: Iterator[tuple[float, tuple[str, ...]]]) -> list[_Finalist]:
        """The next few that compile, of each group the first; fewer when time or patience is at its end."""
        done: list[_Finalist] = []
        seconds = self.request.budget.seconds
        for promise, group in waiting:
            for schedule in group:
                if (built := self._built(schedule, promise)) is not None:
                    done.append(built)
                    break
            late = self.stop.asked or (seconds is not None and time.monotonic() - self._began > seconds)
            if len(done) == FINALISTS or len(self._rejected) >= _MOST_REJECTED or (done and late):
                break
        if done:
            self.on_event(Note(f"compiled {len(done)} for {self.request.target.arch}; the best is run in the emulator"))
        return done

    def _built(self, schedule: str, promise: float) -> _Finalist | None:
        op, target = self.request.op, self.request.target
        try:
            unit = plan_source(replay(op.program(), schedule, target), target)
        except PlanError as e:
            self._reject(schedule, "generator", str(e))
            return None
        try:
            return _Finalist(schedule, promise, unit, self.build(unit, target).static)
        except CompileError as e:
            self._reject(schedule, "compiler", str(e))
            return None

    def _reject(self, schedule: str, by: Literal["generator", "compiler", "emulator"], reason: str) -> None:
        self._rejected.append(Rejection(schedule, by, reason))
        self.on_event(Note(f"rejected by the {by}: {reason.splitlines()[0]}  {schedule}"))

    def _prediction(self, space: RatedSpace, f: _Finalist, found: Check) -> Prediction:
        op, target, forecast = self.request.op, self.request.target, space.forecast
        log2_us, spread = forecast.predict(space.features([Point(f.schedule, ())]))
        span = forecast.span(float(log2_us[0]), float(spread[0]), f.unit.plan)
        if f.promise < log2_us[0]:
            slower = f"{100 * (2.0 ** (float(log2_us[0]) - f.promise) - 1):.0f} % slower"
            able = f"the model errs by a factor of {2.0**forecast.noise_log2:.2f}"
            self.on_event(
                Note(f"predicted {slower} than with another transport, and taken for its cheaper copies: {able}")
            )
        return Prediction(
            op=op.key,
            target=target.name,
            schedule=f.schedule,
            source_digest=f.unit.digest,
            predicted_us=span.predicted_us,
            low_us=span.low_us,
            high_us=span.high_us,
            confidence=CONFIDENCE,
            calibrated=forecast.is_calibrated and not span.is_launch,
            basis=span.basis,
            roof_us=roofline_us(op.work(), target, op.program().dtype).time_us,
            model=self.model.digest if self.model else "",
            model_target=self.model.card.target if self.model else "",
            checked=found.op,
            emmy_version=self.emmy_version,
            time_utc=now_utc(),
            static=f.static,
        )


@dataclass(frozen=True, slots=True)
class _Finalist:
    """A schedule that compiled. `promise`: log2 of the time predicted for the best of its group."""

    schedule: str
    promise: float
    unit: SourceUnit
    static: Mapping[str, float]

    @property
    def effort(self) -> tuple[int, float]:
        """What it takes beside the matrix instructions: how its copies are made, cycles to issue the main loop a one."""
        cycles, n = self.static.get("loop_issue_cycles", 0.0), self.static.get("loop_mma", 0.0)
        return _rank(self.schedule), cycles / n if n else 0.0


def _ties_first(finalists: Sequence[_Finalist]) -> list[_Finalist]:
    """By promise, but those that tie with the best by effort: smaller differences of predictions claim nothing."""
    best = min(f.promise for f in finalists)
    return sorted(
        finalists,
        key=lambda f: (0.0, *f.effort) if f.promise <= best + log2(1 + TOLERANCE) else (f.promise - best, 0, 0.0),
    )


def _cheaper(schedule: str) -> Iterator[str]:
    """The schedule with each transport whose copies take fewer issue slots, the cheapest first; some may be illegal."""
    moves = parse_schedule(schedule)
    for transport in _TRANSPORTS[: _rank(schedule)]:
        yield format_schedule(tuple(replace(m, transport=transport) if isinstance(m, Stage) else m for m in moves))


def _rank(schedule: str) -> int:
    """Place of the schedule's most expensive transport in _TRANSPORTS."""
    used = [m.transport for m in parse_schedule(schedule) if isinstance(m, Stage)]
    return max((_TRANSPORTS.index(t) for t in used if t in _TRANSPORTS), default=0)
