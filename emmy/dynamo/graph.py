"""Reading an FX graph of ATen operators: shapes, views, what a node computes. Knows no op of Emmy's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.fx import Node

from emmy.ir.dtype import DType

aten = torch.ops.aten
DTYPE_OF: dict[torch.dtype, DType] = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_RESHAPES = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
_SWAPS = {aten.t.default, aten.permute.default, aten.transpose.int}


def tensor(n: object) -> torch.Tensor | None:
    """What is known of a node's value without its numbers; None when it is no tensor."""
    found = n.meta.get("val") if isinstance(n, Node) else None
    return found if isinstance(found, torch.Tensor) else None


def shape(n: Node) -> tuple[int, ...]:
    """The sizes of a node's tensor. Only of nodes that `is_fixed`."""
    t = tensor(n)
    assert t is not None
    return tuple(int(s) for s in t.shape)


def is_fixed(n: object) -> bool:
    """Whether the node is a tensor of a dtype that Emmy computes with, all its sizes known."""
    t = tensor(n)
    return t is not None and t.dtype in DTYPE_OF and all(isinstance(s, int) for s in t.shape)


def dtype_of(n: Node) -> DType:
    t = tensor(n)
    assert t is not None
    return DTYPE_OF[t.dtype]


def calls(n: object, *targets: object) -> bool:
    return isinstance(n, Node) and n.op == "call_function" and n.target in targets


def is_reshape(n: object) -> bool:
    return calls(n, *_RESHAPES)


def under(n: Node) -> Node:
    """The node whose elements these are, in the same order: reshapes left out."""
    while is_reshape(n) and isinstance(n.args[0], Node):
        n = n.args[0]
    return n


def transposed(n: Node) -> Node | None:
    """X of a matrix that is X with its two axes swapped, else None."""
    if not calls(n, *_SWAPS) or not isinstance(n.args[0], Node) or len(shape(n)) != 2:
        return None
    if n.target == aten.permute.default and [int(str(d)) % 2 for d in _list(n.args[1])] != [1, 0]:
        return None
    if n.target == aten.transpose.int and {int(str(d)) % 2 for d in n.args[1:3]} != {0, 1}:
        return None
    return n.args[0]


def _list(x: object) -> Sequence[object]:
    return x if isinstance(x, list | tuple) else (x,)


def only_user(n: Node) -> Node | None:
    """The one node that reads this one, once; None when there are several, or none."""
    found = list(n.users)
    if len(found) != 1 or found[0].op == "output" or sum(a is n for a in found[0].all_input_nodes) != 1:
        return None
    return found[0] if [*found[0].args, *found[0].kwargs.values()].count(n) == 1 else None


def number(x: object) -> float | None:
    """A number written in the graph; None for anything else."""
    return float(x) if isinstance(x, int | float) and not isinstance(x, bool) else None


def upwards(n: Node) -> Iterator[Node]:
    """The node and those whose elements it has, reshapes one after another, the innermost last."""
    yield n
    while is_reshape(n) and isinstance(n.args[0], Node):
        n = n.args[0]
        yield n
