"""atom: the innermost tile of a contraction is made of one kind of instruction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from emmy.ir.atoms import ATOMS, AtomKind
from emmy.ir.expr import Read, factors
from emmy.ir.moves.base import OPEN, Knob, Move, Site, full_nest, put_work, refuse_path, register
from emmy.ir.plan import Atom, Launch, Loop, Plan, Work
from emmy.ir.program import SUM, Stage
from emmy.ir.target import Target


@register
@dataclass(frozen=True)
class BindAtom(Move):
    """k0.C/atom(fma,8,32,1,16): C's innermost tile is 8 x 32, made of fused multiply-adds on vectors of 16.

    before:  C[m,n] sum= A[m,k] * B[k,n]      after:   reg    n:8 m:16 k:256
                                                         atom   fma m:8 n:32 k:1 vector 16
                                                         C[m,n] sum= ...

    With `inner` it binds a contraction inside a monoid's lift (the P.V of online softmax). Refuses bodies that are not
    a product of two reads, tiles that need more registers than the target has, and tiles larger than what is left.
    """

    atom: str
    m: Knob
    n: Knob
    k: Knob
    width: Knob = 1
    inner: str | None = None
    name: ClassVar[str] = "atom"
    phase: ClassVar[int] = 50
    commutes: ClassVar[bool] = True
    mandatory: ClassVar[bool] = True

    @classmethod
    def sites(cls, plan: Plan, target: Target) -> Iterator[Site]:
        for la in plan.launches:
            for w in la.tile.works:
                for kind in ATOMS.values():
                    site = cls._site(plan, target, la, w, kind)
                    if site:
                        yield site

    @classmethod
    def _site(cls, plan: Plan, target: Target, la: Launch, w: Work, kind: AtomKind) -> Site | None:
        if w.atoms or w.combine or not target.can(kind.capability) or not plan.program.stage(w.stage).reduces:
            return None
        domains = kind.domains(target)
        values = {n: (d[0] if len(d) == 1 else OPEN) for n, d in domains.items()}
        move = cls(la.name, w.stage, kind.name, values["m"], values["n"], values["k"], values["width"])
        smallest = move.fill({n: d[0] for n, d in domains.items()})
        if smallest.refuse(plan, target):
            return None
        return Site(move, tuple((n, d) for n, d in domains.items() if len(d) > 1))

    def refuse(self, plan: Plan, target: Target) -> str | None:
        missing = refuse_path(self, plan, needs_work=True)
        if missing:
            return missing
        kind = ATOMS.get(self.atom)
        if kind is None or not target.can(kind.capability):
            known = [a.name for a in ATOMS.values() if target.can(a.capability)]
            return f"{target.name} has no atom {self.atom}; it has {', '.join(known)}"
        la = plan.launch(self.launch)
        w = la.tile.work(self.work or "")
        s = _contraction(plan, w, self.inner)
        if s is None:
            return f"{w.stage} has no contraction {self.inner} inside its monoid"
        if any(a.stage == s.out for a in w.atoms):
            return f"{s.out} has the atom {next(str(a) for a in w.atoms if a.stage == s.out)} already"
        return _refuse_body(kind, s, plan) or self._refuse_shape(plan, target, la, w, s, kind)

    def _refuse_shape(self, plan: Plan, target: Target, la: Launch, w: Work, s: Stage, kind: AtomKind) -> str | None:
        shape = (self.m, self.n, self.k, self.width)
        if not all(isinstance(x, int) for x in shape):
            return None
        m, n, k, width = (x if isinstance(x, int) else 0 for x in shape)
        reason = kind.refuse(m, n, k, width, target)
        if reason:
            return reason
        for axis, step in zip(mnk_axes(s), (m, n, k), strict=True):
            left = plan.extent(full_nest(plan, la, w), axis) if axis else 1
            if kind.exact and left % step:
                return f"{self.atom} takes {axis} by {step}, the tile has {left}"
            if not kind.exact and step > 1 and step >= 2 * left:
                return f"{self.atom} computes {step} of {axis} at once, the tile has {left}: at least half must be used"
        return None

    def rewrite(self, plan: Plan, target: Target) -> Plan:
        assert (
            isinstance(self.m, int)
            and isinstance(self.n, int)
            and isinstance(self.k, int)
            and isinstance(self.width, int)
        )
        la = plan.launch(self.launch)
        w = la.tile.work(self.work or "")
        s = _contraction(plan, w, self.inner)
        assert s is not None
        nest = w.nest
        if not self.inner:
            for axis, step in zip(mnk_axes(s), (self.m, self.n, self.k), strict=True):
                if axis:
                    nest += (Loop(axis, "reg", min(step, plan.extent(full_nest(plan, la, w), axis))),)
        atom = Atom(s.out, self.atom, self.m, self.n, self.k, self.width)
        return put_work(plan, la, replace(w, nest=nest, atoms=(*w.atoms, atom)))


def mnk_axes(s: Stage) -> tuple[str | None, str, str]:
    """The axes a contraction's atom calls m, n and k; m is None for a contraction with one own axis."""
    return (s.axes[-2] if len(s.axes) > 1 else None), s.axes[-1], s.folded[-1]


def _contraction(plan: Plan, w: Work, inner: str | None) -> Stage | None:
    s = plan.program.stage(w.stage)
    if not inner:
        return s
    lifted = s.monoid.lift if s.monoid else ()
    return next((x for x in lifted if x.out == inner), None)


def _refuse_body(kind: AtomKind, s: Stage, plan: Plan) -> str | None:
    if s.monoid != SUM or not s.axes:
        return f"{s.out} is not a sum of products over its own axes"
    parts = factors(s.body)
    if len(parts) != 2:
        return f"{kind.name} multiplies 2 operands, {s.out} has {len(parts)} factors: operand(...) joins two of them"
    a, b = parts
    _, n, k = mnk_axes(s)
    if (
        not (isinstance(a, Read) and isinstance(b, Read))
        or k not in a.index
        or k not in b.index
        or n in a.index
        or n not in b.index
    ):
        return f"{kind.name} multiplies A[m,k] and B[n,k] or B[k,n]; {s.out} is a sum of {s.body}"
    contiguous = k if kind.vector_axis is None else plan.program.value(b.value).axes[-1]
    if kind.vector_axis == "k" and contiguous != k:
        return f"{kind.name} reads vectors along {k}, {b.value} is contiguous along {contiguous}"
    return None
