"""What a user would run without Emmy, as something a measurer can time: torch, else numpy. Knows no schedules.

It is stock's best case: outputs are written in place (no allocation is timed), gradients are off, and the bias rides on
the matrix product where torch can do that.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from emmy.ir.expr import FUNCTIONS, Array
from emmy.ir.ops.matmul import Matmul
from emmy.ir.ops.op import Op, Storage
from emmy.measure.device import Buffer, Call, Runnable

if TYPE_CHECKING:
    import torch


def stock(op: Op, threads: int) -> tuple[str, Runnable] | None:
    """Name and kernel of the stock computation of `op` on this CPU with that many threads; None when there is none."""
    match op:
        case Matmul() if importlib.util.find_spec("torch"):
            import torch

            torch.set_num_threads(threads)
            torch.set_grad_enabled(False)
            return "torch", TorchMatmul(op, host_tensor)
        case Matmul(dtype="f32"):  # the threads of numpy's BLAS were set in the worker's environment
            return "numpy", NumpyMatmul(op)
        case _:
            return None


@dataclass(frozen=True, slots=True)
class TorchMatmul:
    """torch.mm or torch.addmm, then the rest of the epilogue step by step, as eager torch does.

    `tensor` gives a buffer's memory as a tensor, on whatever device it lies.
    """

    op: Matmul
    tensor: Callable[[Buffer], torch.Tensor]

    def bind(self, buffers: Mapping[str, Buffer], sizes: Mapping[str, int]) -> Call:
        import torch

        x = {name: self.tensor(buffer) for name, buffer in buffers.items()}
        a, b, out = x["A"], x["B"] if self.op.layout == "kn" else x["B"].t(), x[_output(self.op)]
        steps: list[Callable[[], object]] = []
        rest = self.op.epilogue
        if rest[:1] == ("bias",):
            bias, rest = x["bias"], rest[1:]
            steps.append(partial(torch.addmm, bias, a, b, out=out))
        else:
            steps.append(partial(torch.mm, a, b, out=out))
        for e in rest:
            match e:
                case "bias" | "residual":
                    steps.append(partial(out.add_, x["bias" if e == "bias" else "R"]))
                case "scale":
                    steps.append(partial(out.mul_, x["scale"]))
                case "gelu_tanh":
                    steps.append(partial(torch.ops.aten.gelu.out, out, approximate="tanh", out=out))
                case "silu":
                    steps.append(partial(torch.nn.functional.silu, out, inplace=True))
        return _in_turn(steps)


@dataclass(frozen=True, slots=True)
class NumpyMatmul:
    """numpy.matmul, which is OpenBLAS, then the epilogue step by step."""

    op: Matmul

    def bind(self, buffers: Mapping[str, Buffer], sizes: Mapping[str, int]) -> Call:
        x = {name: buffer.read() for name, buffer in buffers.items()}
        a, b, out = x["A"], x["B"] if self.op.layout == "kn" else x["B"].T, x[_output(self.op)]
        steps: list[Callable[[], object]] = [partial(np.matmul, a, b, out=out)]
        for e in self.op.epilogue:
            match e:
                case "bias" | "residual":
                    steps.append(partial(np.add, out, x["bias" if e == "bias" else "R"], out=out))
                case "scale":
                    steps.append(partial(np.multiply, out, x["scale"], out=out))
                case "gelu_tanh" | "silu":
                    steps.append(partial(_apply, FUNCTIONS[e][1], out))
        return _in_turn(steps)


def _in_turn(steps: list[Callable[[], object]]) -> Call:
    def call() -> None:
        for step in steps:
            step()

    return call


def _apply(function: Callable[..., Array], out: Storage) -> None:
    np.copyto(out, function(out), casting="same_kind")


def _output(op: Matmul) -> str:
    return op.program().outputs[0]


def host_tensor(buffer: Buffer) -> torch.Tensor:
    """A buffer's memory as a tensor, when it is this machine's; bf16 is stored as its bits."""
    import torch

    array = buffer.read()
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
