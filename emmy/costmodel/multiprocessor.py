"""What a launch of warps asks of a GPU: blocks that fit beside each other, waves of shared memory, bytes and sectors of memory.

Counted from plan and layouts alone; the emulator counts the same from the text, and a test holds the two equal. Operands
come by way of slots here, or straight to registers (`straight`). Knows no cost model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, gcd, prod

import numpy as np

from emmy.codegen.cuda_layout import Slot
from emmy.codegen.cuda_scope import Ring, Walk
from emmy.costmodel import straight
from emmy.costmodel.counting import (
    LANES,
    NONE,
    SECTOR_BYTES,
    WAVE_BYTES,
    Count,
    Traffic,
    bytes_at,
    sectors,
    starts,
    waves,
)
from emmy.costmodel.dealt import exchange, items, leaving, stored_value
from emmy.costmodel.masked import Walked
from emmy.ir.atoms import ATOMS
from emmy.ir.beside import beside, operands
from emmy.ir.dtype import size_bytes
from emmy.ir.gpu import (
    GROUP,
    RESERVED_BYTES,
    TRANSFER_BYTES,
    WARP,
    brought,
    cluster_size,
    placed_bytes,
    receivers,
    ring_bytes,
    shared_bytes,
    thread_registers,
    threads,
    tile_warps,
    transfer_bytes,
)
from emmy.ir.moves.atom import mnk_axes
from emmy.ir.plan import Atom, Channel, Launch, Plan, Work
from emmy.ir.program import upper
from emmy.ir.target import Target

_MMA_K = 16

# Nominal figures of the cards since 2020; they only place the corners of a bound that a model corrects.
_FILL_US = 1.0  # from asking memory for a slot to reading it
_L2_BYTES = 32  # a clock and multiprocessor, of what the last-level cache delivers
LAUNCH_US = 2.0  # that a launch behind another adds, an empty one too
# Multiprocessors that a cluster spans -> the share of all of them that such clusters can fill: a cluster lies inside a group
# of 14 to 18 of them. Measured on an H200 (132 multiprocessors): 66 clusters of 2, 30 of 4; those of 8 follow from the groups
# that this tells of: four of 18, two of 16, two of 14.
_OF_CLUSTERS = {1: 1.0, 2: 1.0, 4: 120 / 132, 8: 112 / 132}


@dataclass(frozen=True, slots=True)
class Residency:
    """How a launch's blocks share a multiprocessor. `registers`: of a thread, estimated, mostly from above."""

    registers: int
    threads: int
    smem_bytes: int  # of a block, with what every block reserves
    blocks: int  # side by side on one multiprocessor, by registers, shared memory and threads; at least 1
    units: (
        float  # multiprocessors that may have a block: those that clusters can fill, and no more than there are workers
    )
    places: float  # for blocks, on all multiprocessors


def residency(plan: Plan, launch: Launch, work: Work, atom: Atom, target: Target) -> Residency:
    """How many blocks of the launch of `work`, a contraction by `atom`, a multiprocessor of the target holds at once."""
    stage, tile = plan.program.stage(work.stage), launch.tile
    registers = thread_registers(plan, launch, work, atom, mnk_axes(stage))
    n_threads = threads(plan, launch)
    n_warps = n_threads // WARP
    placed = sum(placed_bytes(plan, tile, x.value) for x in tile.placements if not tile.channel(x.value))
    rings = sum(ring_bytes(plan, tile, c) for c in tile.channels)
    direct = atom.name == "direct"
    sums = straight.shared_bytes(plan, launch, work, atom) if direct else shared_bytes(plan, tile)
    smem = rings + placed + sums + RESERVED_BYTES
    # Each quarter of a multiprocessor deals its registers to whole warps, eight a thread at a time; roles deal again.
    each = min(target.max_regs_thread + 1, -(-registers // 8) * 8)
    by_registers = GROUP * (target.regs_sm // GROUP // (each * WARP)) // n_warps
    dealt = sum(r.registers * r.agents * GROUP * WARP for r in tile.roles)
    if dealt:
        by_registers = target.regs_sm // dealt
    fit = (by_registers, target.smem_sm_bytes // smem, target.max_threads_sm // n_threads, target.max_blocks_sm)
    blocks = max(1, min(fit))
    units = target.n_sms * filled_by_clusters(cluster_size(plan, tile.nest), blocks)
    workers = tile.order.workers if tile.order.kind != "static" else units * blocks
    return Residency(registers, n_threads, smem, blocks, min(units, workers), min(units * blocks, workers))


def filled_by_clusters(size: int, blocks: int) -> float:
    """The share of a device's multiprocessors that clusters of `size` blocks can fill, `blocks` on each."""
    spans = -(-size // blocks)
    return next((share for most, share in _OF_CLUSTERS.items() if spans <= most), min(_OF_CLUSTERS.values()))


def traffic(plan: Plan, launch: Launch, work: Work, atom: Atom, target: Target) -> Traffic | None:
    """What `work`, a contraction by `atom` of two matrices, moves with those side by side.

    None when it is no such thing, or reads what is in no slot.
    """
    tile, stage = launch.tile, plan.program.stage(work.stage)
    together = beside(plan.program, tile, work.stage)
    firsts, seconds = operands(plan.program, together)
    staged = {c.value for c in tile.channels}
    m, n, k = mnk_axes(stage)
    flat = all(len(plan.program.value(v).axes) >= 2 for v in {*staged, *firsts, *seconds})
    if m is None or not seconds or not flat:
        return None
    if atom.name == "direct":
        return straight.traffic(plan, launch, work, atom)
    if not staged.issuperset((*firsts, *seconds)):
        return None
    w = Walk(plan, launch, target)
    w.place_rings()
    a, b = (tuple(w.rings[v] for v in side) for side in (firsts, seconds))
    if any({r.rows, r.columns} != {own, k} for own, side in ((m, a), (n, b)) for r in side):
        return None
    size = {x: plan.extent(tile.nest, x) for x in (m, n, k)}
    reads = _reads(atom, a, b, k, size[m] // atom.m, size[n] // atom.n, size[k])
    blocks = prod(plan.count(tile.nest, i) for i in range(tile.n_block_loops))
    turns = prod(plan.count(tile.nest, i) for i, x in enumerate(tile.nest) if x.level == "serial")
    fills, copied, fetched, flying, widest = NONE, 0.0, 0.0, 0.0, 0
    for c in tile.channels:
        times = prod(plan.count(tile.nest, i) for i in range(c.at + 1))
        blocks_fed = receivers(plan, tile, c)  # by one request
        copied += times * float(box_bytes(plan, launch, c)) / blocks_fed
        there = _existing_bytes(plan, launch, c) / blocks_fed
        fetched += there
        flying += there / times * (c.depth - 1 + (c.transport == "ldg"))
        granule = WAVE_BYTES  # the copy engine asks for whole lines
        if c.transport != "tma":
            granule = max(4, transfer_bytes(plan, tile.nest, c.value))
            fills += _fill(w.rings[c.value].layout, granule).times(times)
        if c.value in seconds:
            widest = granule
    agents = max(1, tile_warps(plan, tile) // (GROUP if ATOMS[atom.name].unit == "warpgroup" else 1))
    read, passed = reads.times(blocks * turns * agents), 0.0
    swap = exchange(plan, launch, atom, m, n)
    if swap:
        tiles = blocks / w.sharing
        each = tiles * len(together)
        read += swap.taken.times(each)
        fills, stores, passed = fills + swap.given.times(each), swap.stores.times(tiles), swap.passed_bytes * each
    else:
        stores = _stores(plan, launch, atom, n, size[m], size[n]).times(blocks * agents)
    stores = stores.times(leaving(plan, launch, together))
    passed += 2.0 * handed_bytes(plan, launch)
    return Traffic(
        read,
        fills,
        stores,
        copied,
        fetched,
        passed,
        flying,
        widest,
        blocks,
        turns,
        max(c.depth for c in tile.channels),
    )


def handed_bytes(plan: Plan, launch: Launch) -> int:
    """Bytes of sums that blocks which share tiles leave for one another: about a tile's for each worker."""
    tile = launch.tile
    if tile.order.kind != "streamk":
        return 0
    around = tile.nest[: tile.n_block_loops]
    return 4 * tile.order.workers * prod(plan.extent(around, a) for a in plan.program.stage(tile.works[0].stage).axes)


def box_bytes(plan: Plan, launch: Launch, c: Channel) -> int:
    """Bytes that one fill asks for, also those beyond the block that the copy engine brings."""
    nest = launch.tile.nest
    slot = plan.slot_bytes(launch.tile, c)
    if c.transport != "tma":
        return slot
    return slot // plan.extent(nest[: c.at + 1], plan.program.value(c.value).axes[-1]) * brought(plan, launch.tile, c)


def _existing_bytes(plan: Plan, launch: Launch, c: Channel) -> float:
    """Bytes that all fills of a channel bring to slots: of a box that reaches beyond the edge, what there is."""
    nest, v = launch.tile.nest[: c.at + 1], plan.program.value(c.value)
    total = float(size_bytes(v.dtype) * prod(plan.count(nest, i) for i, x in enumerate(nest) if x.axis not in v.axes))
    for a in v.axes:
        size, piece = upper(plan.program.dim(a)), plan.extent(nest, a)
        wide = brought(plan, launch.tile, c) if c.transport == "tma" and a == v.axes[-1] else piece
        total *= size if wide == piece else sum(min(wide, size - at) for at in range(0, size, piece))
    return total


@dataclass(frozen=True, slots=True)
class Bounds:
    """The least time of a launch by each of its resources, in microseconds, of the busiest multiprocessor."""

    arithmetic_us: float
    shared_us: float  # waves of shared memory, one a clock
    l2_us: float
    stores_us: float  # to the device's memory
    chain_us: float  # fills that wait for one another

    @property
    def time_us(self) -> float:
        return max(self.arithmetic_us, self.shared_us, self.l2_us, self.stores_us, self.chain_us)


def bounds(
    t: Traffic,
    r: Residency,
    target: Target,
    compute_us: float,
    joined: bool = False,
    shared: bool = False,
    masked: Walked | None = None,
) -> Bounds:
    """Bounds of the launch, of which all blocks together would compute for `compute_us` were they spread evenly.

    joined: while a block finishes one tile, its rings are filled for the next.
    shared: blocks share the steps of tiles evenly
    masked: how far blocks walk where masks spare them steps; `compute_us` counts what is left alone
    """
    busiest = t.blocks / r.units if shared else ceil(t.blocks / r.units)
    uneven = busiest * target.n_sms / t.blocks
    clocks = target.n_sms * target.boost_mhz  # of all multiprocessors in a microsecond
    laps = t.blocks / r.places if shared else ceil(t.blocks / r.places)
    turns, share = laps * t.turns, 1.0
    if masked:
        uneven, share = masked.longest * target.n_sms / r.units, masked.share
        turns = masked.longest * share * t.turns * t.blocks / r.places
    chain = turns + (1 if joined else laps) * t.depth
    return Bounds(
        compute_us * uneven,
        (t.reads.taken + t.fills.taken) / clocks * uneven * share,
        (t.fetched_bytes * share + t.exchanged_bytes) / (_L2_BYTES * clocks),
        SECTOR_BYTES * t.stores.taken / (target.dram_gbs * 1e3),
        chain / t.depth * _FILL_US,
    )


def wave_bytes(plan: Plan, launch: Launch, work: Work, slots: float) -> float:
    """Bytes of operands that all waves of `slots` tiles touch, each wave counted anew.

    What a wave shares, the last-level cache brings once: a group of rows (raster) makes a wave squarer.
    """
    tile, program = launch.tile, plan.program
    stage = program.stage(work.stage)
    m, n, _ = mnk_axes(stage)
    loops = [(i, x) for i, x in enumerate(tile.nest[: tile.n_tile_loops]) if x.axis in (m, n)]
    count = {x.axis: plan.count(tile.nest, i) for i, x in loops}
    rest = prod(plan.count(tile.nest, i) for i in range(tile.n_tile_loops)) / max(1, prod(count.values()))
    inner = loops[-1][1].axis if loops else n
    outer = m if inner == n else n
    rows, columns = count.get(outer or "", 1), count.get(inner, 1)
    if tile.order.group > 1:
        high = min(tile.order.group, rows)
        wide = min(columns, ceil(slots / high))
    else:
        wide, high = min(columns, max(1, int(slots))), 1
    high = min(rows, max(high, ceil(slots / wide)))
    n_waves = max(1.0, rows * columns / (high * wide)) * rest
    touched = {outer: high, inner: wide}
    total = 0.0
    for name in dict.fromkeys(v for s in beside(program, tile, work.stage) for v in program.stage(s).reads):
        v = program.value(name)
        around = tile.nest[: tile.n_tile_loops]
        sizes = (min(touched.get(x, 1) * plan.extent(around, x), upper(program.dim(x))) for x in v.axes)
        total += size_bytes(v.dtype) * prod(sizes)
    return total * n_waves


# ---------------------------------------------------------------- operands
def _reads(atom: Atom, a: tuple[Ring, ...], b: tuple[Ring, ...], k: str, mt: int, nt: int, k_size: int) -> Count:
    """Waves of one agent's first and second operands for one fill."""
    total = NONE
    if atom.name == "wgmma":  # reads through an engine of its own, from a layout that is made for it
        item = a[0].layout.item
        whole = max(len(a), len(b)) * mt * nt * (atom.m + atom.n) * k_size * item / WAVE_BYTES
        return Count(whole, whole)
    if atom.name == "wgmma_rs":  # each warp loads its 16 rows, for all instructions along n
        rest = max(len(a), len(b)) * mt * nt * atom.n * k_size * a[0].layout.item / WAVE_BYTES
        for ring in a:
            total += _matrices(ring.layout).times(GROUP * mt * (k_size // _MMA_K))
        return total + Count(rest, rest)
    if atom.name == "simt":
        for rings, atoms, step, across, lane in ((a, mt, atom.m, 4, LANES // 8), (b, nt, atom.n, 8, LANES % 8)):
            each = step // across
            first = tuple((lane * each).tolist())
            for ring in rings:
                total += _vectors(ring.layout, ring.columns == k, atoms, step, each, atom.k, first)
        return total.times(k_size // atom.k)
    for rings, count in ((a, mt), (b, nt / 2)):
        for ring in rings:
            total += _matrices(ring.layout).times(count)
    return total.times(k_size // _MMA_K)


@lru_cache(4096)
def _matrices(slot: Slot) -> Count:
    """Four matrices of 8 x 8, a row of 16 bytes a lane; whichever way they lie, 8 rows are read together."""
    return waves(bytes_at(slot, LANES % 16, LANES // 16 * 8)[None], 16)


@lru_cache(4096)
def _vectors(slot: Slot, along_k: bool, atoms: int, step: int, each: int, k: int, first: tuple[int, ...]) -> Count:
    """Loads of a lane's `each` elements of every atom and k along the folded axis, as vectors along the contiguous one."""
    own = np.array(first)
    if along_k:
        wide = min(k, 16 // slot.item)
        at = [
            bytes_at(slot, i * step + own + r, np.full(WARP, q))
            for i in range(atoms)
            for r in range(each)
            for q in range(0, k, wide)
        ]
    else:
        wide = min(each, 16 // slot.item)
        at = [
            bytes_at(slot, np.full(WARP, q), i * step + own + c)
            for q in range(k)
            for i in range(atoms)
            for c in range(0, each, wide)
        ]
    return waves(np.stack(at), wide * slot.item)


# ---------------------------------------------------------------- fills and stores
@lru_cache(4096)
def _fill(slot: Slot, granule: int) -> Count:
    """Waves of writing one slot, piece after piece along its rows, a piece a lane."""
    per_row = slot.columns * slot.item // granule
    n = np.arange(-(-slot.rows * per_row // WARP) * WARP)
    at = bytes_at(slot, n // per_row, n % per_row * (granule // slot.item))
    return waves(np.where(n < slot.rows * per_row, at, -1).reshape(-1, WARP), granule)


def _stores(plan: Plan, launch: Launch, atom: Atom, n: str, m_size: int, n_size: int) -> Count:
    """Sectors of the stores of one agent's tile."""
    tile, program = launch.tile, plan.program
    value, item = stored_value(plan, launch, atom)
    if tile.placement(value.name):  # leaves by the copy engine, in whole rows
        whole = m_size * n_size * item / SECTOR_BYTES
        return Count(whole, whole)
    aligned = transfer_bytes(plan, tile.nest, value.name) // size_bytes(value.dtype)
    pitch = item * upper(program.dim(n))
    if atom.name == "simt":
        each = atom.n // 8
        wide = min(gcd(each, aligned), TRANSFER_BYTES // item)
        at = (LANES // 8) * (atom.m // 4) * pitch + LANES % 8 * each * item
        begin = starts(pitch, n_size * item, 0, n_size // atom.n, atom.n * item)
        return sectors(tuple(at.tolist()), wide * item, begin).times(m_size * n_size / (WARP * wide))
    # Lanes of a row exchange pairs of neighbouring atoms for vectors of 16 bytes, where everything has such vectors.
    pieces, pairs = n_size // 8, TRANSFER_BYTES // (2 * item)
    if aligned % (2 * pairs) or pieces < pairs or items(plan, launch, atom, n) - {item}:
        pairs = 1
    total = NONE
    whole = pieces - pieces % pairs
    for each, first, n_pieces in ((pairs, 0, whole), (1, whole, pieces - whole)):
        columns = LANES % each * 8 + (LANES & (4 - each)) * 2 if each > 1 else LANES % 4 * 2
        wide = gcd(2 * each, aligned)
        at = LANES // 4 * pitch + columns * item
        begin = starts(8 * pitch, n_size * item, first * 8 * item, n_pieces // each, 8 * each * item)
        one = sectors(tuple(at.tolist()), wide * item, begin)
        total += one.times(m_size / 8 * n_pieces / each * (2 * each / wide))
    return total
