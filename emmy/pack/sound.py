"""What a manifest says of its ops, held against the ops themselves: by these words a kernel is given memory and sizes.

Digests say that a pack is whole; that it says the truth of what it holds is another matter. Knows no file and no device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod

from emmy.errors import PackError, UsageError
from emmy.ir.dtype import size_bytes
from emmy.ir.ops import Op, parse_op
from emmy.ir.parts import span_of, symbol_of
from emmy.ir.program import Program, Sym
from emmy.pack.schema import Argument, Case, Manifest, Served
from emmy.runtime.launcher import LoadedPlan


def arguments_of(program: Program) -> tuple[Argument, ...]:
    """What a caller passes to the kernels of a program: its inputs, then its outputs."""
    dims = {axis: d.name if isinstance(d, Sym) else d for axis, d in program.dims}
    names = (*(v.name for v in program.inputs), *program.outputs)
    return tuple(
        Argument(v.name, v.dtype, v.axes, tuple(dims[a] for a in v.axes), v.name in program.outputs)
        for v in map(program.value, names)
    )


def refuse_lies(manifest: Manifest) -> None:
    """Raises PackError for a manifest that contradicts itself, or the ops that it names."""
    seen = set[str]()
    for case in manifest.cases:
        if why := "it is there twice" if case.op in seen else _why_unsound(case):
            raise PackError(f"manifest.json: {case.op[:120]}: {why}. Build the pack again.")
        seen.add(case.op)


def _why_unsound(case: Case) -> str:
    try:
        op = parse_op(case.op)
    except UsageError as e:
        return f"no op that this Emmy knows ({e})"
    symbol = symbol_of(op)
    if case.op != op.key or case.symbol != (symbol.name if symbol else ""):
        return f"it is {op.key}, whose open size is {symbol.name if symbol else 'none'}, not {case.symbol[:20]!r}"
    if case.arguments != arguments_of(op.program()):
        return "its arguments are not those of the op"
    ends = [(r.lo, r.hi) for r in case.ranges]
    lo, hi = (symbol.lo, symbol.hi) if symbol else (0, 0)
    sound = bool(ends) and lo <= ends[0][0] and ends[-1][1] <= hi and all(a <= b for a, b in ends)
    if not sound or any(b[0] != a[1] + 1 for a, b in pairwise(ends)):
        return f"its ranges {ends[:4]} overlap, leave sizes out, or go beyond {lo}..{hi}"
    return next(filter(None, (_why_range(op, symbol, r) for r in case.ranges)), "")


def _why_range(op: Op, symbol: Sym | None, r: Served) -> str:
    whole = (symbol.lo, symbol.hi) if symbol else (0, 0)
    own = symbol is not None and r.op == _within(op, symbol, r)  # parsed again only where it is of more sizes
    part = (r.lo, r.hi) if own else whole if r.op == op.key else span_of(op, r.op)
    if part is None or not part[0] <= r.lo <= r.hi <= part[1]:
        return f"its range {r.lo}..{r.hi} is said to be {r.op[:120]}, which is not of these sizes"
    if r.code and not all(line.isascii() and line.isprintable() for line in r.code.launch):
        return f"its range {r.lo}..{r.hi} has a launch line that cannot be read"
    return ""


def _within(op: Op, symbol: Sym, r: Served) -> str:
    try:
        return op.within(symbol.name, r.lo, r.hi).key
    except UsageError:
        return ""


def refuse_kernels(op: str, arguments: Sequence[Argument], sizes: Iterable[int], loaded: LoadedPlan) -> None:
    """Raises PackError when what was loaded takes other arguments than the op has, or other bytes of them at one of the sizes."""
    for why in _contradictions({a.name: a for a in arguments}, sizes, loaded):
        raise PackError(f"{op}: {why}: the kernel is of another op. Build the pack again.")


def _contradictions(arguments: Mapping[str, Argument], sizes: Iterable[int], loaded: LoadedPlan) -> Iterator[str]:
    symbols = {d for a in arguments.values() for d in a.shape if isinstance(d, str)}
    if sorted(loaded.arguments) != sorted(arguments):
        yield f"its kernel takes {', '.join(loaded.arguments)}, the op has {', '.join(arguments)}"
    elif not set(loaded.syms) <= symbols:
        yield f"its kernel asks for the sizes {', '.join(loaded.syms)}"
    else:
        for size in sizes:
            got = loaded.argument_bytes([size] * len(loaded.syms))
            needed = tuple(_bytes(arguments[name], size) for name in loaded.arguments)
            if got != needed:
                yield f"its kernel takes {got} bytes, the op has {needed}{f' at size {size}' * bool(size)}"


def _bytes(a: Argument, size: int) -> int:
    return size_bytes(a.dtype) * prod(size if isinstance(d, str) else d for d in a.shape)
