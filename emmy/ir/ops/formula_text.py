"""Programs as one word, and back: dimensions, inputs, stages, in the program's order, `;` between them.

    m=4,n=64;X[m,n]:f16;w[n]:f16:constant;S[m]=sum(n,X[m,n]*X[m,n]);Y[m,n]:f16=X[m,n]*rsqrt(div(S[m],64))*w[n]

A size that is open until run time is `m(1..4096)`. What has a body is a stage, what has none an input. A stage whose dtype is
said leaves the program. `sum(n,...)` and `max(n,m,...)` fold axes. Bodies are expressions (`emmy.ir.expr`) without slashes, for
the text is part of paths: a quotient is `div(a,b)`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import get_args

from emmy.errors import PlanError, UsageError
from emmy.ir.dtype import DType
from emmy.ir.expr import Expr, compact, parse
from emmy.ir.program import MAX, SUM, Dim, Monoid, Program, Reduce, Stage, Sym, Value

MONOIDS: Mapping[str, Monoid] = {"sum": SUM, "max": MAX}
_NAME = r"[A-Za-z_][A-Za-z_0-9]*"
_DIM = re.compile(
    rf"(?P<axis>{_NAME})=(?:(?P<size>[0-9]{{1,10}})|(?P<sym>{_NAME})\((?P<lo>[0-9]{{1,10}})\.\.(?P<hi>[0-9]{{1,10}})\))"
)
_HEAD = re.compile(
    rf"(?P<name>{_NAME})\[(?P<axes>(?:{_NAME}(?:,{_NAME})*)?)\](?::(?P<dtype>{'|'.join(get_args(DType))}))?(?P<constant>:constant)?"
)


def program_text(p: Program) -> str:
    """The text of a program, without blanks."""
    dims = ",".join(f"{a}={d}" for a, d in p.dims)
    inputs = (f"{_head(v.name, v.axes)}:{v.dtype}" + (":constant" if v.constant else "") for v in p.inputs)
    stages = (f"{_head(s.out, s.axes)}{f':{s.dtype}' if s.out in p.outputs else ''}={_body(s)}" for s in p.stages)
    return ";".join((dims, *inputs, *stages))


def _head(name: str, axes: tuple[str, ...]) -> str:
    return f"{name}[{','.join(axes)}]"


def _body(s: Stage) -> str:
    return f"{s.monoid.name}({','.join(s.folded)},{compact(s.body)})" if s.monoid else compact(s.body)


def read_program(text: str) -> Program:
    """The program a text means. Raises UsageError that says what was expected where, or PlanError for what makes no sense."""
    first, *rest = "".join(text.split()).split(";")
    dims = tuple(map(_dim, re.split(r",(?![^(]*\))", first)))
    inputs, stages, outputs = list[Value](), list[Stage](), list[str]()
    for part in rest:
        head, is_stage, body = part.partition("=")
        hit = _HEAD.fullmatch(head)
        if hit is None:
            raise UsageError(
                f"formula: {_shown(part)} is neither an input, such as X[m,n]:f16, nor a stage, such as Y[m,n]:f16=-X[m,n]"
            )
        axes = tuple(a for a in hit["axes"].split(",") if a)
        dtype: DType = next((d for d in get_args(DType) if d == hit["dtype"]), "f32")
        if not is_stage:
            if stages:
                raise UsageError(
                    f"formula: the input {hit['name']} stands behind the stage {stages[-1].out}: inputs come first"
                )
            inputs.append(Value(hit["name"], axes, dtype, bool(hit["constant"])))
            continue
        if hit["constant"] or dtype == "i32":
            raise UsageError(f"formula: {_shown(part)} computes {hit['name']}: only an input is constant, or i32")
        folded, monoid, e = _folded(body)
        stages.append(Stage(hit["name"], axes, e, tuple(Reduce(a, monoid) for a in folded if monoid), dtype))
        outputs += [hit["name"]] if hit["dtype"] else []
    if not outputs:
        raise UsageError("formula: nothing leaves it: an output says its dtype, such as Y[m,n]:f16=-X[m,n]")
    try:
        return Program(dims, tuple(inputs), tuple(stages), tuple(outputs))
    except PlanError as e:
        raise UsageError(f"formula: {e}") from None


def _dim(text: str) -> tuple[str, Dim]:
    hit = _DIM.fullmatch(text)
    if hit is None:
        raise UsageError(f"formula: {_shown(text)} is no size, such as m=64 or m=m(1..4096)")
    d: Dim = int(hit["size"]) if hit["size"] else Sym(hit["sym"], int(hit["lo"]), int(hit["hi"]))
    lo, hi = (d.lo, d.hi) if isinstance(d, Sym) else (d, d)
    if not 1 <= lo <= hi < 1 << 31:
        raise UsageError(f"formula: {_shown(text)}; allowed are 1..{(1 << 31) - 1}, the lower end first")
    return hit["axis"], d


def _folded(body: str) -> tuple[tuple[str, ...], Monoid | None, Expr]:
    """The axes that a stage's body folds, by what, and what is folded."""
    name = body.partition("(")[0]
    if name not in MONOIDS:
        return (), None, _parsed(body)
    try:
        node = ast.parse(body, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        node = None
    match node:
        case ast.Call(func=ast.Name(), args=[*axes, inner], keywords=[]) if axes:
            names = tuple(a.id for a in axes if isinstance(a, ast.Name))
            if len(names) == len(axes):
                return names, MONOIDS[name], _parsed(ast.unparse(inner))
    raise UsageError(f"formula: {_shown(body)}; a fold is a whole body, such as {name}(n,X[m,n]*X[m,n])")


def _parsed(text: str) -> Expr:
    try:
        return parse(text)
    except PlanError as e:
        raise UsageError(f"formula: {e}") from None


def _shown(text: str) -> str:
    return repr(text if len(text) <= 100 else text[:100] + "...")
