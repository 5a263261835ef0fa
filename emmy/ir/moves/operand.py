"""operand: two factors of a contraction become one operand, so that an atom sees two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from emmy.ir.expr import Read, axes_of, factors, product
from emmy.ir.moves.base import Move, Site, refuse_path, register
from emmy.ir.moves.rewrite import refuse_name, refuse_nest, replace_stages
from emmy.ir.plan import Plan
from emmy.ir.program import SUM, Stage
from emmy.ir.target import Target


@register
@dataclass(frozen=True)
class Operand(Move):
    """operand(Y_acc,g,W): W and g become one operand, computed in the tile beside it.

    before:  Y_acc sum= X[m,k]*g[k]*W[n,k]
    after:   W_g[n,k] = g[k]*W[n,k];  Y_acc sum= X[m,k]*W_g[n,k]
    """

    out: str
    factor: str
    value: str
    name: ClassVar[str] = "operand"
    phase: ClassVar[int] = 4

    @classmethod
    def sites(cls, plan: Plan, target: Target) -> Iterator[Site]:
        """On a GPU all others that the sum folds join the first factor, of which rows are few: lanes make it on the way."""
        for s in plan.program.stages:
            names = [f.value for f in factors(s.body) if isinstance(f, Read)]
            for factor in names:
                for value in names if target.is_cpu else names[:1]:
                    move = cls(plan.launches[0].name, None, s.out, factor, value)
                    if factor == value or move.refuse(plan, target) is not None:
                        continue
                    if target.is_cpu or all(set(axes_of(f)) & set(s.folded) for f in factors(s.body)):
                        yield Site(move, mandatory=not target.is_cpu)

    def refuse(self, plan: Plan, target: Target) -> str | None:
        missing = refuse_path(self, plan) or refuse_nest(self, plan)
        if missing:
            return missing
        if not plan.program.has_stage(self.out) or plan.program.stage(self.out).monoid != SUM:
            return f"{self.out} is not a sum"
        s = plan.program.stage(self.out)
        parts = {f.value: f for f in factors(s.body) if isinstance(f, Read)}
        if self.factor not in parts or self.value not in parts or self.factor == self.value:
            found = ", ".join(str(f) for f in factors(s.body))
            return f"{self.out} has factors {found}; {self.factor} and {self.value} must be two of them"
        if len(factors(s.body)) < 3:
            return f"{self.out} has {len(factors(s.body))} factors: an atom sees two already"
        if computed := next((x for x in (parts[self.factor], parts[self.value]) if x.computed), None):
            return f"{computed} is read at {len(computed.computed)} computed positions: it is an operand where it lies"
        small, large = axes_of(parts[self.factor]), axes_of(parts[self.value])
        if not set(small) <= set(large):
            return f"{self.factor} has axes {','.join(small)}, {self.value} only {','.join(large)}"
        return refuse_name(plan, f"{self.value}_{self.factor}")

    def rewrite(self, plan: Plan, target: Target) -> Plan:
        s = plan.program.stage(self.out)
        parts = {f.value: f for f in factors(s.body) if isinstance(f, Read)}
        a, b = parts[self.factor], parts[self.value]
        dtype = plan.program.value(self.value).dtype
        joined = Stage(f"{self.value}_{self.factor}", b.axes, product((a, b)), (), dtype)
        operands = list(factors(s.body))
        operands.remove(a)  # once: a factor may stand twice
        operands[operands.index(b)] = Read(joined.out, joined.axes)
        return replace_stages(plan, self.launch, (s.out,), (joined, replace(s, body=product(tuple(operands)))))
