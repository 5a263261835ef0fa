"""Where masks leave anything to fold: pieces of a folded axis that a tile need not walk. Knows no code.

`where(t <= s + 96, S[h,s,t], -1e30)`, folded over t by a monoid that begins with a maximum, adds nothing where it is masked: its
weight is exp(-1e30 - maximum) = 0. So a block with the rows s of a tile walks only those t that one of them sees. What t is
compared with may be known at run time only: `t < lengths[b]`.
"""

from __future__ import annotations

from dataclasses import dataclass

from emmy.ir.expr import Apply, Axis, Const, Expr, Read, reads
from emmy.ir.plan import Launch, Plan
from emmy.ir.program import MAX, Program, Stage

NOTHING = -1e30  # what is not above this adds nothing beside anything that is


@dataclass(frozen=True, slots=True)
class Place:
    """axis // over + read, a whole number: `axis` "" is 0, and so is no i32 value."""

    axis: str = ""
    over: int = 1
    read: Read | None = None


@dataclass(frozen=True, slots=True)
class Bound:
    """Anything to fold has `axis` <= `other` + offset where `upper`, else `axis` >= `other` + offset."""

    axis: str
    other: Place
    offset: int
    upper: bool


def compared(cond: Expr) -> tuple[Place, Place, int] | None:
    """(x, y, offset) of a condition that says x <= y + offset; else None."""
    if not isinstance(cond, Apply) or cond.fn not in ("le", "lt"):
        return None
    left, right = (_moved(a) for a in cond.args)
    if left is None or right is None:
        return None
    return left[0], right[0], right[1] - left[1] - (cond.fn == "lt")


def _moved(e: Expr) -> tuple[Place, int] | None:
    """(place, constant) of place + constant."""
    match e:
        case Axis(name):
            return Place(name), 0
        case Read():
            return Place(read=e), 0
        case Const(v) if v == int(v):
            return Place(), int(v)
        case Apply("floordiv", (Axis(name), Const(v))) if v == int(v):
            return Place(name, int(v)), 0
        case Apply("add", (a, b)):
            left, right = _moved(a), _moved(b)
            if left is None or right is None:
                return None
            (x, p), (y, q) = left, right
            if (x.axis and y.axis) or (x.read and y.read):
                return None
            along = x if x.axis else y
            return Place(along.axis, along.over, x.read or y.read), p + q
        case _:
            return None


def layers(p: Program, body: Expr) -> tuple[Expr, tuple[tuple[Expr, float], ...]]:
    """(what is masked, the masks around it: (condition, what stands where it is false), innermost first)."""
    match body:
        case Apply("where", (cond, shown, Const(v))) if compared(cond) and all(
            p.value(x).dtype == "i32" for x in reads(cond)
        ):
            inner, masks = layers(p, shown)
            return inner, (*masks, (cond, v))
        case _:
            return body, ()


def bounds(plan: Plan, launch: Launch) -> tuple[Bound, ...]:
    """What masks say about a folded axis that the launch's blocks walk in time, along axes that blocks cut up."""
    t, p, out = launch.tile, plan.program, list[Bound]()
    in_time = {x.axis for x in t.nest[t.n_block_loops :] if x.level == "serial"}
    cut = {x.axis for x in t.nest[: t.n_block_loops]}
    for w in t.works:
        s = p.stage(w.stage)
        masked = None if w.combine else _masked(p, s)
        here = [x.stage for x in t.works if masked and s.folded[0] in p.stage(x.stage).every and x.stage != s.out]
        if masked is None or masked.out not in here or any(plan.stored(p.stage(x), launch) for x in here):
            continue
        for cond, _ in layers(p, masked.body)[1]:
            found = compared(cond)
            assert found is not None
            x, y, offset = found
            for one, other, upper in ((x, y, True), (y, x, False)):
                known = other.axis in (*cut, "") and (not other.read or _is_one(plan, launch, other.read))
                if one == Place(s.folded[0]) and known and one.axis in in_time:
                    out.append(Bound(one.axis, other, offset if upper else -offset, upper))
                    break
    return tuple(out)


def _is_one(plan: Plan, launch: Launch, r: Read) -> bool:
    """Whether a block reads one number of a value, which no launch of the plan writes."""
    t = launch.tile
    alone = all(plan.extent(t.nest[: t.n_block_loops], a) == 1 for a in r.axes)
    return alone and not r.computed and plan.program.is_input(r.value)


def _masked(p: Program, s: Stage) -> Stage | None:
    """The elementwise stage, masked by nothing, whose maximum a stage's monoid begins with and keeps everything relative to."""
    lift = s.monoid.lift if s.monoid else ()
    if not lift or lift[0].monoid != MAX or len(s.folded) != 1:
        return None
    body = lift[0].body
    of = body.args[0] if isinstance(body, Apply) and body.fn == "maximum" else body
    if not isinstance(of, Read) or not p.has_stage(of.value):
        return None
    stage = p.stage(of.value)
    masks = layers(p, stage.body)[1]
    return stage if masks and not stage.reduces and all(v <= NOTHING for _, v in masks) else None
