"""hint: what the last-level cache is told to do with a value that the copy engine fetches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

from emmy.ir.moves.base import Move, Site, legal_sites, put, refuse_ahead, refuse_path, register
from emmy.ir.moves.stage import contracted
from emmy.ir.plan import Channel, Launch, Plan
from emmy.ir.target import Target

POLICIES = ("evict_first", "evict_last")


@register
@dataclass(frozen=True)
class Hint(Move):
    """hint(B,evict_first): what is fetched of B leaves the last-level cache before anything else does.

    before:  B.smem <- B[128,64]  tma depth 4      after:   B.smem <- B[128,64]  tma depth 4 evict_first

    A weight that a launch reads once would push out activations that the next launch reads (PTX ISA: Cache Eviction Priority
    Hints; createpolicy). Changes no result, so a search is offered it only for constants that no two tiles share.
    """

    value: str
    policy: str
    name: ClassVar[str] = "hint"
    phase: ClassVar[int] = 42
    commutes: ClassVar[bool] = True

    @classmethod
    def sites(cls, plan: Plan, target: Target) -> Iterator[Site]:
        once = (
            cls(la.name, None, c.value, "evict_first")
            for la in plan.launches
            for c in la.tile.channels
            if plan.program.is_constant(c.value) and _reads(plan, la, c) == 1
            if all(la.tile.channel(v) for v in contracted(plan, la))
        )
        return legal_sites(once, plan, target)

    def refuse(self, plan: Plan, target: Target) -> str | None:
        missing = refuse_path(self, plan)
        if missing:
            return missing
        la = plan.launch(self.launch)
        c = la.tile.channel(self.value)
        if self.policy not in POLICIES:
            return f"the cache has no policy {self.policy}; it has {', '.join(POLICIES)}"
        if c is None or c.transport != "tma":
            return f"{self.value} is fetched by {c.transport if c else 'no transport'}: tma alone carries a hint"
        if la.tile.roles:
            return f"{self.launch} has {len(la.tile.roles)} roles already: hint comes before specialize"
        return f"{self.value} has the hint {c.hint} already" if c.hint else refuse_ahead(self, la)

    def rewrite(self, plan: Plan, target: Target) -> Plan:
        la = plan.launch(self.launch)
        channels = (replace(c, hint=self.policy) if c.value == self.value else c for c in la.tile.channels)
        return put(plan, la, replace(la.tile, channels=tuple(channels)))


def _reads(plan: Plan, la: Launch, c: Channel) -> int:
    """How often the launch's tiles fetch each element of the channel's value."""
    t, axes = la.tile, plan.program.value(c.value).axes
    return prod(plan.count(t.nest, i) for i in range(t.n_block_loops) if t.nest[i].axis not in axes)
