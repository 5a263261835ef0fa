"""finish: the last block of those that leave parts of a statistic combines all, so that no launch has to come behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from emmy.ir.moves.base import Move, Site, legal_sites, refuse_path, register
from emmy.ir.plan import Launch, Plan, folds_results
from emmy.ir.program import SUM
from emmy.ir.target import Target

_BEGUN, _ADDED = "begun", "added"


@register
@dataclass(frozen=True)
class Finish(Move):
    """finish(S): of the blocks that share rows, the last to leave its part of S combines all parts, in order, and finishes S.

    before:  k0: Y, parts of S                     after:   k0: Y, parts of S, S by the last block of each row of tiles
             k1: S = finish(combine over parts)

    Where `combine` of a monoid runs is a choice like any other. Blocks count their parts in memory (PTX ISA: atom.acq_rel);
    nobody waits, parts are combined in one order whoever is last, and the last sets the count back, so that launches may be
    repeated. Comes right after splitk. Refuses parts of what is no statistic of the launch's own results.

    finish(S,begun): blocks are counted before their first tile instead, and it is the last to begin that combines. A part is
    then left with a mark in the same 8 bytes, so that nobody waits for what else a block has stored on its way to memory; only
    the block that combines waits, for parts of blocks that have begun.

    finish(S,added): nobody combines. The first to begin sets its rows of S to zero and says so, and blocks add their parts to S in
    memory when they have them (PTX ISA: red.relaxed), which nobody waits for. Additions come in any order, so that two runs may
    differ in the last bits of S, as they never do otherwise. Of f32 sums alone.
    """

    out: str
    when: str | None = None
    name: ClassVar[str] = "finish"
    phase: ClassVar[int] = 11
    commutes: ClassVar[bool] = True

    @classmethod
    def sites(cls, plan: Plan, target: Target) -> Iterator[Site]:
        left = [(la.name, w.stage) for la in plan.launches for w in la.tile.works if not w.combine]
        return legal_sites((cls(la, None, x, when) for la, x in left for when in (None, _BEGUN, _ADDED)), plan, target)

    def refuse(self, plan: Plan, target: Target) -> str | None:
        missing = refuse_path(self, plan)
        if missing:
            return missing
        la, space = plan.launch(self.launch), plan.workspace(self.out)
        if self.when not in (None, _BEGUN, _ADDED):
            return f"parts are combined by the last to leave one, the last that has {_BEGUN}, or {_ADDED}, not {self.when}: 3 ways"
        if target.is_cpu:
            return f"{target.name} has no blocks of threads: finish counts those that left their part of {self.out}"
        if space is None or all(w.combine or w.stage != self.out for w in la.tile.works):
            return f"{self.launch} leaves 0 parts of {self.out}: splitk({self.out},parts) comes before finish"
        if space.by_last:
            return f"the last block combines the {space.parts} parts of {self.out} already"
        if not folds_results(plan.program, la.tile.works, plan.program.stage(self.out)):
            return f"{self.out} is no statistic of what {self.launch} makes: its {space.parts} parts are as large as a tile each"
        if not isinstance(size := plan.program.dim(space.axis), int):
            return f"{space.axis} has {size.lo}..{size.hi} elements: the last block must know of how many parts it is the last"
        stage = plan.program.stage(self.out)
        if self.when == _ADDED and (
            stage.monoid != SUM or stage.dtype != "f32" or self.out not in plan.program.outputs
        ):
            kind, n = stage.monoid.name if stage.monoid else "no fold", len(plan.program.outputs)
            return f"memory adds f32 sums that leave the program: {self.out} is {stage.dtype}, {kind}, of {n} outputs"
        return self._refuse_launch(plan)

    def _refuse_launch(self, plan: Plan) -> str | None:
        """Why the launch that combines the parts cannot be left out."""
        behind = _combining(plan, self.out)
        others = [w.stage for w in behind.tile.works if w.stage != self.out]
        if others or not behind.tile.is_plain:
            made, loops = ", ".join((self.out, *others)), len(behind.tile.nest)
            return (
                f"{behind.name} makes {made} in {loops} loops: finish comes right after splitk, of what is alone there"
            )
        waiting = [x.name for x in plan.launches if behind.name in x.depends_on]
        newest = f"k{len(plan.launches) - 1}"
        if behind.name != newest or waiting:
            return f"{behind.name} is not the newest of {len(plan.launches)} launches, {newest}, or {len(waiting)} wait for it"
        return None

    def rewrite(self, plan: Plan, target: Target) -> Plan:
        launches = tuple(x for x in plan.launches if x != _combining(plan, self.out))
        marked, added = self.when == _BEGUN, self.when == _ADDED
        done = (replace(x, by_last=True, marked=marked, added=added) for x in plan.workspaces)
        spaces = (new if x.value == self.out else x for x, new in zip(plan.workspaces, done, strict=True))
        return replace(plan, launches=launches, workspaces=tuple(spaces))


def _combining(plan: Plan, value: str) -> Launch:
    return next(la for la in plan.launches for w in la.tile.works if w.combine and w.stage == value)
