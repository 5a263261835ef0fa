"""Ops tuned on one target, on whatever measures there: the order, the ranges, the model that leads, how many at a time.

Does not look for devices. Of a target whose device is not here the schedules are predicted (`emmy.search.predict`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from emmy import __version__
from emmy.abreast import Asked, Searches
from emmy.codegen.nvrtc import nvrtc_version
from emmy.costmodel.dataset import PATIENCE_S
from emmy.costmodel.model import CostModel
from emmy.costmodel.recording import recording
from emmy.costmodel.upkeep import Upkeep
from emmy.errors import UsageError
from emmy.ir.ops import Op
from emmy.ir.parts import symbol_of
from emmy.ir.target import Target, load_target
from emmy.measure.journal import RunHeader
from emmy.measure.measurer import Measurer
from emmy.ranged import Group, Measured, Predicted, settle
from emmy.search.budget import Budget
from emmy.search.events import Listener, Note
from emmy.search.finished import Finished, had_been_finished
from emmy.search.predict import Predicting, prior_model
from emmy.search.ranges import RangeWinner
from emmy.search.session import Request, at_stake, close_dead, load_model
from emmy.search.sitting import Sitting
from emmy.search.tuner import INTERRUPTED, Stop, TuneResult
from emmy.winner import find_winner, measured_rows

_RACES = "ranges"  # what journals of races between ranges say they are of


@dataclass(frozen=True, slots=True)
class Terms:
    """How ops are tuned, whatever the target; `api.tune` says what each means. `model`: a file, "roofline" or None."""

    budget: Budget
    strategy: str
    seed: int
    threads: int
    fresh: bool
    by_range: bool
    ahead: int
    model: str | None
    searches: int = 1


@dataclass(slots=True)
class Tuning:
    """Ops on one target. Raises UsageError, or StaleModel for a model that the terms name and that cannot lead."""

    target: Target
    ops: Sequence[Op]
    terms: Terms
    home: Path
    on_event: Listener
    stop: Stop
    leader: CostModel | None = field(init=False)
    # The most valuable first; those of an open size last, whose ranges begin with the winners of the fixed ones.
    groups: tuple[Group, ...] = field(init=False)

    def __post_init__(self) -> None:
        t = self.terms
        if t.searches < 1:
            raise UsageError(f"searches is {t.searches}: at least one op is searched at a time")
        self.leader = load_model(t.model, self.target, self.home, self.on_event)
        stake_us = at_stake(self.target, t.threads, self.home)
        by_value = sorted(self.ops, key=lambda op: (symbol_of(op) is not None, -stake_us(op)))
        self.groups = tuple(
            Group.of(o, t.by_range, t.budget, self.target, t.strategy, t.seed, t.threads, t.fresh, t.ahead)
            for o in by_value
        )
        for text in (g.said for g in self.groups):
            if text is not None:
                self.on_event(Note(text))

    @property
    def requests(self) -> tuple[Request, ...]:
        """What is searched for: an op each, or a range of one."""
        return tuple(r for g in self.groups for r in g.requests)

    def on(self, here: Measurer | None, alone: bool = False) -> list[TuneResult]:
        """A result an op that was tuned, up to an interruption. `alone`: the op also when nothing was measured of it.

        here: None where the target's device is absent. Raises UsageError for a model that cannot tell its times, CompileError
        without a compiler for it.
        """
        if here is None:
            nvrtc_version()  # raises before anything is searched
            self.leader = leading_absent(self.leader, self.terms.model, self.target, self.home, self.on_event)
            where = f"predicted by {self.leader.digest if self.leader else 'the roofline'}"
        else:
            where = here.device.product  # any card of it will do, as winners are of the product too
        tables = [g.table_key for g in self.groups if g.table_key is not None]
        finished = Finished.of(self.requests, where, self.home, __version__, tables)
        n = max(1, min(self.terms.searches, len(self.groups)))
        if self.groups:
            self.on_event(finished.plan(self.requests, n))
        results = self._abreast(here, finished, n) if n > 1 else self._in_turn(here, finished)
        if not any(r.why == INTERRUPTED for r in results) and not self.stop.asked:
            finished.forget()
        return [r for r in results if r.trials or r.why != INTERRUPTED or alone]

    def _in_turn(self, here: Measurer | None, finished: Finished) -> list[TuneResult]:
        renews = here is not None and self.terms.model is None and len(self.requests) > 1
        upkeep = Upkeep(self.home, self.target.name) if renews else None
        results: list[TuneResult] = []
        for group in self.groups:
            if here is None:
                found = predicted(group, self.home, self.leader, finished, self.on_event, self.stop)
            else:
                sitting = Sitting(
                    group.requests, here, self.home, __version__, self.leader, upkeep, finished, self.on_event, self.stop,
                    group is not self.groups[-1],
                )  # fmt: skip
                found = tuned(group, sitting)
                self.leader = sitting.leader
            results += found
            if (found and found[-1].why == INTERRUPTED) or (
                here is None and self.stop.asked
            ):  # the same command goes on
                break
        return results

    def _abreast(self, here: Measurer | None, finished: Finished, n: int) -> list[TuneResult]:
        asked = [Asked(g, self.home, self.terms.model, here is None) for g in self.groups]
        return Searches(here, asked, n, finished, self.on_event, self.stop).results()


def tuned(group: Group, sitting: Sitting) -> list[TuneResult]:
    """What came of a group's requests: one result of an op whose ranges were all tuned."""
    return _found(group, sitting.finished, sitting.on_event, sitting.run, partial(_settled, sitting))


def _found(
    group: Group,
    finished: Finished,
    on_event: Listener,
    run: Callable[[Request], TuneResult | None],
    settled: Callable[[Group], tuple[RangeWinner, ...]],
) -> list[TuneResult]:
    """`run`: None for what had been finished, or is not begun any more."""
    if group.is_in(finished):
        on_event(Note(had_been_finished(group.op)))
        return []
    found: list[TuneResult] = []
    for request in group.requests:
        if (result := run(request)) is None:
            continue
        found.append(result)
        if result.why == INTERRUPTED:
            break
    return list(group.result(found, settled))


def _settled(sitting: Sitting, group: Group) -> tuple[RangeWinner, ...]:
    """The table of a group whose ranges were tuned, after races between neighbours, those included that a kill cut short."""

    def earlier(header: RunHeader) -> bool:
        return (header.strategy, header.op, header.target) == (_RACES, group.op.key, group.target.name)

    close_dead(sitting.home, earlier, sitting.on_event)
    with recording(sitting.home, _RACES, group.op.key, group.target.name, __version__) as keep:
        evidence = Measured.stored(sitting.home, group.op, group.target, group.threads, PATIENCE_S)
        evidence.here, evidence.keep, evidence.on_event = sitting.here, keep, sitting.on_event
        settle(evidence, sitting.stop)
        if not sitting.stop.asked:
            sitting.finished.add(group.op.key)
        return evidence.table()


# ---------------------------------------------------------------- of a device that is absent
def leading_absent(
    deployed: CostModel | None, choice: str | None, target: Target, home: Path, on_event: Listener
) -> CostModel | None:
    """Who tells the times of a card that is not here: its own model, else the nearest card's; None: its roofline."""
    leader = deployed
    if leader is None and choice is None:
        leader = prior_model(target, home, on_event)
        led = f"led by that of {leader.card.target}" if leader else "and none of another card: the roofline leads"
        on_event(Note(f"no usable model of {target.name} is deployed, {led}"))
    if leader is not None and load_target(leader.card.target).is_cpu:
        raise UsageError(f"the model is of {leader.card.target}: a GPU's times cannot be told from a CPU's")
    return leader


def predicted(
    group: Group, home: Path, leader: CostModel | None, finished: Finished, on_event: Listener, stop: Stop
) -> list[TuneResult]:
    """What is predicted of a group's requests: one result of an op, with its table."""

    def predicting(request: Request) -> Predicting:
        return Predicting(request, leader, home, __version__, on_event, stop)

    def settled(group: Group) -> tuple[RangeWinner, ...]:
        evidence = Predicted.stored(home, group.op, group.target)
        evidence.predicting = lambda op: predicting(replace(group.requests[0], op=op))
        settle(evidence, stop)
        evidence.keep_table(home)
        if not stop.asked:
            finished.add(group.op.key)
        return evidence.table()

    def run(request: Request) -> TuneResult | None:
        if stop.asked:
            return None
        if request.op.key in finished:
            on_event(Note(had_been_finished(request.op)))
            return None
        best = find_winner(measured_rows(home, request.op.key, request.target, request.threads), request.target.product)
        if best is not None:
            on_event(Note(f"{request.op}: a schedule measured at {best.time_us:.4g} us is stored and stays the winner"))
        result = predicting(request).go()
        if not stop.asked:
            finished.add(request.op.key)
        return result

    return _found(group, finished, on_event, run, settled)
