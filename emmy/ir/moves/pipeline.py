"""pipeline: a work reads the first operands of the next piece before it is done with this one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from emmy.ir.atoms import ATOMS
from emmy.ir.beside import beside
from emmy.ir.gpu import lift_registers, registers_allowed
from emmy.ir.moves.base import (
    Move,
    Site,
    legal_sites,
    put_work,
    refuse_beside,
    refuse_path,
    register,
    works_beside,
)
from emmy.ir.moves.lifted_tiles import feeds_lift, lifted, rows_of
from emmy.ir.plan import BLOCK_LEVELS, Channel, Launch, Plan, Work
from emmy.ir.target import Target

_ATOMS = ("mma", "hybrid", "f16")  # those with two sets of operands in registers
_DEPTH = 16  # of k that one set holds


@register
@dataclass(frozen=True)
class Pipeline(Move):
    """k0.C/pipeline(): operands are read a step ahead across pieces, and a slot is refilled at its last use.

    before:  wait; refill the slot before last; read, multiply, read, multiply
    after:   read, multiply, read; wait; refill the slot just read; read the next piece's first; multiply

    The matrix units no longer stand still while a piece's first operands come from shared memory, and a ring holds one more
    fill under way. Refuses rings of one slot, and pieces with an odd number of steps: the sets of registers alternate.

    k0.S/pipeline(), where a lift reads S: logits of the next piece are begun before weights are made of this one's. Matrix units
    multiply while lanes take maxima and exponentials. Refuses atoms that are done when they end, and rings that no role fills.
    """

    name: ClassVar[str] = "pipeline"
    phase: ClassVar[int] = 55
    commutes: ClassVar[bool] = True

    @classmethod
    def sites(cls, plan: Plan, target: Target) -> Iterator[Site]:
        moves = (cls(la.name, w.stage) for la in plan.launches for w in la.tile.works)
        return legal_sites(moves, plan, target)

    def refuse(self, plan: Plan, target: Target) -> str | None:
        missing = refuse_path(self, plan, work="required")
        if missing:
            return missing
        la = plan.launch(self.launch)
        w = la.tile.work(self.work or "")
        if not target.is_cpu and feeds_lift(plan, la, plan.program.stage(w.stage)):
            return _refuse_begun(plan, la, w, target)
        atom = next((a for a in w.atoms if a.stage == w.stage), None)
        if atom is None or atom.name not in _ATOMS:
            found = atom.name if atom else "no atom"
            return f"{w.stage} has {found}; operands are read ahead for {', '.join(_ATOMS)}"
        if reason := refuse_beside(self, plan, w.stage):
            return reason
        if w.ahead:
            return f"{w.stage} reads its operands ahead already"
        if la.tile.roles:
            return f"{self.launch} has {len(la.tile.roles)} roles: they wait for each other, not ahead"
        k = plan.extent(la.tile.nest, plan.program.stage(w.stage).folded[-1])
        if k // _DEPTH % 2:
            return f"a piece has {k // _DEPTH} steps of {_DEPTH}: an even number is needed"
        return _refuse_rings(plan, la, w)

    def rewrite(self, plan: Plan, target: Target) -> Plan:
        la = plan.launch(self.launch)
        works = works_beside(plan, la, self.work or "", target)
        return put_work(plan, la, *(replace(w, ahead=True) for w in works))


def _refuse_begun(plan: Plan, la: Launch, w: Work, target: Target) -> str | None:
    """Why a work that a lift reads cannot be begun for the next piece while the lift is at this one."""
    over, atom = lifted(plan, la), next((a for a in w.atoms if a.stage == w.stage), None)
    assert over is not None
    if atom is None or not ATOMS[atom.name].deferred:
        return (
            f"{w.stage} has {atom.name if atom else 'no atom'}: only what goes on by itself is begun ahead of its turn"
        )
    if w.ahead:
        return f"{w.stage} is begun ahead of its turn already"
    ring = next((c for v in plan.program.stage(w.stage).reads if (c := la.tile.channel(v)) and c.depth > 1), None)
    if ring is None or not la.tile.roles:
        found = f"{len(la.tile.roles)} roles" if ring else "no ring of 2 slots"
        return f"{w.stage} has {found}: to be begun ahead it needs a ring of 2 slots or more that a role fills"
    m, n, k = (plan.extent(la.tile.nest, a) for a in (rows_of(plan, over), over.axes[-1], over.folded[-1]))
    need, most = lift_registers(atom.name, m, n, k, begun=True), registers_allowed(plan, la, w, target)
    return f"{need} registers a thread with logits of two pieces, there are {most}" if need > most else None


def _refuse_rings(plan: Plan, la: Launch, w: Work) -> str | None:
    reads = {v for x in beside(plan.program, la.tile, w.stage) for v in plan.program.stage(x).reads}
    rings: list[Channel] = [c for c in la.tile.channels if c.value in reads]
    if not rings or len(rings) < len(la.tile.channels):
        return f"{w.stage} reads {len(rings)} of the {len(la.tile.channels)} rings of {la.name}: it must read all"
    for c in rings:
        if c.depth < 2 or c.transport == "ldg":
            return f"{c.value} has {c.depth} slots filled by {c.transport}: 2 or more are needed, filled asynchronously"
        if (c.depth, c.transport, c.at) != (rings[0].depth, rings[0].transport, rings[0].at):
            return f"{c.value} and {rings[0].value} differ in depth, transport or loop: {c.depth} against {rings[0].depth} slots"
        if c.at < 0 or la.tile.nest[c.at].level in BLOCK_LEVELS:
            return f"{c.value} is filled once a tile, in {c.depth} slots: there is no next piece"
    return None
