"""The space of an op's schedules on a target, as a tree of decisions: first which moves, then their knobs.

The upper tree walks skeletons: each decision picks one more move (knobs open) among the sites the moves list, or `done`.
The lower tree fills the knobs in order; each domain follows from the plan as filled so far. Nothing here knows a move.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product

import numpy as np

from emmy.codegen.lower import complete
from emmy.costmodel.features import feature_names, features
from emmy.errors import EmmyError, PlanError
from emmy.ir.moves import MOVES, Move, Site
from emmy.ir.moves.atom import lacks_atom, pays
from emmy.ir.moves.split import Split
from emmy.ir.moves.stage import Stage
from emmy.ir.ops import Op
from emmy.ir.ops.op import Accumulate
from emmy.ir.plan import Plan
from emmy.ir.schedule import apply_move, format_schedule, parse_schedule, replay
from emmy.ir.target import Target
from emmy.search.plain_cpu import PlainCpu
from emmy.search.space import Decision, Node, Point, Value
from emmy.search.usual import urgency, usual
from emmy.search.walk import nearest

DONE = "done"
_LISTABLE = 4000
_CAREFUL = 0.5  # of the random walks
_CPU_STEP = 256  # of a loop in the default schedule
_TRIES = 500  # nodes that the default walk may visit
_KEPT = 20_000  # lists of sites remembered while knobs are chosen
_LONGEST = 24  # moves; a guard against a move that offers itself for ever


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A node: the skeleton's moves, the same moves filled (chosen values, defaults where open), and how far we are."""

    skeleton: tuple[Move, ...]
    filled: tuple[Move, ...]
    closed: bool  # no more moves: knobs are being chosen
    knobs: tuple[tuple[str, Value], ...]  # chosen so far, by decision name
    choices: tuple[tuple[str, Value], ...]
    decision: Decision | None
    # Of a node of the upper tree, which nearly all walks share; what follows a value for which others' numbers are wished is not kept.
    children: dict[Value, TreeNode] = field(default_factory=dict, compare=False, repr=False)

    @property
    def key(self) -> str:
        skeleton = format_schedule(self.skeleton)
        return f"{skeleton} | {', '.join(f'{n}={v}' for n, v in self.knobs)}" if self.closed else skeleton


class ScheduleSpace:
    """Points are schedules, keyed by their text. Feature rows are `emmy.costmodel.features` of the replayed plan."""

    def __init__(self, op: Op, target: Target, threads: int = 1, sums: Accumulate | None = None) -> None:
        """sums: how all schedules keep their sums, where the op has one that does, else in f32; None = as it pays on the target"""
        self.op, self.target, self.threads, self.program = op, target, threads, op.program()
        self.name = f"{op.key} on {target.name}"
        self._sites_of: dict[tuple[Move, ...], tuple[Site, ...]] = {}
        self._site_of: dict[tuple[Move, tuple[Move, ...]], Site | None] = {}
        self._plans: dict[tuple[Move, ...], Plan] = {}
        self._domains: tuple[Decision, ...] | None = None
        self._root: TreeNode | None = None
        self._n_nodes = 0  # kept below the root
        # Where an instruction is needed, and none keeps sums as is asked for: no end of a skeleton.
        self._lacking: set[tuple[Move, ...]] = set()
        self.sums = sums if op.program().dtype == "f16" and not target.is_cpu else sums and "f32"
        if self.sums not in (None, "f32") and not self._has_schedules():
            self.sums = "f32"
            self._sites_of.clear()
            self._lacking.clear()
            self._root = None

    # ------------------------------------------------------------ the tree
    def root(self) -> TreeNode:
        if self._root is None or self._n_nodes > _KEPT:
            self._root, self._n_nodes = self._structure((), (), ()), 0
        return self._root

    def child(self, node: Node, value: Value, like: Mapping[str, int] | None = None) -> TreeNode:
        """like: numbers of the move that is chosen, for which others may be legal behind it than for those of a plain schedule"""
        assert isinstance(node, TreeNode) and node.decision is not None
        if node.closed:
            chosen = (node.decision.name, value)
            return self._knob(node.skeleton, node.filled, (*node.knobs, chosen), (*node.choices, chosen))
        if like:
            return self._onward(node, value, like)
        if value not in node.children:
            node.children[value] = self._onward(node, value, {})
            self._n_nodes += 1
        return node.children[value]

    def _onward(self, node: TreeNode, value: Value, like: Mapping[str, int]) -> TreeNode:
        """The node behind one of the upper tree."""
        assert node.decision is not None
        choices = (*node.choices, (node.decision.name, value))
        if value == DONE:
            return self._knob(node.skeleton, (), (), choices)
        site = next(s for s in self._legal(node.skeleton, node.filled) if str(s.move) == value)
        filled = _first_legal(site, self._plan(node.filled), self.target, like)
        return self._structure((*node.skeleton, site.move), (*node.filled, filled), choices)

    def point(self, leaf: Node) -> Point:
        assert isinstance(leaf, TreeNode) and leaf.decision is None
        return Point(format_schedule(leaf.filled), leaf.choices)

    def _structure(
        self, skeleton: tuple[Move, ...], filled: tuple[Move, ...], choices: tuple[tuple[str, Value], ...]
    ) -> TreeNode:
        legal = self._legal(skeleton, filled) if len(skeleton) < _LONGEST else ()
        values = tuple(str(s.move) for s in legal)
        if not _mandatory(legal) and filled not in self._lacking:
            values = (*values, DONE)
        decision = Decision(f"move {len(skeleton)}", values, ordered=False)
        return TreeNode(skeleton, filled, False, (), choices, decision)

    def _knob(
        self,
        skeleton: tuple[Move, ...],
        filled: tuple[Move, ...],
        knobs: tuple[tuple[str, Value], ...],
        choices: tuple[tuple[str, Value], ...],
    ) -> TreeNode:
        """The node at the next open knob; `filled` holds the moves before it."""
        chosen = dict(knobs)
        done = list(filled)
        for move in skeleton[len(done) :]:
            for knob in move.knobs:
                name = f"{move}" + (f" {knob}" if len(move.knobs) > 1 else "")
                if name not in chosen:
                    values = self._knob_values(tuple(done), move, knob, chosen)
                    return TreeNode(skeleton, tuple(done), True, knobs, choices, Decision(name, values))
            done.append(_filled(move, chosen))
        full = tuple(done)
        try:
            plan = self._plan(full)
            dead = complete(plan) is not None or (not self.target.is_cpu and lacks_atom(plan))
        except PlanError:  # the last values made a later move without knobs illegal
            dead = True
        return TreeNode(skeleton, full, True, knobs, choices, Decision("dead end", ()) if dead else None)

    def sites(self, node: Node) -> tuple[Site, ...]:
        """What the values of a node's decision are sites of, but for `done`; () where knobs are being chosen."""
        assert isinstance(node, TreeNode)
        return () if node.closed or len(node.skeleton) >= _LONGEST else self._legal(node.skeleton, node.filled)

    def plan(self, node: Node) -> Plan:
        """The plan at a node, knobs that are still open at their defaults."""
        assert isinstance(node, TreeNode)
        return self._plan(node.filled)

    # ------------------------------------------------------------ legality
    def _plan(self, moves: tuple[Move, ...]) -> Plan:
        """What the moves make. A walk asks after each of its moves, and most walks begin alike: plans are kept by all of their moves."""
        if moves not in self._plans:
            if len(self._plans) > _KEPT:
                self._plans.clear()
            plan = apply_move(self._plan(moves[:-1]), moves[-1], self.target, len(moves) - 1) if moves else None
            self._plans[moves] = plan or replay(self.program, (), self.target)
        return self._plans[moves]

    def _sites(self, filled: tuple[Move, ...]) -> tuple[Site, ...]:
        """Every site on the plan that `filled` makes, of moves that may still follow."""
        if filled not in self._sites_of:
            least = (
                filled[-1].phase if filled and not self.sums else 0
            )  # where sums are asked for, sites of any phase tell what lacks
            kinds = [cls for cls in MOVES.values() if cls.searched and (cls.first or cls.phase >= least)]
            every = [s for cls in kinds for s in cls.sites(self._plan(filled), self.target)]
            found = [s for s in every if self._keeps(s.move)]
            if self.sums and _mandatory(every) and not _mandatory(found):
                self._lacking.add(filled)
            self._sites_of[filled] = tuple(sorted(found, key=lambda s: (s.move.phase, str(s.move))))
        return self._sites_of[filled]

    def _keeps(self, move: Move) -> bool:
        """Whether the move puts no instruction in place that keeps sums otherwise than is asked for, or than pays here."""
        if move.accumulate is None or self.target.is_cpu:
            return True
        return move.accumulate == self.sums if self.sums else pays(move.accumulate, self.target)

    def _has_schedules(self) -> bool:
        try:
            return bool(self.default())
        except PlanError:
            return False

    def _site(self, move: Move, filled: tuple[Move, ...]) -> Site | None:
        """Where the move, its knobs open, stands on the plan that `filled` makes: no more sites are listed than it takes to find it."""
        if len(self._site_of) > _KEPT:
            self._site_of.clear()
        if (move, filled) not in self._site_of:
            sites = type(move).sites(self._plan(filled), self.target)
            self._site_of[move, filled] = next((s for s in sites if s.move == move), None)
        return self._site_of[move, filled]

    def _legal(self, skeleton: tuple[Move, ...], filled: tuple[Move, ...]) -> tuple[Site, ...]:
        """Sites a search goes on with: phases ascend, and moves whose order does not matter are sorted."""
        sites = self._sites(filled)
        if first := tuple(s for s in sites if s.mandatory and s.move.first):
            return first
        if not skeleton:
            return sites
        last = skeleton[-1]
        after = [s for s in sites if s.move.phase >= last.phase]
        return tuple(s for s in after if s.move.phase > last.phase or not s.move.commutes or str(s.move) > str(last))

    def _knob_values(
        self, done: tuple[Move, ...], move: Move, knob: str, chosen: Mapping[str, Value]
    ) -> tuple[Value, ...]:
        """Values of a knob with which the move can still become legal on the plan as filled so far."""
        try:
            site, plan = self._site(move, done), self._plan(done)
        except PlanError:
            return ()
        if site is None:
            return ()
        domains = dict(site.domains)
        if move.knobs == (knob,):  # a site's values are legal
            return domains[knob]
        later = move.knobs[move.knobs.index(knob) + 1 :]
        partial = _filled(move, chosen)

        def works(value: int) -> bool:
            options = product(*(domains[n] for n in later))
            fills = ({knob: value, **dict(zip(later, o, strict=True))} for o in options)
            return any(partial.fill(f).refuse(plan, self.target) is None for f in fills)

        return tuple(v for v in domains[knob] if works(v))

    # ------------------------------------------------------------ the space as a whole
    def domains(self) -> tuple[Decision, ...]:
        """Decisions met on a fixed sample of walks, with the union of their values: what flat samplers choose from."""
        if self._domains is None:
            rng, seen = random.Random(0), dict[str, dict[Value, None]]()
            for _ in range(200):
                node = self.root()
                while node.decision is not None and node.decision.values:
                    seen.setdefault(node.decision.name, {}).update(dict.fromkeys(node.decision.values))
                    node = self.child(node, rng.choice(node.decision.values))
            ordered = {n: all(isinstance(v, int) for v in vs) for n, vs in seen.items()}
            self._domains = tuple(
                Decision(n, tuple(sorted(vs)) if ordered[n] else tuple(sorted(vs, key=str)), ordered[n])
                for n, vs in seen.items()
            )
        return self._domains

    def size(self, limit: int) -> int | None:
        """Exact when small; None beyond `limit` or beyond what is cheap to list (each point is replayed)."""
        most = min(limit, _LISTABLE)
        if self._estimate() > 8 * most:
            return None
        count = sum(1 for _ in islice(self.points(), most + 1))
        return count if count <= most else None

    def _estimate(self) -> float:
        """Expected number of points: mean product of the branching factors along random walks (Knuth 1975)."""
        rng, total, walks = random.Random(1), 0.0, 40
        for _ in range(walks):
            node, weight = self.root(), 1.0
            while node.decision is not None and node.decision.values:
                weight *= len(node.decision.values)
                node = self.child(node, rng.choice(node.decision.values))
            total += weight if node.decision is None else 0.0
        return total / walks

    def points(self) -> Iterator[Point]:
        stack = [self.root()]
        while stack:
            here = stack.pop()
            if here.decision is None:
                yield self.point(here)
            else:
                stack.extend(self.child(here, v) for v in reversed(here.decision.values))

    def sample(self, rng: random.Random) -> Point:
        """A random walk; walks into dead ends are repeated.

        On a GPU every other one draws numbers near those of a plain schedule: wherever all of them must meet, such as 64 of
        the folded axis, a ring and roles, uniform choices hardly ever do.
        """
        for _ in range(1000):
            node, careful = self.root(), not self.target.is_cpu and rng.random() < _CAREFUL
            while node.decision is not None and node.decision.values:
                node = self.child(node, self._drawn(node, rng) if careful else rng.choice(node.decision.values))
            if node.decision is None:
                return self.point(node)
        raise PlanError(
            f"{self.name}: 1000 random walks ended in dead ends; `emmy explain` shows what each move refuses"
        )

    def _drawn(self, node: TreeNode, rng: random.Random) -> Value:
        """A value of a decision: of all kinds of moves alike, of numbers one that a plain schedule prefers to the next twice as likely."""
        assert node.decision is not None
        if not node.closed:
            kinds = dict[str, list[Value]]()
            for v in node.decision.values:  # "k0.C/atom(mma,...)" is one of the atoms
                kinds.setdefault(str(v).partition("(")[0], []).append(v)
            return rng.choice(rng.choice(list(kinds.values())))
        ranked = self.preferred(node)
        return rng.choices(ranked, [2.0**-i for i in range(len(ranked))])[0]

    def default(self) -> Point:
        """A plain schedule that the target can surely run: outputs in blocks over the cores, operands staged, one atom."""
        node, tried = self.root(), 1
        stack: list[tuple[Node, Value]] = []
        while node.decision is not None:
            # Where the best values turn out to refuse each other, the next best are tried.
            stack.extend((node, v) for v in reversed(self.preferred(node)))
            if not stack or tried == _TRIES:
                raise PlanError(
                    f"{self.name}: none of {tried} plain schedules is legal; `emmy explain` shows what each move refuses"
                )
            node, tried = self.child(*stack.pop()), tried + 1
        return self.point(node)

    def preferred(self, node: Node) -> list[Value]:
        """Values best first: outputs over blocks, folded axes in time, all staged, one atom; sizes that do on most targets."""
        assert isinstance(node, TreeNode) and node.decision is not None
        if not node.decision.values:  # a dead end
            return []
        d, folded = node.decision, dict.fromkeys(a for s in self.program.stages for a in s.folded)
        plain = PlainCpu.of(self.program, self.target, self.threads)
        if d.ordered:
            near = (plain.near(d.name) if plain else None) or self._near(node)
            return sorted(d.values, key=lambda v: abs(int(v) - near))
        marks = [f",{self.target.block_level},", *(f"({a},{level}," for level in ("serial", "warp") for a in folded)]
        marks += [",warpgroup,", ",tma,", "/stage(", "/specialize(", "/atom(fma", "/atom(mma", "/atom(", "/pipeline("]

        haste = {str(s.move): urgency(s.move, self.plan(node), self.target) for s in self.sites(node)}

        def rank(v: Value) -> int:
            found = next((i for i, mark in enumerate(marks) if mark in str(v)), len(marks) + 1)
            late = v == DONE or ("/stage(" in str(v) and "ldg" in str(v)) or haste.get(str(v), 0) < 0
            if plain and v != DONE:
                found = -1 if str(v) == first else len(marks) + 1 if plain.is_unwanted(str(v)) else found
            return -1 if haste.get(str(v), 0) > 0 else len(marks) if late else found

        first = plain.first([str(v) for v in d.values]) if plain else None
        return sorted(d.values, key=rank)

    def _near(self, node: TreeNode) -> int:
        """About the value that a knob has in a plain schedule: the middle one, of a loop the usual step."""
        assert node.decision is not None
        move, values = node.skeleton[len(node.filled)], node.decision.values
        if isinstance(move, Split) and self.target.is_cpu:
            return _CPU_STEP
        step = usual(move, self._plan(node.filled), self.target)
        return step or (_from_middle(move, [int(v) for v in values])[0] if values else 0)

    def locate(self, schedule: str) -> Point | None:
        """The point whose key is `schedule`, or None when no search reaches it (another Emmy wrote it)."""
        try:
            moves = parse_schedule(schedule)
            return self._located(moves, False) or self._located(moves, True)
        except EmmyError:
            return None

    def _located(self, moves: tuple[Move, ...], filled: bool) -> Point | None:
        """The leaf of these moves, below nodes with numbers of a plain schedule, or with their own."""
        node, skeleton = self.root(), iter([*moves, None])
        while node.decision is not None:
            values, like = node.decision.values, dict[str, int]()
            if node.closed:
                value = _knob_of(node, moves)
            elif (move := next(skeleton)) is None:
                value = DONE
            else:
                value = next((str(s.move) for s in self.sites(node) if _opens_to(s.move, move)), None)
                like = {n: x for n, x in move.arguments if isinstance(x, int)} if filled else like
            if value is None or value not in values:
                return None
            node = self.child(node, value, like)
        found = self.point(node)
        return found if found.key == format_schedule(moves) else None

    @property
    def feature_names(self) -> tuple[str, ...]:
        return feature_names()

    def features(self, points: Sequence[Point]) -> np.ndarray:
        plans = (replay(self.program, p.key, self.target) for p in points)
        rows = [features(self.op, plan, self.target, self.threads) for plan in plans]
        return np.stack(rows) if rows else np.empty((0, len(self.feature_names)))


def _mandatory(sites: Iterable[Site]) -> bool:
    """Whether a search does not stop where these sites are."""
    return any(s.mandatory or s.move.mandatory for s in sites)


def _filled(move: Move, chosen: Mapping[str, Value]) -> Move:
    """The move with the knobs set that `chosen` names."""
    many = len(move.knobs) > 1
    values = {k: chosen[name] for k in move.knobs if (name := f"{move}" + (f" {k}" if many else "")) in chosen}
    return move.fill({k: int(v) for k, v in values.items()})


def _first_legal(site: Site, plan: Plan, target: Target, like: Mapping[str, int]) -> Move:
    """The site's move with values near those of a plain schedule, or near others, that are legal together."""
    step = usual(site.move, plan, target)
    wished = {n: like.get(n, step) for n, _ in site.domains}
    options = product(*(nearest(d, x) if (x := wished[n]) else _from_middle(site.move, d) for n, d in site.domains))
    names = [n for n, _ in site.domains]
    for values in options:
        move = site.move.fill({n: int(v) for n, v in zip(names, values, strict=True)})
        if move.refuse(plan, target) is None:
            return move
    raise PlanError(f"{site.move}: no values in {site.domains} are legal together")


def _from_middle(move: Move, domain: Sequence[int]) -> list[int]:
    """The middle one first; of depths the larger of two."""
    middle = (len(domain) - 1) / 2
    rising = -1 if isinstance(move, Stage) else 1
    return [domain[i] for i in sorted(range(len(domain)), key=lambda i: (abs(i - middle), rising * i))]


def _opens_to(opened: Move, move: Move) -> bool:
    """Whether a move is the other one with its knobs filled."""
    values = dict(move.arguments)
    return type(opened) is type(move) and opened.fill({k: values[k] for k in opened.knobs}) == move  # type: ignore[misc]


def _knob_of(node: TreeNode, moves: Sequence[Move]) -> Value | None:
    """The value that `moves` gives the knob being decided at `node`."""
    assert node.decision is not None
    for opened, move in zip(node.skeleton, moves, strict=False):
        for knob in opened.knobs:
            if node.decision.name in (f"{opened}", f"{opened} {knob}"):
                value = dict(move.arguments)[knob]
                return value if isinstance(value, int) else None
    return None
