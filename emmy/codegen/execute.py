"""What a plan means: its steps run on named blocks, roles as coroutines that meet only at the derived barriers.

Execution is adversarial: a copy overwrites its slot when it is issued and lands at the last legal moment, a role holds
what it reads for a while, and roles interleave at random, some far ahead of others. A missing or wrong barrier
deadlocks or raises Race here, before any compiler sees the plan. Float64 throughout; threads inside a role are not
modelled (the emulator of generated text does that).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np

from emmy.codegen.lower import lower
from emmy.codegen.steps import (
    Advance,
    BarArrive,
    Barrier,
    BarWait,
    BlockSync,
    Close,
    ClusterSync,
    Commit,
    Compute,
    Copy,
    Fetch,
    Finish,
    FoldParts,
    For,
    From,
    Gather,
    LaunchWait,
    LetNext,
    Open,
    Outline,
    Preload,
    RoleSteps,
    RoleSync,
    Settle,
    Share,
    Step,
    Store,
    StoreState,
    TurnPass,
    TurnWait,
    WaitGroup,
)  # fmt: skip
from emmy.errors import Deadlock, PlanError, Race
from emmy.ir import interpret
from emmy.ir.atoms import ATOMS
from emmy.ir.dtype import size_bytes
from emmy.ir.expr import Array, Block, Named
from emmy.ir.gpu import SIDE, cluster_size, receivers, sharers, sharing_blocks
from emmy.ir.plan import Channel, Plan
from emmy.ir.program import Stage

Env = dict[str, tuple[int, int]]
Damage = Callable[[Outline], Outline]
_PATIENCE = 400  # turns in a row without progress before a launch is called deadlocked


def execute(
    plan: Plan,
    inputs: Mapping[str, Array],
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
    damage: Damage | None = None,
) -> dict[str, Array]:
    """Every output of the plan, float64. Raises Race, Deadlock or PlanError when the plan's synchronisation is wrong.

    `seed` picks the interleaving of roles; `damage` may alter an outline, to show that the run notices.
    """
    env: Env = {a: (0, n) for a, n in plan.program.sizes(sizes).items()}
    memory = interpret.load_inputs(plan.program, inputs, env)
    for s in plan.program.stages:
        memory[s.out] = _blank(s.out, s.axes, env, np.nan)
    for w in plan.workspaces:
        for c, axes in _components(plan.program.stage(w.value)):
            for part in range(w.parts):
                memory[f"{w.value}@{c}@{part}"] = _blank(c, axes, env, np.nan)
    for outline in lower(plan):
        outline = damage(outline) if damage else outline
        dealt, size = _deal(outline, env), cluster_size(plan, outline.launch.tile.nest)
        for first in range(0, len(dealt), size):
            computing = size * sum(bool(r.role.works) for r in outline.roles)
            cluster = _Cluster(sharing_blocks(plan, outline.launch.tile), computing, size * len(outline.roles))
            ctas = [
                _Cta(outline, memory, tiles, env, cluster, i) for i, tiles in enumerate(dealt[first : first + size])
            ]
            cluster.blocks += ctas
            _run(ctas, random.Random(f"{seed}.{first // size}"))
    return {o: memory[o].data for o in plan.program.outputs}


def _deal(outline: Outline, env: Env) -> list[list[Env]]:
    """Tiles of each block, in order."""
    t = outline.launch.tile
    tiles = [env]
    for i, loop in enumerate(t.nest[: t.n_block_loops]):
        whole = outline.plan.count(t.nest, i) if loop.level == "cluster" else 0  # a cluster has all its blocks
        tiles = [{**e, loop.axis: piece} for e in tiles for piece in _pieces(e[loop.axis], loop.step, whole)]
    workers = t.order.workers or len(tiles)
    return [tiles[w::workers] for w in range(min(workers, len(tiles)))]


def _pieces(whole: tuple[int, int], step: int, least: int = 0) -> list[tuple[int, int]]:
    """Pieces of a range; `least` of them, empty ones where it ends early."""
    lo, hi = whole
    found = [(x, min(x + step, hi)) for x in range(lo, hi, step)]
    return found + [(hi, hi)] * (least - len(found))


def _blank(name: str, axes: tuple[str, ...], env: Env, fill: float) -> Block:
    return Block(name, axes, tuple(env[a][0] for a in axes), np.full([env[a][1] - env[a][0] for a in axes], fill))


def _components(s: Stage) -> tuple[tuple[str, tuple[str, ...]], ...]:
    assert s.monoid is not None
    return s.monoid.components(s)


@dataclass(slots=True)
class _Slot:
    """A slot of a ring: the fill it holds, how far that has come, who may read it, and whether it was read since."""

    fill: int = -1
    block: Block | None = None
    counted: bool = False  # its barrier completes a phase when the fill has landed
    landed: bool = False  # and an agent waited for that
    readers: set[str] = field(default_factory=set)  # roles that know that the fill has landed
    read: bool = False  # since all agents last met


@dataclass(slots=True)
class _Bar:
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
class _Shares:
    """Accumulators that agents left in shared memory, by the agent's place along the axes it folds a share of."""

    of: dict[tuple[int, ...], dict[str, Block]]
    visible: bool = False  # all agents have met since
    read: bool = False  # since all agents last met


@dataclass(slots=True)
class _Cluster:
    """Blocks that see each other's memory: what they left there for one another, and how many agents have met.

    size:            blocks that fold shares of one element
    agents, everyone: of all blocks: those that compute, and with those that only fill
    """

    size: int
    agents: int
    everyone: int
    blocks: list[_Cta] = field(default_factory=list)
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
class _Cta:
    """One block of a launch: its slots, barriers and roles."""

    outline: Outline
    memory: dict[str, Block]
    tiles: list[Env]
    whole: Env
    cluster: _Cluster
    rank: int
    slots: dict[str, list[_Slot]] = field(default_factory=dict)
    bars: dict[str, list[_Bar]] = field(default_factory=dict)
    shares: dict[tuple[str, tuple[int, ...]], _Shares] = field(default_factory=dict)
    begun: bool = False  # its barriers are ready

    def agents(self) -> Iterator[Iterator[bool]]:
        """Its roles, ready to begin."""
        t = self.outline.launch.tile
        self.slots = {c.value: [_Slot() for _ in range(c.depth)] for c in t.channels}
        self.bars = {b.name: [_Bar(b) for _ in range(b.slots)] for b in self.outline.barriers}
        return (_Agent(self, r).run() for r in self.outline.roles)

    def count(self, bar: _Bar, at: int) -> None:
        """A phase of a barrier is complete: if it counts bytes, the slots it tells of have them."""
        for filled in bar.spec.values if bar.spec.tx_bytes else ():
            self.slots[filled][at].counted = True


def _run(ctas: list[_Cta], rng: random.Random) -> None:
    """All roles of a cluster's blocks to their end. Who goes on is drawn at each step; how often it changes is drawn once."""
    live = [agent for cta in ctas for agent in cta.agents()]
    idle, agent, steadiness = 0, live[0], rng.choice((0.0, 0.5, 0.9, 0.99))
    while live:
        if idle or agent not in live or rng.random() >= steadiness:
            agent = rng.choice(live)
        try:
            idle = idle + 1 if next(agent) else 0
        except StopIteration:
            live.remove(agent)
            idle = 0
        if idle > _PATIENCE:
            raise Deadlock(f"{ctas[0].outline.launch.name}: {len(live)} roles wait and none can go on")
    for bar in (bar for cta in ctas for ring in cta.bars.values() for bar in ring):
        if bar.owed:
            raise PlanError(f"barrier {bar.spec.name} ends with {bar.owed} bytes expected that no copy brings")


@dataclass(slots=True)
class _Ring:
    """Where an agent stands in the loop that refills a channel: the loop's whole range and the present iteration."""

    lo: int
    hi: int
    step: int
    j: int = 0


@dataclass(slots=True)
class _Agent:
    """A role walking its steps. Yields True when it must wait, False after anything another role could notice."""

    cta: _Cta
    role: RoleSteps
    env: Env = field(default_factory=dict)
    seq: int = 0
    values: dict[str, Block] = field(default_factory=dict)
    accs: dict[str, dict[str, Block]] = field(default_factory=dict)
    position: dict[str, int] = field(default_factory=dict)
    rings: dict[int, _Ring] = field(default_factory=dict)
    side: dict[int, int] = field(default_factory=dict)  # loop over agents -> which one this is
    shares: dict[str, dict[tuple[int, ...], dict[str, Block]]] = field(
        default_factory=dict
    )  # stage -> agent -> its sums
    group: list[_Slot] = field(default_factory=list)
    groups: list[list[_Slot]] = field(default_factory=list)
    flying: dict[str, list[dict[str, int]]] = field(
        default_factory=dict
    )  # stage -> what its pending works read: value -> fill
    waited: bool = False  # for the launches before

    @property
    def plan(self) -> Plan:
        return self.cta.outline.plan

    def run(self) -> Iterator[bool]:
        t = self.cta.outline.launch.tile
        self.position = {c.value: 0 for c in t.channels}
        self.cta.begun = True
        yield from self.steps(self.cta.outline.first)
        deal = self.role.role.deal
        for seq, tile in enumerate(self.cta.tiles):
            self.seq = seq
            self.env, self.values, self.accs, self.shares = dict(tile), {}, {}, {}
            if deal is None or seq % deal[1] == deal[0]:
                yield from self.steps(self.role.steps)
                if self.groups:
                    raise Race(f"{self.role.role.name} ends a tile with {len(self.groups)} groups of copies under way")
            else:
                self.skip(self.role.steps)
        yield from self.steps(self.cta.outline.last)
        if self.role.role.works:
            self.cta.cluster.gone.add(self.cta.rank)

    def skip(self, steps: tuple[Step, ...]) -> None:
        """A tile of another dealt role: walked only to count its fills."""
        for s in steps:
            if isinstance(s, Advance):
                for x in s.values:
                    self.position[x] += 1
            elif isinstance(s, For):
                whole = self.env[s.loop.axis]
                for piece in _pieces(whole, s.loop.step):
                    self.env[s.loop.axis] = piece
                    self.skip(s.body)
                self.env[s.loop.axis] = whole

    # ------------------------------------------------------------ steps
    def steps(self, steps: tuple[Step, ...]) -> Iterator[bool]:
        for s in steps:
            yield from self.step(s)

    def step(self, s: Step) -> Iterator[bool]:  # noqa: C901  one case a step
        match s:
            case For():
                yield from self.loop(s)
            case Open(x):
                self.open(x)
            case Compute(x):
                self.compute(x)
                self.flying.setdefault(x, []).append(self.held(x))
                yield False  # still at work on what it read
                if not self.deferred(x):
                    self.settle(x, 0)
            case Settle(x, n):
                yield False
                self.settle(x, n)
            case Fetch(x, ahead):
                self.fetch(x, ahead)
            case Preload(x) | Finish(x):
                self.accumulators(x)
            case FoldParts(x):
                self.fold_parts(x)
            case Share(x):
                self.share(x)
                yield False
            case Gather(x):
                self.gather(x)
            case Close(x):
                self.close(x)
            case StoreState(x):
                self.store_state(x)
            case Store(x):
                self.put(self.cta.memory[x], self.value(x))
            case Copy(x, ahead):
                self.copy(x, ahead)
                yield False
            case Advance(xs):
                for x in xs:
                    self.position[x] += 1
            case Commit():
                self.groups.append(self.group)
                self.group = []
            case WaitGroup(n):
                while len(self.groups) > n:
                    for slot in self.groups.pop(0):
                        slot.landed = True
            case BlockSync():
                self.meet()
            case RoleSync():
                self.meet_for_shares()
            case ClusterSync(every):
                yield from self.cta.cluster.meet(every)
            case BarWait(b, x, ahead):
                if ahead < self.left(x):
                    yield from self.wait(b, self.position[x] + ahead)
                    self.deliver(b, ahead)
            case BarArrive(b, x, n, ahead):
                if ahead < self.left(x) and self.gone(x) + ahead >= 0:
                    self.arrive(b, x, n, ahead)
                    yield False
            case TurnWait(i):
                yield from (
                    self.wait("turn", i + self.seq // len(self.cta.bars["turn"]) * len(self.cta.bars["turn"]))
                    if "turn" in self.cta.bars
                    else ()
                )
            case TurnPass(i):
                if "turn" in self.cta.bars:
                    self.cta.bars["turn"][i].arrive(1)
            case LetNext():
                pass  # launches run one after another here
            case LaunchWait():
                self.waited = True
            case From(x, fill, body):
                ring = self.ring(self.channel(x))
                if ring is not None and ring.j >= fill:
                    yield from self.steps(body)

    def loop(self, s: For) -> Iterator[bool]:
        axis, whole = s.loop.axis, self.env[s.loop.axis]
        self.rings[s.at] = _Ring(*whole, s.loop.step)
        least = int(s.loop.level in SIDE)  # an agent without a piece waits and arrives like the others
        for j, piece in enumerate(_pieces(whole, s.loop.step, least)):
            self.rings[s.at].j = j
            self.env[axis] = piece
            if s.loop.level in SIDE:
                self.side[s.at] = j
            yield from self.steps(s.body)
            self.env[axis] = whole
        self.side.pop(s.at, None)
        del self.rings[s.at]

    # ------------------------------------------------------------ channels
    def ring(self, c: Channel) -> _Ring | None:
        """The loop that refills the channel, entered or about to be; None when that is the tile itself."""
        t = self.cta.outline.launch.tile
        if c.at < t.n_block_loops:
            return None
        loop = t.nest[c.at]
        return self.rings.get(c.at) or _Ring(*self.env[loop.axis], loop.step)

    def left(self, value: str) -> int:
        """Fills of a channel from the present one on, in the present loop."""
        c = self.channel(value)
        r = self.ring(c)
        return 1 if r is None else -(-(r.hi - r.lo) // r.step) - r.j

    def gone(self, value: str) -> int:
        """Fills of a channel before the present one, in the present loop; all of them behind it."""
        r = self.rings.get(self.channel(value).at)
        return self.position[value] if r is None else r.j

    def channel(self, value: str) -> Channel:
        c = self.cta.outline.launch.tile.channel(value)
        assert c is not None
        return c

    def copy(self, value: str, ahead: int) -> None:
        if ahead >= self.left(value):
            return
        c = self.channel(value)
        env, r = dict(self.env), self.ring(c)
        if r is not None:
            lo = r.lo + (r.j + ahead) * r.step
            env[self.cta.outline.launch.tile.nest[c.at].axis] = (lo, min(lo + r.step, r.hi))
        fill = self.position[value] + ahead
        source, tile = self.plan.program.value(value), self.cta.outline.launch.tile
        block = _blank(value, source.axes, env, np.nan)
        if block.data.size * size_bytes(source.dtype) > self.plan.slot_bytes(tile, c):
            shape = ",".join(str(n) for n in block.data.shape)
            raise PlanError(f"{value}[{shape}] does not fit its slot of {self.plan.slot_bytes(tile, c)} bytes")
        memory = self.cta.memory[value]
        self.check_waited(f"fetches {value}", value)
        block.data[...] = memory.data[memory.window(env)]
        blocks = receivers(self.plan, tile, c)
        if blocks > 1:
            for cta in self.reached(value):
                self.fill(cta, c, fill, block, blocks)
            return
        slot = self.fill(self.cta, c, fill, block)
        if c.transport == "pack":
            slot.landed, slot.readers = True, {self.role.role.name}
        elif c.transport != "tma":
            self.group.append(slot)

    def reached(self, what: str) -> Iterator[_Cta]:
        """Blocks of the cluster, of which each must be able to take something now."""
        for cta in self.cta.cluster.blocks:
            if not cta.begun:
                raise Race(f"{self.role.role.name} reaches block {cta.rank} for {what} before its barriers are ready")
            if cta.rank in self.cta.cluster.gone:
                raise Race(f"{self.role.role.name} reaches block {cta.rank} for {what}, which has ended")
            yield cta

    def fill(self, cta: _Cta, c: Channel, fill: int, block: Block, blocks: int = 1) -> _Slot:
        """The slot of a block that gets a fill, or this block's rows of it when several bring it together."""
        tile, slot = cta.outline.launch.tile, cta.slots[c.value][fill % c.depth]
        if c.self_fed and c.transport != "pack" and slot.read:
            raise Race(
                f"{self.role.role.name} refills {c.value} (fill {fill}) before all are done reading fill {slot.fill}"
            )
        if blocks == 1 or slot.fill != fill or slot.block is None:
            empty = block if blocks == 1 else Block(c.value, block.axes, block.lo, np.full_like(block.data, np.nan))
            slot.fill, slot.block, slot.counted, slot.landed, slot.readers = fill, empty, False, False, set()
        if blocks > 1:
            rows = self.plan.extent(tile.nest[: c.at + 1], block.axes[0]) // blocks
            mine = slice(self.cta.rank * rows, (self.cta.rank + 1) * rows)
            slot.block.data[mine] = block.data[mine]
        for ring in cta.bars.values():
            if ring[0].spec.tx_bytes and c.value in ring[0].spec.values:
                at = fill % len(ring)
                if ring[at].bring(self.plan.slot_bytes(tile, c) // blocks):
                    cta.count(ring[at], at)
        return slot

    def meet(self) -> None:
        """Every agent of the block has come this far: all may read what landed, and refill what was read.

        Reads under way are not ordered before the copy engine's writes by this: its slots are given back by barriers only.
        """
        for value, ring in self.cta.slots.items():
            for slot in ring:
                if slot.landed:
                    slot.readers.add(self.role.role.name)
                slot.read = slot.read and self.channel(value).transport == "tma"
        self.meet_for_shares()

    def meet_for_shares(self) -> None:
        """Every agent of the role has come this far; only one role shares sums."""
        for shares in self.cta.shares.values():
            shares.visible, shares.read = True, False

    def arrive(self, name: str, value: str, n: int, ahead: int) -> None:
        spec = self.cta.bars[name][0].spec
        for cta in (self.cta,) if spec.blocks == 1 else self.reached(name):
            ring = cta.bars[name]
            at = (self.position[value] + ahead) % len(ring)
            if ring[at].arrive(n):
                cta.count(ring[at], at)

    def deliver(self, barrier: str, ahead: int) -> None:
        """A barrier was waited for: bytes it counts have landed and may be read by this role, or its readers are done."""
        spec = self.cta.bars[barrier][0].spec
        for told in spec.values:
            slots = self.cta.slots[told]
            slot = slots[(self.position[told] + ahead) % len(slots)]
            if not spec.tx_bytes:
                for cta in (self.cta,) if spec.blocks == 1 else self.cta.cluster.blocks:
                    cta.slots[told][(self.position[told] + ahead) % len(slots)].read = False
            elif slot.counted:
                slot.landed = True
                slot.readers.add(self.role.role.name)

    def wait(self, name: str, position: int) -> Iterator[bool]:
        ring = self.cta.bars.get(name)
        if ring is None:
            return
        bar = ring[position % len(ring)]
        parity = (position // len(ring) + bar.spec.first_parity[position % len(ring)]) & 1
        while bar.phase == parity:  # PTX: waiting on parity p blocks while the present phase has parity p
            yield True

    def load(self, value: str) -> Block:
        c = self.cta.outline.launch.tile.channel(value)
        return self.value(value) if c is None else self.read(c, self.position[value])

    def read(self, c: Channel, fill: int) -> Block:
        """That fill of a channel, which must be in its slot and visible to this role."""
        slot = self.cta.slots[c.value][fill % c.depth]
        visible = self.role.role.name in slot.readers
        if slot.block is None or slot.fill != fill or not visible:
            state = "nothing" if slot.block is None else f"fill {slot.fill}" + ("" if visible else ", not yet visible")
            raise Race(f"{self.role.role.name} reads fill {fill} of {c.value}, its slot holds {state}")
        slot.read = True
        return slot.block

    def fetch(self, name: str, ahead: int) -> None:
        """Read the fills that the stage's next Compute begins with, those that there are."""
        for value in self.stage(name).reads:
            c = self.cta.outline.launch.tile.channel(value)
            if c and ahead < self.left(value):
                self.read(c, self.position[value] + ahead)

    def deferred(self, name: str) -> bool:
        """Whether the stage's work reads on until it is settled."""
        atoms = self.cta.outline.launch.tile.work(name).atoms
        return any(a.stage == name and ATOMS[a.name].deferred for a in atoms)

    def held(self, name: str) -> dict[str, int]:
        """value -> the fill that a work of the stage reads now."""
        channel = self.cta.outline.launch.tile.channel
        return {v: self.position[v] for v in self.stage(name).reads if channel(v)}

    def settle(self, name: str, pending: int) -> None:
        """All but the last `pending` works of the stage are done: what they read must still be there."""
        flying = self.flying.get(name, [])
        while len(flying) > pending:
            for value, fill in flying.pop(0).items():
                slots = self.cta.slots[value]
                now = slots[fill % len(slots)].fill
                if now != fill:
                    raise Race(f"{value} is refilled (fill {now}) while {name} works on fill {fill}")

    def value(self, name: str) -> Block:
        """A value without a channel: made in this tile, or in memory."""
        if name in self.values:
            return self.values[name]
        if any(w.stage == name for w in self.cta.outline.launch.tile.works):
            raise PlanError(f"{self.role.role.name} reads {name} before it is computed")
        self.check_waited(f"reads {name}", name)
        return self.cta.memory[name]

    def check_waited(self, doing: str, value: str | None = None) -> None:
        """Launches before an early one may still write what is not constant, and read what this one stores."""
        constant = value is not None and self.plan.program.is_constant(value)
        if self.cta.outline.launch.early and not self.waited and not constant:
            raise Race(f"{self.role.role.name} {doing} before it has waited for the launches before")

    # ------------------------------------------------------------ works
    def stage(self, name: str) -> Stage:
        return self.plan.program.stage(name)

    def open(self, name: str) -> None:
        s = self.stage(name)
        assert s.monoid is not None
        self.accs[name] = {
            c: _blank(c, axes, self.env, v) for (c, axes), v in zip(_components(s), s.monoid.identity, strict=True)
        }

    def accumulators(self, name: str) -> dict[str, Block]:
        if name not in self.accs:
            raise PlanError(f"{self.role.role.name} folds or closes {name}, whose accumulators are not open")
        return self.accs[name]

    def compute(self, name: str) -> None:
        s = self.stage(name)
        if s.monoid is None:
            self.values[name] = interpret.whole(name, s.axes, self.env, interpret.value_of(s, self.env, self.load))
            return
        for env in self.leaves(name):
            new = interpret.lift(s, env, self.load)
            self.fold(name, env, new)

    def leaves(self, name: str) -> Iterator[Env]:
        """The blocks that the work's own loops make of the block in scope; an atom runs through the last folded one."""
        nest = self.cta.outline.launch.tile.work(name).nest
        if nest and nest[-1].axis in self.stage(name).folded:
            nest = nest[:-1]
        blocks: list[Env] = [dict(self.env)]
        for loop in nest:
            blocks = [{**e, loop.axis: piece} for e in blocks for piece in _pieces(e[loop.axis], loop.step)]
        yield from blocks

    def mine(self, name: str) -> dict[str, Block]:
        """The accumulators that this agent folds into: its own where agents have shares of a folded axis."""
        s, acc, nest = self.stage(name), self.accumulators(name), self.cta.outline.launch.tile.nest
        agent = tuple(j for at, j in self.side.items() if nest[at].axis in s.folded)
        if sharers(self.plan, nest, s) == 1:
            return acc
        assert s.monoid is not None
        nothing = zip(acc.items(), s.monoid.identity, strict=True)
        own = {c: Block(b.name, b.axes, b.lo, np.full_like(b.data, v)) for (c, b), v in nothing}
        return self.shares.setdefault(name, {}).setdefault(agent, own)

    def others(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Where in shared memory the agents have their place that fold the same elements as this one."""
        s, nest = self.stage(name), self.cta.outline.launch.tile.nest
        return name, tuple(j for at, j in self.side.items() if nest[at].axis not in s.folded)

    def share(self, name: str) -> None:
        cluster = self.cta.cluster
        self.finished(name)
        if cluster.size > 1:
            parts = self.shares.pop(name, None) or {(): self.accumulators(name)}
            cluster.sums[name, self.cta.rank] = (cluster.meeting, tuple(parts[agent] for agent in sorted(parts)))
            return
        at = self.others(name)
        if at in self.cta.shares and self.cta.shares[at].read:
            raise Race(f"{self.role.role.name} shares {name} anew before all have gathered the last tile's")
        if name not in self.shares:  # one agent's sums are all
            self.shares[name] = {(): self.accumulators(name)}
            self.open(name)
        parts = self.shares.pop(name)
        self.cta.shares[at] = _Shares(parts)

    def gather(self, name: str) -> None:
        if self.cta.cluster.size > 1:
            self.take(name)
            return
        shares = self.cta.shares.get(self.others(name))
        if shares is None or not shares.visible:
            raise Race(f"{self.role.role.name} gathers {name} before all agents have met")
        shares.read = True
        for agent in sorted(shares.of):
            new = {c: Named(b.axes, b.data) for c, b in shares.of[agent].items()}
            self.join(name, self.accumulators(name), self.env, new)

    def take(self, name: str) -> None:
        """The sums of all blocks of the cluster, for this block's part of the elements: from here on its piece of the axis."""
        cluster, axis = self.cta.cluster, self.stage(name).axes[0]
        lo, hi = self.env[axis]
        part = -(-(hi - lo) // cluster.size)
        first = min(hi, lo + self.cta.rank * part)
        self.env[axis] = (first, min(hi, first + part))
        self.open(name)
        for rank in range(cluster.size):
            meeting, parts = cluster.sums.get((name, rank), (cluster.meeting, ()))
            if meeting == cluster.meeting:
                raise Race(f"{self.role.role.name} takes {name} of block {rank} of its cluster before all have met")
            if rank in cluster.gone:
                raise Race(f"{self.role.role.name} takes {name} of block {rank} of its cluster, which has ended")
            for sums in parts:
                yielded = {c: Named(b.axes, b.data[b.window(self.env)]) for c, b in sums.items()}
                self.join(name, self.accumulators(name), self.env, yielded)

    def fold(self, name: str, env: Env, new: Mapping[str, Named]) -> None:
        self.join(name, self.mine(name), env, new)

    def join(self, name: str, acc: dict[str, Block], env: Env, new: Mapping[str, Named]) -> None:
        s = self.stage(name)
        assert s.monoid is not None
        old = {c: Named(b.axes, b.data[b.window(env)]) for c, b in acc.items()}
        for c, x in interpret.combine(s.monoid, old, dict(new)).items():
            b = acc[c]
            window = b.data[b.window(env)]
            b.data[b.window(env)] = np.broadcast_to(x.to(b.axes), window.shape)

    def fold_parts(self, name: str) -> None:
        w = self.plan.workspace(name)
        assert w is not None
        self.check_waited(f"reads parts of {name}")
        lo, hi = self.cta.whole[w.axis]
        for part in range(-(-(hi - lo) // self.plan.part_step(w))):
            blocks = {c: self.cta.memory[f"{name}@{c}@{part}"] for c, _ in _components(self.stage(name))}
            new = {c: Named(b.axes, b.data[b.window(self.env)]) for c, b in blocks.items()}
            self.join(name, self.accumulators(name), self.env, new)

    def complete(self, name: str) -> dict[str, Block]:
        """The accumulators of a stage, which are closed by this."""
        if self.shares.get(name):
            raise PlanError(
                f"{self.role.role.name} closes {name}, of which {len(self.shares[name])} agents hold shares"
            )
        acc = self.accumulators(name)
        self.finished(name)
        del self.accs[name]
        return acc

    def close(self, name: str) -> None:
        s, acc = self.stage(name), self.complete(name)
        assert s.monoid is not None
        done = interpret.finish(s.monoid, {c: Named(b.axes, b.data) for c, b in acc.items()})
        self.values[name] = interpret.whole(name, s.axes, self.env, done)

    def store_state(self, name: str) -> None:
        w, acc = self.plan.workspace(name), self.complete(name)
        assert w is not None
        part = self.env[w.axis][0] // self.plan.part_step(w)
        for c, b in acc.items():
            self.put(self.cta.memory[f"{name}@{c}@{part}"], b)

    def finished(self, name: str) -> None:
        if self.flying.get(name):
            raise Race(f"{name} is closed while {len(self.flying[name])} of its works are under way")

    def put(self, memory: Block, block: Block) -> None:
        """The block goes to its place in memory, which no other block may have written."""
        self.check_waited(f"stores {block.name}")
        at = tuple(slice(lo, lo + n) for lo, n in zip(block.lo, block.data.shape, strict=True))
        if prod(block.data.shape) and not np.isnan(memory.data[at]).all():
            where = ",".join(f"{a} {x.start}..{x.stop}" for a, x in zip(block.axes, at, strict=True))
            raise PlanError(f"{block.name} is stored twice at {where}")
        memory.data[at] = block.data
