"""fuse: an elementwise stage is written into the stage that reads it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from emmy.ir.expr import substitute
from emmy.ir.moves.base import Move, Site, legal_sites, refuse_path, register
from emmy.ir.moves.commute import Commute
from emmy.ir.moves.gpu_tiles import makes_on_the_way, product_of
from emmy.ir.moves.operand import Operand
from emmy.ir.moves.rewrite import refuse_nest, replace_stages
from emmy.ir.plan import Plan
from emmy.ir.target import Target


@register
@dataclass(frozen=True)
class Fuse(Move):
    """fuse(Xn,Y): the elementwise stage Xn is written into its reader Y.

    before:  Xn[m,k] = X[m,k]*r[m]*g[k];  Y[m,n] sum= Xn[m,k]*W[n,k]
    after:   Y[m,n] sum= X[m,k]*r[m]*g[k]*W[n,k]

    Refuses stages that fold an axis, leave the program, or have another reader.
    """

    inner: str
    into: str
    name: ClassVar[str] = "fuse"
    phase: ClassVar[int] = 2
    commutes: ClassVar[bool] = True

    @classmethod
    def sites(cls, plan: Plan, target: Target) -> Iterator[Site]:
        """On a GPU where a row's scale is to leave a product of few rows, whose lanes make the rest on the way."""
        first, stages = plan.launches[0].name, plan.program.stages
        moves = (cls(first, None, s.out, t.out) for s in stages for t in stages if s.out in t.reads)
        found = legal_sites(moves, plan, target)
        return (x for x in found if target.is_cpu or _ends_on_the_way(plan, x.move, target))

    def refuse(self, plan: Plan, target: Target) -> str | None:
        missing = refuse_path(self, plan) or refuse_nest(self, plan)
        if missing:
            return missing
        p = plan.program
        if not p.has_stage(self.inner) or not p.has_stage(self.into):
            return f"the program has stages {', '.join(s.out for s in p.stages)}; got {self.inner} and {self.into}"
        readers = [s.out for s in p.stages if self.inner in s.reads]
        if readers != [self.into] or self.inner in p.outputs:
            leaves = " and leaves the program" if self.inner in p.outputs else ""
            return f"{self.inner} is read by {', '.join(readers) or 'no stage'}{leaves}: only {self.into} may read it"
        if p.stage(self.inner).reduces:
            return f"{self.inner} folds {','.join(p.stage(self.inner).folded)}; only elementwise stages can be written into a reader"
        into = p.stage(self.into)
        return (
            f"{self.into} folds by {into.monoid.name}, whose lift holds the reads"
            if into.monoid and into.monoid.lift
            else None
        )

    def rewrite(self, plan: Plan, target: Target) -> Plan:
        a, b = plan.program.stage(self.inner), plan.program.stage(self.into)
        fused = replace(b, body=substitute(b.body, lambda r: a.body if r.value == a.out else r))
        return replace_stages(plan, self.launch, (a.out, b.out), (fused,))


def _ends_on_the_way(plan: Plan, fused: Move, target: Target) -> bool:
    """Whether fuse writes an operand into its product, and what is due then leaves one whose first operand lanes make."""
    assert isinstance(fused, Fuse)
    into = plan.program.stage(fused.into)
    if not set(into.folded) & set(plan.program.stage(fused.inner).axes):
        return False
    plan = fused.rewrite(plan, target)
    for move in (Commute, Operand):
        site = next(iter(move.sites(plan, target)), None)
        if site is None:
            return False
        plan = site.move.rewrite(plan, target)
    la = plan.launches[0]
    product = product_of(plan, la)
    return product is not None and makes_on_the_way(plan, la, product, target)
