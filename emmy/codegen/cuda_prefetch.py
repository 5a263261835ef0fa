"""Blocks of values that the copy engine is asked to bring to the last-level cache, where their readers find them later.

Waits for nothing and holds nothing. Blocks of a cluster that share out the elements of a tile share out its rows here too.
"""

from __future__ import annotations

from emmy.codegen.cuda_scope import Walk
from emmy.codegen.kernel import Int, Whole, plus, times
from emmy.codegen.kernel_gpu import Do, MapRef, Stmt, TensorMap
from emmy.ir.dtype import size_bytes
from emmy.ir.gpu import TRANSFER_BYTES

_ROWS, _COLUMNS = 64, 256  # of a box, at most; fills need not stand behind a long one


def prefetch(w: Walk, value: str) -> tuple[Stmt, ...]:
    """One thread asks for the tile's block of a value with one or two axes."""
    *outer, last = w.plan.program.value(value).axes
    columns = w.scope[last]
    rows = w.scope[outer[0]] if outer else None
    share = -(-rows.size // w.sharing) if rows else 1
    vector = TRANSFER_BYTES // size_bytes(w.plan.program.value(value).dtype)
    high, wide = _part(share, 1, _ROWS), _part(columns.size, vector, _COLUMNS)
    w.maps.append(engine := TensorMap(f"{value}_map", value, rows.end if rows else Int(1), columns.end, high, wide, 0))
    first: Whole = plus(rows.lo, times(w.rank(), Int(share)) if w.sharing > 1 else Int(0)) if rows else Int(0)
    return tuple(
        Do("emmy_tma_prefetch_2d", (MapRef(engine.name), plus(columns.lo, Int(column)), plus(first, Int(row))))
        for row in range(0, share, high)
        for column in range(0, columns.size, wide)
    )


def _part(size: int, unit: int, most: int) -> int:
    """The longest equal part of a size that is at most so long and made of whole units."""
    return next(n for n in range(min(size, most), 0, -1) if size % n == 0 and n % unit == 0)
