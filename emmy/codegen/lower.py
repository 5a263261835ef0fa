"""Plan -> steps: walk each launch's nest once per role. Must not know how a target prints or runs anything."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from emmy.codegen import sync
from emmy.codegen.steps import (
    Ahead,
    Close,
    Compute,
    FoldParts,
    For,
    Open,
    Outline,
    RoleSteps,
    Settle,
    Step,
    Store,
    StoreState,
    Together,
)
from emmy.codegen.sync import Joint
from emmy.errors import PlanError
from emmy.ir.atoms import ATOMS
from emmy.ir.beside import groups
from emmy.ir.gpu import sharers, sharing_blocks, warps
from emmy.ir.moves.stage import SELF
from emmy.ir.plan import (
    BLOCK_LEVELS,
    SIDE,
    Channel,
    Launch,
    Plan,
    Role,
    Work,
    Workspace,
    folds_results,
    loop_works,
    refilled,
    refuse_loops,
)
from emmy.ir.program import swapped


def complete(plan: Plan) -> str | None:
    """Why the plan cannot be lowered yet, in one sentence; None when it can."""
    for la in plan.launches:
        reason = _refuse_levels(la) or refuse_loops(plan, la) or _refuse_roles(plan, la) or _refuse_order(plan, la)
        if reason:
            return f"{la.name}: {reason}"
    return None


def _refuse_levels(la: Launch) -> str | None:
    inside = la.tile.nest[la.tile.n_block_loops :]
    late = next((x for x in inside if x.level in BLOCK_LEVELS), None)
    return f"the loop over {late.axis} makes blocks but stands inside a loop in time" if late else None


def _refuse_roles(plan: Plan, la: Launch) -> str | None:
    t, groups = la.tile, 1
    for i, x in enumerate(t.nest):
        groups *= plan.count(t.nest, i) if x.level == "warpgroup" else 1
    for r in t.roles:
        if r.works and r.unit == "warpgroup" and r.agents != groups:
            way = "split at warpgroup, or pingpong" if r.deal is None else "a dealt role works alone"
            return f"role {r.name} has {r.agents} warpgroups, its nest divides work among {groups}: {way}"
    computing = [r for r in t.roles if r.works]
    for w in t.works if len(computing) > 1 else ():
        if not w.combine and (n := sharers(plan, t.nest, plan.program.stage(w.stage))) > 1:
            return f"{n} agents share the folding of {w.stage} among {len(computing)} roles: they could not meet"
    dealt = [r.name for r in t.roles if r.deal]
    for w in t.works if dealt else ():
        if _turned(plan, w):
            return f"sums of {w.stage} pass through one place in shared memory, {len(dealt)} roles make them in turn"
    fed = next((c for c in t.channels if t.roles and c.self_fed), None)
    return f"{fed.value} is filled by {fed.src}, which is none of its {len(t.roles)} roles" if fed else None


def _refuse_order(plan: Plan, la: Launch) -> str | None:
    """Every launch whose values or partial states this one reads must be one it waits for."""
    values, states = dict[str, str](), dict[str, str]()
    for x in plan.launches:
        for w in x.tile.works:
            (states if plan.workspace(w.stage) and not w.combine else values)[w.stage] = x.name
    waited = {la.name}
    for x in reversed(plan.launches[: plan.launches.index(la)]):
        if any(x.name in plan.launch(y).depends_on for y in waited):
            waited.add(x.name)
    for w in la.tile.works:
        needed = (
            [states[w.stage]] if w.combine else [values[v] for v in plan.program.stage(w.stage).reads if v in values]
        )
        early = [x for x in needed if x not in waited]
        if early:
            return f"{w.stage} needs what {early[0]} leaves in memory, but {la.name} does not wait for {early[0]}"
    return None


def lower(plan: Plan) -> tuple[Outline, ...]:
    """One outline a launch. Raises PlanError when the plan is not complete."""
    reason = complete(plan)
    if reason:
        raise PlanError(f"cannot lower: {reason}")
    return tuple(_lower_launch(plan, la) for la in plan.launches)


def _lower_launch(plan: Plan, la: Launch) -> Outline:
    everything = tuple(w.stage for w in la.tile.works)
    roles = la.tile.roles or (Role(SELF, warps(plan, la.tile.nest), "warp", 0, everything),)
    joints = sync.joints(plan, la)
    walks = tuple(_Walk(plan, la, r, sync.Sync(r, joints)) for r in roles)
    steps = tuple(walk.all() for walk in walks)
    return Outline(plan, la, sync.barriers(plan, la), steps, *sync.around_tiles(plan, la))


@dataclass(slots=True)
class _Walk:
    plan: Plan
    launch: Launch
    role: Role
    sync: sync.Sync
    opened: set[str] = field(default_factory=set)
    settled: set[str] = field(default_factory=set)  # deferred works that the ring loop around them waits for
    given_back: dict[str, tuple[Step, ...]] = field(default_factory=dict)  # first work of a group -> what follows it
    waited: tuple[Channel, ...] = ()  # channels whose fill of the tile has been waited for
    begun: dict[str, Step] = field(default_factory=dict)  # work that is begun ahead -> how it begins its next piece
    in_time: int = 0  # loops around, inside the block, that one agent walks by itself

    def all(self) -> RoleSteps:
        """Everything the role does."""
        tile = self.tile()
        return RoleSteps(self.role, tile, self.after(tile), sync.counted_first(self.launch, self.first))

    @property
    def first(self) -> tuple[Workspace, ...]:
        """Those of which the role counts parts before its tiles. A role that fills counts what memory adds in time."""
        alone = not sync.filler(self.launch)
        spaces = (self.plan.workspace(x) for x in self.role.works if not self.launch.tile.work(x).combine)
        return tuple(x for x in spaces if x and (x.marked or (x.added and alone)))

    def tile(self) -> tuple[Step, ...]:
        """The steps of one tile. Channels filled once a tile ring over tiles."""
        t = self.launch.tile
        blocks = t.n_block_loops
        channels = tuple(c for c in t.channels if c.at < blocks)
        top, bottom = self.sync.top_of_iteration(channels), self.sync.bottom_of_iteration(channels)
        if any(x.level == "serial" for x in t.nest):
            # Read in every iteration of a loop, which may have none: they have landed before a block ends all the same.
            self.waited = channels
            top = (*top, *self.sync.before_work(tuple(c.value for c in channels), channels))
        end = sync.end_of_tile(self.plan, self.launch, self.role)
        if t.ring_loop is None:
            top = (*top, *sync.cleared_behind(self.plan, self.launch, self.role, None))
        steps = sync.in_turn((*top, *self.nest(blocks, t.works), *bottom, *end), self.role)
        if t.order.kind == "streamk":
            steps = sync.helped(steps, self.role)
        if self.launch.early:
            return steps if self.first else sync.after_launch_wait(self.plan, self.launch, self.sync, steps)
        return sync.letting_next(self.plan, self.launch, steps)

    def after(self, tile: tuple[Step, ...]) -> tuple[Step, ...]:
        """The steps of each tile when all are made. tile: those that make one"""
        out: list[Step] = []
        for w in self.launch.tile.works:
            space, finish = self.plan.workspace(w.stage), (Close(w.stage), *self.store(w))
            if w.stage in self.role.works and space and space.by_last and not space.added:
                out += (
                    sync.taken(w.stage, self.role, tile, finish)
                    if space.marked
                    else sync.counted(w.stage, self.role, finish)
                )
        return tuple(out)

    def nest(self, i: int, works: tuple[Work, ...]) -> tuple[Step, ...]:
        t, p = self.launch.tile, self.plan.program
        if i == len(t.nest):
            mine = (w for w in works if w.stage in self.role.works)
            return tuple(s for group in groups(p, mine) for s in self.leaf(group))
        loop = t.nest[i]
        before, inside, after = loop_works(p, works, loop.axis)
        out = self.nest(i + 1, before) if before else ()
        if inside:
            out += self.loop(i, inside)
        return out + (self.nest(i, after) if after else ())

    def loop(self, i: int, inside: tuple[Work, ...]) -> tuple[Step, ...]:
        """One loop: accumulators of the works that fold its axis live around it, rings that it refills turn in it.

        Works before, inside and after an outer loop walk this one separately; a ring turns where its value is read.
        """
        t, p = self.launch.tile, self.plan.program
        loop, mine = t.nest[i], [w for w in inside if w.stage in self.role.works]
        opening = [
            w for w in mine if loop.axis in p.stage(w.stage).folded and not w.combine and w.stage not in self.opened
        ]
        self.opened |= {w.stage for w in opening}
        channels = refilled(p, t, i, inside)
        folding = [w for w in mine if loop.axis in p.stage(w.stage).folded]
        ahead = tuple(w.stage for w in folding if w.ahead) if channels else ()
        late = _deferred(folding) if channels and min(c.depth for c in channels) > 1 else ()
        top: tuple[Step, ...] = ()
        after = sync.after_loop(channels)
        if late:
            before, top = self.sync.before_loop(channels), self.sync.top_of_iteration_deferred(channels)
            bottom = self.sync.bottom_of_iteration_deferred(channels, late)
            top = (*sync.preloaded(self.launch, channels), *top)
            after = (*after, *self.sync.after_loop_deferred(channels, late))
        elif ahead:
            before = self.sync.before_loop_ahead(channels, ahead)
            bottom = self.sync.bottom_of_iteration_ahead(channels, ahead)
        else:
            before, top = self.sync.before_loop(channels), self.sync.top_of_iteration(channels)
            bottom = self.sync.bottom_of_iteration(channels)
        for w in mine if channels else ():
            if w.ahead and w not in folding:
                before = (*before, *self.begun_first(i, w, channels))
        early = () if late or ahead else self.last_uses(i, mine, channels)
        for joint, first in early:
            self.given_back[first] = (*self.given_back.get(first, ()), Together(self.sync.give_back(joint)))
        if early:
            bottom = self.sync.bottom_of_iteration(channels, tuple(joint for joint, _ in early))
        after = (*after, *sync.cleared_behind(self.plan, self.launch, self.role, i))
        top = (*sync.cleared_ahead(self.plan, self.launch, self.role, channels), *top)
        self.settled |= set(late)
        self.in_time += loop.level not in SIDE
        body = (*top, *sync.asked(self.launch, self.role, channels), *self.nest(i + 1, inside), *bottom)
        self.in_time -= loop.level not in SIDE
        self.settled -= set(late)
        walked: tuple[Step, ...] = (For(i, loop, body),) if body else ()
        self.opened -= {w.stage for w in opening}
        opens = (Open(w.stage) for w in opening)
        return (*opens, *before, *walked, *after, *self.closes(groups(p, opening)))

    def begun_first(self, i: int, w: Work, channels: tuple[Channel, ...]) -> tuple[Step, ...]:
        """A work made for the first piece of loop i, by all agents; from then on each begins the next when one is done.

        The first is done before the loop: else ptxas waits for all groups there and says so (C7517).
        """
        s, nest = self.plan.program.stage(w.stage), self.launch.tile.nest
        value = next(c.value for c in channels if c.value in s.reads)
        first, later = (
            (*self.sync.before_work((value,), channels, n), Open(w.stage), Compute(w.stage)) for n in (0, 1)
        )
        self.begun[w.stage] = Ahead(value, 1, later)
        out: tuple[Step, ...] = (Ahead(value, 0, (*first, Settle(w.stage, 0))),)
        for at in reversed(range(i + 1, len(nest))):
            if nest[at].axis in s.every:
                out = (For(at, nest[at], out),)
        return out

    def last_uses(self, i: int, works: list[Work], channels: tuple[Channel, ...]) -> tuple[tuple[Joint, str], ...]:
        """(rings of the copy engine that are used up before the iteration ends, first of the works that read them last).

        Where works that hand values on in registers read different rings, each is given back behind its last reader.
        """
        p, inner = self.plan.program, self.launch.tile.nest[i + 1 :]
        if any(x.level not in SIDE for x in inner):
            return ()
        order, out = list(groups(p, works)), list[tuple[Joint, str]]()
        for joint in self.sync.given_back(channels):
            readers = [g for g in order if any(c.value in p.stage(w.stage).reads for c in joint for w in g)]
            if readers and readers[-1] is not order[-1]:
                out.append((joint, readers[-1][0].stage))
        return tuple(out)

    def leaf(self, group: tuple[Work, ...]) -> tuple[Step, ...]:
        """Works side by side, or one alone."""
        p, names = self.plan.program, [w.stage for w in group]
        s, opens = p.stage(names[0]), tuple(map(Open, names))
        reads = dict.fromkeys(v for x in names for v in p.stage(x).reads)
        due = tuple(c for c in self.launch.tile.channels if c not in self.waited)
        waits = self.sync.before_work(tuple(reads), due)
        if group[0].combine:
            return (*waits, *opens, *map(FoldParts, names), *self.close(group))
        settle = tuple(Settle(x, 0) for x in _deferred(group) if x not in self.settled)
        computes = (*waits, *map(Compute, names), *settle, *self.given_back.get(names[0], ()))
        if names[0] in self.begun:
            done = (Settle(names[0], 0), *self.given_back.get(names[0], ()))
            return (*done, *self.close(group), self.begun[names[0]])
        if names[0] in self.opened:
            return computes
        if s.reduces:
            return (*waits, *opens, *computes[len(waits) :], *self.close(group))
        return (*computes, *self.store(group[0]))

    def close(self, group: tuple[Work, ...]) -> tuple[Step, ...]:
        return self.closes((group,))

    def closes(self, opened: tuple[tuple[Work, ...], ...]) -> tuple[Step, ...]:
        """Ends of works that were opened together, in groups side by side: those that share sums meet once for all."""
        t, out = self.launch.tile, list[Step]()
        ways = [self.way(group) for group in opened]
        if inside := tuple(
            w.stage for group, way in zip(opened, ways, strict=True) for w in group if way == "gathered"
        ):
            out += sync.gathered(inside, self.role, bool(self.in_time) or t.order.kind != "static")
        if across := tuple(
            w.stage for group, way in zip(opened, ways, strict=True) for w in group if way == "exchanged"
        ):
            out += sync.exchanged(across)
        for group in opened:
            if (space := self.plan.workspace(group[0].stage)) and not group[0].combine:
                out += (StoreState(w.stage, space.added) for w in group)
            else:
                out += (s for w in group for s in (Close(w.stage), *self.store(w)))
        return tuple(out)

    def way(self, group: tuple[Work, ...]) -> Literal["", "gathered", "exchanged"]:
        """How the sums of works side by side become whole: among agents of the block, or among blocks of a cluster."""
        t, p, combine = self.launch.tile, self.plan.program, group[0].combine
        stage = p.stage(group[0].stage)
        if not combine and not folds_results(p, t.works, stage) and sharing_blocks(self.plan, t) > 1:
            return "exchanged"
        shared = not combine and sharers(self.plan, t.nest, stage) > 1
        return "gathered" if shared or _turned(self.plan, group[0]) else ""

    def store(self, w: Work) -> tuple[Step, ...]:
        stored = self.plan.stored(self.plan.program.stage(w.stage), self.launch)
        return (Store(w.stage),) if stored else ()


def _turned(plan: Plan, w: Work) -> bool:
    """Whether instructions leave a work's sums transposed."""
    return not w.combine and bool(w.atoms) and swapped(plan.program.stage(w.stage))


def _deferred(works: Iterable[Work]) -> tuple[str, ...]:
    """Works whose own atom reads on while the next is issued."""
    return tuple(w.stage for w in works if any(a.stage == w.stage and ATOMS[a.name].deferred for a in w.atoms))
