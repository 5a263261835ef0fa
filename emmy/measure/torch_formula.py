"""Programs of rows by torch: right answers in float64 on any device, and eager torch as a user writes it. Knows no schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import sqrt
from typing import TYPE_CHECKING

from emmy.ir.expr import Apply, Axis, Const, Expr, Read
from emmy.ir.ops.formula import FormulaOp
from emmy.ir.ops.glu import Activation
from emmy.ir.ops.positions import Embedding, Rope
from emmy.ir.ops.rows import (
    EPS,
    Cast,
    Copy,
    GatedProduct,
    NormAddNorm,
    NormScale,
    RmsNorm,
    RowSum,
    Rstd,
    Scale,
    Softmax,
)
from emmy.ir.program import Program, Stage
from emmy.measure.allocated import Allocated
from emmy.measure.device import Buffer, Call

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]
Step = Callable[[], object]


def outputs(program: Program, inputs: Tensors, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every output of a program, computed in `dtype`, stage by stage; of what is gathered from, only what is read is converted."""
    known = _Values(program, inputs, dtype)
    for s in program.stages:
        known.made[s.out] = known.stage(s)
    return {o: known.made[o] for o in program.outputs}


@dataclass(slots=True)
class _Values:
    program: Program
    inputs: Tensors
    dtype: torch.dtype
    made: dict[str, torch.Tensor] = field(default_factory=dict)

    def stage(self, s: Stage) -> torch.Tensor:
        x = self.of(s.body, s.every).expand([self.size(a) for a in s.every])
        if s.monoid is None:
            return x
        folded = tuple(range(len(s.axes), len(s.every)))
        return x.sum(folded) if s.monoid.name == "sum" else x.amax(folded)

    def size(self, axis: str) -> int:
        """Of an axis, which some input has when it is open until run time."""
        for v in self.program.inputs:
            if axis in v.axes:
                return int(self.inputs[v.name].shape[v.axes.index(axis)])
        return self.program.sizes()[axis]

    def of(self, e: Expr, axes: tuple[str, ...]) -> torch.Tensor:
        """An expression, with a dimension for each axis."""
        import torch

        match e:
            case Const(v):
                device = next(iter(self.inputs.values())).device
                return torch.full([1] * len(axes), v, dtype=self.dtype, device=device)
            case Axis(name):
                return self._along(name, axes).to(self.dtype)
            case Apply(fn, args):
                return _FUNCTIONS[fn](*(self.of(a, axes) for a in args))
            case Read(value, index):
                own = self.program.value(value).axes
                if not e.computed:
                    if value not in self.made:
                        self.made[value] = self.inputs[value].to(self.dtype)
                    order = sorted(range(len(own)), key=lambda i: axes.index(own[i]))
                    shape = [self.size(a) if a in own else 1 for a in axes]
                    return torch.permute(self.made[value], order).reshape(shape)
                at = tuple(self._along(x, axes) if isinstance(x, str) else self.of(x, axes).long() for x in index)
                return self.inputs[value][at].to(self.dtype)

    def _along(self, axis: str, axes: tuple[str, ...]) -> torch.Tensor:
        import torch

        device = next(iter(self.inputs.values())).device
        return torch.arange(self.size(axis), device=device).reshape([-1 if a == axis else 1 for a in axes])


def activated(name: Activation, x: torch.Tensor) -> torch.Tensor:
    """torch's own form of an activation, in the dtype of `x`."""
    from torch.nn import functional

    return functional.gelu(x, approximate="tanh") if name == "gelu_tanh" else functional.silu(x)


_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "neg": lambda a: -a,
    "le": lambda a, b: (a <= b).to(a.dtype),
    "lt": lambda a, b: (a < b).to(a.dtype),
    "where": lambda c, a, b: a.where(c != 0, b),
    "maximum": lambda a, b: a.maximum(b),
    "minimum": lambda a, b: a.minimum(b),
    "exp": lambda a: a.exp(),
    "tanh": lambda a: a.tanh(),
    "sqrt": lambda a: a.sqrt(),
    "rsqrt": lambda a: a.rsqrt(),
    "gelu_tanh": partial(activated, "gelu_tanh"),
    "silu": lambda a: a / (1 + (-a).exp()),
}


# ---------------------------------------------------------------- stock
@dataclass(slots=True)
class TorchFormula:
    """Eager torch: the library's own function where it has one, else what a model's text says, in f32.

    Results that functions allocate stay where they are: a model would go on with them there.
    """

    op: FormulaOp
    tensor: Callable[[Buffer], torch.Tensor]
    results: Allocated = field(default_factory=Allocated)

    def bind(self, buffers: Mapping[str, Buffer], sizes: Mapping[str, int]) -> Call:
        x = {name: self.tensor(buffer) for name, buffer in buffers.items()}
        in_place, made = self._function(x)

        def make() -> dict[str, torch.Tensor]:
            for step in in_place:
                step()
            return made()

        return self.results.call(make, x)

    def _function(  # noqa: C901  one case an op
        self, x: dict[str, torch.Tensor]
    ) -> tuple[list[Step], Callable[[], dict[str, torch.Tensor]]]:
        """Steps that write to the outputs, and then what makes further ones where torch allocates them."""
        import torch
        from torch.nn import functional

        def nothing() -> dict[str, torch.Tensor]:
            return {}

        match self.op:
            case RmsNorm(residual=residual, n=n):
                before: list[Step] = [partial(torch.add, x["X"], x["R"], out=x["H"])] if residual else []
                h = x["H"] if residual else x["X"]
                return before, lambda: {"Y": functional.rms_norm(h, (n,), x["w"], EPS)}
            case NormAddNorm(scale=scale, n=n):
                steps: list[Step] = [
                    lambda: torch.add(functional.rms_norm(x["X"], (n,), x["v"], EPS), x["R"], out=x["H"])
                ]
                steps += [partial(x["H"].mul_, x["s"])] if scale else []
                return steps, lambda: {"Y": functional.rms_norm(x["H"], (n,), x["w"], EPS)}
            case Rstd():
                return [], lambda: {"r": torch.rsqrt(x["X"].float().square().mean(-1) + EPS)}
            case RowSum():
                return [partial(torch.sum, x["X"], 1, out=x["s"])], nothing
            case Softmax():
                return [], lambda: {"Y": torch.softmax(x["X"], 1)}
            case Scale():
                return [partial(torch.mul, x["X"], x["s"], out=x["Y"])], nothing
            case NormScale():
                return [], lambda: {"Y": (x["X"] * x["r"][:, None]).to(x["X"].dtype) * x["w"]}
            case GatedProduct(activation="gelu_tanh"):
                gelu = partial(torch.ops.aten.gelu.out, x["G"], approximate="tanh", out=x["Y"])
                return [gelu, partial(x["Y"].mul_, x["U"])], nothing
            case GatedProduct():
                return [partial(torch.ops.aten.silu.out, x["G"], out=x["Y"]), partial(x["Y"].mul_, x["U"])], nothing
            case Copy() | Cast():
                return [partial(x["Y"].copy_, x["X"])], nothing
            case Rope(heads=h, head_dim=d) if not self.op.rotary:
                flat, cos, sin = x["X"].view(h, -1, d), *(torch.cat((x[t], x[t]), -1) for t in ("cos", "sin"))
                return [], lambda: {"Y": (flat * cos + _rotate_half(flat) * sin).view(x["Y"].shape)}
            case Embedding(hidden=n):
                ids = x["ids"].long()
                take = partial(torch.index_select, x["E"], 0, ids, out=x["Y"])
                return [take, partial(x["Y"].mul_, sqrt(n))], nothing
            case _:
                return [], partial(outputs, self.op.program(), x, torch.float32)


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    import torch

    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)
