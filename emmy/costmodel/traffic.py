"""How many bytes a plan's loops move past a cache of some size, by counting. Knows plans; knows no device.

The loops around one work, outermost first, split into those outside a cache and those inside: the largest inner part
whose operands fit stays in the cache. What it needs is fetched anew by each outer loop, unless no loop from there
inwards walks an axis of the operand, in which case the block fetched before is still the right one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod

from emmy.ir.beside import beside
from emmy.ir.dtype import size_bytes
from emmy.ir.plan import Loop, Plan, Tile, Work
from emmy.ir.program import upper

ACCUMULATOR_BYTES = 4
LINE_BYTES = 64
WAYS = 8  # of the first two cache levels of most x86-64 cores


@dataclass(frozen=True, slots=True)
class Operand:
    """An array the work's innermost tile touches: an input, a value made before, or the sums themselves."""

    name: str
    axes: tuple[str, ...]
    element_bytes: int


class LoopNest:
    """The loops around one work of a plan and those side by side with it, and the arrays they touch. `operands[-1]` is what it
    computes.
    """

    def __init__(self, plan: Plan, tile: Tile, work: Work) -> None:
        stage = plan.program.stage(work.stage)
        stages = [plan.program.stage(s) for s in beside(plan.program, tile, work.stage)]
        values = [plan.program.value(name) for name in dict.fromkeys(v for s in stages for v in s.reads)]
        inputs = [Operand(v.name, v.axes, size_bytes(v.dtype)) for v in values]
        sums = [Operand(s.out, s.axes, ACCUMULATOR_BYTES) for s in reversed(stages)]  # the work's own last
        self.operands = (*inputs, *sums)
        self.axes = stage.every
        self.loops: tuple[Loop, ...] = tuple(x for x in (*tile.nest, *work.nest) if x.axis in self.axes)
        # left[d][axis] is what is left of an axis inside the outer d loops.
        self.left = [{axis: upper(plan.program.dim(axis)) for axis in self.axes}]
        for loop in self.loops:
            self.left.append({**self.left[-1], loop.axis: loop.step})
        self.blocks = [[self._block_bytes(o, d) for o in self.operands] for d in range(len(self.left))]

    def extent(self, depth: int, axis: str) -> int:
        """What is left of `axis` inside the outer `depth` loops."""
        return self.left[depth][axis]

    def trips(self, at: int) -> float:
        """Iterations of loop `at`, a last shorter piece counted as the fraction it is."""
        loop = self.loops[at]
        return self.left[at][loop.axis] / loop.step

    def _block_bytes(self, operand: Operand, depth: int) -> float:
        return float(operand.element_bytes * prod(self.left[depth].get(a, 1) for a in operand.axes))

    def block_bytes(self, operand: Operand, depth: int) -> float:
        """Bytes of the operand's block that the loops inside the outer `depth` ones touch."""
        return self.blocks[depth][self.operands.index(operand)]

    def footprint(self, depth: int) -> float:
        """Bytes that the loops inside the outer `depth` ones touch, of all operands."""
        return sum(self.blocks[depth])

    def depth_that_fits(self, cache_bytes: float) -> int:
        """How many outer loops stay outside a cache of that size; all of them when nothing fits."""
        return next((d for d, blocks in enumerate(self.blocks) if sum(blocks) <= cache_bytes), len(self.loops))

    def fetches(self, operand: Operand, depth: int) -> float:
        """How often the operand's block at `depth` is fetched anew."""
        walks = (i for i in range(depth) if self.loops[i].axis in operand.axes and self.trips(i) > 1)
        innermost = max(walks, default=-1)
        return prod(self.trips(i) for i in range(innermost + 1))

    def moved_bytes(self, cache_bytes: float) -> tuple[float, ...]:
        """Bytes of each operand that pass a cache of that size from outside."""
        depth = self.depth_that_fits(cache_bytes)
        return tuple(self.fetches(o, depth) * self.blocks[depth][i] for i, o in enumerate(self.operands))


def set_share(rows: int, row_bytes: float, stride_bytes: int, cache_bytes: float) -> float:
    """The share of a set-associative cache that rows at a stride need, as the busiest set sees it.

    Rows that lie a large power of two apart start in few sets: 128 rows 4 KiB apart fill a 32 KiB cache sixteen times
    over, however short they are. Without such conflicts it is the plain share of bytes.
    """
    n_sets = max(1, int(cache_bytes) // (LINE_BYTES * WAYS))
    lines = max(1, -(-int(row_bytes) // LINE_BYTES))
    starts = n_sets // gcd(n_sets, stride_bytes // LINE_BYTES) if stride_bytes % LINE_BYTES == 0 else n_sets
    used = min(n_sets, starts * lines)
    return max(rows * lines / used / WAYS, rows * row_bytes / cache_bytes)


def steps(extent: int, pieces: tuple[int, ...]) -> int:
    """Innermost pieces that cover `extent` when it is cut into pieces[0], each of those into pieces[1], and so on."""
    if not pieces:
        return 1
    whole, rest = divmod(extent, pieces[0])
    inner = pieces[1:]
    return whole * steps(pieces[0], inner) + (steps(rest, inner) if rest else 0)
