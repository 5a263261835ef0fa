"""Tiles whose operands go from memory straight to the registers of a matrix instruction: few rows, warps that share k.

What the `direct` atom asks of a tile, and the steps of its loops worth trying: blocks along n alone, and warps that each
fold a share of k, whose sums meet in shared memory. A weight that is read once has no use for slots; all that counts is
how many loads are under way.
"""

from __future__ import annotations

from emmy.ir.dtype import size_bytes
from emmy.ir.expr import Read, factors
from emmy.ir.gpu import TRANSFER_BYTES, WARP, direct_step, multiple, refuse_several
from emmy.ir.moves.base import OPEN, Knob
from emmy.ir.plan import Launch, Plan
from emmy.ir.program import Stage, upper
from emmy.ir.target import Target

ROWS = 8  # of A that the atom takes
STEP = 32  # of k
_COLUMNS = (16, 32, 64, 128)
_WARPS = (4, 8, 16)
_OTHER = 24  # registers beside sums and operands


def vector_bytes(along_k: bool, n: int) -> int:
    """Bytes that a lane loads at once of B for an atom of n columns: along k, or along the n its group of lanes holds."""
    return TRANSFER_BYTES if along_k else n // 8 * 2


def refuse_direct(plan: Plan, la: Launch, s: Stage, axes: tuple[str | None, str, str], n: Knob) -> str | None:
    """Why lanes cannot read the operands of a stage from memory. `n`: columns of the atom, when they are chosen."""
    m, _, k = axes
    reads = [f for f in factors(s.body) if isinstance(f, Read)]
    staged = [r.value for r in reads if la.tile.channel(r.value)]
    if staged:
        return f"direct reads {staged[0]} from memory, {la.name} stages it"
    made = [r.value for r in reads if not plan.program.is_input(r.value)]
    if made:
        return f"direct reads {made[0]} from memory, but it is no input"
    if len(reads) != 2 or m is None or any(r.computed or len(r.index) < 2 for r in reads):
        return f"direct multiplies two matrices; {s.out} is a sum of {s.body}"
    a, b = reads
    if several := refuse_several(plan, la.tile.nest, (*a.axes, *b.axes), axes):
        return f"direct multiplies two matrices: {several}"
    if a.index[-1] != k:
        return f"direct reads {a.value} along {k}, it is contiguous along {a.index[-1]}"
    along_k = b.index[-1] == k
    if along_k and isinstance(n, int) and n != 16:
        return f"direct takes 16 columns of {b.value} at once when it is contiguous along {k}, not {n}"
    needs = ((a, TRANSFER_BYTES), (b, vector_bytes(along_k, n if isinstance(n, int) else 16)))
    for r, need in needs:
        row = size_bytes(plan.program.value(r.value).dtype) * multiple(
            plan.program.dim(plan.program.value(r.value).axes[-1])
        )
        if row % need:
            return f"rows of {r.value} have {row} bytes, direct loads {need} at a time: stage it instead"
    rows = plan.extent(la.tile.nest, m)
    if any(x.axis == m for x in la.tile.nest) and rows > ROWS:
        return f"direct computes {ROWS} of {m}, the tile has {rows}"
    return None


def suits(plan: Plan, la: Launch, s: Stage, axes: tuple[str, str, str]) -> bool:
    """Whether the direct form is worth trying: at most 8 rows, 16-bit operands whose rows allow it, k of some length."""
    m, _, k = axes
    dtypes = {plan.program.value(v).dtype for v in s.reads if plan.program.is_input(v)}
    if "f32" in dtypes or upper(plan.program.dim(m)) > ROWS or la.tile.channels:
        return False
    return bool(shares(plan, la, k)) and refuse_direct(plan, la, s, axes, OPEN) is None


def columns(plan: Plan, la: Launch, n: str, target: Target) -> tuple[int, ...]:
    """Columns of a block, the most of those that still give nearly every multiprocessor one."""
    others = 1
    for i, x in enumerate(la.tile.nest):
        others *= plan.count(la.tile.nest, i) if x.level == "grid" else 1
    left = plan.extent(la.tile.nest, n)
    busy = (x for x in _COLUMNS if 4 * -(-left // x) * others >= 3 * target.n_sms)
    return tuple(dict.fromkeys((_COLUMNS[0], *busy)))


def shares(plan: Plan, la: Launch, k: str) -> tuple[int, ...]:
    """How much of k a warp may fold: whole steps, two at least, for 4 to 16 warps where k is long enough."""
    left = plan.extent(la.tile.nest, k)
    if any(x.axis == k for x in la.tile.nest):  # pieces of a piece come out even
        found = [x for x in range(STEP, left + 1, STEP) if left % x == 0 and left // x <= _WARPS[-1]]
    else:
        found = [-(-left // (STEP * w)) * STEP for w in (1, 2, *_WARPS)]
    long = {x for x in found if x >= 2 * STEP}
    many = {x for x in long if -(-left // x) >= _WARPS[0]}
    return tuple(sorted(many or long))


def fits(target: Target, n: int, warps: int, right: int) -> bool:
    """Whether two steps of operands, n columns of so many, fit the registers of warps that four parts of a multiprocessor hold."""
    here = -(-warps // 4) * WARP  # threads of the fullest part
    most = min(target.max_regs_thread, target.regs_sm // 4 // here // 8 * 8)
    return right * (n // 4) + 2 * direct_step(n, right) + _OTHER <= most
