"""What CPU expansion knows while it walks a launch: pieces of axes, places of values, names. Emits no code itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import gcd

from emmy.codegen.kernel import (
    Buffer,
    For,
    Int,
    IntVar,
    LetInt,
    Scratch,
    Stmt,
    Whole,
    least,
    minus,
    over,
    plus,
    product,
    rest,
    times,
)
from emmy.errors import PlanError
from emmy.ir.plan import Launch, Plan
from emmy.ir.program import Dim, Stage, Sym, upper


@dataclass(frozen=True, slots=True)
class Piece:
    """The part lo..hi of an axis in scope: at most `size` long, its length a multiple of `multiple`.

    `steps` are those of the loops that cut it, outermost first; inside the last loop, lo is a multiple of each later step.
    """

    lo: Whole
    hi: Whole
    size: Whole
    multiple: int
    steps: tuple[int, ...] = ()

    @property
    def length(self) -> Whole:
        """hi - lo; the constant size where no piece is shorter."""
        if isinstance(self.size, Int) and self.multiple % self.size.value == 0:
            return self.size
        return minus(self.hi, self.lo)


Scope = Mapping[str, Piece]
Spot = Mapping[str, Whole]  # a position along each axis


def length_of(dim: Dim) -> Whole:
    """A dimension's size as the kernel sees it: a number, or the variable that holds it at run time."""
    return IntVar(f"len_{dim.name}") if isinstance(dim, Sym) else Int(dim)


def whole(dim: Dim) -> Piece:
    """All of a dimension."""
    n = length_of(dim)
    return Piece(Int(0), n, n, dim.multiple if isinstance(dim, Sym) else dim)


@dataclass(frozen=True, slots=True)
class Panel:
    """Elements of `axis` in groups of `width`: a group holds all of `depth` positions of the other axis, one after another."""

    axis: str
    width: int
    depth: Whole


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value lies: element [origin] is the view's first; `strides` are those inside a panel when there are panels."""

    view: str
    axes: tuple[str, ...]
    strides: tuple[Whole, ...]
    origin: tuple[Whole, ...]
    panel: Panel | None = None
    padded: bool = False  # a tile may run over its end: zeros follow

    def at(self, spot: Spot) -> Whole:
        """Index of the element at `spot`."""
        terms: list[Whole] = []
        for a, stride, lo in zip(self.axes, self.strides, self.origin, strict=True):
            x = minus(spot[a], lo)
            if self.panel and self.panel.axis == a:
                group = Int(self.panel.width)
                terms += [times(over(x, group), times(self.panel.depth, group)), rest(x, group)]
            else:
                terms.append(times(x, stride))
        return plus(*terms)

    def tile_at(self, spot: Spot) -> Whole:
        """The same for a spot where a group of the panel begins."""
        if self.panel is None:
            return self.at(spot)
        terms = []
        for a, stride, lo in zip(self.axes, self.strides, self.origin, strict=True):
            terms.append(times(minus(spot[a], lo), self.panel.depth if a == self.panel.axis else stride))
        return plus(*terms)

    def stride(self, axis: str) -> Whole:
        """Elements between neighbours along `axis`; within a group, when it is the panels' axis."""
        return self.strides[self.axes.index(axis)] if axis in self.axes else Int(0)

    def contiguous(self, axis: str) -> bool:
        """Whether any run along `axis` is one run of memory."""
        return self.stride(axis) == Int(1) and not (self.panel and self.panel.axis == axis)


def row_major(
    view: str, axes: tuple[str, ...], sizes: tuple[Whole, ...], origin: tuple[Whole, ...] | None = None
) -> Place:
    """A dense block, its last axis contiguous."""
    strides = tuple(product(sizes[i + 1 :]) for i in range(len(axes)))
    return Place(view, axes, strides, origin or (Int(0),) * len(axes))


@dataclass(slots=True)
class Walk:
    """The state of one launch's expansion. `places` holds what may be read now, a value's nearest copy."""

    plan: Plan
    launch: Launch
    lanes: int  # of the widest vector
    buffers: tuple[Buffer, ...]
    places: dict[str, Place] = field(default_factory=dict)
    local: dict[str, Stage] = field(default_factory=dict)  # stages of a monoid's lift, while it is being made
    scratch: list[Scratch] = field(default_factory=list)
    _used: dict[str, int] = field(default_factory=dict)

    def fresh(self, stem: str) -> str:
        """A name nothing else in the kernel has."""
        n = self._used.get(stem, 0)
        while any(b.name == f"{stem}{n}" for b in self.buffers):
            n += 1
        self._used[stem] = n + 1
        return f"{stem}{n}"

    def stage(self, name: str) -> Stage:
        return self.local.get(name) or self.plan.program.stage(name)

    def allocate(self, stem: str, elements: Whole) -> str:
        """A new piece of the thread's scratch."""
        name = self.fresh(f"{stem}_")
        self.scratch.append(Scratch(name, elements))
        return name

    def place(self, value: str, reader: str) -> Place:
        """Where `reader` finds a value. Raises PlanError when it is not complete at this point of the tile."""
        if value not in self.places:
            raise PlanError(
                f"{self.launch.name}: {reader} reads {value}, which is not complete inside these loops: cut before {reader}, or split less"
            )
        return self.places[value]

    def is_whole(self, place: Place) -> bool:
        """Whether whole numbers lie there, not numbers of a float."""
        return any(b.name == place.view and b.dtype == "i32" for b in self.buffers)

    def memory(self, value: str) -> Place:
        """A value's buffer."""
        v = self.plan.program.value(value)
        return row_major(value, v.axes, tuple(length_of(self.plan.program.dim(a)) for a in v.axes))

    def block(self, stem: str, axes: tuple[str, ...], scope: Scope) -> Place:
        """A new scratch block for the pieces in scope; rows are an odd number of cache lines long, against 4 KiB aliasing."""
        sizes = [scope[a].size for a in axes]
        if len(sizes) > 1:
            lines = over(plus(sizes[-1], Int(15)), Int(16))
            sizes[-1] = times(plus(times(over(lines, Int(2)), Int(2)), Int(1)), Int(16))
        name = self.allocate(stem, product(tuple(sizes)))
        return row_major(name, axes, tuple(sizes), tuple(scope[a].lo for a in axes))

    def many(self, axis: str, step: int, scope: Scope) -> bool:
        """Whether a loop over what is left of an axis, in steps of `step`, may run more than once."""
        p = scope[axis]
        size = p.size.value if isinstance(p.size, Int) else upper(self.plan.program.dim(axis))
        return size > step

    def loop(self, axis: str, step: int, scope: Scope) -> Loop:
        """A loop over what is left of an axis; no loop at all when one step covers it."""
        p = scope[axis]
        if not self.many(axis, step, scope):
            return Loop(None, p, {**scope, axis: replace(p, steps=(*p.steps, step))}, step)
        var = IntVar(self.fresh(axis))
        even = p.multiple % step == 0
        end: Whole = plus(var, Int(step)) if even or step == 1 else IntVar(f"{var.name}_end")
        inner = Piece(var, end, Int(step), gcd(p.multiple, step), (*p.steps, step))
        return Loop(var, p, {**scope, axis: inner}, step)


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop to be put around statements written for `scope`."""

    var: IntVar | None
    around: Piece
    scope: Scope
    step: int

    def ends(self) -> tuple[Stmt, ...]:
        """The statement that names the end of a piece, when it may be short."""
        end = next((p.hi for p in self.scope.values() if p.lo == self.var), None)
        if self.var is None or not isinstance(end, IntVar):
            return ()
        return (LetInt(end.name, least(plus(self.var, Int(self.step)), self.around.hi)),)

    def wrap(self, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        if self.var is None or not body:
            return body
        return (For(self.var.name, self.around.lo, self.around.hi, self.step, (*self.ends(), *body)),)


def clipped(piece: Piece, step: int) -> bool:
    """Whether a loop in steps of `step` may end with a short one."""
    return piece.multiple % step != 0
