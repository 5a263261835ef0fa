"""cut: later works of a launch move to a launch of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from emmy.ir.beside import leads
from emmy.ir.moves.base import Move, Site, refuse_path, register
from emmy.ir.moves.gpu_tiles import product_of
from emmy.ir.moves.row_loops import rows_only
from emmy.ir.plan import Launch, Plan, Tile, folds_results
from emmy.ir.target import Target


@register
@dataclass(frozen=True)
class Cut(Move):
    """cut(Y): Y and the works after it run in a second launch, which reads what the first one stored.

    before:  k0: C ..., Y = f(C)       after:   k0: C ...        k1: Y = f(C)
    """

    out: str
    name: ClassVar[str] = "cut"
    phase: ClassVar[int] = 8
    commutes: ClassVar[bool] = True

    @classmethod
    def sites(cls, plan: Plan, target: Target) -> Iterator[Site]:
        """Not between sums that are folded side by side: what they share would be brought twice."""
        p = plan.program
        for la in () if rows_only(plan, target) else plan.launches:
            for w in la.tile.works[1:]:
                move, statistic = cls(la.name, None, w.stage), folds_results(p, la.tile.works, p.stage(w.stage))
                due = statistic and not target.is_cpu and product_of(plan, la) is not None
                if leads(p, la.tile, w.stage) and move.refuse(plan, target) is None:
                    yield Site(move, mandatory=due)  # blocks share out the axis it folds: this, or splitk

    def refuse(self, plan: Plan, target: Target) -> str | None:
        missing = refuse_path(self, plan)
        if missing:
            return missing
        la = plan.launch(self.launch)
        stages = [w.stage for w in la.tile.works]
        if self.out not in stages[1:]:
            return f"{self.launch} computes {', '.join(stages)}; cut takes one that is not the first, got {self.out}"
        if not la.tile.is_plain:
            return f"{self.launch} has {len(la.tile.nest)} loops and {len(la.tile.channels)} channels: cut comes before tile-level moves"
        return None

    def rewrite(self, plan: Plan, target: Target) -> Plan:
        la = plan.launch(self.launch)
        i = [w.stage for w in la.tile.works].index(self.out)
        new = Launch(f"k{len(plan.launches)}", Tile(la.tile.works[i:]), (self.launch,))
        return plan.with_launch_after(replace(la, tile=replace(la.tile, works=la.tile.works[:i])), new)
