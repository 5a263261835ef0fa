"""Packing on a CPU: a block of an input becomes f32 panels that an atom reads with unit stride. Knows no accumulators."""

from __future__ import annotations

from dataclasses import dataclass

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
    fill = _Fill(w, w.memory(value), name, x, k, scope[x], scope[k], width, depth)
    return place, fill.from_rows() if fill.of.stride(x) == Int(1) else fill.from_columns()


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


@dataclass(frozen=True, slots=True)
class _Fill:
    """A copy from memory into panels of `width` along `x`, each `depth` long along `k`."""

    w: Walk
    of: Place
    to: str
    x: str
    k: str
    px: Piece
    pk: Piece
    width: int
    depth: Whole

    def _views(self, xx: Whole, kk: Whole) -> tuple[str, str, tuple[Stmt, ...]]:
        """Source and panel from element xx of x (where a panel begins) and kk of k on."""
        src, dst = self.w.fresh("from"), self.w.fresh("to")
        first = self.of.at({self.k: plus(self.pk.lo, kk), self.x: plus(self.px.lo, xx)})
        at = plus(times(xx, self.depth), times(kk, Int(self.width)))
        return src, dst, (View(src, self.of.view, first), View(dst, self.to, at))

    def _full(self, xx: Whole, full: tuple[Stmt, ...], part: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        """`full` for a panel inside the piece, `part` for one that runs over its end, when there can be one."""
        if self.px.multiple % self.width == 0:
            return full
        return when(below(plus(xx, Int(self.width - 1)), self.px.length), full, part)

    def from_rows(self) -> tuple[Stmt, ...]:
        """Source rows are contiguous along x: each row is dealt to the panels, a vector at a time."""
        kk, xx, left = (IntVar(self.w.fresh(stem)) for stem in ("kk", "xx", "left"))
        src, dst, views = self._views(xx, kk)
        vectors = chunks(self.width, self.w.lanes)
        full = tuple(Store(dst, Int(o), Load(src, Int(o), n)) for o, n in vectors)
        part: tuple[Stmt, ...] = (LetInt(left.name, minus(self.px.length, xx)),)
        for o, n in vectors:
            if n == 1:
                take, zero = (Store(dst, Int(o), x) for x in (Load(src, Int(o)), Num(0.0)))
                part += when(below(Int(o), left), (take,), (zero,))
            else:
                part += (Store(dst, Int(o), Load(src, Int(o), n, clamp(minus(left, Int(o)), n))),)
        panels = For(xx.name, Int(0), self.px.length, self.width, (*views, *self._full(xx, full, part)))
        return (For(kk.name, Int(0), self.pk.length, 1, (panels,)),)

    def from_columns(self) -> tuple[Stmt, ...]:
        """Source rows run along k: square blocks are transposed, what is left goes one element at a time."""
        xx = IntVar(self.w.fresh("xx"))
        src, dst, views = self._views(xx, Int(0))
        full = tuple(s for o, n in chunks(self.width, self.w.lanes) for s in self._transposed(src, dst, o, n))
        kk, i, z = (IntVar(self.w.fresh(stem)) for stem in ("kk", "i", "i"))
        left = minus(self.px.length, xx)
        take = For(i.name, Int(0), left, 1, (self._one(src, dst, i, kk),))
        zero = For(z.name, left, Int(self.width), 1, (Store(dst, plus(times(kk, Int(self.width)), z), Num(0.0)),))
        part = (For(kk.name, Int(0), self.pk.length, 1, (take, zero)),)
        return (For(xx.name, Int(0), self.px.length, self.width, (*views, *self._full(xx, full, part))),)

    def _one(self, src: str, dst: str, i: Whole, kk: Whole) -> Stmt:
        element = plus(times(i, self.of.stride(self.x)), times(kk, self.of.stride(self.k)))
        return Store(dst, plus(times(kk, Int(self.width)), i), Load(src, element))

    def _transposed(self, src: str, dst: str, o: int, n: int) -> tuple[Stmt, ...]:
        """Rows o..o+n of one panel, all along k."""
        kk, rest = IntVar(self.w.fresh("kk")), IntVar(self.w.fresh("kk"))
        length, pitch = self.pk.length, self.of.stride(self.x)
        even = times(over(length, Int(n)), Int(n)) if n > 1 else Int(0)
        to_at, of_at = plus(times(kk, Int(self.width)), Int(o)), plus(times(pitch, Int(o)), kk)
        blocks = For(kk.name, Int(0), even, n, (Transpose(dst, to_at, Int(self.width), src, of_at, pitch, n),))
        ones = For(rest.name, even, length, 1, tuple(self._one(src, dst, Int(o + i), rest) for i in range(n)))
        return (*((blocks,) if n > 1 else ()), *((ones,) if even != length else ()))
