"""Which loop a GPU's tile still lacks, and the steps of it worth trying. A search places them one after another.

Own axes go to blocks, the folded axis into time, a block's own axes to warps; so every tile has one spelling. Sizes are
those with which some choice of what follows is legal: sums fit the registers, one fill of both operands the shared memory.
A tile of 8 rows has no slots: its warps share the folded axis (see direct_tiles). Where a product's factors are swapped, an
instruction's rows are columns of the tile, whose rows may then be few. A tile that a warpgroup holds may be left undivided,
for warpgroups that take such tiles in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from emmy.ir.dtype import size_bytes
from emmy.ir.expr import Read, factors
from emmy.ir.gpu import GROUP, TRANSFER_BYTES, atom_registers, multiple, sides, trips, warps
from emmy.ir.moves import direct_tiles, lifted_tiles
from emmy.ir.moves.row_loops import missing_row_loop, rows_fit, rows_only
from emmy.ir.on_the_way import made_here, rides, row_values
from emmy.ir.plan import Launch, Plan, Work
from emmy.ir.program import SUM, Program, Stage, swapped, upper
from emmy.ir.target import Target

MOST_WARPS = 8
_MOST_REGISTERS = 232  # of a thread for sums and operands, of 255
_ROWS = (16, 32, 64, 128, 192, 256)
_COLUMNS = (16, 32, 48, 64, 80, 96, 128, 160, 192, 240, 256)
_FOLDED = (16, 32, 64, 128)
# Blocks of a cluster that share the folded axis, evenly: a loop that may be empty makes ptxas serialise wgmma (C7514).
_PARTS, _SHARE = (2, 3, 4, 5, 6, 8), 32
_ELEMENTS = 1 << 14  # of a usual tile: with more of them than multiprocessors there is nothing to share
# For pairs of blocks: rows of the op and usual tiles a multiprocessor, at least; columns of a usual tile.
_MANY_ROWS, _MANY_TILES, _USUAL_COLUMNS = 2048, 8, 128
_WARPS = (1, 2, 4, 8)
_GROUPS = (1, 2, 3)  # warpgroups that compute: a fourth makes way for the one that fills rings
_GROUP_ROWS = 64
_GROUP_SUMS = 200  # registers of a thread of a warpgroup for sums
# Of swapped factors: rows of the tile, which an instruction's columns cover, its columns, and a piece of the folded axis.
_FEW, _MANY, _LONG = (8, 16, 32, 48, 64), (64, 128, 192), (64, 128)
Sides = tuple[int, int]  # first and second operands of the products that a tile folds side by side
_ELEMENTWISE_ROWS, _ELEMENTWISE_COLUMNS = (1, 2, 4, 8, 16), (64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class Missing:
    """The next loop: over `axis` at `level`, in pieces of one of `steps`. fixed: each step is a choice of its own."""

    launch: str
    axis: str
    level: str
    steps: tuple[int, ...]
    fixed: bool = False


@lru_cache(maxsize=4096)  # most moves ask first whether loops are due
def missing_loops(plan: Plan, target: Target) -> tuple[Missing, ...]:
    """Choices of the first loop that some launch lacks; () when every tile is complete or has gone beyond loops.

    One that no step is worth trying for, where other moves come before loops.
    """
    if rows_only(plan, target):
        return next((x for la in plan.launches if (x := _of_rows(plan, la, target))), ())
    early = next((la for la in plan.launches if unjoined(plan) or cuts_are_due(plan, la, target)), None)
    if early:
        return (Missing(early.name, plan.program.dims[0][0], "grid", ()),)
    found = dict[str, tuple[Missing, ...]]()
    for la in plan.launches:
        if not la.tile.channels and not any(w.atoms for w in la.tile.works):
            found[la.name] = _of_launch(plan, la, target)
    due = [missing for missing in found.values() if missing]
    required = [missing for missing in due if not for_one(plan, plan.launch(missing[0].launch), target)]
    return next(iter((*required, *due)), ())


def loops_are_due(plan: Plan, target: Target) -> bool:
    """Whether a loop must be placed before anything else is decided."""
    return any(not for_one(plan, plan.launch(x.launch), target) for x in missing_loops(plan, target)[:1])


def for_one(plan: Plan, la: Launch, target: Target) -> bool:
    """Whether a launch's tiles, divided among no agents, are such as warpgroups may take in turn: each alone holds one.

    The launch makes the product whole, has more tiles than there are multiprocessors, and each as many fills as any other.
    """
    t = la.tile
    s = product_of(plan, la)
    if (
        s is None
        or lifted_tiles.lifted(plan, la)
        or _shared_out(plan, la, s)
        or any(x.level not in ("grid", "serial") for x in t.nest)
    ):
        return False
    rings = [i for i, x in enumerate(t.nest) if x.level == "serial"]
    if swapped(s) or not _by_engine(plan, la, s, target) or not rings or trips(plan, t.nest, rings[-1]) is None:
        return False
    tiles = prod(plan.count(t.nest, i) for i in range(t.n_block_loops))
    rows, columns = (plan.extent(t.nest, a) for a in s.axes[-2:])
    whole = rows % _GROUP_ROWS == 0 and columns % _whole(plan, s) == 0
    return whole and _holds(rows, columns, sides(plan.program, t, s.out)) and tiles > target.n_sms


def product_of(plan: Plan, la: Launch) -> Stage | None:
    """The stage of a launch that folds an axis into a matrix."""
    return _product_of(plan.program, la.tile.bare)


@lru_cache(maxsize=4096)
def _product_of(program: Program, works: tuple[Work, ...]) -> Stage | None:
    stages = (program.stage(w.stage) for w in works if not w.combine)
    return next((s for s in stages if s.reduces and len(s.axes) > 1), None)


def precedes_product(plan: Plan, la: Launch) -> bool:
    """Whether a launch makes something for a product that follows."""
    after = [x.name for x in plan.launches].index(la.name) + 1
    return any(product_of(plan, x) for x in plan.launches[after:])


def _shared_out(plan: Plan, la: Launch, s: Stage) -> bool:
    """Whether later launches have a part in a product, beyond folding statistics of it that this one leaves."""
    after = [x.name for x in plan.launches].index(la.name) + 1
    others = [w for x in plan.launches[after:] for w in x.tile.works]
    here = {w.stage for w in la.tile.works} - {s.out}
    return any(not w.combine or w.stage not in here for w in others)


def unjoined(plan: Plan) -> bool:
    """Whether some product has more factors than an instruction takes: commute and operand are due."""
    sums = (s for s in plan.program.stages if s.monoid == SUM and len(s.axes) > 1)
    return any(len(factors(s.body)) > 2 for s in sums)


def cuts_are_due(plan: Plan, la: Launch, target: Target) -> bool:
    """Whether a launch makes an operand of its product that no instruction takes: it, or the product, is to be cut off."""
    of = None if la.tile.nest else product_of(plan, la)
    return of is not None and bool(made_here(plan, la, of)) and not makes_on_the_way(plan, la, of, target)


def makes_on_the_way(plan: Plan, la: Launch, s: Stage, target: Target) -> bool:
    """Whether lanes can make the operand of a product that its launch makes, as they load rows: few of them, from memory."""
    fits = target.can("mma") and len(s.axes) == 2 and not swapped(s)
    return fits and direct_tiles.suits(plan, la, s, (s.axes[-2], s.axes[-1], s.folded[-1]))


def statistic_columns(plan: Plan, la: Launch, s: Stage) -> tuple[int, ...]:
    """Columns of a block that leaves one part of a statistic of a launch's results."""
    of = product_of(plan, la)
    sizes = _ELEMENTWISE_COLUMNS if of is None else _MANY if swapped(of) else _COLUMNS
    return _covering(plan, s.folded[-1], sizes)


def _of_launch(plan: Plan, la: Launch, target: Target) -> tuple[Missing, ...]:
    if (s := lifted_tiles.lifted(plan, la)) is not None:
        return tuple(Missing(la.name, *loop) for loop in lifted_tiles.loops(plan, la, s, target))
    of = product_of(plan, la)
    folded = {a for w in la.tile.works if not w.combine for a in plan.program.stage(w.stage).folded}
    if of is not None and (n := of.axes[-1]) in folded and not _has(la, n, "grid"):
        return (Missing(la.name, n, "grid", ()),)  # its columns are a part of a statistic: splitk, or cut it off
    if of is not None:
        return _contraction(plan, la, of, target)
    if folded and precedes_product(plan, la) and rows_fit(plan, la, target):
        return _of_rows(plan, la, target)
    axes = plan.program.stage(la.tile.works[0].stage).axes
    for axis in axes:
        if not _has(la, axis, "grid") and axis not in folded:
            sizes = _ELEMENTWISE_COLUMNS if axis == axes[-1] and not folded else _ELEMENTWISE_ROWS
            return (Missing(la.name, axis, "grid", _covering(plan, axis, sizes)),)
    return ()


def _of_rows(plan: Plan, la: Launch, target: Target) -> tuple[Missing, ...]:
    choice = missing_row_loop(plan, la, target)
    return (Missing(la.name, choice.axis, choice.level, choice.steps),) if choice else ()


def _contraction(plan: Plan, la: Launch, s: Stage, target: Target) -> tuple[Missing, ...]:
    m, n, k = s.axes[-2], s.axes[-1], s.folded[-1]
    for axis in s.axes[:-2]:
        if not _has(la, axis, "grid"):
            return (Missing(la.name, axis, "grid", (1,)),)
    if swapped(s):
        return _swapped(plan, la, s, target)
    dtypes = [plan.program.value(v).dtype for v in s.reads]
    atom, of = "simt" if "f32" in dtypes else "mma", sides(plan.program, la.tile, s.out)
    size = {a: plan.extent(la.tile.nest, a) for a in (m, n, k)}
    grouped = for_warpgroups(plan, la, s, target) and _evenly(plan, la, s)
    if not _has(la, m, "grid"):
        staged = Missing(la.name, m, "grid", _tile_rows(plan, la, s, atom, grouped, of))
        fits = not _has(la, n, "grid") or size[n] in direct_tiles.columns(plan, la, n, target)
        if fits and direct_tiles.suits(plan, la, s, (m, n, k)):
            direct = Missing(la.name, m, "grid", (direct_tiles.ROWS,), fixed=True)
            return (direct,) if made_here(plan, la, s) else (direct, staged)  # other atoms take nothing on the way
        return (staged,)
    if atom == "mma" and size[m] == direct_tiles.ROWS:
        return _direct(plan, la, s, target)
    if not _has(la, n, "grid"):
        columns = (x for x in _covering(plan, n, _COLUMNS) if _divides(plan, s, size[m], x, atom, grouped, of))
        return (Missing(la.name, n, "grid", tuple(columns)),)
    if not _has(la, k, "serial"):
        item = max((size_bytes(d) for d in dtypes), default=4)
        found = _in_time(plan, la, s, target, (item * of[0], item * of[1]), atom == "mma")
        if not grouped or not _alone(la, k) or not target.can("cluster") or not _by_engine(plan, la, s, target):
            return found
        rows, tiles = upper(plan.program.dim(m)), _made(plan, s) // _ELEMENTS
        if rows >= _MANY_ROWS and tiles >= _MANY_TILES * target.n_sms:
            return (*found, *_pairs(la, m, size[m], 2 * _GROUP_ROWS))
        few = rows <= _GROUP_ROWS == size[m]
        return (*found, *_pairs(la, n, size[n], 32)) if few and _crowded(plan, s, target) else found
    return _agents(plan, la, s, atom, grouped)


def _tile_rows(plan: Plan, la: Launch, s: Stage, atom: str, grouped: bool, of: tuple[int, int]) -> tuple[int, ...]:
    """Rows of a tile, that some division fits where its columns are known."""
    m, n = s.axes[-2:]
    rows = _covering(plan, m, _ROWS, _GROUP_ROWS if grouped else _ROWS[0])  # a warpgroup's instruction has no fewer
    if not _has(la, n, "grid"):
        return rows
    return tuple(x for x in rows if _divides(plan, s, x, plan.extent(la.tile.nest, n), atom, grouped, of))


def _divides(plan: Plan, s: Stage, m: int, n: int, atom: str, grouped: bool, of: tuple[int, int]) -> bool:
    """Whether some division of an m x n block among warps or warpgroups fits."""
    return _shares(atom, m, n, of) or (grouped and bool(_group_rows(m, n, _whole(plan, s), of)))


def _in_time(
    plan: Plan,
    la: Launch,
    s: Stage,
    target: Target,
    a_step: tuple[int, int],
    halves: bool,
    liked: tuple[int, ...] = _FOLDED,
) -> tuple[Missing, ...]:
    """The folded axis into time, in liked pieces if some are legal; before that perhaps among blocks of a cluster.

    a_step: bytes that a fill takes of operands for each row and each column, one step of the axis deep
    """
    (m, n), k = s.axes[-2:], s.folded[-1]
    size = {a: plan.extent(la.tile.nest, a) for a in (m, n, k)}
    most = target.smem_block_bytes // (a_step[0] * size[m] + a_step[1] * size[n])
    shared = any(x.axis == k for x in la.tile.nest)
    steps = tuple(
        x for x in _FOLDED if x <= most and (size[k] % x == 0 if shared else x < 2 * size[k] or x == _FOLDED[0])
    )
    found = (Missing(la.name, k, "serial", tuple(x for x in steps if x in liked) or steps),)
    few = _made(plan, s) <= target.n_sms * _ELEMENTS
    if shared or _clustered(la) or not target.can("cluster") or not halves or not few:
        return found
    share = max(_SHARE, liked[0])
    even = (size[k] // parts for parts in _PARTS if size[k] % (parts * share) == 0)
    return (*found, Missing(la.name, k, "cluster", tuple(sorted(even))))


def _pairs(la: Launch, axis: str, size: int, whole: int) -> tuple[Missing, ...]:
    """Pairs of blocks along an axis that bring each other what both read: the operand without the axis.

    Measured on an H200 by hand-written kernels: -2 to +1 % of the time from 2048 rows on; with fewer 1 to 5 % more, but in
    decode, where all blocks read the same few rows, less. So they are not worth a search's while in most ops.
    """
    return (Missing(la.name, axis, "cluster", (size // 2,)),) if size % whole == 0 else ()


def _made(plan: Plan, s: Stage) -> int:
    """Elements that a stage makes, of all its matrices."""
    return prod(upper(plan.program.dim(a)) for a in s.axes)


def _crowded(plan: Plan, s: Stage, target: Target) -> bool:
    """Whether there are more columns than all multiprocessors take at once, so that none of them is left idle by clusters."""
    columns = _made(plan, s) // upper(plan.program.dim(s.axes[-2]))
    return columns >= target.n_sms * _USUAL_COLUMNS


def _alone(la: Launch, k: str) -> bool:
    """Whether blocks neither form clusters nor share the folded axis."""
    return not any(x.level == "cluster" or x.axis == k for x in la.tile.nest)


def _evenly(plan: Plan, la: Launch, s: Stage) -> bool:
    """Whether blocks that share a folded axis have as much of it each: a loop that may be empty makes ptxas serialise wgmma."""
    blocks = la.tile.nest[: la.tile.n_block_loops]
    return all(x.axis not in s.folded or plan.extent(blocks[:i], x.axis) % x.step == 0 for i, x in enumerate(blocks))


def for_warpgroups(plan: Plan, la: Launch, s: Stage, target: Target) -> bool:
    """Whether warpgroups can make a contraction: of 16-bit values in memory, of which the copy engine brings the second."""
    values = [plan.program.value(v) for v in s.reads]
    halves = all(size_bytes(v.dtype) == 2 and plan.arrives(la, v.name) for v in values)
    return halves and target.can("wgmma") and all(engine_brings(plan, f.value) for f in _second(s))


def _second(s: Stage) -> list[Read]:
    """The second factor of a contraction, which a warpgroup's instruction always reads from shared memory itself."""
    return [f for f in factors(s.body)[1:] if isinstance(f, Read)]


def _by_engine(plan: Plan, la: Launch, s: Stage, target: Target) -> bool:
    """Whether warpgroups can make a contraction both of whose operands the copy engine brings."""
    return for_warpgroups(plan, la, s, target) and all(engine_brings(plan, v) for v in s.reads)


def swap_suits(plan: Plan, la: Launch, s: Stage, target: Target) -> bool:
    """Whether swapped factors are worth trying: so few rows that an instruction's would be wasted.

    What the launch makes for the product may still be cut off; then the copy engine brings it too.
    """
    halves = all(size_bytes(plan.program.value(v).dtype) == 2 and engine_brings(plan, v) for v in s.reads)
    few = len(s.axes) >= 2 and upper(plan.program.dim(s.axes[-2])) <= _FEW[-1]
    return few and halves and target.can("wgmma") and not unjoined(plan) and not rides(plan, la, s)


def _swapped(plan: Plan, la: Launch, s: Stage, target: Target) -> tuple[Missing, ...]:
    """Loops of a tile whose columns are the rows of warpgroups' instructions."""
    few, many, k = s.axes[-2], s.axes[-1], s.folded[-1]
    if not _by_engine(plan, la, s, target):
        return ()
    if not _has(la, few, "grid"):
        left = upper(plan.program.dim(few))
        enough = next((x for x in _FEW if x >= left), _FEW[-1])
        twice = tuple(x for x in _FEW if left <= 2 * x and x <= enough)  # at most two blocks read a weight
        return (Missing(la.name, few, "grid", twice or (enough,)),)
    if not _has(la, many, "grid"):
        return (Missing(la.name, many, "grid", _covering(plan, many, _MANY)),)
    if not _has(la, k, "serial"):
        weights, tokens = sides(plan.program, la.tile, s.out)
        found = _in_time(plan, la, s, target, (2 * tokens, 2 * weights), True, _LONG)
        shared = _alone(la, k) and _crowded(plan, s, target) and plan.extent(la.tile.nest, few) % 16 == 0
        return (*found, *_pairs(la, many, plan.extent(la.tile.nest, many), 2 * _GROUP_ROWS)) if shared else found
    if not _has(la, many, "warpgroup"):
        of = sides(plan.program, la.tile, s.out)
        rows = _group_rows(plan.extent(la.tile.nest, many), plan.extent(la.tile.nest, few), 8, of)
        return (Missing(la.name, many, "warpgroup", tuple(sorted(rows))),)
    return ()


def _agents(plan: Plan, la: Launch, s: Stage, atom: str, grouped: bool) -> tuple[Missing, ...]:
    """How a block's piece is divided among warps, or among warpgroups: first its rows, then its columns."""
    m, n = s.axes[-2:]
    rows, columns, whole = plan.extent(la.tile.nest, m), plan.extent(la.tile.nest, n), _whole(plan, s)
    used, of = warps(plan, la.tile.nest), sides(plan.program, la.tile, s.out)
    if _has(la, m, "warpgroup"):
        if _has(la, n, "warpgroup"):
            return ()
        steps = tuple(sorted(x for x in _group_columns(columns, used // GROUP, whole) if _holds(rows, x, of)))
        return (Missing(la.name, n, "warpgroup", steps),)
    if not _has(la, m, "warp"):
        found = [x for x in _rows(rows) if any(_fits(atom, x, y, of) for y in _columns(columns, rows // x))]
        together = _clustered(la) and not any(x.axis in s.folded for x in la.tile.nest if x.level == "cluster")
        choices = [Missing(la.name, m, "warp", tuple(sorted(found)))] if found and not together else []
        if grouped and (found := _group_rows(rows, columns, whole, of)):
            choices.append(Missing(la.name, m, "warpgroup", tuple(sorted(found))))
        return tuple(choices) or (Missing(la.name, m, "warp", ()),)
    if not _has(la, n, "warp"):
        fits = (x for x in _columns(columns, used) if _fits(atom, rows, x, of))
        return (Missing(la.name, n, "warp", tuple(sorted(fits))),)
    return ()


def _direct(plan: Plan, la: Launch, s: Stage, target: Target) -> tuple[Missing, ...]:
    """Loops of a tile without slots: blocks along n, warps that share k, and before them perhaps blocks of a cluster."""
    n, k = s.axes[-1], s.folded[-1]
    of, whole = sides(plan.program, la.tile, s.out)[1], plan.extent(la.tile.nest, s.folded[-1])
    rows = len(row_values(plan, la, s))

    def fit(columns: int) -> Iterator[int]:
        """Shares of k for which two steps of operands of so many columns fit the registers."""
        every = direct_tiles.shares(plan, la, s, k)
        return (x for x in every if direct_tiles.fits(target, columns, -(-whole // x), of, rows))

    if not _has(la, n, "grid"):
        sizes = tuple(x for x in direct_tiles.columns(plan, la, n, target) if any(fit(x)))
        return (Missing(la.name, n, "grid", _covering(plan, n, sizes)),)
    if not _has(la, k, "warp"):
        steps = fit(plan.extent(la.tile.nest, n))
        found = (Missing(la.name, k, "warp", tuple(steps)),)
        together = made_here(plan, la, s) or rides(plan, la, s)
        if not target.can("cluster") or any(a.axis == k for a in la.tile.nest) or together:
            return found
        even = (whole // parts for parts in _PARTS if whole % (parts * 2 * direct_tiles.STEP) == 0)
        return (*found, Missing(la.name, k, "cluster", tuple(sorted(even))))
    return ()


def _clustered(la: Launch) -> bool:
    return any(x.level == "cluster" for x in la.tile.nest)


def _has(la: Launch, axis: str, level: str) -> bool:
    return any(x.axis == axis and x.level == level for x in la.tile.nest)


def engine_brings(plan: Plan, value: str) -> bool:
    """Whether the copy engine can bring a value: rows of whole transfers."""
    v = plan.program.value(value)
    return size_bytes(v.dtype) * multiple(plan.program.dim(v.axes[-1])) % TRANSFER_BYTES == 0


def _covering(plan: Plan, axis: str, sizes: tuple[int, ...], least: int = 0) -> tuple[int, ...]:
    """The sizes of which less than half may lie beyond the axis; the smallest always, and those up to `least`."""
    left = upper(plan.program.dim(axis))
    return tuple(x for x in sizes if x < 2 * left or x <= max(least, sizes[0]))


def _rows(m: int) -> list[int]:
    """Rows of one warp."""
    return [m // w for w in _WARPS if m % (16 * w) == 0]


def _columns(n: int, used: int) -> list[int]:
    """Columns of one warp, when `used` warps share the rows."""
    return [n // w for w in _WARPS if n % (8 * w) == 0 and used * w <= MOST_WARPS]


def _fits(atom: str, m: int, n: int, of: Sides) -> bool:
    """Whether a warp's m x n tile leaves registers to work with."""
    return atom_registers(atom, m, n, 32, of) <= _MOST_REGISTERS


def _shares(atom: str, m: int, n: int, of: Sides) -> bool:
    """Whether some division of an m x n block among warps fits."""
    return any(_fits(atom, x, y, of) for x in _rows(m) for y in _columns(n, m // x))


def _group_rows(m: int, n: int, whole: int, of: Sides) -> list[int]:
    """Rows of one warpgroup, where some division of the columns fits too."""
    rows = [m // w for w in _GROUPS if m % (_GROUP_ROWS * w) == 0]
    return [x for x in rows if any(_holds(x, y, of) for y in _group_columns(n, m // x, whole))]


def _group_columns(n: int, used: int, whole: int) -> list[int]:
    """Columns of one warpgroup, when `used` of them share the rows: multiples of `whole`."""
    return [n // w for w in _GROUPS if n % (whole * w) == 0 and used * w <= _GROUPS[-1]]


def _whole(plan: Plan, s: Stage) -> int:
    """Columns that a warpgroup takes together: what its instruction does, or a swizzled row of an operand along n."""
    return 16 if any(plan.program.value(v).axes[-1] == s.axes[-1] for v in s.reads) else 8


def _holds(m: int, n: int, of: Sides) -> bool:
    """Whether a warpgroup's m x n tile leaves its threads registers to work with."""
    return atom_registers("wgmma", m, n, 16, of) <= _GROUP_SUMS
