"""Sizes of a matrix product as an op's text says them: MxNxK, a dtype, and the words behind it. Knows no op."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from emmy.errors import UsageError
from emmy.ir.dtype import DTYPES, DType
from emmy.ir.program import Dim, Sym, upper

Layout = Literal["kn", "nk"]  # how a weight is stored: [k,n], or [n,k] as the weight of torch's linear
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
_MAX_DIM = 1 << 24
_SIZE = r"[0-9]{1,18}"
_DIM = re.compile(rf"(?P<size>{_SIZE})|m\((?P<lo>{_SIZE})\.\.(?P<hi>{_SIZE})\)")
_DIMS = re.compile(rf"(?P<m>{_SIZE}|m\((?P<lo>{_SIZE})\.\.(?P<hi>{_SIZE})\))x(?P<n>{_SIZE})x(?P<k>{_SIZE})")


@dataclass(frozen=True, slots=True)
class Sizes:
    """What an op's text says before its own options; `words` are the options, layouts left out."""

    m: Dim
    n: int
    k: int
    dtype: DType
    layout: Layout
    words: tuple[str, ...]


def parse_shape(kind: str, rest: str, axes: tuple[str, ...]) -> tuple[tuple[Dim, ...], list[str]]:
    """Sizes and the words behind them of `kind:AxBxC:word:word`; one size may be open, `m(lo..hi)`. Raises UsageError."""
    shape, *words = rest.split(":")
    hits = [_DIM.fullmatch(x) for x in shape.split("x")]
    where, example = f"op '{kind}:{rest[:100]}'", "x".join(axes)
    if len(hits) != len(axes) or None in hits or sum(bool(h and h["lo"]) for h in hits) > 1:
        raise UsageError(f"{where}: the shape is not {example}, of numbers, one of which may be open as in m(1..4096)")
    dims = tuple(int(h["size"]) if h["size"] else Sym("m", int(h["lo"]), int(h["hi"])) for h in hits if h)
    for axis, d in zip(axes, dims, strict=True):
        lo, hi = (d.lo, d.hi) if isinstance(d, Sym) else (d, d)
        if not 1 <= lo <= hi <= _MAX_DIM:
            raise UsageError(f"{where}: {axis} is {d}, allowed 1..{_MAX_DIM}, the lower end first")
    return dims, words


def parse_dtype(kind: str, word: str) -> DType:
    """A dtype of numbers. Raises UsageError."""
    found = next((d for d in DTYPES if d == word), None)
    if found is None:
        raise UsageError(f"{kind}: the dtype {word!r} is not one of {', '.join(DTYPES)}")
    return found


def check_sizes(kind: str, m: Dim, n: int, k: int, dtype: str, layout: str, b: int = 1) -> None:
    """Raises UsageError for sizes below 1 or too large, odd symbols, unknown dtypes and layouts."""
    for name, d in (("m", m), ("n", n), ("k", k), ("b", b)):
        if isinstance(d, Sym) and d.lo > d.hi:
            raise UsageError(f"{kind}: {name} is {d}, which begins above its end; allowed is {d.name}({d.hi}..{d.lo})")
        if not 1 <= upper(d) <= _MAX_DIM or (isinstance(d, Sym) and d.lo < 1):
            raise UsageError(f"{kind}: {name} is {d}, allowed 1..{_MAX_DIM}")
    if isinstance(m, Sym) and (m.name, m.multiple) != ("m", 1):
        raise UsageError(f"{kind}: the symbol {m} in multiples of {m.multiple}; m(lo..hi) in any multiple is allowed")
    if dtype not in DTYPES or layout not in LAYOUTS:
        allowed = f"{', '.join(DTYPES)} and {', '.join(LAYOUTS)}"
        raise UsageError(f"{kind}: dtype {dtype} and layout {layout}; allowed are {allowed}")


def part_of(key: str, m: Dim, symbol: str, lo: int, hi: int) -> Dim:
    """The sizes lo..hi of an op's open size `m`. Raises UsageError when it is not open, or has not these sizes."""
    if not isinstance(m, Sym) or symbol != m.name:
        raise UsageError(f"{key}: no size is named {symbol} and open until run time")
    return m.within(lo, hi)


def parse_sizes(kind: str, rest: str, options: tuple[str, ...], before: str = "") -> Sizes:
    """What `kind:rest` says, where any of `options` may stand beside a layout. Raises UsageError.

    before: what stood between the kind and these sizes, for messages
    """
    shape, _, tail = rest.partition(":")
    dtype, colon, said = tail.partition(":")
    where = f"op '{kind}:{before}{rest if len(rest) <= 100 else rest[:100] + '...'}'"
    hit = _DIMS.fullmatch(shape)
    if not hit:
        raise UsageError(f"{where}: the shape is not MxNxK, such as 512x4096x3840 or m(1..4096)x4096x3840")
    words = said.split(",") if colon else []
    own = tuple(w for w in words if w in options)
    layouts = tuple(y for w in words for y in LAYOUTS if y == w)
    if len(own) + len(layouts) != len(words) or len(layouts) > 1:
        more = f" and any of {', '.join(options)}" if options else ""
        raise UsageError(f"{where}: the options are not one of {', '.join(LAYOUTS)}{more}")
    found = next((d for d in DTYPES if d == dtype), None)
    if found is None:
        raise UsageError(f"{where}: the dtype is not one of {', '.join(DTYPES)}")
    m: Dim = int(hit["m"]) if hit["lo"] is None else Sym("m", int(hit["lo"]), int(hit["hi"]))
    return Sizes(m, int(hit["n"]), int(hit["k"]), found, layouts[0] if layouts else "kn", own)
