"""What layers of one shape and a step of the server are, as attention by the pack's kernels sees them. Knows torch alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from emmy.ir.dtype import DType
from emmy.ir.ops import ServedAttention

# A step of several prompts is run part by part: its prompts must be long enough to fill a card, and the parts few.
LONG, MOST_PARTS = 256, 8


@dataclass(frozen=True, slots=True)
class Shape:
    """What the layers of a kind have in common. `window`: keys up to its own position that a query sees, 0 = all."""

    heads: int
    kv_heads: int
    dim: int
    dtype: DType
    window: int
    scale: float

    def __str__(self) -> str:
        window = f",window{self.window}" if self.window else ""
        return f"{self.heads}x{self.dim}:{self.dtype}:kv{self.kv_heads}{window}"

    def fits(self, op: ServedAttention) -> bool:
        same = (op.heads, op.groups, op.dim, op.dtype, op.window) == (
            self.heads, self.kv_heads, self.dim, self.dtype, self.window,
        )  # fmt: skip
        return same and abs((op.scale or op.dim**-0.5) / self.scale - 1) < 1e-6


@dataclass(frozen=True, slots=True)
class Cache:
    """A layer's cache: its memory, and the axes of p c j g d (see ServedAttention) in the order in which `view` has them.

    fixed: (order of keys, of values) where the view cannot say it, for keys lie transposed in their pages
    """

    view: torch.Tensor
    axes: str
    fixed: tuple[str, str] | None = None

    def size(self, axis: str) -> int:
        return int(self.view.shape[self.axes.index(axis)])

    def lies_as(self, op: ServedAttention) -> bool:
        """Whether the op's kernels find keys and values in it."""
        if self.size("j") != op.page:
            return False
        if self.fixed is not None:
            return self.view.is_contiguous() and self.fixed == (op.order, op.values or op.order)
        return not op.values and self.view.permute([self.axes.index(a) for a in op.order]).is_contiguous()


@dataclass(frozen=True, slots=True)
class Step:
    """A forward pass of a layer's group as vLLM describes it.

    of:     that description, the same object for all layers of the group
    starts: the first token of each request, and the end, where the host knows them
    """

    of: object
    tokens: int
    most_queries: int
    most_keys: int
    lengths: torch.Tensor
    table: torch.Tensor
    starts: tuple[int, ...] | None = None

    def parts(self) -> tuple[Part, ...] | str:
        """What may be run one after another: neighbouring requests of one query together, each prompt alone. Or why nothing may."""
        requests = len(self.lengths)
        if self.most_queries == 1 and requests != self.tokens:
            return "requests without a query"
        if self.most_queries == 1 or requests == 1:
            return (Part(0, requests, 0, self.tokens),)
        if self.starts is None:
            return "several requests, of which nobody says where they begin"
        parts = list[Part]()
        for i, (begin, end) in enumerate(pairwise(self.starts)):
            if end - begin == 1 and parts and parts[-1].decodes and parts[-1].last == i:
                parts[-1] = Part(parts[-1].first, i + 1, parts[-1].token, parts[-1].tokens + 1)
            elif end > begin:
                parts.append(Part(i, i + 1, begin, end - begin))
        if len(parts) > MOST_PARTS or any(1 < p.tokens < LONG for p in parts if not p.decodes):
            return "several requests, of which some are short prompts"
        return tuple(parts)


@dataclass(frozen=True, slots=True)
class Part:
    """Requests first..last-1 of a step, whose tokens begin with `token`."""

    first: int
    last: int
    token: int
    tokens: int

    @property
    def decodes(self) -> bool:
        return self.tokens == self.last - self.first


@dataclass(slots=True)
class Told:
    """What a kernel is told of a part of a step, made once for all layers of a group.

    near:   what it was made of, where groups share that
    layers: those that were given it
    """

    of: object
    table: torch.Tensor
    counts: torch.Tensor
    near: Told | None = None
    layers: set[int] = field(default_factory=set)

    def give(self, layer: int) -> None:
        self.layers.add(layer)
        if self.near:
            self.near.give(layer)


@dataclass(slots=True)
class Kept:
    """What was made of steps, by key. Objects that keys name by their id live as long as their entry."""

    entries: dict[tuple[int, int], Told] = field(default_factory=dict)

    def get(self, key: tuple[int, int], layer: int, make: Callable[[], Told]) -> Told:
        """A layer that comes again is in another step, though the description be the same: numbers in it may have changed."""
        found = self.entries.get(key)
        if found is None or layer in found.layers:
            self.entries = {
                k: t for k, t in self.entries.items() if layer not in t.layers or (k[0] == key[0] and k != key)
            }
            found = self.entries[key] = make()
        found.give(layer)
        return found
