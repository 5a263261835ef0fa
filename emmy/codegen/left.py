"""Memory through which blocks of one launch tell one another what they left: sums of a tile that they share (stream-K), and
how many parts of a statistic are there. Knows no code and no layout.
"""

from __future__ import annotations

from math import prod

from emmy.codegen.cpu_scope import length_of
from emmy.codegen.kernel import Buffer, Int, Whole, pieces, times
from emmy.ir.gpu import parts_left
from emmy.ir.plan import Launch, Plan


def left_buffers(plan: Plan) -> tuple[Buffer, ...]:
    """For each launch in this order, flags and counts being zero before and after it:

    f32 sums of one tile for each worker, and a flag of each; a count of parts for each row of tiles, and where memory
    adds them, of blocks that know of zeros
    """
    out: list[Buffer] = []
    for la in plan.launches:
        if la.tile.order.kind == "streamk":
            workers, stage = la.tile.order.workers, la.tile.works[0].stage
            around = la.tile.nest[: la.tile.n_block_loops]
            elements = prod(plan.extent(around, a) for a in plan.program.stage(stage).axes)
            out.append(Buffer(sums_name(stage), "f32", "workspace", Int(workers * elements)))
            out.append(Buffer(flags_name(stage), "f32", "flags", Int(workers)))
        for x in parts_left(plan, la.tile):
            counts: Whole = Int(2 if x.added else 1)
            for a in plan.program.stage(x.value).axes:
                counts = times(counts, tiles_along(plan, la, a))
            out.append(Buffer(counts_name(x.value), "f32", "flags", counts))
    return tuple(out)


def tiles_along(plan: Plan, la: Launch, axis: str) -> Whole:
    """Tiles of a launch along an axis."""
    return pieces(length_of(plan.program.dim(axis)), plan.extent(la.tile.nest[: la.tile.n_block_loops], axis))


def sums_name(stage: str) -> str:
    return f"{stage}_left"


def flags_name(stage: str) -> str:
    return f"{stage}_flags"


def counts_name(stage: str) -> str:
    return f"{stage}_counts"
