"""Loops of a tile whose work folds by a monoid with a lift, such as attention, that a search places one after another.

Heads and rows go to blocks, columns too where a block of them all would not fit the registers; the folded axis into time;
a block's rows to warps or warpgroups, each of which has all columns of its rows, for a row's maximum is one number. Of rows
with more columns than an agent can hold several have a share each, and all find the maxima for themselves.
"""

from __future__ import annotations

from functools import lru_cache

from emmy.ir.dtype import size_bytes
from emmy.ir.gpu import lift_registers
from emmy.ir.plan import Launch, Plan, Work
from emmy.ir.program import Program, Stage, upper
from emmy.ir.target import Target

ATOMS = (
    "mma",
    "hybrid",
    "wgmma",
    "simt",
)  # of the contractions: those whose sums lie in lanes as first operands do, or go round
Choice = tuple[str, str, tuple[int, ...]]  # axis, level, steps
_ROWS = (16, 32, 64, 128, 192, 256)
_COLUMNS = 256  # of a block, at most
_FOLDED = (16, 32, 48, 64, 80, 96, 128)
_WARPS, _GROUPS = (1, 2, 4, 8), (1, 2, 3)
_MOST_REGISTERS = 250  # of a thread, of 255: estimates are mostly from above
_SHARED = 240  # of a thread of one of two warpgroups that compute, of three fewer


def lifted(plan: Plan, la: Launch) -> Stage | None:
    """The stage of a launch that it folds by a monoid with a lift."""
    return _lifted(plan.program, la.tile.bare)


@lru_cache(maxsize=4096)
def _lifted(program: Program, works: tuple[Work, ...]) -> Stage | None:
    stages = (program.stage(w.stage) for w in works if not w.combine)
    return next((s for s in stages if s.monoid and s.monoid.lift), None)


def loops(plan: Plan, la: Launch, s: Stage, target: Target) -> tuple[Choice, ...]:
    """(axis, level, steps) of each choice of the next loop; () when the tile has all. `s`: what `lifted` found.

    Rows may come before heads: then all heads' blocks of as many keys begin together.
    """
    m, n, k = rows_of(plan, s), s.axes[-1], s.folded[-1]
    heads = [axis for axis in s.axes[:-1] if axis != m and not _has(la, axis, "grid")]
    size = {a: plan.extent(la.tile.nest, a) for a in (m, n, k)}
    if heads:
        first = _rows(plan, la, s, target) if not la.tile.nest and len(heads) == len(s.axes) - 2 else ()
        return ((heads[0], "grid", (1,)), *first)
    if not _has(la, m, "grid"):
        shares = (size[n] // parts for parts in range(2, 17) if size[n] % (16 * parts) == 0)
        some = tuple(sorted(x for x in shares if 64 <= x <= _COLUMNS))
        # Blocks that share keys would each leave the rows' states.
        whole = size[n] <= _COLUMNS or _has(la, n, "grid") or plan.workspace(s.out) is not None
        return (*(() if whole else ((n, "grid", some),)), *_rows(plan, la, s, target))
    if not _has(la, k, "serial"):
        cut = any(x.axis == k for x in la.tile.nest)
        steps = (x for x in _FOLDED if (size[k] % x == 0 if cut else x < 2 * size[k] or x == _FOLDED[0]))
        return ((k, "serial", tuple(x for x in steps if _divisions(plan, la, s, target, size[m], x))),)
    shared = next((x for x in la.tile.nest if x.level in ("warp", "warpgroup")), None)
    if shared is not None:
        return ((n, shared.level, (size[n] // sharing(size[n]),)),) if sharing(size[n]) > 1 else ()
    return _divisions(plan, la, s, target, size[m], size[k])


def _rows(plan: Plan, la: Launch, s: Stage, target: Target) -> tuple[Choice, ...]:
    """Rows of a block, for which some division among agents and some piece of the folded axis fit."""
    m = rows_of(plan, s)
    left = upper(plan.program.dim(m))
    rows = (x for x in _ROWS if x < 2 * left or x == _ROWS[0])
    return ((m, "grid", tuple(x for x in rows if any(_divisions(plan, la, s, target, x, y) for y in _FOLDED))),)


def _divisions(plan: Plan, la: Launch, s: Stage, target: Target, rows: int, step: int) -> tuple[Choice, ...]:
    """How a block of so many rows, that folds `step` at a time, is divided, where registers and shared memory have room."""
    if _bytes(plan, la, s, rows, step) > target.tile_bytes:
        return ()
    m, n, out = rows_of(plan, s), plan.extent(la.tile.nest, s.axes[-1]), []
    shared = sharing(n)
    n //= shared
    if all(size_bytes(plan.program.value(v).dtype) == 2 for v in _inputs(plan, s)):
        warps = (rows // w for w in _WARPS if rows % (16 * w) == 0 and w * shared <= _WARPS[-1])
        fits = tuple(sorted(x for x in warps if x <= 32 and lift_registers("mma", x, n, step) <= _MOST_REGISTERS))
        out += [(m, "warp", fits)] if fits and target.can("mma") else []
        groups = (rows // w for w in _GROUPS if rows == 64 * w and w * shared <= _GROUPS[-1])
        most = _SHARED if rows * shared <= 128 else 160
        fits = tuple(x for x in groups if lift_registers("wgmma", x, n, step) <= most)
        out += [(m, "warpgroup", fits)] if fits and target.can("wgmma") and n % 16 == 0 else []
    elif target.can("simt"):
        warps = (rows // w for w in _WARPS if rows % (16 * w) == 0 and w * shared <= _WARPS[-1])
        fits = tuple(sorted(x for x in warps if x <= 32 and lift_registers("simt", x, n, step) <= _MOST_REGISTERS))
        out += [(m, "warp", fits)] if fits else []
    return tuple(out)


def sharing(columns: int) -> int:
    """Agents that share the columns of a row: as few as leave each no more than one can hold."""
    return next((w for w in (1, 2, 4) if columns % (16 * w) == 0 and columns // w <= _COLUMNS), 1)


def _bytes(plan: Plan, la: Launch, s: Stage, rows: int, step: int) -> int:
    """Shared memory that one slot for each operand takes."""
    size = dict.fromkeys(s.axes[:-1], 1) | {s.axes[-1]: plan.extent(la.tile.nest, s.axes[-1])}
    size |= {rows_of(plan, s): rows, s.folded[-1]: step}
    total = 0
    for v in _inputs(plan, s):
        value, n = plan.program.value(v), 1
        for a in value.axes:
            n *= size.get(a, upper(plan.program.dim(a)))
        total += n * size_bytes(value.dtype)
    return total


def _inputs(plan: Plan, s: Stage) -> tuple[str, ...]:
    """Inputs that the lift's contraction and what it reads are made of."""
    p, found = plan.program, dict[str, None]()
    for v in s.reads:
        for x in (v,) if p.is_input(v) else _below(plan, v):
            found[x] = None
    return tuple(v for v in found if p.value(v).dtype != "i32")  # what tells where a mask ends is no operand


def _below(plan: Plan, value: str) -> tuple[str, ...]:
    p = plan.program
    if p.is_input(value):
        return (value,)
    return tuple(x for v in p.stage(value).reads for x in _below(plan, v))


def product_below(plan: Plan, s: Stage) -> Stage | None:
    """The contraction whose elements a lift reads, through elementwise stages."""
    p = plan.program
    for v in s.reads:
        while p.has_stage(v):
            below = p.stage(v)
            if below.reduces:
                return below
            v = next((x for x in below.reads if p.has_stage(x)), "")
    return None


def rows_of(plan: Plan, s: Stage) -> str:
    """The axis of a lift's rows: an instruction's, of the contraction below it. Results may have their axes in another order."""
    below = product_below(plan, s)
    return s.axes[-2] if below is None or len(below.axes) < 2 else below.axes[-2]


def feeds_lift(plan: Plan, la: Launch, s: Stage) -> bool:
    """Whether a stage of a launch makes what a lift there reads, in registers."""
    over = lifted(plan, la)
    below = product_below(plan, over) if over else None
    return below is not None and below.out == s.out


def refuse_lift(plan: Plan, la: Launch, s: Stage, atom: str, allowed: int) -> str | None:
    """Why a GPU's threads cannot fold by the lift of `s` with that atom."""
    m, n, k = (plan.extent(la.tile.nest, a) for a in (rows_of(plan, s), s.axes[-1], s.folded[-1]))
    need = lift_registers(atom, m, n, k)
    if need > allowed:
        return f"{atom} needs about {need} registers a thread for {m} x {n} sums and {m} x {k} weights, there are {allowed}"
    return None


def _has(la: Launch, axis: str, level: str) -> bool:
    return any(x.axis == axis and x.level == level for x in la.tile.nest)
