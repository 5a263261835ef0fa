"""Tiles whose operands go from memory straight to the registers of a matrix instruction: few rows, warps that share k.

What the `direct` atom asks of a tile, and the steps of its loops worth trying: blocks along n alone, and warps that each
fold a share of k, whose sums meet in shared memory. A weight that is read once has no use for slots; all that counts is
how many loads are under way.
"""

from __future__ import annotations

from emmy.ir.dtype import size_bytes
from emmy.ir.expr import Read, factors
from emmy.ir.gpu import TRANSFER_BYTES, WARP, direct_step, making_registers, multiple, refuse_several, sharers
from emmy.ir.moves.base import OPEN, Knob
from emmy.ir.on_the_way import refuse_on_the_way, rides, row_values
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
    if reason := refuse_on_the_way(plan, la, s):
        return reason
    if len(reads) != 2 or m is None or any(r.computed or len(r.index) < 2 for r in reads):
        return f"direct multiplies two matrices; {s.out} is a sum of {s.body}"
    a, b = reads
    if several := refuse_several(plan, la.tile.nest, (*a.axes, *b.axes), axes):
        return f"direct multiplies two matrices: {several}"
    if size_bytes(plan.program.value(a.value).dtype) != 2:
        return f"{a.value} is {plan.program.value(a.value).dtype}: direct multiplies 16-bit elements"
    if a.index[-1] != k:
        return f"direct reads {a.value} along {k}, it is contiguous along {a.index[-1]}"
    along_k = b.index[-1] == k
    if along_k and isinstance(n, int) and n != 16:
        return f"direct takes 16 columns of {b.value} at once when it is contiguous along {k}, not {n}"
    needs = dict.fromkeys(row_values(plan, la, s), TRANSFER_BYTES)
    needs[b.value] = vector_bytes(along_k, n if isinstance(n, int) else 16)
    if reason := next((r for v, need in needs.items() if (r := _refuse_loads(plan, v, need, b.axes, k))), None):
        return reason
    if rides(plan, la, s) and any(x.level == "warp" for x in la.tile.nest) and sharers(plan, la.tile.nest, s) == 1:
        return f"sums of rows beside {s.out} meet in shared memory: 2 warps at least must share {k}"
    most = plan.extent(la.tile.nest, m)
    if any(x.axis == m for x in la.tile.nest) and most > ROWS:
        return f"direct computes {ROWS} of {m}, the tile has {most}"
    return None


def _refuse_loads(plan: Plan, value: str, need: int, weight: tuple[str, ...], k: str) -> str | None:
    """Why lanes cannot load `need` bytes of a value at once, along k or, where it is the weight, along its own axis."""
    v = plan.program.value(value)
    row = size_bytes(v.dtype) * multiple(plan.program.dim(v.axes[-1]))
    if row % need:
        return f"rows of {v.name} have {row} bytes, direct loads {need} at a time: stage it instead"
    if size_bytes(v.dtype) != 2 or (v.axes != weight and v.axes[-1] != k):
        return f"{v.name}[{','.join(v.axes)}] is {v.dtype}: direct loads 16-bit elements of rows along {k}"
    return None


def suits(plan: Plan, la: Launch, s: Stage, axes: tuple[str, str, str]) -> bool:
    """Whether the direct form is worth trying: at most 8 rows, 16-bit operands whose rows allow it, k of some length."""
    m, _, k = axes
    dtypes = {plan.program.value(v).dtype for v in s.reads}
    if "f32" in dtypes or upper(plan.program.dim(m)) > ROWS or la.tile.channels:
        return False
    return bool(shares(plan, la, s, k)) and refuse_direct(plan, la, s, axes, OPEN) is None


def columns(plan: Plan, la: Launch, n: str, target: Target) -> tuple[int, ...]:
    """Columns of a block, the most of those that still give nearly every multiprocessor one."""
    others = 1
    for i, x in enumerate(la.tile.nest):
        others *= plan.count(la.tile.nest, i) if x.level == "grid" else 1
    left = plan.extent(la.tile.nest, n)
    busy = (x for x in _COLUMNS if 4 * -(-left // x) * others >= 3 * target.n_sms)
    return tuple(dict.fromkeys((_COLUMNS[0], *busy)))


def shares(plan: Plan, la: Launch, s: Stage, k: str) -> tuple[int, ...]:
    """How much of k a warp may fold: whole steps, two at least, for 4 to 16 warps where k is long enough.

    Sums of rows beside those of `s` meet in shared memory, so that two warps must share them.
    """
    left = plan.extent(la.tile.nest, k)
    if any(x.axis == k for x in la.tile.nest):  # pieces of a piece come out even
        found = [x for x in range(STEP, left + 1, STEP) if left % x == 0 and left // x <= _WARPS[-1]]
    else:
        found = [-(-left // (STEP * w)) * STEP for w in (1, 2, *_WARPS)]
    long = {x for x in found if x >= 2 * STEP and (x < left or not rides(plan, la, s))}
    many = {x for x in long if -(-left // x) >= _WARPS[0]}
    return tuple(sorted(many or long))


def fits(target: Target, n: int, warps: int, right: int, rows: int = 1) -> bool:
    """Whether two steps of operands, n columns of so many and so many rows, fit the registers of warps that four parts of a
    multiprocessor hold."""
    here = -(-warps // 4) * WARP  # threads of the fullest part
    most = min(target.max_regs_thread, target.regs_sm // 4 // here // 8 * 8)
    making = making_registers(rows) if rows > 1 else 0
    return right * (n // 4) + 2 * direct_step(n, right, rows) + making + _OTHER <= most
