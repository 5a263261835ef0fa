"""What torch makes of the inputs of an op that chains become: the measure in self-tests, and what serves a call that no kernel takes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from emmy.ir.ops import Glu, Op, RmsNorm
from emmy.ir.ops.rows import EPS, NormAddNorm

Tensors = Mapping[str, torch.Tensor]


def made_by_torch(op: Op, x: Tensors) -> dict[str, torch.Tensor]:
    """Outputs by name, in the inputs' dtype. Raises TypeError for an op that no chain becomes."""
    match op:
        case Glu(activation=activation):
            gate, up = functional.linear(x["A"], x["G"]), functional.linear(x["A"], x["U"])
            act = functional.gelu(gate, approximate="tanh") if activation == "gelu_tanh" else functional.silu(gate)
            return {"Y": act * up}
        case RmsNorm(residual=residual, n=n):
            h = x["X"] + x["R"] if residual else x["X"]
            y = functional.rms_norm(h, (n,), x["w"], EPS)
            return {"H": h, "Y": y} if residual else {"Y": y}
        case NormAddNorm(scale=scale, n=n):
            h = functional.rms_norm(x["X"], (n,), x["v"], EPS) + x["R"]
            h = h * x["s"] if scale else h
            return {"H": h, "Y": functional.rms_norm(h, (n,), x["w"], EPS)}
    raise TypeError(f"{op}: no chain becomes this")
