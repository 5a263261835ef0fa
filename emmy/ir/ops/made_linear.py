"""A linear layer whose operand is made of what came before it, element by element. Must not know schedules or devices."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import ClassVar

import numpy as np

from emmy.ir.dtype import DType, decode, epsilon, size_bytes
from emmy.ir.expr import Array, parse
from emmy.ir.ops.op import Accumulate, InputKind, Op, Storage, Work, drawn
from emmy.ir.ops.sizes import Layout, Sizes, check_sizes, part_of
from emmy.ir.program import SUM, Dim, Program, Reduce, Stage, Value

_TERMS = 2  # of a sum of whole numbers, on average: sums stay near 1, where the tolerance holds


@dataclass(frozen=True, slots=True)
class MadeLinear(Op):
    """Y[m,n] = sum over k of P[m,k] * W (+ R[m,n]), row-major; P is made of the op's other inputs; sums in f32, all else in `dtype`.

    W is a parameter. P may be rounded to `dtype`, as where a launch of its own leaves it in memory, or not.

    layout:   "kn" = W stored [k,n]; "nk" = W stored [n,k] (the weight of torch's linear)
    residual: whether R is added to the sums
    """

    m: Dim
    n: int
    k: int
    dtype: DType = "f32"
    layout: Layout = "kn"
    residual: bool = False
    options: ClassVar[tuple[str, ...]] = ("residual",)

    def __post_init__(self) -> None:
        check_sizes(self.kind, self.m, self.n, self.k, self.dtype, self.layout)

    @property
    def key(self) -> str:
        options = ",".join(("nk",) * (self.layout == "nk") + ("residual",) * self.residual)
        return f"{self.kind}:{self.m}x{self.n}x{self.k}:{self.dtype}" + (f":{options}" if options else "")

    @abstractmethod
    def before(self) -> tuple[tuple[Value, ...], tuple[Stage, ...]]:
        """(inputs, stages that make P of them), the last of which is P[m,k]."""

    @abstractmethod
    def made(self, inputs: Mapping[str, Array]) -> Array:
        """P in float64 by numpy."""

    def program(self) -> Program:
        given, stages = self.before()
        axes = ("k", "n") if self.layout == "kn" else ("n", "k")
        weight = Value("W", axes, self.dtype, constant=True)
        product = parse(f"{stages[-1].out}[m,k] * W[{','.join(axes)}]")
        out = "C" if self.residual else "Y"
        total = Stage(out, ("m", "n"), product, (Reduce("k", SUM),), "f32" if self.residual else self.dtype)
        added = (Stage("Y", ("m", "n"), parse("C[m,n] + R[m,n]"), (), self.dtype),) if self.residual else ()
        rest = (Value("R", ("m", "n"), self.dtype),) if self.residual else ()
        dims = (("m", self.m), ("n", self.n), ("k", self.k))
        return Program(dims, (*given, weight, *rest), (*stages, total, *added), ("Y",))

    def within(self, symbol: str, lo: int, hi: int) -> MadeLinear:
        return replace(self, m=part_of(self.key, self.m, symbol, lo, hi))

    @property
    def filled(self) -> float:
        """The share of the weight's elements that whole numbers fill, the others being zero."""
        return min(1.0, _TERMS / self.k)

    def inputs(self, kind: InputKind, seed: int, sizes: Mapping[str, int] | None = None) -> dict[str, Storage]:
        return drawn(self.program(), kind, seed, sizes, {"W": 1 / sqrt(self.k)}, {"W": self.filled})

    def reference(self, inputs: Mapping[str, Storage]) -> dict[str, Array]:
        x = {v.name: decode(inputs[v.name], v.dtype) for v in self.program().inputs}
        y = np.matmul(self.made(x), x["W"] if self.layout == "kn" else x["W"].T)
        return {"Y": y + x["R"] if self.residual else y}

    def work(self, sizes: Mapping[str, int] | None = None) -> Work:
        program = self.program()
        extent = program.sizes(sizes or self.typical_sizes())
        values = (*program.inputs, program.value("Y"))
        moved = sum(size_bytes(v.dtype) * int(np.prod([extent[a] for a in v.axes])) for v in values)
        return Work(2.0 * extent["m"] * self.n * self.k, float(moved))

    def is_exact(self, kind: InputKind, output: str | None = None) -> bool:
        return False  # P is not, whatever it is made of

    def tolerance(self, accumulate: Accumulate = "f32", output: str | None = None) -> tuple[float, float]:
        """Absolute: sums as those of a matmul (see Matmul). P has unit variance and may be rounded, twice on some ways to
        it, each time up to half of epsilon off: K such products add up to 0.3 epsilon as a rule, the worst of millions to
        six times that; a factor of two above it is allowed. Relative: half an epsilon of P, where K is 1, and half of Y.
        """
        root, half = sqrt(self.k), 2.0**-8
        absolute = {"f32": 8 * 2.0**-24 * root, "hybrid": half, "f16": max(half, 2.0**-12 * root)}[accumulate]
        return absolute + 4 * epsilon(self.dtype), max(epsilon(self.dtype), 8 * epsilon("f32"))


def parsed(op: type[MadeLinear], x: Sizes) -> MadeLinear:
    """The op that sizes and words name."""
    return op(x.m, x.n, x.k, x.dtype, x.layout, "residual" in x.words)
