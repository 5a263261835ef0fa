"""Register tiles of contractions on a CPU: the atoms fma and dot. Knows a fold, its pieces and where operands lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from emmy.codegen.cpu_fold import Fold
from emmy.codegen.cpu_scope import Loop, Place, Scope, Spot, Walk, clipped
from emmy.codegen.cpu_values import At
from emmy.codegen.kernel import (
    Call,
    For,
    Int,
    IntVar,
    LaneSum,
    Let,
    LetInt,
    Load,
    Num,
    Number,
    Set,
    Splat,
    Stmt,
    Var,
    View,
    Whole,
    below,
    both,
    clamp,
    least,
    minus,
    over,
    plus,
    times,
    when,
)
from emmy.ir.expr import Read, factors
from emmy.ir.moves.atom import mnk_axes
from emmy.ir.plan import Atom, Work
from emmy.ir.plan import Loop as PlanLoop
from emmy.ir.program import Stage


def atom_of(work: Work) -> Atom | None:
    """The atom this file can make of a work: its own, when the last loops of its nest are the atom's."""
    atom = next((a for a in work.atoms if a.stage == work.stage), None)
    return atom if atom and atom.name in ("fma", "dot") else None


def loops_outside(work: Work, s: Stage) -> tuple[PlanLoop, ...]:
    """The work's own loops around its atom's; without an atom its loops change nothing, and there are none."""
    atom = atom_of(work)
    return work.nest[: -len(_own(s))] if atom else ()


def _own(s: Stage) -> tuple[str, ...]:
    return tuple(a for a in mnk_axes(s) if a)


Sums = dict[tuple[int, int], Var]  # (row, vector or column) -> its accumulator


@dataclass(frozen=True, slots=True)
class Tile:
    """One register tile: rows m..m+rows, columns n..n+cols, of a fold over `k`."""

    w: Walk
    fold: Fold
    atom: Atom
    scope: Scope  # n and m start at the tile, the folded axes are the pieces in scope
    m: str | None
    n: str
    k: str
    m_end: Whole | None  # where rows stop, when the tile may run over; None when it never does
    n_end: Whole | None

    @property
    def spot(self) -> Spot:
        return {a: p.lo for a, p in self.scope.items()}

    @property
    def rows(self) -> int:
        return self.atom.m if self.m else 1

    def at(self, i: int, j: int) -> Spot:
        out = dict(self.spot)
        if self.m:
            out[self.m] = plus(out[self.m], Int(i))
        out[self.n] = plus(out[self.n], Int(j))
        return out


def contraction(w: Walk, fold: Fold, scope: Scope) -> tuple[Stmt, ...] | None:
    """The piece in scope through the work's atom; None when it has none, or operands lie where the atom cannot read them."""
    atom, s = atom_of(fold.work), fold.stage
    if atom is None or tuple(x.axis for x in fold.work.nest[-len(_own(s)) :]) != _own(s):
        return None
    m, n, k = mnk_axes(s)
    left, right = factors(s.body)
    assert isinstance(left, Read) and isinstance(right, Read)
    a, b = w.place(left.value, s.out), w.place(right.value, s.out)
    if not _readable(atom, a, b, m, n, k):
        return None
    loops: list[Loop] = []
    for axis, step in (*((x.axis, x.step) for x in loops_outside(fold.work, s)), *((axis, 1) for axis in s.axes[:-2])):
        loops.append(w.loop(axis, step, scope))
        scope = loops[-1].scope
    rows = atom.m if m else 1
    m_end = scope[m].hi if m and clipped(scope[m], rows) else None
    n_end = scope[n].hi if clipped(scope[n], atom.n) else None
    for own, step in ((n, atom.n), (m, rows)):
        if own:
            loops.append(w.loop(own, step, scope))
            scope = loops[-1].scope
    tile = Tile(w, fold, atom, scope, m, n, k, m_end, n_end)
    out = fma_tile(tile, a, b) if atom.name == "fma" else dot_tile(tile, a, b)
    for loop in reversed(loops):
        out = loop.wrap(out)
    return out


def _readable(atom: Atom, a: Place, b: Place, m: str | None, n: str, k: str) -> bool:
    """Whether the operands lie as the atom reads them: an operand packed for another work's atom may not."""
    if atom.name == "dot":
        return b.contiguous(k) and a.panel is None
    return (b.panel is None or (b.panel.axis == n and b.panel.width == atom.n)) and (
        a.panel is None or a.panel.axis == m
    )


def _folded_loops(t: Tile) -> tuple[list[Loop], Scope]:
    """Loops over folded axes other than k: they stand inside the tile, around k."""
    loops, scope = [], t.scope
    for axis in t.fold.stage.folded[:-1]:
        loops.append(t.w.loop(axis, 1, scope))
        scope = loops[-1].scope
    return loops, scope


# ---------------------------------------------------------------- fma: a broadcast element of A times vectors of B
def fma_tile(t: Tile, a: Place, b: Place) -> tuple[Stmt, ...]:
    """Sums in rows x vectors variables; k innermost; edges computed whole and stored in part."""
    w, lanes, n_vectors = t.w, t.atom.width, t.atom.n // t.atom.width
    sums: Sums = {(i, v): Var(w.fresh("c"), lanes) for i in range(t.rows) for v in range(n_vectors)}
    counts, lets = _counts(t, n_vectors)
    out: tuple[Stmt, ...] = tuple(Let(c.name, Num(0.0, lanes)) for c in sums.values())
    inside = _inside(t)
    home = t.fold.home
    save: tuple[Stmt, ...] = ()
    if home:
        again = _each_place(t, sums, inside, counts, lambda at, c: (Set(c.name, at.load(home)),))
        out += when(t.fold.later(t.scope), again)
        save = _each_place(t, sums, inside, counts, lambda at, c: (at.store(home, c),))
    loops, scope = _folded_loops(t)
    overread = t.n_end is not None and not b.padded
    steps = _k_loop(t, a, b, scope, sums, None)
    if overread:
        assert t.n_end is not None
        whole_tile = below(plus(t.spot[t.n], Int(t.atom.n - 1)), t.n_end)
        steps = when(whole_tile, steps, _k_loop(t, a, b, scope, sums, counts))
    for loop in reversed(loops):
        steps = loop.wrap(steps)
    done = _each_place(t, sums, inside, counts, lambda at, c: t.fold.chain.emit(at, {"x": c}))
    return (*lets, *out, *steps, *when(t.fold.last(t.scope), done, save))


def _inside(t: Tile) -> Whole:
    """1 when no element of the tile lies outside the piece."""
    out: Whole = Int(1)
    if t.m and t.m_end is not None:
        out = below(plus(t.spot[t.m], Int(t.rows - 1)), t.m_end)
    if t.n_end is not None:
        out = both(out, below(plus(t.spot[t.n], Int(t.atom.n - 1)), t.n_end))
    return out


def _counts(t: Tile, n_vectors: int) -> tuple[list[Whole] | None, tuple[Stmt, ...]]:
    """Lanes of each vector of a row that lie inside, when they may be fewer than all."""
    if t.n_end is None:
        return None, ()
    counts: list[Whole] = []
    lets: list[Stmt] = []
    for v in range(n_vectors):
        name = t.w.fresh("count")
        left = minus(t.n_end, plus(t.spot[t.n], Int(v * t.atom.width)))
        lets.append(LetInt(name, clamp(left, t.atom.width)))
        counts.append(IntVar(name))
    return counts, tuple(lets)


def _each_place(
    t: Tile, sums: Sums, inside: Whole, counts: list[Whole] | None, emit: Callable[[At, Var], tuple[Stmt, ...]]
) -> tuple[Stmt, ...]:
    """`emit` for every vector of sums: whole where the tile lies inside, guarded elsewhere."""

    def places(guarded: bool) -> tuple[Stmt, ...]:
        shared: list[dict[Number, Let]] = [{} for _ in range(t.atom.n // t.atom.width)]
        rows: list[Stmt] = []
        for i in range(t.rows):
            row: tuple[Stmt, ...] = ()
            for v, loads in enumerate(shared):
                count = counts[v] if guarded and counts else None
                row += emit(At(t.w, t.at(i, v * t.atom.width), t.n, t.atom.width, count, t.m, loads), sums[i, v])
            if guarded and t.m and t.m_end is not None:
                row = when(below(t.at(i, 0)[t.m], t.m_end), row)
            rows += row
        return (*(let for loads in shared for let in loads.values()), *rows)

    return when(inside, places(False), () if inside == Int(1) else places(True))


def _k_loop(t: Tile, a: Place, b: Place, scope: Scope, sums: Sums, counts: list[Whole] | None) -> tuple[Stmt, ...]:
    w, lanes, n_vectors = t.w, t.atom.width, t.atom.n // t.atom.width
    spot = {**t.spot, **{x: scope[x].lo for x in t.fold.stage.folded}}
    views, rows = _row_views(t, a, spot)
    bv = w.fresh("b_at")
    views.append(View(bv, b.view, b.tile_at(spot)))
    n_stride = Int(1) if b.panel else b.stride(t.n)

    def step(kk: Whole) -> list[Stmt]:
        out: list[Stmt] = []
        bs = []
        for v in range(n_vectors):
            index = plus(times(kk, b.stride(t.k)), times(n_stride, Int(v * lanes)))
            name = w.fresh("b")
            out.append(Let(name, Load(bv, index, lanes, counts[v] if counts else None, n_stride)))
            bs.append(Var(name, lanes))
        for i in range(t.rows):
            view, offset = rows[i]
            x = Var(w.fresh("a"), lanes)
            out.append(Let(x.name, Splat(Load(view, plus(times(kk, a.stride(t.k)), offset)), lanes)))
            out += [Set(sums[i, v].name, Call("fma", (x, bs[v], sums[i, v]))) for v in range(n_vectors)]
        return out

    unroll, p = t.fold.work.unroll, scope[t.k]
    length = p.length
    kv = IntVar(w.fresh("kk"))
    if unroll == 1:
        return (*views, For(kv.name, Int(0), length, 1, tuple(step(kv))))
    even = times(over(length, Int(unroll)), Int(unroll))
    body = tuple(s for u in range(unroll) for s in step(plus(kv, Int(u))))
    out: tuple[Stmt, ...] = (*views, For(kv.name, Int(0), even, unroll, body))
    if even != length:
        rest = IntVar(w.fresh("kk"))
        out += (For(rest.name, even, length, 1, tuple(step(rest))),)
    return out


def _row_views(t: Tile, a: Place, spot: Spot) -> tuple[list[Stmt], list[tuple[str, Whole]]]:
    """Views of A's rows, and (view, offset) of each row's first element. Rows past the end read the last row instead."""
    w = t.w
    aligned = a.panel is not None and a.panel.axis == t.m and a.panel.width == t.rows
    one_base = aligned or (a.panel is None and t.m_end is None)
    if not t.m or one_base:
        name = w.fresh("a_at")
        stride = Int(1) if aligned else a.stride(t.m) if t.m else Int(0)
        base = View(name, a.view, a.tile_at(spot) if aligned else a.at(spot))
        return [base], [(name, times(stride, Int(i))) for i in range(t.rows)]
    views: list[Stmt] = []
    rows: list[tuple[str, Whole]] = []
    for i in range(t.rows):
        row = plus(spot[t.m], Int(i))
        if t.m_end is not None:
            row = least(row, plus(t.m_end, Int(-1)))
        name = w.fresh("a_at")
        views.append(View(name, a.view, a.at({**spot, t.m: row})))
        rows.append((name, Int(0)))
    return views, rows


# ---------------------------------------------------------------- dot: vectors of A and B along k
def dot_tile(t: Tile, a: Place, b: Place) -> tuple[Stmt, ...]:
    """Sums in rows x columns vectors along k, added across lanes at the end."""
    w, lanes, cols = t.w, t.atom.width, t.atom.n
    sums: Sums = {(i, j): Var(w.fresh("c"), lanes) for i in range(t.rows) for j in range(cols)}
    out: list[Stmt] = [Let(c.name, Num(0.0, lanes)) for c in sums.values()]
    loops, scope = _folded_loops(t)
    spot = {**t.spot, **{x: scope[x].lo for x in t.fold.stage.folded}}
    a_rows, views = _dot_rows(t, a, spot, t.m, t.rows, t.m_end)
    b_rows, more = _dot_rows(t, b, spot, t.n, cols, t.n_end)
    a_stride = a.stride(t.k)

    def step(kk: Whole, count: Whole | None) -> list[Stmt]:
        body: list[Stmt] = []
        bs = [Var(w.fresh("b"), lanes) for _ in range(cols)]
        body += [Let(x.name, Load(row, kk, lanes, count)) for x, row in zip(bs, b_rows, strict=True)]
        for i in range(t.rows):
            x = Var(w.fresh("a"), lanes)
            body.append(Let(x.name, Load(a_rows[i], times(kk, a_stride), lanes, count, a_stride)))
            body += [Set(sums[i, j].name, Call("fma", (x, bs[j], sums[i, j]))) for j in range(cols)]
        return body

    length, kv = scope[t.k].length, IntVar(w.fresh("kk"))
    by = t.atom.k * t.fold.work.unroll
    even = times(over(length, Int(by)), Int(by))
    body = tuple(s for u in range(0, by, lanes) for s in step(plus(kv, Int(u)), None))
    steps: tuple[Stmt, ...] = (*views, *more, For(kv.name, Int(0), even, by, body))
    if even != length:
        rest = IntVar(w.fresh("kk"))
        steps += (For(rest.name, even, length, lanes, tuple(step(rest, least(minus(length, rest), Int(lanes))))),)
    for loop in reversed(loops):
        steps = loop.wrap(steps)
    out += steps
    later, last = t.fold.later(t.scope), t.fold.last(t.scope)
    for (i, j), c in sums.items():
        out += _dot_end(t, i, j, c, later, last)
    return tuple(out)


def _dot_rows(
    t: Tile, p: Place, spot: Spot, axis: str | None, n: int, end: Whole | None
) -> tuple[list[str], list[Stmt]]:
    names: list[str] = []
    views: list[Stmt] = []
    for i in range(n):
        here = spot
        if axis:
            row = plus(spot[axis], Int(i))
            here = {**spot, axis: row if end is None else least(row, plus(end, Int(-1)))}
        names.append(t.w.fresh(f"{p.view}_row"))
        views.append(View(names[-1], p.view, p.at(here)))
    return names, views


def _dot_end(t: Tile, i: int, j: int, c: Var, later: Whole, last: Whole) -> tuple[Stmt, ...]:
    at = At(t.w, t.at(i, j), None)
    x = Var(t.w.fresh("sum"))
    body: tuple[Stmt, ...] = (Let(x.name, LaneSum(c)),)
    save: tuple[Stmt, ...] = ()
    if t.fold.home:
        body += when(later, (Set(x.name, Call("add", (x, at.load(t.fold.home)))),))
        save = (at.store(t.fold.home, x),)
    body += when(last, t.fold.chain.emit(at, {"x": x}), save)
    inside: Whole = Int(1)
    if t.m and t.m_end is not None:
        inside = below(at.spot[t.m], t.m_end)
    if t.n_end is not None:
        inside = both(inside, below(at.spot[t.n], t.n_end))
    return when(inside, body)
