"""Monte Carlo tree search over a space's decisions, led by a belief about times. Knows no move and no device.

PUCT over the decision tree: a child's prior is what the belief says of completions below it, its value the best and the
mean time found there. Nodes are shared by key (transpositions), opened one after another as visits grow (progressive
widening); a descent counts as a look at every node it passes, which sends the next one elsewhere. What descents find
joins a `Pool`, whose belief (a given model corrected by the trials, or the trials alone) picks the points to measure.
Subtrees in which every point was seen are left for good.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from emmy.search.pool import Pool
from emmy.search.space import Node, Point, Space, Trial, Value
from emmy.search.strategy import Ranker, Strategy
from emmy.search.walk import at_random, descend, toward, varied

_REFERENCE = 128  # random points that set the scale of the features
_EXPLORE = 0.6  # PUCT's constant; values lie in 0..1
_HEAT = 0.5  # log2 of time by which a prior falls to 1/e
_MEAN_SHARE = 0.3  # of a node's mean against its best in its value
_WIDTH, _GROWTH = 2.0, 0.5  # children open at v visits: width * v^growth
_COMPLETIONS = 6  # leaves looked at below the node a descent ends at
_DESCENTS = 4  # a proposal
_RANDOM = 8  # random points looked at, a proposal
_ELITE = 8  # points whose choices completions take over
_CHILD_LIMIT = 64  # children that get a prior; the rest share the least


@dataclass(slots=True, eq=False)
class _Tree:
    """A node with what is known below it; times are log2 of microseconds."""

    node: Node
    children: dict[Value, _Tree] = field(default_factory=dict)
    prior: dict[Value, float] = field(default_factory=dict)  # opened in this order
    guess: dict[Value, float] = field(default_factory=dict)
    visits: int = 0  # measured points below
    looks: int = 0  # descents that came by
    best: float = math.inf
    total: float = 0.0
    exhausted: bool = False

    @property
    def mean(self) -> float:
        return self.total / self.visits if self.visits else math.inf


class MctsStrategy(Strategy):
    """PUCT with the belief as prior and value; see the module."""

    name: ClassVar[str] = "mcts"

    def __init__(
        self,
        space: Space,
        *,
        seed: int = 0,
        model: Ranker | None = None,
        known: Sequence[Trial] = (),
        pool: Pool | None = None,
    ) -> None:
        super().__init__(space, seed=seed, model=model, known=known)
        self._pool = pool or Pool(space, _sample(space, self), self.rng, model)
        self._owns_pool = pool is None
        self._nodes: dict[str, _Tree] = {}
        self._root = self._tree(space.root())
        self._best: Point | None = None
        self._best_time = math.inf
        self._worst = -math.inf

    # ------------------------------------------------------------ asking
    def propose(self, n: int) -> Iterable[Point]:
        if self._pool.is_informed:
            self.grow(n)
        return [self._pool.points[row] for row in self._pool.choose(n)]

    def grow(self, n: int) -> None:
        """Descend for n proposals: the completions below the nodes reached join the pool."""
        self._pool.trim()
        self._pool.add(self.space.sample(self.rng) for _ in range(n * _RANDOM))
        for _ in range(n * _DESCENTS):
            if self._root.exhausted:
                break
            path = self._select()
            self._pool.add(self._completions(path[-1]))
            for t in path:
                t.looks += 1  # the next descent goes elsewhere, in this batch and later

    def _select(self) -> list[_Tree]:
        """The path from the root to a node not visited yet, or a leaf."""
        path = [self._root]
        while path[-1].node.decision is not None and path[-1].visits + path[-1].looks > 0:
            child = self._pick(path[-1])
            if child is None:
                path[-1].exhausted = True
                break
            path.append(child)
        return path

    def _pick(self, t: _Tree) -> _Tree | None:
        """The open child that PUCT prefers; None when all are exhausted."""
        if not t.prior:
            self._open(t)
        around = t.visits + t.looks + 1
        width = max(2, math.ceil(_WIDTH * around**_GROWTH))
        chosen: _Tree | None = None
        most = -math.inf
        for value, prior in t.prior.items():
            if width == 0:
                break
            child = t.children.get(value) or self._child(t, value)
            if child.exhausted:
                continue
            width -= 1
            score = self._value(child, t.guess[value]) + _EXPLORE * prior * math.sqrt(around) / (
                1 + child.visits + child.looks
            )
            if score > most:
                chosen, most = child, score
        return chosen

    def _value(self, child: _Tree, guess: float) -> float:
        """Best time over this node's time, 0..1: its best and mean, or the belief's guess before any visit."""
        if not child.visits:
            return min(1.0, 2.0 ** (self._best_time - guess)) if math.isfinite(self._best_time) else 0.5
        best = 2.0 ** (self._best_time - child.best) if math.isfinite(child.best) else 0.0
        mean = 2.0 ** (self._best_time - child.mean) if math.isfinite(child.mean) else 0.0
        return (1 - _MEAN_SHARE) * best + _MEAN_SHARE * mean

    def _open(self, t: _Tree) -> None:
        """Priors of the children, best first: what the belief says of one completion below each."""
        assert t.node.decision is not None
        values = t.node.decision.values
        looked = values if len(values) <= _CHILD_LIMIT else tuple(self.rng.sample(values, _CHILD_LIMIT))
        found = {v: self._completion(self._child(t, v)) for v in looked}
        points = {v: p for v, p in found.items() if p is not None}
        rows = self._pool.add(points.values())
        mean, spread = self._pool.predict(rows)
        guess = dict(zip(points, (mean - 0.5 * spread).tolist(), strict=True))
        floor = max(guess.values(), default=0.0) + 1.0
        t.guess = {v: guess.get(v, floor) for v in values if v not in found or v in points}
        lowest = min(t.guess.values(), default=0.0)
        weight = {v: math.exp(-(g - lowest) / _HEAT) for v, g in t.guess.items()}
        total = sum(weight.values())
        t.prior = {v: weight[v] / total for v in sorted(weight, key=lambda v: -weight[v])}
        if not t.prior:
            t.exhausted = True

    def _completion(self, child: _Tree) -> Point | None:
        """One leaf below the child, like the best point known where it can be."""
        order = toward(self._best.choices, self.rng) if self._best else at_random(self.rng)
        return descend(self.space, order, child.node)

    def _completions(self, t: _Tree) -> list[Point]:
        """Points below `t` that were not seen: like the best point known, a little different from it, and at random."""
        if t.node.decision is None:
            t.exhausted = True  # a leaf is proposed at most once
            point = self.space.point(t.node)
            return [] if point.key in self.seen else [point]
        found: list[Point] = []
        elite = self._pool.elite[:_ELITE]
        for i in range(_COMPLETIONS):
            order = at_random(self.rng)
            if elite and i % 3:
                like = self._pool.points[self.rng.choice(elite)]
                order = toward(like.choices, self.rng) if i == 1 else varied(like, self.rng, 1 + i % 2, 0.3)
            point_below = descend(self.space, order, t.node)
            if point_below is not None and point_below.key not in self.seen:
                found.append(point_below)
        return found

    # ------------------------------------------------------------ the tree
    def _tree(self, node: Node) -> _Tree:
        known = self._nodes.get(node.key)
        if known is None:
            known = self._nodes[node.key] = _Tree(node)
        return known

    def _child(self, t: _Tree, value: Value) -> _Tree:
        if value not in t.children:
            t.children[value] = self._tree(self.space.child(t.node, value))
        return t.children[value]

    # ------------------------------------------------------------ learning
    def learn(self, trials: Sequence[Trial]) -> None:
        if self._owns_pool:
            self._pool.learn(trials)
        for trial in trials:
            if trial.time_us is not None:
                time = math.log2(trial.time_us)
                self._worst = max(self._worst, time)
                if time < self._best_time:
                    self._best, self._best_time = trial.point, time
        for trial in trials:
            failed = trial.time_us is None
            self._back_up(trial.point, self._worst if failed else math.log2(trial.time_us or 1.0), failed)

    def _back_up(self, point: Point, time: float, failed: bool) -> None:
        """The outcome reaches every node of the tree on the point's path."""
        t: _Tree | None = self._root
        for _, value in (*point.choices, ("", "")):
            assert t is not None
            t.visits += 1
            t.total += time if math.isfinite(time) else 0.0
            if not failed:
                t.best = min(t.best, time)
            t = t.children.get(value)
            if t is None:
                return


def _sample(space: Space, strategy: Strategy) -> list[Point]:
    return list({p.key: p for p in (space.sample(strategy.rng) for _ in range(_REFERENCE))}.values())
