"""pdl: a launch begins while the one before it in the stream still runs, and fetches parameters meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, cast, get_args

from emmy.ir.moves.base import Move, Site, legal_sites, refuse_path, register
from emmy.ir.plan import Plan, Trigger
from emmy.ir.target import Target

TRIGGERS: tuple[Trigger, ...] = get_args(Trigger)


@register
@dataclass(frozen=True)
class Pdl(Move):
    """pdl(end): programmatic dependent launch. Blocks start as soon as those of the launch before leave room for them.

    before:  k0 | launch gap | k1: fill A and B, compute, store
    after:   k0 ...
                k1: fill B, which is constant | k0 has ended | fill A, compute, store

    The wait and what may come before it are derived from `Value.constant` (`emmy.codegen.sync`). The launch also lets the
    next one begin, which takes effect when all its blocks have said so, and only for a launch that is early too (PTX ISA,
    Parallel Synchronization and Communication Instructions: griddepcontrol). `trigger` is when a block says it:

    start: when it begins. The next launch's blocks come as soon as there is room beside all of this one's. Where several
           fit a multiprocessor, they fill the gaps that these leave, and are then dealt unevenly themselves.
    end:   when it has fetched its last operands, so that the next launch's blocks find nearly all multiprocessors free.

    Not searched. What it brings is a part of the gap *between* launches, so it depends on the neighbours: an op measured
    alone, back to back with itself, would be credited with an overlap that the stock kernel beside it does not get, and
    rows would no longer be times of the op. Whoever runs a chain adds it to finished schedules: `emmy.api.with_pdl`.
    """

    trigger: str = "start"
    name: ClassVar[str] = "pdl"
    phase: ClassVar[int] = 70
    commutes: ClassVar[bool] = True
    searched: ClassVar[bool] = False

    @classmethod
    def sites(cls, plan: Plan, target: Target) -> Iterator[Site]:
        return legal_sites((cls(la.name, None, t) for la in plan.launches for t in TRIGGERS), plan, target)

    def refuse(self, plan: Plan, target: Target) -> str | None:
        missing = refuse_path(self, plan)
        if missing:
            return missing
        if not target.can("pdl"):
            return (
                f"{target.name} starts a launch when those before it have ended (griddepcontrol needs sm_90 or later)"
            )
        if self.trigger not in TRIGGERS:
            return f"the trigger is {self.trigger}, it is one of {', '.join(TRIGGERS)}"
        launch = plan.launch(self.launch)
        if launch.early:
            return f"{self.launch} begins early already"
        if self.trigger == "end" and launch.tile.order.kind != "static":
            return f"{launch.tile.order.workers} resident blocks of {self.launch} walk tiles: their trigger is start"
        return None

    def rewrite(self, plan: Plan, target: Target) -> Plan:
        return plan.with_launch(replace(plan.launch(self.launch), early=True, trigger=cast(Trigger, self.trigger)))
