"""Results that leave through shared memory: what a warp has made, written by stmatrix and stored by the copy engine.

A box is 16 rows of a warp's columns, so that only the warp must meet before it goes. Knows no chain of stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from emmy.codegen.cuda_copy import tensor_map
from emmy.codegen.cuda_layout import Slot, slot
from emmy.codegen.cuda_scope import Walk
from emmy.codegen.kernel import Int, Whole, plus, same, times
from emmy.codegen.kernel_gpu import (
    BLOCK,
    SMEM,
    WARP_INDEX,
    Do,
    If,
    MapRef,
    Ref,
    Stmt,
    TensorMap,
    bits,
    counter,
    shifted,
    unrolled,
)
from emmy.ir.dtype import size_bytes
from emmy.ir.gpu import WARP

_ROWS = 16  # of a matrix atom, and of a box


@dataclass(frozen=True, slots=True)
class Boxes:
    """A warp's share of a value in shared memory: `count` boxes, from byte `base` on."""

    w: Walk
    layout: Slot
    map: TensorMap
    base: Whole
    count: int
    rows: str  # axis

    def begin(self) -> tuple[Stmt, ...]:
        """Where a block walks tiles: no lane writes before the one that sends has seen the last boxes read."""
        return () if self.w.block == BLOCK else (Do("emmy_syncwarp"),)

    def write(self, atoms: int, words: Ref, i: Whole, half: Whole, column: Whole) -> Do:
        """One pair of each of so many (1, 2, 4) neighbouring atoms, the first at `column`: rows 8 `half` and on of box i."""
        lane = self.w.lane()
        mine = self.w.let("store_at", self.layout.at(bits(lane, 7), times(shifted(lane, 3), Int(8))))
        there = self.layout.beyond(mine, times(half, Int(8)), column)
        return Do(
            f"emmy_stmatrix_x{atoms}", (Ref(SMEM, plus(there, times(i, Int(self.layout.bytes)), self.base)), words)
        )

    def send(self, var: str, corner: Mapping[str, Whole]) -> tuple[Stmt, ...]:
        """All boxes to memory, the first element of number `var` to `corner`; returns when they have been read.

        The engine leaves out what lies beyond the value's edges.
        """
        s, i, axes = self.layout, counter(var, self.count), self.w.plan.program.value(self.map.value).axes
        rows, columns = corner[self.rows], corner[axes[-1]]
        outer = tuple(corner[a] for a in reversed(axes[:-1]) if a != self.rows)
        stores = tuple(
            Do(
                f"emmy_tma_store_{self.map.rank}d",
                (
                    MapRef(self.map.name),
                    Ref(SMEM, plus(times(i, Int(s.bytes)), self.base, Int(panel * s.panel_bytes))),
                    plus(columns, Int(panel * s.panel)),
                    rows,
                    *outer,
                ),
            )
            for panel in range(s.columns // s.panel)
        )
        sent = (*unrolled(var, self.count, stores), Do("emmy_bulk_commit"), Do("emmy_bulk_wait_read<0>"))
        return Do("emmy_fence_async"), Do("emmy_syncwarp"), If(same(self.w.lane(), Int(0)), sent)


def boxes(w: Walk, value: str, count: int, columns: int) -> Boxes:
    """Places for every warp's `count` boxes of a value, each of that many columns."""
    v = w.plan.program.value(value)
    layout = slot(_ROWS, columns, size_bytes(v.dtype), columns, "swizzle128")
    share = count * layout.bytes
    warps = w.teams * w.threads // WARP  # teams may store at a time
    first = w.allocate(share * warps, layout.align)
    rows = next(a for a in reversed(v.axes[:-1]) if w.scope[a].size > 1)
    engine = tensor_map(w, value, (rows, v.axes[-1]), (_ROWS, layout.panel), layout.swizzle)
    w.maps.append(engine)
    number = WARP_INDEX if warps > 1 else Int(0)
    base = w.let(f"{value}_boxes", plus(times(number, Int(share)), Int(first)))
    return Boxes(w, layout, engine, base, count, rows)
