"""What torch.compile makes of an op, and each backend of its attention: rivals that are raced when they are named. Knows no schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from emmy.errors import UsageError
from emmy.ir.ops.formula import FormulaOp
from emmy.ir.ops.glu import Glu
from emmy.ir.ops.glu_linear import GluLinear
from emmy.ir.ops.matmul import STATISTIC, Matmul
from emmy.ir.ops.norm_linear import EPS, NormLinear
from emmy.ir.ops.op import Op
from emmy.measure.allocated import Allocated
from emmy.measure.device import Buffer, Call
from emmy.measure.rivals import COMPILED
from emmy.measure.torch_formula import activated, outputs

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]


def compiled(op: Op, tensor: Callable[[Buffer], torch.Tensor], autotune: bool = False) -> TorchCompiled | None:
    """The op as a user would write it in torch, compiled for its very shapes; None for ops that torch runs as one kernel.

    autotune: in the mode max-autotune, which has kernels of its own for a product alone too; CUDA graphs are the measurer's
    """
    match op:
        case Matmul() if not op.epilogue and not autotune:
            return None
        case Matmul():
            function = partial(_linear, op)
        case Glu():
            function = partial(_gated, op)
        case FormulaOp():
            function = partial(_formula, op)
        case NormLinear() | GluLinear():
            function = partial(_made_linear, op)
        case _:
            return None
    return TorchCompiled(op, tensor, function, "max-autotune-no-cudagraphs" if autotune else "default")


@dataclass(slots=True)
class TorchCompiled:
    """A function of tensors by torch.compile. Its results stay where torch puts them.

    function: inputs by name, of the op's dtypes, to outputs by name
    """

    op: Op
    tensor: Callable[[Buffer], torch.Tensor]
    function: Callable[[Tensors], dict[str, torch.Tensor]]
    mode: str = "default"
    made: Callable[..., tuple[torch.Tensor, ...]] | None = None
    results: Allocated = field(default_factory=Allocated)

    def bind(self, buffers: Mapping[str, Buffer], sizes: Mapping[str, int]) -> Call:

        names = [v.name for v in self.op.program().inputs]
        outputs = self.op.program().outputs
        x = {name: self.tensor(buffer) for name, buffer in buffers.items()}
        if self.made is None:

            def positional(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
                found = self.function(dict(zip(names, given, strict=True)))
                return tuple(found[o] for o in outputs)

            self.made = _compile(self.op, self.mode, positional, [x[name] for name in names])
        made, given = self.made, [x[name] for name in names]
        return self.results.call(lambda: dict(zip(outputs, made(*given), strict=True)), x)


def _formula(op: FormulaOp, x: Tensors) -> dict[str, torch.Tensor]:
    """Stage by stage in f32, as a model's text says it; what is between them is Inductor's to keep or to store."""
    import torch

    p, dtypes = op.program(), {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    return {name: y.to(dtypes[p.value(name).dtype]) for name, y in outputs(p, x, torch.float32).items()}


def _compile(
    op: Op, mode: str, function: Callable[..., tuple[torch.Tensor, ...]], given: Sequence[torch.Tensor]
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The function as torch.compile makes it of its operators alone. Raises UsageError where it does not.

    torch counts compilations by code and goes on uncompiled after a few; a graph has code of its own, and fullgraph raises.
    """
    import torch
    from torch._dynamo.exc import TorchDynamoException
    from torch.fx.experimental.proxy_tensor import make_fx

    made: Callable[..., tuple[torch.Tensor, ...]] = torch.compile(
        make_fx(function)(*given), dynamic=False, fullgraph=True, mode=mode
    )
    try:
        made(*given)
    except TorchDynamoException as e:
        raise UsageError(f"{COMPILED} does not compile {op.key}: {str(e).splitlines()[0]}") from e
    return made


def _linear(op: Matmul, x: Tensors) -> dict[str, torch.Tensor]:

    y = x["A"] @ (x["B"] if op.layout == "kn" else x["B"].t())
    for e in op.elementwise:
        match e:
            case "bias":
                y = y + x["bias"]
            case "scale":
                y = (y * x["scale"]).to(y.dtype)
            case "residual":
                y = y + x["R"]
            case "gelu_tanh" | "silu":
                y = activated(e, y)
    return {op.output: y, **({"S": y.float().square().sum(1)} if STATISTIC in op.epilogue else {})}


def _made_linear(op: NormLinear | GluLinear, x: Tensors) -> dict[str, torch.Tensor]:
    from torch.nn import functional

    match op:
        case NormLinear():
            made = functional.rms_norm(x["X"], (op.k,), x["g"], EPS)
        case GluLinear():
            made = activated(op.activation, x["G"]) * x["U"]
    y = made @ (x["W"] if op.layout == "kn" else x["W"].t())
    return {"Y": y + x["R"] if op.residual else y}


def _gated(op: Glu, x: Tensors) -> dict[str, torch.Tensor]:
    """Both products, of which Inductor joins the rest; a merged weight is what a server has, but torch.cat would be timed here."""

    gate, up = (x["A"] @ (x[w] if op.layout == "kn" else x[w].t()) for w in ("G", "U"))
    return {"Y": activated(op.activation, gate) * up}
