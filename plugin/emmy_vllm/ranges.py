"""Which sizes of a chain are Emmy's, and where vLLM's compiled ranges must end so that one is wholly Emmy's or wholly not.

One compiled graph serves a range of rows. What a chain is replaced by serves each of them at Emmy's speed, for stock inside an
op would lack what the compiler fuses. So a range that is partly stock's is left as it is, and ranges are cut where that pays:
each further one costs a compilation of every piece of the model when a server starts for the first time. Knows neither torch
nor vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from math import inf, log2

from emmy.ir.ops import Glu, Matmul, Op, parse_op
from emmy.ir.program import Sym
from emmy.pack import Case, Evidence, Pack, Served

Span = tuple[int, int]
MOST_RANGES = 4
COMPILER = "torch.compile"


def spans(case: Case, most: int, why_left: Callable[[Served], str]) -> tuple[Span, ...]:
    """The sizes up to `most` that Emmy serves, as ranges with gaps between them."""
    out: list[Span] = []
    for r in case.ranges:
        if r.lo > most or why_left(r):
            continue
        if out and out[-1][1] == r.lo - 1:
            out[-1] = (out[-1][0], min(r.hi, most))
        else:
            out.append((r.lo, min(r.hi, most)))
    return tuple(out)


def covers(served: Iterable[Span], lo: int, hi: int) -> bool:
    """Whether every size lo..hi is served."""
    return any(a <= lo and hi <= b for a, b in served)


def cuts(cases: Sequence[Sequence[Span]], most: int, given: Iterable[int] = ()) -> tuple[int, ...]:
    """Last sizes of compiled ranges, `most` and those given left out: as many as pay, at most MOST_RANGES ranges in all.

    What is worth keeping is what the cases serve in ranges that they cover, sizes counted by their logarithm.
    """
    fixed = {e for e in given if 0 < e < most}
    chosen = {e for case in cases for lo, hi in case for e in (lo - 1, hi) if 0 < e < most} - fixed
    worth = _worth(cases, most, chosen | fixed)
    while chosen:
        left = {e: _worth(cases, most, (chosen | fixed) - {e}) for e in sorted(chosen)}
        least = max(left, key=lambda e: left[e])
        if len(chosen | fixed) < MOST_RANGES and left[least] < worth:
            break
        chosen.remove(least)
        worth = left[least]
    return tuple(sorted(chosen))


def _worth(cases: Sequence[Sequence[Span]], most: int, ends: Iterable[int]) -> float:
    bounds = [0, *sorted(ends), most]
    ranges = [(a + 1, b) for a, b in pairwise(bounds)]
    return sum(log2((hi + 1) / lo) for case in cases for lo, hi in ranges if covers(case, lo, hi))


def why_no_gain(pack: Pack, case: Case, r: Served) -> str:
    """Why a range that the pack serves is better left to the compiler in a graph; "" when fusing gains.

    It does by a race that was won with torch.compile, or where torch's product by itself takes longer than the gated pair. And a
    pair must be faster than Emmy's product with the compiler's kernel behind it, which takes what torch.compile's pair takes
    beyond torch's product: nothing, as long as nobody has measured it.
    """
    e, op = r.evidence, parse_op(case.op)
    if e is None or not e.time_us:
        return "its time is not known"
    raced = e.rivals.get(COMPILER)
    if raced is not None and raced <= 1:
        return f"no win: {raced:.3f} times as fast as {COMPILER}"
    alike = [p for p in _products(pack, op) if _rows(p.op) == _rows(e.op)] if isinstance(op, Glu) else []
    torchs = [p.stock_us for p in alike if p.stock == "torch" and p.stock_us]
    if raced is None and not (torchs and min(torchs) > e.time_us):
        return f"it was never raced with {COMPILER}"
    behind = max(0.0, raced * e.time_us - max(torchs)) if raced and torchs else 0.0
    apart = min((p.time_us + behind for p in alike), default=inf)
    return (
        "" if e.time_us < apart else f"{e.time_us:.1f} us; the product and the compiler's kernel behind it {apart:.1f}"
    )


def _products(pack: Pack, op: Glu) -> Iterator[Evidence]:
    """What is known of the pack's kernels for the product with the merged weight."""
    product = pack.case(Matmul(op.m, 2 * op.n, op.k, op.dtype, op.layout))
    yield from (r.evidence for r in (product.ranges if product else ()) if r.code and r.evidence)


def _rows(text: str) -> int:
    """The rows that were timed."""
    op: Op = parse_op(text)
    dim = dict(op.program().dims)["m"]
    return dim.hi if isinstance(dim, Sym) else dim
