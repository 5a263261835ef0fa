"""swap: the factors of a product change places, so that an instruction's rows are the columns of what it makes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from emmy.ir.beside import beside
from emmy.ir.expr import Read, factors, product
from emmy.ir.moves.base import Move, Site, refuse_beside, refuse_path, register
from emmy.ir.moves.gpu_tiles import swap_suits
from emmy.ir.moves.lifted_tiles import feeds_lift
from emmy.ir.moves.rewrite import refuse_nest, replace_stages
from emmy.ir.plan import Plan
from emmy.ir.program import SUM, Stage, swapped
from emmy.ir.target import Target


@register
@dataclass(frozen=True)
class Swap(Move):
    """swap(C): weights are the instruction's first operand, of many rows, and a few tokens its second, of as few columns.

    before:  C[m,n] sum= A[m,k] * B[n,k]          after:   C[m,n] sum= B[n,k] * A[m,k]
             atom m over m, n over n                       atom m over n, n over m

    No rows of an instruction are wasted on tokens that do not exist. Its sums lie transposed: they pass through shared
    memory, from where they leave in vectors along n. Products that are folded side by side are swapped together. Refuses what
    is no product of two matrices, and CPUs, whose atoms have any number of rows.
    """

    out: str
    name: ClassVar[str] = "swap"
    phase: ClassVar[int] = 5

    @classmethod
    def sites(cls, plan: Plan, target: Target) -> Iterator[Site]:
        for la in plan.launches:
            for w in la.tile.works:
                if feeds_lift(plan, la, plan.program.stage(w.stage)):
                    continue
                move = cls(la.name, None, w.stage)
                if move.refuse(plan, target) is None and swap_suits(plan, la, plan.program.stage(w.stage), target):
                    yield Site(move)

    def refuse(self, plan: Plan, target: Target) -> str | None:
        missing = refuse_path(self, plan) or refuse_nest(self, plan)
        if missing:
            return missing
        if not plan.program.has_stage(self.out) or plan.program.stage(self.out).monoid != SUM:
            return f"{self.out} is not a sum that {self.launch} makes"
        if reason := refuse_beside(self, plan, self.out):
            return reason
        for stage in beside(plan.program, plan.launch(self.launch).tile, self.out):
            if reason := _refuse_product(plan.program.stage(stage)):
                return reason
        if target.is_cpu:
            b = factors(plan.program.stage(self.out).body)[1]
            return f"atoms of {target.name} have any number of rows: {self.out} gains nothing by the columns of {b}"
        return None

    def rewrite(self, plan: Plan, target: Target) -> Plan:
        stages = beside(plan.program, plan.launch(self.launch).tile, self.out)
        return replace_stages(plan, self.launch, stages, tuple(_turned(plan.program.stage(x)) for x in stages))


def _turned(s: Stage) -> Stage:
    a, b = factors(s.body)
    return replace(s, body=product((b, a)))


def _refuse_product(s: Stage) -> str | None:
    """Why a stage is no product whose factors may change places."""
    reads = [f for f in factors(s.body) if isinstance(f, Read)]
    own = [set(r.index) & set(s.axes[-2:]) for r in reads]  # each factor may have any of the axes before these
    apart = [{a} for a in s.axes[-2:]]
    if len(reads) != len(factors(s.body)) or len(apart) != 2 or own not in (apart, apart[::-1]):
        return f"{s.out} is a sum of {s.body}, which is no product of two matrices"
    if swapped(s):
        return f"the factors of {s.out} are swapped already: {s.body}"
    return None
