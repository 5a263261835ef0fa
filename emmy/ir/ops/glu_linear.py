"""Y = (act(G) * U) @ W: the linear that closes a gated MLP, with the pair's product before it. Must not know schedules or devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from emmy.ir.expr import FUNCTIONS, Apply, Array, Read
from emmy.ir.ops.glu import Activation
from emmy.ir.ops.made_linear import MadeLinear, parsed
from emmy.ir.ops.op import PARSERS
from emmy.ir.ops.sizes import parse_sizes
from emmy.ir.program import Stage, Value


@dataclass(frozen=True, slots=True)
class GluLinear(MadeLinear):
    """P[m,k] = activation(G[m,k]) * U[m,k]. G and U are what a gated pair's linears made, each an array of its own."""

    activation: ClassVar[Activation]

    def before(self) -> tuple[tuple[Value, ...], tuple[Stage, ...]]:
        axes = ("m", "k")
        gated = Apply("mul", (Apply(self.activation, (Read("G", axes),)), Read("U", axes)))
        return (Value("G", axes, self.dtype), Value("U", axes, self.dtype)), (Stage("P", axes, gated, (), self.dtype),)

    def made(self, inputs: Mapping[str, Array]) -> Array:
        return np.asarray(FUNCTIONS[self.activation][1](inputs["G"]) * inputs["U"])


@dataclass(frozen=True, slots=True)
class GegluLinear(GluLinear):
    """Gated by gelu, in its tanh form."""

    kind: ClassVar[str] = "geglu_linear"
    activation: ClassVar[Activation] = "gelu_tanh"


@dataclass(frozen=True, slots=True)
class SwigluLinear(GluLinear):
    """Gated by silu."""

    kind: ClassVar[str] = "swiglu_linear"
    activation: ClassVar[Activation] = "silu"


PARSERS["geglu_linear"] = lambda rest: parsed(GegluLinear, parse_sizes("geglu_linear", rest, GegluLinear.options))
PARSERS["swiglu_linear"] = lambda rest: parsed(SwigluLinear, parse_sizes("swiglu_linear", rest, SwigluLinear.options))
