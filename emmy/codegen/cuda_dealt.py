"""Elements of a block dealt to its threads, where no atom has made them: vector after vector, or to warps by rows.

Blocks of a cluster that share a fold deal the elements of their tile among all of them. Knows nothing of what becomes of them.
"""

from __future__ import annotations

from math import prod

from emmy.codegen.cuda_scope import Walk
from emmy.codegen.cuda_values import Spread
from emmy.codegen.kernel import Int, Whole, below, over, plus, rest, times
from emmy.codegen.kernel_gpu import UNROLL, counter
from emmy.ir.gpu import WARP

_UNROLLED = 16  # vectors of a row that a lane walks, at most


def in_order(w: Walk, axes: tuple[str, ...], width: int, *, alone: bool = False, lanes: int = 1) -> Spread:
    """Neighbouring threads have neighbouring vectors of `width` elements, or so many lanes one.

    alone: those of the block have all of them
    """
    sizes = [w.scope[a].size for a in axes]
    counts = [*sizes[:-1], sizes[-1] // width]
    vectors, agents = prod(counts), w.threads // lanes * (1 if alone else w.sharing)
    passes = -(-vectors // agents)
    first = Int(0) if alone else _rank(w, w.threads)
    number = plus(first, over(w.thread(), Int(lanes)), times(counter("it", passes), Int(agents)))
    spot: dict[str, Whole] = {}
    left = number
    for a, n in reversed(list(zip(axes, counts, strict=True))):
        inside = left if a == axes[0] else rest(left, Int(n))
        spot[a] = plus(w.scope[a].lo, times(inside, Int(width)) if a == axes[-1] else inside)
        left = over(left, Int(n))
    exists = below(number, Int(vectors)) if vectors % agents else Int(1)
    return Spread(axes, (), (("it", passes),), spot, width, exists)


def by_rows(w: Walk, axes: tuple[str, ...], width: int) -> Spread:
    """The lanes of one warp have all of a row."""
    *outer, last = axes
    sizes, here = [w.scope[a].size for a in outer], w.threads // WARP
    rows, vectors, warps = prod(sizes), w.scope[last].size // width, here * w.sharing
    passes, columns = -(-rows // warps), -(-vectors // WARP)
    row = plus(_rank(w, here), over(w.thread(), Int(WARP)), times(counter("it", passes), Int(warps)))
    column = plus(w.lane(), times(counter("c", columns), Int(WARP)))
    spot: dict[str, Whole] = {last: plus(w.scope[last].lo, times(column, Int(width)))}
    left: Whole = row
    for a, n in reversed(list(zip(outer, sizes, strict=True))):
        spot[a] = plus(w.scope[a].lo, left if a == outer[0] else rest(left, Int(n)))
        left = over(left, Int(n))
    exists = below(row, Int(rows)) if rows % warps else Int(1)
    within = below(column, Int(vectors)) if vectors % WARP else Int(1)
    unroll = UNROLL if columns <= _UNROLLED else _UNROLLED
    lanes = (1, 2, 4, 8, 16)
    return Spread(axes, (("c", columns),), (("it", passes),), spot, width, exists, None, lanes, within, unroll)


def _rank(w: Walk, agents: int) -> Whole:
    """The first of so many agents of this block among those of its cluster."""
    return times(w.rank(), Int(agents)) if w.sharing > 1 else Int(0)
