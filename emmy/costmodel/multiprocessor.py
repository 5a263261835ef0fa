"""What a launch of warps asks of a multiprocessor: waves of shared memory, sectors of stores, blocks that fit beside each other.

Counted from plan and layouts alone; the emulator counts the same from the text, and a test holds the two equal. A wave is
one pass over the 32 banks of shared memory, a sector 32 bytes of global memory; `ideal` is what neighbouring addresses
would take. Knows no cost model.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from emmy.codegen.cuda_layout import Slot
from emmy.codegen.cuda_scope import Ring, Walk
from emmy.codegen.kernel import Int, IntOp, IntVar, Whole
from emmy.ir.dtype import size_bytes
from emmy.ir.expr import Read, factors
from emmy.ir.gpu import (
    GROUP,
    TRANSFER_BYTES,
    WARP,
    placed_bytes,
    ring_bytes,
    thread_registers,
    threads,
    transfer_bytes,
    warps,
)
from emmy.ir.moves.atom import mnk_axes
from emmy.ir.plan import Atom, Launch, Plan, Tile, Work
from emmy.ir.program import upper
from emmy.ir.target import Target

Integers = NDArray[np.int64]

WAVE_BYTES = 128
_SECTOR_BYTES = 32
_RESERVED_BYTES = 1024  # of shared memory a block, from sm_80 on (CUDA C++ Programming Guide: Shared Memory)
_MMA_K = 16
_LANES = np.arange(WARP)
_OPS: Mapping[str, Callable[[Integers, Integers], Integers]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
    "%": operator.mod,
    "&": operator.and_,
    "^": operator.xor,
    ">>": operator.rshift,
}


@dataclass(frozen=True, slots=True)
class Count:
    """Waves or sectors that accesses take, and those they would take at best."""

    taken: float
    ideal: float

    @property
    def conflict(self) -> float:
        """taken / ideal; 1 where nothing is accessed."""
        return self.taken / self.ideal if self.ideal else 1.0

    def __add__(self, other: Count) -> Count:
        return Count(self.taken + other.taken, self.ideal + other.ideal)

    def times(self, n: float) -> Count:
        return Count(self.taken * n, self.ideal * n)


NONE = Count(0.0, 0.0)

# Nominal figures of the cards since 2020; they only place the corners of a bound that a model corrects.
_FILL_US = 1.0  # from asking memory for a slot to reading it
_L2_BYTES = 32  # a clock and multiprocessor, of what the last-level cache delivers


@dataclass(frozen=True, slots=True)
class Traffic:
    """A launch, over all its blocks, each counted as a whole one. `reads`: operands from slots; `fills`: slots by threads."""

    reads: Count
    fills: Count
    stores: Count  # sectors, of the sums or what becomes of them
    copied_bytes: float  # from global memory into slots
    in_flight_bytes: float  # of a block, on their way to its slots while it computes
    blocks: int
    turns: int  # fills of a block's rings, one after another
    depth: int  # of the rings: so many fills are under way at once


@dataclass(frozen=True, slots=True)
class Residency:
    """How a launch's blocks share a multiprocessor. `registers`: of a thread, estimated, mostly from above."""

    registers: int
    threads: int
    blocks: int  # side by side on one multiprocessor, by registers, shared memory and threads; at least 1


def residency(plan: Plan, launch: Launch, work: Work, atom: Atom, target: Target) -> Residency:
    """How many blocks of the launch of `work`, a contraction by `atom`, a multiprocessor of the target holds at once."""
    stage, tile = plan.program.stage(work.stage), launch.tile
    registers = thread_registers(plan, launch, work, atom, mnk_axes(stage))
    n_threads = threads(plan, launch)
    n_warps = n_threads // WARP
    placed = sum(placed_bytes(plan, tile, x.value) for x in tile.placements if not tile.channel(x.value))
    smem = sum(ring_bytes(plan, tile, c) for c in tile.channels) + placed + _RESERVED_BYTES
    # Each quarter of a multiprocessor deals its registers to whole warps, eight a thread at a time; roles deal again.
    each = min(target.max_regs_thread + 1, -(-registers // 8) * 8)
    by_registers = GROUP * (target.regs_sm // GROUP // (each * WARP)) // n_warps
    dealt = sum(r.registers * r.agents * GROUP * WARP for r in tile.roles)
    if dealt:
        by_registers = target.regs_sm // dealt
    fit = (by_registers, target.smem_sm_bytes // smem, target.max_threads_sm // n_threads, target.max_blocks_sm)
    return Residency(registers, n_threads, max(1, min(fit)))


def traffic(plan: Plan, launch: Launch, work: Work, atom: Atom, target: Target) -> Traffic | None:
    """What `work`, a contraction by `atom` of two staged matrices, moves; None when it is no such thing."""
    tile, stage = launch.tile, plan.program.stage(work.stage)
    names = [f.value for f in factors(stage.body) if isinstance(f, Read)]
    staged = {c.value for c in tile.channels}
    m, n, k = mnk_axes(stage)
    flat = all(len(plan.program.value(v).axes) == 2 for v in staged)
    if m is None or len(names) != 2 or not flat or not staged.issuperset(names):
        return None
    w = Walk(plan, launch, target)
    w.place_rings()
    a, b = (w.rings[v] for v in names)
    if {a.rows, a.columns} != {m, k} or {b.rows, b.columns} != {n, k}:
        return None
    size = {x: plan.extent(tile.nest, x) for x in (m, n, k)}
    reads = _reads(atom, a, b, k, size[m] // atom.m, size[n] // atom.n, size[k])
    blocks = prod(plan.count(tile.nest, i) for i in range(tile.n_block_loops))
    turns = prod(plan.count(tile.nest, i) for i, x in enumerate(tile.nest) if x.level == "serial")
    fills, copied, flying = NONE, 0.0, 0.0
    for c in tile.channels:
        slot_bytes = float(plan.slot_bytes(tile, c))
        times = prod(plan.count(tile.nest, i) for i in range(c.at + 1))
        copied += times * slot_bytes
        flying += slot_bytes * (c.depth - 1 + (c.transport == "ldg"))
        if c.transport != "tma":
            granule = max(4, transfer_bytes(plan, tile.nest, c.value))
            fills += _fill(w.rings[c.value].layout, granule).times(times)
    agents = max(1, warps(plan, tile.nest) // (GROUP if atom.name == "wgmma" else 1))
    stores = _stores(plan, launch, atom, n, size[m], size[n]).times(blocks * agents)
    depth = max(c.depth for c in tile.channels)
    return Traffic(reads.times(blocks * turns * agents), fills, stores, copied, flying, blocks, turns, depth)


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


def bounds(t: Traffic, r: Residency, target: Target, compute_us: float) -> Bounds:
    """Bounds of the launch, of which all blocks together would compute for `compute_us` were they spread evenly."""
    busiest = -(-t.blocks // target.n_sms)
    uneven = busiest * target.n_sms / t.blocks
    clocks = target.n_sms * target.boost_mhz  # of all multiprocessors in a microsecond
    return Bounds(
        compute_us * uneven,
        (t.reads.taken + t.fills.taken) / clocks * uneven,
        t.copied_bytes / (_L2_BYTES * clocks),
        _SECTOR_BYTES * t.stores.taken / (target.dram_gbs * 1e3),
        -(-busiest // r.blocks) * (t.turns + t.depth) / t.depth * _FILL_US,
    )


def wave_bytes(plan: Plan, launch: Launch, work: Work, slots: int) -> float:
    """Bytes of operands that all waves of `slots` blocks touch, each wave counted anew.

    What a wave shares, the last-level cache brings once: a group of rows (raster) makes a wave squarer.
    """
    tile, program = launch.tile, plan.program
    stage = program.stage(work.stage)
    m, n, _ = mnk_axes(stage)
    loops = [(i, x) for i, x in enumerate(tile.nest[: tile.n_block_loops]) if x.axis in (m, n)]
    count = {x.axis: plan.count(tile.nest, i) for i, x in loops}
    rest = prod(plan.count(tile.nest, i) for i in range(tile.n_block_loops)) / max(1, prod(count.values()))
    inner = loops[-1][1].axis if loops else n
    outer = m if inner == n else n
    rows, columns = count.get(outer or "", 1), count.get(inner, 1)
    if tile.order.group > 1:
        high = min(tile.order.group, rows)
        wide = min(columns, -(-slots // high))
    else:
        wide, high = min(columns, slots), 1
    high = min(rows, max(high, -(-slots // wide)))
    waves = max(1.0, rows * columns / (high * wide)) * rest
    touched = {outer: high, inner: wide}
    total = 0.0
    for name in stage.reads:
        v = program.value(name)
        around = tile.nest[: tile.n_block_loops]
        sizes = (min(touched.get(x, 1) * plan.extent(around, x), upper(program.dim(x))) for x in v.axes)
        total += size_bytes(v.dtype) * prod(sizes)
    return total * waves


# ---------------------------------------------------------------- operands
def _reads(atom: Atom, a: Ring, b: Ring, k: str, mt: int, nt: int, k_size: int) -> Count:
    """Waves of one agent's operands for one fill."""
    if atom.name == "wgmma":  # reads through an engine of its own, from a layout that is made for it
        item = a.layout.item
        waves = mt * nt * (atom.m + atom.n) * k_size * item / WAVE_BYTES
        return Count(waves, waves)
    if atom.name == "simt":
        lanes = ((a, mt, atom.m, 4, _LANES // 8), (b, nt, atom.n, 8, _LANES % 8))
        total = NONE
        for ring, atoms, step, across, lane in lanes:
            each = step // across
            first = tuple((lane * each).tolist())
            total += _vectors(ring.layout, ring.columns == k, atoms, step, each, atom.k, first)
        return total.times(k_size // atom.k)
    read = _matrices(a.layout).times(mt) + _matrices(b.layout).times(nt / 2)
    return read.times(k_size // _MMA_K)


@lru_cache(4096)
def _matrices(slot: Slot) -> Count:
    """Four matrices of 8 x 8, a row of 16 bytes a lane; whichever way they lie, 8 rows are read together."""
    return _waves(_at(slot, _LANES % 16, _LANES // 16 * 8)[None], 16)


@lru_cache(4096)
def _vectors(slot: Slot, along_k: bool, atoms: int, step: int, each: int, k: int, first: tuple[int, ...]) -> Count:
    """Loads of a lane's `each` elements of every atom and k along the folded axis, as vectors along the contiguous one."""
    own = np.array(first)
    if along_k:
        wide = min(k, 16 // slot.item)
        at = [
            _at(slot, i * step + own + r, np.full(WARP, q))
            for i in range(atoms)
            for r in range(each)
            for q in range(0, k, wide)
        ]
    else:
        wide = min(each, 16 // slot.item)
        at = [
            _at(slot, np.full(WARP, q), i * step + own + c)
            for q in range(k)
            for i in range(atoms)
            for c in range(0, each, wide)
        ]
    return _waves(np.stack(at), wide * slot.item)


# ---------------------------------------------------------------- fills and stores
@lru_cache(4096)
def _fill(slot: Slot, granule: int) -> Count:
    """Waves of writing one slot, piece after piece along its rows, a piece a lane."""
    per_row = slot.columns * slot.item // granule
    n = np.arange(-(-slot.rows * per_row // WARP) * WARP)
    at = _at(slot, n // per_row, n % per_row * (granule // slot.item))
    return _waves(np.where(n < slot.rows * per_row, at, -1).reshape(-1, WARP), granule)


def _stores(plan: Plan, launch: Launch, atom: Atom, n: str, m_size: int, n_size: int) -> Count:
    """Sectors of the stores of one agent's tile."""
    tile, program = launch.tile, plan.program
    stored = [w.stage for w in tile.works if plan.stored(program.stage(w.stage), launch)]
    space = plan.workspace(atom.stage)
    value = program.value(atom.stage if space or not stored else stored[-1])
    item = 4 if space else size_bytes(value.dtype)
    if tile.placement(value.name):  # leaves by the copy engine, in whole rows
        sectors = m_size * n_size * item / _SECTOR_BYTES
        return Count(sectors, sectors)
    aligned = transfer_bytes(plan, tile.nest, value.name) // size_bytes(value.dtype)
    pitch = item * upper(program.dim(n))
    if atom.name == "simt":
        each = atom.n // 8
        wide = min(gcd(each, aligned), TRANSFER_BYTES // item)
        at = (_LANES // 8) * (atom.m // 4) * pitch + _LANES % 8 * each * item
        starts = _starts(pitch, n_size * item, 0, n_size // atom.n, atom.n * item)
        return _sectors(tuple(at.tolist()), wide * item, starts).times(m_size * n_size / (WARP * wide))
    # Lanes of a row exchange pairs of neighbouring atoms for vectors of 16 bytes, where everything has such vectors.
    pieces, pairs = n_size // 8, TRANSFER_BYTES // (2 * item)
    if aligned % (2 * pairs) or pieces < pairs or _items(plan, tile, n, space is not None) - {item}:
        pairs = 1
    total = NONE
    whole = pieces - pieces % pairs
    for each, first, n_pieces in ((pairs, 0, whole), (1, whole, pieces - whole)):
        columns = _LANES % each * 8 + (_LANES & (4 - each)) * 2 if each > 1 else _LANES % 4 * 2
        wide = gcd(2 * each, aligned)
        at = _LANES // 4 * pitch + columns * item
        starts = _starts(8 * pitch, n_size * item, first * 8 * item, n_pieces // each, 8 * each * item)
        one = _sectors(tuple(at.tolist()), wide * item, starts)
        total += one.times(m_size / 8 * n_pieces / each * (2 * each / wide))
    return total


def _items(plan: Plan, tile: Tile, n: str, parts: bool) -> set[int]:
    """Bytes of an element of what finished elements are made with that lies along `n` in memory."""
    here = {w.stage for w in tile.works}
    done = () if parts else (plan.program.stage(w.stage) for w in tile.works)
    reads = {v for s in done if not s.reduces for v in s.reads if v not in here}
    return {size_bytes(x.dtype) for x in map(plan.program.value, reads) if x.axes[-1:] == (n,)}


def _starts(down: int, across: int, first: int, n: int, step: int) -> tuple[tuple[int, int], ...]:
    """(bytes into a sector, how often) where `n` stores begin, `step` bytes apart, in rows and tiles beside each other."""
    at = (i * down + j * across + first + x * step for i in range(2) for j in range(4) for x in range(n))
    return tuple(sorted(Counter(x % _SECTOR_BYTES for x in at).items()))


@lru_cache(4096)
def _sectors(lanes: tuple[int, ...], size: int, starts: tuple[tuple[int, int], ...]) -> Count:
    """Sectors that a store of a warp touches, on average over where it begins."""
    at = np.array(lanes)
    touched = sum(often * len(np.unique((at + x) // _SECTOR_BYTES)) for x, often in starts)
    taken = touched / max(1, sum(often for _, often in starts))
    return Count(taken, min(taken, -(-WARP * size // _SECTOR_BYTES)))


# ---------------------------------------------------------------- counting
def _at(slot: Slot, rows: Integers, columns: Integers) -> Integers:
    """Bytes in a slot, by the formula that code is generated from."""
    place = {"row": rows, "column": columns}
    return np.broadcast_to(_value(slot.at(IntVar("row"), IntVar("column")), place), rows.shape)


def _value(x: Whole, names: Mapping[str, Integers]) -> Integers:
    match x:
        case Int(v):
            return np.array(v)
        case IntVar(name):
            return names[name]
        case IntOp(fn, a, b):
            return _OPS[fn](_value(a, names), _value(b, names))
        case _:
            assert_never(x)


def _waves(at: Integers, size: int) -> Count:
    """Waves of instructions [i, lane] that access `size` bytes each at these bytes; -1: the lane does not.

    Accesses of 16 bytes go by quarters of a warp, of 8 by halves; a word that several lanes read is served once.
    """
    together = {16: 8, 8: 16}.get(size, WARP)
    group = (np.arange(at.shape[0])[:, None] * (WARP // together) + _LANES[None] // together)[..., None]
    words = at[..., None] // 4 + np.arange(-(-size // 4))
    there = np.broadcast_to(at[..., None] >= 0, words.shape)
    span = int(words.max()) + 1
    keys = np.unique((group * span + words)[there])
    of_group, word = keys // span, keys % span
    load = np.bincount(of_group * 32 + word % 32, minlength=32 * int(group.max() + 1)).reshape(-1, 32)
    return Count(float(load.max(axis=1).sum()), float((-(-load.sum(axis=1) // 32)).sum()))
