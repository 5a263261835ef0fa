"""Filling slots of shared memory: by every thread through cp.async or registers, or by the copy engine. Waits for nothing.

A thread copies a fixed column of every so-many-th row, so what changes from piece to piece is one number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from emmy.codegen.cuda_layout import PERIOD
from emmy.codegen.cuda_scope import Piece, Ring, Walk
from emmy.codegen.kernel import (
    Call,
    Int,
    IntVar,
    LetInt,
    Load,
    Store,
    View,
    Whole,
    below,
    both,
    minus,
    over,
    plus,
    rest,
    times,
)
from emmy.codegen.kernel_gpu import (
    SMEM,
    THREAD,
    Arg,
    Do,
    Further,
    If,
    LetWide,
    MapRef,
    Ref,
    Regs,
    Stmt,
    TensorMap,
    counter,
    unrolled,
)
from emmy.ir.dtype import size_bytes
from emmy.ir.gpu import BOX_ROWS, multiple, receivers, transfer_bytes
from emmy.ir.plan import BLOCK_LEVELS


@dataclass(frozen=True, slots=True)
class Share:
    """What one thread copies of each block: `count` pieces of `granule` bytes, each by `loads` loads (2 where rows are odd).

    It copies at (row, column) and every `stride` rows further; `to` is the byte in the slot and `view` the source, where
    they could be worked out once. `some`: not every thread has work in every pass.
    """

    granule: int
    loads: int
    count: int
    stride: int
    row: Whole
    column: Whole
    to: Whole | None
    view: str


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a copy goes in its block and in a slot: statements before it, whether it belongs to the block at all."""

    lets: tuple[Stmt, ...]
    row: Whole
    column: Whole
    inside: Whole
    to: Whole


@dataclass(frozen=True, slots=True)
class Copied:
    """One piece: statements before it, where it goes and comes from, whether each load's source exists, whether it is one."""

    lets: tuple[Stmt, ...]
    to: Ref
    source: Ref
    exists: tuple[Whole, ...]
    inside: Whole


@dataclass(slots=True)
class Copier:
    """Copies of one ring."""

    w: Walk
    ring: Ring
    share: Share | None = None
    map: TensorMap | None = None
    policy: str = ""  # name of the word that tells the cache what to do with what is fetched

    @property
    def item(self) -> int:
        return size_bytes(self.w.plan.program.value(self.ring.value).dtype)

    @property
    def pitch(self) -> Whole:
        """Elements from one row of the value to the next, in memory."""
        return self.w.stride(self.ring.value, self.ring.rows)

    @property
    def outer(self) -> tuple[str, ...]:
        """The value's other axes, of which a block has one position, innermost first."""
        axes = self.w.plan.program.value(self.ring.value).axes[:-1]
        return tuple(a for a in reversed(axes) if a != self.ring.rows)

    def _in_time(self, axis: str) -> bool:
        """Whether the block along an axis moves with a loop inside the kernel."""
        return any(x.axis == axis and x.level not in BLOCK_LEVELS for x in self.w.nest[: self.ring.channel.at + 1])

    # ------------------------------------------------------------ by threads
    def begin(self) -> None:
        """Work out this thread's share, and for the copy engine its map."""
        w, s = self.w, self.ring.layout
        if self.ring.channel.transport == "tma":
            self.map = self._map()
            if hint := self.ring.channel.hint:
                self.policy = w.fresh(f"{self.ring.value}_policy")
                w.head.append(LetWide(self.policy, f"emmy_policy_{hint}", ()))
            return
        aligned = transfer_bytes(w.plan, w.nest, self.ring.value)
        granule = max(4, aligned)  # threads that wrote halves of one word would write over each other
        loads = granule // aligned
        if s.columns * self.item < granule:
            raise w.cannot(
                f"{self.ring.value}: a row of its block has {s.columns * self.item} bytes, a thread copies {granule}"
            )
        if self.ring.channel.transport == "cp_async" and loads > 1:
            size = f"rows allow {aligned}"
            raise w.cannot(f"{self.ring.value}: cp_async moves 4, 8 or 16 bytes, {size}: stage it by ldg")
        per_row = s.columns * self.item // granule
        wide = granule // self.item
        if w.threads % per_row:  # threads do not come out even: each copy finds its place by itself
            count = -(-s.rows * per_row // w.threads)
            self.share = Share(granule, loads, count, 0, Int(0), Int(0), None, self._view(Int(0), Int(0)))
            return
        stride = w.threads // per_row
        row = w.let("copy_row", over(THREAD, Int(per_row)))
        column = w.let("copy_column", times(rest(THREAD, Int(per_row)), Int(wide)))
        even = stride % PERIOD == 0 or not s.swizzle
        to = w.let("copy_to", s.at(row, column)) if even else None
        self.share = Share(granule, loads, -(-s.rows // stride), stride, row, column, to, self._view(row, column))

    def _view(self, row: Whole, column: Whole) -> str:
        """The value from this thread's first element on, for axes whose block does not move."""
        w, name = self.w, self.w.fresh(f"{self.ring.value}_from")
        lo = [Int(0) if self._in_time(a) else w.scope[a].lo for a in (self.ring.rows, self.ring.columns)]
        outer = w.start(self.ring.value, (a for a in self.outer if not self._in_time(a)))
        at = plus(outer, times(plus(lo[0], row), self.pitch), lo[1], column)
        w.once(View(name, self.ring.value, at), at)
        return name

    def fill(self, ahead: int, scope: dict[str, Piece], wanted: Whole) -> tuple[Stmt, ...]:
        """cp.async: this thread's copies into the slot `ahead`; or ldg: its loads into registers.

        cp.async of a fill that is not `wanted` brings zeros: a branch would keep other work from standing between copies.
        """
        assert self.share is not None
        by_registers = self.ring.channel.transport == "ldg"
        size = self.share.granule // self.share.loads
        out: list[Stmt] = []
        slot = self.ring.slot(ahead)
        if not by_registers and not isinstance(slot, Int):
            name = self.w.fresh(f"{self.ring.value}_fill")
            out.append(LetInt(name, slot))
            slot = IntVar(name)

        def one(i: Whole) -> tuple[Stmt, ...]:
            piece = self._piece(i, scope, slot)
            do: list[Stmt] = []
            for n, exists in enumerate(piece.exists):
                sure = exists == Int(1)
                if by_registers:
                    source = Ref(piece.source.view, plus(piece.source.at, Int(n)))
                    ok = () if sure else (exists,)
                    do.append(Do(f"emmy_ldg_b{8 * size}{'' if sure else '_if'}", (self._word(i, n), source, *ok)))
                else:
                    exists = both(wanted, exists)
                    sure = exists == Int(1)
                    ok = () if sure else (times(exists, Int(size)),)  # of so many bytes; the rest becomes zero
                    do.append(Do(f"emmy_cp_async_b{8 * size}{'' if sure else '_zfill'}", (piece.to, piece.source, *ok)))
            return (*piece.lets, *only(piece.inside, tuple(do)))

        return (*out, *self._passes(one, scope))

    def land(self, ahead: int) -> tuple[Stmt, ...]:
        """ldg: what the last fill loaded goes to the slot `ahead`."""
        share = self.share
        assert share is not None

        def one(i: Whole) -> tuple[Stmt, ...]:
            piece = self._piece(i, self.w.scope, self.ring.slot(ahead))
            join: tuple[Stmt, ...] = ()
            words = self._word(i, 0)
            if share.loads > 1:
                low, high = (Load(x.view, x.at) for x in (words, self._word(i, 1)))
                words = Ref(f"{self.ring.value}_word", Int(0))
                join = (Regs(words.view, "b32", 1), Store(words.view, Int(0), Call("join16", (low, high))))
            return (*piece.lets, *only(piece.inside, (*join, Do(f"emmy_sts_b{8 * share.granule}", (piece.to, words)))))

        return self._passes(one, self.w.scope)

    def _word(self, i: Whole, load: int) -> Ref:
        """ldg: the registers that a load of piece i fills."""
        assert self.share is not None
        return Ref(f"{self.ring.value}_words", plus(times(i, Int(self._words)), Int(load)))

    @property
    def _words(self) -> int:
        """ldg: registers of a piece."""
        assert self.share is not None
        return max(self.share.loads, self.share.granule // 4)

    def registers(self) -> tuple[Stmt, ...]:
        """ldg: registers for one block on its way."""
        if self.ring.channel.transport != "ldg" or self.share is None:
            return ()
        return (
            Regs(f"{self.ring.value}_words", "b16" if self.share.loads > 1 else "b32", self.share.count * self._words),
        )

    def _passes(self, one: Callable[[Whole], tuple[Stmt, ...]], scope: dict[str, Piece]) -> tuple[Stmt, ...]:
        """Every copy of the block in scope."""
        assert self.share is not None
        return unrolled("i", self.share.count, one(counter("i", self.share.count)))

    def _spot(self, i: Whole) -> Spot:
        """Where copy number i goes."""
        w, s, share = self.w, self.ring.layout, self.share
        assert share is not None
        lets: tuple[Stmt, ...] = ()
        moved = times(i, Int(share.stride))
        if share.stride:
            row, column = plus(share.row, moved), share.column
            inside: Whole = below(row, Int(s.rows)) if s.rows % share.stride else Int(1)
        else:
            per_row = s.columns * self.item // share.granule
            n = IntVar(w.fresh("chunk"))
            lets = (LetInt(n.name, plus(THREAD, times(i, Int(w.threads)))),)
            row, column = over(n, Int(per_row)), times(rest(n, Int(per_row)), Int(share.granule // self.item))
            inside = below(n, Int(s.rows * per_row)) if s.rows * per_row % w.threads else Int(1)
        to = plus(share.to, times(moved, Int(s.pitch))) if share.to is not None else s.at(row, column)
        return Spot(lets, row, column, inside, to)

    def _exist(self, row_exists: Whole, column: Whole, columns: Piece) -> tuple[Whole, ...]:
        """Whether there is something to load, for each load of a copy."""
        assert self.share is not None
        here = (plus(column, Int(load)) for load in range(self.share.loads))
        inside = (Int(1) if columns.full else below(x, minus(columns.end, columns.lo)) for x in here)
        return tuple(both(row_exists, x) for x in inside)

    def _piece(self, i: Whole, scope: dict[str, Piece], slot: Whole) -> Copied:
        """Copy number i."""
        w, share, spot = self.w, self.share, self._spot(i)
        assert share is not None
        rows, columns = scope[self.ring.rows], scope[self.ring.columns]
        source = times(times(i, Int(share.stride)), self.pitch)
        if not share.stride:
            source = plus(times(spot.row, self.pitch), spot.column)
        if self._in_time(self.ring.rows):
            source = plus(times(rows.lo, self.pitch), source)
        if self._in_time(self.ring.columns):
            source = plus(columns.lo, source)
        moving = (a for a in self.outer if self._in_time(a))
        source = plus(*(times(scope[a].lo, w.stride(self.ring.value, a)) for a in moving), source)
        row_exists: Whole = Int(1) if rows.full else below(spot.row, minus(rows.end, rows.lo))
        exists = self._exist(row_exists, spot.column, columns)
        return Copied(spot.lets, Ref(SMEM, plus(spot.to, slot)), Ref(share.view, source), exists, spot.inside)

    # ------------------------------------------------------------ by the copy engine
    def _map(self) -> TensorMap:
        w, s = self.w, self.ring.layout
        row_bytes = multiple(w.plan.program.dim(self.ring.columns)) * self.item
        if row_bytes % 16:
            raise w.cannot(
                f"{self.ring.value}: tma needs rows of a multiple of 16 bytes, these have {row_bytes}: stage it by ldg"
            )
        if s.pitch != s.panel * self.item:
            raise w.cannot(
                f"{self.ring.value}: tma cannot leave the gaps of layout {self.ring.channel.layout}: use swizzle128"
            )
        if self._by_panels and s.columns != w.plan.extent(w.nest[: self.ring.channel.at + 1], self.ring.columns):
            raise w.cannot(f"{self.ring.value}: its blocks of {s.columns} columns overlap, panels do not")
        blocks = receivers(w.plan, w.launch.tile, self.ring.channel)
        mine, panels = s.rows // blocks, 0
        if self._by_panels:
            mine, panels = s.rows, s.columns // s.panel // blocks
        box = next(n for n in range(min(mine, BOX_ROWS), 0, -1) if mine % n == 0)
        axes = self.ring.rows, self.ring.columns
        return tensor_map(w, self.ring.value, axes, (box, s.panel), s.swizzle, panels)

    @property
    def _by_panels(self) -> bool:
        return self.ring.channel.layout == "panels"

    def engine_fill(self, ahead: int, scope: dict[str, Piece], barrier: Whole) -> tuple[Stmt, ...]:
        """tma: the copies that fill the slot `ahead`, reported to the barrier at that byte.

        Where blocks of a cluster need the same, each brings its rows, or its panels, to the same place of all, and to the
        barriers there.
        """
        w, s, m = self.w, self.ring.layout, self.map
        assert m is not None
        blocks = receivers(w.plan, w.launch.tile, self.ring.channel)
        rows, columns, mine = scope[self.ring.rows], scope[self.ring.columns], s.rows // blocks
        outer, more = tuple(scope[a].lo for a in self.outer), tuple[Arg, ...]()
        helper = f"emmy_tma_load_{m.rank}d"
        row, slot, bar = rows.lo, self.ring.slot(ahead), Ref(SMEM, barrier)
        if blocks > 1:
            helper, more = f"{helper}_multicast", (Int((1 << blocks) - 1),)
        if self.policy:
            helper, more = f"{helper}_hint", (*more, Further(self.policy, Int(0)))
        if m.panels:
            first_panel = plus(over(columns.lo, Int(s.panel)), times(w.rank(), Int(m.panels)) if blocks > 1 else Int(0))
            to = plus(slot, times(w.rank(), Int(m.panels * s.panel_bytes)) if blocks > 1 else Int(0))
            return (Do(helper, (Ref(SMEM, to), MapRef(m.name), bar, Int(0), row, first_panel, *outer, *more)),)
        if blocks > 1:
            row = plus(row, times(w.rank(), Int(mine)))
            slot = plus(slot, times(w.rank(), Int(mine * s.pitch)))
        out = []
        for panel in range(s.columns // s.panel):
            for first in range(0, mine, m.box_rows):
                to = plus(slot, Int(panel * s.panel_bytes + first * s.pitch))
                where = (plus(columns.lo, Int(panel * s.panel)), plus(row, Int(first)), *outer)
                out.append(Do(helper, (Ref(SMEM, to), MapRef(m.name), bar, *where, *more)))
        return tuple(out)


def tensor_map(
    w: Walk, value: str, axes: tuple[str, str], box: tuple[int, int], swizzle: int, panels: int = 0
) -> TensorMap:
    """What tells the copy engine boxes of a value along `axes`, its rows and its last axis, at one position of every other.

    A dimension for each axis: so a box that runs over the rows brings zeros, not the next matrix.
    """
    (rows, columns), (box_rows, box_columns) = axes, box
    ends = {a: w.scope[a].end for a in w.plan.program.value(value).axes}
    outer = tuple((ends[a], w.stride(value, a)) for a in reversed(ends) if a not in axes)
    pitch = None if w.stride(value, rows) == ends[columns] else w.stride(value, rows)
    return TensorMap(
        f"{value}_map", value, ends[rows], ends[columns], box_rows, box_columns, swizzle, panels, pitch, outer
    )


def only(cond: Whole, then: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """If, unless the condition is known."""
    if isinstance(cond, Int):
        return then if cond.value else ()
    return (If(cond, then),) if then else ()
