"""Contractions of a block by its warps: operands from slots of shared memory, sums in registers. One class an atom.

Every atom answers the same questions: what to declare and clear (`open`), one piece of the folded axis (`compute`), and
which elements of the block a thread's sums are (`spread`). To add an instruction, add a class and its name to KINDS in `cuda_tile`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Protocol

from emmy.codegen.cuda_cluster import Exchanged, exchanged
from emmy.codegen.cuda_copy import only
from emmy.codegen.cuda_scope import Ring, Walk
from emmy.codegen.cuda_values import Folds, Spread
from emmy.codegen.cuda_vector import load
from emmy.codegen.kernel import Call, Int, IntVar, LetInt, Load, Num, Store, Whole, below, over, plus, rest, same, times
from emmy.codegen.kernel_gpu import SMEM, Do, For, Ref, Regs, Stmt, bits, counter, shifted, unrolled
from emmy.ir.expr import Read, factors
from emmy.ir.gpu import refuse_several
from emmy.ir.moves.atom import mnk_axes
from emmy.ir.plan import AGENTS, Atom, Work
from emmy.ir.program import Stage


class Fold(ABC):
    """A stage, or several side by side, folded by the warps of a block, their sums in registers from `open` to `close`."""

    __slots__ = ()
    widest = 8  # elements that a thread finishes at once of sums that it gathers
    shared = False  # whether warps fold shares of one element, which meet in shared memory
    makes: tuple[str, ...] = ()  # stages that it makes on the way to its instructions
    rides: Mapping[str, Fold] = MappingProxyType({})  # folds of what it loads, by stage

    @abstractmethod
    def open(self) -> tuple[Stmt, ...]:
        """Registers for sums, holding the sum of nothing, and for operands."""

    @abstractmethod
    def compute(self) -> tuple[Stmt, ...]:
        """The block in scope, folded into the sums."""

    @abstractmethod
    def close(self) -> tuple[Stmt, ...]:
        """Whatever makes the sums f32 numbers in registers."""

    @abstractmethod
    def spread(self) -> tuple[Spread, Mapping[str, Ref]]:
        """Where a thread's sums stand in the block, and the registers of one vector of those of each stage."""

    @abstractmethod
    def preload(self) -> tuple[Stmt, ...]:
        """The first operands that no launch writes, from memory to registers; `compute` then begins with them."""

    @abstractmethod
    def share(self) -> tuple[Stmt, ...]:
        """The sums to shared memory."""

    @abstractmethod
    def gathered(self) -> Folds:
        """What makes a vector of complete sums of each stage from those that all warps shared."""


@dataclass(frozen=True, slots=True)
class Product:
    """A stage C[m,n] = sum over k of A * B."""

    stage: Stage
    a: Ring
    b: Ring
    exchange: Exchanged | None  # with the other blocks of a cluster, or the other threads of this one

    @property
    def sums(self) -> str:
        return f"{self.stage.out}_sums"


@dataclass(slots=True)
class Contraction(Fold):
    """Products side by side, mostly one, of one block, of which each warp has `mt` x `nt` atoms, `kt` of them along k.

    An operand that several of them read is read once.
    """

    w: Walk
    products: tuple[Product, ...]
    atom: Atom
    m: str
    n: str
    k: str
    mt: int
    nt: int
    kt: int
    anew: bool = False  # whether each piece's sums begin with its first step, whatever the registers hold
    any_major: ClassVar[bool] = False  # whether A may lie along its own axis

    @property
    def stage(self) -> Stage:
        """That of the first product, which stands for all."""
        return self.products[0].stage

    @property
    def a(self) -> Ring:
        """The first product's first operand; all rings turn together."""
        return self.products[0].a

    @property
    def registers(self) -> Mapping[str, str]:
        """Stage -> its sums."""
        return {p.stage.out: p.sums for p in self.products}

    @property
    def firsts(self) -> tuple[Ring, ...]:
        """First operands, each once."""
        return tuple({p.a.value: p.a for p in self.products}.values())

    @property
    def seconds(self) -> tuple[Ring, ...]:
        """Second operands, each once."""
        return tuple({p.b.value: p.b for p in self.products}.values())

    def fetch(self, ahead: int) -> tuple[Stmt, ...]:
        """The first operands of the fill `ahead` to registers; `compute` then begins with the second."""
        raise self.w.cannot(f"{self.atom.name} does not read operands of {self.stage.out} ahead")

    def finish(self) -> tuple[Stmt, ...]:
        """What `compute` left after a fetch: the last operands, multiplied."""
        raise self.w.cannot(f"{self.atom.name} does not read operands of {self.stage.out} ahead")

    def settle(self, pending: int) -> tuple[Stmt, ...]:
        """All but the last `pending` pieces that `compute` began are done."""
        raise self.w.cannot(f"{self.atom.name} is done when it ends: {self.stage.out} has nothing to settle")

    @property
    def shared(self) -> bool:  # type: ignore[override]
        return self.products[0].exchange is not None

    def preload(self) -> tuple[Stmt, ...]:
        raise self.w.cannot(f"{self.atom.name} reads operands of {self.stage.out} from shared memory")

    def share(self) -> tuple[Stmt, ...]:
        spread, sums = self.spread()
        out = self.close()
        for p in self.products:
            if p.exchange is None:
                raise self.w.cannot(f"{self.atom.name} has no code for warps that share the folding of {p.stage.out}")
            out += p.exchange.give(spread, sums[p.stage.out])
        return out

    def gathered(self) -> Folds:
        return {p.stage.out: p.exchange.take() for p in self.products if p.exchange is not None}

    def _now(self, ahead: int = 0) -> tuple[tuple[Stmt, ...], Mapping[str, Whole]]:
        """(statements, the first byte of each operand's slot of the fill `ahead`)."""
        out: list[Stmt] = []
        at: dict[str, Whole] = {}
        for ring in (*self.firsts, *self.seconds):
            slot = ring.slot(ahead)
            if not isinstance(slot, Int):
                name = self.w.fresh(f"{ring.value}_next" if ahead else f"{ring.value}_now")
                out.append(LetInt(name, slot))
                slot = IntVar(name)
            at[ring.value] = slot
        return tuple(out), at

    def _cleared(self, count: int) -> tuple[Stmt, ...]:
        """So many registers for the sums of each product, holding zeros."""
        zero = Num(0.0)
        clear = (
            (Regs(p.sums, "f32", count), *unrolled("e", count, (Store(p.sums, IntVar("e"), zero),)))
            for p in self.products
        )
        return tuple(s for stmts in clear for s in stmts)

    def spot(self, row: Whole, column: Whole) -> dict[str, Whole]:
        w = self.w
        spot = {a: w.scope[a].lo for a in self.stage.axes}
        spot[self.m] = plus(w.scope[self.m].lo, w.warp_offset(self.m), row)
        spot[self.n] = plus(w.scope[self.n].lo, w.warp_offset(self.n), column)
        return spot

    def _lane(self, ring: Ring, own: str, row: Whole, column: Whole) -> Whole:
        """Byte in a slot at which this lane's first row of the first atom begins; made once."""
        layout, off = ring.layout, self.w.warp_offset(own)
        at = layout.at(row, column)
        if ring.rows == own:
            at = layout.beyond(at, off, Int(0))
        else:  # a panel never crosses the border of two warps' columns
            at = layout.beyond(at, Int(0), off)
        return self.w.let("lane_at", at)

    @property
    def _ij(self) -> tuple[Whole, Whole]:
        """The number of an atom in the warp's tile: its row, its column."""
        return counter("i", self.mt), counter("j", self.nt)

    def _tiles(self, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        """The body for every atom of the warp's tile: rows i, columns j."""
        return unrolled("i", self.mt, unrolled("j", self.nt, body))


class Fragments(Protocol):
    """Sums of a stage in registers of that name, by rows of `mt` matrix atoms of a warp."""

    w: Walk
    mt: int

    @property
    def stage(self) -> Stage: ...

    @property
    def registers(self) -> Mapping[str, str]: ...

    def spot(self, row: Whole, column: Whole) -> dict[str, Whole]: ...


def fragments(c: Fragments, own: Whole, step: int, nt: int) -> tuple[Spread, Mapping[str, Ref]]:
    """Sums as matrix instructions leave them: a lane has rows lane/4 and lane/4 + 8, columns 2 (lane mod 4) and the next.

    own: the thread's first row of an atom; step: rows from one atom to the next; nt: pieces of 8 columns of each.
    """
    i, j, h, lane = counter("i", c.mt), counter("j", nt), IntVar("h"), c.w.lane()
    row = plus(own, shifted(lane, 2), times(i, Int(step)), times(h, Int(8)))
    column = plus(times(bits(lane, 3), Int(2)), times(j, Int(8)))
    at = plus(times(plus(times(i, Int(nt)), j), Int(4)), times(h, Int(2)))
    loops, corner = (("i", c.mt), ("h", 2)), c.spot(plus(own, times(i, Int(step))), Int(0))
    spread = Spread(c.stage.axes, (("j", nt),), loops, c.spot(row, column), 2, Int(1), corner, (1, 2))
    return spread, {stage: Ref(name, at) for stage, name in c.registers.items()}


class Mma(Contraction):
    """mma.sync m16n8k16 (PTX ISA): operands by ldmatrix, two sets of registers along k, sums in f32."""

    acc = "f32"

    @property
    def input(self) -> str:
        return self.w.plan.program.value(self.a.value).dtype

    @property
    def _sets(self) -> int:
        return min(2, self.kt)

    def open(self) -> tuple[Stmt, ...]:
        return (*self._cleared(self.mt * self.nt * 4), *self._operands())

    def _operands(self) -> tuple[Stmt, ...]:
        sizes = ((r, self.mt * 4) for r in self.firsts), ((r, self.nt * 2) for r in self.seconds)
        return tuple(Regs(f"{r.value}_frag", "b32", self._sets * n) for side in sizes for r, n in side)

    def compute(self) -> tuple[Stmt, ...]:
        lets, now = self._now()
        if self.ahead:
            kk = counter("kk", self.kt - 1)
            body = (*self._load(plus(kk, Int(1)), now), *self._step(kk))
            return (*lets, *unrolled("kk", self.kt - 1, body))
        kk = counter("kk", self.kt)
        more = plus(kk, Int(1))
        second = only(below(more, Int(self.kt)), self._load(more, now)) if self.kt > 1 else ()
        return (*lets, *self._load(Int(0), now), *unrolled("kk", self.kt, (*second, *self._step(kk))))

    @property
    def ahead(self) -> bool:
        return self.w.launch.tile.work(self.stage.out).ahead

    def fetch(self, ahead: int) -> tuple[Stmt, ...]:
        lets, at = self._now(ahead)
        return (*lets, *self._load(Int(0), at))

    def finish(self) -> tuple[Stmt, ...]:
        return self._step(Int(self.kt - 1))

    def _step(self, kk: Whole) -> tuple[Stmt, ...]:
        """Step kk of all atoms."""
        return (*self._tiles(tuple(self._multiply(p, kk) for p in self.products)), *self._after(kk))

    def _set(self, kk: Whole, size: int) -> Whole:
        return times(bits(kk, self._sets - 1), Int(size)) if self._sets > 1 else Int(0)

    def _multiply(self, p: Product, kk: Whole) -> Stmt:
        i, j = self._ij
        a = Ref(f"{p.a.value}_frag", plus(self._set(kk, self.mt * 4), times(i, Int(4))))
        b = Ref(f"{p.b.value}_frag", plus(self._set(kk, self.nt * 2), times(j, Int(2))))
        return Do(f"emmy_mma_{self.acc}_{self.input}", (self._target(p, i, j), a, b))

    def _target(self, p: Product, i: Whole, j: Whole) -> Ref:
        return Ref(p.sums, times(plus(times(i, Int(self.nt)), j), Int(4)))

    def _after(self, kk: Whole) -> tuple[Stmt, ...]:
        return ()

    def _load(self, kk: Whole, now: Mapping[str, Whole]) -> tuple[Stmt, ...]:
        """Operands of step kk of the slots to the set of registers whose turn it is."""
        first = (s for r in self.firsts for s in self._load_first(r, kk, now[r.value]))
        return (*first, *(s for r in self.seconds for s in self._load_second(r, kk, now[r.value])))

    def _load_first(self, ring: Ring, kk: Whole, now: Whole) -> tuple[Stmt, ...]:
        i, lane = counter("i", self.mt), self.w.lane()
        own = self._lane(ring, self.m, bits(lane, 15), times(shifted(lane, 4), Int(8)))
        at = plus(ring.layout.beyond(own, times(i, Int(16)), times(kk, Int(16))), now)
        to = Ref(f"{ring.value}_frag", plus(self._set(kk, self.mt * 4), times(i, Int(4))))
        return unrolled("i", self.mt, (Do("emmy_ldmatrix_x4", (to, Ref(SMEM, at))),))

    def _load_second(self, ring: Ring, kk: Whole, now: Whole) -> tuple[Stmt, ...]:
        lane, b, k = self.w.lane(), ring.layout, times(kk, Int(16))
        along_k = ring.columns == self.k
        if along_k:
            row = plus(bits(lane, 7), times(shifted(lane, 4), Int(8)))
            own = self._lane(ring, self.n, row, times(bits(shifted(lane, 3), 1), Int(8)))
        else:
            own = self._lane(ring, self.n, bits(lane, 15), times(shifted(lane, 4), Int(8)))
        trans = "" if along_k else "_trans"

        def matrices(j: Whole, count: int) -> Do:
            n = times(j, Int(8))
            at = plus(b.beyond(own, n, k) if along_k else b.beyond(own, k, n), now)
            to = Ref(f"{ring.value}_frag", plus(self._set(kk, self.nt * 2), times(j, Int(2))))
            return Do(f"emmy_ldmatrix_x{2 * count}{trans}", (to, Ref(SMEM, at)))

        pairs = self.nt // 2
        out = unrolled("j", pairs, (matrices(times(counter("j", pairs), Int(2)), 2),))
        return out + ((matrices(Int(self.nt - 1), 1),) if self.nt % 2 else ())

    def close(self) -> tuple[Stmt, ...]:
        return ()

    def spread(self) -> tuple[Spread, Mapping[str, Ref]]:
        return fragments(self, Int(0), 16, self.nt)


class F16Sums(Mma):
    """mma.sync with f16 sums to the end: twice the rate on GeForce cards, and the error of f16."""

    acc = "f16"

    def open(self) -> tuple[Stmt, ...]:
        return (*self._halves(), *self._operands())

    def _halves(self) -> tuple[Stmt, ...]:
        count, out = self.mt * self.nt * 2, list[Stmt]()
        for p in self.products:
            zero = Store(self._half(p), IntVar("e"), Call("as_b32", (Num(0.0),)))
            out += (Regs(self._half(p), "b32", count), *unrolled("e", count, (zero,)))
        return tuple(out)

    def _half(self, p: Product) -> str:
        return f"{p.stage.out}_half"

    def _target(self, p: Product, i: Whole, j: Whole) -> Ref:
        return Ref(self._half(p), times(plus(times(i, Int(self.nt)), j), Int(2)))

    def _promote(self) -> tuple[Stmt, ...]:
        """Sums in f16 join those in f32, and begin again."""
        i, j = self._ij
        join = (Do("emmy_promote_f16", (Mma._target(self, p, i, j), self._target(p, i, j))) for p in self.products)
        return self._tiles(tuple(join))

    def close(self) -> tuple[Stmt, ...]:
        return (*self._cleared(self.mt * self.nt * 4), *self._promote())


class Hybrid(F16Sums):
    """f16 sums over `atom.k` elements, then promoted into f32 sums: nearly the rate of f16, an error that does not grow with K."""

    def open(self) -> tuple[Stmt, ...]:
        return (*self._cleared(self.mt * self.nt * 4), *super().open())

    def _after(self, kk: Whole) -> tuple[Stmt, ...]:
        steps = self.atom.k // 16
        return only(same(rest(plus(kk, Int(1)), Int(steps)), Int(0)), self._promote())

    def close(self) -> tuple[Stmt, ...]:
        return ()


class Simt(Contraction):
    """Fused multiply-adds of single lanes, 4 along m by 8 along n: any dtype, sums in f32.

    A thread holds a piece of m/4 x n/8 elements of each atom; operands come four along k at a time.
    """

    any_major = True
    LANES_M, LANES_N = 4, 8

    @property
    def tm(self) -> int:
        return self.atom.m // self.LANES_M

    @property
    def tn(self) -> int:
        return self.atom.n // self.LANES_N

    def open(self) -> tuple[Stmt, ...]:
        return self._cleared(self.mt * self.nt * self.tm * self.tn)

    def _lane_row(self) -> Whole:
        return times(over(self.w.lane(), Int(self.LANES_N)), Int(self.tm))

    def _lane_column(self) -> Whole:
        return times(bits(self.w.lane(), self.LANES_N - 1), Int(self.tn))

    def compute(self) -> tuple[Stmt, ...]:
        lets, now = self._now()
        kk, k = IntVar("kk"), self.atom.k
        rows, columns = self.mt * self.tm, self.nt * self.tn
        regs, loads = list[Stmt](), list[Stmt]()
        sides = (
            (self.firsts, self.m, rows, self.tm, self.atom.m, self._lane_row()),
            (self.seconds, self.n, columns, self.tn, self.atom.n, self._lane_column()),
        )
        for rings, own, count, each, step, lane in sides:
            for r in rings:
                regs.append(Regs(f"{r.value}_frag", "f32", count * k))
                loads += self._load(r, own, f"{r.value}_frag", count, each, step, lane, times(kk, Int(k)), now[r.value])
        i, j, q = counter("i", rows), counter("j", columns), IntVar("q")
        at = plus(times(i, Int(columns)), j)
        fma: list[Stmt] = []
        for p in self.products:
            a, b = self._operand(p.a, i, q, rows), self._operand(p.b, j, q, columns)
            fma.append(Store(p.sums, at, Call("fma", (a, b, Load(p.sums, at)))))
        body = unrolled("q", k, unrolled("i", rows, unrolled("j", columns, tuple(fma))))
        return (*lets, For(kk.name, Int(0), Int(self.kt), 1, (*regs, *loads, *body), 2))

    def _operand(self, ring: Ring, i: Whole, q: Whole, count: int) -> Load:
        """Element i along the operand's own axis, q along k: vectors lie along the axis that is contiguous in memory."""
        regs = f"{ring.value}_frag"
        if ring.columns == self.k:
            return Load(regs, plus(times(i, Int(self.atom.k)), q))
        return Load(regs, plus(times(q, Int(count)), i))

    def _load(
        self, ring: Ring, own: str, regs: str, count: int, each: int, step: int, lane: Whole, k: Whole, now: Whole
    ) -> tuple[Stmt, ...]:
        """`count` elements along the operand's own axis (`each` of an atom, atoms `step` apart) and atom.k along k."""
        q, layout = IntVar("q"), ring.layout
        base = self.w.warp_offset(own)
        dtype = self.w.plan.program.value(ring.value).dtype
        if ring.columns == self.k:
            i = counter("i", count)
            row = plus(base, times(over(i, Int(each)), Int(step)), lane, rest(i, Int(each)))
            to, source = Ref(regs, times(i, Int(self.atom.k))), Ref(SMEM, plus(now, layout.at(row, k)))
            return unrolled("i", count, load(self.w, to, dtype, self.atom.k, source, "lds"))
        wide = min(each, 16 // layout.item)
        parts, i = each // wide, counter("i", count // wide)
        column = plus(base, times(over(i, Int(parts)), Int(step)), lane, times(rest(i, Int(parts)), Int(wide)))
        to = Ref(regs, plus(times(q, Int(count)), times(i, Int(wide))))
        source = Ref(SMEM, plus(now, layout.at(plus(k, q), column)))
        return unrolled("q", self.atom.k, unrolled("i", count // wide, load(self.w, to, dtype, wide, source, "lds")))

    def close(self) -> tuple[Stmt, ...]:
        return ()

    def spread(self) -> tuple[Spread, Mapping[str, Ref]]:
        return tiles_of_lanes(self, self.nt, self.tm, self.tn)


def tiles_of_lanes(c: Fragments, nt: int, tm: int, tn: int, down_name: str = "r") -> tuple[Spread, Mapping[str, Ref]]:
    """Sums as `Simt` leaves them: a lane has tm x tn of each of `nt` atoms in a row. down_name: variable of its rows of one."""
    i, j, r, lane = counter("i", c.mt), counter("j", nt), counter(down_name, tm), c.w.lane()
    down, along = times(over(lane, Int(Simt.LANES_N)), Int(tm)), times(bits(lane, Simt.LANES_N - 1), Int(tn))
    row = plus(times(i, Int(Simt.LANES_M * tm)), down, r)
    column = plus(times(j, Int(Simt.LANES_N * tn)), along)
    at = plus(times(plus(times(i, Int(tm)), r), Int(nt * tn)), times(j, Int(tn)))
    loops, lanes = (("i", c.mt), (down_name, tm)), (1, 2, 4)
    spread = Spread(c.stage.axes, (("j", nt),), loops, c.spot(row, column), tn, Int(1), None, lanes)
    return spread, {stage: Ref(name, at) for stage, name in c.registers.items()}


def contraction(w: Walk, works: tuple[Work, ...], kinds: Mapping[str, type[Contraction]]) -> Contraction:
    """What the atom of works side by side makes. Raises PlanError with the reason when no code is generated for it."""
    stages = tuple(w.plan.program.stage(x.stage) for x in works)
    work, stage = works[0], stages[0]
    atom = next((a for a in work.atoms if a.stage == stage.out), None)
    if atom is None or atom.name not in kinds:
        known = ", ".join(kinds)
        raise w.cannot(
            f"{stage.out} has {f'the atom {atom.name}' if atom else 'no atom'}; a GPU makes contractions of {known}"
        )
    m, n, k = mnk_axes(stage)
    if m is None or any(mnk_axes(s) != (m, n, k) for s in stages):
        raise w.cannot(f"{', '.join(s.out for s in stages)} are no products of two matrices along the same axes")
    if several := refuse_several(w.plan, w.nest, stage.axes, (m, n)):
        raise w.cannot(f"{atom.name} makes matrices of {stage.out}: {several}")
    products = tuple(_product(w, s, atom, kinds[atom.name].any_major) for s in stages)
    size = {
        a: w.plan.extent(tuple(x for x in w.nest if x.level in ("grid", "cluster", "serial", *AGENTS)), a)
        for a in (m, n, k)
    }
    steps = {m: atom.m, n: atom.n, k: atom.k if atom.name == "simt" else 16}
    for a in (m, n, k):
        if size[a] % steps[a]:
            raise w.cannot(f"{atom.name} takes {a} by {steps[a]}, a warp has {size[a]}")
    if steps[k] != atom.k and size[k] % atom.k:
        raise w.cannot(f"{atom.name} promotes every {atom.k} of {k}, a piece has {size[k]}")
    mt, nt, kt = (size[a] // steps[a] for a in (m, n, k))
    return kinds[atom.name](w, products, atom, m, n, k, mt, nt, kt)


def _product(w: Walk, stage: Stage, atom: Atom, any_major: bool) -> Product:
    """A stage with its operands' rings."""
    m, n, k = mnk_axes(stage)
    reads = [f for f in factors(stage.body) if isinstance(f, Read)]
    if len(reads) != 2:
        raise w.cannot(f"{stage.out} is no product of two matrices")
    rings = []
    for own, r in zip((m, n), reads, strict=True):
        ring = w.rings.get(r.value)
        if ring is None:
            raise w.cannot(f"{stage.out} reads {r.value}, which is not in shared memory: stage({r.value},...) first")
        if {ring.rows, ring.columns} != {own, k}:
            raise w.cannot(f"{r.value} has axes {ring.rows},{ring.columns}; {atom.name} reads {own},{k}")
        rings.append(ring)
    if not any_major and rings[0].columns != k:
        raise w.cannot(f"{atom.name} reads {reads[0].value} along {k}, it is contiguous along {rings[0].columns}")
    return Product(stage, rings[0], rings[1], exchanged(w, stage))
