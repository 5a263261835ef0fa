"""How far blocks walk where masks leave nothing of what they fold: on average, and that of the multiprocessor that ends last.

Blocks begin in the order in which code is generated for them (`emmy.codegen.cuda_scope`): the longest first along the axis that a mask
compares with. So the order of a tile's loops decides how even the end is. Knows no features.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from emmy.ir.masks import Bound, bounds
from emmy.ir.plan import Launch, Loop, Plan
from emmy.ir.program import upper

_MOST_BLOCKS = 1 << 14  # scheduled one by one; of more, the end of the last ones is a small part


@dataclass(frozen=True, slots=True)
class Walked:
    """Of the steps that blocks would walk without masks the share that they walk; and the longest place's against the mean."""

    share: float
    longest: float


@lru_cache(1024)
def walked(plan: Plan, launch: Launch, places: int) -> Walked | None:
    """None where no mask spares a step. `places`: blocks side by side on the whole device."""
    masks, nest = bounds(plan, launch), launch.tile.nest
    if not masks:
        return None
    blocks = nest[: launch.tile.n_block_loops]
    axis, step = next((x.axis, x.step) for x in nest if x.level == "serial" and x.axis == masks[0].axis)
    whole = -(-plan.extent(blocks, axis) // step)
    others = {b.other.axis for b in masks if b.axis == axis}
    loops = [(i, x) for i, x in enumerate(blocks) if x.axis in others]
    if len({x.axis for _, x in loops}) != len(loops) or any(x.axis == axis for x in blocks):
        return None  # pieces of pieces: every one is counted whole
    first = {b.other.axis for b in masks if b.upper}
    steps = {
        at: _steps(plan, masks, axis, step, at)
        for at in product(*(_places(plan, blocks, i, x, first) for i, x in loops))
    }
    count = prod(plan.count(nest, i) for i in range(len(blocks)))
    mean = sum(steps.values()) / len(steps)
    if count > _MOST_BLOCKS:
        return Walked(mean / whole, 1.0)
    ends = [0.0] * max(1, places)
    for n in _in_order(plan, blocks, loops, steps, first):
        heapq.heapreplace(ends, ends[0] + n)
    return Walked(mean / whole, max(ends) * len(ends) / (mean * count))


def _places(plan: Plan, blocks: tuple[Loop, ...], i: int, x: Loop, first: set[str]) -> list[tuple[str, int, int]]:
    """(axis, begin, size) of a loop's pieces, those first that begin first."""
    found = [(x.axis, at * x.step, x.step) for at in range(plan.count(blocks, i))]
    return found[::-1] if x.axis in first else found


def _steps(plan: Plan, masks: tuple[Bound, ...], axis: str, step: int, at: tuple[tuple[str, int, int], ...]) -> int:
    """Steps that a block walks with its pieces of the other axes there."""
    lo, hi = 0, upper(plan.program.dim(axis))
    piece = {a: (begin, size) for a, begin, size in at} | {"": (0, 1)}
    for b in (b for b in masks if b.axis == axis):
        begin, size = piece[b.other.axis]
        told = upper(plan.program.dim(axis)) if b.other.read else 0  # a length known at run time: as long as it can be
        if b.upper:
            hi = min(hi, (begin + size - 1) // b.other.over + told + 1 + b.offset)
        else:
            lo = max(lo, (begin // b.other.over + told + b.offset) // step * step)
    return max(0, -(-(hi - lo) // step))


def _in_order(
    plan: Plan,
    blocks: tuple[Loop, ...],
    loops: list[tuple[int, Loop]],
    steps: dict[tuple[tuple[str, int, int], ...], int],
    first: set[str],
) -> Iterator[int]:
    """Steps of each block, in the order in which blocks begin."""
    named = {i: n for n, (i, _) in enumerate(loops)}
    every = [
        _places(plan, blocks, i, x, first) if i in named else [("", 0, 0)] * plan.count(blocks, i)
        for i, x in enumerate(blocks)
    ]
    for at in product(*every):
        yield steps[tuple(at[i] for i in named)]
