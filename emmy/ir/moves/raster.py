"""raster: neighbouring blocks take neighbouring tiles in both directions, so that more of what they read is in the L2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from emmy.ir.moves.base import OPEN, Knob, Move, Site, put, refuse_path, register
from emmy.ir.moves.gpu_tiles import loops_are_due
from emmy.ir.moves.row_loops import rows_only
from emmy.ir.plan import Plan
from emmy.ir.target import Target

_GROUPS = (2, 4, 8, 16)


@register
@dataclass(frozen=True)
class Raster(Move):
    """raster(8): tiles come in groups of 8 rows of tiles; inside a group rows move fastest.

    before:  m0 n0, m0 n1, m0 n2, ...      after:   m0 n0, m1 n0, ... m7 n0, m0 n1, m1 n1, ...

    A wave of blocks then covers a nearly square part of the output instead of a few whole rows of it.
    """

    group: Knob
    name: ClassVar[str] = "raster"
    phase: ClassVar[int] = 30

    @classmethod
    def sites(cls, plan: Plan, target: Target) -> Iterator[Site]:
        if target.is_cpu or loops_are_due(plan, target) or rows_only(plan, target):
            return
        for la in plan.launches:
            if la.tile.channels or all(w.combine or not plan.program.stage(w.stage).reduces for w in la.tile.works):
                continue
            legal = tuple(g for g in _GROUPS if cls(la.name, None, g).refuse(plan, target) is None)
            if legal:
                yield Site(cls(la.name, None, OPEN), (("group", legal),))

    def refuse(self, plan: Plan, target: Target) -> str | None:
        missing = refuse_path(self, plan)
        if missing:
            return missing
        t = plan.launch(self.launch).tile
        if target.is_cpu:
            return f"{target.name} takes tiles in the order of its loops"
        if t.order.group > 1:
            return f"tiles of {self.launch} come in groups of {t.order.group} already"
        blocks = t.n_tile_loops
        if blocks < 2 or t.nest[blocks - 2].axis == t.nest[blocks - 1].axis:
            return f"{self.launch} has {blocks} loops over blocks: two over different axes are needed last"
        rows, columns = plan.count(t.nest, blocks - 2), plan.count(t.nest, blocks - 1)
        if isinstance(self.group, int) and not (2 <= self.group <= rows and columns > 1):
            return f"{self.launch} has {rows} x {columns} tiles, the group is {self.group}: 2..{rows} with 2 columns or more"
        return None

    def rewrite(self, plan: Plan, target: Target) -> Plan:
        assert isinstance(self.group, int)
        la = plan.launch(self.launch)
        return put(plan, la, replace(la.tile, order=replace(la.tile.order, group=self.group)))
