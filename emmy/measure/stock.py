"""What a user would run without Emmy, as something a measurer can time: torch, else numpy. Knows no schedules.

It is stock's best case: outputs are written in place (no allocation is timed), gradients are off, what is added first rides on the
matrix product, as torch can do, and a gated pair's two weights are one, merged before anything is timed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from emmy.ir.expr import FUNCTIONS, Array
from emmy.ir.ops.attention import Attention
from emmy.ir.ops.bmm import Bmm
from emmy.ir.ops.formula import FormulaOp
from emmy.ir.ops.glu import Glu
from emmy.ir.ops.glu_linear import GluLinear
from emmy.ir.ops.matmul import Matmul
from emmy.ir.ops.norm_linear import EPS, NormLinear
from emmy.ir.ops.op import Op, Storage
from emmy.ir.ops.paged_attention import PagedAttention
from emmy.ir.ops.served_attention import ServedAttention
from emmy.measure.device import Buffer, Call, Runnable
from emmy.measure.rivals import AUTOTUNED, COMPILED, SDPA, SERVERS
from emmy.measure.stock_attention import TorchAttention, TorchPagedAttention
from emmy.measure.stock_compiled import compiled
from emmy.measure.stock_served import TorchServedAttention, vllm_attention
from emmy.measure.torch_formula import TorchFormula

if TYPE_CHECKING:
    import torch


def stock(op: Op, threads: int, against: str = "") -> tuple[str, Runnable] | None:
    """Name and kernel of the stock computation of `op` on this CPU with that many threads; None when there is none."""
    match op:
        case (
            Matmul()
            | Glu()
            | Bmm()
            | NormLinear()
            | GluLinear()
            | FormulaOp()
            | Attention()
            | PagedAttention()
            | ServedAttention()
        ) if importlib.util.find_spec("torch"):
            import torch

            torch.set_num_threads(threads)
            torch.set_grad_enabled(False)
            return torch_stock(op, host_tensor, against)
        case _ if against:
            return None
        case Matmul(dtype="f32"):  # the threads of numpy's BLAS were set in the worker's environment
            return "numpy", NumpyMatmul(op)
        case Glu(dtype="f32"):
            return "numpy", NumpyGlu(op)
        case Bmm(dtype="f32"):
            return "numpy", NumpyBmm(op)
        case _:
            return None


def torch_stock(op: Op, tensor: Callable[[Buffer], torch.Tensor], against: str = "") -> tuple[str, Runnable] | None:
    """The same by torch, wherever `tensor` says that a buffer's memory is: eager, or the rival of that name."""
    if against in (COMPILED, AUTOTUNED):
        found = compiled(op, tensor, autotune=against == AUTOTUNED)
        return (against, found) if found else None
    if against in SDPA:
        return (against, TorchAttention(op, tensor, against)) if isinstance(op, Attention) else None
    if against in SERVERS:
        served = vllm_attention(op, tensor, against) if isinstance(op, ServedAttention) else None
        return (against, served) if served else None
    match op:
        case Matmul():
            return "torch", TorchMatmul(op, tensor)
        case Glu():
            return "torch", TorchGlu(op, tensor)
        case Bmm():
            return "torch", TorchBmm(op, tensor)
        case FormulaOp():
            return "torch", TorchFormula(op, tensor)
        case Attention():
            return "torch", TorchAttention(op, tensor)
        case PagedAttention():
            return "torch", TorchPagedAttention(op, tensor)
        case ServedAttention():
            return "torch", TorchServedAttention(op, tensor)
        case NormLinear() | GluLinear():
            return "torch", TorchMadeLinear(op, tensor)
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
        if rest[:1] in (("bias",), ("residual",)):
            added, rest = x["bias" if rest[0] == "bias" else "R"], rest[1:]
            steps.append(partial(torch.addmm, added, a, b, out=out))
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
                case "sum_squares":
                    steps.append(partial(_torch_sum_squares, out, x["S"]))
        return _in_turn(steps)


@dataclass(frozen=True, slots=True)
class TorchGlu:
    """torch.mm on the merged weight, then the activation and the product, as eager torch does.

    The weight is merged when bound, so it must be written by then. Sums are rounded to the op's dtype before the activation.
    """

    op: Glu
    tensor: Callable[[Buffer], torch.Tensor]

    def bind(self, buffers: Mapping[str, Buffer], sizes: Mapping[str, int]) -> Call:
        import torch

        x = {name: self.tensor(buffer) for name, buffer in buffers.items()}
        a, y, n = x["A"], x["Y"], self.op.n
        merged = torch.cat((x["G"], x["U"])).t() if self.op.layout == "nk" else torch.cat((x["G"], x["U"]), 1)
        both = torch.empty((a.shape[0], 2 * n), dtype=a.dtype, device=a.device)
        gate, up = both[:, :n], both[:, n:]
        steps: list[Callable[[], object]] = [partial(torch.mm, a, merged, out=both)]
        match self.op.activation:
            case "gelu_tanh":
                steps.append(partial(torch.ops.aten.gelu.out, gate, approximate="tanh", out=y))
            case "silu":
                steps.append(partial(torch.ops.aten.silu.out, gate, out=y))
        return _in_turn([*steps, partial(y.mul_, up)])


@dataclass(frozen=True, slots=True)
class TorchBmm:
    """torch.bmm, of B as it is stored."""

    op: Bmm
    tensor: Callable[[Buffer], torch.Tensor]

    def bind(self, buffers: Mapping[str, Buffer], sizes: Mapping[str, int]) -> Call:
        import torch

        x = {name: self.tensor(buffer) for name, buffer in buffers.items()}
        b = x["B"] if self.op.layout == "kn" else x["B"].transpose(1, 2)
        return _in_turn([partial(torch.bmm, x["A"], b, out=x["C"])])


@dataclass(frozen=True, slots=True)
class NumpyBmm:
    """numpy.matmul of a stack of matrices."""

    op: Bmm

    def bind(self, buffers: Mapping[str, Buffer], sizes: Mapping[str, int]) -> Call:
        x = {name: buffer.read() for name, buffer in buffers.items()}
        b = x["B"] if self.op.layout == "kn" else x["B"].swapaxes(1, 2)
        return _in_turn([partial(np.matmul, x["A"], b, out=x["C"])])


@dataclass(frozen=True, slots=True)
class TorchMadeLinear:
    """What makes the operand, as eager torch does, rounded to the op's dtype: rms_norm, or an activation and a product. Then
    torch.mm, or torch.addmm with the residual."""

    op: NormLinear | GluLinear
    tensor: Callable[[Buffer], torch.Tensor]

    def bind(self, buffers: Mapping[str, Buffer], sizes: Mapping[str, int]) -> Call:
        import torch

        x = {name: self.tensor(buffer) for name, buffer in buffers.items()}
        y, w = x["Y"], x["W"] if self.op.layout == "kn" else x["W"].t()
        make = self._maker(x)

        def call() -> None:
            if self.op.residual:
                torch.addmm(x["R"], make(), w, out=y)
            else:
                torch.mm(make(), w, out=y)

        return call

    def _maker(self, x: Mapping[str, torch.Tensor]) -> Callable[[], torch.Tensor]:
        import torch
        from torch.nn import functional

        match self.op:
            case NormLinear():
                return partial(functional.rms_norm, x["X"], (self.op.k,), x["g"], EPS)
            case GluLinear():
                made = torch.empty_like(x["G"])
                if self.op.activation == "gelu_tanh":
                    gate = partial(torch.ops.aten.gelu.out, x["G"], approximate="tanh", out=made)
                else:
                    gate = partial(torch.ops.aten.silu.out, x["G"], out=made)
                return lambda: gate().mul_(x["U"])


@dataclass(frozen=True, slots=True)
class NumpyGlu:
    """numpy.matmul on the merged weight, then the activation and the product."""

    op: Glu

    def bind(self, buffers: Mapping[str, Buffer], sizes: Mapping[str, int]) -> Call:
        x = {name: buffer.read() for name, buffer in buffers.items()}
        a, y, n = x["A"], x["Y"], self.op.n
        merged = np.concatenate((x["G"], x["U"])).T if self.op.layout == "nk" else np.concatenate((x["G"], x["U"]), 1)
        both = np.empty((a.shape[0], 2 * n), a.dtype)
        gate, up = both[:, :n], both[:, n:]
        activate = partial(_apply, FUNCTIONS[self.op.activation][1], gate)
        return _in_turn([partial(np.matmul, a, merged, out=both), activate, partial(np.multiply, gate, up, out=y)])


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
                case "sum_squares":
                    steps.append(partial(np.einsum, "mn,mn->m", out, out, out=x["S"]))
        return _in_turn(steps)


def _in_turn(steps: list[Callable[[], object]]) -> Call:
    def call() -> None:
        for step in steps:
            step()

    return call


def _apply(function: Callable[..., Array], out: Storage) -> None:
    np.copyto(out, function(out), casting="same_kind")


def _torch_sum_squares(y: torch.Tensor, out: torch.Tensor) -> None:
    """As the RMSNorm of a model in eager torch begins: y in f32, squared, then folded; two or three kernels."""
    import torch

    torch.sum(y.float().square_() if y.dtype != torch.float32 else y.square(), dim=1, out=out)


def _output(op: Matmul) -> str:
    return op.output


def host_tensor(buffer: Buffer) -> torch.Tensor:
    """A buffer's memory as a tensor, when it is this machine's; bf16 is stored as its bits."""
    import torch

    array = buffer.read()
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
