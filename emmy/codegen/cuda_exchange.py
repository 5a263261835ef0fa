"""Pairs of matrix atoms as vectors: neighbouring lanes exchange them between registers and memory, or stmatrix takes them.

A lane holds two columns in each of several atoms, 8 columns apart; the four lanes of a row have those atoms' columns
between them. After an exchange each lane has 16 bytes of the row instead. That and stmatrix need the whole warp: whatever
does not exist is computed all the same, loads of it read the last that does, and only its store is left out.

Vectors of a value that has rows and columns are asked for several turns before they are used: one at a time, each warp would
wait for memory once a vector.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

from emmy.codegen.cuda_copy import only
from emmy.codegen.cuda_store import Boxes
from emmy.codegen.cuda_vector import WIDEST, fetched, packed, unpacked, word_regs
from emmy.codegen.kernel import Int, IntVar, Whole, below, both, least, minus, over, plus, replaced, rest, times
from emmy.codegen.kernel_gpu import UNROLL, Do, For, Ref, Regs, Stmt, bits, counter, unrolled
from emmy.ir.dtype import DType, size_bytes
from emmy.ir.expr import Read, axes_of

if TYPE_CHECKING:
    from emmy.codegen.cuda_values import Chain, Spread, Sums

ATOM_COLUMNS = 8  # of a matrix atom, and from one to the next
_FIRST = Int(0)
_AHEAD = 8  # vectors of a value under way in each lane: 32 registers, where an atom's operands have just become free


@dataclass(frozen=True, slots=True)
class Words:
    """Registers in which `vectors` take turns, as they come from memory: `each` of them for `n_bytes`.

    exchanged: among lanes, the first of them
    """

    name: str
    vectors: int
    each: int
    n_bytes: int
    exchanged: bool

    def of(self, turn: Whole) -> Ref:
        """Those of vector number `turn` of all."""
        return Ref(self.name, times(rest(turn, Int(self.vectors)), Int(self.each)))


def pairs_of(chain: Chain, spread: Spread) -> int:
    """Pairs in a vector of 16 bytes; 1 unless all that is loaded and stored along a row has such vectors."""
    items = {size_bytes(dtype) for _, index, dtype in chain.touched() if spread.axes[-1:] == index[-1:]}
    if spread.corner is None or len(items) != 1:
        return 1
    pairs = WIDEST // (2 * items.pop())
    fits = chain.width(spread.axes, 2 * pairs) == 2 * pairs and spread.columns[0][1] >= pairs
    return pairs if fits else 1


@dataclass(slots=True)
class Exchange:
    """The pairs from `start` to `stop` along a spread's columns, `pairs` at a time: one as it is, or a vector of 16 bytes.

    leaving: values that go to boxes in shared memory instead of memory
    pair: statements on one pair of a vector, in a loop of their own; before, after: on its vector
    """

    chain: Chain
    spread: Spread
    leaving: Mapping[str, Boxes]
    pairs: int
    start: int
    stop: int
    begin: list[Stmt] = field(default_factory=list)  # before all vectors
    outer: list[Stmt] = field(default_factory=list)  # once for all rows
    before: list[Stmt] = field(default_factory=list)
    pair: list[Stmt] = field(default_factory=list)
    after: list[Stmt] = field(default_factory=list)

    def emit(self, sums: Sums) -> tuple[Stmt, ...]:
        """Everything from what was folded to what is stored."""
        chain, spread, vector = self.chain, self.spread, self._vector
        last, there = spread.axes[-1], self._clamped(vector)
        for r in chain.unheld():
            if asked := chain.asked.get((r, self.start)):
                self._take(r, there, asked)
                continue
            before = self.before if set(axes_of(r)) - {last} else self.outer
            before += chain.find(r, there)
            wide = self.pairs > 1 and r.index[-1:] == (last,)
            if wide and before is self.before and not r.computed:
                self._load_ahead(r, there)
            else:
                before += self._load(r, there) if wide else chain.load(r, there)
        self.pair += chain.make(spread, sums, beyond=True)
        for to, dtype, x in chain.stores(vector, sums):
            self._store(to, dtype, x)
        var, first = spread.columns[0][0], self._first
        body = (*self.before, For(var, first, plus(first, Int(self.pairs)), 1, tuple(self.pair), UNROLL), *self.after)
        for name, n in reversed(spread.rows):
            body = unrolled(name, n, body)
        body = (*self.outer, *body)
        if isinstance(first, IntVar):
            body = (For(first.name, Int(self.start), Int(self.stop), self.pairs, body, UNROLL),)
        return (*self.begin, *body)

    @property
    def _first(self) -> Whole:
        """The first of the pairs that make a vector."""
        several = self.stop - self.start > self.pairs
        return IntVar(f"{self.spread.columns[0][0]}_first") if several else Int(self.start)

    @property
    def _vector(self) -> Spread:
        """The elements that a lane has in memory: of one of `pairs` atoms, 4 / pairs lanes to each."""
        assert self.spread.corner is not None
        lane, last = self.chain.w.lane(), self.spread.axes[-1]
        atom = times(plus(self._first, bits(lane, self.pairs - 1)), Int(ATOM_COLUMNS))
        column = plus(self.spread.corner[last], atom, times(bits(lane, 4 - self.pairs), Int(2)))
        return replace(self.spread, spot={**self.spread.spot, last: column}, width=2 * self.pairs)

    def _clamped(self, vector: Spread) -> Spread:
        """The same vectors, of which those over an edge are moved to the last before it."""
        spot = dict(vector.spot)
        for a in vector.axes:
            piece = self.chain.w.scope[a]
            if not piece.full:
                spot[a] = least(spot[a], plus(piece.end, Int(-(vector.width if a == vector.axes[-1] else 1))))
        return replace(vector, spot=spot)

    def _words(self, words: str, first: Whole = _FIRST) -> Ref:
        """Where a pair stands among a vector's words, which begin at `first`."""
        each = 1 if self.pairs == 1 else WIDEST // 4 // self.pairs
        return Ref(words, plus(first, times(minus(IntVar(self.spread.columns[0][0]), self._first), Int(each))))

    def _swap(self, words: str, first: Whole = _FIRST) -> Do:
        return Do(f"emmy_transpose_{'quad' if self.pairs == 4 else 'pair'}", (Ref(words, first),))

    def _load(self, r: Read, there: Spread) -> tuple[Stmt, ...]:
        """A vector of a value, exchanged; `pair` takes each pair from it."""
        w, (source, dtype, how) = self.chain.w, self.chain.source(r, there)
        words, name = w.fresh(f"{r.value}_words"), w.fresh(f"{r.value}_here")
        self.pair += (Regs(name, "f32", 2), *unpacked(Ref(name, Int(0)), dtype, 2, self._words(words)))
        self.chain.held[r] = Ref(name, Int(0))
        return word_regs(words, WIDEST), fetched(Ref(words, Int(0)), WIDEST, source, how), self._swap(words)

    def words(self, r: Read, most: int, *, exchanged: bool) -> tuple[Words, Regs]:
        """Registers that take turns for up to `most` vectors of a value, for the first of all to begin with.

        exchanged: lanes exchange those before any of them is used
        """
        n_bytes = size_bytes(self.chain.w.plan.program.value(r.value).dtype) * (2 * self.pairs if self._wide(r) else 1)
        vectors, each = min(most, self._total(r)), max(1, n_bytes // 4)
        words = Words(self.chain.w.fresh(f"{r.value}_words"), vectors, each, n_bytes, exchanged and self._swapped(r))
        return words, Regs(words.name, "b16" if n_bytes == 2 else "b32", each * vectors)

    def ask_first(self, r: Read, words: Words, each: int = 0, turns: int = 1, turn: Whole = _FIRST) -> tuple[Stmt, ...]:
        """The first vectors on their way to their registers: `each` of them in each of `turns`, 0 for all."""
        each = each or words.vectors
        number = plus(times(turn, Int(each)), counter("ahead", each))
        exists = Int(1) if turns * each <= words.vectors else below(number, Int(words.vectors))
        ask = self._ask(r, self._clamped(self._vector), words, number)
        return unrolled("ahead", each, only(exists, (ask,)))

    def exchanged(self, words: Words, each: int, turns: int = 1, turn: Whole = _FIRST) -> tuple[Stmt, ...]:
        """The first vectors, exchanged: `each` of them in each of `turns`."""
        number = plus(times(turn, Int(each)), counter("come", each))
        exists = Int(1) if turns * each <= words.vectors else below(number, Int(words.vectors))
        swap = only(exists, (self._swap(words.name, words.of(number).at),))
        return unrolled("come", each, swap) if words.exchanged else ()

    def _wide(self, r: Read) -> bool:
        """Whether a value has columns, of which a lane takes vectors, not one number of a row."""
        return r.index[-1:] == self.spread.axes[-1:]

    def _by_rows(self, r: Read) -> bool:
        return bool(set(axes_of(r)) - {self.spread.axes[-1]})

    def _swapped(self, r: Read) -> bool:
        return self.pairs > 1 and self._wide(r)

    def _loops(self, r: Read) -> list[tuple[str, int]]:
        """Loops over the vectors of a value, as they come."""
        columns = (self.spread.columns[0][0] + "_first", (self.stop - self.start) // self.pairs)
        return [*((columns,) if self._wide(r) else ()), *(self.spread.rows if self._by_rows(r) else ())]

    def _total(self, r: Read) -> int:
        return prod(n for _, n in self._loops(r))

    def _ask(self, r: Read, there: Spread, words: Words, turn: Whole) -> Do:
        """Vector number `turn` of all is on its way to the registers that are its."""
        loops, (source, _, how) = self._loops(r), self.chain.source(r, there)
        names, left = dict[str, Whole](), turn
        for var, n in reversed(loops):
            names[var], left = rest(left, Int(n)), over(left, Int(n))
        if self._wide(r):
            names[loops[0][0]] = plus(times(names[loops[0][0]], Int(self.pairs)), Int(self.start))
        return fetched(words.of(turn), words.n_bytes, Ref(source.view, replaced(source.at, names)), how)

    def _load_ahead(self, r: Read, there: Spread) -> None:
        """The same, asked for some vectors before their turn: registers for so many take turns."""
        words, registers = self.words(r, _AHEAD, exchanged=False)
        self.begin += (registers, *self.ask_first(r, words))
        self._take(r, there, words)

    def _take(self, r: Read, there: Spread, words: Words) -> None:
        """A vector, or a row's number, that was asked for; whoever has taken it asks for one more."""
        name, dtype = self.chain.w.fresh(f"{r.value}_here"), self.chain.source(r, there)[1]
        number: Whole = over(minus(self._first, Int(self.start)), Int(self.pairs)) if self._wide(r) else Int(0)
        for var, n in self.spread.rows if self._by_rows(r) else ():
            number = plus(times(number, Int(n)), counter(var, n))
        mine, depth, total = words.of(number), words.vectors, self._total(r)
        before = self.before if self._by_rows(r) else self.outer
        if self._swapped(r) and (depth < total or not words.exchanged):
            late = below(Int(depth - 1), number) if words.exchanged else Int(1)
            before += only(late, (self._swap(words.name, mine.at),))
        if self._wide(r):
            pair = unpacked(Ref(name, Int(0)), dtype, 2, self._words(words.name, mine.at))
            self.pair += (Regs(name, "f32", 2), *pair)
        else:
            before += (Regs(name, "f32", 1), *unpacked(Ref(name, Int(0)), dtype, 1, mine))
        self.chain.held[r] = Ref(name, Int(0))
        if depth < total:
            ask = self._ask(r, there, words, plus(number, Int(depth)))
            self.after += only(below(number, Int(total - depth)), (ask,))

    def _store(self, to: Ref, dtype: DType, x: Ref) -> None:
        """Pairs become words of a vector, which goes to `to`, or to the value's place in shared memory."""
        words, n_bytes = self.chain.w.fresh("words"), 2 * self.pairs * size_bytes(dtype)
        self.before.append(word_regs(words, n_bytes))
        self.pair += packed(self._words(words), dtype, 2, x)
        if to.view in self.leaving:
            (i, mt), (h, _) = self.spread.rows
            at = (counter(i, mt), IntVar(h), times(self._first, Int(ATOM_COLUMNS)))
            self.after.append(self.leaving[to.view].write(self.pairs, Ref(words, Int(0)), *at))
            return
        swap = (self._swap(words),) if self.pairs > 1 else ()
        write = Do(f"emmy_stg_b{8 * n_bytes}", (to, Ref(words, Int(0))))
        self.after += (*swap, *only(both(*self.chain.exists(self._vector)), (write,)))
