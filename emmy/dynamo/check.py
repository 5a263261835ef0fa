"""Kernels' answers against torch's on the tensors of a real call. Must not know how groups were found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Interpreter, Node

from emmy.dynamo.graph import dtype_of
from emmy.dynamo.group import Group
from emmy.dynamo.ops import TorchOp
from emmy.dynamo.rewriting import alone, reads
from emmy.ir.dtype import epsilon


@dataclass(frozen=True, slots=True)
class Verdict:
    """`error`: the largest difference from torch, in units of what is allowed; inf for a NaN where torch has none."""

    group: Group
    error: float


def check(gm: GraphModule, ops: Mapping[Group, TorchOp], args: Sequence[torch.Tensor]) -> list[Verdict]:
    """A verdict on every kernel, each given what torch computes from `args`, so that no error is another's.

    Allowed is twice what the op allows at the scale of torch's answer, and the roundings that torch makes on the way.
    """
    with torch.no_grad():
        seen = _Kept(gm, {n for g in ops for n in (*reads(gm, g), *(x.node for x in g.given if x.node is not None))})
        seen.run(*args)
        return [Verdict(g, _error(gm, op, g, seen.kept)) for g, op in ops.items()]


class _Kept(Interpreter):  # type: ignore[misc]  # torch is not followed
    """Runs a graph and keeps the values of some nodes."""

    def __init__(self, gm: GraphModule, wanted: set[Node]) -> None:
        super().__init__(gm)
        self.wanted, self.kept = wanted, dict[Node, torch.Tensor]()

    def run_node(self, n: Node) -> object:
        value = super().run_node(n)
        if n in self.wanted:
            self.kept[n] = value
        return value


def _error(gm: GraphModule, op: TorchOp, group: Group, values: Mapping[Node, torch.Tensor]) -> float:
    device = group.outputs[0].meta["val"].device
    got = op(*(g.of(values, device) for g in group.given))
    results = got if isinstance(got, tuple) else (got,)
    program, accumulate = op.program, op.accumulate
    theirs_all = alone(gm, group)(*(values[n] for n in reads(gm, group)))
    worst = 0.0
    for name, n, mine, theirs in zip(program.outputs, group.outputs, results, theirs_all, strict=True):
        want, have = theirs.double().reshape(-1), mine.double().reshape(-1)
        scale = float(want.square().mean().sqrt()) or 1.0
        absolute, relative = group.op.tolerance(accumulate, name)
        rounding = epsilon(dtype_of(n)) * len(group.nodes)
        allowed = 2 * (absolute * scale + relative * want.abs()) + rounding * (want.abs() + scale)
        difference = (have - want).abs() / allowed
        difference[want.isnan() & have.isnan() | (want == have)] = 0.0
        worst = max(worst, float(difference.nan_to_num(nan=float("inf"), posinf=float("inf")).max()))
    return worst
