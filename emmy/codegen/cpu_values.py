"""Elements on a CPU: a stage's body as numbers, and what becomes of a finished element. Knows loops only as positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from emmy.codegen.cpu_scope import Place, Spot, Walk
from emmy.codegen.kernel import (
    WHOLE,
    Call,
    Int,
    IntLoad,
    Let,
    Load,
    Num,
    Number,
    Ramp,
    Splat,
    Stmt,
    Store,
    Var,
    Whole,
)
from emmy.codegen.steps import Close, Compute, StoreState
from emmy.codegen.steps import Store as StoreStep
from emmy.errors import PlanError
from emmy.ir.expr import Apply, Axis, Const, Expr, Read, axes_of, outermost, walk
from emmy.ir.program import Stage

Done = Close | Compute | StoreStep  # steps that may follow an element while it is in a register


@dataclass(slots=True)
class At:
    """Where elements are made: `lanes` of them along `axis` from `spot` on, only `count` of them when given.

    Loads that do not depend on `row` go to `shared`, when there is one, and are made once for all rows.
    """

    walk: Walk
    spot: Spot
    axis: str | None
    lanes: int = 1
    count: Whole | None = None
    row: str | None = None
    shared: dict[Number, Let] | None = None
    values: dict[str, Number] = field(default_factory=dict)

    def number(self, e: Expr, reader: str, names: Mapping[str, Number] | None = None) -> Number:
        """The expression at this place. `names` gives bare names a value: a monoid's states."""
        match e:
            case Const(v):
                return Num(v, self.lanes)
            case Axis(name):
                if names is not None and name in names:
                    return names[name]
                if name == self.axis:
                    return Ramp(self.spot[name], self.lanes)
                return self._wide(Ramp(self.spot[name]))
            case Read(value):
                if value in self.values:
                    return self.values[value]
                return self._read(self.walk.plan.program.found(e), reader)
            case Apply("floordiv" | "mod"):
                return self._wide(Ramp(self.position(e, reader)))
            case Apply(fn, args):
                return Call(fn, tuple(self.number(a, reader, names) for a in args))

    def _read(self, r: Read, reader: str) -> Number:
        """An element of a value in memory, or in a place nearer by."""
        place = self.walk.place(r.value, reader)
        if self.walk.is_whole(place):
            return self._wide(Ramp(self.position(r, reader)))
        if not r.computed:
            return self._load(place, place.axes)
        return replace(self, spot=self._spot_of(place, r.index, reader))._load(place, axes_of(r))

    def position(self, e: Expr, reader: str) -> Whole:
        """A computed position at this place."""
        match e:
            case Const(v):
                return Int(int(v))
            case Axis(name):
                return self.spot[name]
            case Read(value, index):
                place = self.walk.place(value, reader)
                return IntLoad(place.view, place.at(self._spot_of(place, index, reader)))
            case Apply(fn, (a, b)):
                return WHOLE[fn](self.position(a, reader), self.position(b, reader))
            case Apply():
                raise PlanError(f"{reader} is read at {e}, which is no position")

    def _spot_of(self, place: Place, index: tuple[str | Expr, ...], reader: str) -> Spot:
        """Where an element is read: here, or at the positions that stand in place of axes."""
        pairs = zip(place.axes, index, strict=True)
        return {**self.spot, **{a: self.position(x, reader) for a, x in pairs if not isinstance(x, str)}}

    def load(self, place: Place) -> Number:
        return self._load(place, place.axes)

    def _load(self, place: Place, index: tuple[str, ...]) -> Number:
        x: Number
        if self.axis in index and self.axis is not None:
            x = Load(
                place.view,
                place.at(self.spot),
                self.lanes,
                self.count,
                place.stride(self.axis) if self.lanes > 1 else Int(1),
            )
        else:
            x = self._wide(Load(place.view, place.at(self.spot)))
        if self.shared is None or self.row in index:
            return x
        if x not in self.shared:
            self.shared[x] = Let(self.walk.fresh(place.view), x)
        return Var(self.shared[x].name, self.lanes)

    def _wide(self, x: Number) -> Number:
        return Splat(x, self.lanes) if self.lanes > 1 else x

    def store(self, place: Place, x: Number) -> Store:
        return Store(place.view, place.at(self.spot), x, self.count)


@dataclass(frozen=True, slots=True)
class Chain:
    """What becomes of each element: steps in order, then copies to places that later works read."""

    steps: tuple[Done | StoreState, ...] = ()
    kept: tuple[tuple[str, Place], ...] = ()

    @property
    def computed(self) -> tuple[str, ...]:
        return tuple(s.stage for s in self.steps if isinstance(s, Compute | Close))

    def emit(self, at: At, states: Mapping[str, Number]) -> tuple[Stmt, ...]:
        """Statements for the elements at a place. `states` are the folded components, by name."""
        out: list[Stmt] = []
        for s in self.steps:
            match s:
                case Close(name) | Compute(name):
                    stage = at.walk.stage(name)
                    if isinstance(s, Close):
                        assert stage.monoid is not None
                        x = at.number(stage.monoid.finish, name, states)
                    else:
                        x = at.number(stage.body, name)
                    if not isinstance(x, Var):
                        let = Let(at.walk.fresh(f"{name}_"), x)
                        out.append(let)
                        x = Var(let.name, at.lanes)
                    at.values[name] = x
                case StoreStep(name):
                    out.append(at.store(at.walk.memory(name), at.values[name]))
                case StoreState():
                    pass  # its home is the workspace already
        out += [at.store(place, at.values[name]) for name, place in self.kept]
        return tuple(out)

    def bodies(self, walk_: Walk) -> tuple[tuple[str, Expr], ...]:
        """(stage, body) of everything computed."""
        stages = (walk_.plan.program.stage(s.stage) for s in self.steps if isinstance(s, Compute))
        return tuple((s.out, s.body) for s in stages)


def vector_lanes(walk_: Walk, stage: Stage, bodies: tuple[tuple[str, Expr], ...], local: tuple[str, ...]) -> int:
    """Lanes to use along the stage's last axis: all, or 1 when some read would not be contiguous there."""
    if not stage.axes:
        return 1
    v = stage.axes[-1]
    for reader, body in bodies:
        if any(isinstance(x, Apply) and x.fn in ("floordiv", "mod") and v in axes_of(x) for x in walk(body)):
            return 1
        for r in map(walk_.plan.program.found, outermost(body)):
            if r.value in local or v not in axes_of(r):
                continue
            if any(v in axes_of(x) for x in r.computed):
                return 1
            place = walk_.place(r.value, reader)
            if not place.contiguous(v) or walk_.is_whole(place):
                return 1
    return walk_.lanes
