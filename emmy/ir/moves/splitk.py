"""splitk: blocks share one output tile; a second launch combines their partial states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

from emmy.ir.beside import beside
from emmy.ir.moves.base import OPEN, Knob, Move, Site, refuse_beside, refuse_late_loop, refuse_path, register
from emmy.ir.moves.gpu_tiles import (
    cuts_are_due,
    missing_loops,
    precedes_product,
    product_of,
    statistic_columns,
    unjoined,
)
from emmy.ir.moves.lifted_tiles import feeds_lift, lifted
from emmy.ir.moves.row_loops import rows_only
from emmy.ir.on_the_way import made_here
from emmy.ir.plan import BLOCK_LEVELS, Launch, Loop, Plan, Tile, Work, Workspace, folds_results, refuse_loops
from emmy.ir.program import Stage, upper
from emmy.ir.target import Target

_PARTS = (2, 3, 4, 6, 8, 16)
_MANY_PARTS = (24, 32, 48, 64)  # of keys that a few queries see: there are few other blocks
_WORKSPACE_BYTES = 256 << 20


@register
@dataclass(frozen=True)
class SplitK(Move):
    """splitk(C,4): four blocks share one output tile; each leaves the monoid's state, a second launch combines and finishes.

    before:  k0: grid m n              after:   k0: grid m n k:4
                   C ..., Y = f(C)              k1: C = finish(combine over 4 parts), Y = f(C)
                                                workspace C over k: 4 parts

    Sums that are folded side by side are shared together. The combining order is fixed, so results are repeatable. Refuses
    when the axis is split already, when channels are placed, when another work of the launch folds the axis, or when the
    partial states exceed the workspace.
    """

    out: str
    parts: Knob
    name: ClassVar[str] = "splitk"
    phase: ClassVar[int] = 10

    @classmethod
    def sites(cls, plan: Plan, target: Target) -> Iterator[Site]:
        for la in () if rows_only(plan, target) else plan.launches:
            for w in la.tile.works:
                s = plan.program.stage(w.stage)
                if not s.reduces or la.tile.nest or not (target.is_cpu or _worth(plan, la, s, target)):
                    continue
                results = not target.is_cpu and folds_results(plan.program, la.tile.works, s)
                tried = _by_columns(plan, la, s, target) if results else _PARTS
                if not target.is_cpu and lifted(plan, la) is s:
                    tried = (*_PARTS, *_MANY_PARTS)
                legal = tuple(p for p in tried if cls(la.name, None, w.stage, p).refuse(plan, target) is None)
                if legal:
                    due = results and any(x.steps == () for x in missing_loops(plan, target) if x.launch == la.name)
                    yield Site(cls(la.name, None, w.stage, OPEN), (("parts", legal),), mandatory=due)

    def refuse(self, plan: Plan, target: Target) -> str | None:
        missing = refuse_path(self, plan)
        if missing:
            return missing
        la = plan.launch(self.launch)
        w = next((x for x in la.tile.works if x.stage == self.out), None)
        if w is None or w.combine or not plan.program.stage(self.out).reduces:
            return f"{self.launch} computes no {self.out} that folds an axis"
        axis = plan.program.stage(self.out).folded[0]
        late = refuse_late_loop(self, la)
        if late:
            return late
        if any(x.axis == axis or x.level not in BLOCK_LEVELS for x in la.tile.nest):
            return f"{self.launch} has {len(la.tile.nest)} loops, one inside a block or over {axis}: splitk comes before them"
        if la.tile.channels:
            return f"{len(la.tile.channels)} channels are placed: splitk comes before stage"
        if reason := refuse_beside(self, plan, self.out):
            return reason
        others = [x.stage for x in la.tile.works if not x.combine and axis in plan.program.stage(x.stage).folded]
        others = others[: others.index(self.out)]
        if others:
            return f"{', '.join(others)} folds {axis} in {self.launch} too: only one sum can be shared by blocks, cut first"
        return self._refuse_parts(plan, axis, target) or self._refuse_loops(plan, target)

    def _refuse_loops(self, plan: Plan, target: Target) -> str | None:
        """The same for any number of parts: which works the new loop runs over, and what they leave for one another."""
        after = replace(self, parts=1).rewrite(plan, target)
        return next((r for la in after.launches if (r := refuse_loops(after, la))), None)

    def _refuse_parts(self, plan: Plan, axis: str, target: Target) -> str | None:
        if not isinstance(self.parts, int):
            return None
        size = upper(plan.program.dim(axis))
        step = _part(size, max(self.parts, 1), target)
        if not 2 <= self.parts <= size or -(-size // step) != self.parts:
            return f"{axis} has {size}, which does not make {self.parts} parts of equal step"
        need = 0
        for stage in beside(plan.program, plan.launch(self.launch).tile, self.out):
            s = plan.program.stage(stage)
            assert s.monoid is not None
            for _, axes in s.monoid.components(s):
                need += 4 * self.parts * prod(upper(plan.program.dim(a)) for a in axes)
        if need > _WORKSPACE_BYTES:
            return f"{self.parts} partial states take {need} bytes, the workspace has {_WORKSPACE_BYTES}"
        return None

    def rewrite(self, plan: Plan, target: Target) -> Plan:
        assert isinstance(self.parts, int)
        la = plan.launch(self.launch)
        axis = plan.program.stage(self.out).folded[0]
        shared = beside(plan.program, la.tile, self.out)
        i = [w.stage for w in la.tile.works].index(shared[-1])
        step = _part(upper(plan.program.dim(axis)), self.parts, target)
        combined = (Work(x, combine=True) for x in shared)
        last = Launch(f"k{len(plan.launches)}", Tile((*combined, *la.tile.works[i + 1 :])), (self.launch,))
        nest = (*la.tile.nest, Loop(axis, target.block_level, step))
        first = replace(la, tile=replace(la.tile, works=la.tile.works[: i + 1], nest=nest))
        workspaces = (*plan.workspaces, *(Workspace(x, axis, self.parts) for x in shared))
        return replace(plan.with_launch_after(first, last), workspaces=workspaces)


def _worth(plan: Plan, la: Launch, s: Stage, target: Target) -> bool:
    """Whether a GPU may gain by sharing out what the stage folds."""
    return not feeds_lift(plan, la, s) and (lifted(plan, la) is s or _likely(plan, la, target))


def _likely(plan: Plan, la: Launch, target: Target) -> bool:
    """Whether a GPU's blocks may gain by sharing a launch's sums: not those of rows for a product that follows, nor sums whose
    operand lanes make on the way; and other moves may come first."""
    if unjoined(plan) or cuts_are_due(plan, la, target):
        return False
    product = product_of(plan, la)
    if product is not None:
        return not made_here(plan, la, product)
    return not precedes_product(plan, la)


def _by_columns(plan: Plan, la: Launch, s: Stage, target: Target) -> tuple[int, ...]:
    """Parts that are the columns of a block each, for a fold of what the launch makes."""
    size, columns = upper(plan.program.dim(s.folded[0])), statistic_columns(plan, la, s)
    parts = {-(-size // x) for x in columns}
    return tuple(sorted(n for n in parts if _part(size, n, target) in columns))


def _part(size: int, parts: int, target: Target) -> int:
    """How much of the axis one part folds: an even share; on a GPU whole pieces of what its atoms and copies take."""
    share = -(-size // parts)
    if target.is_cpu:
        return share
    whole = 64 if share >= 256 else 16
    return -(-share // whole) * whole
