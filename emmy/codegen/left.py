"""Memory through which blocks of one launch pass sums of a tile that they share (stream-K). Knows no code and no layout."""

from __future__ import annotations

from math import prod

from emmy.codegen.kernel import Buffer, Int
from emmy.ir.plan import Plan


def left_buffers(plan: Plan) -> tuple[Buffer, ...]:
    """For each launch in this order: f32 sums of one tile for each worker, and a flag of each, down before and after a launch."""
    out: list[Buffer] = []
    for la in plan.launches:
        if la.tile.order.kind == "streamk":
            workers, stage = la.tile.order.workers, la.tile.works[0].stage
            around = la.tile.nest[: la.tile.n_block_loops]
            elements = prod(plan.extent(around, a) for a in plan.program.stage(stage).axes)
            out.append(Buffer(sums_name(stage), "f32", "workspace", Int(workers * elements)))
            out.append(Buffer(flags_name(stage), "f32", "flags", Int(workers)))
    return tuple(out)


def sums_name(stage: str) -> str:
    return f"{stage}_left"


def flags_name(stage: str) -> str:
    return f"{stage}_flags"
