"""store: a block's results leave through shared memory, by the copy engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from emmy.ir.dtype import size_bytes
from emmy.ir.gpu import (
    TRANSFER_BYTES,
    placed_bytes,
    refuse_several,
    ring_bytes,
    shared_bytes,
    sharing_blocks,
    transfer_bytes,
)
from emmy.ir.moves.atom import mnk_axes
from emmy.ir.moves.base import Move, Site, legal_sites, put, refuse_path, register
from emmy.ir.plan import Launch, Placement, Plan
from emmy.ir.program import same_rows, swapped
from emmy.ir.target import Target

_ATOMS = ("mma", "hybrid", "f16", "wgmma", "wgmma_rs")  # those whose sums stmatrix can write
_BEGIN = 1024  # bytes at whose multiples the boxes may begin: there the widest swizzle repeats


@register
@dataclass(frozen=True)
class StoreBlock(Move):
    """store(Y,tma): Y's block is placed in shared memory, and each warp asks the copy engine to store its share.

    before:  Y[m,n] = C[m,n] + bias[n]           after:   Y.smem = C[m,n] + bias[n]
             each lane stores its elements                Y[64,32] <- Y.smem  tma, a box for each 16 rows of a warp

    Lanes no longer exchange elements or work out addresses, and edges are the engine's business. Refuses what is not made
    by a matrix atom of 16-bit elements, rows of no multiple of 16 bytes, and blocks that do not fit beside the rings.
    """

    value: str
    transport: str
    name: ClassVar[str] = "store"
    phase: ClassVar[int] = 58
    commutes: ClassVar[bool] = True

    @classmethod
    def sites(cls, plan: Plan, target: Target) -> Iterator[Site]:
        moves = (cls(la.name, None, w.stage, "tma") for la in plan.launches for w in la.tile.works)
        return legal_sites(moves, plan, target)

    def refuse(self, plan: Plan, target: Target) -> str | None:
        missing = refuse_path(self, plan)
        if missing:
            return missing
        la = plan.launch(self.launch)
        leaving = [
            w.stage
            for w in la.tile.works
            if plan.stored(plan.program.stage(w.stage), la) and (w.combine or not plan.workspace(w.stage))
        ]
        if self.value not in leaving:
            return f"{self.launch} stores {', '.join(leaving) or 'partial sums only'}, not {self.value}"
        if self.transport != "tma" or not target.can("tma"):
            return f"{target.name} cannot store by {self.transport}; tma, on sm_90 and sm_120, can"
        if sharing_blocks(plan, la.tile) > 1:
            return f"blocks of a cluster share out the elements of {self.value}: no warp has rows of it"
        turned = next((s for w in la.tile.works if swapped(s := plan.program.stage(w.stage))), None)
        if turned is not None:
            return f"{turned.out} is made with its operands swapped: threads share out the elements of {self.value}"
        if la.tile.placement(self.value):
            return f"{self.value} is placed in shared memory already"
        return self._refuse_atom(plan, la) or self._refuse_rows(plan, la) or self._refuse_memory(plan, la, target)

    def _refuse_atom(self, plan: Plan, la: Launch) -> str | None:
        """Why the value is not in registers as stmatrix takes it."""
        p, s = plan.program, plan.program.stage(self.value)
        atoms = [
            a for w in la.tile.works for a in w.atoms if a.stage == w.stage and same_rows(p.stage(a.stage).axes, s.axes)
        ]
        if not atoms or atoms[0].name not in _ATOMS:
            found = atoms[0].name if atoms else "no atom"
            return f"{self.value} is made by {found}; stmatrix writes the sums of {', '.join(_ATOMS)}"
        if len(s.axes) < 2 or size_bytes(s.dtype) != 2:
            return f"{self.value} has {len(s.axes)} axes and {size_bytes(s.dtype)} bytes an element, stmatrix writes 2 of 2"
        if several := refuse_several(plan, la.tile.nest, s.axes, mnk_axes(p.stage(atoms[0].stage))):
            return f"stmatrix writes matrices of {self.value}: {several}"
        return None

    def _refuse_rows(self, plan: Plan, la: Launch) -> str | None:
        """Why rows of the value, or of what is added to it, cannot be moved 16 bytes at a time."""
        p, axes = plan.program, plan.program.stage(self.value).axes
        elementwise = [s for w in la.tile.works if not (s := p.stage(w.stage)).reduces and same_rows(s.axes, axes)]
        here = {w.stage for w in la.tile.works}
        others = [v for s in elementwise for v in s.reads if v not in here and axes[-1] in p.value(v).axes]
        for v in (self.value, *others):
            size = transfer_bytes(plan, la.tile.nest, v)
            if p.value(v).axes[-1] != axes[-1] or size_bytes(p.value(v).dtype) != 2 or size < TRANSFER_BYTES:
                return f"rows of {v} allow {size} bytes at a time along {axes[-1]}, {TRANSFER_BYTES} of 16-bit elements are needed"
        return None

    def _refuse_memory(self, plan: Plan, la: Launch, target: Target) -> str | None:
        rings = sum(ring_bytes(plan, la.tile, c) for c in la.tile.channels) + shared_bytes(plan, la.tile)
        need = placed_bytes(plan, la.tile, self.value)
        if -(-rings // _BEGIN) * _BEGIN + need > target.tile_bytes:
            return f"{self.value}'s block takes {need} bytes beside {rings} of rings, a block of {target.name} has {target.tile_bytes}"
        return None

    def rewrite(self, plan: Plan, target: Target) -> Plan:
        la = plan.launch(self.launch)
        place = Placement(self.value, "smem", "swizzle128")
        return put(plan, la, replace(la.tile, placements=(*la.tile.placements, place)))
