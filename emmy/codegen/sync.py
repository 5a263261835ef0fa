"""Every wait and arrive of a launch, derived from its roles, channels and order. Nothing else may create one.

Rules, each from the facts of a channel:
- pack: filled by the agent that reads it; nothing to wait for.
- ldg, cp_async (self-fed): one commit group an iteration for all such channels of a loop; with depth >= 2 everywhere wait
  until depth - 2 groups are pending and meet once, else wait for all and meet twice.
- ldg, cp_async read ahead: a work that fetches its first operands of fill j + 1 before it finishes fill j meets in
  between: then fill j + 1 is there for all, and fill j + depth may go where all have read fill j.
- tma: full (1 arrival + bytes) and empty (one arrival for each agent that reads ONE fill: a dealt ring is read by one
  consumer, a shared one by all) for each slot. A slot is given back when what was read is used up, never sooner: loads
  that are still on their way at a block sync are not ordered before the copy engine's writes (measured: wrong sums).
  Self-fed rings refill the slot of the iteration before, so that nobody waits for the slowest agent of this one.
- works that are deferred (their atom reads on while the next is issued): one stays under way, so an iteration gives back
  the slots of the one before, and a self-fed ring is refilled there; with one slot everything is waited for.
- ping-pong: a turn token for each dealt role, held from its first wait for a fill of the tile to its last: between those
  no other role waits, so no parity is more than one lap old.
Positions are running counters of fills, never closed forms, so trip counts may vary (ragged edges, symbols, causal skips).
"""

from __future__ import annotations

from emmy.codegen.steps import (
    Advance,
    BarArrive,
    Barrier,
    BarWait,
    BlockSync,
    Commit,
    Copy,
    Fetch,
    Finish,
    For,
    Settle,
    Step,
    TurnPass,
    TurnWait,
    WaitGroup,
)
from emmy.ir.gpu import warps
from emmy.ir.plan import Channel, Launch, Plan, Role

GROUPED = ("ldg", "cp_async")


def barriers(plan: Plan, launch: Launch) -> tuple[Barrier, ...]:
    """The mbarriers a launch needs."""
    t, out = launch.tile, []
    roles = {r.name: r for r in t.roles}
    for c in t.channels:
        if c.transport != "tma":
            continue
        out.append(Barrier(f"full_{c.value}", c.depth, 1, plan.slot_bytes(t, c), (0,) * c.depth))
        eaters = [roles[d] for d in c.dst if d in roles]
        agents = (
            warps(plan, t.nest) if c.self_fed else eaters[0].agents if eaters[0].deal else sum(r.agents for r in eaters)
        )
        out.append(Barrier(f"empty_{c.value}", c.depth, agents, 0, (1,) * c.depth))
    if t.order.kind == "pingpong":
        n = sum(r.deal is not None for r in t.roles)
        out.append(Barrier("turn", n, 1, 0, tuple(int(i == 0) for i in range(n))))
    return tuple(out)


def before_loop(channels: tuple[Channel, ...]) -> tuple[Step, ...]:
    """Prologue of a ring loop: all slots but one are filled ahead."""
    out: list[Step] = []
    grouped = [c for c in channels if c.self_fed and c.transport in GROUPED]
    deepest = max((c.depth for c in grouped), default=1)
    for step in range(1 - deepest, 0):
        out += [Copy(c.value, step + c.depth - 1) for c in grouped if step + c.depth - 1 >= 0]
        out.append(Commit())
    for c in channels:
        if c.self_fed and c.transport == "tma":
            for ahead in range(c.depth - 1):
                out += _tma_fill(c, ahead)
    return tuple(out)


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


def top_of_iteration(channels: tuple[Channel, ...], role: Role) -> tuple[Step, ...]:
    """What happens before the work of one iteration of the loop that refills `channels`."""
    out: list[Step] = []
    out += [Copy(c.value, 0) for c in channels if c.transport == "pack"]
    out += _grouped_top([c for c in channels if c.self_fed and c.transport in GROUPED])
    out += _tma_top([c for c in channels if c.self_fed and c.transport == "tma"])
    for c in channels:
        if not c.self_fed and c.src == role.name:
            out += [BarWait(f"empty_{c.value}", c.value), Copy(c.value, 0), BarArrive(f"full_{c.value}", c.value, 1)]
    return tuple(out)


def _grouped_top(grouped: list[Channel]) -> list[Step]:
    if not grouped:
        return []
    refills: list[Step] = [Copy(c.value, c.depth - 1) for c in grouped]
    pending = min(c.depth for c in grouped) - 2
    if pending >= 0:
        return [WaitGroup(pending), BlockSync(), *refills, Commit()]
    return [*refills, Commit(), WaitGroup(0), BlockSync()]


def _tma_top(ring: list[Channel]) -> list[Step]:
    fills = (s for c in ring for s in _tma_fill(c, c.depth - 1))
    return [*fills, *(BarWait(f"full_{c.value}", c.value) for c in ring)]


def _tma_fill(c: Channel, ahead: int) -> tuple[Step, ...]:
    """A slot is filled, once everyone has given it back."""
    full = BarArrive(f"full_{c.value}", c.value, 1, ahead)
    return BarWait(f"empty_{c.value}", c.value, ahead), Copy(c.value, ahead), full


def before_loop_ahead(channels: tuple[Channel, ...], works: tuple[str, ...]) -> tuple[Step, ...]:
    """Prologue of a ring loop whose works fetch ahead: slots are filled, the first operands fetched."""
    fetch = (Fetch(w, 0) for w in works)
    if channels[0].transport == "tma":
        return (*before_loop(channels), *(BarWait(f"full_{c.value}", c.value) for c in channels), *fetch)
    depth = channels[0].depth
    fills: list[Step] = []
    for ahead in range(depth):
        fills += [*(Copy(c.value, ahead) for c in channels), Commit()]
    return (*fills, WaitGroup(depth - 1), BlockSync(), *fetch)


def bottom_of_iteration_ahead(channels: tuple[Channel, ...], role: Role, works: tuple[str, ...]) -> tuple[Step, ...]:
    """What follows the work of one iteration when works fetch ahead; such a loop has nothing to do at its top."""
    depth = channels[0].depth
    fetch, finish = (Fetch(w, 1) for w in works), (Finish(w) for w in works)
    if channels[0].transport == "tma":
        *give_back, advance = bottom_of_iteration(channels, role)  # reads of this fill are all but done
        refill = (s for c in channels for s in _tma_fill(c, depth - 1))
        waits = (BarWait(f"full_{c.value}", c.value, 1) for c in channels)
        return (*give_back, *refill, *waits, *fetch, *finish, advance)
    refills = (Copy(c.value, depth) for c in channels)
    meet = (WaitGroup(depth - 2), BlockSync())
    return (*meet, *refills, Commit(), *fetch, *finish, Advance(tuple(c.value for c in channels)))


def top_of_iteration_deferred(channels: tuple[Channel, ...]) -> tuple[Step, ...]:
    """What happens before deferred works are issued; a producer of their operands has nothing to change."""
    return tuple(BarWait(f"full_{c.value}", c.value) for c in channels if c.self_fed)


def bottom_of_iteration_deferred(channels: tuple[Channel, ...], role: Role, works: tuple[str, ...]) -> tuple[Step, ...]:
    """What follows deferred works that were just issued: those of the iteration before are done."""
    out: list[Step] = [Settle(w, 1) for w in works]
    out += _give_back(channels, role, -1)
    out += (s for c in channels if c.self_fed for s in _tma_fill(c, c.depth - 1))
    return (*out, Advance(tuple(c.value for c in channels)))


def after_loop_deferred(channels: tuple[Channel, ...], role: Role, works: tuple[str, ...]) -> tuple[Step, ...]:
    """Epilogue of a ring loop with deferred works."""
    return (*(Settle(w, 0) for w in works), *_give_back(channels, role, -1))


def _give_back(channels: tuple[Channel, ...], role: Role, ahead: int) -> tuple[Step, ...]:
    return tuple(
        BarArrive(f"empty_{c.value}", c.value, role.agents, ahead)
        for c in channels
        if c.transport == "tma" and role.name in c.dst
    )


def before_work(reads: tuple[str, ...], channels: tuple[Channel, ...], role: Role) -> tuple[Step, ...]:
    """Waits of a consumer before it reads what another role fills."""
    return tuple(
        BarWait(f"full_{c.value}", c.value)
        for c in channels
        if c.value in reads and role.name in c.dst and not c.self_fed
    )


def bottom_of_iteration(channels: tuple[Channel, ...], role: Role) -> tuple[Step, ...]:
    """What happens after the work of one iteration."""
    out: list[Step] = []
    shallow = [c for c in channels if c.self_fed and c.depth == 1 and c.transport in GROUPED]
    if shallow:
        out.append(BlockSync())
    out += _give_back(channels, role, 0)
    if channels:
        out.append(Advance(tuple(c.value for c in channels)))
    return tuple(out)
