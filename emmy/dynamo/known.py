"""Which short name a program has, if any: what is tuned as `rms_norm:512x3840:f16` is found again in a graph."""

from __future__ import annotations

from collections.abc import Iterator

from emmy.errors import UsageError
from emmy.ir.expr import Apply, Expr, Read
from emmy.ir.ops import Op
from emmy.ir.ops.rows import GegluProduct, RmsNorm, Rstd, Softmax, SwigluProduct
from emmy.ir.program import Program


def known_op(p: Program) -> Op | None:
    """The op with a short key whose program this is, values' names and constancy aside; None when it has none."""
    names = tuple(a for a, _ in p.dims)
    if names != ("m", "n") or not p.inputs:
        return None
    form = _form(p)
    return next((op for op in _candidates(p) if _form(op.program()) == form), None)


def _candidates(p: Program) -> Iterator[Op]:
    (_, m), (_, n) = p.dims
    dtype = p.inputs[0].dtype
    if not isinstance(n, int):
        return
    try:
        yield RmsNorm(m, n, dtype)
        yield RmsNorm(m, n, dtype, residual=True)
        for kind in (Softmax, GegluProduct, SwigluProduct, Rstd):
            yield kind(m, n, dtype)
    except UsageError:  # of sizes that rows may not have
        return


def _form(p: Program) -> tuple[object, ...]:
    """A program by everything but names."""
    number = {v: f"v{i}" for i, v in enumerate([*(v.name for v in p.inputs), *(s.out for s in p.stages)])}

    def renamed(e: Expr) -> Expr:
        if isinstance(e, Read):
            return Read(number[e.value], e.index)
        return Apply(e.fn, tuple(map(renamed, e.args))) if isinstance(e, Apply) else e

    inputs = tuple((v.axes, v.dtype) for v in p.inputs)
    stages = tuple((s.axes, str(renamed(s.body)), s.reduces, s.dtype) for s in p.stages)
    return p.dims, inputs, stages, tuple(number[o] for o in p.outputs)
