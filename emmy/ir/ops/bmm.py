"""C[b] = A[b] @ B[b]: a batched matmul, such as an attention's scores of all heads. Must not know schedules or devices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import ClassVar

import numpy as np

from emmy.errors import UsageError
from emmy.ir.dtype import DType, decode
from emmy.ir.expr import Array, parse
from emmy.ir.ops.matmul import Matmul
from emmy.ir.ops.op import PARSERS, Accumulate, InputKind, Op, Storage, Work, drawn
from emmy.ir.ops.sizes import Layout, check_sizes, parse_sizes, part_of
from emmy.ir.program import SUM, Dim, Program, Reduce, Stage, Value

_BATCHED = re.compile(r"(?P<b>[0-9]{1,18})x(?P<rest>.*)")


@dataclass(frozen=True, slots=True)
class Bmm(Op):
    """C[b,m,n] = sum over k of A[b,m,k] * B, row-major; A, B and C in `dtype`, sums in f32. B is no parameter of a model.

    layout: "kn" = B stored [b,k,n]; "nk" = B stored [b,n,k]
    """

    b: int
    m: Dim
    n: int
    k: int
    dtype: DType = "f32"
    layout: Layout = "kn"
    kind: ClassVar[str] = "bmm"

    def __post_init__(self) -> None:
        check_sizes("bmm", self.m, self.n, self.k, self.dtype, self.layout, self.b)

    @property
    def each(self) -> Matmul:
        """One of the products."""
        return Matmul(self.m, self.n, self.k, self.dtype, self.layout)

    @property
    def key(self) -> str:
        return f"bmm:{self.b}x{self.each.key.removeprefix('matmul:')}"

    def program(self) -> Program:
        b_axes = ("b", "k", "n") if self.layout == "kn" else ("b", "n", "k")
        inputs = Value("A", ("b", "m", "k"), self.dtype), Value("B", b_axes, self.dtype)
        c = Stage("C", ("b", "m", "n"), parse(f"A[b,m,k] * B[{','.join(b_axes)}]"), (Reduce("k", SUM),), self.dtype)
        dims = (("b", self.b), ("m", self.m), ("n", self.n), ("k", self.k))
        return Program(dims, inputs, (c,), ("C",))

    def within(self, symbol: str, lo: int, hi: int) -> Bmm:
        return replace(self, m=part_of(self.key, self.m, symbol, lo, hi))

    def inputs(self, kind: InputKind, seed: int, sizes: Mapping[str, int] | None = None) -> dict[str, Storage]:
        return drawn(self.program(), kind, seed, sizes, {"B": 1 / sqrt(self.k)})

    def reference(self, inputs: Mapping[str, Storage]) -> dict[str, Array]:
        a, b = (decode(inputs[v.name], v.dtype) for v in self.program().inputs)
        return {"C": np.matmul(a, b if self.layout == "kn" else b.swapaxes(1, 2))}

    def work(self, sizes: Mapping[str, int] | None = None) -> Work:
        one = self.each.work(sizes)
        return Work(self.b * one.flops, self.b * one.bytes)

    def is_exact(self, kind: InputKind, output: str | None = None) -> bool:
        return self.each.is_exact(kind)

    def tolerance(self, accumulate: Accumulate = "f32", output: str | None = None) -> tuple[float, float]:
        return self.each.tolerance(accumulate)


def _parse(rest: str) -> Bmm:
    hit = _BATCHED.fullmatch(rest)
    if hit is None:
        shown = rest if len(rest) <= 100 else rest[:100] + "..."
        raise UsageError(f"op 'bmm:{shown}': the shape is not BxMxNxK, such as 16x512x512x128 or 16xm(1..512)x512x128")
    x = parse_sizes("bmm", hit["rest"], (), before=f"{hit['b']}x")
    return Bmm(int(hit["b"]), x.m, x.n, x.k, x.dtype, x.layout)


PARSERS["bmm"] = _parse
