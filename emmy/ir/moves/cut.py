"""cut: later works of a launch move to a launch of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

from emmy.ir.beside import leads
from emmy.ir.moves.base import Move, Site, refuse_path, register
from emmy.ir.moves.gpu_tiles import cuts_are_due, makes_on_the_way, product_of, unjoined
from emmy.ir.moves.lifted_tiles import lifted
from emmy.ir.moves.row_loops import rows_only
from emmy.ir.on_the_way import made_here, rides
from emmy.ir.plan import Launch, Plan, Tile, Work, folds_results
from emmy.ir.program import Stage
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
        """Not between sums that are folded side by side: what they share would be brought twice.

        On a GPU, blocks share out the axis that a statistic of results folds: this, or splitk. An operand that is made in the
        launch of its product is cut off, or the product, unless lanes make it on the way.
        """
        p = plan.program
        if rows_only(plan, target) or (not target.is_cpu and unjoined(plan)):
            return
        for la in plan.launches:
            product = None if target.is_cpu else product_of(plan, la)
            for before, w in pairwise(la.tile.works):
                move, statistic = cls(la.name, None, w.stage), folds_results(p, la.tile.works, p.stage(w.stage))
                if not target.is_cpu and _under_lift(plan, la, w):
                    continue
                due = product is not None and (statistic or cuts_are_due(plan, la, target))
                if not leads(p, la.tile, w.stage) or move.refuse(plan, target) is not None:
                    continue
                if target.is_cpu or move._likely(plan, la, product, p.stage(before.stage), target):
                    yield Site(move, mandatory=due)

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

    def _likely(self, plan: Plan, la: Launch, product: Stage | None, before: Stage, target: Target) -> bool:
        """Whether a GPU may gain by the cut; `before`: the stage right before it.

        Elements stay in registers from one stage to the next, but for an epilogue, which may leave a product's registers to it.
        Where a product's operand is made in its launch, the product is cut off, or what lanes can make on the way to it.
        """
        s = plan.program.stage(self.out)
        if product is None:
            return not (before.out in s.reads and before.axes == s.axes)
        made = made_here(plan, la, product)
        if not made:
            return True
        if s not in made:
            whole = all(plan.program.is_input(v) or not plan.arrives(la, v) for x in made for v in x.reads)
            return s == product and whole and not rides(plan, la, product)
        after = self.rewrite(plan, target)
        rest = next(x for x in after.launches if any(w.stage == product.out for w in x.tile.works))
        return makes_on_the_way(after, rest, product, target)


def _under_lift(plan: Plan, la: Launch, w: Work) -> bool:
    """Whether a work folds by a lift, or is before one that does: a GPU keeps what a lift reads in registers."""
    s = lifted(plan, la)
    return s is not None and la.tile.works.index(w) <= la.tile.works.index(la.tile.work(s.out))
