"""Points whose times teach a cost model: what `emmy tune --collect` measures. It looks for no winner.

Four reasons to measure a point share the proposals, always the one that is furthest behind its share:

    near       one or two decisions away from the fastest points known: there a model must tell good from best
    elsewhere  winners of other cards, then their neighbours: what carries over and what does not
    spread     points on which the model's members disagree, of those it predicts to be in the faster half
    random     random points, so that a model knows what is bad, and no region goes unseen

A reason that has nothing to offer (no model, no other card, nothing timed yet) leaves its share to the others. Points of `spread`
and `random` are taken in turns from each form, that is, from each choice of moves, those seen least first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from emmy.search.space import Point, Space, Trial
from emmy.search.strategy import Ranker, Strategy
from emmy.search.walk import descend, varied

SHARES: Mapping[str, float] = {"near": 0.35, "elsewhere": 0.2, "spread": 0.3, "random": 0.15}
MARK = "collect_"  # a row's `static` has MARK + reason

_ELITE = 6  # points whose neighbours are near
_NEIGHBOURS = 12  # tries to find a new one
_FORMS = 8  # random points, or the most doubtful, of which that of the rarest form is taken
_FIRST, _FRESH, _MOST = 48, 6, 512  # candidates of `spread`: at first, for each proposal, at most

Form = tuple[str, ...]


class CollectStrategy(Strategy):
    """Deals proposals to the reasons above. `elsewhere`: winners of other cards, as points of this space."""

    name: ClassVar[str] = "collect"

    def __init__(
        self,
        space: Space,
        *,
        seed: int = 0,
        model: Ranker | None = None,
        known: Sequence[Trial] = (),
        elsewhere: Sequence[Point] = (),
    ) -> None:
        super().__init__(space, seed=seed, model=model, known=known)
        self._elsewhere = {p.key: p for p in elsewhere}
        self._times: dict[str, tuple[float, Point]] = {}
        self._dealt: Counter[str] = Counter()
        self._reason: dict[str, str] = {}
        self._forms: Counter[Form] = Counter()
        self._doubts: dict[str, tuple[float, float, Point]] = {}  # (log2 of the predicted time, spread) of candidates

    def marks(self, key: str) -> Mapping[str, float]:
        reason = self._reason.get(key)
        return {MARK + reason: 1.0} if reason else {}

    def propose(self, n: int) -> Iterable[Point]:
        for _ in range(n):
            for reason in sorted(SHARES, key=self._behind, reverse=True):
                point = self._offer(reason)
                if point is not None and point.key not in self.seen:
                    break
            else:
                return
            self._dealt[reason] += 1
            self._reason[point.key] = reason
            self._forms[_form(point)] += 1
            yield point

    def learn(self, trials: Sequence[Trial]) -> None:
        for t in trials:
            if t.time_us is not None:
                self._times[t.point.key] = (t.time_us, t.point)

    def _another(self) -> Point | None:
        point = super()._another()
        if point is not None:
            self._dealt["random"] += 1
            self._reason[point.key] = "random"
        return point

    # ------------------------------------------------------------ reasons
    def _behind(self, reason: str) -> float:
        """How many proposals the reason lacks to its share, were one more made."""
        return SHARES[reason] * (self._dealt.total() + 1) - self._dealt[reason]

    def _offer(self, reason: str) -> Point | None:
        match reason:
            case "near":
                fastest = sorted(self._times.values(), key=lambda x: (x[0], x[1].key))[:_ELITE]
                return self._neighbour([p for _, p in fastest])
            case "elsewhere":
                whole = next((p for k, p in self._elsewhere.items() if k not in self.seen), None)
                return whole or self._neighbour(list(self._elsewhere.values()))
            case "spread":
                return self._doubtful()
            case _:
                return self._rarest(
                    [p for _ in range(_FORMS) if (p := self.space.sample(self.rng)).key not in self.seen]
                )

    def _neighbour(self, of: Sequence[Point]) -> Point | None:
        for i in range(_NEIGHBOURS if of else 0):
            point = descend(self.space, varied(self.rng.choice(of), self.rng, 1 + i % 2, 0.3))
            if point is not None and point.key not in self.seen:
                return point
        return None

    def _doubtful(self) -> Point | None:
        """Of the candidates of most doubt among the faster half, as predicted, one of the rarest form."""
        if self.model is None:
            return None
        wanted = _FRESH if self._doubts else _FIRST
        new = {p.key: p for p in (self.space.sample(self.rng) for _ in range(wanted)) if p.key not in self._doubts}
        if new:
            log2_us, spread = self.model.predict(self.space.features(list(new.values())))
            for point, time, doubt in zip(new.values(), log2_us, spread, strict=True):
                self._doubts[point.key] = (float(time), float(doubt), point)
        self._doubts = {k: v for k, v in self._doubts.items() if k not in self.seen}
        ranked = sorted(self._doubts.values(), key=lambda x: (x[0], x[2].key))
        if len(ranked) > _MOST:
            ranked = ranked[: _MOST // 2]
            self._doubts = {p.key: (t, d, p) for t, d, p in ranked}
        hopeful = ranked[: (len(ranked) + 1) // 2]
        doubtful = sorted(hopeful, key=lambda x: (-x[1], x[2].key))[:_FORMS]
        return self._rarest([p for _, _, p in doubtful])

    def _rarest(self, points: Sequence[Point]) -> Point | None:
        """The first of those of the form that was proposed least."""
        return min(points, key=lambda p: self._forms[_form(p)], default=None)


def _form(point: Point) -> Form:
    """What was chosen that is no number: the moves."""
    return tuple(sorted(v for _, v in point.choices if isinstance(v, str)))


def reasons(static: Mapping[str, float]) -> str:
    """Why a row was measured, from its `static`; "opening" for the default and the winners a run begins with."""
    return next((name.removeprefix(MARK) for name in static if name.startswith(MARK)), "opening")
