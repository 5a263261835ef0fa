"""What a role computes while its steps are executed: values, sums and shares of sums, in float64. Knows no barriers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np

from emmy.codegen.executed_block import Count, Cta, Env, Left, Place, Shares, blank, components, pieces
from emmy.codegen.steps import RoleSteps
from emmy.errors import PlanError, Race
from emmy.ir import interpret
from emmy.ir.expr import Array, Block, Named
from emmy.ir.gpu import parts_counted, sharers
from emmy.ir.plan import Plan, folds_results
from emmy.ir.program import Stage


@dataclass(slots=True)
class Works(ABC):
    """A role's values and open sums in a tile, and what its block's memory has of them."""

    cta: Cta
    role: RoleSteps
    env: Env = field(default_factory=dict)
    values: dict[str, Block] = field(default_factory=dict)
    beside: dict[tuple[str, tuple[tuple[int, int], ...]], Block] = field(
        default_factory=dict
    )  # (stage, agent) -> what that agent made of it
    accs: dict[str, dict[str, Block]] = field(default_factory=dict)
    side: dict[int, int] = field(default_factory=dict)  # loop over agents -> which one this is
    shares: dict[str, dict[tuple[int, ...], dict[str, Block]]] = field(
        default_factory=dict
    )  # stage -> agent -> its sums
    flying: dict[str, list[dict[str, int]]] = field(
        default_factory=dict
    )  # stage -> what pending works read: value -> fill
    before: dict[str, dict[str, Array]] = field(default_factory=dict)  # stage -> what agents found alike of its state
    waited: bool = False  # for the launches before
    asks: Counter[str] = field(default_factory=Counter)  # value -> steps at which lanes asked for it, in this tile
    helper: int = -1  # the block whose sums are taken
    unmet: set[str] = field(default_factory=set)  # stages of which parts were stored since all agents met
    counted: dict[Place, bool] = field(default_factory=dict)  # which part -> whether it was the last to be counted
    told: dict[Place, bool] = field(default_factory=dict)  # the same, as all agents know it
    seen: set[Place] = field(default_factory=set)  # elements that this role knows to have been zero

    @property
    def plan(self) -> Plan:
        return self.cta.outline.plan

    @abstractmethod
    def load(self, value: str) -> Block:
        """What a work reads of a value, from its slot or from memory."""

    def value(self, name: str) -> Block:
        """A value without a channel: made in this tile, or in memory."""
        if (name, self.own(name)) in self.beside:
            return self.beside[name, self.own(name)]
        if name in self.values:
            return self.values[name]
        if any(w.stage == name for w in self.cta.outline.launch.tile.works):
            raise PlanError(f"{self.role.role.name} reads {name} before it is computed")
        self.check_waited(f"reads {name}", name)
        due = next((x.steps for x in self.cta.outline.launch.tile.preloads if x.value == name), self.asks[name])
        if self.asks[name] != due:
            raise Race(f"{self.role.role.name} reads {name}, asked for at {self.asks[name]} of {due} steps")
        return self.cta.memory[name]

    def check_waited(self, doing: str, value: str | None = None) -> None:
        """Launches before an early one may still write what is not constant, and read what this one stores."""
        constant = value is not None and self.plan.program.is_constant(value)
        if self.cta.outline.launch.early and not self.waited and not constant:
            raise Race(f"{self.role.role.name} {doing} before it has waited for the launches before")

    def stage(self, name: str) -> Stage:
        return self.plan.program.stage(name)

    def open(self, name: str) -> None:
        s = self.stage(name)
        assert s.monoid is not None
        self.accs[self.key(name)] = {
            c: blank(c, axes, self.env, v) for (c, axes), v in zip(components(s), s.monoid.identity, strict=True)
        }

    def accumulators(self, name: str) -> dict[str, Block]:
        if self.key(name) not in self.accs:
            raise PlanError(f"{self.role.role.name} folds or closes {name}, whose accumulators are not open")
        return self.accs[self.key(name)]

    def key(self, name: str) -> str:
        """A stage's sums, of this agent where each keeps them from one iteration to the next."""
        tile, folded = self.cta.outline.launch.tile, self.stage(name).folded
        begun = tile.work(name).ahead and not any(x.level == "serial" and x.axis in folded for x in tile.nest)
        return f"{name} {sorted(self.side.items())}" if begun else name

    def keep(self, name: str, block: Block) -> None:
        """What an agent has made stays with it, for a later walk of the loops over agents."""
        self.values[name] = block
        if own := self.own(name):
            self.beside[name, own] = block

    def own(self, name: str) -> tuple[tuple[int, int], ...]:
        """Which agent this is, as far as loops over a value's axes tell."""
        nest = self.cta.outline.launch.tile.nest
        axes = self.plan.program.value(name).axes
        return tuple((at, j) for at, j in self.side.items() if nest[at].axis in axes)

    def compute(self, name: str) -> None:
        s = self.stage(name)
        if s.monoid is None:
            self.keep(name, interpret.whole(name, s.axes, self.env, interpret.value_of(s, self.env, self.load)))
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
            blocks = [{**e, loop.axis: piece} for e in blocks for piece in pieces(e[loop.axis], loop.step)]
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

    def exchanges(self, name: str) -> bool:
        """Whether blocks of a cluster have shares of the stage; each folds statistics of the elements that it finishes."""
        works = self.cta.outline.launch.tile.works
        return self.cta.cluster.size > 1 and not folds_results(self.plan.program, works, self.stage(name))

    def share(self, name: str) -> None:
        cluster = self.cta.cluster
        self.finished(name)
        if self.exchanges(name):
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
        self.cta.shares[at] = Shares(parts)

    def gather(self, name: str) -> None:
        if self.exchanges(name):
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
        cluster, axis = self.cta.cluster, self.stage(name).axes[-2]
        own = next(
            b for b in self.accumulators(name).values() if axis in b.axes
        )  # of the tile, which the piece is part of
        at = own.axes.index(axis)
        lo, hi = own.lo[at], own.lo[at] + own.data.shape[at]
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

    # ------------------------------------------------------------ tiles that blocks share
    def leave(self, name: str) -> None:
        self.check_waited(f"leaves sums of {name}")
        self.cta.left[self.cta.number] = Left(self.complete(name))

    def raise_flag(self, name: str) -> None:
        left = self.cta.left.get(self.cta.number)
        if left is None or not left.met:
            raise Race(f"{self.role.role.name} raises its flag before all agents have left their sums of {name}")
        left.raised = True

    def lower_flag(self, name: str) -> None:
        left = self.cta.left.get(self.helper)
        if left is None or not left.seen:
            raise Race(
                f"{self.role.role.name} lowers the flag of block {self.helper}, which may still be raised for {name}"
            )
        left.raised = False

    def take_left(self, name: str) -> None:
        left = self.cta.left.get(self.helper)
        if left is None or not left.known:
            raise Race(
                f"{self.role.role.name} takes sums of {name} before all its agents know that block {self.helper} left them"
            )
        new = {c: Named(b.axes, b.data) for c, b in left.sums.items()}
        self.join(name, self.accumulators(name), self.env, new)

    # ------------------------------------------------------------ parts that the last block combines
    def part(self, name: str) -> Place:
        """The part of a stage that this tile leaves."""
        return name, tuple(self.env.values())

    def elements(self, name: str) -> Place:
        """The tile's elements of a stage, to which parts of several blocks go."""
        return name, tuple(self.env[a] for a in self.stage(name).axes)

    def count(self, name: str) -> Count:
        """The count of the parts that go with this tile's."""
        most = parts_counted(self.plan, self.cta.outline.launch.tile, name)
        return self.cta.counts.setdefault(self.elements(name), Count(most))

    def count_first(self, name: str) -> bool:
        self.check_waited(f"counts its part of {name}")
        count = self.count(name)
        count.parts += 1
        first = count.parts == 1
        count.parts %= count.most
        return first

    def clear(self, name: str) -> None:
        self.put(self.cta.memory[name], blank(name, self.stage(name).axes, self.env, 0.0))

    def raise_cleared(self, name: str) -> None:
        count, memory = self.count(name), self.cta.memory[name]
        if count.zero or np.isnan(memory.data[memory.window(self.env)]).any():
            raise Race(f"{self.role.role.name} raises the flag of {name}, which is up, or before all of it is zero")
        count.zero = 1

    def pass_cleared(self, name: str) -> None:
        count = self.count(name)
        if self.elements(name) not in self.seen or not count.zero:
            raise Race(f"{self.role.role.name} counts that it knows of {name} before it does")
        count.zero = 0 if count.zero >= count.most else count.zero + 1

    def add_state(self, name: str, acc: dict[str, Block]) -> None:
        """The part goes to the sums of all in memory."""
        _, here = self.elements(name)
        known = (at for x, at in self.cta.zero if x == name)
        if not any(all(a <= lo and hi <= b for (lo, hi), (a, b) in zip(here, at, strict=True)) for at in known):
            raise Race(
                f"{self.role.role.name} adds its part of {name} before all its agents know that there were zeros"
            )
        self.check_waited(f"adds its part of {name}")
        (part,), memory = acc.values(), self.cta.memory[name]
        memory.data[memory.window(self.env)] += part.data

    def count_part(self, name: str) -> None:
        if name in self.unmet:
            raise Race(f"{self.role.role.name} counts its part of {name} before all agents have stored it")
        self.check_waited(f"counts its part of {name}")
        count = self.count(name)
        count.parts += 1
        if count.parts > count.most:
            raise PlanError(f"{count.parts} parts of {name} are counted, {count.most} go together")
        self.counted[self.part(name)] = count.parts == count.most
        self.told.pop(self.part(name), None)

    def is_last(self, name: str) -> bool:
        if self.part(name) not in self.told:
            raise Race(f"{self.role.role.name} asks for the count of {name} before all its agents know it")
        return self.told[self.part(name)]

    def reset_count(self, name: str) -> None:
        count = self.count(name)
        if count.parts < count.most:
            raise Race(f"{self.role.role.name} resets the count of {name} at {count.parts} of {count.most} parts")
        count.parts = 0

    def fold(self, name: str, env: Env, new: Mapping[str, Named]) -> None:
        acc, rows = self.mine(name), self.alike(name)
        if rows:
            where = {c: acc[c].window(env) for c in rows}
            if not any(self.side[at] for at in self.side if self.lacks(name, at)):
                self.before[name] = {c: acc[c].data[where[c]].copy() for c in rows}
            for c in rows:
                acc[c].data[where[c]] = self.before[name][c]
        self.join(name, acc, env, new)

    def alike(self, name: str) -> tuple[str, ...]:
        """Components of a state that agents with other elements of it each fold for themselves: here one after another."""
        around = {self.cta.outline.launch.tile.nest[at].axis for at in self.side} & set(self.stage(name).axes)
        return tuple(c for c, axes in components(self.stage(name)) if around - set(axes))

    def lacks(self, name: str, at: int) -> bool:
        """Whether a component of a stage's state lacks the axis of a loop, which is the stage's own."""
        axis = self.cta.outline.launch.tile.nest[at].axis
        return axis in self.stage(name).axes and any(axis not in axes for _, axes in components(self.stage(name)))

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
        if w.by_last and (count := self.count(name)).parts < count.most:
            raise Race(f"{self.role.role.name} folds parts of {name}, of which {count.parts} of {count.most} are there")
        for blocks in self.cta.parts(w):
            new = {c: Named(b.axes, b.data[b.window(self.env)]) for c, b in blocks.items()}
            self.join(name, self.accumulators(name), self.env, new)

    def take_parts(self, name: str) -> Iterator[bool]:
        """Marked parts are taken in, each when all of it is there, and are no longer there. Yields True when it must wait."""
        w = self.plan.workspace(name)
        assert w is not None
        self.check_waited(f"takes parts of {name}")
        for blocks in self.cta.parts(w):
            found = {c: (b.axes, b.data[b.window(self.env)]) for c, b in blocks.items()}
            while any(np.isnan(x).any() for _, x in found.values()):
                yield True
            self.join(
                name, self.accumulators(name), self.env, {c: Named(axes, x.copy()) for c, (axes, x) in found.items()}
            )
            for _, x in found.values():
                x[...] = np.nan

    def complete(self, name: str) -> dict[str, Block]:
        """The accumulators of a stage, which are closed by this."""
        if self.shares.get(name):
            raise PlanError(
                f"{self.role.role.name} closes {name}, of which {len(self.shares[name])} agents hold shares"
            )
        acc = self.accumulators(name)
        self.finished(name)
        del self.accs[self.key(name)]
        return acc

    def close(self, name: str) -> None:
        s, acc = self.stage(name), self.complete(name)
        assert s.monoid is not None
        for c, b in acc.items():
            if b.data.shape != blank(c, b.axes, self.env, 0.0).data.shape:
                raise PlanError(f"{self.role.role.name} closes {name}, whose sums of a whole tile were not gathered")
        done = interpret.finish(s.monoid, {c: Named(b.axes, b.data) for c, b in acc.items()})
        self.keep(name, interpret.whole(name, s.axes, self.env, done))

    def store_state(self, name: str) -> None:
        w, acc = self.plan.workspace(name), self.complete(name)
        assert w is not None
        if w.added:
            self.add_state(name, acc)
            return
        part = self.env[w.axis][0] // self.plan.part_step(w)
        for c, b in acc.items():
            self.put(self.cta.memory[f"{name}@{c}@{part}"], b)
        if not w.marked:
            self.unmet.add(name)

    def finished(self, name: str) -> None:
        if self.flying.get(self.key(name)):
            raise Race(f"{name} is closed while {len(self.flying[self.key(name)])} of its works are under way")

    def put(self, memory: Block, block: Block) -> None:
        """The block goes to its place in memory, which no other block may have written."""
        self.check_waited(f"stores {block.name}")
        at = tuple(slice(lo, lo + n) for lo, n in zip(block.lo, block.data.shape, strict=True))
        if prod(block.data.shape) and not np.isnan(memory.data[at]).all():
            where = ",".join(f"{a} {x.start}..{x.stop}" for a, x in zip(block.axes, at, strict=True))
            raise PlanError(f"{block.name} is stored twice at {where}")
        memory.data[at] = block.data
