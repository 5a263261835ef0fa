"""Plan -> steps: walk each launch's nest once per role. Must not know how a target prints or runs anything."""

from __future__ import annotations

from dataclasses import dataclass, field

from emmy.codegen import sync
from emmy.codegen.steps import Close, Compute, FoldParts, For, Open, Outline, RoleSteps, Step, Store, StoreState
from emmy.errors import PlanError
from emmy.ir.moves.stage import SELF
from emmy.ir.plan import BLOCK_LEVELS, Launch, Plan, Role, Work, loop_works


def complete(plan: Plan) -> str | None:
    """Why the plan cannot be lowered yet, in one sentence; None when it can."""
    for la in plan.launches:
        t = la.tile
        groups = 1
        for i, x in enumerate(t.nest):
            if x.level == "warpgroup":
                groups *= plan.count(t.nest, i)
        for r in t.roles:
            if r.works and r.deal is None and r.unit == "warpgroup" and r.agents != groups:
                return f"{la.name}: role {r.name} has {r.agents} warpgroups, its nest divides work among {groups}: split at warpgroup, or pingpong"
        seen_time = False
        for x in t.nest:
            if x.level in BLOCK_LEVELS and seen_time:
                return f"{la.name}: the loop over {x.axis} makes blocks but stands inside a loop in time"
            seen_time = seen_time or x.level not in BLOCK_LEVELS
    return None


def lower(plan: Plan) -> tuple[Outline, ...]:
    """One outline a launch. Raises PlanError when the plan is not complete."""
    reason = complete(plan)
    if reason:
        raise PlanError(f"cannot lower: {reason}")
    return tuple(_lower_launch(plan, la) for la in plan.launches)


def _lower_launch(plan: Plan, la: Launch) -> Outline:
    everything = tuple(w.stage for w in la.tile.works)
    roles = la.tile.roles or (Role(SELF, 1, "block", 0, everything),)
    steps = tuple(RoleSteps(r, _Walk(plan, la, r).tile()) for r in roles)
    return Outline(plan, la, sync.barriers(plan, la), steps)


@dataclass(slots=True)
class _Walk:
    plan: Plan
    launch: Launch
    role: Role
    opened: set[str] = field(default_factory=set)

    def tile(self) -> tuple[Step, ...]:
        """The steps of one tile. Channels filled once a tile ring over tiles."""
        t = self.launch.tile
        blocks = t.n_block_loops
        channels = tuple(c for c in t.channels if c.at < blocks)
        top, bottom = sync.top_of_iteration(channels, self.role), sync.bottom_of_iteration(channels, self.role)
        return (*top, *self.nest(blocks, t.works), *bottom)

    def nest(self, i: int, works: tuple[Work, ...]) -> tuple[Step, ...]:
        t, p = self.launch.tile, self.plan.program
        if i == len(t.nest):
            return tuple(s for w in works if w.stage in self.role.works for s in self.leaf(w))
        loop = t.nest[i]
        before, inside, after = loop_works(p, works, loop.axis)
        out = self.nest(i + 1, before) if before else ()
        if inside:
            out += self.loop(i, inside)
        return out + (self.nest(i + 1, after) if after else ())

    def loop(self, i: int, inside: tuple[Work, ...]) -> tuple[Step, ...]:
        """One loop: accumulators of the works that fold its axis live around it, rings that it refills turn in it."""
        t, p = self.launch.tile, self.plan.program
        loop, mine = t.nest[i], [w for w in inside if w.stage in self.role.works]
        opening = [
            w for w in mine if loop.axis in p.stage(w.stage).folded and not w.combine and w.stage not in self.opened
        ]
        self.opened |= {w.stage for w in opening}
        channels = tuple(c for c in t.channels if c.at == i)
        top, bottom = sync.top_of_iteration(channels, self.role), sync.bottom_of_iteration(channels, self.role)
        body = (*top, *self.nest(i + 1, inside), *bottom)
        walked: tuple[Step, ...] = (For(i, loop, body),) if body else ()
        around = (*sync.before_loop(channels, self.role), *walked, *sync.after_loop(channels, self.role))
        self.opened -= {w.stage for w in opening}
        return (*(Open(w.stage) for w in opening), *around, *(s for w in opening for s in self.close(w)))

    def leaf(self, w: Work) -> tuple[Step, ...]:
        s = self.plan.program.stage(w.stage)
        waits = sync.before_work(s.reads, self.launch.tile.channels, self.role)
        if w.combine:
            return (*waits, Open(w.stage), FoldParts(w.stage), *self.close(w))
        if w.stage in self.opened:
            return (*waits, Compute(w.stage))
        if s.reduces:
            return (*waits, Open(w.stage), Compute(w.stage), *self.close(w))
        return (*waits, Compute(w.stage), *self.store(w))

    def close(self, w: Work) -> tuple[Step, ...]:
        if self.plan.workspace(w.stage) and not w.combine:
            return (StoreState(w.stage),)
        return (Close(w.stage), *self.store(w))

    def store(self, w: Work) -> tuple[Step, ...]:
        stored = self.plan.stored(self.plan.program.stage(w.stage), self.launch)
        return (Store(w.stage),) if stored else ()
