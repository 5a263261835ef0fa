"""What every search strategy promises, as tests that a strategy's test class inherits, and a small space to show it on.

class TestMine(StrategyContract):
    def make(self, space, seed=0, model=None, known=()):
        return MyStrategy(space, seed=seed, model=model, known=known)
"""

from __future__ import annotations

import math
import random
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from emmy.search.random_strategy import RandomStrategy
from emmy.search.space import Decision, Node, Point, Space, Trial, Value
from emmy.search.strategy import Ranker, Strategy
from emmy.search.walk import leaves

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Step:
    key: str
    choices: tuple[tuple[str, Value], ...]
    decision: Decision | None


class ToySpace:
    """Moves in any order ("p", "q"; sets, so paths meet), then a size for each and one more: up to a few hundred points.

    Sizes whose product is over the limit end in a decision without values. Times have one valley, at p = q = 8, size = 4;
    points without moves are slow, and those with size 2 fail.
    """

    feature_names = ("log2 p", "log2 q", "log2 size", "moves")

    def __init__(self, sizes: Sequence[int] = (1, 2, 4, 8, 16, 32), limit: int = 2048, listed: bool = True) -> None:
        self.name, self._sizes, self._limit, self._listed = "toy", tuple(sizes), limit, listed

    def root(self) -> Node:
        return self._at((), frozenset(), False)

    def child(self, node: Node, value: Value) -> Node:
        assert node.decision is not None and value in node.decision.values, "an illegal value was chosen"
        choices = (*node.choices, (node.decision.name, value))
        moves = frozenset(str(v) for n, v in choices if n.startswith("move") and v != "done")
        return self._at(choices, moves, ("move", "done") in {(n.split()[0], v) for n, v in choices})

    def _at(self, choices: tuple[tuple[str, Value], ...], moves: frozenset[str], closed: bool) -> _Step:
        sizes = {n: int(v) for n, v in choices if not n.startswith("move")}
        key = f"{'+'.join(sorted(moves))}{':' if closed else ''}{sizes or ''}"
        if not closed:
            left = tuple(sorted({"p", "q"} - moves))
            return _Step(key, choices, Decision(f"move {len(moves)}", (*left, "done"), ordered=False))
        for name in (*sorted(moves), "size"):
            if name not in sizes:
                return _Step(key, choices, Decision(name, self._sizes))
        dead = Decision("dead end", ()) if math.prod(sizes.values()) > self._limit else None
        return _Step(key, choices, dead)

    def point(self, leaf: Node) -> Point:
        assert leaf.decision is None
        return Point(leaf.key, leaf.choices)

    def domains(self) -> tuple[Decision, ...]:
        moves = (Decision(f"move {i}", ("p", "q", "done"), ordered=False) for i in range(3))
        return (*moves, *(Decision(n, self._sizes) for n in ("p", "q", "size")))

    def size(self, limit: int) -> int | None:
        count = len(list(self.points()))
        return count if self._listed and count <= limit else None

    def points(self) -> Iterator[Point]:
        return iter({p.key: p for p in leaves(self, random.Random(0))}.values())

    def sample(self, rng: random.Random) -> Point:
        return next(leaves(self, rng))

    def default(self) -> Point:
        return min(self.points(), key=lambda p: p.key)

    def features(self, points: Sequence[Point]) -> Floats:
        rows = []
        for p in points:
            at = p.as_dict()
            logs = [math.log2(float(at[n])) if n in at else math.nan for n in ("p", "q", "size")]
            rows.append([*logs, float(len(at.keys() & {"p", "q"}))])
        return np.array(rows, dtype=np.float64).reshape(-1, len(self.feature_names))

    # ------------------------------------------------------------ what becomes of points
    def log2_time(self, x: Floats) -> Floats:
        """From features [n, 4]; what `trial` measures, failures aside."""
        away = np.where(np.isfinite(x[:, :2]), np.abs(x[:, :2] - 3.0), 4.0).sum(axis=1)
        return np.asarray(5.0 + 0.4 * away + 0.5 * np.abs(x[:, 2] - 2.0))

    def trial(self, point: Point) -> Trial:
        failed = point.as_dict()["size"] == 2
        return Trial(point, None if failed else float(2.0 ** self.log2_time(self.features([point]))[0]))


class PerfectModel:
    """Predicts the toy space's times exactly."""

    def __init__(self, space: ToySpace) -> None:
        self._space = space

    def predict(self, x: Floats) -> tuple[Floats, Floats]:
        return self._space.log2_time(x), np.full(len(x), 0.1)


class StrategyContract:
    """Tests of one strategy. A subclass implements `make`."""

    learns: ClassVar[bool] = True  # does better than random on an easy space
    follows_model: ClassVar[bool] = False  # a perfect model leads it to the optimum

    @abstractmethod
    def make(
        self, space: Space, seed: int = 0, model: Ranker | None = None, known: Sequence[Trial] = ()
    ) -> Strategy: ...

    def run(self, strategy: Strategy, space: ToySpace, trials: int, batch: int) -> list[Trial]:
        """The trials of a run, in order."""
        done: list[Trial] = []
        while len(done) < trials and (points := strategy.ask(min(batch, trials - len(done)))):
            new = [space.trial(p) for p in points]
            strategy.tell(new)
            done += new
        return done

    def test_points_are_legal_and_never_come_twice(self) -> None:
        for listed in (True, False):
            space = ToySpace(listed=listed)
            legal = {p.key for p in space.points()}
            strategy = self.make(space)
            keys: list[str] = []
            for n in (1, 8, 3, 8, 8):
                points = strategy.ask(n)
                assert len(points) == n
                keys += [p.key for p in points]
                strategy.tell([space.trial(p) for p in points])
            assert len(set(keys)) == len(keys) and set(keys) <= legal

    def test_the_same_seed_and_trials_give_the_same_points(self) -> None:
        space = ToySpace(listed=False)
        first, second = (self.run(self.make(space, seed=3), space, 40, 8) for _ in range(2))
        assert first == second

    def test_seeds_differ(self) -> None:
        space = ToySpace()
        assert self.run(self.make(space, seed=1), space, 16, 8) != self.run(self.make(space, seed=2), space, 16, 8)

    def test_a_space_is_asked_to_its_last_point_and_then_the_list_is_empty(self) -> None:
        for listed in (True, False):
            space = ToySpace(sizes=(1, 2, 8), limit=100, listed=listed)
            everything = {p.key for p in space.points()}
            strategy = self.make(space)
            done = self.run(strategy, space, 10_000, 8)
            assert len(done) == len(everything) and {t.point.key for t in done} == everything
            assert strategy.ask(4) == []

    def test_known_points_are_not_asked(self) -> None:
        space = ToySpace(sizes=(1, 2, 8), limit=100)
        everything = list(space.points())
        known = [space.trial(p) for p in everything[::2]]
        done = self.run(self.make(space, known=known), space, 10_000, 8)
        assert {t.point.key for t in done} == {p.key for p in everything[1::2]}

    def test_told_points_that_were_not_asked_are_not_asked_later(self) -> None:
        space = ToySpace(sizes=(1, 2, 8), limit=100, listed=False)
        told = list(space.points())[::3]
        strategy = self.make(space)
        strategy.tell([space.trial(p) for p in told])
        asked = {t.point.key for t in self.run(strategy, space, 10_000, 8)}
        assert not asked & {p.key for p in told} and len(asked) == len(list(space.points())) - len(told)

    def test_a_batch_may_be_told_in_part_out_of_order_or_not_at_all(self) -> None:
        space = ToySpace()
        strategy = self.make(space)
        keys: list[str] = []
        for told in (slice(None), slice(4, None), slice(None, None, -1), slice(0, 0), slice(0, 2)):
            points = strategy.ask(8)
            keys += [p.key for p in points]
            strategy.tell([space.trial(p) for p in points[told]])
        assert len(set(keys)) == len(keys) == 40

    def test_a_space_where_everything_fails_is_searched_all_the_same(self) -> None:
        space = ToySpace()
        strategy = self.make(space)
        keys: set[str] = set()
        for _ in range(6):
            points = strategy.ask(8)
            keys |= {p.key for p in points}
            strategy.tell([Trial(p, None) for p in points])
        assert len(keys) == 48

    def test_equal_times_are_no_trouble(self) -> None:
        space = ToySpace()
        strategy = self.make(space)
        keys: set[str] = set()
        for _ in range(6):
            points = strategy.ask(8)
            keys |= {p.key for p in points}
            strategy.tell([Trial(p, 7.0) for p in points])
        assert len(keys) == 48

    def test_it_does_better_than_random_on_an_easy_space(self) -> None:
        if not self.learns:
            return
        space = ToySpace(listed=False)

        def best(strategies: Sequence[Strategy]) -> float:
            runs = [self.run(s, space, 40, 4) for s in strategies]
            return float(np.mean([min(math.log2(t.time_us) for t in run if t.time_us) for run in runs]))

        seeds = range(4)
        assert best([self.make(space, seed) for seed in seeds]) < best([RandomStrategy(space, seed=s) for s in seeds])

    def test_a_perfect_model_leads_to_the_optimum(self) -> None:
        if not self.follows_model:
            return
        for listed in (True, False):
            space = ToySpace(listed=listed)
            optimum = min(t.time_us for t in map(space.trial, space.points()) if t.time_us is not None)
            done = self.run(self.make(space, model=PerfectModel(space)), space, 32, 8)
            assert min(t.time_us for t in done if t.time_us is not None) == optimum
