"""Chains of a graph that one op computes, found by what they compute rather than by how torch spells it. Knows torch.fx, not vLLM.

A chain is worth replacing only where it is all of what the compiler would make one kernel of: what stands before and behind it
must be kernels of their own, or memory. Otherwise a neighbour that was fused with it becomes one launch more.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx
from torch.nn import functional

from emmy.ir.dtype import DType
from emmy.ir.ops import Glu, Op, RmsNorm, parse_op
from emmy.ir.ops.rows import EPS, NormAddNorm
from emmy.ir.program import Sym

aten, prims = torch.ops.aten, torch.ops.prims
DTYPES: dict[torch.dtype, DType] = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "geglu": lambda g: functional.gelu(g, approximate="tanh"),
    "swiglu": functional.silu,
}
_CASTS = (prims.convert_element_type.default, aten._to_copy.default)
_ELEMENTWISE = {
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.neg.default, aten.exp.default, aten.tanh.default,
    aten.sigmoid.default, aten.reciprocal.default, aten.pow.Tensor_Scalar, aten.silu.default, aten.gelu.default, *_CASTS,
}  # fmt: skip
_VIEWS = (aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.permute.default, aten.t.default)
_KERNELS = ("aten::mm", "aten::addmm", "aten::bmm", "emmy::", "vllm::")  # nothing that the compiler fuses into


@dataclass(frozen=True, slots=True)
class Form:
    """What an op computes, but for its rows: its kind with words, its other sizes, its dtype."""

    kind: str
    sizes: tuple[int, ...]
    dtype: DType


@dataclass(frozen=True, slots=True)
class Part:
    """Rows lo..hi of a weight, as an argument of its own."""

    of: fx.Node
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class Chain:
    """Nodes that one op computes. `inputs` and `outputs` by the op's names of its arguments."""

    form: Form
    inputs: Mapping[str, fx.Node | Part]
    outputs: Mapping[str, fx.Node]


def form_of(op: Op | str) -> Form | None:
    """What the op computes for any number of rows; None for one that no chain is found for."""
    match parse_op(op) if isinstance(op, str) else op:
        case Glu(m=Sym(), layout="nk") as glu:
            return Form(glu.kind, (glu.n, glu.k), glu.dtype)
        case (RmsNorm(m=Sym()) | NormAddNorm(m=Sym())) as norm:
            return Form(":".join((norm.kind, *norm.options)), (norm.n,), norm.dtype)
    return None


def chains(graph: fx.Graph) -> Iterator[Chain]:
    """Every chain of the graph, in its order; the one given last may be replaced before the next is asked for."""
    for node in graph.nodes:
        found = _gated(node) or _norms(node)
        if found is not None:
            yield found


# ---------------------------------------------------------------- gated pairs
def _gated(product: fx.Node) -> Chain | None:
    """act(x @ G^T) * (x @ U^T) behind the product with the merged weight [G; U]."""
    operands = _operands(product)
    if operands is None:
        return None
    x, w = operands
    weight, dtype = _shape(w), _dtype(product)
    if dtype is None or weight is None or len(weight) != 2 or weight[0] % 2 or not _is_plain(w) or not _is_plain(x):
        return None
    n, k = weight[0] // 2, weight[1]
    halves = {user: _columns(user, 2 * n) for user in product.users}
    if set(halves.values()) != {(0, n), (n, 2 * n)}:
        return None
    found = _activation(halves, n, product)
    if found is None:
        return None
    kind, end = found
    return Chain(Form(kind, (n, k), dtype), {"A": x, "G": Part(w, 0, n), "U": Part(w, n, 2 * n)}, {"Y": end})


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """x and w of x @ w^T, by torch's product or Emmy's."""
    if _name(node) == "emmy::linear":
        x, w = node.args[:2]
        return (x, w) if isinstance(x, fx.Node) and isinstance(w, fx.Node) else None
    if node.target is not aten.mm.default:
        return None
    x, t = node.args
    if not isinstance(x, fx.Node) or not isinstance(t, fx.Node) or t.op != "call_function":
        return None
    turned = (t.target is aten.permute.default and list(t.args[1]) in ([1, 0], [-1, -2])) or t.target is aten.t.default
    turned |= t.target is aten.transpose.int and set(t.args[1:]) in ({0, 1}, {-2, -1})
    return (x, t.args[0]) if turned and isinstance(t.args[0], fx.Node) else None


def _columns(node: fx.Node, of: int) -> tuple[int, int] | None:
    """lo and hi of the columns that a slice of a matrix takes."""
    if node.target is not aten.slice.Tensor or len(node.args) < 2 or node.args[1] not in (1, -1):
        return None
    lo, hi = (node.args[i] if len(node.args) > i else None for i in (2, 3))
    step = node.args[4] if len(node.args) > 4 else 1
    if step != 1 or not isinstance(lo, int | None) or not isinstance(hi, int | None):
        return None
    return (lo or 0, min(of, of if hi is None else hi))


def _activation(
    halves: Mapping[fx.Node, tuple[int, int] | None], n: int, product: fx.Node
) -> tuple[str, fx.Node] | None:
    """Which gated product is made of the halves, and the node that is it: the first that all that was made of them leads to."""
    made: list[fx.Node] = []
    inside = set(halves)
    node = product.next
    while node.op != "root":
        if node.target in _ELEMENTWISE and node.all_input_nodes and all(i in inside for i in node.all_input_nodes):
            inside.add(node)
            made.append(node)
            closed = all(user in inside for i in inside - {node} for user in i.users)
            if closed and _dtype(node) == _dtype(product) and (kind := _computes(made, halves, n)):
                return kind, node
        node = node.next
    return None


def _computes(made: list[fx.Node], halves: Mapping[fx.Node, tuple[int, int] | None], n: int) -> str:
    """The gated product that the nodes compute, in float64 on numbers that tell activations apart; "" for any other function."""
    gate = torch.linspace(-9.0, 9.0, 257, dtype=torch.float64, device="cpu")
    up = 1.5 + torch.sin(torch.arange(257, dtype=torch.float64, device="cpu"))
    values = {half: gate if columns == (0, n) else up for half, columns in halves.items()}
    for node in made:
        args = fx.map_arg(node.args, values.__getitem__)
        values[node] = args[0] if node.target in _CASTS else node.target(*args, **node.kwargs)
    got = values[made[-1]]
    for kind, activation in ACTIVATIONS.items():
        if torch.allclose(got, activation(gate) * up, rtol=1e-6, atol=1e-9):
            return kind
    return ""


# ---------------------------------------------------------------- norms
def _norms(node: fx.Node) -> Chain | None:
    """A norm between kernels; with the sum before it; with the sum and another norm before that."""
    match _name(node):
        case "vllm_ir::rms_norm":
            return _behind_a_sum(node) or _alone(node)
        case "vllm_ir::fused_add_rms_norm":
            return _add_norm(node)
    return None


def _alone(node: fx.Node) -> Chain | None:
    found = _norm(node, 1)
    if found is None:
        return None
    (x,), w, form = found
    inputs, outputs = {"X": x, "w": w}, {"Y": node}
    return Chain(Form("rms_norm", *form), inputs, outputs) if _is_apart(inputs, outputs) else None


def _add_norm(node: fx.Node) -> Chain | None:
    """vLLM's fused op: sum and norm; where a norm alone made what is added, that too."""
    found = _norm(node, 2)
    parts = {u.args[1]: u for u in node.users if u.target is operator.getitem}
    if found is None or set(parts) != {0, 1}:
        return None
    (x, r), w, form = found
    outputs = {"H": parts[1], "Y": parts[0]}
    first = _norm(x, 1) if _name(x) == "vllm_ir::rms_norm" and len(x.users) == 1 else None
    if first is not None and first[2] == form:
        inputs = {"X": first[0][0], "R": r, "v": first[1], "w": w}
        return Chain(Form("norm_add_norm", *form), inputs, outputs) if _is_apart(inputs, outputs) else None
    inputs = {"X": x, "R": r, "w": w}
    return Chain(Form("rms_norm:residual", *form), inputs, outputs) if _is_apart(inputs, outputs) else None


def _behind_a_sum(node: fx.Node) -> Chain | None:
    """norm((norm(x) + r) * s), the scale being there or not; the sum may be read by others too."""
    found = _norm(node, 1)
    if found is None:
        return None
    (h,), w, form = found
    scale, total = None, h
    if h.target is aten.mul.Tensor and (scaled := _scaled(h)):
        total, scale = scaled
        if len(total.users) != 1:
            return None
    if total.target is not aten.add.Tensor or len(total.args) != 2 or total.kwargs:
        return None
    for x, r in (total.args, total.args[::-1]):
        if (
            not (isinstance(x, fx.Node) and isinstance(r, fx.Node))
            or _name(x) != "vllm_ir::rms_norm"
            or len(x.users) != 1
        ):
            continue
        first = _norm(x, 1)
        if first is None or first[2] != form or _dtype(r) != form[1] or _shape(r) != _shape(h):
            continue
        inputs = {"X": first[0][0], "R": r, "v": first[1], "w": w} | ({"s": scale} if scale else {})
        outputs = {"H": h, "Y": node}
        if _is_apart(inputs, outputs):
            return Chain(Form("norm_add_norm" + ":scale" * bool(scale), *form), inputs, outputs)
    return None


def _norm(node: fx.Node, n_given: int) -> tuple[tuple[fx.Node, ...], fx.Node, tuple[tuple[int], DType]] | None:
    """What is normed (and added), the weight, and (width, dtype), of a whole norm with Emmy's epsilon and a weight in memory."""
    args = tuple(node.args) + (None,) * (n_given + 3 - len(node.args))
    *given, w, eps, part = args[: n_given + 3]
    given_nodes = tuple(g for g in given if isinstance(g, fx.Node))
    if len(given_nodes) != n_given or not isinstance(w, fx.Node) or part is not None or node.kwargs:
        return None
    shape, dtype, width = _shape(given_nodes[0]), _dtype(given_nodes[0]), _shape(w)
    if not isinstance(eps, float) or not math.isclose(eps, EPS) or dtype is None or shape is None or width is None:
        return None
    same = all(_dtype(g) == dtype and _is_plain(g) for g in (*given_nodes, w))
    if len(shape) != 2 or len(width) != 1 or not same or w.op not in ("placeholder", "get_attr"):
        return None
    return given_nodes, w, ((width[0],), dtype)


def _scaled(h: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """A matrix and the one number in memory that it is multiplied with."""
    for total, s in (h.args, h.args[::-1]):
        if not isinstance(total, fx.Node) or not isinstance(s, fx.Node) or s.op not in ("placeholder", "get_attr"):
            continue
        if _shape(s) in ((), (1,)) and _dtype(s) == _dtype(h):
            return total, s
    return None


def _is_apart(inputs: Mapping[str, fx.Node], outputs: Mapping[str, fx.Node]) -> bool:
    """Whether a kernel's end is before X and behind Y, and nothing else of the compiler's kernel reads or makes R and H."""
    x, y, h, r = inputs["X"], outputs["Y"], outputs.get("H"), inputs.get("R")
    if not _is_memory(x) or not all(map(_is_kernel, _readers(y))):
        return False
    if r is not None and not _is_memory(r) and not _leads_to(_whole(r), x):
        return False
    return h is None or all(u is y or u in y.all_input_nodes or _is_kernel(u) or _leads_to(y, u) for u in _readers(h))


def _is_memory(node: fx.Node) -> bool:
    """Whether the value is there before any kernel that the compiler makes of this node's readers."""
    if node.target in _VIEWS or node.target is operator.getitem:
        first = node.args[0]
        return isinstance(first, fx.Node) and _is_memory(first)
    return node.op in ("placeholder", "get_attr") or _is_kernel(node)


def _is_kernel(node: fx.Node) -> bool:
    return node.op == "output" or _name(node).startswith(_KERNELS)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        yield from _readers(user) if user.target in _VIEWS else (user,)


def _whole(node: fx.Node) -> fx.Node:
    """The call whose result this is one of."""
    first = node.args[0] if node.target is operator.getitem else node
    return first if isinstance(first, fx.Node) else node


def _leads_to(first: fx.Node, last: fx.Node) -> bool:
    """Whether `last` is computed from `first`, a kernel of its own lying between or being `last`."""
    seen, todo = set[tuple[fx.Node, bool]](), [(last, _is_kernel(last))]
    while todo:
        node, apart = todo.pop()
        for i in node.all_input_nodes:
            if i is first and apart:
                return True
            state = (i, apart or _is_kernel(i))
            if state not in seen and i.op == "call_function":
                seen.add(state)
                todo.append(state)
    return False


# ---------------------------------------------------------------- nodes
def _name(node: fx.Node) -> str:
    """namespace::op of a call, "" of anything else."""
    return (
        str(node.target.namespace) + "::" + str(node.target._opname)
        if isinstance(node.target, torch._ops.OpOverload)
        else ""
    )


def _value(node: fx.Node) -> torch.Tensor | None:
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    value = _value(node)
    return None if value is None else tuple(value.shape)


def _dtype(node: fx.Node) -> DType | None:
    value = _value(node)
    return None if value is None else DTYPES.get(value.dtype)


def _is_plain(node: fx.Node) -> bool:
    """Whether the value is row-major and without gaps."""
    value = _value(node)
    return value is not None and value.is_contiguous()
