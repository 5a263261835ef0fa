"""Which loop a tile of rows still lacks, and the steps worth trying: rows and columns of a block, then of a warp, then of its lanes.

Only for programs of nothing but rows: norms, statistics, elementwise ops, gathers. Divisions of which a thread's registers do
not hold its share are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from emmy.ir.gpu import WARP, warps
from emmy.ir.plan import Launch, Loop, Plan
from emmy.ir.program import upper
from emmy.ir.row_tiles import RowTile, row_axes, row_tile
from emmy.ir.target import Target

_ROWS = (1, 2, 4, 8, 16, 32, 64)  # of a block
_COLUMNS = (256, 512, 1024, 2048, 4096, 8192)  # of a block that folds nothing
_SHARES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 16, 20, 24, 30, 32)  # warps of a row
_ROWS_WARP = (1, 2, 4, 8)
_FEW = 8  # positions of an axis that stays whole in a block: the halves of a head
_VECTORS = 8  # of a row, that a thread has at most where warps could share it
_GROUPS = (1, 2, 4)  # of lanes, with rows of their own
_WARPS = 32  # of a block
_BLOCKS = 1 << 16  # of a launch, of which more are small for no reason


@dataclass(frozen=True, slots=True)
class Choice:
    """The next loop: over `axis` at `level`, in pieces of one of `steps`."""

    axis: str
    level: str
    steps: tuple[int, ...]


def rows_only(plan: Plan, target: Target) -> bool:
    """Whether a plan computes rows and nothing else, of which a block has one at least: then it needs no further launch."""
    if target.is_cpu or any(la.tile.channels for la in plan.launches):
        return False
    return all(rows_fit(plan, la, target) for la in plan.launches)


def rows_fit(plan: Plan, la: Launch, target: Target) -> bool:
    """Whether a launch computes rows and nothing else, of which a block's threads hold one at least."""
    return _rows_fit(plan.about(la), la, target)


@lru_cache(4096)
def _rows_fit(plan: Plan, la: Launch, target: Target) -> bool:
    if _axes(plan, la) is None:
        return False
    choice = missing_row_loop(plan, la, target)
    return choice is None or bool(choice.steps)


def _axes(plan: Plan, la: Launch) -> tuple[str, ...] | None:
    works = la.tile.works
    return row_axes(plan.program, tuple(w.stage for w in works), tuple(w.stage for w in works if w.combine))


def missing_row_loop(plan: Plan, la: Launch, target: Target) -> Choice | None:
    """The next loop that a launch of rows lacks; None when it has all."""
    return _missing_row_loop(plan.about(la), la, target)


@lru_cache(1 << 14)
def _missing_row_loop(plan: Plan, la: Launch, target: Target) -> Choice | None:
    axes = _axes(plan, la)
    if axes is None:
        return None
    *outer, last = axes
    folds = any(plan.program.stage(w.stage).reduces and not w.combine for w in la.tile.works)
    main = max(outer, key=lambda a: upper(plan.program.dim(a)), default=None)
    for axis in outer:
        size = upper(plan.program.dim(axis))
        if _has(la, axis, "grid") or (axis == outer[-1] != main and size <= _FEW):
            continue
        steps = (x for x in _rows(size) if _goes_on(plan, la, Loop(axis, "grid", x), target))
        return Choice(axis, "grid", tuple(steps) if axis == main else (1,))
    if not folds and not _has(la, last, "grid"):
        size = upper(plan.program.dim(last))
        sizes = dict.fromkeys(min(x, _whole(size)) for x in _COLUMNS)
        return Choice(last, "grid", tuple(x for x in sizes if _goes_on(plan, la, Loop(last, "grid", x), target)))
    if not _has(la, last, "warp"):
        steps = (x for x in _column_steps(plan, la, last) if _some_division(plan, la, last, x, main, target))
        return Choice(last, "warp", tuple(steps))
    # From here on a loop may have one iteration: so that one skeleton has all rows and columns of a block.
    if main and upper(plan.program.dim(main)) > 1 and not _has(la, main, "warp"):
        return Choice(main, "warp", tuple(_fitting(plan, la, main, "warp", _ROWS_WARP, target)))
    several = (a for a in reversed(outer) if upper(plan.program.dim(a)) > 1 and (a == main or not _has(la, a, "grid")))
    if (inner := next(several, None)) and not any(x.level == "lane" for x in la.tile.nest):
        n = plan.extent(la.tile.nest, inner)
        groups = _GROUPS[:1] if _shared(la, plan, last) else _GROUPS
        return Choice(inner, "lane", tuple(_fitting(plan, la, inner, "lane", (n // g for g in groups), target)))
    return None


def _shared(la: Launch, plan: Plan, last: str) -> bool:
    """Whether several warps have columns of a row."""
    return plan.extent(la.tile.nest, last) < plan.extent(la.tile.nest[: la.tile.n_block_loops], last)


def _goes_on(plan: Plan, la: Launch, loop: Loop, target: Target) -> bool:
    """Whether some division of what a loop leaves fits."""
    new = replace(la, tile=replace(la.tile, nest=(*la.tile.nest, loop)))
    choice = missing_row_loop(plan.with_launch(new), new, target)
    return choice is None or bool(choice.steps)


def _rows(size: int) -> tuple[int, ...]:
    """Rows of a block: no more than there are, and enough that a launch of many rows has not too many blocks."""
    found = tuple(x for x in _ROWS if x < 2 * size)
    return tuple(x for x in found if size // x <= _BLOCKS) or found[-1:]


def _whole(size: int) -> int:
    """A piece that covers an axis, in whole vectors."""
    return -(-size // 8) * 8 if size > 8 else size


def _column_steps(plan: Plan, la: Launch, last: str) -> Iterator[int]:
    """Columns of a warp: even shares of the block's, rounded up to whole vectors, of which most lanes have one at least."""
    piece = plan.extent(la.tile.nest, last)
    seen = set[int]()
    for share in _SHARES:
        step = -(-piece // share)
        step = _whole(step) if piece % 8 == 0 else step
        if step in seen or (piece % step and _has(la, last, "grid")):
            continue
        seen.add(step)
        tile = _with(plan, la, Loop(last, "warp", step))
        if tile and (step == piece or 2 * (step // tile.width) >= WARP):
            yield step


def _some_division(plan: Plan, la: Launch, last: str, step: int, main: str | None, target: Target) -> bool:
    """Whether a warp that has so many columns can have so few rows that its threads hold them."""
    columns = Loop(last, "warp", step)
    rows = plan.extent(la.tile.nest, main) if main else 1
    for each in (x for x in _ROWS_WARP if rows % x == 0):
        tile = _with(plan, la, columns, *((Loop(main, "warp", each),) if main else ()))
        if (
            tile
            and warps(plan, tile.launch.tile.nest) <= _WARPS
            and (_holds(tile, target) or (main and _lanes_hold(tile, main, target)))
        ):
            return True
    return False


def _fitting(plan: Plan, la: Launch, axis: str, level: str, steps: Iterable[int], target: Target) -> Iterator[int]:
    """Steps of rows that divide what there is, and of which threads hold their share."""
    size = plan.extent(la.tile.nest, axis)
    for step in steps:
        tile = _with(plan, la, Loop(axis, level, step)) if step and size % step == 0 else None
        if (
            tile
            and warps(plan, tile.launch.tile.nest) <= _WARPS
            and (_holds(tile, target) or _lanes_hold(tile, axis, target))
        ):
            yield step


def _lanes_hold(tile: RowTile, axis: str, target: Target) -> bool:
    """Whether threads hold their share where lanes divide a warp's rows, which they may once."""
    plan, la = tile.plan, tile.launch
    if any(x.level == "lane" for x in la.tile.nest) or tile.columns < plan.extent(
        la.tile.nest[: la.tile.n_block_loops], tile.last
    ):
        return False
    n = plan.extent(la.tile.nest, axis)
    divided = (_with(plan, la, Loop(axis, "lane", n // g)) for g in _GROUPS if n % g == 0)
    return any(x is not None and _holds(x, target) for x in divided)


def _holds(tile: RowTile, target: Target) -> bool:
    return tile.fits_well(target) and tile.vectors <= _VECTORS


def _with(plan: Plan, la: Launch, *loops: Loop) -> RowTile | None:
    new = replace(la, tile=replace(la.tile, nest=(*la.tile.nest, *loops)))
    return row_tile(plan.with_launch(new), new)


def _has(la: Launch, axis: str, level: str) -> bool:
    return any(x.axis == axis and x.level == level for x in la.tile.nest)
