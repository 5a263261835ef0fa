"""Right answers by torch in float64, where operands lie in a GPU's memory and numpy would take seconds. Matmuls, pairs and batches
of them, those whose operand is made, attention, of pages too.

Inputs are drawn as the op's `inputs` describes them, by torch's generator. The products are the vendor library's, in another
precision and by other code than any candidate's. Must not know plans or timing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np

from emmy.ir.dtype import DType
from emmy.ir.ops import Products
from emmy.ir.ops.attention import Attention
from emmy.ir.ops.bmm import Bmm
from emmy.ir.ops.formula import FormulaOp, positions
from emmy.ir.ops.glu import Glu
from emmy.ir.ops.glu_linear import GluLinear
from emmy.ir.ops.made_linear import MadeLinear
from emmy.ir.ops.matmul import Matmul
from emmy.ir.ops.norm_linear import EPS
from emmy.ir.ops.op import Accumulate, Storage
from emmy.ir.ops.paged_attention import PagedAttention
from emmy.ir.ops.served_attention import ServedAttention
from emmy.measure.answers import Answers, Verdict, allowed, compare, first_change
from emmy.measure.device import Buffer
from emmy.measure.references import Case
from emmy.measure.stock_served import sides
from emmy.measure.torch_formula import activated, outputs

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

Answered = Products | FormulaOp | Attention | PagedAttention | ServedAttention
CHUNK_ELEMENTS = 1 << 26  # of float64 temporaries: half a GiB


class TorchAnswers(Answers):
    """On torch's `device`. `tensor` gives a buffer's memory as a tensor; `limit_bytes` is what inputs and outputs may take."""

    def __init__(self, op: Answered, device: str, tensor: Callable[[Buffer], torch.Tensor], limit_bytes: int) -> None:
        super().__init__(op)
        self.products, self._device, self._tensor, self._limit_bytes = op, device, tensor, limit_bytes
        self._inputs: dict[str, Tensors] = {}  # by case
        self._outputs: dict[str, Tensors] = {}  # by case

    def prepare(self, case: Case) -> None:
        self._right(case)

    def write(self, case: Case, buffers: Mapping[str, Buffer]) -> None:
        for name, data in self._given(case).items():
            self._tensor(buffers[name]).copy_(data)

    def change(self, case: Case, buffers: Mapping[str, Buffer]) -> str | None:
        for name, data in self._given(case).items():
            now = self._tensor(buffers[name])
            if not _same_bits(now, data):
                return f"input {name} was modified: {first_change(_array(now), _array(data))}"
        return None

    def compare(self, case: Case, buffers: Mapping[str, Buffer], accumulate: Accumulate = "f32") -> Verdict:
        worst, want = 0.0, self._right(case)
        for name, right in want.items():
            error = self._error(case, name, self._tensor(buffers[name]), right, accumulate)
            if not error <= 1:  # NaN is wrong too; numpy finds the words
                got = {name: buffers[name].read()}
                verdict = compare(self.op, case.kind, got, {name: right.cpu().numpy()}, accumulate)
                if verdict.wrong is not None:
                    return verdict
                error = verdict.error_norm or 0.0  # what is no number was wanted
            worst = max(worst, error)
        return Verdict(None, worst)

    def _error(self, case: Case, name: str, got: torch.Tensor, right: torch.Tensor, accumulate: Accumulate) -> float:
        """The largest error in units of what is allowed; NaN when there is one among the answers."""
        import torch

        rms = float(right.square().mean().sqrt()) if accumulate == "f16" else 0.0
        absolute, relative = allowed(self.op, case.kind, name, accumulate, rms)
        largest = []
        for rows in _chunks(right.shape[0], right[0].numel()):
            r = right[rows]
            error = (got[rows].double() - r).abs_()
            largest.append((error / (r.abs() * relative + absolute)).max())
        return float(torch.stack(largest).max())

    def _given(self, case: Case) -> Tensors:
        """The inputs as they must be; never handed to a plan themselves."""
        key = str(case)
        if key not in self._inputs:
            self._make_room()
            self._inputs[key] = {
                v.name: self._draw(case, i, v.name, v.dtype) for i, v in enumerate(self.products.program().inputs)
            }
        return self._inputs[key]

    def _draw(self, case: Case, number: int, name: str, dtype: DType) -> torch.Tensor:
        import torch

        program = self.products.program()
        extent = program.sizes(case.sizes)
        shape = [extent[a] for a in program.value(name).axes]
        random = torch.Generator(self._device)
        random.manual_seed(1000 * case.seed + number)
        if isinstance(self.products, PagedAttention) and name == "lengths":
            return torch.from_numpy(self.products.lengths(shape[0])).to(self._device)
        if isinstance(self.products, ServedAttention) and name == self.products.told:
            told = self.products.counts(shape[0], extent.get("s", 1))
            return torch.from_numpy(told).to(self._device)
        if (
            isinstance(self.products, PagedAttention | ServedAttention)
            and name == "table"
            and shape[0] * shape[1] <= self.products.pages
        ):
            pages = torch.randperm(self.products.pages, generator=random, device=self._device)
            return pages[: shape[0] * shape[1]].reshape(shape).int()
        if dtype == "i32":
            end = positions(program, name, extent)
            return torch.randint(0, end, shape, generator=random, device=self._device, dtype=torch.int32)
        weight = name in ("B", "W") or (isinstance(self.products, Glu) and program.is_constant(name))
        if case.kind == "integer":
            x = torch.randint(-2, 3, shape, generator=random, device=self._device, dtype=torch.int8)
            if weight and isinstance(self.products, Glu | MadeLinear):
                x *= torch.rand(shape, generator=random, device=self._device) < self.products.filled
        else:
            x = torch.randn(shape, generator=random, device=self._device, dtype=torch.float32)
            if isinstance(self.products, Products) and weight:
                x *= 1 / sqrt(self.products.k)
        return x.to({"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype])

    def _right(self, case: Case) -> Tensors:
        key = str(case)
        if key not in self._outputs:
            given = self._given(case)
            self._make_room()
            if isinstance(self.products, FormulaOp):
                import torch

                self._outputs[key] = outputs(self.products.program(), given, torch.float64)
                return self._outputs[key]
            y, names = reference(self.products, given), self.products.program().outputs
            statistic = [y.square().sum(1)] if "S" in names else []
            self._outputs[key] = dict(zip(names, (y, *statistic), strict=True))
        return self._outputs[key]

    def _make_room(self) -> None:
        held = [t for kept in (self._inputs, self._outputs) for case in kept.values() for t in case.values()]
        if sum(t.nbytes for t in held) > self._limit_bytes:
            self._inputs.clear()
            self._outputs.clear()


def reference(
    op: Products | Attention | PagedAttention | ServedAttention, inputs: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """The first output in float64 for inputs in any dtype, as the op's `reference` defines it."""
    import torch

    if isinstance(op, Bmm):
        return torch.stack([_product(op, a, b) for a, b in zip(inputs["A"], inputs["B"], strict=True)])
    if isinstance(op, Attention):
        return _attended(op, inputs)
    if isinstance(op, PagedAttention):
        return _attended_pages(op, inputs)
    if isinstance(op, ServedAttention):
        return _attended_cache(op, inputs)
    if isinstance(op, Glu):
        gate, up = (_product(op, inputs["A"], inputs[w]) for w in ("G", "U"))
        return activated(op.activation, gate).mul_(up)
    if isinstance(op, MadeLinear):
        y = _product(op, _made(op, inputs), inputs["W"])
        return y.add_(inputs["R"].double()) if op.residual else y
    return _finished(op, _product(op, inputs["A"], inputs["B"]), inputs)


def _attended(op: Attention, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Head by head: the logits of all at once would take gigabytes."""
    import torch

    q, k = inputs["Q"], inputs["K"]
    v, size = k if op.shared else inputs["V"], k.shape[-1]
    heads = q.reshape(op.heads, -1, size)
    keys, values = (x.reshape(op.groups, -1, size).repeat_interleave(op.heads // op.groups, 0) for x in (k, v))
    n, rows = keys.shape[1], heads.shape[1]
    t, at = torch.arange(n, device=q.device), torch.arange(rows, device=q.device)[:, None] + (n - rows)
    hidden = (t > at) if op.causal else torch.zeros_like(t > at)
    if op.window:
        hidden |= at >= t + op.window
    scale, out = op.scale or 1 / sqrt(size), []
    for head, key, value in zip(heads, keys, values, strict=True):
        logits = (head.double() @ key.double().t()).mul_(scale).masked_fill_(hidden, float("-inf"))
        weights = torch.softmax(logits, 1).nan_to_num_(0.0)  # a query that sees no key
        out.append(weights @ value.double())
    return torch.stack(out).reshape(q.shape)


def _attended_pages(op: PagedAttention, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The same of each sequence, whose keys the table names."""
    import torch

    q, out = inputs["Q"], torch.zeros(inputs["Q"].shape, dtype=torch.float64, device=inputs["Q"].device)
    t, rows, scale = torch.arange(op.keys, device=q.device), q.shape[2], op.scale or 1 / sqrt(op.dim)
    query = torch.arange(rows, device=q.device) // (op.heads // op.groups)
    for b, length in enumerate(inputs["lengths"].tolist()):
        at, pages = query[:, None] + (length - op.queries), inputs["table"][b].long()
        hidden = (t > at) if op.causal else (t >= length).expand(rows, -1)
        if op.window:
            hidden = hidden | (at >= t + op.window)
        k, v = (inputs[x][pages].flatten(0, 1)[: op.keys] for x in ("K_pages", "K_pages" if op.shared else "V_pages"))
        for g in range(op.groups):
            for some in _chunks(rows, op.keys):
                logits = (q[b, g, some].double() @ k[:, g].double().t()).mul_(scale)
                weights = torch.softmax(logits.masked_fill_(hidden[some], float("-inf")), 1).nan_to_num_(0.0)
                out[b, g, some] = weights @ v[:, g].double()
    return out


def _attended_cache(op: ServedAttention, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The same, of rows and a cache as a server keeps them."""
    import torch

    q = inputs["Q"] if not op.decodes else inputs["Q"][:, None]
    out, scale = torch.zeros(q.shape, dtype=torch.float64, device=q.device), op.scale or 1 / sqrt(op.dim)
    keys, values = sides(op, inputs)
    for b, before in enumerate((inputs[op.told] - int(op.decodes)).tolist()):
        t, at = (torch.arange(n, device=q.device) for n in (before + q.shape[1], q.shape[1]))
        pages, at = inputs["table"][b].long(), at[:, None] + before
        hidden = t > at
        if op.window:
            hidden |= at >= t + op.window
        k, v = (x[pages].flatten(0, 1)[: len(t)].double() for x in (keys, values))
        for head in range(op.heads):
            g, r = divmod(head, op.heads // op.groups)
            for some in _chunks(q.shape[1], max(1, len(t))):
                logits = (q[b, some, g, r].double() @ k[:, g].t()).mul_(scale)
                weights = torch.softmax(logits.masked_fill_(hidden[some], float("-inf")), 1).nan_to_num_(0.0)
                out[b, some, g, r] = weights @ v[:, g]
    return out.view(inputs["Q"].shape)


def _made(op: MadeLinear, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The operand that the op makes, in float64."""
    if isinstance(op, GluLinear):
        return activated(op.activation, inputs["G"].double()).mul_(inputs["U"].double())
    x = inputs["X"].double()
    return (x.square().mean(1, keepdim=True) + EPS).rsqrt_().mul(x).mul_(inputs["g"].double())


def _product(op: Products, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    import torch

    a, y = a.double(), torch.empty((a.shape[0], op.n), dtype=torch.float64, device=a.device)
    for columns in _chunks(op.n, op.k):
        y[:, columns] = a @ (b[:, columns].double() if op.layout == "kn" else b[columns].double().t())
    return y


def _finished(op: Matmul, y: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    for e in op.elementwise:
        match e:
            case "bias":
                y += inputs["bias"].double()
            case "scale":
                y *= inputs["scale"].double()
            case "residual":
                y += inputs["R"].double()
            case "gelu_tanh" | "silu":
                y = activated(e, y)
    return y


def _chunks(n: int, elements_each: int) -> list[slice]:
    """0..n in pieces of at most CHUNK_ELEMENTS."""
    step = max(1, CHUNK_ELEMENTS // max(1, elements_each))
    return [slice(i, i + step) for i in range(0, n, step)]


def _bits(x: torch.Tensor) -> torch.Tensor:
    import torch

    return x.view(torch.int32 if x.element_size() == 4 else torch.int16)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    import torch

    return bool(torch.equal(_bits(a), _bits(b)))


def _array(x: torch.Tensor) -> Storage:
    """The tensor's bits as an array."""
    return np.asarray(_bits(x).cpu().numpy())
