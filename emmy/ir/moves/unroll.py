"""unroll: write out several steps of a work's innermost folded loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from emmy.ir.moves.base import OPEN, Knob, Move, Site, put_work, refuse_path, register
from emmy.ir.plan import Plan
from emmy.ir.target import Target

_FACTORS = (2, 4, 8)


@register
@dataclass(frozen=True)
class Unroll(Move):
    """k0.C/unroll(4): four steps of the atom's k loop stand in one iteration.

    before:  reg k:256, one step an iteration      after:   four steps an iteration, and a loop for the rest
    """

    factor: Knob
    name: ClassVar[str] = "unroll"
    phase: ClassVar[int] = 60
    commutes: ClassVar[bool] = True

    @classmethod
    def sites(cls, plan: Plan, target: Target) -> Iterator[Site]:
        for la in plan.launches if target.is_cpu else ():  # a GPU's atoms say how they are unrolled
            for w in la.tile.works:
                legal = tuple(f for f in _FACTORS if cls(la.name, w.stage, f).refuse(plan, target) is None)
                if legal:
                    yield Site(cls(la.name, w.stage, OPEN), (("factor", legal),))

    def refuse(self, plan: Plan, target: Target) -> str | None:
        missing = refuse_path(self, plan, work="required")
        if missing:
            return missing
        la = plan.launch(self.launch)
        w = la.tile.work(self.work or "")
        if not w.atoms:
            return f"{w.stage} has no atom: unroll writes out steps of an atom's loop"
        if w.unroll != 1:
            return f"{w.stage} is unrolled by {w.unroll} already"
        if not w.nest or w.nest[-1].axis not in plan.program.stage(w.stage).folded:
            return (
                f"{w.stage} has {len(w.nest)} loops of its own, the last not along an axis it folds: nothing to unroll"
            )
        nest = la.tile.nest + w.nest
        trips = plan.count(nest, len(nest) - 1)
        if isinstance(self.factor, int) and not 2 <= self.factor <= trips:
            return f"{w.stage} takes {trips} steps along {nest[-1].axis}, the factor is {self.factor}: it must be 2..{trips}"
        return None

    def rewrite(self, plan: Plan, target: Target) -> Plan:
        assert isinstance(self.factor, int)
        la = plan.launch(self.launch)
        return put_work(plan, la, replace(la.tile.work(self.work or ""), unroll=self.factor))
