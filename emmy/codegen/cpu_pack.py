"""Packing on a CPU: a block of an input becomes f32 panels that an atom reads with unit stride. Knows no accumulators."""

from __future__ import annotations

from emmy.codegen.cpu_atoms import atom_of, loops_outside
from emmy.codegen.cpu_fold import spread
from emmy.codegen.cpu_scope import Panel, Piece, Place, Scope, Walk
from emmy.codegen.cpu_values import At
from emmy.codegen.kernel import (
    For,
    Int,
    IntVar,
    LetInt,
    Load,
    Num,
    Number,
    Stmt,
    Store,
    Transpose,
    View,
    Whole,
    below,
    clamp,
    minus,
    over,
    pieces,
    plus,
    times,
    when,
)
from emmy.ir.expr import Read, factors
from emmy.ir.moves.atom import mnk_axes


def pack(w: Walk, value: str, scope: Scope) -> tuple[Place, tuple[Stmt, ...]]:
    """The packed block of `value` for the pieces in scope, and the statements that fill it."""
    panel = _panel(w, value, scope)
    if panel is None:
        place = w.block(f"{value}_pack", w.plan.program.value(value).axes, scope)
        return place, _plain(w, value, place, scope)
    x, k, width = panel
    depth = scope[k].size
    name = w.allocate(f"{value}_pack", times(times(pieces(scope[x].size, width), Int(width)), depth))
    axes = w.plan.program.value(value).axes
    strides: dict[str, Whole] = {x: Int(1), k: Int(width)}
    place = Place(
        name, axes, tuple(strides[a] for a in axes), tuple(scope[a].lo for a in axes), Panel(x, width, depth), True
    )
    of = w.memory(value)
    fill = _rows_to_panels if of.stride(x) == Int(1) else _columns_to_panels
    return place, fill(w, of, place, scope[x], scope[k], x, k)


def _panel(w: Walk, value: str, scope: Scope) -> tuple[str, str, int] | None:
    """(panel axis, folded axis, panel width) for the first atom that reads the value in panels; None when none does.

    A panel is as wide as the atom's tile, so every loop between the copy and the atom must step by whole panels.
    """
    axes = w.plan.program.value(value).axes
    for work in w.launch.tile.works:
        atom, s = atom_of(work), w.plan.program.stage(work.stage)
        if atom is None or atom.name != "fma" or work.combine:
            continue
        m, n, k = mnk_axes(s)
        left, right = factors(s.body)
        for side, x, width in ((left, m, atom.m), (right, n, atom.n)):
            if not isinstance(side, Read) or side.value != value or x is None or set(axes) != {x, k}:
                continue
            steps = [loop.step for loop in (*w.launch.tile.nest, *loops_outside(work, s)) if loop.axis == x]
            if all(step % width == 0 for step in steps[len(scope[x].steps) :]):
                return x, k, width
    return None


def _plain(w: Walk, value: str, place: Place, scope: Scope) -> tuple[Stmt, ...]:
    """A copy in the value's own order."""
    of = w.memory(value)

    def copy(at: At) -> tuple[Stmt, ...]:
        return (at.store(place, at.load(of)),)

    return spread(w, of.axes, scope, w.lanes, copy)


def chunks(width: int, lanes: int) -> list[tuple[int, int]]:
    """(offset, lanes) that cover a panel: whole vectors, then halves down to 4, then single elements."""
    out, at = [], 0
    while at < width:
        while lanes > width - at:
            lanes = lanes // 2 if lanes > 4 else 1
        out.append((at, lanes))
        at += lanes
    return out


def _rows_to_panels(w: Walk, of: Place, to: Place, px: Piece, pk: Piece, x: str, k: str) -> tuple[Stmt, ...]:
    """Source rows are contiguous along the panel axis: each row is dealt to the panels, a vector at a time."""
    assert to.panel is not None
    width, kk, xx = to.panel.width, IntVar(w.fresh("kk")), IntVar(w.fresh("xx"))
    length = px.length
    src, dst = w.fresh("from"), w.fresh("to")
    views = (
        View(src, of.view, of.at({k: plus(pk.lo, kk), x: plus(px.lo, xx)})),
        View(dst, to.view, plus(times(xx, to.panel.depth), times(kk, Int(width)))),
    )
    full: tuple[Stmt, ...] = tuple(Store(dst, Int(o), Load(src, Int(o), n)) for o, n in chunks(width, w.lanes))
    part: tuple[Stmt, ...] = ()
    if px.multiple % width:
        left = IntVar(w.fresh("left"))
        part = (LetInt(left.name, minus(length, xx)),)
        for o, n in chunks(width, w.lanes):
            if n == 1:
                part += when(
                    below(Int(o), left), (Store(dst, Int(o), Load(src, Int(o))),), (Store(dst, Int(o), Num(0.0)),)
                )
            else:
                count = IntVar(w.fresh("count"))
                part += (
                    LetInt(count.name, clamp(minus(left, Int(o)), n)),
                    Store(dst, Int(o), Load(src, Int(o), n, count)),
                )
        inner = when(below(plus(xx, Int(width - 1)), length), full, part)
    else:
        inner = full
    return (For(kk.name, Int(0), pk.length, 1, (For(xx.name, Int(0), length, width, (*views, *inner)),)),)


def _columns_to_panels(w: Walk, of: Place, to: Place, px: Piece, pk: Piece, x: str, k: str) -> tuple[Stmt, ...]:
    """Source rows run along the folded axis: square blocks are transposed, what is left goes one element at a time."""
    assert to.panel is not None
    width, xx = to.panel.width, IntVar(w.fresh("xx"))
    length, depth = px.length, pk.length
    src, dst = w.fresh("from"), w.fresh("to")
    views = (View(src, of.view, of.at({k: pk.lo, x: plus(px.lo, xx)})), View(dst, to.view, times(xx, to.panel.depth)))
    full: tuple[Stmt, ...] = ()
    for o, n in chunks(width, w.lanes):
        full += _transposed(w, of, src, dst, o, n, width, depth, x, k)
    if px.multiple % width == 0:
        return (For(xx.name, Int(0), length, width, (*views, *full)),)
    kk, i, z = IntVar(w.fresh("kk")), IntVar(w.fresh("i")), IntVar(w.fresh("i"))
    left = minus(length, xx)
    take = Store(dst, plus(times(kk, Int(width)), i), Load(src, plus(times(i, of.stride(x)), times(kk, of.stride(k)))))
    zero = Store(dst, plus(times(kk, Int(width)), z), Num(0.0))
    part = (
        For(
            kk.name,
            Int(0),
            depth,
            1,
            (For(i.name, Int(0), left, 1, (take,)), For(z.name, left, Int(width), 1, (zero,))),
        ),
    )
    return (For(xx.name, Int(0), length, width, (*views, *when(below(plus(xx, Int(width - 1)), length), full, part))),)


def _transposed(
    w: Walk, of: Place, src: str, dst: str, o: int, n: int, width: int, depth: Whole, x: str, k: str
) -> tuple[Stmt, ...]:
    """Rows o..o+n of one panel, for every position along the folded axis."""
    kk = IntVar(w.fresh("kk"))

    def single(at: IntVar) -> tuple[Stmt, ...]:
        loads: list[tuple[int, Number]] = [
            (i, Load(src, plus(times(of.stride(x), Int(o + i)), times(at, of.stride(k))))) for i in range(n)
        ]
        return tuple(Store(dst, plus(times(at, Int(width)), Int(o + i)), v) for i, v in loads)

    if n == 1 or of.stride(k) != Int(1):
        return (For(kk.name, Int(0), depth, 1, single(kk)),)
    even = times(over(depth, Int(n)), Int(n))
    block = Transpose(
        dst,
        plus(times(kk, Int(width)), Int(o)),
        Int(width),
        src,
        plus(times(of.stride(x), Int(o)), kk),
        of.stride(x),
        n,
    )
    out: tuple[Stmt, ...] = (For(kk.name, Int(0), even, n, (block,)),)
    if even != depth:
        rest = IntVar(w.fresh("kk"))
        out += (For(rest.name, even, depth, 1, single(rest)),)
    return out
