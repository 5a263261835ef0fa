"""preload: what a tile's finished elements are made with comes to registers while the last sums are still made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from emmy.ir.atoms import ATOMS
from emmy.ir.dtype import size_bytes
from emmy.ir.gpu import (
    TRANSFER_BYTES,
    registers_allowed,
    sharing_blocks,
    thread_registers,
    transfer_bytes,
    trips,
)
from emmy.ir.moves.atom import mnk_axes
from emmy.ir.moves.base import OPEN, Knob, Move, Open, Site, put, refuse_path, register
from emmy.ir.moves.prefetch import finishing
from emmy.ir.plan import Atom, Launch, Plan, Preloaded, Work
from emmy.ir.program import swapped
from emmy.ir.target import Target

_LANES, _ROWS = (
    4,
    2,
)  # lanes that have a row's columns of four atoms between them; rows that a lane has of an instruction
_TRIED = (4, 8, 16, 32)  # vectors of a lane; all of them is tried, too
_TAKING = 16  # registers for their addresses and what is made of them: without them 5 of 27 sampled schedules spilled
_EACH = (1, 4)  # vectors that a lane asks for at a step


@register
@dataclass(frozen=True)
class Preload(Move):
    """preload(R,16): each lane asks for its first 16 vectors of R behind the last step of k, before it waits for the sums.

    before:  serial k:60                       after:   serial k:60
             wait for C                                 R.reg <- 16 vectors of R
             Y = C + R  # R from memory                 wait for C
                                                        Y = C + R  # the rest of R from memory, 16 vectors ahead

    What memory takes to answer passes under the last multiplications, which no register of a lane stands still for.
    `preload(R,16,30)` asks 30 steps before the end of the loop instead of one turn of its rings before it, `preload(R,16,30,1)` for one
    vector at each of 16 steps from there on, so that what all blocks ask for comes beside their operands and not in one burst. Refuses
    sums that are done when their loop ends (of `mma`), or that change hands before they are finished, more registers than there are,
    tiles that blocks share, and steps that the loop has not, or that leave none to exchange the vectors before.
    """

    value: str
    vectors: Knob
    sooner: Knob = 0
    each: Knob = 0
    name: ClassVar[str] = "preload"
    phase: ClassVar[int] = 62
    commutes: ClassVar[bool] = True

    @classmethod
    def sites(cls, plan: Plan, target: Target) -> Iterator[Site]:
        for la in plan.launches:
            for v in finishing(plan, la) if _late(la) else ():
                most = _vectors(plan, la, v)
                tried = sorted({n for n in _TRIED if n < most} | {most})
                legal = tuple(n for n in tried if cls(la.name, None, v, n).refuse(plan, target) is None)
                if legal:
                    sooner = _steps_tried(plan, la)
                    yield Site(cls(la.name, None, v, OPEN, OPEN), (("vectors", legal), ("sooner", (0, *sooner))))
                for each in _EACH:
                    several = tuple(n for n in legal if n > each)
                    begin = tuple(n for n in sooner if n > -(-legal[-1] // each)) if several else ()
                    if begin:
                        yield Site(cls(la.name, None, v, OPEN, OPEN, each), (("vectors", several), ("sooner", begin)))

    def refuse(self, plan: Plan, target: Target) -> str | None:
        missing = refuse_path(self, plan)
        if missing:
            return missing
        la = plan.launch(self.launch)
        read, late = finishing(plan, la), _late(la)
        if self.value not in read:
            return (
                f"{self.launch} finishes its elements with {', '.join(read) or 'nothing from memory'}, not {self.value}"
            )
        if any(x.value == self.value for x in la.tile.preloads):
            return f"{self.value} is asked for before the sums are done already"
        if late is None or la.tile.ring_loop is None or min(c.depth for c in la.tile.channels) < 2:
            atoms = [a.name for w in la.tile.works for a in w.atoms]
            found = f"{', '.join(atoms) or 'no atom'} and {len(la.tile.channels)} rings"
            return f"{self.launch} has {found}: no sums are under way behind their loop"
        if la.tile.order.kind == "streamk":  # ptxas 13.0 would wait for each step's sums (C7514)
            workers = la.tile.order.workers
            return f"{workers} blocks share tiles of {self.launch}: only the sums' end tells a lane whether it needs {self.value}"
        return (
            self._refuse_vectors(plan, la, late[0])
            or self._refuse_steps(plan, la)
            or self._refuse_registers(plan, la, target, *late)
        )

    def _refuse_vectors(self, plan: Plan, la: Launch, work: Work) -> str | None:
        """Why lanes do not hold sums where they would hold vectors of the value."""
        p, s = plan.program, plan.program.stage(work.stage)
        if swapped(s) or sharing_blocks(plan, la.tile) > 1:
            return f"sums of {s.out} change hands among threads of {sharing_blocks(plan, la.tile)} blocks before they are finished"
        axes = p.value(self.value).axes
        if self.value in p.gathered or not set(axes) <= set(s.axes):
            return f"{self.value} has axes {', '.join(axes) or 'none'}, sums of {s.out} {', '.join(s.axes)}"
        stored = [x.out for w in la.tile.works if not (x := p.stage(w.stage)).reduces and plan.stored(x, la)]
        wide = [v for v in (*stored, *finishing(plan, la)) if p.value(v).axes[-1:] == s.axes[-1:]]
        items = sorted({size_bytes(p.value(v).dtype) for v in wide})
        short = min((transfer_bytes(plan, la.tile.nest, v) for v in wide), default=0)
        if len(items) > 1 or short < TRANSFER_BYTES:
            found = ", ".join(map(str, items))
            return f"rows of {', '.join(wide)} allow {short} bytes at a time, of {found} each: lanes take {TRANSFER_BYTES} of one size"
        total, rows = _vectors(plan, la, self.value), set(axes) - {s.axes[-1]}
        least = 1 if rows and axes[-1:] == s.axes[-1:] else total
        if isinstance(self.vectors, int) and not least <= self.vectors <= total:
            return f"a lane has {total} vectors of {self.value}: {self.vectors} is none of {least}..{total}"
        return None

    def _refuse_steps(self, plan: Plan, la: Launch) -> str | None:
        """Why the loop has no such steps."""
        if isinstance(self.vectors, Open) or isinstance(self.sooner, Open) or isinstance(self.each, Open):
            return None
        assert la.tile.ring_loop is not None
        of = trips(plan, la.tile.nest, la.tile.ring_loop)
        if self.sooner and not 2 <= self.sooner <= (of or self.sooner):
            return f"{self.value} is asked for {self.sooner} steps before the end of {of or 'a loop'}: none of 2..{of or 'all'}"
        if self.each >= self.vectors:
            return f"{self.vectors} vectors of {self.value} are no more than {self.each} a step: they are asked for at once"
        asking = Preloaded(self.value, self.vectors, self.sooner, self.each)
        begin = self.sooner or max(c.depth for c in la.tile.channels)
        if self.each and begin <= asking.steps:
            return (
                f"{self.vectors} vectors of {self.value}, {self.each} a step, take {asking.steps} steps: "
                f"from {begin} before the end, {begin - 1} are left"
            )
        return None

    def _refuse_registers(self, plan: Plan, la: Launch, target: Target, work: Work, atom: Atom) -> str | None:
        if not isinstance(self.vectors, int):
            return None
        need = thread_registers(plan, la, work, atom, mnk_axes(plan.program.stage(work.stage)))
        more, most = self.vectors * TRANSFER_BYTES // 4 + _TAKING, registers_allowed(plan, la, work, target)
        if need + more > most:
            return f"{self.vectors} vectors of {self.value} take {more} registers with their addresses, beside {need}: a thread has {most}"
        return None

    def rewrite(self, plan: Plan, target: Target) -> Plan:
        assert isinstance(self.vectors, int) and isinstance(self.sooner, int) and isinstance(self.each, int)
        asking = Preloaded(self.value, self.vectors, self.sooner, self.each)
        la = plan.launch(self.launch)
        every = sorted((*la.tile.preloads, asking), key=lambda x: x.value)
        return put(plan, la, replace(la.tile, preloads=tuple(every)))


def _late(la: Launch) -> tuple[Work, Atom] | None:
    """The first work of a launch whose instructions are under way when its loop ends, with their atom."""
    works = ((w, a) for w in la.tile.works for a in w.atoms if a.stage == w.stage and ATOMS[a.name].deferred)
    return next(works, None)


def _steps_tried(plan: Plan, la: Launch) -> tuple[int, ...]:
    """Steps before the end of the rings' loop at which asking may be worth trying: two turns of the rings, half of the loop."""
    at, depth = la.tile.ring_loop, max((c.depth for c in la.tile.channels), default=0)
    of = trips(plan, la.tile.nest, at) if at is not None else None
    return tuple(sorted({n for n in (2 * depth, of // 2) if depth < n <= of})) if of else ()


def _vectors(plan: Plan, la: Launch, value: str) -> int:
    """Vectors of 16 bytes of a value that a lane takes for its sums, or numbers of rows; columns that make none are left out."""
    late, v = _late(la), plan.program.value(value)
    assert late is not None
    s = plan.program.stage(late[0].stage)
    m, n, _ = mnk_axes(s)
    columns = plan.extent(la.tile.nest, n) * size_bytes(v.dtype) // (_LANES * TRANSFER_BYTES)
    rows = _ROWS * plan.extent(la.tile.nest, m) // late[1].m if m else 1
    return (columns if v.axes[-1:] == s.axes[-1:] else 1) * (rows if set(v.axes) - {s.axes[-1]} else 1)
