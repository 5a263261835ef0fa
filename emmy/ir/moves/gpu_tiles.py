"""Which loop a GPU's tile still lacks, and the steps of it worth trying. A search places them one after another.

Own axes go to blocks, the folded axis into time, a block's own axes to warps; so every tile has one spelling. Sizes are
those with which some choice of what follows is legal: sums fit the registers, one fill of both operands the shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from emmy.ir.dtype import size_bytes
from emmy.ir.gpu import atom_registers, warps
from emmy.ir.plan import Launch, Plan
from emmy.ir.program import Stage, upper
from emmy.ir.target import Target

MOST_WARPS = 8
_MOST_REGISTERS = 232  # of a thread for sums and operands, of 255
_ROWS = (16, 32, 64, 128, 192, 256)
_COLUMNS = (16, 32, 48, 64, 80, 96, 128, 160, 192, 240, 256)
_FOLDED = (16, 32, 64, 128)
_WARPS = (1, 2, 4, 8)
_ELEMENTWISE_ROWS, _ELEMENTWISE_COLUMNS = (1, 2, 4, 8, 16), (64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class Missing:
    """The next loop: over `axis` at `level`, in pieces of one of `steps`."""

    launch: str
    axis: str
    level: str
    steps: tuple[int, ...]


def missing_loop(plan: Plan, target: Target) -> Missing | None:
    """The first loop that some launch lacks; None when every tile is complete or has gone beyond loops."""
    for la in plan.launches:
        if la.tile.channels or any(w.atoms for w in la.tile.works):
            continue
        found = _of_launch(plan, la, target)
        if found is not None:
            return found
    return None


def _of_launch(plan: Plan, la: Launch, target: Target) -> Missing | None:
    stages = (plan.program.stage(w.stage) for w in la.tile.works if not w.combine)
    fold = next((s for s in stages if s.reduces), None)
    if fold is not None:
        return _contraction(plan, la, fold, target)
    axes = plan.program.stage(la.tile.works[0].stage).axes
    for axis in axes:
        if not _has(la, axis, "grid"):
            sizes = _ELEMENTWISE_COLUMNS if axis == axes[-1] else _ELEMENTWISE_ROWS
            return Missing(la.name, axis, "grid", _covering(plan, axis, sizes))
    return None


def _contraction(plan: Plan, la: Launch, s: Stage, target: Target) -> Missing | None:
    if len(s.axes) < 2:
        return None
    m, n, k = s.axes[-2], s.axes[-1], s.folded[-1]
    for axis in s.axes[:-2]:
        if not _has(la, axis, "grid"):
            return Missing(la.name, axis, "grid", (1,))
    dtypes = [plan.program.value(v).dtype for v in s.reads if plan.program.is_input(v)]
    atom = "simt" if "f32" in dtypes else "mma"
    size = {a: plan.extent(la.tile.nest, a) for a in (m, n, k)}
    if not _has(la, m, "grid"):
        return Missing(la.name, m, "grid", _covering(plan, m, _ROWS))
    if not _has(la, n, "grid"):
        return Missing(la.name, n, "grid", tuple(x for x in _covering(plan, n, _COLUMNS) if _shares(atom, size[m], x)))
    if not _has(la, k, "serial"):
        item = max((size_bytes(d) for d in dtypes), default=4)
        most = target.smem_block_bytes // (item * (size[m] + size[n]))
        shared = any(x.axis == k for x in la.tile.nest)
        steps = tuple(
            x for x in _FOLDED if x <= most and (size[k] % x == 0 if shared else x < 2 * size[k] or x == _FOLDED[0])
        )
        return Missing(la.name, k, "serial", steps)
    used = warps(plan, la.tile.nest)
    if not _has(la, m, "warp"):
        rows = [x for x in _rows(size[m]) if any(_fits(atom, x, y) for y in _columns(size[n], size[m] // x))]
        return Missing(la.name, m, "warp", tuple(sorted(rows)))
    if not _has(la, n, "warp"):
        return Missing(la.name, n, "warp", tuple(sorted(x for x in _columns(size[n], used) if _fits(atom, size[m], x))))
    return None


def _has(la: Launch, axis: str, level: str) -> bool:
    return any(x.axis == axis and x.level == level for x in la.tile.nest)


def _covering(plan: Plan, axis: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes of which less than half may lie beyond the axis; the smallest always."""
    left = upper(plan.program.dim(axis))
    return tuple(x for x in sizes if x < 2 * left or x == sizes[0])


def _rows(m: int) -> list[int]:
    """Rows of one warp."""
    return [m // w for w in _WARPS if m % (16 * w) == 0]


def _columns(n: int, used: int) -> list[int]:
    """Columns of one warp, when `used` warps share the rows."""
    return [n // w for w in _WARPS if n % (8 * w) == 0 and used * w <= MOST_WARPS]


def _fits(atom: str, m: int, n: int) -> bool:
    """Whether a warp's m x n tile leaves registers to work with."""
    return atom_registers(atom, m, n, 32) <= _MOST_REGISTERS


def _shares(atom: str, m: int, n: int) -> bool:
    """Whether some division of an m x n block among warps fits."""
    return any(_fits(atom, x, y) for x in _rows(m) for y in _columns(n, m // x))
