"""What became of a graph: which kernels of Emmy's it runs and what was left to torch, and why. Renders itself as text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class KernelUse:
    """An op of Emmy's in a graph. `origin`: whether its schedule was measured, predicted or is the default one."""

    op: str
    schedules: tuple[str, ...]
    origin: str
    computes: tuple[str, ...]  # the graph's operators, such as aten.mm


@dataclass(frozen=True, slots=True)
class Fallback:
    """An operator that torch runs, and why."""

    operator: str
    node: str
    reason: str


@dataclass(slots=True)
class GraphReport:
    """Of one graph that Dynamo captured. `n_views`: operators without arithmetic, which neither side computes.

    wrong: kernels whose answers the self-check refused; what they computed is torch's again
    checked: kernels whose answers the self-check found right, with the error in units of what is allowed
    """

    gpu: str
    kernels: list[KernelUse] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)
    n_views: int = 0
    wrong: list[str] = field(default_factory=list)
    checked: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        operators = sum(len(k.computes) for k in self.kernels)
        lines = [
            f"{len(self.kernels)} kernels of Emmy for {self.gpu}, in place of {operators} operators; "
            f"{len(self.fallbacks)} operators left to torch; {self.n_views} views"
        ]
        for (op, origin, computes), n in Counter((k.op, k.origin, k.computes) for k in self.kernels).items():
            lines.append(f"  {n} x {op}  schedule: {origin}  = {' '.join(computes)}")
        for (operator, reason), n in Counter((f.operator, f.reason) for f in self.fallbacks).items():
            lines.append(f"  torch: {n} x {operator}: {reason}")
        lines += [f"  WRONG, so torch computes it: {w}" for w in self.wrong]
        if self.checked:
            lines.append(
                f"  self-check: {len(self.checked)} kernels right, the largest error {max(self.checked.values()):.2g} of what is allowed"
            )
        return "\n".join(lines)
