"""pdl: a launch begins while the one before it in the stream still runs, and fetches parameters meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from emmy.ir.moves.base import Move, Site, legal_sites, refuse_path, register
from emmy.ir.moves.gpu_tiles import missing_loops, product_of
from emmy.ir.moves.unroll import Unroll
from emmy.ir.plan import Plan
from emmy.ir.target import Target


@register
@dataclass(frozen=True)
class Pdl(Move):
    """pdl(): programmatic dependent launch. Blocks start as soon as those of the launch before leave room for them.

    before:  k0 | launch gap | k1: fill A and B, compute, store
    after:   k0 ...
                k1: fill B, which is constant | k0 has ended | fill A, compute, store

    The wait and what may come before it are derived from `Value.constant` (`emmy.codegen.sync`). The launch also lets the
    next one begin, at its own start: that takes effect when all its blocks have begun, so that it never takes room from
    them, and only for a launch that is early too (PTX ISA, Parallel Synchronization and Communication Instructions:
    griddepcontrol). Saying so behind the last fetch was never faster (measured on an H200, `docs/h200.md`).

    A launch before it in the plan lets it begin too, early itself or not. Searched for launches that wait for others of
    their plan: what it brings there is the op's. Of a first launch it is a part of the gap to whatever runs before: an op
    measured back to back with itself would be credited with an overlap that the stock kernel beside it does not get.
    Whoever runs a chain adds that to finished schedules: `emmy.api.with_pdl`.
    """

    name: ClassVar[str] = "pdl"
    phase: ClassVar[int] = 70
    commutes: ClassVar[bool] = True

    @classmethod
    def sites(cls, plan: Plan, target: Target) -> Iterator[Site]:
        later = tuple(cls(la.name, None) for la in plan.launches if la.depends_on)
        return legal_sites(later if later and not _more_is_due(plan, target) else (), plan, target)

    def refuse(self, plan: Plan, target: Target) -> str | None:
        missing = refuse_path(self, plan)
        if missing:
            return missing
        if not target.can("pdl"):
            return (
                f"{target.name} starts a launch when those before it have ended (griddepcontrol needs sm_90 or later)"
            )
        if plan.launch(self.launch).early:
            return f"{self.launch} begins early already"
        return None

    def rewrite(self, plan: Plan, target: Target) -> Plan:
        return plan.with_launch(replace(plan.launch(self.launch), early=True))


def _more_is_due(plan: Plan, target: Target) -> bool:
    """Whether a search must still choose something else, so that the plan would have no code: this move is the last."""
    products = ((la, product_of(plan, la)) for la in plan.launches)
    bare = any(s is not None and not la.tile.work(s.out).atoms for la, s in products)
    return bare or bool(missing_loops(plan, target)) or any(x.mandatory for x in Unroll.sites(plan, target))
