"""Loop IR: what to compute, as a small DAG of stages over named axes. No device in sight.

A stage is a scalar body over axes, folded over reduced axes by a monoid. Softmax, norms, matmuls and split reductions
are all the same three notions: Stage, Reduce, Monoid.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from emmy.errors import PlanError, UsageError
from emmy.ir.dtype import DType
from emmy.ir.expr import (
    Apply,
    Axis,
    Const,
    Expr,
    Read,
    at_positions,
    axes_of,
    factors,
    outermost,
    parse,
    reads,
    walk,
)


@dataclass(frozen=True, slots=True)
class Sym:
    """A size known only at run time: lo <= size <= hi, a multiple of `multiple`."""

    name: str
    lo: int
    hi: int
    multiple: int = 1

    def within(self, lo: int, hi: int) -> Dim:
        """The sizes lo..hi of the range: a symbol again, or a number when there is one. Raises UsageError outside of it."""
        if not self.lo <= lo <= hi <= self.hi:
            raise UsageError(f"{self.name} {lo}..{hi} is no part of {self.name} {self.lo}..{self.hi}")
        return lo if lo == hi else replace(self, lo=lo, hi=hi)

    def __str__(self) -> str:
        return f"{self.name}({self.lo}..{self.hi})"


Dim = int | Sym


def upper(dim: Dim) -> int:
    """The largest size `dim` can have."""
    return dim.hi if isinstance(dim, Sym) else dim


def lower(dim: Dim) -> int:
    """The smallest size `dim` can have."""
    return dim.lo if isinstance(dim, Sym) else dim


@dataclass(frozen=True, slots=True)
class Monoid:
    """An associative way to fold a reduced axis.

    state:    (component, its axes; None = the stage's own axes)
    identity: the state of nothing, per component
    combine:  per component, an expression over a_X and b_X, the states to its left and right
    finish:   the value, as an expression over the components
    lift:     stages that make the state of one *block* of the axis; () = each element is a state by itself
    """

    name: str
    state: tuple[tuple[str, tuple[str, ...] | None], ...]
    identity: tuple[float, ...]
    combine: tuple[Expr, ...]
    finish: Expr
    lift: tuple[Stage, ...] = ()

    def components(self, stage: Stage) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """(component, axes) with None resolved for `stage`."""
        return tuple((c, stage.axes if axes is None else axes) for c, axes in self.state)


SUM = Monoid("sum", (("x", None),), (0.0,), (parse("a_x + b_x"),), Axis("x"))
MAX = Monoid("max", (("x", None),), (-1e30,), (parse("maximum(a_x, b_x)"),), Axis("x"))


@dataclass(frozen=True, slots=True)
class Reduce:
    axis: str
    monoid: Monoid


@dataclass(frozen=True)
class Stage:
    """out[axes] = fold of body over `reduces` (all with one monoid), or body alone.

    `dtype` is the form in which `out` is stored when it leaves a kernel; inside, values are f32 or wider.
    Without slots, so that what moves ask again and again is computed once.
    """

    out: str
    axes: tuple[str, ...]
    body: Expr
    reduces: tuple[Reduce, ...] = ()
    dtype: DType = "f32"

    @cached_property
    def _hash(self) -> int:
        return hash((self.out, self.axes, self.body, self.reduces, self.dtype))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def folded(self) -> tuple[str, ...]:
        return tuple(r.axis for r in self.reduces)

    @cached_property
    def every(self) -> tuple[str, ...]:
        """Own axes, then folded ones: the loops a naive program would run."""
        return self.axes + self.folded

    @property
    def monoid(self) -> Monoid | None:
        return self.reduces[0].monoid if self.reduces else None

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Values read, those of a monoid's lift included, each once."""
        inner = self.monoid.lift if self.monoid else ()
        local = {s.out for s in inner}
        found = [*reads(self.body), *(v for s in inner for v in s.reads)]
        return tuple(dict.fromkeys(v for v in found if v not in local))

    def __str__(self) -> str:
        sign = f"{self.monoid.name}=" if self.monoid else "="
        over = f"  over {','.join(self.folded)}" if self.folded else ""
        return f"{self.out}[{','.join(self.axes)}] {sign} {self.body}{over}"


@dataclass(frozen=True, slots=True)
class Value:
    """An input array: row-major over `axes`, the last one contiguous.

    constant: a parameter of the model, which no launch of the chain that this program stands in writes.
    """

    name: str
    axes: tuple[str, ...]
    dtype: DType = "f32"
    constant: bool = False


@dataclass(frozen=True)
class Program:
    """Stages in an order in which each reads only inputs and earlier stages. `outputs` leave the program.

    views: values that lie in an input, each element where computed positions say: `K[b,t,d] = pages[table[b,t // 16],t % 16,d]`. To
    stages and plans they are inputs, of which nobody makes a copy: what brings a block of one finds its rows on the way.
    """

    dims: tuple[tuple[str, Dim], ...]
    inputs: tuple[Value, ...]
    stages: tuple[Stage, ...]
    outputs: tuple[str, ...]
    views: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        known: dict[str, tuple[str, ...]] = {}
        for v in self.inputs:
            self._check(known, v.name, v.axes)
            known[v.name] = v.axes
        known |= self._seen(known)
        for s in self.stages:
            missing = [v for v in s.reads if v not in known]
            if missing:
                raise PlanError(f"stage {s.out} reads {', '.join(missing)}, which no input or earlier stage provides")
            if twice := [a for a in s.folded if a in s.axes]:
                raise PlanError(f"stage {s.out} folds {twice[0]}, which is one of its own axes")
            loose = [a for a in axes_of(s.body) if a not in s.every]
            if loose:
                raise PlanError(f"stage {s.out} uses axes {', '.join(loose)}; it walks {', '.join(s.every) or 'none'}")
            for r in walk(s.body):
                if isinstance(r, Read) and (reason := self._odd(r, known[r.value])):
                    raise PlanError(f"stage {s.out} reads {r}; {reason}")
            numbers = [
                r.value for r in outermost(_shown(s.body)) if (x := self._given.get(r.value)) and x.dtype == "i32"
            ]
            if numbers:
                raise PlanError(
                    f"stage {s.out} computes with {numbers[0]}, which is i32: it may only be a position, or compared with one"
                )
            parts = (x for x in walk(s.body) if isinstance(x, Apply) and x.fn in ("floordiv", "mod"))
            if odd := next((x for x in parts if not self._is_position(x)), None):
                raise PlanError(f"stage {s.out} computes {odd}: // and % are of positions, by a number of 1 or more")
            if len({r.monoid for r in s.reduces}) > 1:
                raise PlanError(f"stage {s.out} folds by {len(s.reduces)} monoids; all axes of a stage share one")
            self._check(known, s.out, s.every)
            known[s.out] = s.axes
        unknown = [o for o in self.outputs if o not in known]
        if unknown:
            raise PlanError(f"outputs {', '.join(unknown)} are computed by no stage")

    def _seen(self, known: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        """Views and their axes. Raises PlanError for one that is none."""
        out: dict[str, tuple[str, ...]] = {}
        for x in self.views:
            r = x.body
            if not isinstance(r, Read) or r.value not in known or x.reduces or set(axes_of(r)) != set(x.axes):
                raise PlanError(f"{x.out}[{','.join(x.axes)}] = {r} is no input read at positions along these axes")
            reads = (y for y in walk(r) if isinstance(y, Read))
            if reason := next((found for y in reads if (found := self._odd(y, known[y.value]))), None):
                raise PlanError(f"{x.out} is {r}; {reason}")
            self._check({**known, **out}, x.out, x.axes)
            out[x.out] = x.axes
        return out

    def _span(self, e: Expr) -> tuple[float, float] | None:
        """The least and the largest an expression of axes can be; None where it reads an input, or is no such sum or product."""
        match e:
            case Const(v):
                return v, v
            case Axis(name):
                return 0.0, float(upper(self._dim[name]) - 1)
            case Apply("neg", (a,)):
                found = self._span(a)
                return (-found[1], -found[0]) if found else None
            case Apply("floordiv" | "mod" as fn, (a, Const(by))):
                found = self._span(a)
                if found is None or found[0] < 0 or by < 1:
                    return None
                return (found[0] // by, found[1] // by) if fn == "floordiv" else (0.0, min(found[1], by - 1))
            case Apply("add" | "sub" | "mul" as fn, (a, b)):
                x, y = self._span(a), self._span(b)
                if x is None or y is None:
                    return None
                ends = [{"add": p + q, "sub": p - q, "mul": p * q}[fn] for p in x for q in y]
                return min(ends), max(ends)
            case _:
                return None

    def _is_position(self, x: Expr) -> bool:
        """Whether an expression is made of whole numbers, axes and i32 inputs by +, -, *, and // and % of a number."""
        parts = tuple(walk(x))
        whole = (p.value.is_integer() for p in parts if isinstance(p, Const))
        found = (v.dtype if (v := self._given.get(p.value)) else "" for p in parts if isinstance(p, Read))
        known = (p.fn in ("add", "sub", "mul") or _divides(p) for p in parts if isinstance(p, Apply))
        return all((*whole, *known, *(d == "i32" for d in found)))

    def _odd(self, r: Read, axes: tuple[str, ...]) -> str | None:
        """Why a value of these axes cannot be read so."""
        at_axes = tuple(x if isinstance(x, str) else a for x, a in zip(r.index, axes, strict=False))
        if len(r.index) != len(axes) or at_axes != axes:
            return "a value is read at its own axes, in order"
        if r.computed and r.value not in self._given and all(r.value != x.out for x in self.views):
            return f"only an input is read at computed positions, and {r.value} is computed itself"
        for x, axis in zip(r.index, axes, strict=True):
            reach = None if isinstance(x, str) else self._span(x)
            if reach and not 0 <= reach[0] <= reach[1] < lower(self._dim[axis]):
                return f"{axis} has positions 0..{lower(self._dim[axis]) - 1}"
            if not isinstance(x, str) and not self._is_position(x):
                return "a position is made of whole numbers, axes and i32 inputs by +, -, *, and // and % of a number"
        return None

    def _check(self, known: Collection[str], name: str, axes: tuple[str, ...]) -> None:
        if name in known:
            raise PlanError(f"two values of the program are named {name}")
        if unknown := [a for a in axes if a not in self._dim]:
            raise PlanError(f"{name} has axes {', '.join(unknown)}; the program has {', '.join(self._dim)}")

    @cached_property
    def _hash(self) -> int:
        return hash((self.dims, self.inputs, self.stages, self.outputs, self.views))

    def __hash__(self) -> int:  # computed once: plans and caches hash their program all the time
        return self._hash

    @cached_property
    def _dim(self) -> Mapping[str, Dim]:
        return dict(self.dims)

    @cached_property
    def _given(self) -> Mapping[str, Value]:
        return {v.name: v for v in self.inputs}

    @cached_property
    def _read(self) -> tuple[Read, ...]:
        """All reads of all stages, those of monoids' lifts included."""
        bodies = (x.body for s in self.stages for x in (s, *(s.monoid.lift if s.monoid else ())))
        return tuple(r for body in bodies for r in walk(body) if isinstance(r, Read))

    @cached_property
    def gathered(self) -> frozenset[str]:
        """Inputs that some stage reads at computed positions: a block of such a stage may need all of them."""
        return frozenset(r.value for r in self._read if any(not isinstance(x, Axis) for x in r.computed))

    @cached_property
    def moved(self) -> Mapping[str, frozenset[tuple[str, str]]]:
        """Input -> (its axis, another one along which some stage reads it): a block of it has all positions of that axis."""
        found: dict[str, set[tuple[str, str]]] = {}
        for r in self._read:
            if r.value in self._given or r.value in self._view:  # not what a lift makes
                places = zip(r.index, self.value(r.value).axes, strict=True)
                found.setdefault(r.value, set()).update((a, x.name) for x, a in places if isinstance(x, Axis))
        return {v: frozenset(pairs) for v, pairs in found.items() if pairs}

    @cached_property
    def _stage(self) -> Mapping[str, Stage]:
        return {s.out: s for s in self.stages}

    @cached_property
    def _value(self) -> Mapping[str, Value]:
        made = {s.out: Value(s.out, s.axes, s.dtype) for s in self.stages}
        seen = {x.out: Value(x.out, x.axes, x.dtype, self._fixed(x.body)) for x in self.views}
        return {**{v.name: v for v in self.inputs}, **seen, **made}

    def _fixed(self, e: Expr) -> bool:
        return all(self._given[x.value].constant for x in walk(e) if isinstance(x, Read))

    @cached_property
    def _view(self) -> Mapping[str, Stage]:
        return {x.out: x for x in self.views}

    def view(self, name: str) -> Stage | None:
        """The view of that name: its axes, and the read of an input that its elements are; None where it is none."""
        return self._view.get(name)

    def found(self, r: Read) -> Read:
        """The read of an input that a read of a view comes to; any other as it is."""
        view = self._view.get(r.value)
        if view is None:
            return r
        places = {a: Axis(x) if isinstance(x, str) else x for a, x in zip(view.axes, r.index, strict=True)}
        there = at_positions(view.body, {a: x for a, x in places.items() if x != Axis(a)})
        assert isinstance(there, Read)
        return there

    def dim(self, axis: str) -> Dim:
        return self._dim[axis]

    def stage(self, out: str) -> Stage:
        return self._stage[out]

    def has_stage(self, out: str) -> bool:
        return out in self._stage

    def value(self, name: str) -> Value:
        """An input, or a stage's result as a value."""
        return self._value[name]

    def is_input(self, name: str) -> bool:
        return name not in self._stage

    def is_fixed(self, r: Read) -> bool:
        """Whether no launch writes what is read, nor what tells where."""
        return all(self.is_constant(x.value) for x in walk(r) if isinstance(x, Read))

    def is_constant(self, name: str) -> bool:
        """Whether no launch writes the value, neither here nor before."""
        return self.value(name).constant

    @property
    def dtype(self) -> DType:
        """The dtype of the first input that has numbers: what a device's rates are asked for."""
        return next((v.dtype for v in self.inputs if v.dtype != "i32"), "f32")

    @property
    def syms(self) -> tuple[Sym, ...]:
        return tuple(dict.fromkeys(d for _, d in self.dims if isinstance(d, Sym)))

    def sizes(self, syms: Mapping[str, int] | None = None) -> dict[str, int]:
        """Size of every axis, given each symbol's size. Raises PlanError when one is missing or out of its range."""
        out: dict[str, int] = {}
        for axis, d in self.dims:
            if isinstance(d, int):
                out[axis] = d
                continue
            got = (syms or {}).get(d.name)
            if got is None or not d.lo <= got <= d.hi or got % d.multiple:
                allowed = f"{d.lo}..{d.hi}" + (f" in multiples of {d.multiple}" if d.multiple > 1 else "")
                raise PlanError(f"size of {axis}: got {got}, allowed {allowed}; pass it as sizes={{'{d.name}': ...}}")
            out[axis] = got
        return out

    def within(self, symbol: str, lo: int, hi: int) -> Program:
        """The program for the sizes lo..hi of one symbol. Raises UsageError when it has no such symbol or not these sizes."""
        if symbol not in {s.name for s in self.syms}:
            known = ", ".join(map(str, self.syms)) or "none"
            raise UsageError(f"no size is named {symbol}; open until run time are: {known}")
        dims = ((a, d.within(lo, hi) if isinstance(d, Sym) and d.name == symbol else d) for a, d in self.dims)
        return replace(self, dims=tuple(dims))

    def with_stages(self, gone: tuple[str, ...], new: tuple[Stage, ...]) -> Program:
        """The program with stages `gone` replaced by `new`, in an order that respects what reads what."""
        names = {*gone, *(n.out for n in new)}
        rest = [*new, *(s for s in self.stages if s.out not in names)]
        order: list[Stage] = []
        while rest:
            waiting = {s.out for s in rest}
            ready = next((s for s in rest if not (set(s.reads) - {s.out}) & waiting), None)
            if ready is None:
                raise PlanError(f"stages {', '.join(waiting)} read each other in a circle")
            order.append(ready)
            rest.remove(ready)
        return replace(self, stages=tuple(order))

    def __str__(self) -> str:
        dims = " ".join(f"{a}={d}" for a, d in self.dims)
        ins = [
            f"  in  {v.name}[{','.join(v.axes)}] {v.dtype}" + ("  constant" if v.constant else "") for v in self.inputs
        ]
        ins += [f"      {x}" for x in self.views]
        body = [
            f"  {'out' if s.out in self.outputs else '   '} {s}  {s.dtype if s.out in self.outputs else ''}".rstrip()
            for s in self.stages
        ]
        return "\n".join([f"program {dims}", *ins, *body])


def _divides(e: Apply) -> bool:
    return e.fn in ("floordiv", "mod") and isinstance(e.args[1], Const) and e.args[1].value >= 1


def _shown(e: Expr) -> Expr:
    """An expression without what conditions compare."""
    if isinstance(e, Apply):
        return Const(0.0) if e.fn in ("le", "lt") else Apply(e.fn, tuple(map(_shown, e.args)))
    return e


def read(value: Value) -> Read:
    """The value read at its own axes."""
    return Read(value.name, value.axes)


def same_rows(a: tuple[str, ...], b: tuple[str, ...]) -> bool:
    """Whether values over these axes have the same rows along one last axis, perhaps in another order."""
    return a[-1:] == b[-1:] and set(a) == set(b) and len(a) == len(b)


@lru_cache(maxsize=4096)
def swapped(stage: Stage) -> bool:
    """Whether a product's first factor has the last of the stage's own axes and its second the one before: W[n,k] * A[m,k]."""
    parts = factors(stage.body)
    if len(parts) != 2 or len(stage.axes) < 2:
        return False
    last, before = stage.axes[-1], stage.axes[-2]
    first, second = map(axes_of, parts)
    return last in first and before not in first and before in second and last not in second
