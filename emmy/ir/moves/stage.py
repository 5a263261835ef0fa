"""stage: a block of what a launch reads lives near the work, in a ring of slots that a transport refills."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from emmy.ir.dtype import size_bytes
from emmy.ir.expr import Read
from emmy.ir.gpu import (
    BOX_ROWS,
    PERIOD_ROWS,
    TRANSFER_BYTES,
    block_shape,
    by_groups,
    cluster_size,
    contracted_axes,
    long_axes,
    multiple,
    receivers,
    ring_bytes,
    shared_bytes,
    sharing_blocks,
    swizzled_bytes,
    transfer_bytes,
)
from emmy.ir.moves.base import OPEN, Knob, Move, Site, put, refuse_ahead, refuse_path, register
from emmy.ir.moves.gpu_tiles import engine_brings, for_one, loops_are_due
from emmy.ir.moves.lifted_tiles import lifted
from emmy.ir.moves.row_loops import rows_only
from emmy.ir.pages import paged
from emmy.ir.plan import BLOCK_LEVELS, SIDE, Channel, Launch, Placement, Plan
from emmy.ir.program import upper
from emmy.ir.target import Target

# transport -> (capability the target must have, space the slots live in, default layout)
TRANSPORTS: dict[str, tuple[str, str, str]] = {
    "pack": ("pack", "pack", "panel"),
    "ldg": ("ldg", "smem", "swizzle128"),
    "cp_async": ("cp_async", "smem", "swizzle128"),
    "tma": ("tma", "smem", "swizzle128"),
}
LAYOUTS: dict[str, tuple[str, ...]] = {
    "pack": ("panel",),
    "smem": ("swizzle128", "pad", "row", "panels"),
}  # by the slots' space
_DEPTHS = ((1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 5, 6, 8, 10, 12))  # worth trying: else, of tma
_RANK = 5  # dimensions that the copy engine knows (PTX ISA: cp.async.bulk.tensor)
_PANELS = "panels"  # the layout that one instruction fills
SELF = "all"  # the default role: every agent of the block


@register
@dataclass(frozen=True)
class Stage(Move):
    """stage(A,cp_async,3): A's block lives in a ring of 3 slots, refilled by the deepest loop in time over an axis of A.

    before:  serial k:60                          after:   serial k:60
               C[m,n] sum= A[m,k] * B[n,k]                   A.smem <- A[128,64]  cp_async depth 3
                                                             C[m,n] sum= ...

    Of a block of several swizzled panels of 128 bytes or less, tma brings each by itself, or with layout `panels` all by one
    instruction, for which the value is a row of such panels: rows must be made of whole ones, and a block has up to 256 rows.

    On a CPU `pack` copies the block once per refill into panels that the atom reads with unit stride, zero-padded at
    ragged edges; it needs no synchronisation. Refuses when the rings exceed the block's memory.
    """

    value: str
    transport: str
    depth: Knob
    layout: str | None = None
    name: ClassVar[str] = "stage"
    phase: ClassVar[int] = 40
    commutes: ClassVar[bool] = True

    @classmethod
    def sites(cls, plan: Plan, target: Target) -> Iterator[Site]:
        if rows_only(plan, target):
            return  # every element is read once, to where it is used
        if not target.is_cpu:
            yield from cls._gpu_sites(plan, target)
            return
        for la in plan.launches:
            if any(w.atoms for w in la.tile.works):
                continue
            for transport, (capability, _, _) in TRANSPORTS.items():
                if not target.can(capability):
                    continue
                for value in contracted(plan, la):
                    depths = (1,) if transport == "pack" else (1, 2, 3, 4, 5, 6)
                    legal = tuple(
                        d for d in depths if cls(la.name, None, value, transport, d).refuse(plan, target) is None
                    )
                    if legal and transport == "pack":
                        yield Site(cls(la.name, None, value, transport, 1))
                    elif legal:
                        yield Site(cls(la.name, None, value, transport, OPEN), (("depth", legal),))

    @classmethod
    def _gpu_sites(cls, plan: Plan, target: Target) -> Iterator[Site]:
        """Both operands by one transport in rings of one depth; ldg where rows are too odd for the others.

        Warpgroups' instructions read what the copy engine wrote without a fence between, and only it brings a block's fill to
        its neighbours; where it cannot bring a value's rows, threads do, for lanes that load it.
        """
        if loops_are_due(plan, target):
            return
        for la in plan.launches:
            values = sorted(v for v in contracted(plan, la) if not la.tile.channel(v))  # as a search orders them
            if not values or any(w.atoms for w in la.tile.works) or _shared(plan, la):
                continue
            first = next(iter(la.tile.channels), None)
            ways = _carriers(plan, la, values[0], target)
            if first is not None and first.transport in ways:
                ways = (first.transport,)
            found = False
            for transport in ways:
                if found and transport == "ldg":
                    break
                tried: tuple[int, ...] = _DEPTHS[transport == "tma"] if first is None else (first.depth,)
                if _once(plan, la, values[0]):
                    tried = (1,)
                for layout in (None, _PANELS) if transport == "tma" else (None,):
                    tried = cls._fitting(plan, la, target, values, transport, tried, layout)
                    if tried:
                        found = True
                        yield Site(
                            cls(la.name, None, values[0], transport, OPEN, layout), (("depth", tried),), mandatory=True
                        )
            if found:
                return  # each launch needs them, and sorted they come in this order

    @classmethod
    def _fitting(
        cls,
        plan: Plan,
        la: Launch,
        target: Target,
        values: list[str],
        transport: str,
        depths: tuple[int, ...],
        layout: str | None,
    ) -> tuple[int, ...]:
        """The depths, which rise, with which all values can be staged: what is too deep stays so with each slot more."""

        def is_too_deep(depth: int) -> bool:
            return not cls._all_fit(plan, la, target, values, transport, depth, layout)

        return depths[: bisect(depths, False, key=is_too_deep)]

    @classmethod
    def _all_fit(
        cls,
        plan: Plan,
        la: Launch,
        target: Target,
        values: list[str],
        transport: str,
        depth: int,
        layout: str | None = None,
    ) -> bool:
        """Whether every value can be staged so, one after another, the first in the layout."""
        for v in values:
            way = _carriers(plan, la, v, target)
            slots = 1 if _once(plan, la, v) else depth
            move = cls(la.name, None, v, transport if transport in way else way[0], slots, layout)
            layout = None
            if move.refuse(plan, target) is not None:
                return False
            plan = move.rewrite(plan, target)
        return True

    def refuse(self, plan: Plan, target: Target) -> str | None:
        missing = refuse_path(self, plan)
        return missing or self._refuse_words(plan, target) or self._refuse_place(plan, target)

    def _refuse_words(self, plan: Plan, target: Target) -> str | None:
        """Why there is no such value, transport or layout here."""
        la, p = plan.launch(self.launch), plan.program
        working = [p.stage(w.stage) for w in la.tile.works if not w.combine]
        read = dict.fromkeys(v for s in working for v in s.reads if plan.arrives(la, v))
        if self.value not in read:
            return f"{self.value} is not an input that {self.launch} reads; it reads {', '.join(read)}"
        if self.value in p.gathered:
            return f"{self.value} is read at computed positions: a block of it is no block of {len(p.value(self.value).axes)} axes"
        nest = la.tile.nest[: self._at(plan, la) + 1]
        for axis, other in sorted(p.moved.get(self.value, ())):
            if plan.extent(nest, axis) < upper(p.dim(axis)):
                return f"{self.value} is read along {other} too: a block needs all {p.dim(axis)} of {axis}, has {plan.extent(nest, axis)}"
        if self.transport not in TRANSPORTS or not target.can(TRANSPORTS[self.transport][0]):
            known = [t for t, (c, _, _) in TRANSPORTS.items() if target.can(c)]
            return f"{target.name} has no transport {self.transport}; it has {', '.join(known)}"
        if self.layout is not None and self.layout not in LAYOUTS[TRANSPORTS[self.transport][1]]:
            allowed = ", ".join(LAYOUTS[TRANSPORTS[self.transport][1]])
            return f"layout {self.layout} of {self.value} against {allowed}, which {self.transport} can fill"
        return None

    def _refuse_place(self, plan: Plan, target: Target) -> str | None:
        """Why its ring cannot stand in this tile."""
        la = plan.launch(self.launch)
        if la.tile.channel(self.value):
            return f"{self.value} is staged already, with depth {la.tile.channel(self.value).depth}"  # type: ignore[union-attr]
        ahead = refuse_ahead(self, la)
        if ahead:
            return ahead
        if la.tile.roles:
            return f"{self.launch} has {len(la.tile.roles)} roles already: stage comes before specialize"
        at = self._at(plan, la)
        parallel = next((x for x in la.tile.nest[: max(at, 0)] if x.level not in (*BLOCK_LEVELS, "serial")), None)
        if parallel:
            around = f"the loop over {parallel.axis} at level {parallel.level}"
            return f"the ring of {self.value} would turn inside {around}: agents would refill one slot with different blocks"
        if isinstance(self.depth, int):
            if self.depth < 1 or (self.depth > 1 and (at < 0 or la.tile.nest[at].level in BLOCK_LEVELS)):
                return f"{self.value} is filled once a tile: depth {self.depth} against 1"
            if self.depth > 1 and self.transport == "pack":
                return f"pack is not asynchronous: depth {self.depth} against 1"
            if self.depth > 2 and self.transport == "ldg":
                return f"ldg keeps one block of {self.value} in registers: depth {self.depth} against 2"
            reason = self._refuse_panels(plan, la) if self.layout == _PANELS else None
            reason = reason or self._refuse_transfer(plan, la) or self._refuse_block(plan, la, target)
            reason = reason or self._refuse_view(plan, la)
            return reason or self._refuse_memory(plan, la, target)
        return self._refuse_transfer(plan, la) or self._refuse_block(plan, la, target) or self._refuse_view(plan, la)

    def _refuse_view(self, plan: Plan, la: Launch) -> str | None:
        """Why the transport cannot find the rows of a view."""
        view = plan.program.view(self.value)
        if view is None:
            return None
        assert isinstance(view.body, Read)
        if view.body.along[-1] != view.axes[-1] or self.transport == "pack":
            return f"{self.value} is {view.body}: threads or the copy engine bring rows along its last axis, {self.transport} does not"
        if self.transport != "tma":
            return None
        page = paged(plan, la.tile, replace(self, depth=1)._channel(plan, la))
        if page is None or page.rows % PERIOD_ROWS:
            return f"{self.value} has {page.rows if page else 1} rows in a piece: tma brings multiples of {PERIOD_ROWS}"
        if self.layout == _PANELS:
            return f"{self.value} comes in boxes of {page.rows} rows: panels of a whole block are not made of them"
        rank = len(plan.program.value(view.body.value).axes)
        return f"{view.body.value} has {rank} axes, the copy engine knows {_RANK}" if rank > _RANK else None

    def _refuse_transfer(self, plan: Plan, la: Launch) -> str | None:
        """Why the transport cannot move the value's rows, as far as their length tells."""
        v = plan.program.value(self.value)
        if self.transport not in ("cp_async", "tma") or not v.axes:
            return None
        row = size_bytes(v.dtype) * multiple(plan.program.dim(v.axes[-1]))
        size = transfer_bytes(plan, la.tile.nest, self.value)
        if self.transport == "cp_async" and size < 4:
            return f"rows of {self.value} have {row} bytes, which {size} divides: cp_async moves 4, 8 or 16 at a time, ldg 2"
        if self.transport == "tma" and row % TRANSFER_BYTES:
            return f"rows of {self.value} have {row} bytes: tma needs a multiple of {TRANSFER_BYTES}"
        if self.transport == "tma" and self.layout == "pad":
            return "tma cannot leave the gaps of layout pad: swizzle128 or row"
        if self.transport == "tma" and len(v.axes) > _RANK:
            return f"{self.value} has {len(v.axes)} axes, the copy engine knows {_RANK}"
        return None

    def _refuse_block(self, plan: Plan, la: Launch, target: Target) -> str | None:
        """Why a block of the value is no matrix."""
        nest = la.tile.nest[: self._at(plan, la) + 1]
        long = long_axes(plan, nest, self.value)
        if target.is_cpu or len(long) < 2:
            return None
        sizes = ", ".join(f"{plan.extent(nest, a)} of {a}" for a in long)
        return f"a block of {self.value} has {sizes}; beside its last axis, one may have more than 1 position: split({long[0]},grid,1)"

    def _refuse_panels(self, plan: Plan, la: Launch) -> str | None:
        """Why one instruction cannot bring a block of several panels."""
        v, c = plan.program.value(self.value), self._channel(plan, la)
        most = _RANK - 1  # a dimension of the copy engine for each axis, and one for panels
        if c.transport != "tma" or not 2 <= len(v.axes) <= most:
            return f"{self.value} has {len(v.axes)} axes and comes by {c.transport}: tma brings panels of a value of 2 to {most} at once"
        rows, columns, together = block_shape(plan, la.tile, c)
        row = swizzled_bytes(rows, columns, size_bytes(v.dtype), together)
        panel = row // size_bytes(v.dtype)
        if columns <= panel or row <= TRANSFER_BYTES:
            return f"a block of {columns} columns of {self.value} has no panels to bring at once: swizzle128"
        whole, own = multiple(plan.program.dim(v.axes[-1])), plan.extent(la.tile.nest[: c.at + 1], v.axes[-1])
        if whole % panel or own % panel:
            return f"{self.value} has blocks of {own} columns, of a multiple of {whole}: no whole panels of {panel}"
        if rows > BOX_ROWS:
            return f"{rows} rows of {self.value} against {BOX_ROWS}, which an instruction can bring"
        blocks = receivers(plan, la.tile, c)
        if columns // panel % blocks:
            return f"{blocks} blocks cannot share {columns // panel} panels of {self.value} evenly"
        return None

    def _refuse_memory(self, plan: Plan, la: Launch, target: Target) -> str | None:
        new = self._channel(plan, la)
        rings = [c for c in (*la.tile.channels, new) if (c.transport == "pack") == (self.transport == "pack")]
        used = sum(ring_bytes(plan, la.tile, c) for c in rings)
        used += 0 if target.is_cpu else shared_bytes(plan, la.tile)
        if used > target.tile_bytes:
            return f"{self.value}: the rings take {used} bytes of the {target.tile_bytes} a block of {target.name} has"
        return None

    def _at(self, plan: Plan, la: Launch) -> int:
        axes = plan.program.value(self.value).axes
        in_time = [i for i, x in enumerate(la.tile.nest) if x.axis in axes and x.level in (*BLOCK_LEVELS, "serial")]
        return max(in_time, default=-1)

    def _channel(self, plan: Plan, la: Launch) -> Channel:
        assert isinstance(self.depth, int)
        layout = self.layout or TRANSPORTS[self.transport][2]
        return Channel(self.value, SELF, (SELF,), self.depth, self.transport, layout, self._at(plan, la))

    def rewrite(self, plan: Plan, target: Target) -> Plan:
        la = plan.launch(self.launch)
        c = self._channel(plan, la)
        place = Placement(self.value, "pack" if self.transport == "pack" else "smem", c.layout)
        return put(plan, la, replace(la.tile, channels=(*la.tile.channels, c), placements=(*la.tile.placements, place)))


def _carriers(plan: Plan, la: Launch, value: str, target: Target) -> tuple[str, ...]:
    """Transports worth trying for a value of a launch."""
    together = cluster_size(plan, la.tile.nest) > sharing_blocks(plan, la.tile)
    groups = by_groups(la.tile.nest) or for_one(plan, la, target)
    if not together and not groups:
        return "tma", "cp_async", "ldg"
    return ("tma",) if together or engine_brings(plan, value) else ("cp_async", "ldg")


def _once(plan: Plan, la: Launch, value: str) -> bool:
    """Whether a launch that folds by a lift fills a value once a tile, while others turn in rings."""
    axes = plan.program.value(value).axes
    in_time = any(x.axis in axes and x.level == "serial" for x in la.tile.nest)
    return not in_time and lifted(plan, la) is not None


def _shared(plan: Plan, la: Launch) -> bool:
    """Whether loops over agents fold an axis: their atoms read operands from memory."""
    folded = contracted_axes(plan, la.tile)
    return any(x.level in SIDE and x.axis in folded for x in la.tile.nest)


def contracted(plan: Plan, la: Launch) -> tuple[str, ...]:
    """Values that come from memory and that a work which folds an axis reads more than once: they lack one of its axes."""
    p, found = plan.program, []
    for w in la.tile.works:
        s = p.stage(w.stage)
        if s.reduces and not w.combine:
            found += [v for v in s.reads if plan.arrives(la, v) and set(p.value(v).axes) != set(s.every)]
    return tuple(dict.fromkeys(found))
