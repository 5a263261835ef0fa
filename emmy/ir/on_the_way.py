"""Operands that a launch makes on their way to an instruction, and sums of rows that it folds of what it loads for them.

Where lanes load an operand to registers themselves (the `direct` atom), they may make it there of several values, such as a
row times a norm's weight; and having the row, they may sum its squares beside the product. Knows no device and no code.
"""

from __future__ import annotations

from emmy.ir.expr import Read, factors, walk
from emmy.ir.plan import Launch, Plan, Work
from emmy.ir.program import Stage


def made_here(plan: Plan, la: Launch, s: Stage) -> tuple[Stage, ...]:
    """Stages of the launch that make factors of the contraction `s`."""
    read = dict.fromkeys(f.value for f in factors(s.body) if isinstance(f, Read))
    return tuple(plan.program.stage(v) for v in read if not plan.arrives(la, v))


def rides(plan: Plan, la: Launch, s: Stage) -> tuple[Stage, ...]:
    """Sums of the launch behind the contraction `s`, over the axis that it folds, of rows that it has: those of their elements."""
    names = [w.stage for w in la.tile.works]
    return _sums_of_rows(plan, la.tile.works[names.index(s.out) + 1 :], s)


def _sums_of_rows(plan: Plan, works: tuple[Work, ...], s: Stage) -> tuple[Stage, ...]:
    found = (plan.program.stage(w.stage) for w in works if not w.combine)
    return tuple(x for x in found if x.reduces and x.folded == s.folded and x.axes == s.axes[:-1])


def row_values(plan: Plan, la: Launch, s: Stage) -> tuple[str, ...]:
    """Values of which lanes load elements along the folded axis for the first factor of `s`: that itself, unless it is made here."""
    first = next((f.value for f in factors(s.body) if isinstance(f, Read)), "")
    made = next((x for x in made_here(plan, la, s) if x.out == first), None)
    along = set(s.folded)
    return tuple(v for v in made.reads if along & set(plan.program.value(v).axes)) if made else (first,)


def refuse_on_the_way(plan: Plan, la: Launch, s: Stage) -> str | None:
    """Why lanes that load rows of the first factor of `s` cannot make it of what they load, nor fold what is folded beside it."""
    first = next((f for f in factors(s.body) if isinstance(f, Read)), None)
    names = [w.stage for w in la.tile.works]
    for made in made_here(plan, la, s):
        if first is None or made.out != first.value:
            return f"{s.out} takes {made.out}, which {la.name} makes, as a weight: cut({s.out}) first"
        if made.reduces or made.axes != first.index or plan.stored(made, la):
            return f"{made.out} is not made of {', '.join(made.reads)} for {s.out} alone: cut({s.out}) first"
        late = [v for v in made.reads if not plan.arrives(la, v)]
        if late:
            return f"{made.out} is made of {late[0]}, which {la.name} makes too: fuse and commute, or cut it off"
        if reason := _refuse_zeros(plan, made):
            return reason
    loaded = row_values(plan, la, s)
    if before := _sums_of_rows(plan, la.tile.works[: names.index(s.out)], s):
        return f"{before[0].out} folds {s.folded[-1]} before {s.out} does: fuse and commute, or cut({s.out})"
    for ride in rides(plan, la, s):
        if plan.workspace(ride.out):
            return f"{ride.out} leaves parts, but it is folded beside {s.out}"
        if ride.monoid is None or len(ride.monoid.state) != 1 or ride.monoid.lift or set(ride.reads) - set(loaded):
            return f"{ride.out} folds {', '.join(ride.reads)}; lanes have {', '.join(loaded)} for {s.out}"
        if reason := _refuse_zeros(plan, ride):
            return reason
    return None


def _refuse_zeros(plan: Plan, made: Stage) -> str | None:
    """Why what lies beyond the folded axis, which is loaded as zeros, would not be made to zero: no factor is such an element."""
    read = [f for f in factors(made.body) if isinstance(f, Read) and f.index[-1:] == made.every[-1:]]
    if read and all(isinstance(r, Read) for f in read for r in walk(f)):
        return None
    return f"{made.out} = {made.body} may not be 0 where all that it reads is: no factor of it is an element"
