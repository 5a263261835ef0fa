"""Marked parts of a statistic: each is left with a word beside it that says that it is there. Who combines them waits for each.

Knows no count of them and no order of blocks.
"""

from __future__ import annotations

from math import prod

from emmy.codegen.cpu_fold import parts_name
from emmy.codegen.cuda_copy import only
from emmy.codegen.cuda_scope import Walk
from emmy.codegen.cuda_values import Spread, index_of, over_states, part_start
from emmy.codegen.cuda_vector import marked
from emmy.codegen.kernel import Call, Int, Load, Num, Number, Store, Whole, plus, times
from emmy.codegen.kernel_gpu import Do, Ref, Regs, Stmt, bits, counter, unrolled
from emmy.ir.gpu import WARP
from emmy.ir.program import Stage

_AT_ONCE = 32  # parts that a lane looks for at a time


def take_parts(
    w: Walk, stage: Stage, spread: Spread, lanes: int, there: Whole
) -> tuple[tuple[Stmt, ...], dict[str, Ref]]:
    """(each row's parts combined, where its state is). So many lanes share a row's parts, each in order; then they join.

    A lane looks for many parts at once, and again for those that were not there. there: whether the thread has a row
    """
    space, m, axes = w.plan.workspace(stage.out), stage.monoid, stage.axes
    assert space is not None and m is not None
    ((var, passes),), name = spread.rows, w.fresh(f"{stage.out}_all")
    mine, per_lane = Load(name, counter(var, passes)), space.parts // lanes

    def combined(more: Number) -> Stmt:
        component = m.state[0][0]
        return Store(name, mine.at, over_states(m.combine[0], {f"a_{component}": mine, f"b_{component}": more}))

    body: list[Stmt] = []
    apart = part_start(w, stage, axes, Int(lanes))
    for first in range(0, per_lane, _AT_ONCE):
        n, words = min(_AT_ONCE, per_lane - first), w.fresh("words")
        i = counter("part_no", n)
        part = plus(Int(first * lanes), bits(w.lane(), lanes - 1) if lanes > 1 else Int(0))
        at = plus(part_start(w, stage, axes, part), index_of(w, axes, spread.spot))
        place = marked(Ref(parts_name(stage.out, m.state[0][0]), at))
        each = Ref(place.view, plus(place.at, times(times(i, apart), Int(2))))
        more = combined(Call("as_f32", (Load(words, times(i, Int(2))),)))
        body += [
            Regs(words, "b32", 2 * n),
            Do(f"emmy_marks_await<{n}>", (Ref(words, Int(0)), place, times(apart, Int(8)))),
            *unrolled("part_no", n, (Do("emmy_mark_clear", (each,)), more)),
        ]
    join = tuple(combined(Call(f"across<{1 << b}>", (mine,))) for b in range(lanes.bit_length() - 1))
    nothing = Store(name, mine.at, Num(m.identity[0]))
    rows = unrolled(var, passes, (nothing, *only(there, tuple(body)), *join))
    return (Regs(name, "f32", passes), *rows), {m.state[0][0]: Ref(name, mine.at)}


def lanes_of_a_row(w: Walk, stage: Stage) -> int:
    """Lanes that share the parts of a row of the tile evenly, a power of two."""
    space, rows, lanes = w.plan.workspace(stage.out), prod(w.scope[a].size for a in stage.axes), 1
    assert space is not None
    while 2 * lanes <= min(WARP, w.threads // rows) and space.parts % (2 * lanes) == 0:
        lanes *= 2
    return lanes
