"""streamk: resident blocks walk tiles, and of the last ones equal shares of their steps: none is idle while others end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

from emmy.ir.gpu import cluster_size
from emmy.ir.moves.base import OPEN, Knob, Move, Site, put, refuse_path, register
from emmy.ir.moves.gpu_tiles import for_one
from emmy.ir.moves.stage import contracted
from emmy.ir.plan import AGENTS, Launch, Plan
from emmy.ir.program import swapped
from emmy.ir.target import Target

_STEPS = 1 << 31  # what a position among all steps may reach
_LEAST = 2  # steps of a worker below which a search need not look: each share would be mostly sums handed over


@register
@dataclass(frozen=True)
class StreamK(Move):
    """streamk(132): 132 blocks walk tiles in rounds; less than two rounds before the end, equal shares of all steps along k.

    before:  k0: grid m:16 n:25  # 400 tiles of 60 steps      after:   streamk(132): 2 tiles each, then 61 or 62 steps
                 serial k:60

    A block whose share does not begin its first tile leaves its sums; the block whose share begins the tile adds them up in
    the order of k and finishes it (Osama et al., "Stream-K", PPoPP 2023). It waits for others, so all must be resident:
    there are at most as many as multiprocessors. Refuses clusters, loops beside one along k, and tiles of several sums.
    """

    workers: Knob
    name: ClassVar[str] = "streamk"
    phase: ClassVar[int] = 46

    @classmethod
    def sites(cls, plan: Plan, target: Target) -> Iterator[Site]:
        """Where roles make the tiles, which come to no whole number for each multiprocessor."""
        for la in plan.launches:
            move = cls(la.name, None, target.n_sms)
            if not la.tile.roles or for_one(plan, la, target) or move.refuse(plan, target) is not None:
                continue
            tiles = _tiles(plan, la)
            if tiles % target.n_sms and tiles * steps_of_tile(plan, la) >= _LEAST * target.n_sms:
                yield Site(cls(la.name, None, OPEN), (("workers", (target.n_sms,)),))

    def refuse(self, plan: Plan, target: Target) -> str | None:
        missing = refuse_path(self, plan)
        if missing:
            return missing
        la = plan.launch(self.launch)
        t = la.tile
        if target.is_cpu or t.n_block_loops == 0:
            return f"{self.launch} has {t.n_block_loops} loops over blocks on {target.name}: there are no tiles to walk"
        if t.order.kind != "static":
            return f"{self.launch} is {t.order.kind} already, with {t.order.workers} workers"
        together = cluster_size(plan, t.nest)
        if together > 1:
            return f"clusters of {together} blocks make tiles of {self.launch} in step: streamk would part them"
        if isinstance(self.workers, int) and not 1 <= self.workers <= target.n_sms:
            return f"{self.workers} workers wait for one another: {target.name} certainly has room for 1..{target.n_sms} at once"
        return self._refuse_works(plan, la) or self._refuse_loops(plan, la)

    def _refuse_works(self, plan: Plan, la: Launch) -> str | None:
        first, *others = (plan.program.stage(w.stage) for w in la.tile.works)
        folding = [s.out for s in (first, *others) if s.reduces]
        if folding != [first.out] or la.tile.works[0].combine:
            return f"{la.name} has {len(folding)} sums among {len(others) + 1} works: streamk takes one, made first, not combined"
        if plan.workspace(first.out):
            return f"{first.out} is left in {plan.workspace(first.out).parts} parts already: streamk shares whole sums"  # type: ignore[union-attr]
        if swapped(first):
            return f"sums of {first.out} lie transposed: streamk hands them over as 1 thread holds them"
        loose = [v for v in contracted(plan, la) if not la.tile.channel(v)]
        if loose or not contracted(plan, la):
            return f"{', '.join(loose) or first.out} has no channel: streamk needs the operands of {first.out} in rings (stage first)"
        return None

    def _refuse_loops(self, plan: Plan, la: Launch) -> str | None:
        t, p = la.tile, plan.program
        folded, blocks = p.stage(t.works[0].stage).folded, t.n_block_loops
        ring, inner = t.nest[blocks : blocks + 1], t.nest[blocks + 1 :]
        if not ring or ring[0].level != "serial" or ring[0].axis not in folded or len(folded) > 1:
            inside = f"{len(t.nest) - blocks} loops inside a block, none first over {', '.join(folded)} in time"
            return f"{la.name} has {inside}: streamk shares its steps"
        odd = next((x for x in inner if x.level not in AGENTS or x.axis in folded), None)
        if odd:
            return f"the {odd.level} loop over {odd.axis} in pieces of {odd.step} stands inside the one that streamk shares out"
        if not isinstance(p.dim(ring[0].axis), int):
            return f"{ring[0].axis} has 1..{plan.extent((), ring[0].axis)} elements: tiles need one number of steps"
        late = next((c for c in t.channels if c.at != blocks), None)
        if late:
            return f"{late.value} is filled in loop {late.at}, not in loop {blocks} over {ring[0].axis}, of which blocks have shares"
        steps = _tiles(plan, la) * steps_of_tile(plan, la)
        return f"{steps} steps in all, their numbers have 32 bits" if steps >= _STEPS else None

    def rewrite(self, plan: Plan, target: Target) -> Plan:
        assert isinstance(self.workers, int)
        la = plan.launch(self.launch)
        return put(plan, la, replace(la.tile, order=replace(la.tile.order, kind="streamk", workers=self.workers)))


def _tiles(plan: Plan, la: Launch) -> int:
    return prod(plan.count(la.tile.nest, i) for i in range(la.tile.n_block_loops))


def whole_rounds(tiles: int, workers: int) -> int:
    """Tiles that each worker makes whole, one in each round; what is left is one round and what does not make another."""
    return max(tiles // workers - 1, 0)


def steps_of_tile(plan: Plan, la: Launch) -> int:
    """Steps along the folded axis that each tile of a launch takes: iterations of the first loop inside a block."""
    return plan.count(la.tile.nest, la.tile.n_block_loops)
