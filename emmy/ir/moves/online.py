"""online: the reductions of a softmax and its weighted sum become one recurrence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from emmy.ir.expr import Apply, Axis, Const, Expr, Read, factors, parse, reads, substitute
from emmy.ir.moves.base import Move, Site, legal_sites, refuse_path, register
from emmy.ir.moves.rewrite import refuse_nest, replace_stages
from emmy.ir.plan import Plan
from emmy.ir.program import MAX, SUM, Monoid, Program, Reduce, Stage
from emmy.ir.target import Target


@register
@dataclass(frozen=True)
class Online(Move):
    """online(O): maximum, exponential, sum and weighted sum over one axis become one pass.

    before:  M max= A;  P = exp(A - M);  L sum= P;  N sum= P*V;  O = N / L
    after:   O online_softmax= (A, V)      state (m, l, o); two states meet by rescaling both to the larger maximum

    Source: the online normaliser of Milakov and Gimelshein (2018), with the weighted sum as a third component.
    """

    out: str
    name: ClassVar[str] = "online"
    phase: ClassVar[int] = 1
    first: ClassVar[bool] = True

    @classmethod
    def sites(cls, plan: Plan, target: Target) -> Iterator[Site]:
        moves = (cls(la.name, None, w.stage) for la in plan.launches for w in la.tile.works)
        for site in legal_sites(moves, plan, target):
            yield Site(site.move, mandatory=not target.is_cpu)  # weights of whole rows would fill a GPU's memory

    def refuse(self, plan: Plan, target: Target) -> str | None:
        missing = refuse_path(self, plan) or refuse_nest(self, plan)
        if missing:
            return missing
        if not plan.program.has_stage(self.out):
            return f"the program has no stage {self.out}"
        found = _softmax(plan.program, self.out)
        if found is None:
            return f"{self.out} is not a quotient of two sums of one softmax over one axis"
        gone = [s.out for s in found]
        for s in plan.program.stages:
            read = [v for v in s.reads if v in gone]
            if read and s.out not in (*gone, self.out):
                return f"{s.out} reads {read[0]}, which online({self.out}) would no longer compute"
        left = [v for v in gone if v in plan.program.outputs]
        if left:
            return f"{left[0]} leaves the program: online({self.out}) would no longer compute it"
        clash = [v for s in found for v in s.reads if v in _STATES and v not in gone]
        return f"{clash[0]} is read by {self.out} and names a component of its state" if clash else None

    def rewrite(self, plan: Plan, target: Target) -> Plan:
        found = _softmax(plan.program, self.out)
        assert found is not None
        top, weight, total, weighted = found
        low = dict(zip((s.out for s in found), _STATES, strict=True))
        lift = tuple(_rename(s, low) for s in found)
        larger = parse("maximum(a_m, b_m)")
        state = (("m", top.axes), ("l", total.axes), ("o", weighted.axes))
        combine = (
            larger,
            *(parse(f"a_{c} * exp(a_m - maximum(a_m, b_m)) + b_{c} * exp(b_m - maximum(a_m, b_m))") for c in "lo"),
        )
        finish = _over_states(plan.program.stage(self.out).body, {found[3].out: "o", found[2].out: "l"})
        monoid = Monoid("online_softmax", state, (-1e30, 0.0, 0.0), combine, finish, lift)
        old = plan.program.stage(self.out)
        new = Stage(self.out, old.axes, weighted.body, (Reduce(weighted.folded[0], monoid),), old.dtype)
        new = replace(new, body=substitute(new.body, lambda r: top.body if r.value == weight.out else r))
        return replace_stages(plan, self.launch, (*low, self.out), (new,))


_STATES = ("m", "p", "l", "o")  # maximum, weights, their sum, weighted sum: as the lift's stages are named


def _above(e: Expr) -> Expr:
    """`e`, or what is kept above a constant in maximum(e, constant)."""
    return e.args[0] if isinstance(e, Apply) and e.fn == "maximum" and isinstance(e.args[1], Const) else e


def _over_states(e: Expr, names: dict[str, str]) -> Expr:
    """The quotient with components of the state in the place of sums."""
    return substitute(e, lambda r: Axis(names[r.value]))


def _rename(s: Stage, low: dict[str, str]) -> Stage:
    return replace(s, out=low[s.out], body=substitute(s.body, lambda r: Read(low.get(r.value, r.value), r.index)))


def _is_shifted(weight: Stage, top: Stage) -> bool:
    """Whether weights are exp(A - M), M being the maximum of A, or of what is not below A."""
    body = weight.body
    if not (isinstance(body, Apply) and body.fn == "exp" and isinstance(body.args[0], Apply)):
        return False
    inner = body.args[0]
    least = top.body.args if isinstance(top.body, Apply) and top.body.fn == "maximum" else (top.body,)
    return inner.fn == "sub" and inner.args[0] in least and inner.args[1] == Read(top.out, top.axes)


def _softmax(p: Program, out: str) -> tuple[Stage, Stage, Stage, Stage] | None:
    """(maximum, weights, their sum, weighted sum) of O = N / L, or None when the stages have another form."""
    body = p.stage(out).body
    if not (isinstance(body, Apply) and body.fn == "div"):
        return None
    parts = tuple(_above(a) for a in body.args)
    if not all(isinstance(a, Read) and p.has_stage(a.value) for a in parts):
        return None
    weighted, total = (p.stage(a.value) for a in parts if isinstance(a, Read))
    if (
        total.monoid != SUM
        or weighted.monoid != SUM
        or total.folded != weighted.folded
        or not isinstance(total.body, Read)
    ):
        return None
    if not p.has_stage(total.body.value):
        return None
    weight = p.stage(total.body.value)
    tops = [p.stage(v) for v in weight.reads if p.has_stage(v) and p.stage(v).monoid == MAX]
    if len(tops) != 1 or weight.out not in weighted.reads or tops[0].folded != total.folded:
        return None
    top = tops[0]
    others = [f for f in factors(weighted.body) if f != Read(weight.out, weight.axes)]
    linear = len(others) == len(factors(weighted.body)) - 1  # rescaling the weights must rescale their sums
    apart = not any({weight.out, top.out, total.out} & set(reads(f)) for f in others)
    nested = set(top.axes) <= set(total.axes) <= set(weighted.axes) and len(total.folded) == 1
    return (top, weight, total, weighted) if _is_shifted(weight, top) and linear and apart and nested else None
