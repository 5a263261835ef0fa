"""The sizes of a plain schedule's loops on a GPU: what a user gets without tuning, and where searches begin. Knows no problem."""

from __future__ import annotations

from math import log2, prod

from emmy.ir.beside import side_by_side
from emmy.ir.dtype import size_bytes
from emmy.ir.gpu import TRANSFER_BYTES, WARP
from emmy.ir.moves import Move
from emmy.ir.moves.lifted_tiles import lifted, rows_of, sharing
from emmy.ir.moves.split import Split
from emmy.ir.moves.splitk import SplitK
from emmy.ir.plan import Launch, Plan, folds_results
from emmy.ir.program import Stage, upper
from emmy.ir.row_tiles import row_axes
from emmy.ir.target import Target

# Eight warps of 32 x 64 share a block of 128 x 128 with 96 to 236 registers a thread; four of 64 x 64 need 224 for sums and
# operands alone, and spill as soon as an epilogue loads something. So does a warpgroup of 128 x 128, at 223 to 254; two of
# 64 x 128 need 90 to 166.
_TILE = {"grid": 128, "warp": 32, "warpgroup": 64}
_FILL_BYTES = (
    128  # of the folded axis: a row of a swizzled slot. Measured on an H200: 64 bytes take up to twice the time.
)
# Of rows, measured on an H200: vectors of 16 bytes under way in a thread, where there are as many for so many threads of each
# multiprocessor; of those along a row at most; of a row's piece in a block.
_VECTORS, _THREADS, _ALONG, _PIECE = 4, 256, 2, 128
_FEW = 4  # where there are so many multiprocessors for each tile, blocks share what is folded
_BLOCKS = 4  # a multiprocessor, of few warps each: 1,024 blocks of two warps take 1 us longer to begin than 512


def usual(move: Move, plan: Plan, target: Target) -> int | None:
    """About the value of the first knob of a move in a plain schedule of a GPU; None where the middle of its domain will do."""
    if target.is_cpu or not plan.has_launch(move.launch):
        return None
    match move:
        case Split():
            return _step(move, plan, plan.launch(move.launch), target)
        case SplitK():
            s = plan.program.stage(move.out)
            rows = len(s.axes) < 2 or folds_results(plan.program, plan.launch(move.launch).tile.works, s)
            if rows:  # a part is a block's columns
                return -(-upper(plan.program.dim(s.folded[0])) // _TILE["grid"])
            return target.n_sms // tiles(plan, s)
        case _:
            return None


def urgency(move: Move, plan: Plan, target: Target) -> int:
    """1 for a move that a plain schedule has before others of its phase, -1 for one that it has only where it must."""
    if target.is_cpu or (over := lifted(plan, plan.launch(move.launch))) is None:
        return 0
    match move:
        case SplitK(out=out) if out == over.out and _FEW * tiles(plan, over) <= target.n_sms:
            return 1
        case Split(axis=axis, level="grid") if axis == over.axes[-1]:
            return -1  # all blocks of a row make its weights for themselves
        case _:
            return 0


def _step(move: Split, plan: Plan, la: Launch, target: Target) -> int | None:
    axes = row_axes(plan.program, *_works(la))
    if axes is not None:
        return _of_rows(move, plan, la, axes, target)
    if move.level == "serial":
        step = _FILL_BYTES // size_bytes(plan.program.dtype)
        return (
            step if step < upper(plan.program.dim(move.axis)) else step // 2
        )  # so that a fill is under way beside another
    if any(move.axis in plan.program.stage(w.stage).folded for w in la.tile.works):
        return None  # warps or blocks that share what is folded
    size, over = _TILE.get(move.level), lifted(plan, la)
    if size is None or move.level != "grid":
        return size
    if over is not None:  # agents that share its columns leave room for fewer rows
        return size // sharing(upper(plan.program.dim(over.axes[-1])))
    return size // side_by_side(plan.program, move.axis)  # of sums that are folded side by side as many columns in all


def tiles(plan: Plan, s: Stage) -> int:
    """Usual tiles of a stage that folds an axis into matrices; whole rows of one that is folded by a lift."""
    whole = s.monoid is not None and s.monoid.lift
    rows = rows_of(plan, s) if whole else s.axes[-2]
    m, n = (upper(plan.program.dim(a)) for a in (rows, s.axes[-1]))
    batch = (upper(plan.program.dim(a)) for a in s.axes[:-1] if a != rows)
    return prod(batch) * -(-m // _TILE["grid"]) * (1 if whole else -(-n // _TILE["grid"]))


def _works(la: Launch) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(w.stage for w in la.tile.works), tuple(w.stage for w in la.tile.works if w.combine)


def _of_rows(move: Split, plan: Plan, la: Launch, axes: tuple[str, ...], target: Target) -> int:
    """Rows and columns of a block, a warp, a group of lanes: some vectors a thread, but first work for every multiprocessor."""
    width = TRANSFER_BYTES // size_bytes(plan.program.dtype)
    sizes = [upper(plan.program.dim(a)) for a in axes]
    many = prod(sizes) / width / (target.n_sms * _THREADS)
    vectors = 1 << round(log2(min(max(many, 1), _VECTORS)))
    folds = any(plan.program.stage(w.stage).reduces and not w.combine for w in la.tile.works)
    along = min(vectors, _ALONG)
    alone = folds and sizes[-1] <= _ALONG * WARP * width  # a warp has a row by itself
    if alone:
        along = max(1, sizes[-1] // (WARP * width))
    rows = 1 if folds and not alone else max(1, vectors // along)
    few = prod(sizes[:-1]) <= 2 * rows * _BLOCKS * target.n_sms
    beside = (2 if few else 4) if alone else 1
    if move.axis == axes[-1]:
        return width * (_PIECE if move.level == "grid" else WARP * along)
    return {"grid": rows * beside, "lane": min(rows, 2) if alone else rows}.get(move.level, rows)
