"""Traffic of the `direct` atom: operands that lanes load from memory to registers, sums of warps that meet in shared memory.

Rows that do not exist are not counted: lanes repeat the last one, which they have. Follows `cuda_direct`; knows no times.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import numpy as np

from emmy.costmodel.counting import LANES, NONE, Count, Traffic, waves
from emmy.costmodel.dealt import leaving, one_by_one, stored_value, stores, vectors
from emmy.ir.beside import beside, operands
from emmy.ir.dtype import size_bytes
from emmy.ir.expr import Read, factors
from emmy.ir.gpu import sharers, sharing_blocks, warps
from emmy.ir.moves.atom import mnk_axes
from emmy.ir.moves.direct_tiles import ROWS, STEP, vector_bytes
from emmy.ir.on_the_way import row_values
from emmy.ir.plan import Atom, Launch, Plan, Work
from emmy.ir.program import Stage, Value, upper


def traffic(plan: Plan, launch: Launch, work: Work, atom: Atom) -> Traffic:
    """What `work`, a contraction of two matrices by the direct atom, moves."""
    tile, program = launch.tile, plan.program
    stage = program.stage(work.stage)
    m, n, k = mnk_axes(stage)
    assert m is not None
    b, together = _second(plan, stage), beside(program, tile, work.stage)
    n_b = len(operands(program, together)[1])
    m_size, n_size, k_size = (upper(program.dim(x)) for x in (m, n, k))
    nest = tile.nest
    walked = {x: prod(plan.count(nest, i) for i, y in enumerate(nest) if y.axis == x) for x in (m, n)}
    blocks = prod(plan.count(nest, i) for i in range(tile.n_block_loops))
    serial = prod(plan.count(nest, i) for i, x in enumerate(nest) if x.level == "serial")
    rows, columns, steps = min(ROWS, m_size), plan.extent(nest, n), plan.extent(nest, k) // STEP
    item = size_bytes(b.dtype)
    # Every warp brings its rows for A for its columns; blocks of other rows bring B again.
    matrices = prod(plan.count(nest, i) for i, y in enumerate(nest) if y.axis not in (m, n, k))
    alone, loaded = m_size * k_size, row_values(plan, launch, stage)
    brought = sum(alone if m in program.value(v).axes else walked[m] * k_size for v in loaded)
    fetched = float(matrices * item * (n_b * walked[m] * n_size * k_size + walked[n] * brought))
    slots, agents = min(work.unroll, steps), warps(plan, nest)
    along_k = b.axes[-1] == k
    reads, fills = _shared(plan, launch, stage, atom, rows, along_k)
    cluster, passed = sharing_blocks(plan, tile), 0.0
    if _shares_of(plan, launch, stage) > 1:
        out = one_by_one(plan, launch, atom, m, n, 1).times(1 / cluster)
        sums = rows * _columns(plan, launch, n) * sharers(plan, nest, stage)
        passed = 4.0 * len(together) * sums * (cluster - 1) * blocks / cluster
    else:
        pitch, size = n_size * stored_value(plan, launch, atom)[1], stored_value(plan, launch, atom)[1]
        out = _alone(rows, columns // atom.n, atom.n, along_k, size, pitch).times(agents)
    return Traffic(
        reads.times(blocks * serial * len(together)),
        fills.times(blocks * serial * len(together)),
        out.times(blocks * leaving(plan, launch, together)),
        fetched,
        fetched,
        passed,
        float(agents * slots * STEP * item * (n_b * columns + rows)),
        vector_bytes(along_k, atom.n),
        blocks,
        serial * (steps + slots) - slots,  # the loads of one piece end before those of the next begin
        slots,
    )


def shared_bytes(plan: Plan, launch: Launch, work: Work, atom: Atom) -> int:
    """Bytes of shared memory in which the sums of a block's warps meet, and those of a cluster's blocks."""
    stage = plan.program.stage(work.stage)
    parts = sharers(plan, launch.tile.nest, stage)
    _, n, k = mnk_axes(stage)
    along_k = _second(plan, stage).axes[-1] == k
    each = 4 * parts * ROWS * _pitch(_columns(plan, launch, n), along_k) if _shares_of(plan, launch, stage) > 1 else 0
    return len(beside(plan.program, launch.tile, work.stage)) * each


def _shares_of(plan: Plan, launch: Launch, stage: Stage) -> int:
    """Warps that fold one element, those of all blocks of a cluster that share the fold."""
    return sharers(plan, launch.tile.nest, stage) * sharing_blocks(plan, launch.tile)


def _second(plan: Plan, stage: Stage) -> Value:
    """The operand of the columns."""
    return plan.program.value([f.value for f in factors(stage.body) if isinstance(f, Read)][1])


def _columns(plan: Plan, launch: Launch, n: str) -> int:
    """Of a block."""
    return plan.extent(launch.tile.nest[: launch.tile.n_block_loops], n)


def _pitch(columns: int, along_k: bool) -> int:
    return columns + (4 if along_k else 1)


def _shared(plan: Plan, launch: Launch, stage: Stage, atom: Atom, rows: int, along_k: bool) -> tuple[Count, Count]:
    """Waves in which a block's sums are read, by whichever block, and written; none where one warp folds all of k."""
    nest = launch.tile.nest
    if _shares_of(plan, launch, stage) == 1:
        return NONE, NONE
    n = stage.axes[-1]
    columns, mine = _columns(plan, launch, n), plan.extent(nest, n)
    read, written = _shares(rows, columns, mine // atom.n, atom.n, along_k)
    return read.times(sharers(plan, nest, stage)), written.times(warps(plan, nest))


@lru_cache(4096)
def _shares(rows: int, columns: int, tiles: int, atom_n: int, along_k: bool) -> tuple[Count, Count]:
    """(of reading one part, an element a thread; of a warp that writes its sums)."""
    pitch = _pitch(columns, along_k)
    row, column = _place(tiles, atom_n, along_k)
    written = np.where(row < rows, 4 * (row * pitch + column), -1)
    return waves(vectors(rows, columns, 1, 4 * pitch, 4), 4), waves(written[(written >= 0).any(axis=1)], 4)


@lru_cache(4096)
def _alone(rows: int, tiles: int, atom_n: int, along_k: bool, item: int, pitch: int) -> Count:
    """Sectors of a warp that stores its sums, an element a lane."""
    row, column = _place(tiles, atom_n, along_k)
    at = np.where(row < rows, row * pitch + column * item, -1)
    return stores(at[(at >= 0).any(axis=1)], item)


def _place(tiles: int, atom_n: int, along_k: bool) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each of a lane's sums [i, lane] in its warp's tile."""
    at = [(j, p, h, r) for j in range(tiles) for p in range(atom_n // 16) for h in range(2) for r in range(2)]
    row = np.stack([LANES % 4 * 2 + r for *_, r in at])
    if along_k:
        return row, np.stack([j * 16 + h * 8 + LANES // 4 for j, _, h, _ in at])
    return row, np.stack([j * atom_n + LANES // 4 * (atom_n // 8) + p * 2 + h for j, p, h, _ in at])
