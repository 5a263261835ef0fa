"""What blocks hold while their steps are executed: slots of rings, barriers, sums left for one another. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from emmy.codegen.steps import Barrier, Outline
from emmy.errors import PlanError
from emmy.ir.expr import Block
from emmy.ir.plan import Workspace
from emmy.ir.program import Stage

Env = dict[str, tuple[int, int]]  # axis -> the piece in scope
Place = tuple[str, tuple[tuple[int, int], ...]]  # of a part, or of parts that go together: their stage, where they lie


def pieces(whole: tuple[int, int], step: int, least: int = 0) -> list[tuple[int, int]]:
    """Pieces of a range; `least` of them, empty ones where it ends early."""
    lo, hi = whole
    found = [(x, min(x + step, hi)) for x in range(lo, hi, step)]
    return found + [(hi, hi)] * (least - len(found))


def blank(name: str, axes: tuple[str, ...], env: Env, fill: float) -> Block:
    return Block(name, axes, tuple(env[a][0] for a in axes), np.full([env[a][1] - env[a][0] for a in axes], fill))


def components(s: Stage) -> tuple[tuple[str, tuple[str, ...]], ...]:
    assert s.monoid is not None
    return s.monoid.components(s)


@dataclass(slots=True)
class Slot:
    """A slot of a ring: the fill it holds, how far that has come, who may read it, and whether it was read since."""

    fill: int = -1
    block: Block | None = None
    counted: bool = False  # its barrier completes a phase when the fill has landed
    landed: bool = False  # and an agent waited for that
    readers: set[str] = field(default_factory=set)  # roles that know that the fill has landed
    read: bool = False  # since all agents last met


@dataclass(slots=True)
class Bar:
    spec: Barrier
    pending: int = 0
    phase: int = 0
    owed: int = 0  # bytes of copies that are expected, less those of copies that were begun

    def arrive(self, n: int) -> bool:
        """True when the arrival completes the present phase."""
        self.pending += n
        self.owed += self.spec.tx_bytes
        if self.pending > self.spec.count:
            raise PlanError(f"barrier {self.spec.name}: {self.pending} arrivals, it completes at {self.spec.count}")
        return self.completed()

    def bring(self, n_bytes: int) -> bool:
        """True when a copy of so many bytes, which land in time, completes the present phase."""
        self.owed -= n_bytes
        return self.completed()

    def completed(self) -> bool:
        if self.pending < self.spec.count or self.owed:
            return False
        self.pending, self.phase = 0, self.phase ^ 1
        return True


@dataclass(slots=True)
class Shares:
    """Accumulators that agents left in shared memory, by the agent's place along the axes it folds a share of."""

    of: dict[tuple[int, ...], dict[str, Block]]
    visible: bool = False  # all agents have met since
    read: bool = False  # since all agents last met


@dataclass(slots=True)
class Cluster:
    """Blocks that see each other's memory: what they left there for one another, and how many agents have met.

    size:            blocks that fold shares of one element
    agents, everyone: of all blocks: those that compute, and with those that only fill
    """

    size: int
    agents: int
    everyone: int
    blocks: list[Cta] = field(default_factory=list)
    sums: dict[tuple[str, int], tuple[int, tuple[dict[str, Block], ...]]] = field(
        default_factory=dict
    )  # (stage, rank) -> (meeting, sums)
    gone: set[int] = field(default_factory=set)  # ranks
    meeting: int = 0
    met: int = 0

    def meet(self, every: bool) -> Iterator[bool]:
        here = self.meeting
        self.met += 1
        if self.met == (self.everyone if every else self.agents):
            self.met, self.meeting = 0, here + 1
        while self.meeting == here:
            yield True


@dataclass(slots=True)
class Left:
    """Sums of a tile that a block left for the one that finishes it, and who knows of them."""

    sums: dict[str, Block]
    met: bool = False  # all agents that left them have met since
    raised: bool = False  # their flag is up
    seen: bool = False  # by the agent that waits for it
    known: bool = False  # and the others have met it since


@dataclass(slots=True)
class Count:
    """How many of the parts that go together have been counted. most: of all blocks that leave one.

    zero: where memory adds them: 1 when it may, and one more for each block that knows
    """

    most: int
    parts: int = 0
    zero: int = 0


@dataclass(slots=True)
class Cta:
    """One block of a launch: its slots, barriers and roles.

    helpers: of each of its tiles, the blocks that have later shares of it, in order
    left:    block -> what it left, of all blocks
    counts:  of all blocks
    """

    outline: Outline
    memory: dict[str, Block]
    tiles: list[Env]
    whole: Env
    cluster: Cluster
    rank: int
    slots: dict[str, list[Slot]] = field(default_factory=dict)
    bars: dict[str, list[Bar]] = field(default_factory=dict)
    shares: dict[tuple[str, tuple[int, ...]], Shares] = field(default_factory=dict)
    begun: bool = False  # its barriers are ready
    number: int = 0  # in the launch
    helpers: list[range] = field(default_factory=list)
    left: dict[int, Left] = field(default_factory=dict)
    counts: dict[Place, Count] = field(default_factory=dict)
    zero: set[Place] = field(default_factory=set)  # elements of which all agents of the block know that they were zero

    def begin(self) -> None:
        """Slots hold nothing, barriers no arrival."""
        t = self.outline.launch.tile
        self.slots = {c.value: [Slot() for _ in range(c.depth)] for c in t.channels}
        self.bars = {b.name: [Bar(b) for _ in range(b.slots)] for b in self.outline.barriers}

    def parts(self, w: Workspace) -> Iterator[dict[str, Block]]:
        """Components of each part of a workspace in memory."""
        plan, (lo, hi) = self.outline.plan, self.whole[w.axis]
        for part in range(-(-(hi - lo) // plan.part_step(w))):
            yield {c: self.memory[f"{w.value}@{c}@{part}"] for c, _ in components(plan.program.stage(w.value))}

    def count(self, bar: Bar, at: int) -> None:
        """A phase of a barrier is complete: if it counts bytes, the slots it tells of have them."""
        for filled in bar.spec.values if bar.spec.tx_bytes else ():
            self.slots[filled][at].counted = True


@dataclass(slots=True)
class Ring:
    """Where an agent stands in the loop that refills a channel: the loop's whole range and the present iteration."""

    lo: int
    hi: int
    step: int
    j: int = 0

    @property
    def fills(self) -> int:
        return -(-(self.hi - self.lo) // self.step)
