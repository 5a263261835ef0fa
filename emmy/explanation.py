"""Why an op's best schedule is as it is, from what was measured, what the moves refuse and what the model predicts.

Only reads: nothing is compiled or measured. A claim rests on stored rows; what rests on the model says so. The module is not
named after its function: `emmy.explain` is the call, and a module of that name would take its place once imported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product as every

import numpy as np

from emmy.codegen.build import plan_source
from emmy.costmodel.features import features
from emmy.costmodel.model import CostModel
from emmy.errors import IllegalMove, PlanError
from emmy.ir.atoms import ATOMS
from emmy.ir.moves import MOVES, OPEN, Move
from emmy.ir.moves.stage import TRANSPORTS
from emmy.ir.ops import Op
from emmy.ir.plan import Plan
from emmy.ir.roofline import RooflineBound, roofline_us
from emmy.ir.schedule import format_schedule, parse_schedule, replay
from emmy.ir.target import Target
from emmy.measure.measurer import Speedup
from emmy.records import Measurement
from emmy.search.forecast import launches_us
from emmy.search.predictions import Prediction
from emmy.search.schedule_space import ScheduleSpace
from emmy.search.tuner import speedup_of
from emmy.winner import by_schedule, find_winner

Moves = tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """The schedule with one move changed or left out, and its time over the explained one's (above 1: slower)."""

    change: str  # "step 64 instead of 256", "left out"
    factor: float
    measured: bool  # else predicted by the model


@dataclass(frozen=True, slots=True)
class MoveReport:
    """One move of the schedule, and what else was tried or predicted in its place, best first.

    meaning: what a move of its kind does, by an example
    """

    move: str
    meaning: str
    variants: tuple[Variant, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A move that cannot be made, and its own sentence on why. `instead_of`: the schedule's move it would replace."""

    move: str
    reason: str
    instead_of: str = ""


@dataclass(frozen=True, slots=True)
class ModelView:
    """What the deployed model says: `rank` of the schedule among `of` measured ones, 1 being the fastest predicted."""

    digest: str
    predicted_us: float
    factor: float  # the prediction may be off by this much either way
    rank: int
    of: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """`time_us` is None when nothing is stored; `schedule` is then the predicted one, without one the default, unless `given`.

    Roofline for `threads` of the target.
    """

    op: str
    target: str
    threads: int
    schedule: str
    time_us: float | None
    speedup: Speedup | None
    roof: RooflineBound
    statuses: Mapping[str, int]  # of every stored row
    schedules: int  # different ones with a time
    default_factor: float | None  # the default schedule's time over this one's
    moves: tuple[MoveReport, ...]
    refusals: tuple[Refusal, ...]
    model: ModelView | None
    predicted: Prediction | None = None  # what `schedule` rests on where nothing is measured
    given: bool = False  # the caller named the schedule

    @property
    def roof_share(self) -> float | None:
        """Share of the roofline that is reached: 1 = nothing is left to win."""
        return None if self.time_us is None else self.roof.time_us / self.time_us


def explain(
    op: Op,
    target: Target,
    threads: int,
    rows: Sequence[Measurement],
    model: CostModel | None,
    predicted: Prediction | None = None,
    given: str | None = None,
) -> Explanation:
    """The explanation of the best schedule in `rows`, which are all those of the op, target and thread count, or of the one
    given. Raises IllegalMove for one that does not replay.
    """
    named = None if given is None else format_schedule(parse_schedule(given))
    best = find_winner([r for r in rows if named in (None, r.schedule)], target.product)
    default = ScheduleSpace(op, target, threads).default().key
    predicted = None if best or named is not None else predicted
    schedule = named if named is not None else best.schedule if best else predicted.schedule if predicted else default
    replay(op.program(), schedule, target)
    times = by_schedule([r for r in rows if r.device.product == target.product] or rows)
    moves = parse_schedule(schedule)
    judge = _Judge(op, target, threads, model)
    neighbours = _neighbours(op, target, moves)
    return Explanation(
        op=op.key,
        target=target.name,
        threads=threads,
        schedule=schedule,
        time_us=best.time_us if best else None,
        speedup=speedup_of(best.row) if best else None,
        roof=roofline_us(op.work(), target, op.program().dtype, threads),
        statuses=Counter(r.status for r in rows),
        schedules=len(times),
        default_factor=times[default] / times[schedule] if best and default in times else None,
        moves=tuple(_report(i, moves, neighbours, times, judge) for i in range(len(moves))),
        refusals=(*_refused_neighbours(moves, neighbours), *_refused_moves(op, target, moves)),
        model=judge.view(schedule, tuple(times)) if best else None,
        predicted=predicted,
        given=named is not None,
    )


# ---------------------------------------------------------------- neighbours
@dataclass(frozen=True, slots=True)
class _Neighbour:
    """The schedule with move `at` changed. `refused`: why it is illegal, or has no code."""

    at: int
    change: str
    moves: Moves
    refused: str | None


def _neighbours(op: Op, target: Target, moves: Moves) -> tuple[_Neighbour, ...]:
    """Every move left out, and each of its numbers given the site's other values, half and double."""
    found = []
    for i, move in enumerate(moves):
        found.append(_neighbour(op, target, i, "left out", (*moves[:i], *moves[i + 1 :])))
        before = replay(op.program(), moves[:i], target)
        domains = _domains(move, before, target)
        for name, value in move.arguments:
            if isinstance(value, int):
                values = sorted({*domains.get(name, ()), value // 2, value * 2} - {value, 0})
                found += [
                    _neighbour(
                        op,
                        target,
                        i,
                        f"{name} {v} instead of {value}",
                        (*moves[:i], move.fill({name: v}), *moves[i + 1 :]),
                    )
                    for v in values
                ]
    return tuple(found)


def _neighbour(op: Op, target: Target, at: int, change: str, moves: Moves) -> _Neighbour:
    try:
        plan_source(replay(op.program(), moves, target), target)
    except IllegalMove as e:
        where = "" if e.index == at and change != "left out" else f"{e.move}: "
        return _Neighbour(at, change, moves, where + e.reason)
    except PlanError as e:
        return _Neighbour(at, change, moves, f"no code is generated: {e}")
    return _Neighbour(at, change, moves, None)


def _domains(move: Move, before: Plan, target: Target) -> Mapping[str, tuple[int, ...]]:
    """The values that the move's site offers for each of its knobs."""
    names = {n: v for n, v in move.arguments if isinstance(v, int)}
    for site in type(move).sites(before, target):
        if site.move.fill({k: names[k] for k in site.move.knobs if k in names}) == move:
            return dict(site.domains)
    return {}


def _report(
    at: int, moves: Moves, neighbours: Sequence[_Neighbour], times: Mapping[str, float], judge: _Judge
) -> MoveReport:
    own = [n for n in neighbours if n.at == at and n.refused is None]
    here = format_schedule(moves)
    variants = []
    for n, predicted in zip(own, judge.factors(here, [format_schedule(n.moves) for n in own]), strict=True):
        text = format_schedule(n.moves)
        if text in times and here in times:
            variants.append(Variant(n.change, times[text] / times[here], measured=True))
        elif predicted is not None:
            variants.append(Variant(n.change, predicted, measured=False))
    variants.sort(key=lambda v: (not v.measured, v.factor))
    meaning = (type(moves[at]).__doc__ or "").strip().splitlines()[0]
    return MoveReport(str(moves[at]), meaning, tuple(variants))


# ---------------------------------------------------------------- refusals
def _refused_neighbours(moves: Moves, neighbours: Sequence[_Neighbour]) -> Iterator[Refusal]:
    """Changes of the schedule's own moves that are illegal, the first of those with one reason."""
    seen: set[str] = set()
    for n in neighbours:
        if n.refused is not None and n.refused not in seen and n.change != "left out":
            seen.add(n.refused)
            yield Refusal(str(n.moves[n.at]), n.refused, str(moves[n.at]))


def _refused_moves(op: Op, target: Target, moves: Moves) -> Iterator[Refusal]:
    """Kinds of move that the schedule lacks and that have no legal place at the point where they would come."""
    for cls in MOVES.values():
        at = sum(m.phase <= cls.phase for m in moves)
        plan = replay(op.program(), moves[:at], target)
        if any(isinstance(m, cls) for m in moves) or any(True for _ in cls.sites(plan, target)):
            continue
        reasons = ((m, m.refuse(plan, target)) for m in _everywhere(cls, plan, target))
        refused = next(((m, why) for m, why in reasons if why is not None), None)
        if refused:
            yield Refusal(str(refused[0]), refused[1])
    for kind in ATOMS.values():
        if not target.can(kind.capability):
            known = ", ".join(k.name for k in ATOMS.values() if target.can(k.capability))
            yield Refusal(f"atom({kind.name},...)", f"{target.name} has no {kind.capability}; its atoms are {known}")


def _everywhere(cls: type[Move], plan: Plan, target: Target) -> Iterator[Move]:
    """The move with its numbers open, at every place that the program's and the target's names give."""
    p = plan.program
    names: Mapping[str, Sequence[str]] = {
        "axis": [a for a, _ in p.dims],
        "level": target.loop_levels,
        "atom": list(ATOMS),
        "transport": list(TRANSPORTS),
    }
    anything = [*(s.out for s in p.stages), *(v.name for v in p.inputs)]
    wanted = [f for f in fields(cls)[2:] if f.type == "str"]
    numbers = {f.name: OPEN for f in fields(cls)[2:] if f.type == "Knob"}
    for la in plan.launches:
        for words in every(*(names.get(f.name, anything) for f in wanted)):
            yield cls(la.name, None, **numbers, **{f.name: w for f, w in zip(wanted, words, strict=True)})


# ---------------------------------------------------------------- the model
@dataclass(frozen=True, slots=True)
class _Judge:
    """The model asked about schedules of one op."""

    op: Op
    target: Target
    threads: int
    model: CostModel | None

    def factors(self, base: str, schedules: Sequence[str]) -> list[float | None]:
        """Predicted time of each schedule over that of `base`; None without a model."""
        if self.model is None or not schedules:
            return [None] * len(schedules)
        log2_us, _ = self.model.predict(self._features([base, *schedules]))
        return [float(2 ** (x - log2_us[0])) for x in log2_us[1:]]

    def view(self, schedule: str, measured: Sequence[str]) -> ModelView | None:
        if self.model is None:
            return None
        legal = [s for s in measured if s == schedule or self._is_legal(s)]
        log2_us, spread = self.model.predict(self._features(legal))
        own = legal.index(schedule)
        rank = 1 + int(np.sum(log2_us < log2_us[own]))
        least_us = launches_us(replay(self.op.program(), schedule, self.target), self.target)
        predicted_us = max(float(2 ** log2_us[own]), least_us)
        return ModelView(self.model.digest, predicted_us, float(2 ** spread[own]), rank, len(legal))

    def _is_legal(self, schedule: str) -> bool:
        try:
            replay(self.op.program(), schedule, self.target)
        except PlanError:
            return False
        return True

    def _features(self, schedules: Sequence[str]) -> np.ndarray:
        plans = (replay(self.op.program(), s, self.target) for s in schedules)
        return np.stack([features(self.op, plan, self.target, self.threads) for plan in plans])
