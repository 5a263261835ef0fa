"""Rings of slots on a GPU: counters, barriers, copies and waits, as the steps of a launch ask for them. Knows no work.

Nothing here decides when to wait: each step becomes its statements. What is added is what the hardware asks for around
them: one thread speaks to the copy engine, reads are fenced before a slot is given back, a warp meets after one of its
lanes went alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from emmy.codegen.cuda_copy import Copier, only
from emmy.codegen.cuda_found import copier
from emmy.codegen.cuda_scope import Piece, Ring, Turn, Walk, before
from emmy.codegen.kernel import (
    Int,
    IntOp,
    IntVar,
    LetInt,
    Whole,
    below,
    both,
    least,
    minus,
    over,
    plus,
    rest,
    same,
    times,
)
from emmy.codegen.kernel_gpu import ELECTED, SMEM, THREAD, WARP_INDEX, Do, If, MapRef, Ref, SetInt, Stmt, flipped
from emmy.codegen.steps import BarArrive, Barrier, Copy, Step
from emmy.ir.atoms import ATOMS
from emmy.ir.gpu import GROUP, WARP
from emmy.ir.plan import BLOCK_LEVELS

_BARRIER = 8  # bytes of an mbarrier
_TURN = IntVar("turn")
_MEET = Do("emmy_syncwarp")
_QUIET = (_MEET, Do("emmy_fence_async"))
_FIRST = same(THREAD, Int(0))  # the thread that makes barriers ready
_LEADER = both(same(WARP_INDEX, Int(0)), ELECTED)  # the thread that speaks to the copy engine


@dataclass(slots=True)
class Rings:
    """The rings of one launch. `loops`: loops in time that are entered -> (where they are, where they end, where they began).

    leader: whether this thread speaks to the copy engine; known where only one thread runs the steps at all
    """

    w: Walk
    barriers: tuple[Barrier, ...]
    loops: dict[int, tuple[Whole, Whole, Whole]] = field(default_factory=dict)
    copiers: dict[str, Copier] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)  # barrier -> first byte in shared memory
    loaded: dict[str, int] = field(default_factory=dict)  # ldg: value -> how far ahead the fill in registers is
    leader: Whole = _LEADER

    def begin(self) -> None:
        """Slots and barriers get their places, threads their shares of the copies."""
        self.w.place_rings()
        for b in self.barriers:
            self.places[b.name] = self.w.allocate(b.slots * _BARRIER, _BARRIER)
        self.copiers = {v: copier(self.w, r) for v, r in self.w.rings.items()}
        for c in self.copiers.values():
            c.begin()
        self.w.maps += (c.map for c in self.copiers.values() if c.map is not None)

    def first(self, cluster: bool) -> tuple[Stmt, ...]:
        """Counters of the rings, registers that copies pass through, barriers ready for their first arrival.

        cluster: those of all its blocks; they are fenced for this, so that meeting need not order anything
        """
        out: list[Stmt] = []
        for turn in self._turns(tuple(self.w.rings)):
            if turn.depth > 1:
                out.append(LetInt(turn.slot.name, Int(0)))
            if self._has_phase(turn):
                out.append(LetInt(turn.phase.name, Int(0)))
        out += self.first_turn()
        for c in self.copiers.values():
            out += c.registers()
        begin: list[Stmt] = []
        for b in self.barriers:
            for i in range(b.slots):
                count = b.count if b.tx_bytes else b.count * self.warps_of_agent
                begin.append(Do("emmy_mbar_init", (Ref(SMEM, Int(self.places[b.name] + i * _BARRIER)), Int(count))))
        if begin:
            maps = (c.map for c in self.copiers.values() if c.map is not None)
            soon = (Do("emmy_tma_prefetch", (MapRef(m.name),)) for m in maps)
            out.append(If(_FIRST, (*soon, *begin, Do("emmy_mbar_fence_init"))))
            out += [Do("emmy_cluster_arrive_relaxed"), Do("emmy_cluster_wait")] if cluster else [Do("emmy_syncthreads")]
        return tuple(out)

    # ------------------------------------------------------------ tiles taken in turn
    def skip(self, tiles: Whole, fills: Mapping[str, int]) -> tuple[Stmt, ...]:
        """The counters pass over the fills of so many tiles, which other consumers read. fills: of each ring, a tile."""
        each = {self.w.rings[v].turn: n for v, n in fills.items()}
        return tuple(s for turn, n in each.items() for s in self._skip(turn, times(tiles, Int(n))))

    def _skip(self, turn: Turn, fills: Whole) -> tuple[Stmt, ...]:
        depth = Int(turn.depth)
        by, laps = rest(fills, depth), rest(over(fills, depth), Int(2))
        flip = (SetInt(turn.phase.name, flipped(turn.phase, laps)),) if laps != Int(0) else ()
        if by == Int(0):
            return flip
        again = (SetInt(turn.slot.name, minus(turn.slot, depth)), SetInt(turn.phase.name, flipped(turn.phase, Int(1))))
        wrap = If(below(Int(turn.depth - 1), turn.slot), again)
        return (*flip, SetInt(turn.slot.name, plus(turn.slot, by)), wrap)

    def first_turn(self) -> tuple[Stmt, ...]:
        """A counter of the tiles that a consumer took, of which the last bit counts: the first need not be waited for."""
        return (LetInt(_TURN.name, same(self.w.team(), Int(0))),) if "turn" in self.places else ()

    def turn_wait(self) -> tuple[Stmt, ...]:
        return (Do("emmy_mbar_wait", (self._token(self.w.team()), _TURN)),)

    def turn_pass(self) -> tuple[Stmt, ...]:
        """Each warp passes its own turn: were one to pass for all, the turn could come round before the last has had it."""
        following = self.w.let("next_team", rest(plus(self.w.team(), Int(1)), Int(self.w.teams)))
        once = If(same(self.w.lane(), Int(0)), (Do("emmy_mbar_arrive", (self._token(following),)),))
        return _MEET, once, SetInt(_TURN.name, flipped(_TURN, Int(1)))

    def _token(self, team: Whole) -> Ref:
        return Ref(SMEM, plus(times(team, Int(_BARRIER)), Int(self.places["turn"])))

    # ------------------------------------------------------------ counters
    def _turns(self, values: tuple[str, ...]) -> tuple[Turn, ...]:
        return tuple(dict.fromkeys(self.w.rings[v].turn for v in values))

    def _has_phase(self, turn: Turn) -> bool:
        return any(r.turn == turn and r.channel.transport == "tma" for r in self.w.rings.values())

    @property
    def warps_of_agent(self) -> int:
        """Warps of one that reads fills: each gives a slot back by itself."""
        return GROUP if any(r.works and r.unit == "warpgroup" for r in self.w.launch.tile.roles) else 1

    # ------------------------------------------------------------ steps
    def _place(self, ring: Ring, ahead: int) -> tuple[Whole, Whole] | None:
        """(where the fill `ahead` begins along the ring's loop, where the loop ends); None when the tile is the loop."""
        at = ring.channel.at
        if at < 0 or self.w.nest[at].level in BLOCK_LEVELS:
            return None
        begin, last = self.w.walked(self.w.nest[at].axis)
        here, end, _ = self.loops.get(at, (begin, last, begin))
        return plus(here, Int(ahead * self.w.nest[at].step)), end

    def exists(self, ring: Ring, ahead: int) -> Whole:
        """Whether the ring's loop has the fill `ahead`."""
        place = self._place(ring, ahead)
        if place is None:
            return Int(int(ahead < 1))
        return Int(1) if ahead == 0 and ring.channel.at in self.loops else before(*place)

    def has_come_to(self, ring: Ring, fill: int) -> Whole:
        """Whether the ring's loop, which is entered, stands at that fill or behind it."""
        at = ring.channel.at
        here, _, began = self.loops[at]
        return before(plus(began, Int(fill * self.w.nest[at].step - 1)), here)

    def stands_at(self, ring: Ring, fill: int) -> Whole:
        """Whether the ring's loop, which is entered, stands at that fill, or at the last of a share that has fewer."""
        x = self.w.nest[ring.channel.at]
        here, end, began = self.loops[ring.channel.at]
        there = plus(began, Int(fill * x.step))
        return same(here, least(there, minus(end, Int(x.step))) if x.axis in self.w.shares else there)

    def _filled(self, ring: Ring, ahead: int) -> dict[str, Piece]:
        """The scope of the fill `ahead`."""
        place, at = self._place(ring, ahead), ring.channel.at
        return self.w.scope if place is None else {**self.w.scope, self.w.nest[at].axis: self.w.inside(at, place[0])}

    def copy(self, ring: Ring, ahead: int) -> tuple[Stmt, ...]:
        copier, scope, exists = self.copiers[ring.value], self._filled(ring, ahead), self.exists(ring, ahead)
        if ring.channel.transport == "tma":
            full = next(self.places[b.name] for b in self.barriers if b.tx_bytes and ring.value in b.values)
            bar = plus(times(ring.turn.at(ahead), Int(_BARRIER)), Int(full))
            return only(both(exists, self.leader), copier.engine_fill(ahead, scope, bar))
        if ring.channel.transport == "ldg":
            if ring.value in self.loaded:
                raise self.w.cannot(
                    f"{ring.value}: ldg keeps one fill in registers, depth {ring.channel.depth} needs more"
                )
            self.loaded[ring.value] = ahead
            return only(exists, copier.fill(ahead, scope, Int(1)))
        return copier.fill(ahead, scope, exists)

    def commit(self) -> tuple[Stmt, ...]:
        return (Do("emmy_cp_async_commit"),) if self._has("cp_async") else ()

    def wait_group(self, pending: int) -> tuple[Stmt, ...]:
        out: list[Stmt] = []
        if self._has("cp_async"):
            out.append(Do(f"emmy_cp_async_wait<{pending}>"))
        for value, ahead in self.loaded.items():
            ring = self.w.rings[value]
            if ring.channel.at in self.loops or self._place(ring, 0) is None:  # after a loop nothing is left to land
                out += self.copiers[value].land(ahead)
        self.loaded.clear()
        return tuple(out)

    def wait(self, name: str, ring: Ring, ahead: int) -> tuple[Stmt, ...]:
        """Everyone waits for a full slot; for an empty one only the thread that fills it."""
        b = self._spec(name)
        parity = flipped(ring.turn.phase, rest(plus(ring.turn.lap(ahead), Int(b.first_parity[0])), Int(2)))
        wait = Do("emmy_mbar_wait", (self._barrier(name, ring, ahead), parity))
        if b.tx_bytes:
            return only(self.exists(ring, ahead), (wait,))
        if not self.loops and ahead < ring.channel.depth and self.w.launch.tile.order.kind == "static":
            return ()  # the first fill of a slot, which passes at once
        return only(both(self.exists(ring, ahead), self.leader), (wait,))

    def arrive(self, name: str, ring: Ring, count: int, ahead: int) -> tuple[Stmt, ...]:
        bar, spec = self._barrier(name, ring, ahead), self._spec(name)
        if spec.tx_bytes:
            tx = sum(self.w.rings[v].layout.bytes for v in spec.values)  # with what is brought beyond a block
            return only(both(self.exists(ring, ahead), self.leader), (Do("emmy_mbar_expect_tx", (bar, Int(tx))),))
        arriving = count * self.warps_of_agent
        if arriving * WARP != self.w.threads:
            raise self.w.cannot(f"{arriving} arrivals at {name}, {self.w.threads // WARP} warps compute")
        once = If(same(self.w.lane(), Int(0)), (Do("emmy_mbar_arrive", (bar,)),))
        if spec.blocks > 1:  # a lane for each block's barrier, which has the same place
            there = Do("emmy_mbar_arrive_cluster", (bar, self.w.lane()))
            once = If(below(self.w.lane(), Int(spec.blocks)), (there,))
        if ahead < 0 and not self._loaded(
            spec.values
        ):  # of a deferred work: what it read went through the engine's proxy
            return only(self._was(ring), (once,))
        # One lane for a warp, when all its lanes have read, and what they read is in their registers: without the fence the
        # copy engine overtakes reads that are still on their way (measured on an H200: wrong sums in one launch of two).
        released = Do("emmy_fence_async"), _MEET, once
        return only(self._was(ring), released) if ahead < 0 else released

    def _loaded(self, values: tuple[str, ...]) -> bool:
        """Whether lanes load one of these to registers for a deferred work."""
        works, p = self.w.launch.tile.works, self.w.plan.program
        kinds = [(p.stage(k.stage).reads[0], ATOMS[a.name]) for k in works for a in k.atoms]
        return any(kind.loaded and first in values for first, kind in kinds)

    def _was(self, ring: Ring) -> Whole:
        """Whether the ring's loop has had the fill before the present one."""
        at = ring.channel.at
        if at not in self.loops:
            return Int(1)
        here, _, began = self.loops[at]
        return before(began, here)

    def _spec(self, barrier: str) -> Barrier:
        return next(b for b in self.barriers if b.name == barrier)

    def _barrier(self, name: str, ring: Ring, ahead: int) -> Ref:
        return Ref(SMEM, plus(times(ring.turn.at(ahead), Int(_BARRIER)), Int(self.places[name])))

    def advance(self, values: tuple[str, ...]) -> tuple[Stmt, ...]:
        """The next fill of these rings becomes the current one."""
        for v in self.loaded.keys() & set(values):
            self.loaded[v] -= 1
        return tuple(s for turn in self._turns(values) for s in self._advance(turn))

    def _advance(self, turn: Turn) -> tuple[Stmt, ...]:
        flip = (SetInt(turn.phase.name, flipped(turn.phase, Int(1))),) if self._has_phase(turn) else ()
        if turn.depth == 1:
            return flip
        wrap = If(same(turn.slot, Int(turn.depth)), (SetInt(turn.slot.name, Int(0)), *flip))
        return SetInt(turn.slot.name, plus(turn.slot, Int(1))), wrap

    def _has(self, transport: str) -> bool:
        return any(c.transport == transport for c in self.w.launch.tile.channels)


def expect_first(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """A barrier hears how many bytes to expect before the copies that bring them begin."""
    out: list[Step] = []
    for s in steps:
        at = len(out)
        if isinstance(s, BarArrive):
            while at and isinstance(last := out[at - 1], Copy) and last.ahead == s.ahead:
                at -= 1
        out.insert(at, s)
    return tuple(out)


def merged(stmts: list[Stmt]) -> tuple[Stmt, ...]:
    """Neighbours under one condition become one, and the leader's warp meets after what the leader did alone.

    Instructions of whole warps need their lanes together (PTX ISA: .aligned), which only such a meeting promises.
    """
    joined: list[Stmt] = []
    for s in stmts:
        last = joined[-1] if joined else None
        if isinstance(s, If) and isinstance(last, If) and s.cond == last.cond:
            joined[-1] = If(s.cond, (*last.then, *s.then))
        elif (
            s not in _QUIET or not isinstance(last, If) or s not in joined[-3:-1]
        ):  # a warp that has just met has read nothing since
            joined.append(s)
    out: list[Stmt] = []
    for s, after in zip(joined, [*joined[1:], None], strict=True):
        out.append(s)
        if isinstance(s, If) and _leads(s.cond) and after not in (_MEET, Do("emmy_syncthreads")):
            out.append(_MEET)
    return tuple(out)


def _leads(cond: Whole) -> bool:
    return cond == _LEADER or (isinstance(cond, IntOp) and cond.fn == "&&" and _leads(cond.b))
