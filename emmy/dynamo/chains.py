"""Elementwise operators and reductions of rows in a graph, joined to programs: norms, softmax, whatever a user wrote.

Values are kept in f32 within a program, where torch rounds each to its dtype. Tensors share an iteration space that they
broadcast to; its axes that no tensor tells apart become one, so that a norm over [batch, seq, hidden] has rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import prod

import numpy as np
import torch
from torch.fx import Graph, Node

from emmy.dynamo.graph import aten, calls, dtype_of, is_fixed, number, shape
from emmy.dynamo.group import Given, Group
from emmy.dynamo.known import known_op
from emmy.errors import EmmyError
from emmy.ir.expr import Apply, Const, Expr, Read, axes_of, walk
from emmy.ir.ops.formula import Formula
from emmy.ir.program import MAX, SUM, Monoid, Program, Reduce, Stage, Value

Shape = tuple[int, ...]
_MOST_NODES, _MOST_INPUTS, _MOST_OUTPUTS = 400, 12, 4  # of an expression; of a program


def _fn(name: str) -> Callable[..., Expr]:
    return lambda *args: Apply(name, args)


def _sigmoid(x: Expr) -> Expr:
    return Apply("div", (Const(1.0), Apply("add", (Const(1.0), Apply("exp", (Apply("neg", (x,)),))))))


def _power(x: Expr, exponent: Expr) -> Expr | None:
    match exponent:
        case Const(2.0):
            return Apply("mul", (x, x))
        case Const(-0.5):
            return Apply("rsqrt", (x,))
        case Const(0.5):
            return Apply("sqrt", (x,))
        case Const(3.0):
            return Apply("mul", (Apply("mul", (x, x)), x))
    return None


# operator -> what it makes of its arguments, None where they are not of the kind that is meant
_ELEMENTWISE: Mapping[object, Callable[..., Expr | None]] = {
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), _fn("add")),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), _fn("sub")),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), _fn("mul")),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar), _fn("div")),
    aten.neg.default: _fn("neg"),
    aten.exp.default: _fn("exp"),
    aten.tanh.default: _fn("tanh"),
    aten.sqrt.default: _fn("sqrt"),
    aten.rsqrt.default: _fn("rsqrt"),
    aten.silu.default: _fn("silu"),
    aten.gelu.default: _fn("gelu_tanh"),
    aten.sigmoid.default: _sigmoid,
    aten.reciprocal.default: lambda x: Apply("div", (Const(1.0), x)),
    aten.relu.default: lambda x: Apply("maximum", (x, Const(0.0))),
    aten.maximum.default: _fn("maximum"),
    aten.minimum.default: _fn("minimum"),
    aten.pow.Tensor_Scalar: _power,
    aten._to_copy.default: lambda x: x,
}
_FOLDS: Mapping[object, Monoid] = {aten.sum.dim_IntList: SUM, aten.mean.dim: SUM, aten.amax.default: MAX}
_CASTS = {"dtype", "layout", "device", "non_blocking", "memory_format"}


def find_chains(graph: Graph, taken: frozenset[Node]) -> Iterator[Group | tuple[Node, str]]:
    """Groups of what is not taken; of a chain that makes no program of Emmy's, each of its nodes and why."""
    for cluster in _clusters(graph, taken):
        computing = [n for n in cluster.nodes if not calls(n, aten._to_copy.default)]
        if len(computing) < 2 and not any(_is_fold(n) for n in computing):
            yield from (
                (n, "an elementwise operator with no other beside it: there is nothing to save") for n in computing
            )
            continue
        found = _program_of(cluster)
        if isinstance(found, str):
            yield from ((n, found) for n in computing)
        else:
            yield found


# ---------------------------------------------------------------- which nodes
@dataclass(slots=True)
class _Cluster:
    full: Shape  # what all tensors broadcast to
    nodes: list[Node] = field(default_factory=list)


def _is_fold(n: Node) -> bool:
    return n.target in _FOLDS or n.target == aten._softmax.default


def _is_candidate(n: Node) -> bool:
    if n.op != "call_function" or not is_fixed(n) or not all(map(is_fixed, n.all_input_nodes)) or not n.all_input_nodes:
        return False
    if 0 in shape(n) or len({n.meta["val"].device, *(x.meta["val"].device for x in n.all_input_nodes)}) > 1:
        return False
    if n.target in _FOLDS:
        return _folded(n) is not None
    if n.target == aten._softmax.default:
        return bool(n.args[1] in (-1, len(shape(n)) - 1) and shape(n)[-1] > 1)
    if n.target == aten.gelu.default:
        return bool(n.kwargs.get("approximate") == "tanh")
    if n.target == aten._to_copy.default:
        return bool(set(n.kwargs) <= _CASTS and n.kwargs.get("memory_format") is None and not _coarsens(n))
    return bool(n.target in _ELEMENTWISE and not n.kwargs)


def _coarsens(cast: Node) -> bool:
    """Whether a cast rounds to a type coarser than one of what its value is made of: who writes that means the rounding.

    A cast back to the type that everything came in is a model's way of storing, and leaving it out only makes answers nearer.
    """
    to = cast.meta["val"].dtype
    seen, waiting = set[Node](), [*cast.all_input_nodes]
    while waiting:
        n = waiting.pop()
        if n in seen:
            continue
        seen.add(n)
        if n.op == "call_function" and (n.target in _ELEMENTWISE or _is_fold(n)):
            waiting += n.all_input_nodes
            continue
        dtype = n.meta["val"].dtype if "val" in n.meta else None
        if (
            dtype is not None
            and dtype.is_floating_point
            and to.is_floating_point
            and torch.finfo(dtype).eps < torch.finfo(to).eps
        ):
            return True
    return False


def _folded(n: Node) -> tuple[int, ...] | None:
    """The axes a reduction folds, when they are the last ones, are kept as ones, and have more than one element."""
    x = n.args[0]
    dims, keep = (*n.args[1:3], False)[:2] if len(n.args) > 1 else (None, False)
    if (
        not isinstance(x, Node)
        or keep is not True
        or not isinstance(dims, list | tuple)
        or n.kwargs.get("dtype") not in (None, torch.float32)
    ):
        return None
    rank = len(shape(x))
    at = tuple(sorted(int(str(d)) % rank for d in dims))
    is_last = at == tuple(range(rank - len(at), rank))
    return at if at and is_last and prod(shape(x)[i] for i in at) > 1 else None


def _from_the_end(n: Node) -> tuple[int, ...]:
    """The axes a reduction folds, the last one being -1."""
    return tuple(d - len(_argument(n)) for d in _folded(n) or ()) if n.target in _FOLDS else (-1,)


def _clusters(graph: Graph, taken: frozenset[Node]) -> list[_Cluster]:
    order = {n: i for i, n in enumerate(graph.nodes)}
    at: dict[Node, _Cluster] = {}
    for n in graph.nodes:
        if n in taken or not _is_candidate(n):
            continue
        own = _Cluster(_broadcast([shape(n), *map(shape, n.all_input_nodes)]), [n])
        for other in list({id(c): c for c in (at.get(x) for x in n.all_input_nodes) if c}.values()):
            if _fit(own.full, other.full) and _is_convex({*own.nodes, *other.nodes}, order):
                own = _Cluster(
                    max(own.full, other.full, key=lambda s: (len(s), prod(s))),
                    sorted([*other.nodes, *own.nodes], key=order.__getitem__),
                )
        for x in own.nodes:
            at[x] = own
    return list({id(c): c for c in at.values()}.values())


def _broadcast(shapes: Sequence[Shape]) -> Shape:
    return tuple(torch.broadcast_shapes(*shapes))


def _fit(a: Shape, b: Shape) -> bool:
    """Whether one broadcasts to the other."""
    try:
        return _broadcast([a, b]) in (a, b)
    except RuntimeError:
        return False


def _is_convex(nodes: set[Node], order: Mapping[Node, int]) -> bool:
    """Whether no value leaves the nodes and comes back."""
    end = max(order[n] for n in nodes)
    reached = {u for n in nodes for u in n.users if u not in nodes and order[u] < end}
    while reached:
        further = {u for n in reached for u in n.users if order.get(u, end) <= end}
        if further & nodes:
            return False
        reached = further
    return True


# ---------------------------------------------------------------- their program
@dataclass(slots=True)
class _Space:
    """The axes of a cluster: names, sizes, and the positions of the full shape that each stands for."""

    full: Shape
    names: tuple[str, ...]
    positions: tuple[tuple[int, ...], ...]

    def axes(self, s: Shape) -> tuple[str, ...]:
        """Axes of a tensor of this shape."""
        return tuple(name for name, at in zip(self.names, self.positions, strict=True) if _has(s, at[0], self.full))

    def size(self, axis: str) -> int:
        return prod(self.full[i] for i in self.positions[self.names.index(axis)])


def _has(s: Shape, at: int, full: Shape) -> bool:
    """Whether a tensor has elements along a position of the full shape, rather than one for all of them."""
    own = at - (len(full) - len(s))
    return own >= 0 and (full[at] == 1 or s[own] == full[at])


def _space(cluster: _Cluster) -> _Space:
    tensors = [shape(x) for n in cluster.nodes for x in (n, *n.all_input_nodes)]
    folds = [_from_the_end(n) for n in cluster.nodes if _is_fold(n)]
    rank = len(cluster.full)

    def told_apart(i: int) -> tuple[bool, ...]:
        return (*(_has(s, i, cluster.full) for s in tensors), *(i - rank in f for f in folds))

    positions = tuple(tuple(run) for _, run in groupby(range(rank), key=told_apart))
    if len(positions) == 1 and rank > 1:  # nothing but elements: rows all the same, which ops of rows have
        positions = (tuple(range(rank - 1)), (rank - 1,))
    first = "abcdefgh"[: max(0, len(positions) - 2)]
    names = (*first, "m", "n")[-len(positions) :] if positions else ()
    return _Space(cluster.full, tuple(names), positions)


class _Refused(EmmyError):
    """The chain makes no program; caught where it is asked for."""


@dataclass(slots=True)
class _Builder:
    space: _Space
    inside: frozenset[Node]
    inputs: dict[Node, Value] = field(default_factory=dict)
    stages: list[Stage] = field(default_factory=list)
    known: dict[Node, Expr] = field(default_factory=dict)

    def of(self, x: object) -> Expr:
        """The expression of an argument."""
        if not isinstance(x, Node):
            value = number(x)
            if value is None:
                raise _Refused(f"an argument is {x!r}, no number")
            return Const(float(str(np.float32(value))))  # the shortest that is the same in f32
        if x not in self.known:
            self.known[x] = self._node(x) if x in self.inside else self._input(x)
        return self.known[x]

    def _input(self, x: Node) -> Expr:
        if x not in self.inputs:
            self.inputs[x] = Value(f"X{len(self.inputs)}", self.space.axes(shape(x)), dtype_of(x))
        return Read(self.inputs[x].name, self.inputs[x].axes)

    def _node(self, n: Node) -> Expr:
        if n.target in _FOLDS:
            folded = self._fold(n, self.of(n.args[0]), _FOLDS[n.target])
            dims = _folded(n) or ()
            x = n.args[0]
            assert isinstance(x, Node)
            count = prod(shape(x)[i] for i in dims)
            return Apply("mul", (folded, Const(1 / count))) if n.target == aten.mean.dim else folded
        if n.target == aten._softmax.default:
            x = self.of(n.args[0])
            e = Apply("exp", (Apply("sub", (x, self._fold(n, x, MAX, last=True))),))
            total = self._fold(n, e, SUM, last=True)
            return Apply("mul", (e, self._kept(Apply("div", (Const(1.0), total)), total.axes)))
        made = _ELEMENTWISE[n.target](*map(self.of, n.args))
        if made is None:
            raise _Refused(f"{n.target} of these arguments")
        made = _ordered(made)
        if sum(1 for _ in walk(made)) > _MOST_NODES:
            raise _Refused(f"an expression of more than {_MOST_NODES} parts")
        return made

    def _fold(self, n: Node, body: Expr, monoid: Monoid, last: bool = False) -> Read:
        axes = self.space.axes(shape(n)) if not last else self.space.axes(shape(n))[:-1]
        gone = tuple(a for a in self.space.axes(_argument(n)) if a not in axes)
        if not gone or set(axes_of(body)) & set(gone) != set(gone):
            raise _Refused("a reduction of what is the same along the reduced axis")
        return self._kept(body, axes, tuple(Reduce(a, monoid) for a in gone))

    def _kept(self, body: Expr, axes: tuple[str, ...], reduces: tuple[Reduce, ...] = ()) -> Read:
        """A stage of its own, as it is read."""
        name = f"S{len(self.stages)}"
        self.stages.append(Stage(name, axes, body, reduces))
        return Read(name, axes)


def _argument(n: Node) -> Shape:
    x = n.args[0]
    assert isinstance(x, Node)
    return shape(x)


def _ordered(e: Expr) -> Expr:
    """Factors and terms with more axes first, and what is computed before what is read: so that one thing has one key."""
    if not isinstance(e, Apply) or e.fn not in ("add", "mul"):
        return e
    a, b = e.args
    rank = [(len(axes_of(x)), isinstance(x, Apply) and x.fn in ("gelu_tanh", "silu")) for x in (a, b)]
    return Apply(e.fn, (b, a)) if rank[1] > rank[0] else e


def _program_of(cluster: _Cluster) -> Group | str:
    """The group of a cluster, or why it makes none."""
    inside = frozenset(cluster.nodes)
    outputs = tuple(n for n in cluster.nodes if any(u not in inside for u in n.users))
    space = _space(cluster)
    if not 1 <= len(outputs) <= _MOST_OUTPUTS or not space.names:
        return f"{len(outputs)} results of a chain; 1..{_MOST_OUTPUTS} of at least one axis can leave it"
    b = _Builder(space, inside)
    try:
        for i, o in enumerate(outputs):
            b.stages.append(Stage(f"Y{i}", space.axes(shape(o)), b.of(o), (), dtype_of(o)))
            b.known[o] = Read(f"Y{i}", space.axes(shape(o)))  # what else is made of it reads it
        if len(b.inputs) > _MOST_INPUTS:
            return f"a chain of {len(b.inputs)} tensors; at most {_MOST_INPUTS} are allowed"
        used = {a for v in b.inputs.values() for a in v.axes} | {a for s in b.stages for a in s.every}
        dims = tuple((a, space.size(a)) for a in space.names if a in used)
        program = Program(dims, tuple(b.inputs.values()), tuple(b.stages), tuple(f"Y{i}" for i in range(len(outputs))))
        op = known_op(program) or Formula(program)
    except EmmyError as e:
        return str(e)
    sizes = dict(dims)
    given = tuple(Given(n, tuple(sizes[a] for a in v.axes)) for n, v in b.inputs.items())
    return Group(op, given, outputs, inside)
