"""Folds by a monoid with a lift: elements in registers as a matrix atom left them, a contraction among the lift's stages.

What a lift reads of each element, another work of the tile has just made; it is kept where that work's sums were, and its
weights become the first operand of the contraction in place: sums of an atom of 8 columns lie in lanes as first operands of the next
do (PTX ISA: mma.m16n8k16). The state is taken relative to the running one (`emmy.ir.relative`), so that the contraction adds to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import e as euler
from math import log, log2

from emmy.codegen.cpu_fold import parts_name
from emmy.codegen.cuda_atoms import Fold, fragments
from emmy.codegen.cuda_copy import only
from emmy.codegen.cuda_scope import Ring, Walk
from emmy.codegen.cuda_values import Folds, Spread, index_of, over_states, part_start
from emmy.codegen.cuda_vector import function, store
from emmy.codegen.kernel import (
    Call,
    Int,
    IntVar,
    LetInt,
    Load,
    Num,
    Number,
    Store,
    Whole,
    below,
    both,
    plus,
    same,
    times,
)
from emmy.codegen.kernel_gpu import (
    SMEM,
    Do,
    If,
    LetAny,
    Ref,
    Regs,
    Stmt,
    bits,
    counter,
    shifted,
    unrolled,
)
from emmy.ir.expr import Apply, Axis, Const, Expr, Read, factors
from emmy.ir.plan import Atom
from emmy.ir.program import Monoid, Stage
from emmy.ir.relative import Relative

# Sums are made relative to a new maximum only where it is beyond the one they are relative to by this much: weights are
# at most its exponential, 2^8, and after the first few pieces there is nothing to do.
_SLACK = 8 * log(2)
# The least maximum: above what masks, so that what they mask weighs nothing, and the rounding of its multiple is not inf.
_FLOOR = -1e28
_CHUNK = 4  # atoms along n that are made at a time: so many operands are in registers


@dataclass(slots=True)
class Lifted(Fold):
    """A stage O[m,n] folded over k by a monoid whose lift has row folds over k, weights [m,k] and one contraction with V[k,n].

    kept: value -> registers that hold the warp's block of it, [m,k], as a matrix atom leaves its sums
    """

    w: Walk
    stage: Stage
    inner: Stage
    atom: Atom
    how: Relative
    b: Ring
    m: str
    n: str
    k: str
    mt: int
    nt: int
    kt: int
    kept: Mapping[str, str]

    # ------------------------------------------------------------ names
    @property
    def monoid(self) -> Monoid:
        assert self.stage.monoid is not None
        return self.stage.monoid

    @property
    def rows(self) -> tuple[str, ...]:
        """Components of which there is one for each row."""
        return tuple(c for c, axes in self.monoid.components(self.stage) if self.n not in axes)

    def _of(self, component: str) -> str:
        return f"{self.stage.out}_{component}"

    @property
    def _sums(self) -> str:
        return self._of(f"{self.inner.out}_sums")

    @property
    def registers(self) -> Mapping[str, str]:
        return {self.stage.out: self._sums}

    @property
    def dtype(self) -> str:
        """Of the contraction's operands."""
        return self.w.plan.program.value(self.b.value).dtype

    @property
    def _row(self) -> Whole:
        """The number of a row among a lane's, inside loops over i and h."""
        return plus(times(counter("i", self.mt), Int(2)), IntVar("h"))

    @property
    def _row_count(self) -> int:
        """Rows of a lane."""
        return 2 * self.mt

    @property
    def _sum_count(self) -> int:
        """Sums of a lane."""
        return 4 * self.mt * self.nt

    @property
    def _mates(self) -> tuple[int, ...]:
        """Bits of a lane's number in which lanes differ that have the same rows."""
        return 1, 2

    def _across(self, m: Monoid, name: str, at: Whole) -> tuple[Stmt, ...]:
        """Lanes of a row join what they have of it."""
        mine = Load(name, at)
        return tuple(Store(name, at, _joined(m, mine, Call(f"across<{bit}>", (mine,)))) for bit in self._mates)

    def _each_row(self, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        return unrolled("i", self.mt, unrolled("h", 2, body))

    def _along(self, count: int, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        """For every element of a row's, of `count` atoms."""
        return unrolled("j", count, unrolled("e", 2, body))

    def _at(self, count: int) -> Whole:
        """Where the element at hand stands in registers of `count` atoms a row."""
        atom = plus(times(counter("i", self.mt), Int(count)), counter("j", count))
        return plus(times(atom, Int(4)), times(IntVar("h"), Int(2)), IntVar("e"))

    def _along_weights(self, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        """For every weight of a row's."""
        return self._along(2 * self.kt, body)

    @property
    def _weight_at(self) -> Whole:
        """Where the weight at hand stands in registers."""
        return self._at(2 * self.kt)

    # ------------------------------------------------------------ states
    def open(self) -> tuple[Stmt, ...]:
        out: list[Stmt] = []
        for (c, _), identity in zip(self.monoid.state, self.monoid.identity, strict=True):
            name, count = (self._of(c), self._row_count) if c in self.rows else (self._sums, self._sum_count)
            out += (Regs(name, "f32", count), *unrolled("e", count, (Store(name, counter("e", count), Num(identity)),)))
        return tuple(out)

    def compute(self) -> tuple[Stmt, ...]:
        """The lift's stages in order, each made relative to all so far."""
        out: list[Stmt] = []
        held = dict(self.kept)
        for s in self.monoid.lift:
            if s.out == self.inner.out:
                out += self._contracted(held[_weights(s)])
            elif s.out == self.how.base:
                out += self._moved(s, held)
            elif s.reduces:
                out += self._summed(s, held)
            else:
                value = _only_read(s, held)
                later = self.monoid.lift[self.monoid.lift.index(s) + 1 :]
                if any(value in x.reads for x in later):
                    raise self.w.cannot(f"{s.out} takes the registers of {value}, which {self.stage.out} reads again")
                held[s.out] = held[value]
                to = self._weight_at
                body = (Store(held[s.out], to, self._number(s.body, held)),)
                out += self._each_row(self._along_weights(body))
        return tuple(out)

    def _number(self, e: Expr, held: Mapping[str, str]) -> Number:
        """An expression of the lift, of the element at hand."""
        match e:
            case Const(v):
                return Num(v)
            case Read(value) if value in held:
                return Load(held[value], self._weight_at)
            case Read(value) if value in self.rows:
                return Load(self._of(value), self._row)
            case Apply("exp", (Apply("sub", (a, b)),)):
                one, other = self._number(a, held), self._number(b, held)
                return _exp_of_difference(one, other)
            case Apply(fn, args):
                return function(fn, tuple(self._number(a, held) for a in args), lambda x: x)
            case _:
                raise self.w.cannot(f"{self.stage.out}: {e} is no element that is in registers")

    def _moved(self, s: Stage, held: Mapping[str, str]) -> tuple[Stmt, ...]:
        """The base of all so far, and of every other component what is there, relative to it."""
        assert s.monoid is not None
        new, r = self._of(f"{s.out}_new"), self._row
        begin = Store(new, r, Num(s.monoid.identity[0]))
        more = Store(new, r, _joined(s.monoid, Load(new, r), self._number(s.body, held)))
        out: list[Stmt] = [Regs(new, "f32", self._row_count)]
        out += self._each_row((begin, *self._along_weights((more,)), *self._across(s.monoid, new, r)))
        states: dict[str, Number] = {f"a_{s.out}": Load(self._of(s.out), r), f"b_{s.out}": Load(new, r)}
        joined = Call("maximum", (over_states(self.how.joined, states), Num(_FLOOR)))
        out += self._each_row((Store(new, r, joined),))
        old = Load(self._of(s.out), r)
        beyond = Call("lt", (Call("add", (old, Num(_SLACK))), Load(new, r)))
        further_on = Call("where", (beyond, Load(new, r), old))
        out += self._each_row((Store(new, r, further_on),))
        moved, any_moved = self._of("moved"), self.w.fresh(self._of("any_moved"))
        differs = Call("maximum", (Load(moved, Int(0)), Call("lt", (old, Load(new, r)))))
        out += (Regs(moved, "f32", 1), Store(moved, Int(0), Num(0.0)))
        out += (*self._each_row((Store(moved, Int(0), differs),)), LetAny(any_moved, Load(moved, Int(0))))
        names: dict[str, Number] = {f"a_{s.out}": old, s.out: Load(new, r)}
        scaled: list[Stmt] = []
        factors_ = dict.fromkeys(self.how.scales.values())
        for i, factor in enumerate(factors_):
            scale = self._of(f"scale{i or ''}")
            scaled.append(Regs(scale, "f32", self._row_count))
            body: list[Stmt] = [Store(scale, r, over_states(factor, names))]
            for c in (c for c, f in self.how.scales.items() if f == factor):
                if c in self.rows:
                    body.append(Store(self._of(c), r, Call("mul", (Load(self._of(c), r), Load(scale, r)))))
                else:
                    at = self._at(self.nt)
                    body += self._along(
                        self.nt, (Store(self._sums, at, Call("mul", (Load(self._sums, at), Load(scale, r)))),)
                    )
            scaled += self._each_row(tuple(body))
        return (*out, If(IntVar(any_moved), tuple(scaled)), *self._each_row((Store(self._of(s.out), r, Load(new, r)),)))

    def _summed(self, s: Stage, held: Mapping[str, str]) -> tuple[Stmt, ...]:
        """A sum of each lane's elements of a row; lanes of a row join theirs at the end."""
        to, r = self._of(s.out), self._row
        add = Store(to, r, Call("add", (Load(to, r), self._number(s.body, held))))
        return self._each_row(self._along_weights((add,)))

    # ------------------------------------------------------------ the contraction
    @property
    def _operand(self) -> str:
        return self._of(f"{_weights(self.inner)}_frag")

    def _packed(self, weights: str) -> tuple[Stmt, ...]:
        """Weights as first operands: a lane's two columns of an atom's rows and of the rows 8 below, then of the next atom."""
        i, kk = counter("i", self.mt), counter("kk", self.kt)
        out: list[Stmt] = []
        for q in range(4):
            atom = plus(times(i, Int(2 * self.kt)), times(kk, Int(2)), Int(q >> 1))
            at = plus(times(atom, Int(4)), Int(2 * (q & 1)))
            two = (Load(weights, at), Load(weights, plus(at, Int(1))))
            word = plus(times(plus(times(kk, Int(self.mt)), i), Int(4)), Int(q))
            out.append(Store(self._operand, word, Call(f"pack_{self.dtype}", two)))
        return (
            Regs(self._operand, "b32", 4 * self.mt * self.kt),
            *unrolled("kk", self.kt, unrolled("i", self.mt, tuple(out))),
        )

    def _contracted(self, weights: str) -> tuple[Stmt, ...]:
        out, now = list(self._packed(weights)), self.b.slot(0)
        if not isinstance(now, Int):
            name = self.w.fresh(f"{self.b.value}_now")
            out.append(LetInt(name, now))
            now = IntVar(name)
        frag = self._of(f"{self.b.value}_frag")
        out.append(Regs(frag, "b32", 2 * _CHUNK))
        half = self._of("half")
        if self.atom.name == "hybrid":
            out += (Regs(half, "b32", 2 * _CHUNK * self.mt), *self._no_halves(half))
        for first in range(0, self.nt, _CHUNK):
            count = min(_CHUNK, self.nt - first)
            for kk in range(self.kt):
                out += self._loaded(frag, first, count, kk, now)
                for j in range(count):
                    for i in range(self.mt):
                        sums = Ref(self._sums, Int(4 * (i * self.nt + first + j)))
                        a = Ref(self._operand, Int(4 * (kk * self.mt + i)))
                        b = Ref(frag, Int(2 * j))
                        if self.atom.name == "hybrid":
                            some = Ref(half, Int(2 * (i * _CHUNK + j)))
                            out.append(Do(f"emmy_mma_f16_{self.dtype}", (some, a, b)))
                            if (kk + 1) * 16 % self.atom.k == 0:
                                out.append(Do("emmy_promote_f16", (sums, some)))
                        else:
                            out.append(Do(f"emmy_mma_f32_{self.dtype}", (sums, a, b)))
        return tuple(out)

    def _no_halves(self, half: str) -> tuple[Stmt, ...]:
        count = 2 * _CHUNK * self.mt
        return unrolled("e", count, (Store(half, counter("e", count), Call("as_b32", (Num(0.0),))),))

    def _loaded(self, frag: str, first: int, count: int, kk: int, now: Whole) -> tuple[Stmt, ...]:
        """`count` atoms' second operands, from column 8 * `first` on, of step kk."""
        lane, layout, out = self.w.lane(), self.b.layout, list[Stmt]()
        if self.b.columns == self.n:
            row, column = bits(lane, 15), times(shifted(lane, 4), Int(8))
            own = layout.beyond(layout.at(row, column), Int(0), self.w.warp_offset(self.n))
        else:
            row, column = plus(bits(lane, 7), times(shifted(lane, 4), Int(8))), times(bits(shifted(lane, 3), 1), Int(8))
            own = layout.beyond(layout.at(row, column), self.w.warp_offset(self.n), Int(0))
        own = self.w.let("lane_at", own)
        trans = "_trans" if self.b.columns == self.n else ""
        for j in range(0, count, 2):
            n, k = Int(8 * (first + j)), Int(16 * kk)
            at = layout.beyond(own, k, n) if self.b.columns == self.n else layout.beyond(own, n, k)
            matrices = 2 * min(2, count - j)
            out.append(Do(f"emmy_ldmatrix_x{matrices}{trans}", (Ref(frag, Int(2 * j)), Ref(SMEM, plus(at, now)))))
        return tuple(out)

    # ------------------------------------------------------------ the end
    def close(self) -> tuple[Stmt, ...]:
        """Lanes of a row join their sums: all of them have it then."""
        summed = (s for s in self.monoid.lift if s.out in self.rows and s.out != self.how.base)
        return self._each_row(
            tuple(x for s in summed if s.monoid for x in self._across(s.monoid, self._of(s.out), self._row))
        )

    def finish(self) -> tuple[Stmt, ...]:
        """Values in the place of sums. What depends on the row alone is worked out once a row."""
        out: list[Stmt] = []
        states: dict[str, Number] = {c: Load(self._of(c), self._row) for c in self.rows}
        at = self._at(self.nt)
        matrix = next(c for c, _ in self.monoid.state if c not in self.rows)
        body, once = self.monoid.finish, list[Stmt]()
        if isinstance(body, Apply) and body.fn == "div" and not _mentions(body.args[1], matrix):
            name = self._of("per_row")
            out.append(Regs(name, "f32", self._row_count))
            once.append(Store(name, self._row, Call("div", (Num(1.0), over_states(body.args[1], states)))))
            body = Apply("mul", (body.args[0], Axis("per_row")))
            states["per_row"] = Load(name, self._row)
        states[matrix] = Load(self._sums, at)
        value = (Store(self._sums, at, over_states(body, states)),)
        return (*out, *self._each_row((*once, *self._along(self.nt, value))))

    def spread(self) -> tuple[Spread, Mapping[str, Ref]]:
        return fragments(self, Int(0), 16, self.nt)

    def spot(self, row: Whole, column: Whole) -> dict[str, Whole]:
        w = self.w
        spot = {a: w.scope[a].lo for a in self.stage.axes}
        spot[self.m] = plus(w.scope[self.m].lo, w.warp_offset(self.m), row)
        spot[self.n] = plus(w.scope[self.n].lo, w.warp_offset(self.n), column)
        return spot

    def sums_of(self, at: Ref) -> dict[str, Ref]:
        """Components of the state that have all axes of a vector's elements."""
        return {c: at for c, _ in self.monoid.state if c not in self.rows}

    def stored_rows(self) -> tuple[Stmt, ...]:
        """Components of each row go to this block's part of the workspace, by the first lane that has the row."""
        w, (spread, _) = self.w, self.spread()
        body: list[Stmt] = []
        for c, axes in self.monoid.components(self.stage):
            if c in self.rows:
                at = plus(part_start(w, self.stage, axes), index_of(w, axes, spread.spot))
                body += store(w, Ref(parts_name(self.stage.out, c), at), "f32", 1, Ref(self._of(c), self._row))
        exists = [below(spread.spot[a], w.scope[a].end) for a in self.stage.axes if a != self.n and not w.scope[a].full]
        first = both(same(bits(w.lane(), sum(self._mates)), Int(0)), same(w.warp_offset(self.n), Int(0)))
        for x in exists:
            first = both(first, x)
        return self._each_row(only(first, tuple(body)))

    def preload(self) -> tuple[Stmt, ...]:
        raise self.w.cannot(f"{self.stage.out} reads operands from shared memory")

    def share(self) -> tuple[Stmt, ...]:
        raise self.w.cannot(f"there is no code for warps that share the folding of {self.stage.out}")

    def gathered(self) -> Folds:
        return {}


def _exp_of_difference(a: Number, b: Number) -> Number:
    """exp(a - b) as 2^(a log2 e - b log2 e), of which the second product may be made once a row."""
    scale = Num(log2(euler))
    return Call("exp2", (Call("fma", (a, scale, Call("neg", (Call("mul", (b, scale)),)))),))


def _joined(m: Monoid, a: Number, b: Number) -> Number:
    return over_states(m.combine[0], {"a_x": a, "b_x": b})


def _mentions(e: Expr, name: str) -> bool:
    return any(_mentions(a, name) for a in e.args) if isinstance(e, Apply) else e == Axis(name)


def _weights(s: Stage) -> str:
    """The first factor of a contraction."""
    first = factors(s.body)[0]
    assert isinstance(first, Read)
    return first.value


def _only_read(s: Stage, held: Mapping[str, str]) -> str:
    return next(v for v in s.reads if v in held)
