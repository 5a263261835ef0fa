"""Sums that meet in shared memory, of a cluster's blocks or a block's warps, and elements dealt to threads: waves and sectors.

Knows the forms that `cuda_cluster` and `cuda_tile` make, no times.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import numpy as np

from emmy.costmodel.counting import LANES, NONE, SECTOR_BYTES, Count, Integers, waves
from emmy.ir.dtype import size_bytes
from emmy.ir.gpu import TRANSFER_BYTES, WARP, exchange_pitch, sharing_blocks, transfer_bytes
from emmy.ir.plan import Atom, Launch, Plan
from emmy.ir.program import Value, same_rows, swapped, upper


def stored_value(plan: Plan, launch: Launch, atom: Atom) -> tuple[Value, int]:
    """What leaves a launch that an atom makes the sums of, element by element, and bytes of one as it is stored."""
    program = plan.program
    axes = program.stage(atom.stage).axes
    made = (s for w in launch.tile.works if same_rows((s := program.stage(w.stage)).axes, axes))
    left = [s.out for s in made if plan.stored(s, launch)]
    space = plan.workspace(atom.stage)
    value = program.value(atom.stage if space or not left else left[-1])
    return value, 4 if space else size_bytes(value.dtype)


def leaving(plan: Plan, launch: Launch, together: tuple[str, ...]) -> int:
    """How many tiles leave a launch of those sums side by side, or of what becomes of them."""
    if plan.workspace(together[0]):
        return len(together)
    return max(1, sum(plan.stored(plan.program.stage(s), launch) for s in together))


def items(plan: Plan, launch: Launch, atom: Atom, n: str) -> set[int]:
    """Bytes of an element of what finished elements are made with that lies along `n` in memory."""
    return {size_bytes(x.dtype) for x in _used(plan, launch, atom) if x.axes[-1:] == (n,)}


def _used(plan: Plan, launch: Launch, atom: Atom) -> tuple[Value, ...]:
    """What is read to finish elements."""
    if plan.workspace(atom.stage):
        return ()
    here = {w.stage for w in launch.tile.works}
    stages = (plan.program.stage(w.stage) for w in launch.tile.works)
    names = dict.fromkeys(v for s in stages if not s.reduces for v in s.reads if v not in here)
    return tuple(plan.program.value(v) for v in names)


@dataclass(frozen=True, slots=True)
class Exchange:
    """What blocks of a cluster, or threads, do with a tile's sums: waves of giving and taking, bytes from other blocks, stores."""

    given: Count
    taken: Count
    passed_bytes: float
    stores: Count


def exchange(plan: Plan, launch: Launch, atom: Atom, m: str, n: str) -> Exchange | None:
    """The exchange of one tile of a launch; None where no cluster shares folds, unless the factors are swapped."""
    tile = launch.tile
    cluster, turned = sharing_blocks(plan, tile), swapped(plan.program.stage(atom.stage))
    if cluster == 1 and not turned:
        return None
    if turned:  # from here on rows and columns are those in memory
        m, n = n, m
    inside = tile.nest[: tile.n_block_loops]
    rows, columns = plan.extent(inside, m), plan.extent(inside, n)
    pitch, width = exchange_pitch(columns, turned), _width(plan, launch, atom, n, 8)
    one, each = _turned(atom.name, atom.m, atom.n, pitch) if turned else _given(atom.name, atom.m, atom.n, pitch)
    return Exchange(
        one.times(cluster * rows * columns / (WARP * each)),
        _taken(rows, columns, width, pitch).times(cluster),
        4.0 * rows * columns * (cluster - 1),
        one_by_one(plan, launch, atom, m, n, width),
    )


@lru_cache(4096)
def _given(name: str, m: int, n: int, pitch: int) -> tuple[Count, int]:
    """(waves of a warp that stores a vector of sums each lane, elements of a vector)."""
    if name == "simt":
        each = min(n // 8, TRANSFER_BYTES // 4)
        at = LANES // 8 * (m // 4) * pitch + LANES % 8 * (n // 8)
    else:
        each, at = 2, LANES // 4 * pitch + LANES % 4 * 2
    return waves(4 * at[None], 4 * each), each


@lru_cache(4096)
def _turned(name: str, m: int, n: int, pitch: int) -> tuple[Count, int]:
    """The same of sums that stand below one another, an element at a time."""
    across, down = (LANES // 8 * (m // 4), LANES % 8 * (n // 8)) if name == "simt" else (LANES // 4, LANES % 4 * 2)
    return waves(4 * (down * pitch + across)[None], 4), 1


@lru_cache(4096)
def _taken(rows: int, columns: int, width: int, pitch: int) -> Count:
    """Waves of reading one block's sums of a tile, vector by vector."""
    at, wide = vectors(rows, columns, width, pitch, 1), min(width, TRANSFER_BYTES // 4)
    total = NONE
    for first in range(0, width, wide):
        total += waves(np.where(at < 0, -1, 4 * (at + first)), 4 * wide)
    return total


def one_by_one(plan: Plan, launch: Launch, atom: Atom, m: str, n: str, width: int) -> Count:
    """Sectors of one tile whose vectors of `width` elements are dealt to neighbouring threads, row after row."""
    _, item = stored_value(plan, launch, atom)
    nest = launch.tile.nest[: launch.tile.n_block_loops]
    rows, pitch = min(plan.extent(nest, m), upper(plan.program.dim(m))), item * upper(plan.program.dim(n))
    return _dealt(rows, plan.extent(nest, n), width, item, pitch)


def _width(plan: Plan, launch: Launch, atom: Atom, n: str, natural: int) -> int:
    """Elements of the widest vector along n that everything read and stored for finished elements allows."""
    value, _ = stored_value(plan, launch, atom)
    width = gcd(natural, plan.extent(launch.tile.nest[: launch.tile.n_block_loops], n))
    for x in (value, *_used(plan, launch, atom)):
        if n in x.axes:
            own = transfer_bytes(plan, launch.tile.nest, x.name) // size_bytes(x.dtype)
            width = gcd(width, own) if x.axes[-1] == n else 1
    return width


def vectors(rows: int, columns: int, width: int, pitch: int, item: int) -> Integers:
    """Where a thread's vector [i, lane] begins, rows `pitch` apart, elements `item`; -1: it has none."""
    first = np.arange(-(-rows * columns // (width * WARP)) * WARP) * width
    at = np.where(first < rows * columns, first // columns * pitch + first % columns * item, -1)
    return at.reshape(-1, WARP)


@lru_cache(4096)
def _dealt(rows: int, columns: int, width: int, item: int, pitch: int) -> Count:
    at = vectors(rows, columns, width, pitch, item)
    wide = min(width, TRANSFER_BYTES // item)
    total = NONE
    for more in range(0, width, wide):
        total += stores(np.where(at < 0, -1, at + more * item), wide * item)
    return total


def stores(at: Integers, size: int) -> Count:
    """Sectors of instructions [i, lane] that store `size` bytes each at these bytes; -1: the lane does not."""
    there = at >= 0
    which = np.broadcast_to(np.arange(at.shape[0])[:, None], at.shape)[there]
    sector = at[there] // SECTOR_BYTES
    taken = len(np.unique(which * (int(sector.max()) + 1) + sector))
    ideal = -(-there.sum(axis=1) * size // SECTOR_BYTES)
    return Count(float(taken), float(ideal.sum()))
