"""atom: the innermost tile of a contraction is made of one kind of instruction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import ClassVar

from emmy.ir.atoms import ATOMS, AtomKind
from emmy.ir.beside import beside, operands
from emmy.ir.dtype import size_bytes
from emmy.ir.expr import Read, factors
from emmy.ir.gpu import (
    TRANSFER_BYTES,
    block_shape,
    by_groups,
    in_turn,
    refuse_several,
    registers_allowed,
    registers_at_launch,
    sharers,
    swizzled_bytes,
    thread_registers,
    threads,
)
from emmy.ir.moves.base import (
    OPEN,
    Domains,
    Knob,
    Move,
    Site,
    full_nest,
    put_work,
    refuse_beside,
    refuse_path,
    register,
    works_beside,
)
from emmy.ir.moves.direct_tiles import refuse_direct
from emmy.ir.moves.gpu_tiles import for_one, missing_loops
from emmy.ir.moves.lifted_tiles import ATOMS as LIFT_ATOMS
from emmy.ir.moves.lifted_tiles import feeds_lift, lifted, refuse_lift
from emmy.ir.moves.stage import contracted
from emmy.ir.ops.op import Accumulate
from emmy.ir.plan import Atom, Launch, Loop, Plan, Work
from emmy.ir.program import SUM, Stage, swapped
from emmy.ir.row_tiles import row_tile
from emmy.ir.target import Target

_AROUND = 26  # registers beside its sums that a thread of a wgmma needs (ptxas 13.0: 154 for 256 columns)


@register
@dataclass(frozen=True)
class BindAtom(Move):
    """k0.C/atom(fma,8,32,1,16): C's innermost tile is 8 x 32, made of fused multiply-adds on vectors of 16.

    before:  C[m,n] sum= A[m,k] * B[k,n]      after:   reg    n:8 m:16 k:256
                                                         atom   fma m:8 n:32 k:1 vector 16
                                                         C[m,n] sum= ...

    Contractions that a GPU folds side by side get it all: the first of them stands for all. A CPU folds one after another.
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

    @property
    def accumulate(self) -> Accumulate | None:
        return ATOMS[self.atom].accumulate if self.atom in ATOMS else None

    @classmethod
    def sites(cls, plan: Plan, target: Target) -> Iterator[Site]:
        for la in plan.launches:
            of_launch = tuple(cls._of_launch(plan, la, target))
            yield from of_launch
            if of_launch and not target.is_cpu:
                return  # each launch needs one, and sorted they come in this order

    @classmethod
    def _of_launch(cls, plan: Plan, la: Launch, target: Target) -> Iterator[Site]:
        for w in la.tile.works:
            monoid = plan.program.stage(w.stage).monoid
            if monoid is None or w.combine or _waits(plan, la, w):
                continue
            over = None if target.is_cpu else lifted(plan, la)
            if over is not None and (
                not all(map(la.tile.channel, contracted(plan, la))) or _waits_for_lift(la, w, over)
            ):
                continue
            staged = target.is_cpu or _staged(plan, la, w)
            if not staged and missing_loops(plan, target):
                continue
            if not in_turn(la.tile) and for_one(plan, la, target):
                continue  # who takes such tiles comes first
            for inner in tuple(s.out for s in monoid.lift) or (None,):
                unit = _unit(la)
                kinds = (x for x in ATOMS.values() if x.searched and x.direct != staged)
                kinds = (x for x in kinds if target.is_cpu or (x.unit == unit))
                found = set[str]()
                for x in sorted(kinds, key=lambda x: x.name == "simt"):
                    if x.name == "simt" and found & {"mma", "wgmma", "wgmma_rs"}:
                        continue  # a matrix instruction does the same many times faster
                    if site := cls._site(plan, target, la, w, x, inner):
                        found.add(x.name)
                        yield site

    @classmethod
    def _site(cls, plan: Plan, target: Target, la: Launch, w: Work, kind: AtomKind, inner: str | None) -> Site | None:
        if cls(la.name, w.stage, kind.name, OPEN, OPEN, OPEN, OPEN, inner).refuse(plan, target):
            return None
        s = _contraction(plan, w, inner)
        assert s is not None
        domains = _legal(kind, target, _left(plan, la, w, s))
        if not domains:
            return None
        if kind.direct:  # the widest loads that there are
            wide = [n for n in dict(domains)["n"] if refuse_direct(plan, la, s, mnk_axes(s), n) is None]
            domains = tuple((x, tuple(wide[-1:]) if x == "n" else d) for x, d in domains)
        # Which knobs are open follows from the target alone, so that a skeleton stays the same move on other tiles.
        if kind.unit == "warpgroup":  # one instruction over all columns reads A once
            domains = tuple((x, d[-1:] if x == "n" else d) for x, d in domains)
        fixed = {n: d[0] for n, d in kind.domains(target).items() if len(d) == 1}
        m, n, k, width = (fixed.get(x, OPEN) for x in ("m", "n", "k", "width"))
        move = cls(la.name, w.stage, kind.name, m, n, k, width, inner)
        names = tuple(x for x, _ in domains if x not in fixed)
        if target.is_cpu:
            return Site(move, tuple((x, d) for x, d in domains if x in names))
        fills = (dict(zip(names, values, strict=True)) for values in product(*(dict(domains)[x] for x in names)))
        legal = [x for x in fills if replace(move, **x)._refuse_numbers(plan, target, la, w, s, kind) is None]  # type: ignore[arg-type]
        if not legal:
            return None
        return Site(
            move, tuple((x, tuple(v for v in dict(domains)[x] if any(f[x] == v for f in legal))) for x in names)
        )

    def refuse(self, plan: Plan, target: Target) -> str | None:
        missing = refuse_path(self, plan, work="required")
        if missing:
            return missing
        kind = ATOMS.get(self.atom)
        if kind is None or not target.can(kind.capability):
            known = [a.name for a in ATOMS.values() if target.can(a.capability)]
            return f"{target.name} has no atom {self.atom}; it has {', '.join(known)}"
        la = plan.launch(self.launch)
        w = la.tile.work(self.work or "")
        if w.combine:
            return f"{w.stage} combines the partial states of another launch: there is nothing to multiply in {self.launch}"
        s = _contraction(plan, w, self.inner)
        if s is None:
            return f"{w.stage} has no contraction {self.inner} inside its monoid"
        if any(a.stage == s.out for a in w.atoms):
            return f"{s.out} has the atom {next(str(a) for a in w.atoms if a.stage == s.out)} already"
        reason = None if target.is_cpu or self.inner else refuse_beside(self, plan, w.stage)
        for x in self._stages(plan, la, s, target):
            reason = reason or _refuse_body(kind, x, plan, la) or _refuse_swapped(kind, x, target)
        stage = plan.program.stage(w.stage)
        joined = not target.is_cpu and (bool(self.inner) or feeds_lift(plan, la, stage))
        if reason is None and joined and kind.name not in LIFT_ATOMS:
            reason = f"{kind.name} leaves sums of {s.out} where no lift can take them; {', '.join(LIFT_ATOMS)} do not"
        return reason or self._refuse_numbers(plan, target, la, w, s, kind)

    def _refuse_numbers(self, plan: Plan, target: Target, la: Launch, w: Work, s: Stage, kind: AtomKind) -> str | None:
        """Why those who share the work cannot execute the atom in its size, as far as that is chosen."""
        reason = self._refuse_rows(plan, la, plan.program.stage(w.stage), target) or self._refuse_size(target, kind)
        reason = reason or self._refuse_agents(plan, target, la, s, kind)
        return reason or self._refuse_shape(plan, target, la, w, s, kind)

    def _refuse_rows(self, plan: Plan, la: Launch, stage: Stage, target: Target) -> str | None:
        """Why weights would not lie in the lanes that fold what they weigh: single lanes make both, of as many rows."""
        over = None if target.is_cpu or self.inner or not feeds_lift(plan, la, stage) else lifted(plan, la)
        found = next(iter(la.tile.work(over.out).atoms), None) if over else None
        if found is None or "simt" not in (self.atom, found.name):
            return None
        if self.atom != found.name or (isinstance(self.m, int) and self.m != found.m):
            return f"{self.atom} of {self.m} rows makes what {found} folds: they have the same rows in the same lanes"
        return None

    def _refuse_agents(self, plan: Plan, target: Target, la: Launch, s: Stage, kind: AtomKind) -> str | None:
        """Why those who share the launch's work cannot execute the atom."""
        if not target.is_cpu and kind.unit != _unit(la):
            return f"{self.launch} divides its work among {_unit(la)}s, {self.atom} is made by a {kind.unit}"
        if kind.direct:
            stages = self._stages(plan, la, s, target)
            if len(rows := operands(plan.program, (x.out for x in stages))[0]) > 1:
                return f"direct reads one value by rows, {', '.join(x.out for x in stages)} read {', '.join(rows)}"
            refused = (refuse_direct(plan, la, x, mnk_axes(x), self.n) for x in stages)
            return next((r for r in refused if r), None)
        if kind.unit == "warpgroup":
            for x in self._stages(plan, la, s, target):
                if reason := _refuse_slots(plan, la, x, kind):
                    return reason
        if (
            several := refuse_several(plan, la.tile.nest, s.axes, mnk_axes(s))
            if not self.inner and not target.is_cpu
            else None
        ):
            return f"{self.atom} makes matrices: {several}"
        if sharers(plan, la.tile.nest, s) > 1:
            return f"agents share the folding of {s.out}: atoms whose operands are staged cannot, direct can"
        return None

    def _refuse_size(self, target: Target, kind: AtomKind) -> str | None:
        """Why the atom has no such size, when it is chosen."""
        m, n, k, width = (x if isinstance(x, int) else 0 for x in (self.m, self.n, self.k, self.width))
        return kind.refuse(m, n, k, width, target) if not self.knobs else None

    def _refuse_shape(self, plan: Plan, target: Target, la: Launch, w: Work, s: Stage, kind: AtomKind) -> str | None:
        if self.knobs:
            return None
        m, n, k, _ = (x if isinstance(x, int) else 0 for x in (self.m, self.n, self.k, self.width))
        for axis, step, left in zip(mnk_axes(s), (m, n, k), _left(plan, la, w, s), strict=True):
            if not _fits(kind, step, left):
                need = "a multiple is needed" if kind.exact else "at least half must be used"
                return f"{self.atom} computes {step} of {axis or 'm'} at once, the tile has {left}: {need}"
        if target.is_cpu:
            return None
        if self.inner:
            return refuse_lift(plan, la, plan.program.stage(w.stage), kind.name, registers_allowed(plan, la, w, target))
        if kind.unit == "warpgroup":
            one, at_launch = n // 2 + _AROUND + 4 * kind.loaded, registers_at_launch(plan, la, target)
            if one > at_launch:
                return f"{self.atom} of {n} columns takes {one} registers, {threads(plan, la)} threads begin with {at_launch}"
        return refuse_registers(plan, target, la, w, Atom(s.out, self.atom, m, n, k))

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
        atom = Atom(s.out, self.atom, self.m, self.n, self.k, self.width)
        if self.inner:
            return put_work(plan, la, replace(w, atoms=(*w.atoms, atom)))
        works = works_beside(plan, la, w.stage, target)
        return put_work(plan, la, *(self._bound(plan, la, x, s, atom) for x in works))

    def _bound(self, plan: Plan, la: Launch, w: Work, s: Stage, atom: Atom) -> Work:
        """A work whose stage is made by the atom, as `s` is."""
        nest = w.nest
        for axis, step in zip(mnk_axes(s), (atom.m, atom.n, atom.k), strict=True):
            if axis:
                nest += (Loop(axis, "reg", min(step, plan.extent(full_nest(plan, la, w), axis))),)
        return replace(w, nest=nest, atoms=(*w.atoms, replace(atom, stage=w.stage)))

    def _stages(self, plan: Plan, la: Launch, s: Stage, target: Target) -> tuple[Stage, ...]:
        """The contraction and those that get its atom too."""
        return (s,) if self.inner else tuple(plan.program.stage(w.stage) for w in works_beside(plan, la, s.out, target))


def mnk_axes(s: Stage) -> tuple[str | None, str, str]:
    """The axes a contraction's atom calls m, n and k; m is None for a contraction with one own axis.

    m is that of the body's first factor: the last but one of the stage's own axes, or the last when they are swapped.
    """
    if swapped(s):
        return s.axes[-1], s.axes[-2], s.folded[-1]
    return (s.axes[-2] if len(s.axes) > 1 else None), s.axes[-1], s.folded[-1]


def pays(accumulate: Accumulate, target: Target) -> bool:
    """Whether sums so kept are worth their error: those in f16 only where they are faster than those in f32."""
    f16, f32 = (target.peak_tflops.get(f"f16->{sums}", 0.0) for sums in ("f16", "f32"))
    return accumulate == "f32" or f16 > f32


def _unit(la: Launch) -> str:
    """Who executes atoms of a GPU's launch: its warps, or its warpgroups when they divide the work or take tiles in turn."""
    return "warpgroup" if in_turn(la.tile) or by_groups(la.tile.nest) else "warp"


def _refuse_slots(plan: Plan, la: Launch, s: Stage, kind: AtomKind) -> str | None:
    """Why a warpgroup's instruction cannot read an operand as its transport leaves it: it asks for swizzled rows."""
    read = [f.value for f in factors(s.body) if isinstance(f, Read)]
    for v in read[1:] if kind.loaded else read:
        c = la.tile.channel(v)
        if c is not None and c.transport != "tma":
            return f"{kind.name} reads {v} as tma leaves it, here {c.transport} brings it"
        if c is None or len((value := plan.program.value(v)).axes) < 2:
            continue
        rows, columns, together = block_shape(plan, la.tile, c)
        if swizzled_bytes(rows, columns, size_bytes(value.dtype), together) <= TRANSFER_BYTES:
            return f"{kind.name} reads {v} in swizzled rows of 32 bytes or more, of which blocks of {rows} x {together} are not made"
    return None


def refuse_registers(plan: Plan, target: Target, la: Launch, w: Work, atom: Atom) -> str | None:
    """Why a launch's threads have too few registers for a work with the atom."""
    need = thread_registers(plan, la, w, atom, mnk_axes(plan.program.stage(w.stage)))
    most = registers_allowed(plan, la, w, target)
    if need > most:
        return f"{atom.name} needs about {need} registers a thread, those of {target.name} have {most} each here"
    return None


def lacks_atom(plan: Plan) -> bool:
    """Whether a work folds products of two operands, or by a lift, and has no atom: a GPU has no other code for it but in rows."""
    for la in plan.launches:
        for w in la.tile.works:
            s = plan.program.stage(w.stage)
            if s.monoid is None or w.combine or w.atoms:
                continue
            parts = factors(s.body)
            reads = [set(x.along) for x in parts if isinstance(x, Read)]
            if (s.monoid.lift or (len(parts) == len(reads) == 2 and reads[0] != reads[1])) and not row_tile(plan, la):
                return True
    return False


def _waits(plan: Plan, la: Launch, w: Work) -> bool:
    """Whether a work beside this one comes first, which has no atom yet."""
    group = beside(plan.program, la.tile, w.stage)
    return any(not la.tile.work(x).atoms for x in group[: group.index(w.stage)])


def _waits_for_lift(la: Launch, w: Work, over: Stage) -> bool:
    """Whether the launch's work that folds by a lift comes first, which has no atom yet."""
    return w.stage != over.out and not la.tile.work(over.out).atoms


def _staged(plan: Plan, la: Launch, w: Work) -> bool:
    """Whether every input is in shared memory that the work reads, or one beside it."""
    reads = (v for x in beside(plan.program, la.tile, w.stage) for v in plan.program.stage(x).reads)
    return all(la.tile.channel(v) for v in reads if plan.arrives(la, v))


def _left(plan: Plan, la: Launch, w: Work, s: Stage) -> tuple[int, int, int]:
    """What the tile and the work's own loops leave of the axes m, n and k."""
    nest = full_nest(plan, la, w)
    m, n, k = mnk_axes(s)
    return (plan.extent(nest, m) if m else 1, plan.extent(nest, n), plan.extent(nest, k))


def _fits(kind: AtomKind, step: int, left: int) -> bool:
    return left % step == 0 if kind.exact else step == 1 or step < 2 * left


@lru_cache(maxsize=4096)
def _legal(kind: AtomKind, target: Target, left: tuple[int, int, int]) -> Domains:
    """The knobs' values that are part of some legal shape; () when no shape is legal."""
    domains = dict(kind.domains(target))
    for name, n in zip(("m", "n", "k"), left, strict=True):
        domains[name] = tuple(x for x in domains[name] if _fits(kind, x, n))
    shapes = product(domains["m"], domains["n"], domains["k"], domains["width"])
    legal = [(m, n, k, width) for m, n, k, width in shapes if kind.refuse(m, n, k, width, target) is None]
    at = {name: {shape[i] for shape in legal} for i, name in enumerate(("m", "n", "k", "width"))}
    return tuple((name, tuple(x for x in d if x in at[name])) for name, d in domains.items()) if legal else ()


def _contraction(plan: Plan, w: Work, inner: str | None) -> Stage | None:
    s = plan.program.stage(w.stage)
    if not inner:
        return s
    lifted = s.monoid.lift if s.monoid else ()
    return next((x for x in lifted if x.out == inner), None)


def _refuse_body(kind: AtomKind, s: Stage, plan: Plan, la: Launch) -> str | None:
    if s.monoid != SUM or not s.axes:
        return f"{s.out} is not a sum of products over its own axes"
    parts = factors(s.body)
    if len(parts) != 2:
        return f"{kind.name} multiplies 2 operands, {s.out} has {len(parts)} factors: operand(...) joins two of them"
    a, b = parts
    m, n, k = mnk_axes(s)
    if (
        not (isinstance(a, Read) and isinstance(b, Read))
        or not {k} <= set(a.along) <= set(s.every) - {n}
        or not {k, n} <= set(b.along) <= set(s.every) - {m}
    ):
        return f"{kind.name} multiplies A[m,k] and B[n,k] or B[k,n]; {s.out} is a sum of {s.body}"
    views = (plan.program.value(x.out) for x in plan.program.views)
    known = (
        *plan.program.inputs,
        *views,
        *(plan.program.value(x.out) for x in plan.program.stages if plan.arrives(la, x.out)),
    )
    stored = {v.name: v.dtype for v in known}
    lost = next((x.value for x in (a, b) if plan.program.view(x.value) and not la.tile.channel(x.value)), None)
    if lost and (kind.vector_axis or kind.direct):
        return f"{kind.name} reads {lost} where it lies, which is {plan.program.view(lost).body}"  # type: ignore[union-attr]
    if kind.vector_axis and (moved := next((x for x in (a, b) if x.computed), None)):
        return f"{kind.name} reads a value along its own axes, here {moved}"
    for x in (a, b):
        dtype = stored.get(x.value)
        if dtype and dtype not in kind.dtypes:
            return f"{kind.name} multiplies {', '.join(kind.dtypes)}; {x.value} is {dtype}"
    across = [x for x in (a, b) if x.along[-1] != k]
    if kind.vector_axis == "k" and across:
        return f"{kind.name} reads vectors along {k}, {across[0].value} is contiguous along {across[0].along[-1]}"
    return None


def _refuse_swapped(kind: AtomKind, s: Stage, target: Target) -> str | None:
    """Why an instruction cannot take a stage's last axis for its rows."""
    if not swapped(s):
        return None
    if target.is_cpu or kind.direct:
        return f"{kind.name} has the rows of {s.out} for its own; the first factor of {s.body} has its columns"
    a = factors(s.body)[0]
    along = a.along[-1] if isinstance(a, Read) else s.folded[-1]
    if kind.unit == "warp" and kind.name != "simt" and along != s.folded[-1]:
        return f"{kind.name} reads its first operand along {s.folded[-1]}, {a} is contiguous along {along}"
    return None
