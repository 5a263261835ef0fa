"""What a plan means: its steps run on named blocks, roles as coroutines that meet only at the derived barriers.

Execution is adversarial: a copy overwrites its slot when it is issued and lands at the last legal moment, a role holds
what it reads for a while, and roles interleave at random, some far ahead of others. A missing or wrong barrier
deadlocks or raises Race here, before any compiler sees the plan. Float64 throughout; threads inside a role are not
modelled (the emulator of generated text does that).
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from emmy.codegen.executed_block import Cluster, Cta, Env, Left, Ring, Slot, blank, components, pieces
from emmy.codegen.executed_work import Works
from emmy.codegen.lower import lower
from emmy.codegen.steps import (
    Advance,
    Ahead,
    Ask,
    At,
    AwaitCleared,
    AwaitFlag,
    BarArrive,
    BarWait,
    BlockSync,
    Clear,
    Close,
    ClusterSync,
    Commit,
    Compute,
    Copy,
    CountBegun,
    CountFirst,
    CountPart,
    EachTile,
    Fetch,
    Finish,
    FoldParts,
    For,
    ForHelpers,
    From,
    Gather,
    Helping,
    IfLast,
    Late,
    LaunchWait,
    LeaveSums,
    LetNext,
    LowerFlag,
    Open,
    Outline,
    Owning,
    PassCleared,
    Prefetch,
    Preload,
    RaiseCleared,
    RaiseFlag,
    ResetCount,
    RoleSync,
    Settle,
    Share,
    Step,
    Store,
    StoreState,
    TakeParts,
    TakeSums,
    Together,
    TurnPass,
    TurnWait,
    WaitGroup,
)  # fmt: skip
from emmy.errors import Deadlock, PlanError, Race
from emmy.ir import interpret
from emmy.ir.atoms import ATOMS
from emmy.ir.dtype import size_bytes
from emmy.ir.expr import Array, Block, outermost
from emmy.ir.gpu import block_axes, cluster_size, parts_left, receivers, sharing_blocks
from emmy.ir.masks import bounds
from emmy.ir.moves.streamk import whole_rounds
from emmy.ir.plan import SIDE, Channel, Plan

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
        memory[s.out] = blank(s.out, s.axes, env, np.nan)
    for w in plan.workspaces:
        for c, axes in components(plan.program.stage(w.value)):
            for part in range(w.parts):
                memory[f"{w.value}@{c}@{part}"] = blank(c, axes, env, np.nan)
    for outline in lower(plan):
        outline = damage(outline) if damage else outline
        if outline.launch.tile.order.kind == "streamk":
            _run_together(outline, memory, env, seed)
            continue
        dealt, size, clusters = (
            _deal(outline, env, memory),
            cluster_size(plan, outline.launch.tile.nest),
            list[list[Cta]](),
        )
        for first in range(0, len(dealt), size):
            computing = size * sum(bool(r.role.works) for r in outline.roles)
            cluster = Cluster(sharing_blocks(plan, outline.launch.tile), computing, size * len(outline.roles))
            ctas = [Cta(outline, memory, tiles, env, cluster, i) for i, tiles in enumerate(dealt[first : first + size])]
            cluster.blocks += ctas
            clusters.append(ctas)
        if parts_left(plan, outline.launch.tile):
            _run_counting(clusters, random.Random(f"{seed}"))
            continue
        for i, ctas in enumerate(clusters):
            _run(ctas, random.Random(f"{seed}.{i}"))
    return {o: memory[o].data for o in plan.program.outputs}


def _run_together(outline: Outline, memory: dict[str, Block], env: Env, seed: int) -> None:
    """All blocks at once, each on its share of all steps of all tiles."""
    t = outline.launch.tile
    loop, tiles, left = t.nest[t.n_block_loops], _tiles(outline, env, memory), dict[int, Left]()
    steps = pieces(env[loop.axis], loop.step)
    rounds = whole_rounds(len(tiles), t.order.workers)
    alone, tiles = tiles[: rounds * t.order.workers], tiles[rounds * t.order.workers :]
    total = len(tiles) * len(steps)
    workers = min(t.order.workers, total)
    begin = [w * (total // workers) + min(w, total % workers) for w in range(workers + 1)]
    ctas = []
    for w, (lo, hi) in enumerate(pairwise(begin)):
        mine = alone[w::workers]
        helpers = [range(0)] * len(mine)
        for tile in range(lo // len(steps), -(-hi // len(steps))):
            first, end = tile * len(steps), (tile + 1) * len(steps)
            share = steps[max(lo - first, 0) : min(hi, end) - first]
            mine.append({**tiles[tile], loop.axis: (share[0][0], share[-1][1])})
            helpers.append(range(w + 1, bisect_left(begin, end)))
        cluster = Cluster(1, 0, len(outline.roles))
        ctas.append(Cta(outline, memory, mine, env, cluster, 0, number=w, helpers=helpers, left=left))
    _run(ctas, random.Random(f"{seed}"))
    up = [w for w, x in left.items() if x.raised]
    if up:
        raise PlanError(
            f"{outline.launch.name} ends with the flags of blocks {up} up: the next launch would take them for its own"
        )


def _run_counting(clusters: list[list[Cta]], rng: random.Random) -> None:
    """All blocks at once, which count the parts that they leave."""
    ctas, counts = [cta for ctas in clusters for cta in ctas], clusters[0][0].counts
    for cta in ctas:
        cta.counts = counts
    _run(ctas, rng)
    for (stage, _), count in counts.items():
        if count.parts or count.zero:
            raise PlanError(
                f"{ctas[0].outline.launch.name} ends with {count.parts} parts of {stage} counted: the next launch would add its own"
            )
    for name, b in ((x.value, b) for x in ctas[0].outline.plan.workspaces if x.marked for b in ctas[0].parts(x)):
        if any(not np.isnan(x.data).all() for x in b.values()):
            raise PlanError(
                f"{ctas[0].outline.launch.name} ends with parts of {name} marked: the next launch would take them"
            )


def _deal(outline: Outline, env: Env, memory: Mapping[str, Block]) -> list[list[Env]]:
    """Tiles of each block, in order."""
    tiles = _tiles(outline, env, memory)
    workers = outline.launch.tile.order.workers or len(tiles)
    return [tiles[w::workers] for w in range(min(workers, len(tiles)))]


def _tiles(outline: Outline, env: Env, memory: Mapping[str, Block]) -> list[Env]:
    """All tiles of the launch, in order."""
    t = outline.launch.tile
    tiles = [env]
    for i, loop in enumerate(t.nest[: t.n_block_loops]):
        whole = outline.plan.count(t.nest, i) if loop.level == "cluster" else 0  # a cluster has all its blocks
        tiles = [{**e, loop.axis: piece} for e in tiles for piece in pieces(e[loop.axis], loop.step, whole)]
    return [_unmasked(outline, tile, memory) for tile in tiles]


def _unmasked(outline: Outline, tile: Env, memory: Mapping[str, Block]) -> Env:
    """The tile, of which loops in time walk whole pieces between the first and the last position that masks leave."""
    nest, out = outline.launch.tile.nest, dict(tile)
    for b in bounds(outline.plan, outline.launch):
        (lo, hi), (first, end) = out[b.axis], tile.get(b.other.axis, (0, 1))
        there = (
            int(memory[b.other.read.value].data[tuple(tile[a][0] for a in b.other.read.axes)]) if b.other.read else 0
        )
        first, end = first // b.other.over + there, (end - 1) // b.other.over + 1 + there
        step = next(x.step for x in nest if x.axis == b.axis and x.level == "serial")
        if b.upper:
            hi = max(lo, min(hi, end + b.offset))
        else:
            begin = max(lo, lo + (first + b.offset - lo) // step * step)
            lo, hi = (begin, hi) if begin < hi else (lo, lo)  # a part that has nothing to fold keeps its place
        out[b.axis] = (lo, max(lo, hi))
    return out


def _run(ctas: list[Cta], rng: random.Random) -> None:
    """All roles of a cluster's blocks to their end. Who goes on is drawn at each step; how often it changes is drawn once."""
    for cta in ctas:
        cta.begin()
    live = [_Agent(cta, role).run() for cta in ctas for role in cta.outline.roles]
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
class _Agent(Works):
    """A role walking its steps. Yields True when it must wait, False after anything another role could notice."""

    seq: int = 0
    position: dict[str, int] = field(default_factory=dict)
    rings: dict[int, Ring] = field(default_factory=dict)
    group: list[Slot] = field(default_factory=list)
    groups: list[list[Slot]] = field(default_factory=list)
    further: dict[int, int] = field(
        default_factory=dict
    )  # loop -> how many fills ahead of its turn the present work is
    last_agent: dict[int, bool] = field(default_factory=dict)  # loop over agents -> whether this is its last

    def run(self) -> Iterator[bool]:
        t = self.cta.outline.launch.tile
        self.position = {c.value: 0 for c in t.channels}
        self.cta.begun = True
        yield from self.steps(self.cta.outline.first)
        yield from self.steps(self.role.before)
        deal = self.role.role.deal
        for seq, tile in enumerate(self.cta.tiles):
            self.seq = seq
            self.env, self.values, self.accs, self.shares, self.beside = dict(tile), {}, {}, {}, {}
            self.asks.clear()
            if deal is None or seq % deal[1] == deal[0]:
                yield from self.steps(self.role.steps)
                if self.groups:
                    raise Race(f"{self.role.role.name} ends a tile with {len(self.groups)} groups of copies under way")
            else:
                self.skip(self.role.steps)
        for tile in self.tiles:
            self.env, self.values, self.accs, self.shares = dict(tile), {}, {}, {}
            yield from self.steps(self.role.after)
        yield from self.steps(self.cta.outline.last)
        if self.role.role.works:
            self.cta.cluster.gone.add(self.cta.rank)

    @property
    def tiles(self) -> list[Env]:
        """Those of the block that the role makes."""
        deal = self.role.role.deal
        return self.cta.tiles[deal[0] :: deal[1]] if deal else self.cta.tiles

    def skip(self, steps: tuple[Step, ...]) -> None:
        """A tile of another dealt role: walked only to count its fills."""
        for s in steps:
            if isinstance(s, Advance):
                for x in s.values:
                    self.position[x] += 1
            elif isinstance(s, For):
                whole = self.env[s.loop.axis]
                for piece in pieces(whole, s.loop.step):
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
                self.flying.setdefault(self.key(x), []).append(self.held(x))
                yield False  # still at work on what it read
                if self.deferred(x):
                    self.settle_loaded(x)
                else:
                    self.settle(x, 0)
            case Settle(x, n):
                yield False
                self.settle(x, n)
            case Fetch(x, ahead):
                self.fetch(x, ahead)
            case Preload(x) if not self.stage(x).reduces:
                if not any(map(self.plan.program.is_fixed, outermost(self.stage(x).body))):
                    raise Race(f"{self.role.role.name} fetches for {x} what launches before may still write")
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
            case Ahead(x, n, body):
                if n < self.left(x):
                    yield from self.ahead(x, n, body)
            case Together(body):
                if all(self.last_agent.values()):
                    yield from self.steps(body)
            case From(x, fill, body):
                ring = self.ring(self.channel(x))
                if ring is not None and ring.j >= fill:
                    yield from self.steps(body)
            case At(x, fill, body):
                ring = self.ring(self.channel(x))
                if ring is not None and ring.j == min(fill, ring.fills - 1):
                    yield from self.steps(body)
            case Late(x, n, body, turns):
                ring = self.ring(self.channel(x))
                for later in range(turns):
                    if ring is not None and ring.j == max(0, ring.fills - n + later):
                        yield from self.steps(body)
            case Prefetch(x) | Ask(x):
                self.check_waited(f"asks for {x}", x)
                self.asks[x] += isinstance(s, Ask)
            case Helping(body) | Owning(body):
                if self.owns == isinstance(s, Owning):
                    yield from self.steps(body)
            case ForHelpers(body):
                for helper in self.cta.helpers[self.seq]:
                    self.helper = helper
                    yield from self.steps(body)
            case LeaveSums(x):
                self.leave(x)
                yield False
            case RaiseFlag(x):
                self.raise_flag(x)
                yield False
            case AwaitFlag():
                while not (left := self.cta.left.get(self.helper)) or not left.raised:
                    yield True
                left.seen = True
            case LowerFlag(x):
                self.lower_flag(x)
            case TakeSums(x):
                self.take_left(x)
            case CountPart(x) | CountBegun(x):
                self.count_part(x)
                yield False
            case EachTile(body):
                for tile in self.tiles:
                    self.env = dict(tile)
                    yield from self.steps(body)
            case CountFirst(x, body):
                if self.count_first(x):
                    yield from self.steps(body)
            case Clear(x):
                self.clear(x)
                yield False
            case RaiseCleared(x):
                self.raise_cleared(x)
                yield False
            case AwaitCleared(x):
                while not self.count(x).zero:
                    yield True
                self.seen.add(self.elements(x))
            case PassCleared(x):
                self.pass_cleared(x)
            case TakeParts(x):
                yield from self.take_parts(x)
            case IfLast(x, body):
                if self.is_last(x):
                    yield from self.steps(body)
            case ResetCount(x):
                self.reset_count(x)

    @property
    def owns(self) -> bool:
        """Whether this block's share begins the tile."""
        t = self.cta.outline.launch.tile
        axis = t.nest[t.n_block_loops].axis
        return self.env[axis][0] == self.cta.whole[axis][0]

    def loop(self, s: For) -> Iterator[bool]:
        axis, whole = s.loop.axis, self.env[s.loop.axis]
        self.rings[s.at] = Ring(*whole, s.loop.step)
        least = int(s.loop.level in SIDE)  # an agent without a piece waits and arrives like the others
        walked = pieces(whole, s.loop.step, least)
        for j, piece in enumerate(walked):
            self.rings[s.at].j = j
            if least:
                self.last_agent[s.at] = j + 1 == len(walked)
            self.env[axis] = piece
            if s.loop.level in SIDE:
                self.side[s.at] = j
            yield from self.steps(s.body)
            self.env[axis] = whole
        self.side.pop(s.at, None)
        self.last_agent.pop(s.at, None)
        del self.rings[s.at]

    # ------------------------------------------------------------ channels
    def ring(self, c: Channel) -> Ring | None:
        """The loop that refills the channel, entered or about to be; None when that is the tile itself."""
        t = self.cta.outline.launch.tile
        if c.at < t.n_block_loops:
            return None
        loop = t.nest[c.at]
        return self.rings.get(c.at) or Ring(*self.env[loop.axis], loop.step)

    def left(self, value: str) -> int:
        """Fills of a channel from the present one on, in the present loop."""
        c = self.channel(value)
        r = self.ring(c)
        return 1 if r is None else r.fills - r.j

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
        block = blank(value, source.axes, env, np.nan)
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

    def reached(self, what: str) -> Iterator[Cta]:
        """Blocks of the cluster, of which each must be able to take something now."""
        for cta in self.cta.cluster.blocks:
            if not cta.begun:
                raise Race(f"{self.role.role.name} reaches block {cta.rank} for {what} before its barriers are ready")
            if cta.rank in self.cta.cluster.gone:
                raise Race(f"{self.role.role.name} reaches block {cta.rank} for {what}, which has ended")
            yield cta

    def fill(self, cta: Cta, c: Channel, fill: int, block: Block, blocks: int = 1) -> Slot:
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
            along, _ = block_axes(self.plan, tile, c)
            rows = self.plan.extent(tile.nest[: c.at + 1], along) // blocks
            mine = [slice(None)] * block.data.ndim
            mine[block.axes.index(along)] = slice(self.cta.rank * rows, (self.cta.rank + 1) * rows)
            slot.block.data[tuple(mine)] = block.data[tuple(mine)]
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
        """Every agent of the role has come this far; only one role shares sums, or leaves and takes them."""
        for shares in self.cta.shares.values():
            shares.visible, shares.read = True, False
        self.unmet.clear()
        self.cta.zero |= self.seen
        self.told |= self.counted
        if self.cta.number in self.cta.left:
            self.cta.left[self.cta.number].met = True
        if self.helper in self.cta.left:
            self.cta.left[self.helper].known = self.cta.left[self.helper].seen

    def arrive(self, name: str, value: str, n: int, ahead: int) -> None:
        spec = self.cta.bars[name][0].spec
        self.cta.zero |= self.seen
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
        return self.value(value) if c is None else self.read(c, self.fill_of(value))

    def fill_of(self, value: str) -> int:
        """The fill of a channel that a work reads now."""
        return self.position[value] + self.further.get(self.channel(value).at, 0)

    def ahead(self, value: str, n: int, body: tuple[Step, ...]) -> Iterator[bool]:
        """The body, of the fill n beyond the present one."""
        at, ring = self.channel(value).at, self.ring(self.channel(value))
        assert ring is not None
        axis, lo = self.cta.outline.launch.tile.nest[at].axis, ring.lo + (ring.j + n) * ring.step
        here, self.env[axis], self.further[at] = self.env[axis], (lo, min(lo + ring.step, ring.hi)), n
        yield from self.steps(body)
        self.env[axis] = here
        del self.further[at]

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
        return {v: self.fill_of(v) for v in self.stage(name).reads if channel(v)}

    def settle_loaded(self, name: str) -> None:
        """What lanes load to registers has been read, unlike the rest: it must be there now, and may be refilled then."""
        atoms = self.cta.outline.launch.tile.work(name).atoms
        if any(a.stage == name and ATOMS[a.name].loaded for a in atoms):
            first = self.stage(name).reads[0]
            self.unchanged(name, first, self.flying[name][-1].pop(first))

    def unchanged(self, name: str, value: str, fill: int) -> None:
        """A fill that a work reads must still be in its slot."""
        slots = self.cta.slots[value]
        now = slots[fill % len(slots)].fill
        if now != fill:
            raise Race(f"{value} is refilled (fill {now}) while {name} works on fill {fill}")

    def settle(self, name: str, pending: int) -> None:
        """All but the last `pending` works of the stage are done: what they read must still be there."""
        flying = self.flying.get(self.key(name), [])
        while len(flying) > pending:
            for value, fill in flying.pop(0).items():
                self.unchanged(name, value, fill)
