"""Contractions of few rows whose operands go from memory straight to registers: mma.sync with its operands exchanged.

Rows of an instruction are 16 columns n of B, its columns up to 8 rows m of A. A lane's place along k is its own choice, as
long as both operands make the same: lane c of four holds k = 8 c .. 8 c + 7 of 32, which serve two instructions of 16, so
that it loads 16 bytes of A, and of a row of B that lies along k, at once. Where B lies along n, a lane loads rows
k .. k + 7 of a piece of columns, and pairs of rows are zipped into operands. Loads of `slots` steps are under way while
earlier ones are multiplied. A may be made of what is loaded (`cuda_on_the_way.py`). Warps fold shares of k; their sums meet in
shared memory, are added in order, one element a thread. Rows beyond the last repeat it, columns beyond the last too; nobody
stores their sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product

from emmy.codegen.cpu_scope import length_of
from emmy.codegen.cuda_atoms import Fold
from emmy.codegen.cuda_copy import only
from emmy.codegen.cuda_on_the_way import WORDS, Rows, rows
from emmy.codegen.cuda_scope import Walk
from emmy.codegen.cuda_values import Folds, Spread, States
from emmy.codegen.kernel import (
    Call,
    Int,
    IntVar,
    LetInt,
    Load,
    Num,
    Store,
    View,
    Whole,
    below,
    least,
    minus,
    over,
    plus,
    times,
)
from emmy.codegen.kernel_gpu import ROLLED, SMEM, Do, For, Ref, Regs, Stmt, bits, counter, shifted, unrolled
from emmy.ir.beside import operands
from emmy.ir.gpu import sharers, thread_registers
from emmy.ir.moves.atom import mnk_axes
from emmy.ir.moves.direct_tiles import ROWS, STEP, vector_bytes
from emmy.ir.plan import Atom, Work
from emmy.ir.program import Stage

_VECTOR = 8  # elements of 16 bytes
_THREADS = 768  # of a multiprocessor: more add little to the loads under way


@dataclass(slots=True)
class Direct(Fold):
    """C[m,n] = sum over k of A[m,k] * B of a warp's share: `steps` of 32 along k, `tiles` atoms of `atom.n` columns.

    products: (stage, its B); several side by side read one A
    """

    w: Walk
    products: tuple[tuple[Stage, str], ...]
    atom: Atom
    rows: Rows
    along_k: bool
    tiles: int
    steps: int
    slots: int
    parts: int
    columns: int  # of the block
    base: int  # first byte of the shares
    preloaded: _Source | None = None  # where the operands are of which the first of B are under way

    # ------------------------------------------------------------ sizes
    @property
    def makes(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.rows.a,) if self.rows.made else ()

    @property
    def rides(self) -> Mapping[str, Fold]:  # type: ignore[override]
        return self.rows.sums

    @property
    def widest(self) -> int:  # type: ignore[override]
        return 1  # there are few elements, and many shares of each

    @property
    def shared(self) -> bool:  # type: ignore[override]
        return self.parts * self.w.sharing > 1

    @property
    def stage(self) -> Stage:
        """The first, which stands for all."""
        return self.products[0][0]

    @property
    def axes(self) -> tuple[str, str, str]:
        m, n, k = mnk_axes(self.stage)
        assert m is not None
        return m, n, k

    @property
    def vector(self) -> int:
        """Elements of B that a lane loads at once."""
        return vector_bytes(self.along_k, self.atom.n) // 2

    @property
    def loads(self) -> int:
        """Of B in a step, for one atom: two rows along k, or eight pieces of columns."""
        return 2 if self.along_k else _VECTOR

    @property
    def instructions(self) -> int:
        """Along n of one atom: 16 columns each."""
        return self.atom.n // 16

    @property
    def chains(self) -> int:
        """Sums of one element that turns are taken with: an instruction need not wait for the one before."""
        return 2 if self.tiles * self.instructions * len(self.products) == 1 else 1

    @property
    def words(self) -> int:
        """Registers of B's operands of a step."""
        return self.tiles * self.loads * self.vector // 2

    @property
    def pitch(self) -> int:
        """Words from one row of shared sums to the next: lanes of an instruction meet in few banks."""
        return self.columns + (4 if self.along_k else 1)

    @property
    def share_bytes(self) -> int:
        """Of the shares of one stage's sums."""
        return 4 * self.parts * ROWS * self.pitch

    def _sums(self, stage: Stage) -> str:
        return f"{stage.out}_sums"

    def _group(self) -> Whole:
        return shifted(self.w.lane(), 2)

    # ------------------------------------------------------------ steps
    def open(self) -> tuple[Stmt, ...]:
        count, out = self.chains * self.tiles * self.instructions * 4, list[Stmt]()
        for stage, _ in self.products:
            zero = (Store(self._sums(stage), IntVar("s"), Num(0.0)),)
            out += (Regs(self._sums(stage), "f32", count), *unrolled("s", count, zero))
        operands = (Regs(self._held(b), "b32", self.slots * self.words) for _, b in self.products)
        return (*out, *operands, *self.rows.regs(self.slots))

    def compute(self) -> tuple[Stmt, ...]:
        """A first fill of all slots; then every step is multiplied and its slot refilled, until no loads are left."""
        source = self.preloaded or self._source()
        slots, rest = self.slots, self.steps - self.slots
        laps, left = divmod(rest, slots)
        out = () if self.preloaded else (*source.lets, *self._fill_b(source, 0, slots, Int(0)))
        out += self.rows.begin()
        self.preloaded = None
        out += self._fill_a(source, 0, slots, Int(0))
        if laps:
            t = IntVar(self.w.fresh("step"))
            here, ahead = (source, t) if source.ragged else (self._moved(source, t), Int(0))
            lets = here.lets if here is not source else ()
            body = (*lets, *self._use(0, slots), *self._fill(here, 0, slots, plus(ahead, Int(slots))))
            out += (For(t.name, Int(0), Int(laps * slots), slots, body, ROLLED),)
        last = Int((laps + 1) * slots)
        return (*out, *self._use(0, slots), *self._fill(source, 0, left, last), *self._use(0, left))

    def preload(self) -> tuple[Stmt, ...]:
        """By plain loads: ptxas moves those of memory that nobody writes (ld.global.nc) behind griddepcontrol.wait."""
        source = self.preloaded = self._source()
        return (*source.lets, *self._fill_b(source, 0, self.slots, Int(0), plain=True))

    def close(self) -> tuple[Stmt, ...]:
        if self.chains == 1:
            return ()
        s, sums = IntVar("s"), self._sums(self.stage)
        both = Call("add", (Load(sums, s), Load(sums, plus(s, Int(4)))))
        return unrolled("s", 4, (Store(sums, s, both),))

    # ------------------------------------------------------------ operands
    def _held(self, value: str) -> str:
        return f"{value}_held"

    def _use(self, at: int, count: int) -> tuple[Stmt, ...]:
        s = plus(counter("s", count), Int(at))
        return unrolled("s", count, self._multiply(s)) if count else ()

    def _fill(self, source: _Source, at: int, count: int, step: Whole) -> tuple[Stmt, ...]:
        """Slots from `at` on with the operands of steps from `step` + `at` on."""
        return self._fill_b(source, at, count, step) + self._fill_a(source, at, count, step)

    def _fill_b(self, source: _Source, at: int, count: int, step: Whole, *, plain: bool = False) -> tuple[Stmt, ...]:
        s = plus(counter("s", count), Int(at))
        return unrolled("s", count, self._load_b(source, s, plus(step, s), plain))

    def _fill_a(self, source: _Source, at: int, count: int, step: Whole) -> tuple[Stmt, ...]:
        s = plus(counter("s", count), Int(at))
        return unrolled("s", count, self._load_a(source, s, plus(step, s)))

    def _source(self) -> _Source:
        """Where this lane's operands of the warp's share begin in memory."""
        w, (m, n, k) = self.w, self.axes
        lets: list[Stmt] = []
        length, second = length_of(w.plan.program.dim(k)), self.products[0][1]
        width = w.stride(second, n if self.along_k else k)  # elements from one row of B to the next

        def named(stem: str, x: Whole) -> Whole:
            name = w.fresh(stem)
            lets.append(LetInt(name, x))
            return IntVar(name)

        def view(value: str, at: Whole) -> str:
            name = w.fresh(f"{value}_from")
            lets.append(View(name, value, at))
            return name

        k_at = named(f"{k}_at", plus(w.scope[k].lo, w.warp_offset(k), times(bits(w.lane(), 3), Int(_VECTOR))))
        start, ragged = (k_at, None) if self._k_full() else (Int(0), k_at)
        row, a = self.rows.row, dict[str, str]()
        for v in self.rows.loads:
            beside = self._others(v, m, k)
            rows = times(row, w.stride(v, m)) if m in w.plan.program.value(v).axes else Int(0)
            a[v] = view(v, plus(beside, rows, start))
        lane = self._group() if self.along_k else times(self._group(), Int(self.vector))
        column = plus(w.scope[n].lo, w.warp_offset(n), lane)
        jumps = [(j, h) for j in range(self.tiles) for h in range(2 if self.along_k else 1)]
        views: dict[tuple[str, int, int], tuple[str, Whole]] = {}
        for b, (j, h) in product((b for _, b in self.products), jumps):
            jump = Int(self.atom.n * j + 8 * h)
            if w.scope[n].full and (b, 0, 0) in views:
                first = views[b, 0, 0][0]
                views[b, j, h] = first, times(jump, width) if self.along_k else jump
                continue
            here = plus(column, jump)
            if not w.scope[n].full:
                here = least(here, plus(w.scope[n].end, Int(-1 if self.along_k else -self.vector)))
            at = plus(times(here, width), start) if self.along_k else plus(times(start, width), here)
            views[b, j, h] = view(b, plus(self._others(b, n, k), at)), Int(0)
        return _Source(tuple(lets), a, views, ragged, length, width)

    def _others(self, value: str, *axes: str) -> Whole:
        """Elements of a value before the matrix along `axes` that this block reads."""
        return self.w.start(value, (a for a in self.w.plan.program.value(value).axes if a not in axes))

    def _moved(self, source: _Source, step: Whole) -> _Source:
        """The operands from a step on, as pointers: what is added to them are numbers that fit an instruction."""
        along = times(step, Int(STEP))
        names = {
            name: self.w.fresh(f"{name}_step")
            for name in dict.fromkeys((*source.a.values(), *(v for v, _ in source.b.values())))
        }
        rows = set(source.a.values())
        by = {name: along if name in rows or self.along_k else times(along, source.width) for name in names}
        lets = tuple(View(new, name, by[name]) for name, new in names.items())
        b = {at: (names[v], jump) for at, (v, jump) in source.b.items()}
        return replace(source, lets=lets, a={v: names[x] for v, x in source.a.items()}, b=b)

    def _k_full(self) -> bool:
        """Whether every step of every warp exists."""
        w, k = self.w, self.axes[2]
        at = next((i for i, x in enumerate(w.nest) if x.level == "warp" and x.axis == k), None)
        return w.scope[k].full and (at is None or w.plan.extent(w.nest[:at], k) % w.nest[at].step == 0)

    def _load_b(self, source: _Source, slot: Whole, step: Whole, plain: bool) -> tuple[Stmt, ...]:
        size, along, out = self.vector // 2, source.along(step), list[Stmt]()
        for _, b in self.products:
            helper = f"emmy_ldg_b{16 * self.vector}" + ("" if plain else self.w.how_to_load(b).removeprefix("ldg"))
            for j in range(self.tiles):
                for i in range(self.loads):
                    view, jump = source.b[b, j, i if self.along_k else 0]
                    at = plus(along, jump) if self.along_k else plus(times(plus(along, Int(i)), source.width), jump)
                    to = plus(times(slot, Int(self.words)), Int((j * self.loads + i) * size))
                    out.append(Do(helper, (Ref(self._held(b), to), Ref(view, at))))
        return tuple(out)

    def _load_a(self, source: _Source, slot: Whole, step: Whole) -> tuple[Stmt, ...]:
        ends = () if source.ragged is None else (below(plus(source.ragged, times(step, Int(STEP))), source.length),)
        helper = "emmy_ldg_b128_if" if ends else "emmy_ldg_b128"  # zeros: B's last elements repeat
        return tuple(
            Do(helper, (Ref(self.rows.held(v), times(slot, Int(WORDS))), Ref(view, source.along(step)), *ends))
            for v, view in source.a.items()
        )

    def _multiply(self, slot: Whole) -> tuple[Stmt, ...]:
        """The two instructions along k of every 16 columns of a slot."""
        w = self.w
        made, operand = self.rows.operand(slot)
        out = list(made)
        dtype, size = w.plan.program.value(self.rows.a).dtype, self.vector // 2
        every = product(range(2), range(self.tiles), range(self.instructions), self.products)
        for half, j, i, (stage, value) in every:

            def word(load: int, at: int, j: int = j, held: str = self._held(value)) -> Load:
                return Load(held, plus(times(slot, Int(self.words)), Int((j * self.loads + load) * size + at)))

            rows = w.fresh("rows")
            out.append(Regs(rows, "b32", 4))
            if self.along_k:
                for q in range(4):  # the lower eight rows and the upper ones, of two k, then of the next two
                    out.append(Store(rows, Int(q), word(q % 2, 2 * half + q // 2)))
            else:
                for q in range(4):  # the even columns' elements of two rows, the odd columns', then of the next two
                    first = 4 * half + 2 * (q // 2)
                    pair = (word(first, i), word(first + 1, i))
                    out.append(Store(rows, Int(q), Call(f"{('low', 'high')[q % 2]}_halves", pair)))
            to = Ref(self._sums(stage), Int((j * self.instructions + i + half * (self.chains - 1)) * 4))
            b = Ref(operand.view, plus(operand.at, Int(2 * half)))
            out.append(Do(f"emmy_mma_f32_{dtype}", (to, Ref(rows, Int(0)), b)))
        return tuple(out)

    # ------------------------------------------------------------ sums
    def _place(self) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...], Whole, Whole, Whole]:
        """(loops over columns, over rows, a sum's row and column in the warp's tile, its register)."""
        j, p, h, r = counter("j", self.tiles), counter("p", self.instructions), IntVar("h"), IntVar("r")
        if self.along_k:
            column = plus(times(j, Int(16)), times(h, Int(8)), self._group())
        else:
            column = plus(times(j, Int(self.atom.n)), times(self._group(), Int(self.vector)), times(p, Int(2)), h)
        row = plus(times(bits(self.w.lane(), 3), Int(2)), r)
        at = plus(times(plus(times(j, Int(self.instructions)), p), Int(4)), times(h, Int(2)), r)
        return (("j", self.tiles), ("p", self.instructions), ("h", 2)), (("r", 2),), row, column, at

    def spread(self) -> tuple[Spread, Mapping[str, Ref]]:
        (m, n, _), w = self.axes, self.w
        columns, rows, row, column, at = self._place()
        spot = {a: w.scope[a].lo for a in self.stage.axes}
        spot |= {m: plus(w.scope[m].lo, row), n: plus(w.scope[n].lo, w.warp_offset(n), column)}
        sums = {stage.out: Ref(self._sums(stage), at) for stage, _ in self.products}
        return Spread(self.stage.axes, columns, rows, spot, 1, Int(1), None, (4, 8, 16)), sums

    def _shared(self, number: int, part: Whole, row: Whole, column: Whole) -> Ref:
        """Place of a sum of the product of that number."""
        word = plus(times(plus(times(part, Int(ROWS)), row), Int(self.pitch)), column)
        return Ref(SMEM, plus(times(word, Int(4)), Int(self.base + number * self.share_bytes)))

    def share(self) -> tuple[Stmt, ...]:
        w, (m, n, k) = self.w, self.axes
        columns, rows, row, column, at = self._place()
        step = next((x.step for x in w.nest if x.level == "warp" and x.axis == k), 1)
        part = w.let("part_of_k", over(w.warp_offset(k), Int(step)))
        body: tuple[Stmt, ...] = ()
        for i, (stage, _) in enumerate(self.products):
            word, to = w.fresh("word"), self._shared(i, part, row, plus(w.warp_offset(n), column))
            body += (
                Regs(word, "b32", 1),
                Store(word, Int(0), Call("as_b32", (Load(self._sums(stage), at),))),
                Do("emmy_sts_b32", (to, Ref(word, Int(0)))),
            )
        if not w.scope[m].full:
            body = only(below(plus(w.scope[m].lo, row), w.scope[m].end), body)
        for var, count in reversed((*columns, *rows)):
            body = unrolled(var, count, body)
        return self.close() + body

    def gathered(self) -> Folds:
        return {stage.out: self._gathered(i, stage) for i, (stage, _) in enumerate(self.products)}

    def _gathered(self, number: int, stage: Stage) -> States:
        m, n, _ = self.axes
        assert stage.monoid is not None
        component = stage.monoid.state[0][0]

        def make(w: Walk, spread: Spread) -> tuple[tuple[Stmt, ...], Mapping[str, str]]:
            name, words = w.fresh(stage.out + "_all"), w.fresh("words")
            part, rank, e = counter("part_no", self.parts), counter("rank", w.sharing), counter("e", spread.width)
            row, column = minus(spread.spot[m], w.scope[m].lo), minus(spread.spot[n], w.scope[n].lo)
            from_ = self._shared(number, part, row, plus(column, e))
            word = plus(times(rank, Int(self.parts)), part)
            load = (
                Do("emmy_lds_b32", (Ref(words, word), from_))
                if w.sharing == 1
                else Do("emmy_ld_rank_b32", (Ref(words, word), from_, rank))
            )
            add = Call("add", (Load(name, e), Call("as_f32", (Load(words, word),))))

            def each(body: Stmt) -> tuple[Stmt, ...]:
                return unrolled("rank", w.sharing, unrolled("part_no", self.parts, (body,)))

            element = (Store(name, e, Num(0.0)), *each(load), *each(Store(name, e, add)))
            regs = (Regs(words, "b32", self.parts * w.sharing), Regs(name, "f32", spread.width))
            return (*regs, *unrolled("e", spread.width, element)), {component: name}

        return make


@dataclass(frozen=True, slots=True)
class _Source:
    """A lane's operands in memory: where rows for A and each of B's rows or columns begin, and how far on from there.

    ragged: the lane's first k, where steps may lie beyond the end; views then begin at k = 0.
    """

    lets: tuple[Stmt, ...]
    a: Mapping[str, str]
    b: Mapping[tuple[str, int, int], tuple[str, Whole]]
    ragged: Whole | None
    length: Whole
    width: Whole

    def along(self, step: Whole) -> Whole:
        """Elements along k from the views' begin to a step; those beyond the end become the last."""
        if self.ragged is None:
            return times(step, Int(STEP))
        return least(plus(self.ragged, times(step, Int(STEP))), plus(self.length, Int(-_VECTOR)))


def direct(w: Walk, works: tuple[Work, ...]) -> Direct | None:
    """What the direct atom of works side by side makes; None for others. Raises PlanError when no code is generated for it."""
    work, stages = works[0], tuple(w.plan.program.stage(x.stage) for x in works)
    stage = stages[0]
    atom = next((a for a in work.atoms if a.stage == stage.out and a.name == "direct"), None)
    if atom is None:
        return None
    m, n, k = mnk_axes(stage)
    firsts, seconds = operands(w.plan.program, (s.out for s in stages))
    if len(firsts) > 1:
        raise w.cannot(
            f"{atom.name} reads one value by rows, {', '.join(s.out for s in stages)} read {', '.join(firsts)}"
        )
    assert m is not None
    loops = tuple(x for x in w.nest if x.level in ("grid", "cluster", "serial", "warp"))
    if len(loops) < len(w.nest) or sum(x.level == "warp" and x.axis == k for x in loops) > 1:
        raise w.cannot(f"{atom.name} shares {k} among warps once, and nothing among lanes")
    size = {x: w.plan.extent(loops, x) for x in (m, n, k)}
    for axis, step in ((m, atom.m), (n, atom.n), (k, atom.k)):
        if size[axis] % step or (axis == m and size[m] != ROWS):
            raise w.cannot(f"{atom.name} takes {axis} by {step}, a warp has {size[axis]}")
    steps, parts = size[k] // STEP, sharers(w.plan, w.nest, stage)
    columns = w.scope[n].size
    found = Direct(
        w,
        tuple(zip(stages, seconds, strict=True)),
        atom,
        rows(w, stage, firsts[0]),
        w.plan.program.value(seconds[0]).axes[-1] == k,
        size[n] // atom.n,
        steps,
        min(work.unroll, steps),
        parts,
        columns,
        0,
    )
    if found.shared:
        found.base = w.allocate(len(stages) * found.share_bytes)
    return found


def blocks_together(w: Walk) -> int:
    """Blocks of the launch that a multiprocessor is to hold; 1 unless the atom is direct.

    Told so, the compiler keeps to the registers that the loads under way need. Else it would move every load of a short
    loop to the front, and one block would take the place of two.
    """
    for work in w.launch.tile.works:
        atom = next((a for a in work.atoms if a.stage == work.stage and a.name == "direct"), None)
        if atom:
            stage = w.plan.program.stage(work.stage)
            need = thread_registers(w.plan, w.launch, work, atom, mnk_axes(stage))
            return max(1, min(w.target.regs_sm // (-(-need // 8) * 8), _THREADS) // w.threads)
    return 1
