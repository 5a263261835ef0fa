"""Nodes of a graph that one op of Emmy's computes, and what it is given. Knows no way to find them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import Node

from emmy.ir.ops import Op


@dataclass(frozen=True, slots=True)
class Given:
    """An input of an op: a node's elements in a shape, or of its rows lo..hi; or one number.

    swapped: the node is a matrix whose axes are swapped first (the weight of torch's linear as a product reads it)
    """

    node: Node | None
    shape: tuple[int, ...] = ()
    rows: tuple[int, int] | None = None
    swapped: bool = False
    constant: float = 0.0

    def of(self, values: Mapping[Node, torch.Tensor], device: torch.device) -> torch.Tensor:
        """The tensor that the op is given, where nodes have these values."""
        if self.node is None:
            return torch.tensor(self.constant, dtype=torch.float32, device=device)
        t = values[self.node]
        t = t.t() if self.swapped else t
        return (t if self.rows is None else t[self.rows[0] : self.rows[1]]).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Group:
    """`outputs`: nodes that have users elsewhere, in the op's order. `nodes`: all that the op computes."""

    op: Op
    given: tuple[Given, ...]
    outputs: tuple[Node, ...]
    nodes: frozenset[Node]

    @property
    def is_closed(self) -> bool:
        """Whether nothing elsewhere reads what the op computes on the way."""
        inside = self.nodes - set(self.outputs)
        return all(user in self.nodes for n in inside for user in n.users)
