"""Tile IR: which stages share a launch, how their loops are bound to levels, where values live, who fills what.

A plan says *what* is placed where; it holds no barrier and no count that could be derived. `emmy.codegen.lower` derives
the steps and their synchronisation. Plans are made by moves only (`emmy.ir.moves`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from emmy.errors import PlanError
from emmy.ir.dtype import size_bytes
from emmy.ir.program import Dim, Program, Stage, Sym, upper

Level = str  # a level of the target: grid, warpgroup, warp, lane, reg, serial; on a CPU core, serial, reg
Space = Literal["smem", "dsmem", "reg", "pack"]
AGENTS = ("warp", "warpgroup")  # levels that divide a block's work among its threads
SIDE = (*AGENTS, "lane")  # levels whose iterations run side by side inside a block
# Loops whose iterations are blocks of the launch; they stand first in the nest. Those of a cluster see each other's memory.
BLOCK_LEVELS = ("grid", "core", "cluster")
_ALIKE = ("warpgroup", "warp")  # agents that each fold, for themselves, what they need of a state that all have alike


@dataclass(frozen=True, slots=True)
class Loop:
    """The piece of `axis` that is left is walked in pieces of `step`; the last piece may be shorter. "serial" is in time."""

    axis: str
    level: Level
    step: int


@dataclass(frozen=True, slots=True)
class Atom:
    """The instruction that makes the innermost tile of `stage`: m x n x k elements, `width` of them a vector."""

    stage: str
    name: str
    m: int
    n: int
    k: int
    width: int = 1

    def __str__(self) -> str:
        return f"{self.name} m:{self.m} n:{self.n} k:{self.k}" + (f" vector {self.width}" if self.width > 1 else "")


@dataclass(frozen=True, slots=True)
class Work:
    """One op of a tile: compute `stage`, or `combine` the partial states that another launch left in a workspace.

    Works share the tile's nest and enter only the loops over their axes; `nest` continues it for this work alone.
    `unroll` is how many steps of the innermost folded loop the code generator writes out. `ahead`: the first operands of
    the next piece are read before the last of this one are multiplied, so that a ring is refilled at its last use.
    """

    stage: str
    combine: bool = False
    nest: tuple[Loop, ...] = ()
    atoms: tuple[Atom, ...] = ()
    unroll: int = 1
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class Role:
    """Agents that run the same steps. No works = it only fills channels. `deal` = (i, n): it takes tiles i mod n."""

    name: str
    agents: int
    unit: Literal["block", "warpgroup", "warp", "thread"]
    registers: int
    works: tuple[str, ...]
    deal: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Channel:
    """A ring of `depth` slots for blocks of `value`, refilled in loop number `at` of the nest (-1: once a tile).

    src in dst means a role feeds itself. Transports: pack (CPU), ldg, cp_async, tma. `hint`: what the last-level cache is
    told to do with what was fetched, when it has one.
    """

    value: str
    src: str
    dst: tuple[str, ...]
    depth: int
    transport: str
    layout: str
    at: int
    hint: str = ""

    @property
    def self_fed(self) -> bool:
        return self.dst == (self.src,)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a value lives inside the tile, and in which layout."""

    value: str
    space: Space
    layout: str = "row"


@dataclass(frozen=True, slots=True)
class Asked:
    """The tile's block of `value` is asked for with fill number `fill` of its rings, to wait in the last-level cache."""

    value: str
    fill: int


@dataclass(frozen=True, slots=True)
class Preloaded:
    """Each lane asks for its first `vectors` of `value`, 16 bytes each, to registers while the last sums are still made.

    sooner: steps before the end of the rings' loop at which it begins to ask, 0 for one turn of the rings
    each:   vectors that it asks for at a step, 0 for all at once
    """

    value: str
    vectors: int
    sooner: int = 0
    each: int = 0

    @property
    def steps(self) -> int:
        """Steps at which it asks."""
        return -(-self.vectors // self.each) if self.each else 1

    def __str__(self) -> str:
        when = f" from {self.sooner} steps before the end" if self.sooner else ""
        return f"{self.vectors} of {self.value}{when}" + (f", {self.each} a step" if self.each else "")


@dataclass(frozen=True, slots=True)
class Order:
    """How tiles become blocks: one each, or `workers` blocks that walk them all; dealt to roles when ping-pong.

    streamk: workers walk tiles; of those that make no further whole round, and one round before, each an equal share of the
    steps, which may begin and end inside a tile.
    group: tiles come in groups of so many along the last block loop but one, which moves fastest inside a group; 1 = the
    last loop moves fastest.
    """

    kind: Literal["static", "persistent", "pingpong", "streamk"] = "static"
    workers: int = 0
    group: int = 1


@dataclass(frozen=True)
class Tile:
    """The works that a block's threads share, and how. Without slots, so that what moves ask again and again is computed once."""

    works: tuple[Work, ...]
    nest: tuple[Loop, ...] = ()
    placements: tuple[Placement, ...] = ()
    roles: tuple[Role, ...] = ()
    channels: tuple[Channel, ...] = ()
    order: Order = Order()
    asked: tuple[Asked, ...] = ()
    preloads: tuple[Preloaded, ...] = ()

    @cached_property
    def _hash(self) -> int:
        return hash(
            (self.works, self.nest, self.placements, self.roles, self.channels, self.order, self.asked, self.preloads)
        )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def bare(self) -> tuple[Work, ...]:
        """The works without loops and atoms: all that counts for what follows from their stages alone, which is then told once."""
        return tuple(Work(w.stage, w.combine) for w in self.works)

    def work(self, stage: str) -> Work:
        return next(w for w in self.works if w.stage == stage)

    def channel(self, value: str) -> Channel | None:
        return next((c for c in self.channels if c.value == value), None)

    def placement(self, value: str) -> Placement | None:
        return next((x for x in self.placements if x.value == value), None)

    @property
    def is_plain(self) -> bool:
        """True until a tile-level move has changed the tile: only its works are said."""
        return self == Tile(self.bare)

    @property
    def ring_loop(self) -> int | None:
        """The first loop inside a block that refills rings; None without one."""
        return min((c.at for c in self.channels if c.at >= self.n_block_loops), default=None)

    @cached_property
    def n_tile_loops(self) -> int:
        """How many leading loops of the nest tell tiles apart: those over blocks, without those inside a cluster."""
        return sum(x.level in BLOCK_LEVELS and x.level != "cluster" for x in self.nest)

    @cached_property
    def n_block_loops(self) -> int:
        """How many leading loops of the nest are blocks of the launch."""
        return sum(x.level in BLOCK_LEVELS for x in self.nest)


@dataclass(frozen=True)
class Launch:
    """`early`: it may begin before the launches before it in the stream have ended, of this plan or of others."""

    name: str
    tile: Tile
    depends_on: tuple[str, ...] = ()
    early: bool = False

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.tile, self.depends_on, self.early))

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True, slots=True)
class Workspace:
    """Monoid state of `value`, one part for each piece of `axis`, left by blocks of one launch for another to combine.

    by_last: there is no other; of the blocks whose parts go together, the last to leave one combines them
    marked:  each part says itself that it is there, so that it is the last to begin instead, which waits for the others' parts
    added:   no part is kept: each is added to the value in memory, which the first of those blocks to begin has set to zero
    """

    value: str
    axis: str
    parts: int
    by_last: bool = False
    marked: bool = False
    added: bool = False


@dataclass(frozen=True)
class Plan:
    """Launches in order, with the program they compute."""

    program: Program
    launches: tuple[Launch, ...]
    workspaces: tuple[Workspace, ...] = ()

    @property
    def guard(self) -> tuple[Sym, ...]:
        """The range of each size known at run time that the plan serves: its program's."""
        return self.program.syms

    @cached_property
    def _hash(self) -> int:
        return hash((self.program, self.launches, self.workspaces))

    def __hash__(self) -> int:  # computed once: replay looks plans up by value
        return self._hash

    @cached_property
    def key(self) -> str:
        """Text equal for equal plans, however they were reached: for transpositions."""
        return repr((self.program.stages, self.launches, self.workspaces))

    def has_launch(self, name: str) -> bool:
        return any(x.name == name for x in self.launches)

    def launch(self, name: str) -> Launch:
        for x in self.launches:
            if x.name == name:
                return x
        raise PlanError(f"launch {name} does not exist; the plan has {', '.join(x.name for x in self.launches)}")

    def workspace(self, value: str) -> Workspace | None:
        return next((w for w in self.workspaces if w.value == value), None)

    def size(self, nest: tuple[Loop, ...], axis: str) -> Dim:
        """What is left of `axis` inside `nest`: the last loop's step, else the axis's size."""
        for x in reversed(nest):
            if x.axis == axis:
                return x.step
        return self.program.dim(axis)

    def extent(self, nest: tuple[Loop, ...], axis: str) -> int:
        """The largest piece of `axis` inside `nest`, as a number."""
        return upper(self.size(nest, axis))

    def count(self, nest: tuple[Loop, ...], at: int) -> int:
        """Most iterations of nest[at]; fewer at a ragged edge or for a smaller symbol."""
        return -(-self.extent(nest[:at], nest[at].axis) // nest[at].step)

    def slot_bytes(self, tile: Tile, c: Channel) -> int:
        """Bytes of one slot of a channel: the largest block of the value at the loop that refills it."""
        v = self.program.value(c.value)
        n = size_bytes(v.dtype)
        for a in v.axes:
            n *= self.extent(tile.nest[: c.at + 1], a)
        return n

    def part_step(self, w: Workspace) -> int:
        """Positions of the workspace's axis that one part covers; a smaller symbol fills fewer parts."""
        tiles = (la.tile for la in self.launches if any(x.stage == w.value and not x.combine for x in la.tile.works))
        return next(x.step for tile in tiles for x in tile.nest if x.axis == w.axis)

    def about(self, launch: Launch) -> Plan:
        """The plan as a launch of it sees it: of the others, what they make. Plans that differ in nothing else become equal."""
        bare = (x if x.name == launch.name else Launch(x.name, Tile(x.tile.bare)) for x in self.launches)
        return self if len(self.launches) == 1 else Plan(self.program, tuple(bare), self.workspaces)

    def with_launch(self, launch: Launch) -> Plan:
        """The plan with the launch of that name replaced."""
        return replace(self, launches=tuple(launch if x.name == launch.name else x for x in self.launches))

    def with_launch_after(self, launch: Launch, new: Launch) -> Plan:
        """The plan with `launch` replaced and `new`, which takes over some of its works, right behind it.

        What waited for `launch` may read what `new` stores, so it waits for `new` too.
        """
        out: list[Launch] = []
        for x in self.launches:
            if x.name == launch.name:
                out += [launch, new]
            elif launch.name in x.depends_on:
                out.append(replace(x, depends_on=(*x.depends_on, new.name)))
            else:
                out.append(x)
        return replace(self, launches=tuple(out))

    def arrives(self, launch: Launch, value: str) -> bool:
        """Whether a launch finds a value whole in memory: an input, or what a launch before it made."""
        return all(w.stage != value for w in launch.tile.works)

    def stored(self, stage: Stage, launch: Launch) -> bool:
        """True when the stage's value leaves the launch: an output, or read by another one."""
        others = (w for la in self.launches if la.name != launch.name for w in la.tile.works if not w.combine)
        return stage.out in self.program.outputs or any(stage.out in self.program.stage(w.stage).reads for w in others)

    def __str__(self) -> str:
        return show(self)


def naive(program: Program) -> Plan:
    """One launch, one block, every stage computed whole: where every schedule starts."""
    return Plan(program, (Launch("k0", Tile(tuple(Work(s.out) for s in program.stages))),))


def loop_works(
    program: Program, works: tuple[Work, ...], axis: str
) -> tuple[tuple[Work, ...], tuple[Work, ...], tuple[Work, ...]]:
    """Works (before, inside, after) a loop over `axis`: inside is from the first to the last work that has the axis.

    What reads a fold that the loop completes comes after it, and what else is there; the loop may be walked once more for it.
    """
    has = [i for i, w in enumerate(works) if axis in axes_walked(program, w)]
    if not has:
        return works, (), ()
    folded = set[str]()
    for at in range(has[0], has[-1] + 1):
        if folded & set(_reads(program, works[at])):
            has = [i for i in has if i < at]
            break
        if not works[at].combine and axis in program.stage(works[at].stage).folded:
            folded.add(works[at].stage)
    return works[: has[0]], works[has[0] : has[-1] + 1], works[has[-1] + 1 :]


def refilled(program: Program, tile: Tile, at: int, works: tuple[Work, ...]) -> tuple[Channel, ...]:
    """Channels that loop number `at` refills when it is walked for `works`: those whose value one of them reads."""
    used = {v for w in works for v in _reads(program, w)}
    return tuple(c for c in tile.channels if c.at == at and c.value in used)


def folds_results(program: Program, works: tuple[Work, ...], stage: Stage) -> bool:
    """Whether a stage folds elements that other works of the tile make, each once: a statistic of them, such as a sum of squares."""
    return bool(stage.reduces) and _folds_results(program, tuple(w.stage for w in works), stage)


@lru_cache(maxsize=4096)
def _folds_results(program: Program, works: tuple[str, ...], stage: Stage) -> bool:
    every = set(stage.every)
    return any(v != stage.out and v in works and set(program.value(v).axes) == every for v in stage.reads)


def axes_walked(program: Program, w: Work) -> tuple[str, ...]:
    """Axes a work loops over: a combining work no longer walks the folded ones."""
    s = program.stage(w.stage)
    return s.axes if w.combine else s.every


def refuse_loops(plan: Plan, launch: Launch) -> str | None:
    """Why the loops of a launch's tile do not compute its works, in one sentence; None when they do.

    `launch` need not be the plan's own: moves ask before they add a loop.
    """
    works = launch.tile.bare
    parts = frozenset(x.value for x in plan.workspaces)
    stored = frozenset(w.stage for w in works if plan.stored(plan.program.stage(w.stage), launch))
    return _refuse_loops(
        plan.program, launch.name, works, tuple((x.axis, x.level) for x in launch.tile.nest), parts, stored
    )


@lru_cache(maxsize=1 << 14)
def _refuse_loops(
    p: Program,
    launch: str,
    works: tuple[Work, ...],
    loops: tuple[tuple[str, Level], ...],
    parts: frozenset[str],
    stored: frozenset[str],
) -> str | None:
    """By all that counts, which is little: no step of a loop, no ring. A search asks it of few nests, again and again.

    parts, stored: stages whose partial states, and whose values, leave the launch
    """
    t = Tile(works, tuple(Loop(axis, level, 1) for axis, level in loops))
    folded = {a for w in t.works if not w.combine for a in p.stage(w.stage).folded}
    if reason := _refuse_clusters(t, folded):
        return reason
    for i, x in enumerate(t.nest):
        for w in t.works:
            s, leaves_state = p.stage(w.stage), w.stage in parts and not w.combine
            leaves = leaves_state or w.stage in stored
            whole = not leaves_state or folds_results(p, t.works, s)
            if x.level == "cluster" and whole and x.axis in folded and x.axis not in s.every:
                continue  # its blocks add up their sums, and each finishes other elements
            if leaves and i < t.n_block_loops and x.axis not in axes_walked(p, w):
                return f"{w.stage} leaves {launch} and has no axis {x.axis}: every block over {x.axis} would store it"
            if leaves_state and x.axis in s.axes and x.level not in _ALIKE and (c := _lacking(s, x.axis)):
                return f"the state {c} of {w.stage} has no axis {x.axis}: every piece of {x.axis} would store it"
    return _refuse_walk(p, t.works, t.nest[t.n_block_loops :], frozenset())


def _refuse_clusters(t: Tile, folded: set[str]) -> str | None:
    """Why blocks of a cluster, which are neighbours, could not exchange their sums once a tile, or fill rings in step."""
    blocks, inside = t.nest[: t.n_block_loops], t.nest[t.n_block_loops :]
    clusters = [i for i, x in enumerate(blocks) if x.level == "cluster"]
    if not clusters:
        return None
    apart = next((x for x in blocks[clusters[0] :] if x.level != "cluster"), None)
    if apart:
        parted = f"the blocks of a cluster over {blocks[clusters[0]].axis}"
        return f"the {apart.level} loop over {apart.axis} would part {parted}: it comes before"
    shared = next((blocks[i].axis for i in clusters if blocks[i].axis in folded), None)
    around = next((x for x in inside if x.axis in folded), None)
    own = next((x for x in (inside[: inside.index(around)] if around else inside) if x.axis not in folded), None)
    if shared and own:
        again = f"blocks of a cluster over {shared} would exchange sums in each piece of {own.axis}"
        return f"{again}: the {own.level} loop over {own.axis} comes after one over {shared}"
    cut = {blocks[i].axis for i in clusters} - folded
    uneven = next((x for x in inside if x.axis in cut and x.level == "serial"), None)
    if uneven:
        return f"the blocks of a cluster over {uneven.axis} would walk {uneven.axis} unevenly at its edge: they fill rings in step"
    return None


def refuse_own_loop(plan: Plan, work: Work, axis: str) -> str | None:
    """Why a work cannot walk `axis` in a loop of its own, inside its open accumulators."""
    s = plan.program.stage(work.stage)
    if axis in s.folded or work.combine or not (c := _lacking(s, axis)):
        return None
    return f"{s.out} would fold its state {c}, which has no axis {axis}, once for each piece of {axis}"


def _lacking(s: Stage, axis: str) -> str | None:
    """A component of the stage's monoid without the axis."""
    return next((c for c, axes in (s.monoid.components(s) if s.monoid else ()) if axis not in axes), None)


def _refuse_walk(p: Program, works: tuple[Work, ...], nest: tuple[Loop, ...], opened: frozenset[str]) -> str | None:
    """`opened`: works whose accumulators live around the loop, since a loop outside it folds their axis."""
    if not nest or not works:
        return None
    axis, rest = nest[0].axis, nest[1:]
    before, inside, after = loop_works(p, works, axis)
    for w in inside:
        if axis not in axes_walked(p, w):
            ends = f"{inside[0].stage} and {inside[-1].stage}"
            return f"{w.stage} has no axis {axis} but stands between {ends}, which have it"
        s = p.stage(w.stage)
        if w.stage in opened and axis not in s.folded and nest[0].level not in _ALIKE and (c := _lacking(s, axis)):
            return f"the loop over {axis} would fold {c} of {s.out} again for each piece: it comes before the loop over {s.folded[0]}"
    folding = frozenset(w.stage for w in inside if not w.combine and axis in p.stage(w.stage).folded)
    made = {w.stage: p.stage(w.stage).axes for w in inside if w.stage not in folding}
    for late, v in ((w.stage, v) for w in after for v in _reads(p, w) if v in made):
        again = next((x.axis for x in nest if x.level not in SIDE and x.axis in made[v]), None)
        if again:
            return f"{late} reads {v}, of which the loop over {again} leaves but the last piece"
    for u in before:
        first = next((x.axis for x in rest if x.axis in axes_walked(p, u) and x.level not in SIDE), None)
        reader = next((w.stage for w in (*inside, *after) if u.stage in _reads(p, w)), None)
        if reader and first in p.stage(u.stage).axes:
            return f"{reader} reads {u.stage} outside the loop over {first} that makes it, with the loop over {axis} between"
    parts = ((before, opened, rest), (inside, opened | folding, rest), (after, opened, nest))
    return next((r for part, around, loops in parts if (r := _refuse_walk(p, part, loops, around))), None)


def _reads(p: Program, w: Work) -> tuple[str, ...]:
    return () if w.combine else p.stage(w.stage).reads


# ---------------------------------------------------------------- printer
def show(plan: Plan) -> str:
    """The plan as indented text, one loop level a line, with sizes a reader can check."""
    p = plan.program
    out = ["plan " + " ".join(f"{a}={d}" for a, d in p.dims)]
    for la in plan.launches:
        out += _show_launch(plan, la)
    for w in plan.workspaces:
        m = p.stage(w.value).monoid
        who = f", combined by the last block{' to begin' if w.marked else ''}" if w.by_last else ""
        who = ", added in memory" if w.added else who
        out.append(f"  workspace {w.value} over {w.axis}: {w.parts} parts of {m.name if m else '?'} state{who}")
    return "\n".join(out)


def _show_launch(plan: Plan, la: Launch) -> list[str]:
    t, blocks = la.tile, la.tile.n_block_loops
    counts = [plan.count(t.nest, i) for i in range(blocks)]
    total = 1
    for n in counts:
        total *= n
    level = t.nest[0].level if blocks else "grid"
    head = " ".join(f"{x.axis}:{n}" for x, n in zip(t.nest, counts, strict=False))
    order = "" if t.order.kind == "static" else f", {t.order.kind}({t.order.workers})"
    after = f", after {','.join(la.depends_on)}" if la.depends_on else ""
    raster = f", in groups of {t.order.group} along {t.nest[t.n_tile_loops - 2].axis}" if t.order.group > 1 else ""
    early = ", early" if la.early else ""
    note = f"  # {total} block{'s' * (total > 1)}{order}{raster}{after}{early}"
    out = [f"  {la.name}: {level} {head}".rstrip() + note]
    for r in t.roles:
        deal = f"  takes tiles {r.deal[0]} mod {r.deal[1]}" if r.deal else ""
        out.append(f"    role {r.name} {r.unit}({r.agents}) regs {r.registers}: {' '.join(r.works) or 'copies'}{deal}")
    for at in range(-1, blocks):
        out += _show_fills(plan, t, at, t.works, "    ")
    return out + _show_nest(plan, la, blocks, t.works, "    ")


def _show_fills(plan: Plan, t: Tile, at: int, works: tuple[Work, ...], pad: str) -> list[str]:
    out = []
    for c in refilled(plan.program, t, at, works):
        box = ",".join(str(plan.extent(t.nest[: at + 1], a)) for a in plan.program.value(c.value).axes)
        kib = plan.slot_bytes(t, c) * c.depth / 1024
        space = "pack" if c.transport == "pack" else "smem"
        how = f"{c.transport} depth {c.depth} {c.layout}" + (f" {c.hint}" if c.hint else "")
        out.append(f"{pad}{c.value}.{space} <- {c.value}[{box}]  {how}  # {kib:g} KiB")
    for x in t.asked if out and at == t.ring_loop else ():
        box = ",".join(str(plan.extent(t.nest[: t.n_block_loops], a)) for a in plan.program.value(x.value).axes)
        out.append(f"{pad}{x.value}.cache <- {x.value}[{box}]  with fill {x.fill}")
    return out


def _show_nest(plan: Plan, la: Launch, i: int, works: tuple[Work, ...], pad: str) -> list[str]:
    t, p = la.tile, plan.program
    if i == len(t.nest):
        return [line for w in works for line in _show_work(plan, t, w, pad)]
    before, inside, after = loop_works(p, works, t.nest[i].axis)
    out = _show_nest(plan, la, i + 1, before, pad) if before else []
    if inside:
        x = t.nest[i]
        out.append(f"{pad}{x.level:6} {x.axis}:{plan.count(t.nest, i)}  # pieces of {x.step}")
        out += _show_fills(plan, t, i, inside, pad + "  ")
        out += _show_nest(plan, la, i + 1, inside, pad + "  ")
    return out + (_show_nest(plan, la, i, after, pad) if after else [])


def _show_work(plan: Plan, t: Tile, w: Work, pad: str) -> list[str]:
    s, out = plan.program.stage(w.stage), []
    for level in dict.fromkeys(x.level for x in w.nest):
        parts = [
            f"{x.axis}:{plan.count(t.nest + w.nest, len(t.nest) + i)}" for i, x in enumerate(w.nest) if x.level == level
        ]
        out.append(f"{pad}{level:6} " + " ".join(parts))
        pad += "  "
    for a in w.atoms:
        out.append(
            f"{pad}atom   {a}"
            + (f"  on {a.stage}" if a.stage != w.stage else "")
            + (f"  unroll {w.unroll}" if w.unroll > 1 else "")
            + ("  operands ahead" if w.ahead else "")
        )
    if w.combine and s.monoid:
        return [*out, f"{pad}{s.out}[{','.join(s.axes)}] = finish(combine {s.monoid.name} over parts)"]
    place = t.placement(s.out)
    notes = [f"by way of {place.space}, {place.layout}"] if place else []
    if sooner := [str(x) for x in t.preloads if x.value in s.reads and not s.reduces]:
        notes.append(f"vectors under way sooner: {', '.join(sooner)}")
    return [*out, f"{pad}{s}" + (f"  # {'; '.join(notes)}" if notes else "")]
