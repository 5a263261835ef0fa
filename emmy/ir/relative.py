"""Monoids whose states may be taken relative to a running one, so that what is folded next adds to it as it is. Knows no code.

The state (m, l, o) of a softmax stands for the same weights as (M, l e^(m-M), o e^(m-M)) with any larger M. So a block's state
may be made relative to the maximum of everything so far, and then

    combine: a_l * exp(a_m - max(a_m, b_m)) + b_l * exp(b_m - max(a_m, b_m))   becomes   a_l * exp(a_m - M) + b_l
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from emmy.ir.expr import Apply, Axis, Const, Expr
from emmy.ir.program import Monoid


@dataclass(frozen=True, slots=True)
class Relative:
    """base: the component that others are relative to; joined: its combination; scales: of each other one, the factor of what is
    there (over a_<base> and <base>, the new one), before a block's is added.
    """

    base: str
    joined: Expr
    scales: Mapping[str, Expr]


def relative(m: Monoid) -> Relative | None:
    """How a monoid's states are taken relative to a running one; None when it is no such monoid."""
    combined = {c: e for (c, _), e in zip(m.state, m.combine, strict=True)}
    base = next((c for c, e in combined.items() if _names(e) <= {f"a_{c}", f"b_{c}"}), None)
    if base is None or not m.lift:
        return None
    scales: dict[str, Expr] = {}
    for c, e in combined.items():
        if c == base:
            continue
        moved = _simple(_replaced(e, {combined[base]: Axis(base), Axis(f"b_{base}"): Axis(base)}))
        match moved:
            case Apply("add", (Apply("mul", (Axis(a), factor)), Axis(b))) if (a, b) == (f"a_{c}", f"b_{c}"):
                if not _names(factor) <= {f"a_{base}", base}:
                    return None
                scales[c] = factor
            case _:
                return None
    return Relative(base, combined[base], scales)


def _names(e: Expr) -> set[str]:
    if isinstance(e, Apply):
        return set().union(*map(_names, e.args))
    return {e.name} if isinstance(e, Axis) else set()


def _replaced(e: Expr, by: Mapping[Expr, Expr]) -> Expr:
    if e in by:
        return by[e]
    return Apply(e.fn, tuple(_replaced(a, by) for a in e.args)) if isinstance(e, Apply) else e


def _simple(e: Expr) -> Expr:
    """exp(x - x) = 1, and x * 1 = x."""
    if not isinstance(e, Apply):
        return e
    args = tuple(map(_simple, e.args))
    match e.fn, args:
        case "sub", (a, b) if a == b:
            return Const(0.0)
        case "exp", (Const(0.0),):
            return Const(1.0)
        case "mul", (a, Const(1.0)):
            return a
        case _:
            return Apply(e.fn, args)
