"""Finished elements on a GPU: a stage's body on short vectors, loads and stores around it. Knows loops only as positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import gcd
from typing import TYPE_CHECKING

from emmy.codegen.cpu_fold import parts_name
from emmy.codegen.cpu_scope import length_of
from emmy.codegen.cuda_copy import only
from emmy.codegen.cuda_exchange import ATOM_COLUMNS, Exchange, Words, pairs_of
from emmy.codegen.cuda_late import Between
from emmy.codegen.cuda_scope import Walk
from emmy.codegen.cuda_store import Boxes, boxes
from emmy.codegen.cuda_vector import add, fetched, function, leave, load, named, store, word_regs
from emmy.codegen.kernel import (
    WHOLE,
    Int,
    IntLoad,
    IntVar,
    LetInt,
    Load,
    Num,
    Number,
    Ramp,
    Store,
    Whole,
    below,
    both,
    plus,
    product,
    times,
)
from emmy.codegen.kernel_gpu import UNROLL, For, Ref, Regs, Stmt, counter, unrolled
from emmy.codegen.steps import Close, Compute, StoreState
from emmy.codegen.steps import Store as StoreStep
from emmy.errors import PlanError
from emmy.ir.dtype import DType, size_bytes
from emmy.ir.expr import Apply, Axis, Const, Expr, Read, axes_of, outermost
from emmy.ir.expr import walk as walk_expr
from emmy.ir.gpu import transfer_bytes
from emmy.ir.plan import Preloaded
from emmy.ir.program import Stage

if TYPE_CHECKING:
    from emmy.codegen.cuda_statistic import Statistic

_ALWAYS = Int(1)
FINISHED = "finished"  # in place of the components of a stage that its fold has finished
Done = Close | Compute | StoreStep | StoreState


@dataclass(frozen=True, slots=True)
class Spread:
    """How the elements of a block are dealt to threads: vectors of `width` along the last axis, in two nested loops.

    columns, rows: loops (variable, count); positions along `axes` are expressions in their variables. The last axis'
    position depends on `columns` alone, unless `columns` is empty.

    corner: of matrix atoms, whose vectors are pairs: where the first atom of a row of them begins, for each step of the first
    loop over rows. Lanes l to l + 3 have rows l/4 and l/4 + 8 of it; 8 columns further on stands the next.

    across: bits of a lane's number in which lanes differ that hold other vectors of the same rows.
    within, unroll: whether columns that the loops reach belong to the block at all; iterations over them that are written out.
    """

    axes: tuple[str, ...]
    columns: tuple[tuple[str, int], ...]
    rows: tuple[tuple[str, int], ...]
    spot: Mapping[str, Whole]
    width: int
    exists: Whole  # whether a vector that the loops reach belongs to the block at all
    corner: Mapping[str, Whole] | None = None
    across: tuple[int, ...] = ()
    within: Whole = _ALWAYS
    unroll: int = UNROLL

    def narrowed(self, width: int) -> Spread:
        """The same elements in shorter vectors."""
        if width == self.width:
            return self
        part = IntVar("part")
        spot = {**self.spot, self.axes[-1]: plus(self.spot[self.axes[-1]], times(part, Int(width)))}
        loop = ("part", self.width // width)
        columns, rows = ((*self.columns, loop), self.rows) if self.columns else ((), (*self.rows, loop))
        return replace(self, columns=columns, rows=rows, spot=spot, width=width, corner=None)


States = Callable[[Walk, Spread], tuple[tuple[Stmt, ...], Mapping[str, str]]]
Folds = Mapping[str, States]  # stage -> what makes a vector of its folded components
Asked = dict[tuple[Read, int], Words]  # what lanes have asked for, from which pair on -> registers that it comes to
Sums = Mapping[str, Mapping[str, Ref]]  # stage -> component -> where a vector of it begins


@dataclass(slots=True)
class Chain:
    """What becomes of each element of a block, in order, while it is in registers."""

    w: Walk
    steps: tuple[Done, ...]
    held: dict[Read, Ref] = field(default_factory=dict)  # what is read -> registers that hold a vector of it
    positions: dict[Read, IntVar] = field(default_factory=dict)  # i32 values that tell where something is read
    statistics: dict[str, Statistic] = field(default_factory=dict)  # stages that fold the elements, on the way
    asked: Asked = field(default_factory=dict)  # what is on its way to registers already

    def width(self, axes: tuple[str, ...], natural: int) -> int:
        """The widest vector that every load and store of the chain allows."""
        p, out = self.w.plan.program, natural
        for name, index, _ in self.touched():
            if axes and any(x == axes[-1] or (not isinstance(x, str) and axes[-1] in axes_of(x)) for x in index):
                if index[-1] != axes[-1]:
                    return 1
                item = size_bytes(p.value(name).dtype)
                out = gcd(out, transfer_bytes(self.w.plan, self.w.nest, name) // item)
        return out

    def touched(self) -> list[tuple[str, tuple[str | Expr, ...], DType]]:
        """(value, where along its axes, dtype in memory) of everything read from memory or stored."""
        p, made = self.w.plan.program, {s.stage for s in self.steps if isinstance(s, Close | Compute)}
        out: list[tuple[str, tuple[str | Expr, ...], DType]] = []
        for s in self.steps:
            stage = p.stage(s.stage)
            if isinstance(s, StoreStep | StoreState):
                out.append((stage.out, stage.axes, stage.dtype if isinstance(s, StoreStep) else "f32"))
            elif isinstance(s, Compute):
                reads = (p.found(r) for r in outermost(stage.body) if r.value not in made)
                out += [(r.value, r.index, p.value(r.value).dtype) for r in reads]
        return out

    def emit(self, spread: Spread, sums: Sums | None = None, folds: Folds | None = None) -> tuple[Stmt, ...]:
        """The loops over a block's vectors. `sums` of the stages that were folded are in registers, or `folds` make them."""
        leaving, sums = self._leaving(spread), sums or {}
        if pairs_of(self, spread) == 1 and not leaving:
            return self._alone(spread, sums, folds or {})
        out: tuple[Stmt, ...] = ()
        for part in self._exchanges(spread, leaving):
            self.held.clear()
            self.positions.clear()
            out += part.emit(sums)
        assert spread.corner is not None
        begin = (s for x in leaving.values() for s in x.begin())
        return (*begin, *out, *(s for x in leaving.values() for s in x.send(spread.rows[0][0], spread.corner)))

    def ask(self, first: Mapping[str, Preloaded], begin: int, spread: Spread) -> Iterator[Between]:
        """Asking for first vectors of values from `begin` steps before the end on, and exchanging them; notes where they come.

        One turn of the rings lies between, and as many steps as are left have a part of the exchange each.
        """
        turn = max(c.depth for c in self.w.launch.tile.channels)
        if pairs_of(self, spread) == 1:
            raise self.w.cannot(f"{', '.join(first)} come to no lane in vectors of 16 bytes: lanes cannot ask ahead")
        for part in self._exchanges(spread, {}):
            for r in dict.fromkeys(r for r in self.unheld() if r.value in first):
                x = first[r.value]
                words, registers = self.asked[r, part.start], _ = part.words(r, x.vectors, exchanged=True)
                yield Between(begin, x.steps, partial(part.ask_first, r, words, x.each, x.steps), (registers,))
                each = -(-words.vectors // max(1, begin - x.steps - turn)) if words.exchanged else words.vectors
                turns = -(-words.vectors // each)
                yield Between(turns, turns, partial(part.exchanged, words, each, turns))

    def _exchanges(self, spread: Spread, leaving: Mapping[str, Boxes]) -> Iterator[Exchange]:
        """A spread's pairs of atoms by whole vectors, and those that make none one by one."""
        pairs, count = pairs_of(self, spread), spread.columns[0][1]
        whole = count - count % pairs
        yield Exchange(self, spread, leaving, pairs, 0, whole)
        if whole < count:
            yield Exchange(self, spread, leaving, 1, whole, count)

    def _leaving(self, spread: Spread) -> dict[str, Boxes]:
        """Values that leave through shared memory, with their places there."""
        stored = (s.stage for s in self.steps if isinstance(s, StoreStep))
        placed = [v for v in stored if self.w.launch.tile.placement(v)]
        if placed and spread.corner is None:
            raise self.w.cannot(f"{placed[0]} cannot leave through shared memory: no matrix atom makes it")
        return {v: boxes(self.w, v, spread.rows[0][1], ATOM_COLUMNS * spread.columns[0][1]) for v in placed}

    def _alone(self, spread: Spread, sums: Sums, folds: Folds) -> tuple[Stmt, ...]:
        """Vectors that are loaded and stored by the thread that makes them."""
        width, natural = self.width(spread.axes, spread.width), spread.width
        spread = spread.narrowed(width)
        if sums and width != natural:
            part = times(IntVar("part"), Int(width))
            sums = {s: {c: Ref(x.view, plus(x.at, part)) for c, x in of.items()} for s, of in sums.items()}
        outer = self._loads(spread, spread.axes[-1:]) if spread.columns else ()
        inner = self._loads(spread)
        body: tuple[Stmt, ...] = ()
        for stage, fold in folds.items():
            before, made = fold(self.w, spread)
            body += before
            sums = {**sums, stage: {c: Ref(name, Int(0)) for c, name in made.items()}}
        body += (*inner, *self.make(spread, sums))
        spaces = self.w.plan.workspaces
        ways = {parts_name(x.value, c): leave for x in spaces if x.marked for c in sums.get(x.value, ())}
        ways |= {x.value: add for x in spaces if x.added}
        for to, dtype, x in self.stores(spread, sums):
            way = ways.get(to.view)
            body += way(self.w, to, x) if way else store(self.w, to, dtype, spread.width, x)
        inside_rows, inside_columns = self.exists(spread)
        body = only(both(spread.exists, inside_rows), body)
        for var, count in reversed(spread.rows):
            body = unrolled(var, count, body)
        body = only(both(spread.within, inside_columns), (*outer, *body))
        for var, count in reversed(spread.columns):
            written = spread.unroll == UNROLL or count <= spread.unroll
            body = unrolled(var, count, body) if written else (For(var, Int(0), Int(count), 1, body, spread.unroll),)
        return body

    def exists(self, spread: Spread) -> tuple[Whole, Whole]:
        """(whether the rows exist, whether the columns do); all in the first when columns have no loop of their own."""
        rows: Whole = Int(1)
        columns: Whole = Int(1)
        for a in spread.axes:
            piece = self.w.scope[a]
            if piece.full:
                continue
            here = below(spread.spot[a], piece.end)
            if a == spread.axes[-1] and spread.columns:
                columns = both(columns, here)
            else:
                rows = both(rows, here)
        return rows, columns

    # ------------------------------------------------------------ loads
    def unheld(self, only_axes: tuple[str, ...] | None = None) -> Iterator[Read]:
        """What the bodies read from memory and is not held yet: of values over `only_axes`, or all."""
        made = {s.stage for s in self.steps if isinstance(s, Close | Compute)}
        for s in self.steps:
            if not isinstance(s, Compute):
                continue
            for r in outermost(self.w.plan.program.stage(s.stage).body):
                if r.value in made or r in self.held:
                    continue
                if only_axes is None or set(axes_of(r)) <= set(only_axes):
                    yield r

    def _loads(self, spread: Spread, only_axes: tuple[str, ...] | None = None) -> tuple[Stmt, ...]:
        return tuple(s for r in self.unheld(only_axes) for s in self.load(r, spread))

    def source(self, r: Read, spread: Spread) -> tuple[Ref, DType, str]:
        """Where the vector of a value begins in memory, its dtype there, and how it is loaded."""
        w, v = self.w, self.w.plan.program.value(r.value)
        launches = w.plan.launches
        earlier = (k.stage for la in launches[: launches.index(w.launch)] for k in la.tile.works)
        if not w.plan.program.is_input(r.value) and r.value not in earlier:
            raise w.cannot(f"{r.value} is read where it is not complete: cut before it")
        missing = [a for a in axes_of(r) if a not in spread.spot]
        if missing:
            raise w.cannot(f"{r.value} has axes {', '.join(missing)}, which the elements made here do not have")
        at = {a: self._position(x, spread) for a, x in zip(v.axes, r.index, strict=True) if not isinstance(x, str)}
        return Ref(r.value, index_of(w, v.axes, {**spread.spot, **at})), v.dtype, w.how_to_load(r.value)

    def find(self, r: Read, spread: Spread) -> tuple[Stmt, ...]:
        """The i32 values that tell where a value is read, as whole numbers."""
        out: list[Stmt] = []
        for x in (x for e in r.computed for x in walk_expr(e)):
            if not isinstance(x, Read) or x in self.positions:
                continue
            out += self.find(x, spread)  # where that one is
            words, name = self.w.fresh("words"), self.w.fresh(f"{x.value}_here")
            source, _, how = self.source(x, spread)
            out += (word_regs(words, 4), fetched(Ref(words, Int(0)), 4, source, how))
            out.append(LetInt(name, IntLoad(words, Int(0))))
            self.positions[x] = IntVar(name)
        return tuple(out)

    def _position(self, e: Expr, spread: Spread) -> Whole:
        """A computed position, of the first element of a vector."""
        match e:
            case Const(v):
                return Int(int(v))
            case Axis(name):
                return spread.spot[name]
            case Read():
                return self.positions[e]
            case Apply(fn, (a, b)):
                return WHOLE[fn](self._position(a, spread), self._position(b, spread))
            case Apply():
                raise self.w.cannot(f"{e} is no position")

    def load(self, r: Read, spread: Spread) -> tuple[Stmt, ...]:
        """A vector of a value in registers of its own, or its one number."""
        there = self.w.plan.program.found(r)
        found = self.find(there, spread)
        source, dtype, how = self.source(there, spread)
        n = spread.width if r.index and r.index[-1:] == spread.axes[-1:] else 1
        name = self.w.fresh(f"{r.value}_here")
        self.held[r] = Ref(name, Int(0))
        return *found, Regs(name, "f32", n), *load(self.w, Ref(name, Int(0)), dtype, n, source, how)

    # ------------------------------------------------------------ elements
    def make(self, spread: Spread, sums: Sums, *, beyond: bool = False) -> tuple[Stmt, ...]:
        """A vector of every value of the chain. beyond: also where no such columns exist."""
        p, out = self.w.plan.program, list[Stmt]()
        for s in self.steps:
            stage = p.stage(s.stage)
            match s:
                case Close():
                    assert stage.monoid is not None
                    value = Axis(FINISHED) if FINISHED in sums[stage.out] else stage.monoid.finish
                    out += self._made(stage, value, spread, sums[stage.out])
                case Compute() if stage.reduces:
                    fold = self._folded(stage, spread)
                    out += only(self.exists(spread)[1], fold) if beyond else fold
                case Compute():
                    out += self._made(stage, stage.body, spread, {})
                case StoreStep() | StoreState():
                    pass
        return tuple(out)

    def stores(self, spread: Spread, sums: Sums) -> Iterator[tuple[Ref, DType, Ref]]:
        """Of everything that is stored: where a vector goes, its dtype there, its registers."""
        for s in self.steps:
            stage = self.w.plan.program.stage(s.stage)
            match s:
                case StoreStep():
                    at = index_of(self.w, stage.axes, spread.spot)
                    yield Ref(stage.out, at), stage.dtype, self.held[Read(stage.out, stage.axes)]
                case StoreState():
                    assert stage.monoid is not None
                    space = self.w.plan.workspace(stage.out)
                    for c, axes in stage.monoid.components(stage):
                        if c not in sums[stage.out]:
                            continue  # of rows: stored by the fold
                        if space and space.added:
                            yield Ref(stage.out, index_of(self.w, axes, spread.spot)), "f32", sums[stage.out][c]
                            continue
                        at = plus(part_start(self.w, stage, axes), index_of(self.w, axes, spread.spot))
                        yield Ref(parts_name(stage.out, c), at), "f32", sums[stage.out][c]
                case Close() | Compute():
                    pass

    def _folded(self, stage: Stage, spread: Spread) -> tuple[Stmt, ...]:
        """A vector of elements into the sums of its row."""
        i = counter("e", spread.width)
        lets: list[Stmt] = []
        element = self.number(stage.body, i, spread, {}, named(self.w, lets))
        take = self.statistics[stage.out].take(element)
        return unrolled("e", spread.width, (*lets, take))

    def made(self, stage: Stage, e: Expr, spread: Spread) -> tuple[Stmt, ...]:
        """A vector of a stage's value, which is `e` of what is held, in registers of its own."""
        return self._made(stage, e, spread, {})

    def _made(self, stage: Stage, e: Expr, spread: Spread, sums: Mapping[str, Ref]) -> tuple[Stmt, ...]:
        """A vector of the stage's value in registers of its own; no new ones when it is a sum as it stands."""
        if isinstance(e, Axis) and e.name in sums:
            self.held[Read(stage.out, stage.axes)] = sums[e.name]
            return ()
        n = spread.width if stage.axes[-1:] == spread.axes[-1:] else 1  # one number of the row
        name, i = self.w.fresh(f"{stage.out}_here"), counter("e", n)
        lets: list[Stmt] = []
        element = Store(name, i, self.number(e, i, spread, sums, named(self.w, lets)))
        self.held[Read(stage.out, stage.axes)] = Ref(name, Int(0))
        return Regs(name, "f32", n), *unrolled("e", n, (*lets, element))

    def number(
        self, e: Expr, i: Whole, spread: Spread, sums: Mapping[str, Ref], name_it: Callable[[Number], Number]
    ) -> Number:
        """Element i of a vector of an expression, of what is held."""
        match e:
            case Const(v):
                return Num(v)
            case Axis(name):
                if name in sums:
                    return Load(sums[name].view, plus(sums[name].at, i))
                moved = plus(spread.spot[name], i) if name == spread.axes[-1] else spread.spot[name]
                return Ramp(moved)
            case Read(_, index):
                vector = bool(index) and bool(spread.axes) and index[-1] == spread.axes[-1]
                held = self.held[e]
                return Load(held.view, plus(held.at, i) if vector else held.at)
            case Apply("floordiv" | "mod"):
                moved = plus(spread.spot[spread.axes[-1]], i) if spread.axes else i
                return Ramp(self._position(e, replace(spread, spot={**spread.spot, spread.axes[-1]: moved})))
            case Apply(fn, args):
                return function(fn, tuple(self.number(a, i, spread, sums, name_it) for a in args), name_it)


def index_of(w: Walk, axes: tuple[str, ...], spot: Mapping[str, Whole]) -> Whole:
    """Index of an element of a row-major value."""
    sizes = [length_of(w.plan.program.dim(a)) for a in axes]
    terms = [times(spot[a], product(tuple(sizes[i + 1 :]))) for i, a in enumerate(axes)]
    return plus(*terms)


# ---------------------------------------------------------------- workspaces
def part_start(w: Walk, stage: Stage, axes: tuple[str, ...], part: Whole | None = None) -> Whole:
    """Index of the first element of a part of a component: the part that this block leaves, or the one given."""
    sizes = tuple(length_of(w.plan.program.dim(a)) for a in axes)
    if part is None:
        space = w.plan.workspace(stage.out)
        assert space is not None
        part = w.part_index[space.axis]
    return times(part, product(sizes))


def fold_parts(stage: Stage, parts: Whole, *, at_once: bool = False) -> States:
    """A vector of each component folded over all parts of the workspace, in order. at_once: all are asked for before the first."""
    m = stage.monoid
    assert m is not None

    def make(w: Walk, spread: Spread) -> tuple[tuple[Stmt, ...], Mapping[str, str]]:
        names = {c: w.fresh(f"{stage.out}_{c}") for c, _ in m.state}
        news = {c: w.fresh(f"{stage.out}_{c}_part") for c, _ in m.state}
        part, out = IntVar("part_no"), list[Stmt]()
        # Components without the last axis are one number for a vector.
        width = {c: spread.width if spread.axes[-1] in axes else 1 for c, axes in m.components(stage)}
        for (c, _), identity in zip(m.state, m.identity, strict=True):
            out.append(Regs(names[c], "f32", width[c]))
            out += unrolled("e", width[c], (Store(names[c], counter("e", width[c]), Num(identity)),))
        body: list[Stmt] = []
        for c, axes in m.components(stage):
            at = plus(part_start(w, stage, axes, part), index_of(w, axes, spread.spot))
            start = Ref(parts_name(stage.out, c), at)
            body += [
                Regs(news[c], "f32", width[c]),
                *load(w, Ref(news[c], Int(0)), "f32", width[c], start, "ldg"),
            ]
        states: dict[str, Number] = {}
        for c in names:
            states |= {f"{side}_{c}": Load(x, counter("e", width[c])) for side, x in (("a", names[c]), ("b", news[c]))}
        combined = {c: over_states(x, states) for (c, _), x in zip(m.state, m.combine, strict=True)}
        for c in sorted(names, key=lambda c: -list(names).index(c)):  # the first component is read by the others
            body += unrolled("e", width[c], (Store(names[c], counter("e", width[c]), combined[c]),))
        out.append(For(part.name, Int(0), parts, 1, tuple(body), UNROLL if at_once else 1))
        for c in names:
            if width[c] < spread.width:
                one, names[c] = Load(names[c], Int(0)), w.fresh(f"{stage.out}_{c}_each")
                out += (
                    Regs(names[c], "f32", spread.width),
                    *unrolled("e", spread.width, (Store(names[c], counter("e", spread.width), one),)),
                )
        return tuple(out), names

    return make


def over_states(e: Expr, names: Mapping[str, Number]) -> Number:
    """An expression of a monoid, which knows nothing but states and constants."""
    match e:
        case Const(v):
            return Num(v)
        case Axis(name):
            return names[name]
        case Apply(fn, args):
            return function(fn, tuple(over_states(a, names) for a in args), lambda x: x)
        case Read(value):
            raise PlanError(f"a monoid's expression reads the value {value}")
