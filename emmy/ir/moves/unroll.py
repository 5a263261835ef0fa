"""unroll: write out several steps of a work's innermost folded loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from emmy.ir.atoms import ATOMS
from emmy.ir.moves.atom import refuse_registers
from emmy.ir.moves.base import (
    OPEN,
    Knob,
    Move,
    Site,
    put_work,
    refuse_beside,
    refuse_path,
    register,
    works_beside,
)
from emmy.ir.plan import Launch, Plan, Work
from emmy.ir.target import Target

_FACTORS = (2, 4, 8)
_LOADS = (2, 3, 4, 5, 6, 8, 10, 12, 15, 16)  # steps of the direct atom whose loads are under way together


@register
@dataclass(frozen=True)
class Unroll(Move):
    """k0.C/unroll(4): four steps of the atom's k loop stand in one iteration.

    before:  reg k:256, one step an iteration      after:   four steps an iteration, and a loop for the rest

    The loads of all of them are under way together when the atom reads its operands from memory.
    """

    factor: Knob
    name: ClassVar[str] = "unroll"
    phase: ClassVar[int] = 60
    commutes: ClassVar[bool] = True

    @classmethod
    def sites(cls, plan: Plan, target: Target) -> Iterator[Site]:
        for la in plan.launches:
            for w in la.tile.works:
                direct = any(ATOMS[a.name].direct for a in w.atoms)
                if not (direct or target.is_cpu):
                    continue  # a GPU's other atoms say how they are unrolled
                factors = _LOADS if direct else _FACTORS
                legal = tuple(f for f in factors if cls(la.name, w.stage, f).refuse(plan, target) is None)
                if direct and legal:
                    legal = _rolling(legal, _trips(plan, la, w)) or legal
                if legal:
                    yield Site(cls(la.name, w.stage, OPEN), (("factor", legal),), mandatory=direct)
                if legal and direct:
                    return  # each launch needs one, and sorted they come in this order

    def refuse(self, plan: Plan, target: Target) -> str | None:
        missing = refuse_path(self, plan, work="required")
        if missing:
            return missing
        la = plan.launch(self.launch)
        w = la.tile.work(self.work or "")
        if not w.atoms:
            return f"{w.stage} has no atom: unroll writes out steps of an atom's loop"
        if not target.is_cpu and (reason := refuse_beside(self, plan, w.stage)):
            return reason
        if w.unroll != 1:
            return f"{w.stage} is unrolled by {w.unroll} already"
        if not w.nest or w.nest[-1].axis not in plan.program.stage(w.stage).folded:
            return (
                f"{w.stage} has {len(w.nest)} loops of its own, the last not along an axis it folds: nothing to unroll"
            )
        trips, axis = _trips(plan, la, w), w.nest[-1].axis
        if isinstance(self.factor, int) and not 2 <= self.factor <= trips:
            return f"{w.stage} takes {trips} steps along {axis}, the factor is {self.factor}: it must be 2..{trips}"
        direct = next((a for a in w.atoms if ATOMS[a.name].direct), None)
        if direct and isinstance(self.factor, int):
            return refuse_registers(plan, target, la, replace(w, unroll=self.factor), direct)
        return None

    def rewrite(self, plan: Plan, target: Target) -> Plan:
        assert isinstance(self.factor, int)
        la = plan.launch(self.launch)
        works = works_beside(plan, la, self.work or "", target)
        return put_work(plan, la, *(replace(w, unroll=self.factor) for w in works))


def _trips(plan: Plan, la: Launch, w: Work) -> int:
    """Steps of a work's innermost loop."""
    nest = la.tile.nest + w.nest
    return plan.count(nest, len(nest) - 1)


def _rolling(factors: tuple[int, ...], trips: int) -> tuple[int, ...]:
    """Factors that leave a loop of even laps, or none at all.

    Of loads behind a loop, or of one lap, ptxas makes loads at the front, until registers spill (seen for 6 of 35 tiles that
    are left out by this, for none of 66 that are not).
    """
    return tuple(f for f in factors if 2 * f > trips or (trips % f == 0 and trips != 2 * f))
