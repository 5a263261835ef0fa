"""A graph with groups of nodes replaced by Emmy's operators. Decides nothing; torch runs what remains."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch.fx import Graph, GraphModule, Node

from emmy.dynamo.graph import aten, shape
from emmy.dynamo.group import Given, Group
from emmy.dynamo.ops import TorchOp


def copied(gm: GraphModule) -> tuple[GraphModule, dict[Node, Node]]:
    """A copy of a graph, and where each node is in it."""
    graph = Graph()
    where: dict[Node, Node] = {}
    out = graph.graph_copy(gm.graph, where)
    last = next(n for n in gm.graph.nodes if n.op == "output")
    where[last] = graph.output(out)
    for n, new in where.items():
        new.meta = n.meta.copy()
    return GraphModule(gm, graph), where


def rewritten(gm: GraphModule, chosen: Mapping[Group, TorchOp]) -> GraphModule:
    """A copy of the graph in which each group is one call."""
    out, where = copied(gm)
    for number, (group, op) in enumerate(chosen.items()):
        _replace(out, group, op, where, f"emmy_constant_{number}")
    for n in out.graph.nodes:  # Emmy's results are row-major: a view that other strides allowed may need a copy
        if n.target == aten.view.default:
            n.target = aten.reshape.default
    _sort(out.graph)
    out.graph.lint()
    out.recompile()
    return out


def _replace(gm: GraphModule, group: Group, op: TorchOp, where: dict[Node, Node], name: str) -> None:
    """Puts the call where the last of the group's nodes is: what it reads is there by then, or is sorted to be."""
    graph = gm.graph
    order = {n: i for i, n in enumerate(graph.nodes)}
    nodes = sorted((where[n] for n in group.nodes), key=order.__getitem__)
    with graph.inserting_before(nodes[-1]):
        call = graph.call_function(
            op.overload, tuple(_given(gm, g, where, f"{name}_{i}", group) for i, g in enumerate(group.given))
        )
        for i, n in enumerate(group.outputs):
            result = graph.call_function(operator.getitem, (call, i)) if len(group.outputs) > 1 else call
            made = tuple(op.program.sizes()[a] for a in op.program.value(op.program.outputs[i]).axes)
            if made != shape(n):
                result = graph.call_function(aten.reshape.default, (result, list(shape(n))))
            result.meta = n.meta.copy()
            where[n].replace_all_uses_with(result)
            where[n] = result  # what other groups read
    for old in reversed(nodes):
        graph.erase_node(old)


def _given(gm: GraphModule, g: Given, where: Mapping[Node, Node], name: str, group: Group) -> Node:
    graph = gm.graph
    if g.node is None:
        device = group.outputs[0].meta["val"].device
        gm.register_buffer(name, torch.tensor(g.constant, dtype=torch.float32, device=device), persistent=False)
        return graph.get_attr(name)
    node, form = where[g.node], shape(g.node)
    if g.swapped:
        node, form = graph.call_function(aten.permute.default, (node, [1, 0])), form[::-1]
    if g.rows is not None:
        node, form = graph.call_function(aten.slice.Tensor, (node, 0, *g.rows)), (g.rows[1] - g.rows[0], *form[1:])
    return node if form == g.shape else graph.call_function(aten.reshape.default, (node, list(g.shape)))


def _sort(graph: Graph) -> None:
    """Puts every node behind what it reads, and otherwise leaves the order as it is."""
    done: set[Node] = set()
    before = next(iter(graph.nodes))
    for n in list(graph.nodes):
        stack = [n]
        while stack:
            top = stack[-1]
            missing = [x for x in top.all_input_nodes if x not in done]
            if top in done or not missing:
                stack.pop()
                if top not in done:
                    done.add(top)
                    if top is not before:
                        before.append(top)
                    before = top
            else:
                stack += missing


def alone(gm: GraphModule, group: Group) -> GraphModule:
    """What torch computes of a group: a graph of its nodes, given the nodes that it reads, in the order of `reads`."""
    graph, where = Graph(), dict[Node, Node]()
    for n in reads(gm, group):
        where[n] = graph.placeholder(n.name)
    for n in gm.graph.nodes:
        if n in group.nodes:
            where[n] = graph.node_copy(n, lambda x: where[x])
    graph.output(tuple(where[n] for n in group.outputs))
    return GraphModule(gm, graph)


def reads(gm: GraphModule, group: Group) -> list[Node]:
    """Nodes that a group reads, in the graph's order."""
    found = {x for n in group.nodes for x in n.all_input_nodes} - group.nodes
    return [n for n in gm.graph.nodes if n in found]
