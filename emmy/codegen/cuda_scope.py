"""What GPU expansion knows while it walks a launch: pieces of axes, agents, rings of slots, names. Emits no work itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from emmy.codegen.cpu_scope import length_of
from emmy.codegen.cuda_layout import Slot, slot
from emmy.codegen.kernel import (
    Int,
    IntLoad,
    IntOp,
    IntVar,
    LetInt,
    View,
    Whole,
    below,
    least,
    minus,
    over,
    pieces,
    plus,
    product,
    rest,
    times,
)
from emmy.codegen.kernel_gpu import BLOCK, THREAD, WARP_INDEX, LetFrom, Ref, Stmt, TensorMap, bits
from emmy.errors import PlanError
from emmy.ir.dtype import size_bytes
from emmy.ir.expr import Read
from emmy.ir.gpu import (
    GROUP,
    WARP,
    block_axes,
    block_shape,
    by_groups,
    cluster_size,
    contracted_axes,
    in_turn,
    long_axes,
    multiple,
    sharing_blocks,
)
from emmy.ir.masks import Bound, Place, bounds
from emmy.ir.plan import AGENTS, Channel, Launch, Loop, Plan
from emmy.ir.program import upper
from emmy.ir.row_tiles import RowTile
from emmy.ir.target import Target


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements lo .. lo + size of an axis, of which those from `end` on do not exist. `full`: all exist in every block."""

    lo: Whole
    size: int
    end: Whole
    full: bool

    @property
    def hi(self) -> Whole:
        """Where a loop over the piece ends."""
        if self.lo == Int(0) and not (self.full and isinstance(self.end, Int)):
            return self.end
        last = plus(self.lo, Int(self.size))
        return last if self.full else least(last, self.end)


Scope = Mapping[str, Piece]


def before(a: Whole, b: Whole) -> Whole:
    """a < b, known where the two differ by a constant."""
    (x, p), (y, q) = _parts(a), _parts(b)
    return Int(int(p < q)) if x == y else below(a, b)


def _parts(a: Whole) -> tuple[Whole, int]:
    if isinstance(a, Int):
        return Int(0), a.value
    return (a.a, a.b.value) if isinstance(a, IntOp) and a.fn == "+" and isinstance(a.b, Int) else (a, 0)


def mentioned(x: Whole) -> set[str]:
    """Names of the variables in an expression."""
    if isinstance(x, IntOp):
        return mentioned(x.a) | mentioned(x.b)
    if isinstance(x, IntLoad):
        return {x.view} | mentioned(x.at)
    return {x.name} if isinstance(x, IntVar) else set()


@dataclass(frozen=True, slots=True)
class Turn:
    """Where the rings of one loop stand that have one depth: `slot` of the current fill, `phase` of its lap (0 or 1)."""

    slot: IntVar
    phase: IntVar
    depth: int

    def at(self, ahead: int) -> Whole:
        """The slot of the fill that many ahead."""
        if self.depth == 1:
            return Int(0)
        step = ahead % self.depth
        return rest(plus(self.slot, Int(step)), Int(self.depth)) if step else self.slot

    def lap(self, ahead: int) -> Whole:
        """Laps of the fill that many ahead, of which only the last bit counts."""
        if self.depth == 1:
            return Int(ahead)
        return over(plus(self.slot, Int(ahead)), Int(self.depth)) if ahead else Int(0)


@dataclass(frozen=True, slots=True)
class Ring:
    """A channel's slots in shared memory: the first at byte `base`, `stride` bytes apart."""

    channel: Channel
    layout: Slot
    rows: str  # axis; of the value's other axes a block has one position
    columns: str  # axis, contiguous in memory
    base: int
    stride: int
    turn: Turn

    @property
    def value(self) -> str:
        return self.channel.value

    def slot(self, ahead: int) -> Whole:
        """Byte at which the slot begins that the fill `ahead` goes to."""
        return plus(times(self.turn.at(ahead), Int(self.stride)), Int(self.base))


@dataclass(slots=True)
class Walk:
    """The state of one launch's expansion.

    head, tile_head: statements that stand before everything else, made once; before the steps of each tile
    block:           the number of the tile that is made; threads: those that make a tile together
    shares:          axis -> where the block's share of the tile begins and ends, where several blocks have one
    """

    plan: Plan
    launch: Launch
    target: Target
    threads: int = WARP
    scope: dict[str, Piece] = field(default_factory=dict)
    rings: dict[str, Ring] = field(default_factory=dict)
    shares: dict[str, tuple[Whole, Whole]] = field(default_factory=dict)
    part_index: dict[str, Whole] = field(default_factory=dict)  # axis -> the block's number along it
    head: list[Stmt] = field(default_factory=list)
    tile_head: list[Stmt] = field(default_factory=list)
    block: IntVar = BLOCK
    smem_bytes: int = 0
    rows: RowTile | None = None  # the launch as rows, where it is such
    further: dict[int, int] = field(
        default_factory=dict
    )  # loop -> how many fills ahead of its turn the present work is
    maps: list[TensorMap] = field(default_factory=list)
    _names: dict[str, int] = field(default_factory=dict)
    _lets: dict[Whole, IntVar] = field(default_factory=dict)
    _indices: dict[Read, IntVar] = field(default_factory=dict)
    _per_tile: set[str] = field(default_factory=set)

    @property
    def nest(self) -> tuple[Loop, ...]:
        return self.launch.tile.nest

    def fresh(self, stem: str) -> str:
        """A name nothing else in the kernel has: the stem itself, when it is free."""
        n = self._names.get(stem, 0)
        self._names[stem] = n + 1
        return f"{stem}{n}" if n else stem

    def let(self, stem: str, x: Whole) -> Whole:
        """`x` worked out once at the head, or once a tile; a number or a variable stays what it is."""
        if isinstance(x, Int | IntVar):
            return x
        if x not in self._lets:
            self._lets[x] = IntVar(self.fresh(stem))
            self.once(LetInt(self._lets[x].name, x), x)
        return self._lets[x]

    def once(self, s: LetInt | LetFrom | View, x: Whole) -> None:
        """A statement that names `x`, where it holds: before everything, or before the steps of each tile."""
        if mentioned(x) & self._per_tile:
            self._per_tile.add(s.name)
            self.tile_head.append(s)
        else:
            self.head.append(s)

    def index(self, r: Read) -> Whole:
        """The i32 number that a value holds for the block, loaded once."""
        if r not in self._indices:
            axes = self.plan.program.value(r.value).axes
            name, at = self.fresh(f"{r.value}_here"), self.start(r.value, axes)
            self._indices[r] = IntVar(name)
            self.once(LetFrom(name, f"emmy_{self.how_to_load(r.value)}_index", (Ref(r.value, at),)), at)
        return self._indices[r]

    def walk_tiles(self) -> None:
        """From now on blocks walk tiles: what depends on the tile is worked out for each."""
        self.block = IntVar(self.fresh("tile"))
        self._per_tile.add(self.block.name)

    def cannot(self, what: str) -> PlanError:
        return PlanError(f"{self.launch.name}: {what}")

    @property
    def folded(self) -> frozenset[str]:
        """Axes that some work of the launch folds, but for folds of what the launch makes."""
        return contracted_axes(self.plan, self.launch.tile)

    def how_to_load(self, value: str) -> str:
        """ldg_nc for memory that no one writes while the kernel runs, else ldg: the launch before an early one may write.

        Rows go through the first-level cache: streams that bypass it were 3 to 15 % slower on an H200.
        """
        p = self.plan.program
        if not p.is_input(value) or (self.launch.early and not p.is_constant(value)):
            return "ldg"
        return "ldg_nc_l1" if self.rows else "ldg_nc"

    # ------------------------------------------------------------ values in memory
    def stride(self, value: str, axis: str) -> Whole:
        """Elements of a value from one position along an axis to the next."""
        axes, p = self.plan.program.value(value).axes, self.plan.program
        return product(tuple(length_of(p.dim(a)) for a in axes[axes.index(axis) + 1 :]))

    def start(self, value: str, axes: Iterable[str]) -> Whole:
        """Elements of a value before the piece in scope of these axes."""
        return plus(*(times(self.scope[a].lo, self.stride(value, a)) for a in axes))

    # ------------------------------------------------------------ agents
    def lane(self) -> Whole:
        return self.let("lane", bits(THREAD, WARP - 1))

    @property
    def teams(self) -> int:
        """Teams of so many threads as make a tile, the first threads of the block: several where they take tiles in turn."""
        return max(1, in_turn(self.launch.tile))

    def team(self) -> Whole:
        """The thread's team."""
        return self.let("team", over(WARP_INDEX, Int(self.threads // WARP))) if self.teams > 1 else Int(0)

    def thread(self) -> Whole:
        """The thread's number in its team."""
        return self.let("mate", rest(THREAD, Int(self.threads))) if self.teams > 1 else THREAD

    def warp(self) -> Whole:
        return WARP_INDEX if self.threads > WARP else Int(0)

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return cluster_size(self.plan, self.nest)

    @property
    def sharing(self) -> int:
        """Those of them that fold shares of one element."""
        return sharing_blocks(self.plan, self.launch.tile)

    def rank(self) -> Whole:
        """The block's number in its cluster."""
        return rest(BLOCK, Int(self.cluster)) if self.cluster > 1 else Int(0)

    def group(self) -> Whole:
        """The warpgroup's number among those that compute."""
        return self.let("group", over(self.warp(), Int(GROUP))) if self.threads > GROUP * WARP else Int(0)

    def warp_offset(self, axis: str) -> Whole:
        """Where this thread's warp or warpgroup begins along an axis, inside the piece that the block's agents share."""
        left, out = self.group() if by_groups(self.nest) or self.teams > 1 else self.warp(), []
        for i in reversed(range(len(self.nest))):
            x = self.nest[i]
            if x.level not in AGENTS:
                continue
            n = self.plan.count(self.nest, i)
            shared = x.axis in self.folded or (self.rows is not None and x.axis == self.rows.last)
            if not shared or any(y.axis == x.axis for y in self.nest[:i]):
                self._divides(x, self.plan.extent(self.nest[:i], x.axis))  # shares of a whole fold may run over its end
            outermost = all(
                y.level not in AGENTS or self.plan.count(self.nest, j) == 1 for j, y in enumerate(self.nest[:i])
            )
            if x.axis == axis and n > 1:
                out.append(times(left if outermost else rest(left, Int(n)), Int(x.step)))
            left = over(left, Int(n))
        return self.let(f"warp_{axis}", plus(*reversed(out)))

    # ------------------------------------------------------------ pieces
    def begin(self) -> Whole:
        """Block loops become positions, in `scope`. Returns how many blocks the launch has."""
        t, p = self.launch.tile, self.plan.program
        dims = dict(p.dims)
        self.scope = {a: Piece(Int(0), upper(d), length_of(d), isinstance(d, int)) for a, d in p.dims}
        loops = t.nest[: t.n_block_loops]
        counts: list[Whole] = []
        for i, x in enumerate(loops):
            seen = any(y.axis == x.axis for y in loops[:i])
            counts.append(Int(self.plan.count(t.nest, i)) if seen else pieces(length_of(dims[x.axis]), x.step))
        masks = bounds(self.plan, self.launch)
        longest_last = {b.other.axis for b in masks if b.upper}
        for i, (x, index) in enumerate(zip(loops, self._decode(counts), strict=True)):
            if x.axis in longest_last:  # the longest tiles begin first, lest they run alone at the end
                index = minus(plus(counts[i], Int(-1)), index)
            outer, first = self.scope[x.axis], all(y.axis != x.axis for y in loops[:i])
            if not first:
                self._divides(x, outer.size)
            index = self.part_index[x.axis] = self.let(f"{x.axis}_block", index)
            lo = self.let(f"{x.axis}_lo", plus(outer.lo, times(index, Int(x.step))))
            full = multiple(dims[x.axis]) % x.step == 0 and (first or outer.full)
            self.scope[x.axis] = Piece(lo, x.step, outer.end, full)
        for b in masks:
            self._bind(b)
        total: Whole = Int(1)
        for n in counts:
            total = times(total, n)
        return total

    def _bind(self, b: Bound) -> None:
        """Loops in time walk no pieces of an axis that masks leave nothing of."""
        lo, hi = self.walked(b.axis)
        step = next(x.step for x in self.nest if x.axis == b.axis and x.level == "serial")
        other, by = self.scope.get(b.other.axis, Piece(Int(0), 1, Int(1), True)), Int(b.other.over)
        there = self.index(b.other.read) if b.other.read else Int(0)
        if b.upper:
            last = plus(other.lo, Int(other.size + b.offset))
            if b.other != Place(b.other.axis):
                last = plus(over(plus(other.lo, Int(other.size - 1)), by), there, Int(b.offset + 1))
            hi = self.let(f"{b.axis}_end", least(hi, last))
        else:
            passed = IntOp("max", minus(plus(over(other.lo, by), there, Int(b.offset)), lo), Int(0))
            lo = self.let(f"{b.axis}_begin", plus(lo, times(over(passed, Int(step)), Int(step))))
        self.shares[b.axis] = lo, hi

    def _decode(self, counts: list[Whole]) -> list[Whole]:
        """The block's number along each loop; the last loop moves fastest."""
        left: Whole = self.block
        out: list[Whole] = []
        tile = self.launch.tile
        apart = tile.n_tile_loops
        for n in reversed(counts[apart:]):  # neighbouring blocks are a cluster
            out.insert(0, rest(left, n))
            left = over(left, n)
        if tile.order.group > 1:
            rows, columns = counts[apart - 2 : apart]
            tiles = times(rows, columns)
            out = self._grouped(rest(left, tiles) if apart > 2 else left, rows, columns, tile.order.group) + out
            left = over(left, tiles)
        for n in reversed(counts[: len(counts) - len(out)]):
            last = len(out) + 1 == len(counts)
            out.insert(0, left if last else Int(0) if n == Int(1) else rest(left, n))
            left = over(left, n)
        return out

    def _grouped(self, tile: Whole, rows: Whole, columns: Whole, group: int) -> list[Whole]:
        """(row, column) of a tile when groups of rows come one after another and rows move fastest inside a group."""
        whole = times(columns, Int(group))
        first = self.let("group_first", times(over(tile, whole), Int(group)))
        inside = self.let("group_tile", rest(tile, whole))
        high = self.let("group_rows", least(Int(group), minus(rows, first)))
        return [plus(first, rest(inside, high)), over(inside, high)]

    def _divides(self, x: Loop, size: int) -> None:
        if size % x.step:
            raise self.cannot(
                f"pieces of {x.step} along {x.axis} do not fill the {size} around them: a GPU needs a divisor"
            )

    def walked(self, axis: str) -> tuple[Whole, Whole]:
        """Where a loop in time over the piece of an axis that is in scope begins and ends."""
        piece = self.scope[axis]
        return self.shares.get(axis) or (piece.lo, piece.hi)

    def inside(self, at: int, lo: Whole) -> Piece:
        """The piece of a loop in time that begins at `lo`."""
        x = self.nest[at]
        outer, dim = self.scope[x.axis], self.plan.program.dim(x.axis)
        if any(y.axis == x.axis for y in self.nest[:at]):
            self._divides(x, outer.size)
        return Piece(lo, x.step, outer.end, multiple(dim) % x.step == 0)

    # ------------------------------------------------------------ rings
    def place_rings(self) -> None:
        """Slots of every channel get their place in shared memory, the strictest alignment first."""
        t = self.launch.tile
        turns: dict[tuple[int, int], Turn] = {}
        layouts = {c.value: self._layout(c) for c in t.channels}
        for c in sorted(t.channels, key=lambda c: -layouts[c.value].align):
            layout = layouts[c.value]
            key = (c.at, c.depth)
            if key not in turns:
                turns[key] = Turn(IntVar(self.fresh("slot")), IntVar(self.fresh("phase")), c.depth)
            stride = _aligned(layout.bytes, layout.align)
            base = _aligned(self.smem_bytes, layout.align)
            self.smem_bytes = base + c.depth * stride
            rows, columns = block_axes(self.plan, t, c)
            self.rings[c.value] = Ring(c, layout, rows, columns, base, stride, turns[key])

    def _layout(self, c: Channel) -> Slot:
        v = self.plan.program.value(c.value)
        long = long_axes(self.plan, self.nest[: c.at + 1], c.value)
        if len(v.axes) < 2 or len(long) > 1:
            of = ", ".join((*long, *v.axes[-1:]))
            raise self.cannot(f"blocks of {c.value} have {len(long) + 1} long axes ({of}), a GPU stages those of 2")
        rows, columns, together = block_shape(self.plan, self.launch.tile, c)
        return slot(rows, columns, size_bytes(v.dtype), together, c.layout)

    def allocate(self, n_bytes: int, align: int = 16) -> int:
        """A further piece of shared memory: its first byte."""
        base = _aligned(self.smem_bytes, align)
        self.smem_bytes = base + n_bytes
        return base


def _aligned(n: int, to: int) -> int:
    return -(-n // to) * to
