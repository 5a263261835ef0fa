"""prefetch: what a tile's finished elements are made with comes to the last-level cache while its sums are still made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from emmy.ir.gpu import TRANSFER_BYTES, transfer_bytes, trips
from emmy.ir.moves.base import OPEN, Knob, Move, Site, put, refuse_path, register
from emmy.ir.plan import Asked, Launch, Plan
from emmy.ir.target import Target


@register
@dataclass(frozen=True)
class Prefetch(Move):
    """prefetch(R,30): after 30 fills of its rings, a tile asks for its block of R, which waits in the last-level cache then.

    before:  serial k:60                     after:   serial k:60
               A.smem <- A[128,64] ...                  A.smem <- A[128,64] ...
             Y = C + R  # R from memory                 R.cache <- R[128,256]  with fill 30
                                                      Y = C + R  # R from the cache

    Whoever fills the rings asks the copy engine, which leaves out what lies over an edge (PTX ISA: cp.async.bulk.prefetch.tensor).
    It is a hint: nobody waits, no answer changes. The fill says when: late enough that the first fills come sooner, early
    enough that memory has answered before the sums are done. A search is offered it for values that are read once, a residual; a bias
    is in the cache after the first tiles. Refuses tiles without rings and rows of no multiple of 16 bytes.
    """

    value: str
    after: Knob
    name: ClassVar[str] = "prefetch"
    phase: ClassVar[int] = 59
    commutes: ClassVar[bool] = True

    @classmethod
    def sites(cls, plan: Plan, target: Target) -> Iterator[Site]:
        p = plan.program
        for la in plan.launches:
            made = [p.stage(w.stage) for w in la.tile.works if w.atoms]
            once = (v for v in finishing(plan, la) if any(set(p.value(v).axes) == set(s.axes) for s in made))
            for v in once:
                tried = _fills(plan, la)
                legal = tuple(n for n in tried if cls(la.name, None, v, n).refuse(plan, target) is None)
                if legal:
                    yield Site(cls(la.name, None, v, OPEN), (("after", legal),))

    def refuse(self, plan: Plan, target: Target) -> str | None:
        missing = refuse_path(self, plan)
        if missing:
            return missing
        la = plan.launch(self.launch)
        if not target.can("tma"):
            return f"{target.name} has no copy engine to ask for {self.value}; those of sm_90 and sm_120 take it"
        read = finishing(plan, la)
        if self.value not in read:
            return (
                f"{self.launch} finishes its elements with {', '.join(read) or 'nothing from memory'}, not {self.value}"
            )
        if any(x.value == self.value for x in la.tile.asked):
            return f"{self.value} is asked for already"
        at = la.tile.ring_loop
        if at is None:
            return f"{self.launch} has {len(la.tile.channels)} rings, none filled in a loop, with which to ask for {self.value}"
        v = plan.program.value(self.value)
        size = transfer_bytes(plan, la.tile.nest, self.value)
        if not 1 <= len(v.axes) <= 2 or size < TRANSFER_BYTES:
            return f"{self.value} has {len(v.axes)} axes and rows of {size} bytes at a time: the copy engine takes {TRANSFER_BYTES}"
        fills = trips(plan, la.tile.nest, at)
        if fills is None:
            return (
                f"tiles have 1..{plan.count(la.tile.nest, at)} fills over {la.tile.nest[at].axis}: none is always there"
            )
        if isinstance(self.after, int) and not 0 <= self.after < fills:
            return f"a tile has {fills} fills over {la.tile.nest[at].axis}: fill {self.after} is none of 0..{fills - 1}"
        return None

    def rewrite(self, plan: Plan, target: Target) -> Plan:
        assert isinstance(self.after, int)
        la = plan.launch(self.launch)
        asked = sorted((*la.tile.asked, Asked(self.value, self.after)), key=lambda x: x.value)
        return put(plan, la, replace(la.tile, asked=tuple(asked)))


def finishing(plan: Plan, la: Launch) -> tuple[str, ...]:
    """Values in memory that the launch's elementwise works read."""
    p, here = plan.program, {*(w.stage for w in la.tile.works), *(c.value for c in la.tile.channels)}
    stages = (p.stage(w.stage) for w in la.tile.works)
    return tuple(dict.fromkeys(v for s in stages if not s.reduces for v in s.reads if v not in here))


def _fills(plan: Plan, la: Launch) -> tuple[int, ...]:
    """When to ask: once the rings have been filled, in the middle, and last."""
    at = la.tile.ring_loop
    fills = None if at is None else trips(plan, la.tile.nest, at)
    if fills is None:
        return ()
    return tuple(sorted({min(max(c.depth for c in la.tile.channels), fills - 1), fills // 2, fills - 1}))
