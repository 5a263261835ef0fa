"""Products of matrices in a graph, with what is done to each element of them, as matmuls and gated pairs of Emmy's.

Elements are followed from the product on, through reshapes, for as long as one operator alone reads them and it is a word of an
epilogue. In 16 bits torch rounds between them and Emmy does not: its answers are nearer to the exact ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from emmy.dynamo.graph import (
    aten,
    calls,
    dtype_of,
    is_fixed,
    is_reshape,
    number,
    only_user,
    shape,
    tensor,
    transposed,
    under,
)
from emmy.dynamo.group import Given, Group
from emmy.errors import UsageError
from emmy.ir.ops import Geglu, Glu, Matmul, Swiglu
from emmy.ir.ops.matmul import Epilogue
from emmy.ir.ops.sizes import Layout

PRODUCTS = (aten.mm.default, aten.addmm.default)


@dataclass(frozen=True, slots=True)
class _Product:
    """C[m,n] = A[m,k] @ B."""

    node: Node
    a: Node
    weight: Given
    layout: Layout
    m: int
    n: int
    k: int
    bias: Node | None = None


def find_linears(graph: Graph) -> Iterator[Group | tuple[Node, str]]:
    """Gated pairs first, then the other products; of a product that is none of Emmy's, the node and why."""
    taken: set[Node] = set()
    for n in graph.nodes:
        if calls(n, aten.mul.Tensor) and (found := _gated(n)) is not None:
            taken |= found.nodes
            yield found
    for n in graph.nodes:
        if calls(n, *PRODUCTS) and n not in taken:
            p = _product(n)
            yield (n, p) if isinstance(p, str) else _with_epilogue(p)


def _product(n: Node) -> _Product | str:
    """The product that a node computes, or why it is none of Emmy's."""
    bias, a, b = n.args[:3] if n.target == aten.addmm.default else (None, *n.args[:2])
    if not (isinstance(a, Node) and isinstance(b, Node) and is_fixed(n) and is_fixed(a) and is_fixed(b)):
        return f"{_dtype(n)} with sizes {_sizes(n)}: f32, f16 or bf16 of known sizes is needed"
    if any(number(n.kwargs.get(x, 1)) != 1.0 for x in ("alpha", "beta")):
        return "alpha or beta is not 1"
    if bias is not None and not (isinstance(bias, Node) and is_fixed(bias) and shape(bias) == shape(n)[1:]):
        return "what is added is no vector of the columns"
    if dtype_of(a) != dtype_of(b) or (bias is not None and dtype_of(bias) != dtype_of(a)):
        return "the factors are of different dtypes"
    (m, k), wide = shape(a), shape(n)[1]
    if 0 in (m, k, wide):
        return "it is empty"
    inner = transposed(b)
    t = tensor(b)
    if inner is not None:
        return _Product(n, a, Given(inner, (wide, k)), "nk", m, wide, k, bias)
    if t is not None and t.stride() == (1, k) and k > 1:  # stored as torch's linear stores it
        return _Product(n, a, Given(b, (wide, k), swapped=True), "nk", m, wide, k, bias)
    return _Product(n, a, Given(b, (k, wide)), "kn", m, wide, k, bias)


def _dtype(n: Node) -> str:
    t = tensor(n)
    return str(t.dtype) if t is not None else "no tensor"


def _sizes(n: Node) -> str:
    t = tensor(n)
    return "x".join(map(str, t.shape)) if t is not None else "unknown"


# ---------------------------------------------------------------- epilogues
@dataclass(slots=True)
class _Chain:
    """A product and the words behind it so far; `last` is the node that holds their result."""

    last: Node
    words: list[Epilogue]
    given: list[Given]
    nodes: set[Node] = field(default_factory=set)


def _with_epilogue(p: _Product) -> Group:
    chain = _Chain(p.node, [], [], {p.node})
    if p.bias is not None:
        chain.words.append("bias")
        chain.given.append(Given(p.bias, (p.n,)))
    while (user := only_user(chain.last)) is not None and _extend(chain, user, p):
        chain.nodes.add(user)
        chain.last = user
    while is_reshape(chain.last):  # reshapes at the end are left to torch, where they cost nothing
        chain.nodes.remove(chain.last)
        assert isinstance(chain.last.args[0], Node)
        chain.last = chain.last.args[0]
    op = Matmul(p.m, p.n, p.k, dtype_of(p.a), p.layout, tuple(chain.words))
    return Group(op, (Given(p.a, (p.m, p.k)), p.weight, *chain.given), (chain.last,), frozenset(chain.nodes))


def _extend(chain: _Chain, user: Node, p: _Product) -> bool:
    """Whether the node is one more word behind the product, which then is in the chain; or a reshape of whole rows."""
    if not is_fixed(user) or dtype_of(user) != dtype_of(p.a):
        return False
    if is_reshape(user):
        return shape(user)[-1:] == (p.n,)
    if shape(user) != shape(chain.last):
        return False
    word, given = _word(chain.last, user, p)
    if word is None or word in chain.words:
        return False
    chain.words.append(word)
    if given is not None:
        chain.given.append(given)
    return True


def _word(last: Node, user: Node, p: _Product) -> tuple[Epilogue | None, Given | None]:
    """What a node does to each element of a product."""
    if (act := activation(user)) is not None:
        return act, None
    if calls(user, aten.add.Tensor) and number(user.kwargs.get("alpha", 1)) == 1.0:
        other = user.args[1] if user.args[0] is last else user.args[0]
        if not isinstance(other, Node) or not is_fixed(other) or dtype_of(other) != dtype_of(p.a):
            return None, None
        if shape(other) == shape(last):
            return "residual", Given(other, (p.m, p.n))
        if shape(other) == (p.n,):
            return "bias", Given(other, (p.n,))
    if calls(user, aten.mul.Tensor, aten.mul.Scalar):
        factor = number(user.args[1] if user.args[0] is last else user.args[0])
        if factor is not None:
            return "scale", Given(None, constant=factor)
    return None, None


def activation(n: Node) -> Epilogue | None:
    """The activation of Emmy's that a node is."""
    if calls(n, aten.silu.default):
        return "silu"
    return "gelu_tanh" if calls(n, aten.gelu.default) and n.kwargs.get("approximate") == "tanh" else None


# ---------------------------------------------------------------- gated pairs
def _gated(product: Node) -> Group | None:
    """act(A G) * (A U), from two products or from one whose columns are both halves."""
    for x, y in (product.args[:2], product.args[1::-1]):
        if isinstance(x, Node) and isinstance(y, Node):
            found = _pair(product, x, y)
            if found is not None:
                return found
    return None


def _pair(product: Node, x: Node, y: Node) -> Group | None:
    act = under(x)
    name = activation(act)
    if name is None or not isinstance(act.args[0], Node):
        return None
    gate, up = act.args[0], y
    between = _path(x, act) | _path(y, None)
    op: type[Glu] = Geglu if name == "gelu_tanh" else Swiglu
    found = _two_products(gate, up) or _halves(gate, up)
    if found is None or not is_fixed(product):
        return None
    first, second, nodes = found
    try:
        made = op(first.m, first.n, first.k, dtype_of(first.a), first.layout)
    except UsageError:
        return None
    if shape(product)[-1] != first.n or dtype_of(product) != dtype_of(first.a):
        return None
    given = (Given(first.a, (first.m, first.k)), first.weight, second.weight)
    group = Group(made, given, (product,), frozenset({product, act, *between, *nodes}))
    return group if group.is_closed else None


def _path(top: Node, end: Node | None) -> set[Node]:
    """Reshapes from `top` upwards until `end`, which the group computes on the way."""
    out = set()
    while top is not end and is_reshape(top) and isinstance(top.args[0], Node):
        out.add(top)
        top = top.args[0]
    return out


def _two_products(gate: Node, up: Node) -> tuple[_Product, _Product, set[Node]] | None:
    g, u = under(gate), under(up)
    if not (calls(g, aten.mm.default) and calls(u, aten.mm.default)) or g is u:
        return None
    first, second = _product(g), _product(u)
    if isinstance(first, str) or isinstance(second, str):
        return None
    same = (first.m, first.n, first.k, first.layout) == (second.m, second.n, second.k, second.layout)
    if not same or under(first.a) is not under(second.a):
        return None
    nodes = _path(gate, g) | _path(up, u) | {g, u}
    return first, second, nodes


def _halves(gate: Node, up: Node) -> tuple[_Product, _Product, set[Node]] | None:
    """Both halves of the columns of one product, whose weight then is two."""
    found = [_half(under(x)) for x in (gate, up)]
    if found[0] is None or found[1] is None or found[0][:2] != (found[1][0], 1 - found[1][1]):
        return None
    whole, which, nodes = found[0]
    nodes = nodes | found[1][2] | _path(gate, None) | _path(up, None)
    merged = under(whole)
    p = _product(merged) if calls(merged, aten.mm.default) else ""
    if isinstance(p, str) or p.layout != "nk" or p.n % 2:
        return None
    n = p.n // 2
    parts = [
        _Product(p.node, p.a, Given(p.weight.node, (n, p.k), (lo, lo + n), p.weight.swapped), "nk", p.m, n, p.k)
        for lo in (which * n, (1 - which) * n)
    ]
    inner = nodes | _path(whole, merged) | {merged}
    return parts[0], parts[1], inner


def _half(n: Node) -> tuple[Node, int, set[Node]] | None:
    """(the whole, 0 or 1, the nodes that cut it) of a node that is half of another's columns."""
    if calls(n, aten.slice.Tensor) and isinstance(n.args[0], Node) and is_fixed(n) and is_fixed(n.args[0]):
        whole, wide = n.args[0], shape(n.args[0])[-1]
        dim, lo, hi, step = (n.args[i] if i < len(n.args) else left for i, left in ((1, 0), (2, 0), (3, wide), (4, 1)))
        ends = (number(lo) or 0, min(wide if hi is None else number(hi) or 0, wide))
        if number(dim) in (-1, len(shape(n)) - 1) and step == 1 and ends in ((0, wide // 2), (wide // 2, wide)):
            return whole, int(ends[0] > 0), {n}
    if n.op == "call_function" and getattr(n.target, "__name__", "") == "getitem" and isinstance(n.args[0], Node):
        cut = n.args[0]
        if not calls(cut, aten.split.Tensor, aten.split_with_sizes.default) or not isinstance(cut.args[0], Node):
            return None
        whole = cut.args[0]
        if not is_fixed(whole) or not is_fixed(n) or shape(n)[:-1] != shape(whole)[:-1]:
            return None
        if 2 * shape(n)[-1] == shape(whole)[-1] and n.args[1] in (0, 1):
            return whole, int(str(n.args[1])), {n, cut}
    return None
