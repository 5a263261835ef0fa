"""Loops over elements on a CPU: elementwise stages, folds without an atom, and states of monoids with a lift."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from emmy.codegen.cpu_scope import Place, Scope, Walk, length_of, row_major
from emmy.codegen.cpu_values import At, Chain, vector_lanes
from emmy.codegen.kernel import (
    For,
    If,
    Int,
    IntVar,
    LaneMax,
    LaneSum,
    Let,
    LetInt,
    Num,
    Number,
    Set,
    Stmt,
    Var,
    View,
    Whole,
    below,
    both,
    differ,
    either,
    minus,
    over,
    pieces,
    plus,
    product,
    same,
    times,
    when,
)
from emmy.codegen.steps import Close
from emmy.ir.expr import Expr
from emmy.ir.plan import BLOCK_LEVELS, Work
from emmy.ir.program import MAX, SUM, Monoid, Stage
from emmy.ir.row_tiles import row_axes

States = Mapping[str, Number]
_LANES: Mapping[Monoid, Callable[[Number], Number]] = {
    SUM: LaneSum,
    MAX: LaneMax,
}  # what joins the lanes of a vector of states
_STATES = 4  # vectors of a row's states, so that none waits for the one before


@dataclass(frozen=True, slots=True)
class Fold:
    """A stage whose accumulators are open: for the block `opened`, between pieces in `home`, at last through `chain`.

    Without a home the sums of a tile live in registers from its first to its last step.
    """

    stage: Stage
    work: Work
    opened: Scope
    home: Place | None
    chain: Chain

    def later(self, scope: Scope) -> Whole:
        """1 when an earlier piece was folded into the tile at hand."""
        out: Whole = Int(0)
        for a in self.stage.folded:
            out = either(out, differ(scope[a].lo, self.opened[a].lo))
        return out

    def last(self, scope: Scope) -> Whole:
        """1 when the piece in scope completes the fold."""
        if not self.chain.steps:
            return Int(0)
        out: Whole = Int(1)
        for a in self.stage.folded:
            out = both(out, same(scope[a].hi, self.opened[a].hi))
        return out


def spread(
    w: Walk, axes: tuple[str, ...], scope: Scope, lanes: int, body: Callable[[At], tuple[Stmt, ...]]
) -> tuple[Stmt, ...]:
    """Loops over every element of a block, `lanes` at a time along its last axis, the last vector cut short."""
    if not axes:
        return body(At(w, {a: p.lo for a, p in scope.items()}, None))
    v = axes[-1]
    loops = []
    for a in axes[:-1] if lanes > 1 else axes:
        loops.append(w.loop(a, 1, scope))
        scope = loops[-1].scope
    spot = {a: p.lo for a, p in scope.items()}
    if lanes == 1:
        out = body(At(w, spot, v))
    else:
        out = _vectors(w, v, scope, lanes, lambda start, count: body(At(w, {**spot, v: start}, v, lanes, count)))
    for loop in reversed(loops):
        out = loop.wrap(out)
    return out


def _vectors(
    w: Walk, v: str, scope: Scope, lanes: int, body: Callable[[Whole, Whole | None], tuple[Stmt, ...]]
) -> tuple[Stmt, ...]:
    p = scope[v]
    out: tuple[Stmt, ...] = ()
    tail: Whole = p.lo
    fits = not isinstance(p.size, Int) or p.size.value >= lanes
    if fits:
        var = IntVar(w.fresh(v))
        whole_ones = minus(p.hi, Int(lanes - 1))
        out = (For(var.name, p.lo, whole_ones, lanes, body(var, None)),)
        if p.multiple % lanes == 0:
            return out
        end = IntVar(w.fresh(f"{v}_tail"))
        covered = times(over(minus(p.hi, p.lo), Int(lanes)), Int(lanes))
        out += (LetInt(end.name, plus(p.lo, covered)),)
        tail = end
    return (*out, If(below(tail, p.hi), body(tail, minus(p.hi, tail))))


def elementwise(w: Walk, stage: Stage, scope: Scope, chain: Chain) -> tuple[Stmt, ...]:
    """A chain of stages that fold nothing, over one block."""
    lanes = vector_lanes(w, stage, chain.bodies(w), chain.computed)
    return spread(w, stage.axes, scope, lanes, lambda at: chain.emit(at, {}))


def fold_piece(w: Walk, fold: Fold, scope: Scope) -> tuple[Stmt, ...]:
    """The piece in scope folded element by element, without an atom."""
    s = fold.stage
    assert s.monoid is not None
    identity = s.monoid.identity[0]
    if _along_rows(w, s):
        return _fold_rows(w, fold, scope)
    lanes = vector_lanes(w, s, ((s.out, s.body), *fold.chain.bodies(w)), fold.chain.computed)

    def element(at: At) -> tuple[Stmt, ...]:
        acc = Var(w.fresh(f"{s.out}_acc"), at.lanes)
        out: tuple[Stmt, ...] = (Let(acc.name, Num(identity, at.lanes)),)
        if fold.home:
            out += when(fold.later(scope), (Set(acc.name, at.load(fold.home)),))
        loops, inner = [], scope
        for a in s.folded:
            loops.append(w.loop(a, 1, inner))
            inner = loops[-1].scope
        here = At(w, {**at.spot, **{a: inner[a].lo for a in s.folded}}, at.axis, at.lanes, at.count)
        body = here.number(s.body, s.out)
        step: tuple[Stmt, ...] = (Set(acc.name, combined(here, s.monoid, {"x": acc}, {"x": body})["x"]),)
        for loop in reversed(loops):
            step = loop.wrap(step)
        save = (at.store(fold.home, acc),) if fold.home else ()
        return (*out, *step, *when(fold.last(scope), fold.chain.emit(at, {"x": acc}), save))

    return spread(w, s.axes, scope, lanes, element)


def _along_rows(w: Walk, s: Stage) -> bool:
    """Whether a stage of a launch of rows folds elements that are neighbours in memory: then vectors go along its folded axis."""
    axes = row_axes(w.plan.program, tuple(k.stage for k in w.launch.tile.works if not k.combine))
    whole = Stage("", s.every, s.body)
    return axes == s.every and s.monoid in _LANES and vector_lanes(w, whole, ((s.out, s.body),), ()) > 1


def _fold_rows(w: Walk, fold: Fold, scope: Scope) -> tuple[Stmt, ...]:
    """Rows folded one after another, each by several vectors of states that are joined at its end, and what is left one by one."""
    s, row = fold.stage, fold.stage.folded[0]
    m = s.monoid
    assert m is not None
    piece = scope[row]

    def element(at: At) -> tuple[Stmt, ...]:
        states = [Var(w.fresh(f"{s.out}_acc"), w.lanes) for _ in range(_STATES)]
        last = Var(w.fresh(f"{s.out}_acc"))
        out: list[Stmt] = [Let(x.name, Num(m.identity[0], x.lanes)) for x in (*states, last)]
        if fold.home:
            out += when(fold.later(scope), (Set(last.name, at.load(fold.home)),))

        def taken(acc: Var, start: Whole) -> Stmt:
            here = At(w, {**at.spot, row: start}, row if acc.lanes > 1 else at.axis, acc.lanes)
            return Set(acc.name, combined(here, m, {"x": acc}, {"x": here.number(s.body, s.out)})["x"])

        done = piece.lo
        for used in (states, states[:1]):
            step, var, end = len(used) * w.lanes, IntVar(w.fresh(row)), IntVar(w.fresh(f"{row}_done"))
            body = tuple(taken(acc, plus(var, Int(i * w.lanes))) for i, acc in enumerate(used))
            out.append(For(var.name, done, minus(piece.hi, Int(step - 1)), step, body))
            out.append(LetInt(end.name, plus(done, times(over(minus(piece.hi, done), Int(step)), Int(step)))))
            done = end
        var = IntVar(w.fresh(row))
        out.append(For(var.name, done, piece.hi, 1, (taken(last, var),)))
        total: Number = states[0]
        for x in states[1:]:
            total = combined(at, m, {"x": total}, {"x": x})["x"]
        joined = combined(at, m, {"x": last}, {"x": _LANES[m](total)})["x"]
        out.append(Set(last.name, joined))
        save = (at.store(fold.home, last),) if fold.home else ()
        return (*out, *when(fold.last(scope), fold.chain.emit(at, {"x": last}), save))

    return spread(w, s.axes, scope, 1, element)


def combined(at: At, m: Monoid | None, left: States, right: States) -> dict[str, Number]:
    """The monoid's combine, component by component."""
    assert m is not None
    names = {**{f"a_{c}": x for c, x in left.items()}, **{f"b_{c}": x for c, x in right.items()}}
    return {c: at.number(e, m.name, names) for (c, _), e in zip(m.state, m.combine, strict=True)}


# ---------------------------------------------------------------- monoids with a lift: states in scratch blocks
@dataclass(frozen=True, slots=True)
class Lifted:
    """An open fold whose state has components of its own."""

    stage: Stage
    opened: Scope
    states: Mapping[str, Place]
    chain: Chain


def open_lifted(w: Walk, stage: Stage, scope: Scope, chain: Chain) -> tuple[Lifted, tuple[Stmt, ...]]:
    """Scratch blocks of the state, and statements that set them to the identity."""
    assert stage.monoid is not None
    states: dict[str, Place] = {}
    out: tuple[Stmt, ...] = ()
    for (c, axes), identity in zip(stage.monoid.components(stage), stage.monoid.identity, strict=True):
        place = w.block(f"{stage.out}_{c}", axes, scope)
        states[c] = place
        out += spread(w, axes, scope, w.lanes, _fill(place, identity))
    return Lifted(stage, scope, states, chain), out


def _fill(place: Place, value: float) -> Callable[[At], tuple[Stmt, ...]]:
    return lambda at: (at.store(place, Num(value, at.lanes)),)


def fold_lifted(w: Walk, fold: Lifted, scope: Scope) -> tuple[Stmt, ...]:
    """The state of the piece in scope, made by the lift's stages, combined into the open one."""
    m, outside = fold.stage.monoid, (dict(w.places), dict(w.local))
    out: tuple[Stmt, ...] = ()
    assert m is not None
    for inner in m.lift:
        place = w.block(inner.out, inner.axes, scope)
        w.local[inner.out] = inner
        if inner.reduces:
            chain = Chain((Close(inner.out),), ((inner.out, place),))
            out += fold_piece(w, Fold(inner, Work(inner.out), scope, None, chain), scope)
        else:
            out += spread(
                w,
                inner.axes,
                scope,
                vector_lanes(w, inner, ((inner.out, inner.body),), ()),
                _keep(inner.out, inner.body, place),
            )
        w.places[inner.out] = place
    lifted = {c: w.places[c] for c, _ in m.state}
    w.places, w.local = outside
    fresh = {c: w.block(f"{fold.stage.out}_new_{c}", axes, scope) for c, axes in m.components(fold.stage)}
    for (c, axes), e in zip(m.components(fold.stage), m.combine, strict=True):

        def one(at: At, e: Expr = e, to: Place = fresh[c]) -> tuple[Stmt, ...]:
            names = {**{f"a_{n}": at.load(p) for n, p in fold.states.items() if set(p.axes) <= set(at.spot)}}
            names |= {f"b_{n}": at.load(p) for n, p in lifted.items()}
            return (at.store(to, at.number(e, fold.stage.out, names)),)

        out += spread(w, axes, scope, w.lanes, one)
    for c, axes in m.components(fold.stage):

        def copy(at: At, of: Place = fresh[c], to: Place = fold.states[c]) -> tuple[Stmt, ...]:
            return (at.store(to, at.load(of)),)

        out += spread(w, axes, scope, w.lanes, copy)
    return out


def _keep(reader: str, body: Expr, place: Place) -> Callable[[At], tuple[Stmt, ...]]:
    return lambda at: (at.store(place, at.number(body, reader)),)


def close_lifted(w: Walk, fold: Lifted) -> tuple[Stmt, ...]:
    """The finished value from the state, and what becomes of it; or the state to this block's part of the workspace."""
    s = fold.stage
    assert s.monoid is not None
    if fold.chain.steps:
        lanes = vector_lanes(w, s, fold.chain.bodies(w), fold.chain.computed)
        return spread(
            w,
            s.axes,
            fold.opened,
            lanes,
            lambda at: fold.chain.emit(at, {c: at.load(p) for c, p in fold.states.items()}),
        )
    out: tuple[Stmt, ...] = ()
    for c, axes in s.monoid.components(s):
        view, part = part_of(w, s, c, part_index(w, s, fold.opened))

        def copy(at: At, of: Place = fold.states[c], to: Place = part) -> tuple[Stmt, ...]:
            return (at.store(to, at.load(of)),)

        out += (view, *spread(w, axes, fold.opened, w.lanes, copy))
    return out


# ---------------------------------------------------------------- workspaces
def parts_name(value: str, component: str) -> str:
    """The buffer that holds a component of every part."""
    return f"{value}_{component}_parts"


def part_step(w: Walk, stage: Stage) -> tuple[str, int]:
    """(axis, how much of it one part folds), from the launch that leaves the parts."""
    space = w.plan.workspace(stage.out)
    assert space is not None
    loops = (
        x
        for la in w.plan.launches
        if any(k.stage == stage.out and not k.combine for k in la.tile.works)
        for x in la.tile.nest
    )
    return space.axis, next(x.step for x in loops if x.axis == space.axis and x.level in BLOCK_LEVELS)


def part_index(w: Walk, stage: Stage, scope: Scope) -> Whole:
    """The part that the block in scope leaves."""
    axis, step = part_step(w, stage)
    return over(scope[axis].lo, Int(step))


def part_of(w: Walk, stage: Stage, component: str, part: Whole) -> tuple[View, Place]:
    """A view of one part of one component, and the place of its elements."""
    assert stage.monoid is not None
    axes = dict(stage.monoid.components(stage))[component]
    sizes = tuple(length_of(w.plan.program.dim(a)) for a in axes)
    name = w.fresh(f"{stage.out}_{component}_part")
    return View(name, parts_name(stage.out, component), times(part, product(sizes))), row_major(name, axes, sizes)


def fold_parts(w: Walk, stage: Stage, scope: Scope, chain: Chain) -> tuple[Stmt, ...]:
    """Every part of the workspace, in order, combined element by element; then what becomes of the element."""
    m = stage.monoid
    assert m is not None
    axis, step = part_step(w, stage)
    n_parts = pieces(length_of(w.plan.program.dim(axis)), step)

    def element(at: At) -> tuple[Stmt, ...]:
        state = {c: Var(w.fresh(f"{stage.out}_{c}"), at.lanes) for c, _ in m.state}
        out: tuple[Stmt, ...] = tuple(
            Let(state[c].name, Num(x, at.lanes)) for (c, _), x in zip(m.state, m.identity, strict=True)
        )
        part, views, parts = IntVar(w.fresh("part")), [], {}
        for c, _ in m.state:
            view, place = part_of(w, stage, c, part)
            views.append(view)
            parts[c] = at.load(place)
        new = combined(at, m, state, parts)
        lets = tuple(Let(w.fresh(f"new_{c}"), x) for c, x in new.items())
        sets = tuple(Set(state[c].name, Var(let.name, at.lanes)) for c, let in zip(new, lets, strict=True))
        return (*out, For(part.name, Int(0), n_parts, 1, (*views, *lets, *sets)), *chain.emit(at, state))

    return spread(w, stage.axes, scope, vector_lanes(w, stage, chain.bodies(w), chain.computed), element)
