"""commute: factors that do not depend on the folded axis leave the sum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from emmy.ir.expr import Expr, Read, axes_of, factors, product
from emmy.ir.moves.base import Move, Site, legal_sites, refuse_path, register
from emmy.ir.moves.gpu_tiles import unjoined
from emmy.ir.moves.rewrite import refuse_name, refuse_nest, replace_stages
from emmy.ir.plan import Plan
from emmy.ir.program import SUM, Stage
from emmy.ir.target import Target


@register
@dataclass(frozen=True)
class Commute(Move):
    """commute(Y): a row scale leaves the contraction, so that it no longer waits for the row's statistic.

    before:  Y[m,n] sum= X[m,k]*r[m]*W[n,k]
    after:   Y_acc[m,n] sum= X[m,k]*W[n,k];  Y[m,n] = Y_acc[m,n]*r[m]
    """

    out: str
    name: ClassVar[str] = "commute"
    phase: ClassVar[int] = 3

    @classmethod
    def sites(cls, plan: Plan, target: Target) -> Iterator[Site]:
        first = plan.launches[0].name
        moves = (cls(first, None, s.out) for s in plan.program.stages)
        due = not target.is_cpu and unjoined(plan)
        return (replace(site, mandatory=due) for site in legal_sites(moves, plan, target))

    def refuse(self, plan: Plan, target: Target) -> str | None:
        missing = refuse_path(self, plan) or refuse_nest(self, plan)
        if missing:
            return missing
        if not plan.program.has_stage(self.out) or plan.program.stage(self.out).monoid != SUM:
            return f"{self.out} is not a sum"
        s = plan.program.stage(self.out)
        free, kept = _parted(s)
        if not free:
            return f"all {len(kept)} factors of {self.out} depend on {','.join(s.folded)}"
        if not kept:
            return f"no factor of {self.out} depends on {','.join(s.folded)}: nothing would be summed"
        return refuse_name(plan, f"{s.out}_acc")

    def rewrite(self, plan: Plan, target: Target) -> Plan:
        s = plan.program.stage(self.out)
        free, kept = _parted(s)
        acc = Stage(f"{s.out}_acc", s.axes, product(kept), s.reduces)
        scaled = Stage(s.out, s.axes, product((Read(acc.out, acc.axes), *free)), (), s.dtype)
        return replace_stages(plan, self.launch, (s.out,), (acc, scaled))


def _parted(s: Stage) -> tuple[tuple[Expr, ...], tuple[Expr, ...]]:
    """Factors that do not depend on a folded axis, and those that do."""
    parts = factors(s.body)
    free = tuple(f for f in parts if not set(axes_of(f)) & set(s.folded))
    return free, tuple(f for f in parts if f not in free)
