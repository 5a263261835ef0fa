"""The size of an op that is open until run time, and the sizes of it that another op is for. Knows no schedule."""

from __future__ import annotations

from emmy.errors import UsageError
from emmy.ir.ops import Op, parse_op
from emmy.ir.program import Sym

Span = tuple[int, int]  # lo, hi


def symbol_of(op: Op) -> Sym | None:
    """The op's size that is known at run time, where it has one and it is more than one size."""
    syms = op.program().syms
    return syms[0] if len(syms) == 1 and syms[0].lo < syms[0].hi else None


def span_of(op: Op, part: str) -> Span | None:
    """The sizes of `op` that the op named `part` is for; None when it is not a part of it."""
    s = symbol_of(op)
    if s is None or part.partition(":")[0] != op.kind:
        return None
    try:
        other = parse_op(part)
        dim = dict(other.program().dims)[next(a for a, d in op.program().dims if d == s)]
        lo, hi = (dim, dim) if isinstance(dim, int) else (dim.lo, dim.hi)
        return (lo, hi) if op.within(s.name, lo, hi) == other else None
    except (UsageError, KeyError):
        return None
