"""Y = RMSNorm(X) @ W: the norm that opens a transformer's block, into its projection. Must not know schedules or devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from emmy.ir.expr import Array, parse
from emmy.ir.ops.made_linear import MadeLinear, parsed
from emmy.ir.ops.op import PARSERS
from emmy.ir.ops.sizes import parse_sizes
from emmy.ir.program import SUM, Reduce, Stage, Value

EPS = 1e-6  # added to the mean of squares


@dataclass(frozen=True, slots=True)
class NormLinear(MadeLinear):
    """P[m,k] = X[m,k] * r[m] * g[k], r[m] = 1 / sqrt(mean over k of X[m,k]^2 + 1e-6): RMSNorm over the row that the sums fold.

    g is a parameter; the statistic is kept in f32.
    """

    kind: ClassVar[str] = "norm_linear"

    def before(self) -> tuple[tuple[Value, ...], tuple[Stage, ...]]:
        given = Value("X", ("m", "k"), self.dtype), Value("g", ("k",), self.dtype, constant=True)
        return given, (
            Stage("ss", ("m",), parse("X[m,k] * X[m,k]"), (Reduce("k", SUM),)),
            Stage("Xn", ("m", "k"), parse(f"X[m,k] * rsqrt(ss[m] / {self.k} + {EPS:.6f}) * g[k]"), (), self.dtype),
        )

    def made(self, inputs: Mapping[str, Array]) -> Array:
        x = inputs["X"]
        return np.asarray(x / np.sqrt(np.square(x).mean(1, keepdims=True) + EPS) * inputs["g"])


PARSERS["norm_linear"] = lambda rest: parsed(NormLinear, parse_sizes("norm_linear", rest, NormLinear.options))
