"""What is Emmy's in the model that was just loaded, and what is stock's and why: said once, and held against what was promised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from emmy.errors import PackError
from emmy_vllm.kernels import Kernels, Table


def lines(kernels: Kernels) -> Iterator[str]:
    """The coverage as text, a line each."""
    s = kernels.settings
    words = [f"made for {kernels.pack.manifest.card.product}"]
    words += ["deterministic"] * s.deterministic + ["UNMEASURED kernels too"] * s.unmeasured
    yield f"Emmy serves from {s.pack} ({s.digest[:16]}), {', '.join(words)}:"
    for table in kernels.tables.values():
        yield f"  {table.case.op}: {table.place or _layers(table.layers)}"
        yield from (f"    {line}" for line in _ranges(table))
    for why, layers in kernels.stock.items():
        yield f"  stock: {_layers(layers)}: {why}"
    for found in kernels.attended.values():
        yield from (f"  {line}" for line in found.lines())


def refuse_gaps(kernels: Kernels, invariant_stock: bool) -> None:
    """Raises PackError when a product of the deterministic lane is left to a stock kernel that is not batch invariant."""
    if not kernels.settings.deterministic or invariant_stock:
        return
    gaps = [f"{t.case.op} ({_layers(t.layers)})" for t in kernels.tables.values() if t.layers and not t.alike]
    gaps += [f"{_layers(layers)}: {why}" for why, layers in kernels.stock.items()]
    if gaps:
        raise PackError(
            f"{kernels.settings.pack}: the deterministic lane has no kernels for {'; '.join(gaps[:4])}{' ...' if gaps[4:] else ''}. "
            "Stock's depend on the batch, so build a pack that has all of them, set VLLM_BATCH_INVARIANT=1 where vLLM knows it, or "
            "leave deterministic out"
        )


def _ranges(table: Table) -> Iterator[str]:
    """Who serves which rows; neighbours with the same answer as one."""
    if table.alike:
        yield f"Emmy any rows, by {', '.join(f'{lo}..{hi}' for lo, hi in table.alike)}: each sum in the same order"
        return
    said: list[tuple[int, int, str]] = []
    for r in table.case.ranges:
        why = table.why_left(r)
        text = f"stock: {why}" if why else "Emmy"
        if said and said[-1][2] == text:
            said[-1] = (said[-1][0], r.hi, text)
        else:
            said.append((r.lo, r.hi, text))
    for lo, hi, text in said:
        who, _, why = text.partition(": ")
        rows = f"{lo}..{hi} rows" if hi > lo else "1 row" if lo == 1 else f"{lo} rows"
        yield f"{who:5s} {rows}{why and f': {why}'}"


def _layers(names: Sequence[str]) -> str:
    return (
        f"{len(names)} layer{'s' * (len(names) != 1)}, {names[0]}{' ...' if names[1:] else ''}" if names else "no layer"
    )
