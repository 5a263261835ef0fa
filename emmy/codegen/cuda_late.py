"""A loop in parts, with what is done between its last steps: asking for what finishes its sums, exchanging it among lanes.

Steps at each of which a part of it is done are written out, for registers have no index. It must not know what is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from emmy.codegen.kernel import Int, Whole, minus, most, pieces, plus, times
from emmy.codegen.kernel_gpu import Regs, Stmt, counter, unrolled

_TURN = "late"  # steps since the first of those that are written out together


@dataclass(frozen=True, slots=True)
class Between:
    """`do(n)` is done before the n-th of `steps` steps of a loop, the first of which has `left` steps from itself to the end.

    registers: there from the first of them on
    """

    left: int
    steps: int
    do: Callable[[Whole], tuple[Stmt, ...]]
    registers: tuple[Regs, ...] = ()

    @property
    def at_once(self) -> tuple[Stmt, ...]:
        return self.do(Int(0)) if self.steps == 1 else ()

    def goes_on(self, hi: int, lo: int) -> bool:
        """Whether a part is done before each of the steps that have hi..lo + 1 to the end."""
        return self.steps > 1 and self.left >= hi and self.left - self.steps <= lo


def in_parts(
    part: Callable[[Whole, Whole], tuple[Stmt, ...]], begin: Whole, end: Whole, step: int, late: Sequence[Between]
) -> tuple[Stmt, ...]:
    """The loop from `begin` to `end`, of which `part` makes the steps between two bounds, with what is done late in it.

    All of that stands between loops, the last before the last step: ptxas 13.0 would wait for the sums first, were that near.
    """
    fills, first = pieces(minus(end, begin), step), Int(0)

    def bound(left: int, turn: Whole = first) -> Whole:
        """Where as many steps are left as `left` less `turn`."""
        past = plus(fills, Int(-left), turn)
        sure = isinstance(fills, Int) and fills.value >= left
        return plus(begin, times(past if sure else most(past, first), Int(step)))

    stops = sorted({y for x in late for y in (x.left, x.left - x.steps if x.steps > 1 else x.left)} - {0}, reverse=True)
    out = [*part(begin, bound(stops[0]))]
    for hi, lo in pairwise((*stops, 0)):
        out += (s for x in late if x.left == hi for s in (*x.registers, *x.at_once))
        here, turn = [x for x in late if x.goes_on(hi, lo)], counter(_TURN, hi - lo)
        if here:
            does = [s for x in here for s in x.do(plus(turn, Int(x.left - hi)))]
            out += unrolled(_TURN, hi - lo, (*does, *part(bound(hi, turn), bound(hi - 1, turn))))
        else:
            out += part(bound(hi), bound(lo) if lo else end)
    return tuple(out)
