"""What a launch asks of a GPU, told from the plan before anything is compiled: threads, registers, width of transfers.

Moves refuse by these numbers, code generation is built on them, and the cost model may read them. Knows no code.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise
from math import gcd, prod

from emmy.ir.atoms import ATOMS
from emmy.ir.beside import beside, operands
from emmy.ir.dtype import size_bytes
from emmy.ir.on_the_way import made_here, row_values
from emmy.ir.ops.op import Accumulate
from emmy.ir.plan import AGENTS, SIDE, Atom, Channel, Launch, Loop, Plan, Tile, Work, Workspace, folds_results
from emmy.ir.program import Dim, Program, Stage, Sym, swapped
from emmy.ir.target import Target

RESERVED_BYTES = 1024  # of shared memory a block, from sm_80 on (CUDA C++ Programming Guide: Shared Memory)
WARP = 32  # threads
GROUP = 4  # warps of a warpgroup (PTX ISA: wgmma.mma_async)
_WARPS_OF = {"warp": 1, "warpgroup": GROUP}
SWIZZLE_BYTES = 128  # of the longest rows that the copy engine swizzles
BOX_ROWS = 256  # of a box of the copy engine, at most (CUDA driver API: cuTensorMapEncodeTiled)
TRANSFER_BYTES = 16  # of the widest load, store or asynchronous copy of a thread
_COUNT = 16  # bytes in which a count of parts is told, of each team
PERIOD_ROWS = 8  # rows after which a swizzle repeats
_LOADING = (
    12  # registers without which ptxas 13.0 serialises what reads operands from registers (C7512; 12 tiles tried)
)
_SETS = 4  # of registers for an operand that lanes load for a deferred atom
_OTHER_REGISTERS = 16  # addresses and counters; measured 8 to 28 beside sums and operands over 40 tiles


def multiple(dim: Dim) -> int:
    """A number that certainly divides the size."""
    return dim.multiple if isinstance(dim, Sym) else dim


def warps(plan: Plan, nest: tuple[Loop, ...]) -> int:
    """Warps of a block that compute: the iterations of its loops over warps, four times those over warpgroups."""
    return prod(plan.count(nest, i) for i, x in enumerate(nest) if x.level in AGENTS) * (
        GROUP if by_groups(nest) else 1
    )


def by_groups(nest: tuple[Loop, ...]) -> bool:
    """Whether a block divides its work among warpgroups."""
    return any(x.level == "warpgroup" for x in nest)


def in_turn(tile: Tile) -> int:
    """Consumers that take a block's tiles in turn, a warpgroup each; 0 where all that compute share each tile."""
    return sum(r.deal is not None for r in tile.roles)


def tile_warps(plan: Plan, tile: Tile) -> int:
    """Warps that make one tile together."""
    return GROUP if in_turn(tile) else warps(plan, tile.nest)


def computing_warps(plan: Plan, tile: Tile) -> int:
    """Warps of a block that compute, on one tile or on several."""
    return tile_warps(plan, tile) * max(1, in_turn(tile))


def trips(plan: Plan, nest: tuple[Loop, ...], at: int) -> int | None:
    """Iterations of nest[at], where every tile has as many; None where they differ."""
    x = nest[at]
    around = [y.step for y in nest[:at] if y.axis == x.axis]
    size = plan.program.dim(x.axis)
    if not isinstance(size, int) or any(a % b for a, b in pairwise((size, *around))):
        return None
    return plan.count(nest, at)


def sharers(plan: Plan, nest: tuple[Loop, ...], stage: Stage) -> int:
    """Agents of a block that fold one element of a stage side by side: iterations of loops over agents along folded axes."""
    return prod(plan.count(nest, i) for i, x in enumerate(nest) if x.level in SIDE and x.axis in stage.folded)


def contracted_axes(plan: Plan, tile: Tile) -> frozenset[str]:
    """Axes that some work of the tile folds; not those along which it folds what others of its works make."""
    return _contracted_axes(plan.program, tile.bare)


@lru_cache(maxsize=4096)
def _contracted_axes(program: Program, works: tuple[Work, ...]) -> frozenset[str]:
    stages = (program.stage(w.stage) for w in works if not w.combine)
    return frozenset(a for s in stages if not folds_results(program, works, s) for a in s.folded)


def cluster_size(plan: Plan, nest: tuple[Loop, ...]) -> int:
    """Blocks of a cluster: each folds another share of an axis, or makes another piece of one."""
    return prod(plan.count(nest, i) for i, x in enumerate(nest) if x.level == "cluster")


def sharing_blocks(plan: Plan, tile: Tile) -> int:
    """Blocks of a cluster that fold shares of one element; 1 where they make neighbouring tiles."""
    folded = contracted_axes(plan, tile)
    own = any(x.level == "cluster" and x.axis not in folded for x in tile.nest)
    return 1 if own else cluster_size(plan, tile.nest)


def receivers(plan: Plan, tile: Tile, c: Channel) -> int:
    """Blocks of a cluster to which a fill of the channel goes, each bringing its rows to all; 1 where a block fills for itself.

    Blocks that make neighbouring tiles need the same of a value without the axis between them. Their shares are whole
    periods of a swizzle, which is all that the copy engine can place (PTX ISA: cp.async.bulk.tensor, .multicast::cluster).
    """
    v, blocks = plan.program.value(c.value), cluster_size(plan, tile.nest)
    same = not any(x.level == "cluster" and x.axis in v.axes for x in tile.nest)
    if (
        c.transport != "tma"
        or not same
        or plan.program.view(c.value)
        or len(v.axes) < 2
        or sharing_blocks(plan, tile) > 1
    ):
        return 1
    rows, _ = block_axes(plan, tile, c)
    return 1 if plan.extent(tile.nest[: c.at + 1], rows) % (PERIOD_ROWS * blocks) else blocks


def exchange_pitch(columns: int, transposed: bool = False) -> int:
    """Words from one row of exchanged sums to the next: what the lanes of a fragment write at once meets in no bank.

    8 rows, a pair of columns in each of 4 lanes; transposed: 8 columns of every other of 8 rows.
    """
    return columns + ((4 - columns) % 16 if transposed else (8 - columns) % WARP)


def exchange_bytes(plan: Plan, tile: Tile) -> int:
    """Bytes that a block's sums take, where blocks of a cluster exchange them, or threads because they lie transposed."""
    stages = (plan.program.stage(w.stage) for w in tile.works if not w.combine)
    s = next((s for s in stages if s.reduces), None)
    if s is None or (sharing_blocks(plan, tile) == 1 and not swapped(s)):
        return 0
    return len(beside(plan.program, tile, s.out)) * exchanged_bytes(plan, tile, s)


def exchanged_bytes(plan: Plan, tile: Tile, s: Stage) -> int:
    """Those of one stage's sums."""
    inside = tile.nest[: tile.n_block_loops]
    rows, columns = (plan.extent(inside, a) for a in s.axes[-2:])
    return 4 * rows * exchange_pitch(columns, swapped(s))


def statistic_bytes(plan: Plan, tile: Tile, stage: Stage) -> int:
    """Bytes that the shares of a fold of the tile's results take, where agents with other elements of a row meet; else 0."""
    parts = sharers(plan, tile.nest, stage)
    return 4 * parts * prod(plan.extent(tile.nest[: tile.n_block_loops], a) for a in stage.axes) if parts > 1 else 0


def shared_bytes(plan: Plan, tile: Tile) -> int:
    """Bytes of shared memory that sums pass through: exchanged ones, shares of folds of the tile's results, counts of parts."""
    stages = (plan.program.stage(w.stage) for w in tile.works if not w.combine)
    results = (s for s in stages if folds_results(plan.program, tile.works, s))
    counts = sum(told_bytes(plan, tile, x) for x in parts_left(plan, tile))
    return exchange_bytes(plan, tile) + sum(statistic_bytes(plan, tile, s) for s in results) + counts


def parts_left(plan: Plan, tile: Tile) -> tuple[Workspace, ...]:
    """Of what the tile leaves parts that its last block combines, or memory adds."""
    return tuple(x for x in plan.workspaces if x.by_last and any(w.stage == x.value for w in tile.works))


def told_bytes(plan: Plan, tile: Tile, space: Workspace) -> int:
    """Bytes in which agents are told what was counted: of the tile at hand, or where blocks count first of each that they make."""
    if space.added:
        return 0
    if not space.marked or tile.order.kind == "static":
        return _COUNT
    tiles = prod(plan.count(tile.nest, i) for i in range(tile.n_block_loops))
    return _COUNT * -(-tiles // tile.order.workers // (_COUNT // 4))


def parts_counted(plan: Plan, tile: Tile, stage: str) -> int:
    """How many blocks leave a part, or a share of one, for the same elements of a stage."""
    space = plan.workspace(stage)
    assert space is not None
    return space.parts * sharing_blocks(plan, tile)


def transfer_bytes(plan: Plan, nest: tuple[Loop, ...], value: str) -> int:
    """Bytes of the widest transfer that every row of a value and every piece of its contiguous axis allows: 16, 8, 4, 2.

    A row starts a multiple of the row's length after the first, which the caller aligns to 16 bytes.
    """
    v = plan.program.value(value)
    if not v.axes:
        return size_bytes(v.dtype)
    steps = [x.step for x in nest if x.axis == v.axes[-1] and x.level in ("grid", "cluster", "serial")]
    return gcd(TRANSFER_BYTES, size_bytes(v.dtype) * gcd(multiple(plan.program.dim(v.axes[-1])), *steps))


def long_axes(plan: Plan, nest: tuple[Loop, ...], value: str) -> tuple[str, ...]:
    """Axes of a value, its last one aside, along which a block inside `nest` has more than one position."""
    return tuple(a for a in plan.program.value(value).axes[:-1] if plan.extent(nest, a) > 1)


def refuse_several(plan: Plan, nest: tuple[Loop, ...], axes: Iterable[str], matrix: Iterable[str | None]) -> str | None:
    """Why what has these axes is no matrix inside `nest`: beside those of the matrix it may have one position of each."""
    found = next((a for a in axes if a not in matrix and plan.extent(nest, a) > 1), None)
    return found and f"a tile has {plan.extent(nest, found)} of {found}, a matrix has 1: split({found},grid,1)"


def block_axes(plan: Plan, tile: Tile, c: Channel) -> tuple[str, str]:
    """(rows, columns) of the blocks that a channel brings of a value with two axes or more: the one long axis, or the last
    but one, and the last, which is contiguous. Along the others a block has one position.
    """
    axes = plan.program.value(c.value).axes
    return (long_axes(plan, tile.nest[: c.at + 1], c.value) or axes[-2:-1])[-1], axes[-1]


def block_shape(plan: Plan, tile: Tile, c: Channel) -> tuple[int, int, int]:
    """(rows, columns, columns that stay together) of the blocks that a channel brings: a panel crosses no border of these."""
    nest, axes = tile.nest, block_axes(plan, tile, c)
    rows, columns = (plan.extent(nest[: c.at + 1], a) for a in axes)
    others = (x for a, x in plan.program.moved.get(c.value, ()) if a == axes[1])
    share = min(columns, *(plan.extent(nest, a) for a in (axes[1], *others)))
    # One of a power of two may end inside a panel, but a descriptor begins where a panel does.
    together = columns if share & (share - 1) == 0 and not by_groups(nest) else share
    if c.transport == "tma" and (wide := brought(plan, tile, c)) > columns:
        columns = together = wide
    return rows, columns, together


def swizzled_bytes(rows: int, columns: int, item: int, together: int) -> int:
    """Bytes of a panel's rows in a swizzled block, at most those of the longest swizzle; 0 where no such panels make it."""
    widths = (SWIZZLE_BYTES >> i for i in range(4))
    fits = (w for w in widths if columns * item % w == 0 and together * item % w == 0 and rows % PERIOD_ROWS == 0)
    return next(fits, 0)


def brought(plan: Plan, tile: Tile, c: Channel) -> int:
    """Columns of a block that the copy engine brings: up to an eighth beyond it, where that makes whole rows of a swizzle.

    Only warpgroups, all of whose columns one instruction reads, pass over the rest.
    """
    v, nest = plan.program.value(c.value), tile.nest
    columns, row = plan.extent(nest[: c.at + 1], v.axes[-1]), SWIZZLE_BYTES // size_bytes(v.dtype)
    whole = -(-columns // row) * row
    apart = plan.extent(nest, v.axes[-1]) < columns
    by_instruction = (by_groups(nest) or in_turn(tile)) and not apart
    return whole if by_instruction and row < columns and 8 * whole <= 9 * columns else columns


def ring_bytes(plan: Plan, tile: Tile, c: Channel) -> int:
    """Bytes of a ring: its slots, the gap after each row that layout pad leaves, and two barriers a slot for tma."""
    slot = plan.slot_bytes(tile, c)
    if c.layout == "pad":
        v = plan.program.value(c.value)
        row = size_bytes(v.dtype) * plan.extent(tile.nest[: c.at + 1], v.axes[-1])
        slot += slot // row * (TRANSFER_BYTES + -row % TRANSFER_BYTES)
    elif c.transport == "tma":
        columns = plan.extent(tile.nest[: c.at + 1], plan.program.value(c.value).axes[-1])
        slot = slot // columns * brought(plan, tile, c)
    return c.depth * (slot + (16 if c.transport == "tma" else 0))


def placed_bytes(plan: Plan, tile: Tile, value: str) -> int:
    """Bytes of a value's blocks, one for each tile that is made at a time; each warp that makes it has its share."""
    v = plan.program.value(value)
    return (
        max(1, in_turn(tile))
        * size_bytes(v.dtype)
        * prod(plan.extent(tile.nest[: tile.n_block_loops], a) for a in v.axes)
    )


def sides(program: Program, tile: Tile, stage: str) -> tuple[int, int]:
    """(first operands, second operands) that a tile reads for a product and those side by side with it."""
    firsts, seconds = operands(program, beside(program, tile, stage))
    return len(firsts), len(seconds)


def atom_registers(atom: str, m: int, n: int, k: int, of: tuple[int, int] = (1, 1)) -> int:
    """Registers that a thread needs for sums and operands of a warp's m x n tile, folded by k at a time.

    of: how many first and second operands there are, of as many products side by side as the larger number
    """
    left, right = of
    sums = m * n // WARP * max(of)
    if atom == "wgmma":
        return sums // GROUP  # operands are read from shared memory
    if atom == "wgmma_rs":
        return sums // GROUP + left * loaded_sets(k) * m // 16 + _LOADING
    if atom == "simt":
        return sums + 4 * (left * m // 4 + right * n // 8)  # atom.k operands of each row and column a lane has
    if atom == "direct":
        return sums + direct_step(n, right)
    sets = min(2, k // 16)  # of operands; one is loaded while the other is multiplied
    held = sets * (left * (m // 16) * 4 + right * (n // 8) * 2)
    halves = {"hybrid": sums // 2, "f16": sums // 2}.get(atom, 0)
    return sums + halves + held


def lift_registers(atom: str, m: int, n: int, k: int, *, begun: bool = False) -> int:
    """Registers of a thread that folds an m x n piece by a monoid with a lift, k at a time: an estimate, mostly from above.

    Sums, weights in f32 and then as operands, a few numbers of each row; of mma two sets of operands of what makes the weights.
    begun: what the next piece's are made of is made meanwhile.
    """
    lanes = WARP * (GROUP if atom == "wgmma" else 1)
    sums, weights, rows = m * n // lanes, m * k // lanes, 4 * max(1, 2 * m * WARP // (16 * lanes))
    if (
        atom == "simt"
    ):  # 4 lanes share columns, 8 rows; four along what makes the weights of each, or a row of what they weigh
        own, across = m // 4, n // 8
        return sums + weights + 4 * own + max(4 * (own + k // 8), across + 2) + _OTHER_REGISTERS
    if atom == "wgmma":
        return sums + weights + weights // 2 + rows + _OTHER_REGISTERS + (weights if begun else 0)
    operands = 2 * (m // 16 * 4 + k // 8 * 2)
    return sums + weights + max(weights // 2 + 8, operands) + rows + _OTHER_REGISTERS


def loaded_sets(k: int) -> int:
    """Sets of registers for A of a deferred atom that folds k elements by 16: one is loaded while the others are multiplied.

    They divide the steps of a fill: so each has its turn as many steps after the last across fills too.
    """
    steps = k // 16
    return next(n for n in range(_SETS, 0, -1) if steps % n == 0)


def threads(plan: Plan, launch: Launch) -> int:
    """Threads of a block: of those that compute, and of roles that only fill rings."""
    fill = (r for r in launch.tile.roles if not r.works)
    return WARP * (computing_warps(plan, launch.tile) + sum(r.agents * _WARPS_OF[r.unit] for r in fill))


def registers_allowed(plan: Plan, launch: Launch, work: Work, target: Target) -> int:
    """Registers that a thread of a work may have: what its role was dealt, else an even share of a quarter multiprocessor.

    Warps are dealt to four parts of a multiprocessor, each with a quarter of the registers, eight at a time (measured on an
    H200: 9 warps get 168 each, not 224).
    """
    role = next((r for r in launch.tile.roles if work.stage in r.works and r.registers), None)
    return role.registers if role else registers_at_launch(plan, launch, target)


def registers_at_launch(plan: Plan, launch: Launch, target: Target) -> int:
    """Registers of every thread before any are given away: what the assembler may use for one instruction."""
    here = -(-threads(plan, launch) // (4 * WARP))  # warps of the fullest part
    return min(target.max_regs_thread, target.regs_sm // 4 // (here * WARP) // 8 * 8)


def direct_step(n: int, right: int = 1, rows: int = 1) -> int:
    """Registers of a thread for the operands of one step of the direct atom: 32 along k of n columns of each B and of rows of A.

    rows: values of which A is made, each loaded; 1 where it is loaded itself
    """
    return right * (n // 2) + 4 * rows


def making_registers(rows: int) -> int:
    """Those for a step's elements of a row of A as numbers, and of so many values that they are made of."""
    return 8 * (rows + 1)


def thread_registers(plan: Plan, launch: Launch, work: Work, atom: Atom, axes: tuple[str | None, str, str]) -> int:
    """Registers of a thread of a launch whose `work` has `atom` over the axes m, n, k: an estimate, mostly from above."""
    nest = launch.tile.nest
    m, n, k = (plan.extent(nest, a) if a else 1 for a in axes)
    of = sides(plan.program, launch.tile, work.stage)
    need = atom_registers(atom.name, m, n, k, of) + _OTHER_REGISTERS
    if atom.name == "direct":
        # steps whose loads are under way; an instruction's operand, addresses
        rows = len(row_values(plan, launch, plan.program.stage(work.stage)))
        need += (work.unroll - 1) * direct_step(n, of[1], rows) + 8
        if made_here(plan, launch, plan.program.stage(work.stage)):
            need += making_registers(rows) + 4 * (rows - 1)
    need += sum(x.vectors for x in launch.tile.preloads) * TRANSFER_BYTES // 4
    for c in launch.tile.channels:
        if c.transport == "ldg":
            size = transfer_bytes(plan, nest[: c.at + 1], c.value)
            copies = -(-plan.slot_bytes(launch.tile, c) // (size * WARP * warps(plan, nest)))
            need += copies * max(1, size // 4)
    return need


def accumulation(plan: Plan) -> Accumulate:
    """How a plan keeps its sums where it is least exact: what an op's tolerance asks for."""
    found = {ATOMS[a.name].accumulate for la in plan.launches for w in la.tile.works for a in w.atoms}
    order: tuple[Accumulate, ...] = ("f16", "hybrid", "f32")
    return next((x for x in order if x in found), "f32")
