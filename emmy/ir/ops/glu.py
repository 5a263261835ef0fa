"""Y = act(A @ G) * (A @ U): the gated pair of linears that opens the MLP of most transformers. Must not know schedules or devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import ClassVar, Literal

import numpy as np

from emmy.ir.dtype import DType, decode, epsilon, size_bytes
from emmy.ir.expr import FUNCTIONS, Apply, Array, Read, parse
from emmy.ir.ops.op import PARSERS, Accumulate, InputKind, Op, Storage, Work, drawn
from emmy.ir.ops.sizes import Layout, check_sizes, parse_sizes, part_of
from emmy.ir.program import SUM, Dim, Program, Reduce, Stage, Value

Activation = Literal["gelu_tanh", "silu"]
_TERMS = 16  # of a sum of whole numbers, on average: so products of two sums stay far below the largest f16


@dataclass(frozen=True, slots=True)
class Glu(Op):
    """Y[m,n] = activation(sum over k of A[m,k] * G) * (sum over k of A[m,k] * U), row-major; sums in f32, all else in `dtype`.

    G and U are parameters. A merged weight of 2 N rows (layout "nk") is this op too: G is its first half, U its second.

    layout: "kn" = G and U stored [k,n]; "nk" = stored [n,k] (the weights of torch's linear)
    """

    m: Dim
    n: int
    k: int
    dtype: DType = "f32"
    layout: Layout = "kn"
    activation: ClassVar[Activation]

    def __post_init__(self) -> None:
        check_sizes(self.kind, self.m, self.n, self.k, self.dtype, self.layout)

    @property
    def key(self) -> str:
        return f"{self.kind}:{self.m}x{self.n}x{self.k}:{self.dtype}" + (":nk" if self.layout == "nk" else "")

    def program(self) -> Program:
        axes = ("k", "n") if self.layout == "kn" else ("n", "k")
        weights = tuple(Value(w, axes, self.dtype, constant=True) for w in ("G", "U"))
        sums = tuple(
            Stage(out, ("m", "n"), parse(f"A[m,k] * {w}[{','.join(axes)}]"), (Reduce("k", SUM),))
            for out, w in (("gate", "G"), ("up", "U"))
        )
        gate, up = (Read(s.out, s.axes) for s in sums)
        y = Stage("Y", ("m", "n"), Apply("mul", (Apply(self.activation, (gate,)), up)), (), self.dtype)
        dims = (("m", self.m), ("n", self.n), ("k", self.k))
        return Program(dims, (Value("A", ("m", "k"), self.dtype), *weights), (*sums, y), ("Y",))

    def within(self, symbol: str, lo: int, hi: int) -> Glu:
        return replace(self, m=part_of(self.key, self.m, symbol, lo, hi))

    def inputs(self, kind: InputKind, seed: int, sizes: Mapping[str, int] | None = None) -> dict[str, Storage]:
        weights = ("G", "U")
        scale, filled = dict.fromkeys(weights, 1 / sqrt(self.k)), dict.fromkeys(weights, self.filled)
        return drawn(self.program(), kind, seed, sizes, scale, filled)

    @property
    def filled(self) -> float:
        """The share of a weight's elements that whole numbers fill, the others being zero."""
        return min(1.0, _TERMS / self.k)

    def reference(self, inputs: Mapping[str, Storage]) -> dict[str, Array]:
        a, *weights = (decode(inputs[v.name], v.dtype) for v in self.program().inputs)
        gate, up = (np.matmul(a, w if self.layout == "kn" else w.T) for w in weights)
        return {"Y": FUNCTIONS[self.activation][1](gate) * up}

    def work(self, sizes: Mapping[str, int] | None = None) -> Work:
        m = self.program().sizes(sizes or self.typical_sizes())["m"]
        moved = m * self.k + 2 * self.k * self.n + m * self.n
        return Work(4.0 * m * self.n * self.k, float(moved * size_bytes(self.dtype)))

    def is_exact(self, kind: InputKind, output: str | None = None) -> bool:
        return False  # whatever is summed, an activation is not

    def tolerance(self, accumulate: Accumulate = "f32", output: str | None = None) -> tuple[float, float]:
        """Absolute: each sum is off as a matmul's is (see Matmul), times the other factor, which is near 1 and rarely above 4
        where the sum is off most. Relative: one rounding of the output, or a few of the activation where those are more.
        """
        root, half = sqrt(self.k), 2.0**-8
        absolute = {"f32": 8 * 2.0**-24 * root, "hybrid": half, "f16": max(half, 2.0**-12 * root)}[accumulate]
        return 4 * (absolute + 2 * epsilon("f32")), max(epsilon(self.dtype), 8 * epsilon("f32"))


@dataclass(frozen=True, slots=True)
class Geglu(Glu):
    """Gated by gelu, in its tanh form."""

    kind: ClassVar[str] = "geglu"
    activation: ClassVar[Activation] = "gelu_tanh"


@dataclass(frozen=True, slots=True)
class Swiglu(Glu):
    """Gated by silu."""

    kind: ClassVar[str] = "swiglu"
    activation: ClassVar[Activation] = "silu"


def _parse(op: type[Glu], rest: str) -> Glu:
    x = parse_sizes(op.kind, rest, ())
    return op(x.m, x.n, x.k, x.dtype, x.layout)


PARSERS["geglu"] = lambda rest: _parse(Geglu, rest)
PARSERS["swiglu"] = lambda rest: _parse(Swiglu, rest)
