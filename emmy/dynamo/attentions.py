"""Attention in a graph: torch's fused operators, whichever the device has, as an op of Emmy's. Must not know schedules."""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt

from torch.fx import Graph, Node

from emmy.dynamo.graph import dtype_of, is_fixed, shape
from emmy.dynamo.group import Given, Group
from emmy.errors import UsageError
from emmy.ir.ops.attention import Attention

_OPERATORS = {
    f"aten::_scaled_dot_product_{kind}" for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
}  # fmt: skip


def find_attentions(graph: Graph) -> Iterator[Group | tuple[Node, str]]:
    """A group for each attention; of one that is none of Emmy's, the node and why."""
    for n in graph.nodes:
        if n.op == "call_function" and getattr(getattr(n.target, "_schema", None), "name", "") in _OPERATORS:
            found = _attention(n)
            yield (n, found) if isinstance(found, str) else found


def _attention(n: Node) -> Group | str:
    """The group of an operator, or why it is none. Torch's causal mask begins at the first key, Emmy's ends at the last."""
    said = {a.name: a.default_value for a in n.target._schema.arguments}
    said |= dict(zip(said, n.args, strict=False)) | dict(n.kwargs)
    q, k, v = (said[name] for name in ("query", "key", "value"))
    if not all(isinstance(x, Node) and is_fixed(x) and len(shape(x)) == 4 for x in (q, k, v)):
        return "attention of open sizes, or of a dtype that Emmy has not"
    if said.get("attn_mask") is not None or said.get("attn_bias") is not None or said.get("dropout_p"):
        return "attention with a mask of its own, or dropout"
    (batch, heads, queries, dim), (kv_batch, kv_heads, keys, _) = shape(q), shape(k)
    causal = bool(said.get("is_causal"))
    if shape(k) != shape(v) or kv_batch != batch or shape(k)[-1] != dim or heads % kv_heads:
        return "attention whose keys and values differ in shape, or do not divide the heads"
    if causal and queries != keys:
        return f"causal attention of {queries} queries and {keys} keys"
    out = [u for u in n.users if u.args[1:] == (0,)]
    if (scale := 1 / sqrt(dim) if said.get("scale") is None else float(said["scale"])) == 0:
        return "attention with a scale of 0"
    try:
        op = Attention(
            batch * heads, queries, keys, dim, dtype_of(q), causal, kv_heads=batch * kv_heads,
            scale=0.0 if abs(scale * sqrt(dim) - 1) < 1e-6 else scale,
        )  # fmt: skip
    except UsageError as e:
        return str(e)
    sizes = op.program().sizes()
    given = tuple(
        Given(x, tuple(sizes[a] for a in i.axes)) for x, i in zip((q, k, v), op.program().inputs, strict=True)
    )
    group = Group(op, given, tuple(out), frozenset({n, *out}))
    return group if len(out) == 1 and group.is_closed else "attention whose statistics are read"
