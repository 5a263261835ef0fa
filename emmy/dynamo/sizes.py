"""A graph whose sizes are open until run time, as graphs of known sizes that are made when they come. Finds no op in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_symbols, free_unbacked_symbols

Call = Callable[..., object]


def has_open_sizes(gm: GraphModule) -> bool:
    """Whether some size of the graph is only known when it is called. False where one follows from numbers computed on the
    way, such as how many elements are not zero: then no call's arguments tell the sizes."""
    values = [n.meta.get("val") for n in gm.graph.nodes]
    known = [v for v in values if isinstance(v, torch.Tensor | torch.SymInt)]
    return any(free_symbols(v) for v in known) and not any(free_unbacked_symbols(v) for v in known)


class BySize:
    """Calls a graph by what was made of it for the sizes at hand.

    made:   a graph of known sizes -> what runs it
    others: runs the graph at sizes that come when `most` have come; nothing is made for those
    """

    def __init__(
        self, gm: GraphModule, made: Callable[[GraphModule], Call], others: Callable[[], Call], most: int
    ) -> None:
        self._gm, self._made, self._others, self._most = gm, made, others, most
        self._calls: dict[tuple[object, ...], Call] = {}
        self._rest: Call | None = None

    def __call__(self, *args: object) -> object:
        sizes = tuple(tuple(a.shape) if isinstance(a, torch.Tensor) else a for a in args)
        call = self._calls.get(sizes) or self._call(sizes, args)
        return call(*args)

    def _call(self, sizes: tuple[object, ...], args: Sequence[object]) -> Call:
        if len(self._calls) < self._most:
            with torch.no_grad():
                known = make_fx(self._gm, tracing_mode="fake")(*args)
                known.graph.eliminate_dead_code()  # results that nobody reads
                self._calls[sizes] = self._made(known)
            return self._calls[sizes]
        if self._rest is None:
            self._rest = self._others()
        return self._rest
