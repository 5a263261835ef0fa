"""specialize, persist, pingpong: who fills, who computes, and how tiles are dealt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

from emmy.ir.gpu import GROUP, WARP, block_shape, by_groups, cluster_size, ring_bytes, sharing_blocks, warps
from emmy.ir.moves.base import OPEN, Knob, Move, Site, legal_sites, put, refuse_ahead, refuse_path, register
from emmy.ir.moves.gpu_tiles import for_one
from emmy.ir.moves.lifted_tiles import lifted, refuse_lift
from emmy.ir.moves.stage import contracted
from emmy.ir.plan import Plan, Role
from emmy.ir.target import Target

_THREADS = 128  # of a warpgroup
# PTX ISA: setmaxnreg takes multiples of 8 in 24..256; two registers are kept back.
_SETMAXNREG = tuple(range(24, 249, 8))
_FILLING, _WORKING = 32, 240  # registers of a thread that fills rings, at least, and of one that computes, at most


@register
@dataclass(frozen=True)
class Specialize(Move):
    """specialize(2,40,232): one producer warpgroup fills every channel, two consumer warpgroups compute.

    before:  every agent fills and computes      after:   role producer warpgroup(1) regs 40: copies
                                                          role consumer warpgroup(2) regs 232: C

    specialize(2,0,0) has one producer warp instead, and leaves registers as they were dealt at launch.
    """

    agents: Knob
    producer_regs: Knob
    consumer_regs: Knob
    name: ClassVar[str] = "specialize"
    phase: ClassVar[int] = 45

    @classmethod
    def sites(cls, plan: Plan, target: Target) -> Iterator[Site]:
        """As many consumers as the nest has warpgroups, or two for tiles that are made by one.

        With a producer warp, or a warpgroup that gives registers away.
        """
        for la in plan.launches:
            alone = for_one(plan, la, target)
            if not (alone or by_groups(la.tile.nest)) or not all(la.tile.channel(v) for v in contracted(plan, la)):
                continue
            groups = 2 if alone else warps(plan, la.tile.nest) // GROUP
            fill, work = _dealt(groups, target)
            ways: tuple[tuple[int, int], ...] = (
                ((0, 0), (fill, work)) if groups > 1 else ((0, 0),)
            )  # one begins with as many as it can use
            over = lifted(plan, la)
            if over is not None:
                ways = tuple(
                    x for x in ways if refuse_lift(plan, la, over, "wgmma", x[1] or _even(groups, target)) is None
                )
            legal = [x for x in ways if cls(la.name, None, groups, *x).refuse(plan, target) is None]
            if legal:
                filling, working = (tuple(sorted({x[i] for x in legal})) for i in (0, 1))
                knobs = (("agents", (groups,)), ("producer_regs", filling), ("consumer_regs", working))
                yield Site(cls(la.name, None, OPEN, OPEN, OPEN), knobs, mandatory=alone)

    def refuse(self, plan: Plan, target: Target) -> str | None:
        missing = refuse_path(self, plan)
        if missing:
            return missing
        la = plan.launch(self.launch)
        if not target.can("setmaxnreg"):
            return f"{target.name} cannot move registers between warpgroups (setmaxnreg)"
        ahead = refuse_ahead(self, la)
        if ahead:
            return ahead
        if not la.tile.channels or la.tile.roles:
            found = f"{len(la.tile.channels)} channels and {len(la.tile.roles)} roles"
            return f"{self.launch} has {found}: specialize needs channels (stage first) and no roles"
        wrong = [c.value for c in la.tile.channels if c.transport != "tma"]
        if wrong:
            return f"{', '.join(wrong)}: a producer of its own fills by tma only"
        if isinstance(self.agents, int) and isinstance(self.producer_regs, int) and isinstance(self.consumer_regs, int):
            if self.agents < 1:
                return f"{self.agents} consumer warpgroups: at least 1 is needed"
            if not self.producer_regs and not self.consumer_regs:
                return None
            for n in (self.producer_regs, self.consumer_regs):
                if n not in _SETMAXNREG:
                    return f"{n} registers a thread: multiples of 8 in {_SETMAXNREG[0]}..{_SETMAXNREG[-1]} are allowed"
            used, quota = self.producer_regs + self.agents * self.consumer_regs, _quota(self.agents, target)
            if used > quota:
                return f"{used} registers for a thread of each warpgroup, {self.agents + 1} warpgroups of {target.name} begin with {quota}"
        return None

    def rewrite(self, plan: Plan, target: Target) -> Plan:
        assert (
            isinstance(self.agents, int) and isinstance(self.producer_regs, int) and isinstance(self.consumer_regs, int)
        )
        la = plan.launch(self.launch)
        works = tuple(w.stage for w in la.tile.works)
        roles = (
            Role("producer", 1, "warpgroup" if self.producer_regs else "warp", self.producer_regs, ()),
            Role("consumer", self.agents, "warpgroup", self.consumer_regs, works),
        )
        channels = tuple(replace(c, src="producer", dst=("consumer",)) for c in la.tile.channels)
        return put(plan, la, replace(la.tile, roles=roles, channels=channels))


def _dealt(groups: int, target: Target) -> tuple[int, int]:
    """Registers of a producer's thread and of a consumer's, when the consumers get all that they can use."""
    quota = _quota(groups, target)
    work = min(_WORKING, (quota - _FILLING) // groups // 8 * 8)
    return min(40, (quota - groups * work) // 8 * 8), work


def _even(groups: int, target: Target) -> int:
    """Registers of every thread of groups of warps with a warp that fills, of which the fullest quarter has one more."""
    return min(target.max_regs_thread, target.regs_sm // 4 // ((groups + 1) * WARP) // 8 * 8)


def _quota(groups: int, target: Target) -> int:
    """Registers that a thread of each of groups + 1 warpgroups have together: dealt evenly at launch, eight at a time."""
    return (groups + 1) * min(_SETMAXNREG[-1], target.regs_sm // _THREADS // (groups + 1) // 8 * 8)


@register
@dataclass(frozen=True)
class Persist(Move):
    """persist(132): 132 blocks walk all tiles.

    before:  k0: grid m:32 n:32  # 1024 blocks      after:   1024 tiles, persistent(132)
    """

    workers: Knob
    name: ClassVar[str] = "persist"
    phase: ClassVar[int] = 46

    @classmethod
    def sites(cls, plan: Plan, target: Target) -> Iterator[Site]:
        """Where a producer could fill rings for the next tile while this one is finished, and there is a next tile."""
        for la in plan.launches:
            t = la.tile
            tiles = prod(plan.count(t.nest, i) for i in range(t.n_block_loops))
            together = cluster_size(plan, t.nest)
            workers = tuple(n for n in (target.n_sms, 2 * target.n_sms) if 0 < n < tiles and n % together == 0)
            if t.roles and workers and cls(la.name, None, workers[0]).refuse(plan, target) is None:
                yield Site(cls(la.name, None, OPEN), (("workers", workers),), mandatory=for_one(plan, la, target))

    def refuse(self, plan: Plan, target: Target) -> str | None:
        missing = refuse_path(self, plan)
        if missing:
            return missing
        la = plan.launch(self.launch)
        if la.tile.order.kind != "static":
            return f"{self.launch} is {la.tile.order.kind} already, with {la.tile.order.workers} workers"
        if sharing_blocks(plan, la.tile) > 1:
            return f"blocks of {self.launch} form clusters, which exchange sums of one tile: they do not walk tiles"
        together = cluster_size(plan, la.tile.nest)
        if isinstance(self.workers, int) and self.workers % together:
            return f"{self.workers} workers are not whole clusters of {together} blocks, which walk tiles together"
        if la.tile.n_block_loops == 0 or target.is_cpu:
            return f"{self.launch} has {la.tile.n_block_loops} loops over blocks on {target.name}: nothing to walk persistently"
        if isinstance(self.workers, int) and self.workers < 1:
            return f"{self.workers} workers: at least 1 is needed"
        return None

    def rewrite(self, plan: Plan, target: Target) -> Plan:
        assert isinstance(self.workers, int)
        la = plan.launch(self.launch)
        return put(plan, la, replace(la.tile, order=replace(la.tile.order, kind="persistent", workers=self.workers)))


@register
@dataclass(frozen=True)
class PingPong(Move):
    """pingpong(): n consumer warpgroups become n roles of one; role i takes tiles i mod n, a turn token orders their loops.

    before:  role consumer warpgroup(2)      after:   role consumer0 ... takes tiles 0 mod 2;  role consumer1 ... 1 mod 2

    One finishes and stores its tile while another keeps the matrix units busy. Each holds a whole tile by itself.
    """

    name: ClassVar[str] = "pingpong"
    phase: ClassVar[int] = 47
    mandatory: ClassVar[bool] = True

    @classmethod
    def sites(cls, plan: Plan, target: Target) -> Iterator[Site]:
        return legal_sites((cls(la.name, None) for la in plan.launches), plan, target)

    def refuse(self, plan: Plan, target: Target) -> str | None:
        missing = refuse_path(self, plan)
        if missing:
            return missing
        t = plan.launch(self.launch).tile
        consumer = next((r for r in t.roles if r.name == "consumer"), None)
        if consumer is None or consumer.agents < 2:
            return f"ping-pong needs 2 consumer warpgroups, got {consumer.agents if consumer else 0}"
        if t.order.kind != "persistent":
            return f"tiles of {self.launch} are {t.order.kind}: persist first"
        if cluster_size(plan, t.nest) > 1:
            return f"{cluster_size(plan, t.nest)} blocks fill the rings of {self.launch} together: consumers share tiles there"
        if any(x.level == "warpgroup" for x in t.nest):
            return f"{consumer.agents} warpgroups already share one tile"
        after = self.rewrite(plan, target).launch(self.launch).tile
        wider = (
            c.value
            for c in t.channels
            if c.layout == "panels" and block_shape(plan, after, c) != block_shape(plan, t, c)
        )
        if (value := next(wider, None)) is not None:
            return f"consumers of whole tiles read more of {value} than its blocks have: those overlap, panels do not"
        rings = sum(ring_bytes(plan, after, c) for c in after.channels)  # an instruction reads whole rows of a swizzle
        if rings > target.tile_bytes:
            return f"the rings take {rings} bytes of the {target.tile_bytes} a block of {target.name} has"
        return None

    def rewrite(self, plan: Plan, target: Target) -> Plan:
        la = plan.launch(self.launch)
        t = la.tile
        old = next(r for r in t.roles if r.name == "consumer")
        dealt = tuple(replace(old, name=f"consumer{i}", agents=1, deal=(i, old.agents)) for i in range(old.agents))
        roles = tuple(r for r in t.roles if r != old) + dealt
        channels = tuple(replace(c, dst=tuple(r.name for r in dealt)) for c in t.channels)
        return put(plan, la, replace(t, order=replace(t.order, kind="pingpong"), roles=roles, channels=channels))
