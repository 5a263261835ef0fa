"""Where masks leave anything to fold: pieces of a folded axis that a tile need not walk. Knows no code.

`where(t <= s + 96, S[h,s,t], -1e30)`, folded over t by a monoid that begins with a maximum, adds nothing where it is masked: its
weight is exp(-1e30 - maximum) = 0. So a block with the rows s of a tile walks only those t that one of them sees.
"""

from __future__ import annotations

from dataclasses import dataclass

from emmy.ir.expr import Apply, Axis, Const, Expr, Read
from emmy.ir.plan import Launch, Plan
from emmy.ir.program import MAX, Program, Stage

NOTHING = -1e30  # what is not above this adds nothing beside anything that is


@dataclass(frozen=True, slots=True)
class Bound:
    """Anything to fold has `axis` <= `other` + offset where `upper`, else `axis` >= `other` + offset; `other` "" is 0."""

    axis: str
    other: str
    offset: int
    upper: bool


def compared(cond: Expr) -> tuple[str, str, int] | None:
    """(x, y, offset) of a condition that says x <= y + offset, for two axes, of which one may be "", which is 0; else None."""
    if not isinstance(cond, Apply) or cond.fn not in ("le", "lt"):
        return None
    left, right = (_moved(a) for a in cond.args)
    if left is None or right is None:
        return None
    return left[0], right[0], right[1] - left[1] - (cond.fn == "lt")


def _moved(e: Expr) -> tuple[str, int] | None:
    """(axis, constant) of axis + constant."""
    match e:
        case Axis(name):
            return name, 0
        case Const(v) if v == int(v):
            return "", int(v)
        case Apply("add", (Axis(name), Const(v))) if v == int(v):
            return name, int(v)
        case _:
            return None


def layers(body: Expr) -> tuple[Expr, tuple[tuple[Expr, float], ...]]:
    """(what is masked, the masks around it: (condition, what stands where it is false), innermost first)."""
    if isinstance(body, Apply) and body.fn == "where" and isinstance(body.args[2], Const) and compared(body.args[0]):
        inner, masks = layers(body.args[1])
        return inner, (*masks, (body.args[0], body.args[2].value))
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
        for cond, _ in layers(masked.body)[1]:
            found = compared(cond)
            assert found is not None
            x, y, offset = found
            if x == s.folded[0] and y in (*cut, "") and x in in_time:
                out.append(Bound(x, y, offset, True))
            elif y == s.folded[0] and x in (*cut, "") and y in in_time:
                out.append(Bound(y, x, -offset, False))
    return tuple(out)


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
    masks = layers(stage.body)[1]
    return stage if masks and not stage.reduces and all(v <= NOTHING for _, v in masks) else None
