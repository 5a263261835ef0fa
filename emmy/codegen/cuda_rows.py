"""Rows on a GPU: elements that stay in registers while their row is folded, finished and stored. Emits no wait of its own.

A thread's vectors of a row are numbered; what it loads of them are words in one array, what it makes of them numbers in
another, so that all loads are under way before the first is used, and every row is read once. Per-row numbers are arrays
with a place for each of the thread's rows, the same in all threads that share the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from emmy.codegen.cpu_fold import parts_name
from emmy.codegen.cuda_copy import only
from emmy.codegen.cuda_scope import Walk
from emmy.codegen.cuda_statistic import Statistic
from emmy.codegen.cuda_values import Chain, Spread, fold_parts, index_of, part_start
from emmy.codegen.cuda_vector import WIDEST, fetched, named, store, unpacked
from emmy.codegen.kernel import Int, Load, Store, Whole, below, both, over, plus, rest, same, times
from emmy.codegen.kernel_gpu import Ref, Regs, Stmt, bits, counter, unrolled
from emmy.codegen.steps import Close, Compute, FoldParts, Gather, Open, Preload, Share, Step, StoreState
from emmy.codegen.steps import Store as StoreStep
from emmy.ir.dtype import size_bytes
from emmy.ir.expr import Expr, Read, axes_of, outermost
from emmy.ir.gpu import WARP, registers_at_launch, sharers, statistic_bytes
from emmy.ir.program import Stage
from emmy.ir.row_tiles import RowTile

_ROW, _COLUMN = "row", "c"


@dataclass(slots=True)
class Rows:
    """The rows of one block, as one thread has them."""

    w: Walk
    tile: RowTile
    spread: Spread
    chain: Chain
    words: dict[Read, str] = field(default_factory=dict)  # what is read along the columns -> words of all vectors
    folds: dict[str, Statistic] = field(default_factory=dict)

    # ------------------------------------------------------------ places
    @property
    def _row(self) -> Whole:
        at: Whole = Int(0)
        for var, n in self.spread.rows:
            at = plus(times(at, Int(n)), counter(var, n))
        return at

    def _vector(self, r: Read) -> Whole:
        """The number of the vector at hand among those of a value."""
        column = counter(*self.spread.columns[0])
        return column if self._once(r) else plus(times(self._row, Int(self.tile.vectors)), column)

    def _once(self, r: Read) -> bool:
        """Whether all rows have the same of it."""
        return not set(axes_of(r)) & set(self.tile.outer)

    def _by_row(self, r: Read) -> bool:
        """Whether a row has one number of it, or all rows do."""
        return self.tile.last not in axes_of(r)

    # ------------------------------------------------------------ loops
    def _rows(self, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        for var, n in reversed(self.spread.rows):
            body = unrolled(var, n, body)
        return body

    def _each_row(self, body: tuple[Stmt, ...], *more: Whole) -> tuple[Stmt, ...]:
        """`body` for every row of the thread that exists."""
        there = self.chain.exists(self.spread)[0]
        for x in more:
            there = both(there, x)
        return self._rows(only(there, body))

    def _columns(self, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        there = both(self.spread.within, self.chain.exists(self.spread)[1])
        return unrolled(*self.spread.columns[0], only(there, body))

    # ------------------------------------------------------------ steps
    def step(self, s: Step) -> tuple[Stmt, ...] | None:
        """What a step alone does; None for those that are not about rows, or make elements."""
        match s:
            case Preload(name):
                stage = self._stage(name)
                return self._loads(r for r in outermost(stage.body) if self.w.plan.program.is_fixed(r))
            case Open(name):
                return self._open(name)
            case Share(name):
                return self.folds[name].share()
            case Gather(name):
                return self._gather(name)
            case FoldParts(name):
                return self._fold_parts(name)
            case Close(name):
                return self._close(name)
            case StoreState(name):
                return self._store_state(name)
            case Compute(name) if self._per_row(name):
                return self._compute_row(name)
            case StoreStep(name) if self._per_row(name):
                return self._store_row(name)
            case _:
                return None

    def makes_elements(self, s: Step) -> bool:
        """Whether a step is done for each vector: neighbours of that kind share a walk over them."""
        return isinstance(s, Compute | StoreStep) and not self._per_row(s.stage)

    def _stage(self, name: str) -> Stage:
        return self.w.plan.program.stage(name)

    def _per_row(self, name: str) -> bool:
        s = self._stage(name)
        return s.axes == self.tile.outer and (not s.reduces or name not in self.folds or name in self._closed)

    @property
    def _closed(self) -> set[str]:
        return {r.value for r in self.chain.held}

    # ------------------------------------------------------------ loads
    def _loads(self, reads: Iterator[Read] | tuple[Read, ...]) -> tuple[Stmt, ...]:
        """Whatever of these is not in registers yet, all vectors at once."""
        new = [r for r in dict.fromkeys(reads) if r not in self.words and r not in self.chain.held]
        new = [r for r in new if r.value not in self.tile.made]
        out: list[Stmt] = [self._words(r) for r in new if not self._by_row(r)]
        for r in (r for r in new if self._by_row(r)):
            name = self.w.fresh(f"{r.value}_row")
            out.append(Regs(name, "f32", 1 if self._once(r) else self.tile.rows))
            at = Int(0) if self._once(r) else self._row
            body = self.chain.load(r, self.spread)
            body = (*body, Store(name, at, Load(self.chain.held[r].view, Int(0))))
            self.chain.positions.clear()
            out += body if self._once(r) else self._each_row(body)
            self.chain.held[r] = Ref(name, at)
        once = [r for r in new if not self._by_row(r) and self._once(r)]
        each = [r for r in new if not self._by_row(r) and not self._once(r)]
        if once:
            out += self._walked(once)
        if each:
            out += self._each_row(self._walked(each))
        return tuple(out)

    def _walked(self, reads: list[Read]) -> tuple[Stmt, ...]:
        """A row's vectors of each to words; where they are is found once for the row, if it can be."""
        outside = [r for r in reads if all(self.tile.last not in axes_of(x) for x in r.computed)]
        found = tuple(s for r in outside for s in self.chain.find(r, self.spread))
        inner = tuple(s for r in reads for s in (*self.chain.find(r, self.spread), *self._fetch(r)))
        self.chain.positions.clear()
        return (*found, *self._columns(inner))

    def _words(self, r: Read) -> Regs:
        self.words[r] = self.w.fresh(f"{r.value}_row")
        item = size_bytes(self.w.plan.program.value(r.value).dtype)
        small = item * self.tile.width == 2
        return Regs(self.words[r], "b16" if small else "b32", self.tile.words(r))

    def _fetch(self, r: Read) -> tuple[Stmt, ...]:
        """One vector to its words, 16 bytes at a time."""
        source, dtype, how = self.chain.source(r, self.spread)
        item = size_bytes(dtype)
        wide = min(self.tile.width, WIDEST // item)
        out = []
        for first in range(0, self.tile.width, wide):
            here = Ref(self.words[r], plus(self._first_word(r), Int(first * item // 4)))
            out.append(fetched(here, wide * item, Ref(source.view, plus(source.at, Int(first))), how))
        return tuple(out)

    def _first_word(self, r: Read) -> Whole:
        item = size_bytes(self.w.plan.program.value(r.value).dtype)
        return times(self._vector(r), Int(max(1, self.tile.width * item // 4)))

    # ------------------------------------------------------------ elements
    def elements(self, steps: tuple[Step, ...]) -> tuple[Stmt, ...]:
        """Steps that make, fold and store elements, in one walk over the thread's vectors."""
        stages = [self._stage(s.stage) for s in steps if isinstance(s, Compute)]
        every = [r for s in stages for r in outermost(s.body)]
        constants = (r for r in self.tile.loaded if self.w.plan.program.is_fixed(r))
        out: list[Stmt] = [*self._loads((*constants, *every))]
        keep = {s.out for s in self.tile.kept}
        body: list[Stmt] = []
        before = dict(self.chain.held)
        for r in dict.fromkeys(r for r in every if r in self.words):
            name = self.w.fresh(f"{r.value}_here")
            dtype = self.w.plan.program.value(r.value).dtype
            words = Ref(self.words[r], self._first_word(r))
            body += (Regs(name, "f32", self.tile.width), *unpacked(Ref(name, Int(0)), dtype, self.tile.width, words))
            self.chain.held[r] = Ref(name, Int(0))
        for s in steps:
            assert isinstance(s, Compute | StoreStep)
            stage = self._stage(s.stage)
            if isinstance(s, StoreStep):
                at = index_of(self.w, stage.axes, self.spread.spot)
                body += store(self.w, Ref(stage.out, at), stage.dtype, self.tile.width, self.chain.held[read_of(stage)])
            elif stage.reduces:
                body += self._take(stage)
            else:
                body += self._element(stage, out, before if stage.out in keep else None)
        self.chain.held = before
        return (*out, *self._each_row(self._columns(tuple(body))))

    def _element(self, stage: Stage, out: list[Stmt], kept: dict[Read, Ref] | None) -> tuple[Stmt, ...]:
        """A vector of a stage, in registers of its own; where it is kept, in those of all vectors."""
        name, base = self.w.fresh(f"{stage.out}_here"), Int(0)
        regs = Regs(name, "f32", self.tile.width)
        at: Whole = base
        if kept is not None:
            out.append(Regs(name, "f32", self.tile.rows * self.tile.vectors * self.tile.width))
            at = times(
                plus(times(self._row, Int(self.tile.vectors)), counter(*self.spread.columns[0])), Int(self.tile.width)
            )
            kept[read_of(stage)] = Ref(name, at)
        i = counter("e", self.tile.width)
        lets: list[Stmt] = []
        number = self.chain.number(stage.body, i, self.spread, {}, named(self.w, lets))
        self.chain.held[read_of(stage)] = Ref(name, at)
        made = unrolled("e", self.tile.width, (*lets, Store(name, plus(at, i), number)))
        return made if kept is not None else (regs, *made)

    def _take(self, stage: Stage) -> tuple[Stmt, ...]:
        """A vector of elements into the state of its row."""
        lets: list[Stmt] = []
        i = counter("e", self.tile.width)
        element = self.chain.number(stage.body, i, self.spread, {}, named(self.w, lets))
        return unrolled("e", self.tile.width, (*lets, self.folds[stage.out].take(element)))

    # ------------------------------------------------------------ rows
    def _open(self, name: str) -> tuple[Stmt, ...]:
        stage, t = self._stage(name), self.w.launch.tile
        combined = t.work(name).combine
        parts = 1 if combined else sharers(self.w.plan, self.w.nest, stage)
        base = self.w.allocate(statistic_bytes(self.w.plan, t, stage)) if parts > 1 else 0
        self.folds[name] = Statistic(self.w, stage, self.spread, parts, base)
        return self.folds[name].open()

    def _gather(self, name: str) -> tuple[Stmt, ...]:
        """The state of each row, of all that share it."""
        fold = self.folds[name]
        body, made = fold.gathered()[name](self.w, self._a_row)
        (all_of,) = made.values()
        return self._each_row((*body, Store(fold.states, self._row, Load(all_of, Int(0)))))

    def _fold_parts(self, name: str) -> tuple[Stmt, ...]:
        space = self.w.plan.workspace(name)
        assert space is not None
        body, made = fold_parts(self._stage(name), space.parts)(self.w, self._a_row)
        (all_of,) = made.values()
        return self._each_row((*body, Store(self.folds[name].states, self._row, Load(all_of, Int(0)))))

    def _close(self, name: str) -> tuple[Stmt, ...]:
        """The number that each row's state stands for."""
        fold, stage = self.folds[name], self._stage(name)
        m = stage.monoid
        assert m is not None
        joined = () if fold.shared or self.w.launch.tile.work(name).combine else fold.close()
        states = {m.state[0][0]: Ref(fold.states, self._row)}
        return (*joined, *self._number(stage, m.finish, states))

    def _compute_row(self, name: str) -> tuple[Stmt, ...]:
        stage = self._stage(name)
        return (*self._loads(tuple(outermost(stage.body))), *self._number(stage, stage.body, {}))

    def _number(self, stage: Stage, e: Expr, states: dict[str, Ref]) -> tuple[Stmt, ...]:
        """A stage's number of each row."""
        name, lets = self.w.fresh(f"{stage.out}_row"), list[Stmt]()
        number = self.chain.number(e, Int(0), self._a_row, states, named(self.w, lets))
        self.chain.held[read_of(stage)] = Ref(name, self._row)
        return Regs(name, "f32", self.tile.rows), *self._rows((*lets, Store(name, self._row, number)))

    @property
    def _a_row(self) -> Spread:
        """The row at hand."""
        spot = {a: self.spread.spot[a] for a in self.tile.outer}
        return Spread(self.tile.outer, (), self.spread.rows, spot, 1, Int(1))

    @property
    def _speaks(self) -> Whole:
        """Whether a thread stores for all that share its rows."""
        first = same(self.w.warp_offset(self.tile.last), Int(0))
        return both(first, same(_lane(self.w, self.tile), Int(0)))

    def _store_row(self, name: str) -> tuple[Stmt, ...]:
        stage = self._stage(name)
        at = index_of(self.w, stage.axes, self.spread.spot)
        stored = store(self.w, Ref(stage.out, at), stage.dtype, 1, self.chain.held[read_of(stage)])
        return self._each_row(stored, self._speaks)

    def _store_state(self, name: str) -> tuple[Stmt, ...]:
        stage, fold = self._stage(name), self.folds[name]
        assert stage.monoid is not None
        ((component, axes),) = stage.monoid.components(stage)
        at = plus(part_start(self.w, stage, axes), index_of(self.w, axes, self.spread.spot))
        stored = store(self.w, Ref(parts_name(name, component), at), "f32", 1, Ref(fold.states, self._row))
        return (*(() if fold.shared else fold.close()), *self._each_row(stored, self._speaks))


def read_of(stage: Stage) -> Read:
    """The stage's value, read where it is made."""
    return Read(stage.out, stage.axes)


def rows(w: Walk, tile: RowTile) -> Rows:
    """The rows of a launch's block. Raises PlanError where a thread's registers do not hold them."""
    if not tile.fits(w.target):
        allowed = registers_at_launch(w.plan, w.launch, w.target)
        raise w.cannot(f"a thread keeps its rows in about {tile.registers} registers, it has {allowed}: more warps")
    spread = _spread(w, tile)
    return Rows(w, tile, spread, Chain(w, ()))


def _spread(w: Walk, tile: RowTile) -> Spread:
    """Which vectors a thread has: neighbouring lanes have neighbouring ones."""
    spot: dict[str, Whole] = {}
    loops: list[tuple[str, int]] = []
    for a in tile.outer:
        n = w.plan.extent(w.nest, a)
        var = f"{_ROW}_{a}" if len(tile.outer) > 1 else _ROW
        loops.append((var, n))
        spot[a] = plus(w.scope[a].lo, w.warp_offset(a), _lane_offset(w, tile, a), counter(var, n))
    vectors, last = tile.columns // tile.width, tile.last
    number = plus(_lane(w, tile), times(counter(_COLUMN, tile.vectors), Int(tile.lanes)))
    spot[last] = plus(w.scope[last].lo, w.warp_offset(last), times(number, Int(tile.width)))
    within = below(number, Int(vectors)) if vectors % tile.lanes else Int(1)
    inside = w.scope[last]
    if inside.size % tile.columns:
        within = both(within, below(spot[last], plus(inside.lo, Int(inside.size))))
    across = tuple(1 << i for i in range((tile.lanes - 1).bit_length()))
    return Spread(tile.axes, ((_COLUMN, tile.vectors),), tuple(loops), spot, tile.width, Int(1), None, across, within)


def _lane(w: Walk, tile: RowTile) -> Whole:
    """The thread's number among the lanes that share its rows."""
    return bits(w.lane(), tile.lanes - 1) if tile.lanes < WARP else w.lane()


def _lane_offset(w: Walk, tile: RowTile, axis: str) -> Whole:
    """Where a thread's group of lanes begins along an axis, inside its warp's piece."""
    left: Whole = over(w.lane(), Int(tile.lanes))
    out: list[Whole] = []
    for i in reversed(range(len(w.nest))):
        x = w.nest[i]
        if x.level != "lane":
            continue
        n = w.plan.count(w.nest, i)
        if x.axis == axis and n > 1:
            out.append(times(rest(left, Int(n)), Int(x.step)))
        left = over(left, Int(n))
    return w.let(f"lanes_{axis}", plus(*out))
