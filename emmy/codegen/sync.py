"""Every wait and arrive of a launch, derived from its roles, channels and order. Nothing else may create one.

Rules, each from the facts of a channel:
- pack: filled by the agent that reads it; nothing to wait for.
- ldg, cp_async (self-fed): one commit group an iteration for all such channels of a loop; with depth >= 2 everywhere wait
  until depth - 2 groups are pending and meet once, else wait for all and meet twice.
- ldg, cp_async read ahead: a work that fetches its first operands of fill j + 1 before it finishes fill j meets in
  between: then fill j + 1 is there for all, and fill j + depth may go where all have read fill j.
- tma: rings that turn in one loop, in as many slots, for the same works and roles, are filled and given back together.
  They have barriers full (1 arrival + bytes) and empty (one arrival for each agent that reads ONE fill: a dealt ring is read by one
  consumer, a shared one by all) for each slot. A slot is given back when what was read is used up, never sooner: loads
  that are still on their way at a block sync are not ordered before the copy engine's writes (measured: wrong sums).
  Self-fed rings refill the slot of the iteration before, so that nobody waits for the slowest agent of this one.
- works side by side (`emmy.ir.beside`) count as one: what they read shares barriers, and they meet once to exchange sums.
- works of one ring loop that read different rings give each back behind its last reader: it is refilled while others go on.
- a work that is begun ahead, for the next piece, waits for that fill before it begins, and is done before its turn: then its ring
  is given back. What others make of its result goes on meanwhile.
- works that are deferred (their atom reads on while the next is issued): one stays under way, so an iteration gives back
  the slots of the one before, and a self-fed ring is refilled there; with one slot everything is waited for. What lanes
  load to registers before, of a ring of ldg or cp_async, is read when they have issued: its ring turns as without deferring.
- agents of a role that fold shares of one element meet between giving their sums and taking them; where a block does so several
  times, in a loop or for several tiles, they meet before too, so that all have taken the last.
- sums of swapped factors pass through shared memory: the agents of the role that made them meet as those do that fold shares.
- blocks of a cluster that fold shares of one element meet between giving their sums and taking them, and before they end,
  for their memory is gone with them.
- blocks of a cluster that make neighbouring tiles fill together what they read alike (`receivers`): each brings its rows to
  all. Full barriers expect the whole bytes, whoever brings them. A slot is given back when the agents of ALL those blocks have
  used it, so each arrives at the empty barrier of each block. They meet before the first fill, for barriers are made ready by
  then, and before they end: others may still arrive at theirs.
- ping-pong: a turn token for each dealt role, held from its first wait for a fill of the tile to its last: between those
  no other role waits, so no parity is more than one lap old.
- early launches: fills of constants that stand before the first access of anything else begin first, then comes the wait
  for the launches before, then all the rest; every role waits. Where a barrier counts the bytes of a constant and of
  what is not, it expects all of them when the constant's are fetched. The next launch may begin at once: its blocks find
  room only when all of this one's have begun (PTX ISA: griddepcontrol.launch_dependents), so they cannot take it from them.
- stream-K: a block whose share does not begin its tile leaves its sums, its agents meet, one raises the block's flag. The block
  whose share begins the tile waits for the flag of each helper in turn and lowers it, its agents meet, then take the sums.
  A helper's share is the first that its block walks, so that it waits for nobody; a flag has one waiter, which lowers it, so that
  all are down when the launch ends.
- parts that the last block combines: the agents of the role that left them meet, one counts, they meet again, and where it was the
  last all combine. That comes behind the last tile, for each tile once more: counting waits until what was stored has come to
  where all see it, which no further tile should wait for. The last sets the count back, when every other has counted.
- marked parts that the last block to begin combines: blocks are counted before their first tile, when launches before have ended;
  an early launch's role that makes the tiles begins nothing sooner then. Behind the last tile agents know what was counted, if
  they have met since, and where it was the last all combine. Parts are waited for one by one: they come from blocks that have
  begun, and wait for nobody before they have left theirs.
- parts that memory adds: the first to count sets the rows to zero and raises a flag. Each block hears of it once, long after.
  A role that only fills does all that in each tile: it counts when all slots have been filled, and waits for the flag before it
  fills them for the third time; all who use that fill know then. Else blocks count as above, and one agent waits behind the ring
  loop, where they meet. Nobody who has counted waits before it has raised the flag. Whoever heard of it counts in the flag, and
  the last of them lowers it.
- what is asked for ahead of its use (`Asked`): whoever fills the rings asks, at that fill. Nobody waits for it, for it changes
  nothing that is read; of tiles that blocks share, who finishes them asks. An early launch may ask for what is not constant
  only after its wait: the cache would hold what the launch before has not written yet on its way to memory.
- what lanes ask for before the sums are done (`Preloaded`): one turn of the rings before their loop ends, when those who fill them
  have asked for all operands, or sooner, some at each step. Nobody else waits; an early launch waits for those before it first,
  unless the value is constant.
Positions are running counters of fills, never closed forms, so trip counts may vary (ragged edges, symbols, causal skips).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from emmy.codegen.steps import (
    Advance,
    Ask,
    At,
    AwaitCleared,
    AwaitFlag,
    BarArrive,
    Barrier,
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
    TurnPass,
    TurnWait,
    WaitGroup,
)
from emmy.ir.atoms import ATOMS
from emmy.ir.beside import beside, groups
from emmy.ir.expr import outermost
from emmy.ir.gpu import parts_left, receivers, sharers, sharing_blocks, trips, warps
from emmy.ir.moves.stage import SELF
from emmy.ir.plan import SIDE, Channel, Launch, Plan, Role, Work, Workspace
from emmy.ir.row_tiles import row_tile

GROUPED = ("ldg", "cp_async")
Joint = tuple[Channel, ...]  # channels of the copy engine that share their barriers


def joints(plan: Plan, launch: Launch) -> tuple[Joint, ...]:
    """The launch's channels of the copy engine: those that are filled, read and given back together, together."""
    found: dict[object, list[Channel]] = {}
    for c in launch.tile.channels:
        works = (group[0] for group in groups(plan.program, launch.tile.works) if _read(plan, group, c.value))
        readers = tuple(w.stage for w in works if not w.combine)
        if c.transport == "tma":
            found.setdefault((c.at, c.depth, c.src, c.dst, readers), []).append(c)
    return tuple(tuple(cs) for cs in found.values())


def _read(plan: Plan, group: tuple[Work, ...], value: str) -> bool:
    return any(value in plan.program.stage(w.stage).reads for w in group)


def _name(kind: str, joint: Joint) -> str:
    return "_".join((kind, *(c.value for c in joint)))


def barriers(plan: Plan, launch: Launch) -> tuple[Barrier, ...]:
    """The mbarriers a launch needs."""
    t, out = launch.tile, list[Barrier]()
    roles = {r.name: r for r in t.roles}
    for joint in joints(plan, launch):
        c, values = joint[0], tuple(c.value for c in joint)
        n_bytes = sum(plan.slot_bytes(t, x) for x in joint)
        out.append(Barrier(_name("full", joint), c.depth, 1, n_bytes, (0,) * c.depth, values))
        blocks = _together(plan, launch, joint)
        eaters = [roles[d] for d in c.dst if d in roles]
        agents = (
            warps(plan, t.nest) if c.self_fed else eaters[0].agents if eaters[0].deal else sum(r.agents for r in eaters)
        )
        out.append(Barrier(_name("empty", joint), c.depth, agents * blocks, 0, (1,) * c.depth, values, blocks))
    if t.order.kind == "pingpong":
        n = sum(r.deal is not None for r in t.roles)
        out.append(Barrier("turn", n, 1, 0, tuple(int(i == 0) for i in range(n)), ()))
    return tuple(out)


def _together(plan: Plan, launch: Launch, joint: Joint) -> int:
    """Blocks of a cluster that fill slots of these rings together."""
    return max(receivers(plan, launch.tile, c) for c in joint)


def around_tiles(plan: Plan, launch: Launch) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """(what every role does before its first tile, what it does after its last)."""
    if all(_together(plan, launch, joint) == 1 for joint in joints(plan, launch)):
        return (), ()
    return (ClusterSync(every=True),), (ClusterSync(every=True),)


def after_loop(channels: tuple[Channel, ...]) -> tuple[Step, ...]:
    """Epilogue of a ring loop: no group is under way any more, not even those beyond the last fill."""
    depths = [c.depth for c in channels if c.self_fed and c.transport in GROUPED]
    return (WaitGroup(0),) if min(depths, default=1) > 1 else ()  # with one slot every iteration waits for all


def in_turn(steps: tuple[Step, ...], role: Role) -> tuple[Step, ...]:
    """The steps of a tile, with a dealt role's turn around all that waits for fills."""
    waiting = [i for i, s in enumerate(steps) if _waits(s)]
    if role.deal is None or not waiting:
        return steps
    first, last, (index, n) = waiting[0], waiting[-1] + 1, role.deal
    return (*steps[:first], TurnWait(index), *steps[first:last], TurnPass((index + 1) % n), *steps[last:])


def _waits(step: Step) -> bool:
    return isinstance(step, BarWait) or (isinstance(step, For) and any(_waits(s) for s in step.body))


@dataclass(frozen=True, slots=True)
class Sync:
    """What one role of a launch waits for and announces, around its works. `channels` are those that a loop refills."""

    role: Role
    joints: tuple[Joint, ...]

    def before_loop(self, channels: tuple[Channel, ...]) -> tuple[Step, ...]:
        """Prologue of a ring loop: all slots but one are filled ahead."""
        out: list[Step] = []
        grouped = [c for c in channels if c.self_fed and c.transport in GROUPED]
        deepest = max((c.depth for c in grouped), default=1)
        for step in range(1 - deepest, 0):
            out += [Copy(c.value, step + c.depth - 1) for c in grouped if step + c.depth - 1 >= 0]
            out.append(Commit())
        for joint in self._self_fed(channels):
            for ahead in range(joint[0].depth - 1):
                out += _fill(joint, ahead)
        return tuple(out)

    def top_of_iteration(self, channels: tuple[Channel, ...]) -> tuple[Step, ...]:
        """What happens before the work of one iteration of the loop that refills `channels`."""
        out: list[Step] = [Copy(c.value, 0) for c in channels if c.transport == "pack"]
        out += _grouped_top([c for c in channels if c.self_fed and c.transport in GROUPED])
        out += (s for joint in self._self_fed(channels) for s in _fill(joint, joint[0].depth - 1))
        out += self._full(channels)
        for joint in self._of(channels):
            if not joint[0].self_fed and joint[0].src == self.role.name:
                out += _fill(joint, 0)
        return tuple(out)

    def before_work(self, reads: tuple[str, ...], channels: tuple[Channel, ...], ahead: int = 0) -> tuple[Step, ...]:
        """Waits of a consumer before it reads what another role fills, the fill so many ahead."""
        read = tuple(c for c in channels if c.value in reads and self.role.name in c.dst and not c.self_fed)
        return tuple(_wait_full(joint, ahead) for joint in self._of(read))

    def bottom_of_iteration(self, channels: tuple[Channel, ...], early: tuple[Joint, ...] = ()) -> tuple[Step, ...]:
        """What happens after the work of one iteration; `early` were given back in it."""
        out: list[Step] = []
        if any(c.self_fed and c.depth == 1 and c.transport in GROUPED for c in channels):
            out.append(BlockSync())
        out += self._give_back(tuple(c for c in channels if all(c not in joint for joint in early)), 0)
        if channels:
            out.append(_advance(channels))
        return tuple(out)

    # ------------------------------------------------------------ works that fetch their first operands ahead
    def before_loop_ahead(self, channels: tuple[Channel, ...], works: tuple[str, ...]) -> tuple[Step, ...]:
        """Prologue of a ring loop whose works fetch ahead: slots are filled, the first operands fetched."""
        fetch = (Fetch(w, 0) for w in works)
        if channels[0].transport == "tma":
            return (*self.before_loop(channels), *self._full(channels), *fetch)
        depth = channels[0].depth
        fills: list[Step] = []
        for ahead in range(depth):
            fills += [*(Copy(c.value, ahead) for c in channels), Commit()]
        return (*fills, WaitGroup(depth - 1), BlockSync(), *fetch)

    def bottom_of_iteration_ahead(self, channels: tuple[Channel, ...], works: tuple[str, ...]) -> tuple[Step, ...]:
        """What follows the work of one iteration when works fetch ahead; such a loop has nothing to do at its top."""
        depth = channels[0].depth
        fetch, finish = (Fetch(w, 1) for w in works), (Finish(w) for w in works)
        if channels[0].transport == "tma":
            give_back = self._give_back(channels, 0)  # reads of this fill are all but done
            refill = (s for joint in self._self_fed(channels) for s in _fill(joint, depth - 1))
            waits = (_wait_full(joint, 1) for joint in self._self_fed(channels))
            return (*give_back, *refill, *waits, *fetch, *finish, _advance(channels))
        refills = (Copy(c.value, depth) for c in channels)
        meet = (WaitGroup(depth - 2), BlockSync())
        return (*meet, *refills, Commit(), *fetch, *finish, _advance(channels))

    # ------------------------------------------------------------ deferred works
    def top_of_iteration_deferred(self, channels: tuple[Channel, ...]) -> tuple[Step, ...]:
        """What happens before deferred works are issued; a producer of their operands has nothing to change."""
        grouped = [c for c in channels if c.self_fed and c.transport in GROUPED]
        return (*_grouped_top(grouped), *self._full(channels))

    def bottom_of_iteration_deferred(self, channels: tuple[Channel, ...], works: tuple[str, ...]) -> tuple[Step, ...]:
        """What follows deferred works that were just issued: those of the iteration before are done."""
        refill = (s for joint in self._self_fed(channels) for s in _fill(joint, joint[0].depth - 1))
        return (*(Settle(w, 1) for w in works), *self._give_back(channels, -1), *refill, _advance(channels))

    def after_loop_deferred(self, channels: tuple[Channel, ...], works: tuple[str, ...]) -> tuple[Step, ...]:
        """Epilogue of a ring loop with deferred works."""
        return (*(Settle(w, 0) for w in works), *self._give_back(channels, -1))

    # ------------------------------------------------------------ rings of the copy engine
    def _of(self, channels: tuple[Channel, ...]) -> Iterator[Joint]:
        return (joint for joint in self.joints if any(c in channels for c in joint))

    def _self_fed(self, channels: tuple[Channel, ...]) -> Iterator[Joint]:
        return (joint for joint in self._of(channels) if joint[0].self_fed)

    def _full(self, channels: tuple[Channel, ...]) -> tuple[Step, ...]:
        return tuple(_wait_full(joint) for joint in self._self_fed(channels))

    def given_back(self, channels: tuple[Channel, ...]) -> tuple[Joint, ...]:
        """Those of `channels` whose slots this role gives back."""
        return tuple(joint for joint in self._of(channels) if self.role.name in joint[0].dst)

    def give_back(self, joint: Joint, ahead: int = 0) -> tuple[Step, ...]:
        return (BarArrive(_name("empty", joint), joint[0].value, self.role.agents, ahead),)

    def _give_back(self, channels: tuple[Channel, ...], ahead: int) -> tuple[Step, ...]:
        return tuple(s for joint in self.given_back(channels) for s in self.give_back(joint, ahead))


def _fill(joint: Joint, ahead: int) -> tuple[Step, ...]:
    """Slots are filled, once everyone has given them back."""
    value = joint[0].value
    full = BarArrive(_name("full", joint), value, 1, ahead)
    return (BarWait(_name("empty", joint), value, ahead), *(Copy(c.value, ahead) for c in joint), full)


def _wait_full(joint: Joint, ahead: int = 0) -> Step:
    return BarWait(_name("full", joint), joint[0].value, ahead)


def _advance(channels: tuple[Channel, ...]) -> Step:
    return Advance(tuple(c.value for c in channels))


def _grouped_top(grouped: list[Channel]) -> list[Step]:
    if not grouped:
        return []
    refills: list[Step] = [Copy(c.value, c.depth - 1) for c in grouped]
    pending = min(c.depth for c in grouped) - 2
    if pending >= 0:
        return [WaitGroup(pending), BlockSync(), *refills, Commit()]
    return [*refills, Commit(), WaitGroup(0), BlockSync()]


def asked(launch: Launch, role: Role, channels: tuple[Channel, ...]) -> tuple[Step, ...]:
    """What a role that fills the rings of a loop asks for in an iteration, beside its fills."""
    t = launch.tile
    if not channels or channels[0].at != t.ring_loop or channels[0].src != role.name:
        return ()
    steps = tuple(At(channels[0].value, x.fill, (Prefetch(x.value),)) for x in t.asked)
    return (Owning(steps),) if steps and t.order.kind == "streamk" else steps


def preloaded(launch: Launch, channels: tuple[Channel, ...]) -> tuple[Step, ...]:
    """What lanes ask for before the last steps of the loop that fills the rings: all operands are under way by then."""
    t = launch.tile
    if not t.preloads or not channels or channels[0].at != t.ring_loop:
        return ()
    together: dict[tuple[int, int], tuple[Step, ...]] = {}
    for x in t.preloads:
        when = x.sooner or max(c.depth for c in channels), x.steps
        together[when] = (*together.get(when, ()), Ask(x.value))
    return tuple(Late(channels[0].value, n, asks, turns) for (n, turns), asks in together.items())


def exchanged(stages: tuple[str, ...]) -> tuple[Step, ...]:
    """Sums of the blocks of a cluster become one, of which each block takes its elements."""
    return (*map(Share, stages), ClusterSync(), *map(Gather, stages))


def end_of_tile(plan: Plan, launch: Launch, role: Role) -> tuple[Step, ...]:
    """No block of a cluster leaves while another reads its memory; roles that only fill do not matter."""
    return (ClusterSync(),) if sharing_blocks(plan, launch.tile) > 1 and role.works else ()


def gathered(stages: tuple[str, ...], role: Role, again: bool) -> tuple[Step, ...]:
    """Shares of a fold become one, or sums change hands, among the agents of one role.

    `again`: what was shared last lies in the same memory.
    """
    meet = _meeting(role)
    return (*((meet,) if again else ()), *map(Share, stages), meet, *map(Gather, stages))


def helped(steps: tuple[Step, ...], role: Role) -> tuple[Step, ...]:
    """The steps of a tile of which blocks have shares: from the sums' closing on, its owner goes on with everybody's."""
    at = next((i for i, s in enumerate(steps) if isinstance(s, Close)), None)
    if at is None:  # a role that only fills
        return steps
    stage, meet = steps[at].stage, _meeting(role)  # type: ignore[union-attr]
    leave = (LeaveSums(stage), meet, RaiseFlag(stage))
    take = ForHelpers((AwaitFlag(stage), LowerFlag(stage), meet, TakeSums(stage)))
    return (*steps[:at], Helping(leave), Owning((take, *steps[at:])))


def counted(stage: str, role: Role, finish: tuple[Step, ...]) -> tuple[Step, ...]:
    """A part that was left is counted, and the last block of those whose parts go together finishes the stage."""
    meet = _meeting(role)
    combine = IfLast(stage, (Open(stage), FoldParts(stage), *finish, ResetCount(stage)))
    return meet, CountPart(stage), meet, combine


def counted_first(launch: Launch, spaces: tuple[Workspace, ...]) -> tuple[Step, ...]:
    """What a role does before its tiles of which blocks count parts first: no launch before touches counts any more."""
    early = (LetNext(), LaunchWait()) if launch.early else ()
    counts = (_zeroed(x.value) if x.added else CountBegun(x.value) for x in spaces)
    return (*early, EachTile(tuple(counts))) if spaces else ()


def _zeroed(stage: str) -> Step:
    return CountFirst(stage, (Clear(stage), RaiseCleared(stage)))


def cleared_ahead(plan: Plan, launch: Launch, role: Role, channels: tuple[Channel, ...]) -> tuple[Step, ...]:
    """What a role that only fills the rings of a loop does about zeros in an iteration, before its fill, when it has time."""
    t, steps = launch.tile, _cleared(plan, launch)
    if not steps or t.ring_loop is None or not any(c.at == t.ring_loop for c in channels):
        return ()
    if filler(launch) != role.name:
        return ()
    n = trips(plan, t.nest, t.ring_loop) or 1
    value, depth = next((c.value, c.depth) for c in t.channels if c.at == t.ring_loop)
    counts = tuple(_zeroed(x.value) for x in parts_left(plan, launch.tile) if x.added)
    return At(value, min(depth, n - 1), counts), At(value, min(2 * depth, n - 1), steps)


def cleared_behind(plan: Plan, launch: Launch, role: Role, at: int | None) -> tuple[Step, ...]:
    """What the agents of a role do behind the loop that fills rings, or ahead of all without one, if nobody else waits for them."""
    steps = _cleared(plan, launch)
    if not steps or not role.works or launch.tile.ring_loop != at or filler(launch):
        return ()
    stages = (plan.program.stage(x.value) for x in parts_left(plan, launch.tile) if x.added)
    shared = all(sharers(plan, launch.tile.nest, s) > 1 for s in stages)  # then they meet anyway, before they add
    return steps if shared else (*steps, _meeting(role))


def _cleared(plan: Plan, launch: Launch) -> tuple[Step, ...]:
    return tuple(
        s for x in parts_left(plan, launch.tile) if x.added for s in (AwaitCleared(x.value), PassCleared(x.value))
    )


def filler(launch: Launch) -> str:
    """The role that fills the first rings inside a tile, and makes nothing; else none."""
    t = launch.tile
    src = next((c.src for c in t.channels if c.at == t.ring_loop), "")
    return src if any(r.name == src and not r.works for r in t.roles) else ""


def taken(stage: str, role: Role, tile: tuple[Step, ...], finish: tuple[Step, ...]) -> tuple[Step, ...]:
    """Where the block was the last to begin of those whose parts go together, it finishes the stage. tile: the steps before."""
    combine = IfLast(stage, (Open(stage), TakeParts(stage), *finish, ResetCount(stage)))
    return (*(() if any(map(_meets, tile)) else (_meeting(role),)), combine)


def _meets(s: Step) -> bool:
    """Whether all agents of a role meet in a step, whatever else they do."""
    return isinstance(s, BlockSync | RoleSync) or (
        isinstance(s, For) and s.loop.level in SIDE and any(map(_meets, s.body))
    )


def _meeting(role: Role) -> Step:
    """All agents of the role meet, where no other role computes."""
    return BlockSync() if role.name == SELF else RoleSync()


# ---------------------------------------------------------------- launches that begin early
def after_launch_wait(plan: Plan, launch: Launch, sync: Sync, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps of a tile of an early launch: constants are fetched as far as the rings reach, then the others' end is due.

    A role that only fills makes the first fills of constants ahead of its loop, where a block has one tile; the slots are
    still empty then.
    """
    at = next((i for i, s in enumerate(steps) if _reaches(plan, launch, s)), len(steps))
    while at < len(steps) and _is_one_with_open(launch, steps[at]) and at and isinstance(steps[at - 1], Open):
        at -= 1
    alone = tuple((c,) for c in launch.tile.channels if c.transport in GROUPED)
    every = (*alone, *sync.joints)
    begin = end = at
    while begin and _fills(steps[begin - 1], every):
        begin -= 1
    while end < len(steps) and _fills(steps[end], every):
        end += 1
    constants = {c.value for c in launch.tile.channels if plan.program.is_constant(c.value)}
    ahead = tuple(s for s in steps[begin:end] if _begins(s, every, constants))
    held = tuple(s for s in steps[begin:end] if s not in ahead)
    rest = steps[end:]
    if rest and isinstance(ring := rest[0], For) and launch.tile.order.kind == "static":
        mine = (j for j in sync.joints if j[0].at == ring.at and not j[0].self_fed and j[0].src == sync.role.name)
        peeled = tuple(j for j in mine if any(c.value in constants for c in j))
        fills = (s for joint in peeled for i in range(joint[0].depth) for s in _fill(joint, i)[1:])
        ahead += tuple(s for s in fills if _begins(s, peeled, constants))
        rest = (For(ring.at, ring.loop, _without_first(ring.body, peeled, constants)), *rest[1:])
    loads = _preloaded(plan, launch, steps[at]) if at < len(steps) else ()
    return (LetNext(), *steps[:begin], *ahead, *loads, LaunchWait(), *held, *rest)


def letting_next(plan: Plan, launch: Launch, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps of a launch that itself begins when others have ended, before one of its plan that need not."""
    after = any(la.early and launch.name in la.depends_on for la in plan.launches)
    return (LetNext(), *steps) if after else steps


def _is_one_with_open(launch: Launch, s: Step) -> bool:
    """Whether a fold that was just opened begins with a step: another's opening, parts, or elements that no instruction takes."""
    return isinstance(s, FoldParts | Open) or (isinstance(s, Compute) and not launch.tile.work(s.stage).atoms)


def _preloaded(plan: Plan, launch: Launch, s: Step) -> tuple[Step, ...]:
    """Loads of constants that a work without slots begins with, when it is what the launch would wait for."""
    if row_tile(plan, launch):
        works = (plan.program.stage(w.stage) for w in launch.tile.works if not w.combine)
        return tuple(Preload(x.out) for x in works if any(map(plan.program.is_fixed, outermost(x.body))))
    while isinstance(s, For) and s.loop.level in SIDE and all(isinstance(x, For | Compute) for x in s.body):
        s = next((x for x in s.body if isinstance(x, Compute) and launch.tile.work(x.stage).atoms), s.body[0])
    if not isinstance(s, Compute):
        return ()
    direct = any(ATOMS[a.name].direct for a in launch.tile.work(s.stage).atoms)
    constant = any(plan.program.is_constant(v) for v in plan.program.stage(s.stage).reads)
    return tuple(map(Preload, beside(plan.program, launch.tile, s.stage))) if direct and constant else ()


def _fills(s: Step, joints: tuple[Joint, ...]) -> bool:
    return isinstance(s, Commit) or _fills_one(s, joints)


def _fills_one(s: Step, joints: tuple[Joint, ...]) -> bool:
    """Whether a step is part of a fill of one of these: the slots are free, a copy, their bytes are expected."""
    match s:
        case Copy(value, _):
            return any(value == c.value for joint in joints for c in joint)
        case BarWait(barrier, _, _):
            return any(barrier == _name("empty", joint) for joint in joints)
        case BarArrive(barrier, _, _, _):
            return any(barrier == _name("full", joint) for joint in joints)
        case _:
            return False


def _begins(s: Step, joints: tuple[Joint, ...], constants: set[str]) -> bool:
    """Whether a step belongs to a fill of constants: copies of theirs, and what stands around copies of their joint.

    The barrier then expects the bytes of all its channels; those of others are brought later.
    """
    if isinstance(s, Copy):
        return s.value in constants
    return _fills_one(s, tuple(joint for joint in joints if any(c.value in constants for c in joint)))


def _without_first(body: tuple[Step, ...], peeled: tuple[Joint, ...], constants: set[str]) -> tuple[Step, ...]:
    """A producer's loop whose first `depth` fills of constants of each of these were begun before it.

    What is left of these fills comes behind that, so that the barrier hears how many bytes to expect before any come.
    """
    out: list[Step] = []
    for s in body:
        joint = next((joint for joint in peeled if _fills_one(s, (joint,))), None)
        if joint is None or not _begins(s, peeled, constants):
            out.append(s)
            continue
        at = next((i for i, x in enumerate(out) if isinstance(x, From) and x.value == joint[0].value), None)
        if at is None:
            at = next((i for i, x in enumerate(out) if _fills_one(x, (joint,))), len(out))
            out.insert(at, From(joint[0].value, joint[0].depth, ()))
        begun = out[at]
        assert isinstance(begun, From)
        out[at] = From(begun.value, begun.fill, (*begun.body, s))
    return tuple(out)


def _reaches(plan: Plan, launch: Launch, s: Step) -> bool:
    """Whether a step may touch memory that a launch before writes or reads; stores follow a Close or Compute at once."""
    p, made = plan.program, {w.stage for w in launch.tile.works}
    match s:
        case For(_, _, body) | At(_, _, body) | Late(_, _, body):
            return any(_reaches(plan, launch, x) for x in body)
        case Copy(value, _) | Prefetch(value) | Ask(value):
            return not p.is_constant(value)
        case Compute(name):
            here = made | {c.value for c in launch.tile.channels}
            loose = (v for v in p.stage(name).reads if v not in here and not p.is_constant(v))
            return not p.stage(name).reduces or any(loose)
        case Close() | CountFirst() | FoldParts() | TakeParts() | Store() | StoreState() | Helping() | Owning():
            return True
        case _:
            return False
