"""Ranges of a size that is known at run time: where a search begins, and the shortest table that the times found allow.

Each range is an op of its own, timed at its upper end. What is known is, for some ranges, the cost of some schedules; from that
alone follow the table, and the schedules that are worth racing in a neighbour's range. Measures nothing, stores nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import log2

from emmy.ir.dispatch import Dispatch, Range
from emmy.ir.ops import Op
from emmy.ir.parts import Span, symbol_of
from emmy.records import Measurement
from emmy.search.budget import Budget
from emmy.search.predictions import Prediction

TILE = 8  # the least step of an atom along the size; a single row is a kernel of its own
TIE = 0.01  # a smaller difference claims nothing
LEAST_TRIALS = 8  # of a range: a batch, which has room for the default, neighbours' winners and picks of the model
MOST = 0.05  # however wide the spread on a busy machine: a schedule slower by more does not serve for another


@dataclass(frozen=True, slots=True)
class Cost:
    """What a schedule costs at the upper end of a range, in any unit that the range's schedules share; low..high is its spread."""

    value: float
    low: float
    high: float

    def ties(self, best: Cost) -> bool:
        """Whether it is as good as the best one: within TIE, or within the spread of both and MOST."""
        return self.value <= best.value * (1 + (MOST if self.low <= best.high else TIE))


def starting_ranges(op: Op) -> tuple[Op, ...]:
    """The ranges to tune first, ascending: one row by itself, then up to each power of two from TILE on. The op itself if one."""
    s = symbol_of(op)
    if s is None:
        return (op,)
    ends = [1] if s.lo == 1 else []
    end = TILE
    while end < s.hi:
        ends += [end] if end >= s.lo else []
        end *= 2
    ends.append(s.hi)
    begins = [s.lo, *(e + 1 for e in ends[:-1])]
    return tuple(op.within(s.name, lo, hi) for lo, hi in zip(begins, ends, strict=True))


def share(budget: Budget, n: int) -> Budget:
    """What each of n ranges gets of a budget, LEAST_TRIALS or more; patience is each range's own."""
    if n == 1:
        return budget
    trials = None if budget.trials is None else max(LEAST_TRIALS, budget.trials // n)
    return replace(budget, trials=trials, seconds=None if budget.seconds is None else budget.seconds / n)


@dataclass(frozen=True, slots=True)
class RangeWinner:
    """A range of a table, and why it holds the schedule that it holds: measured, or predicted of a card that is not here."""

    symbol: str
    range: Range
    op: str  # of the range
    row: Measurement | None = None
    predicted: Prediction | None = None

    @property
    def time_us(self) -> float | None:
        """At the upper end of the range, measured or predicted."""
        return self.row.time_us if self.row else self.predicted.predicted_us if self.predicted else None


def dispatch_of(ranges: Sequence[RangeWinner]) -> Dispatch | None:
    """The table of these ranges, ascending; None for none."""
    if not ranges:
        return None
    return Dispatch(ranges[0].symbol, tuple(w.range for w in ranges))


@dataclass(frozen=True, slots=True)
class Challenge:
    """Schedules to be raced as the op of the sizes lo..hi, the one that is best there so far included."""

    lo: int
    hi: int
    schedules: tuple[str, ...]


@dataclass(frozen=True)
class Known:
    """Costs by range and schedule; `failed`: schedules that gave no right answer in a range."""

    lo: int
    hi: int
    costs: Mapping[Span, Mapping[str, Cost]]
    failed: frozenset[tuple[Span, str]] = field(default=frozenset())

    # ------------------------------------------------------------ the pieces between all ends
    @cached_property
    def pieces(self) -> tuple[Span, ...]:
        """The sizes cut at both ends of every range. A single size cuts nothing: it fills a piece where others leave one."""
        cuts = {self.lo, self.hi + 1}
        for lo, hi in (span for span in self.costs if span[0] < span[1]):
            cuts |= {c for c in (lo, hi + 1) if self.lo <= c <= self.hi}
        ordered = sorted(cuts)
        return tuple((a, b - 1) for a, b in pairwise(ordered))

    @cached_property
    def _at(self) -> tuple[dict[str, Cost], ...]:
        """Of each piece, the costs of schedules that serve all of it, timed at its upper end."""
        out = []
        for lo, hi in self.pieces:
            found: dict[str, Cost] = {}
            for (a, b), costs in self.costs.items():
                if a <= lo and b == hi:
                    for schedule, cost in self._right((a, b), costs).items():
                        if schedule not in found or cost.value < found[schedule].value:
                            found[schedule] = cost
            out.append(found)
        return tuple(out)

    def _right(self, span: Span, costs: Mapping[str, Cost]) -> dict[str, Cost]:
        return {s: c for s, c in costs.items() if (span, s) not in self.failed}

    @cached_property
    def _good(self) -> tuple[dict[str, float], ...]:
        """Of each piece, the schedules that tie with its best one; of one without times, those of the nearest range around."""
        out: list[dict[str, float]] = []
        for (lo, hi), found in zip(self.pieces, self._at, strict=True):
            if not found:
                wider = (
                    (b - a, self._right((a, b), costs)) for (a, b), costs in self.costs.items() if a <= lo and hi <= b
                )
                found = min(((size, right) for size, right in wider if right), key=lambda x: x[0], default=(0, found))[
                    1
                ]
            best = min(found.values(), key=lambda c: c.value, default=None)
            ties = {s: c for s, c in found.items() if best is not None and c.ties(best)}
            out.append({s: log2(c.value) for s, c in ties.items()})
        return tuple(out)

    # ------------------------------------------------------------ the table
    @cached_property
    def ranges(self) -> tuple[Range, ...]:
        """The shortest table in which no range is slower than a tie with its best; () while some size is served by nothing.

        A schedule that serves a run of pieces serves each part of it, so that taking the longest run each time gives the fewest.
        """
        out, i = [], 0
        while i < len(self.pieces):
            alive, j = self._serving(i, i, self._good[i]) or self._good[i], i
            if not alive:
                return ()
            while j + 1 < len(self.pieces) and (longer := self._serving(i, j + 1, alive)):
                alive, j = longer, j + 1
            out.append(Range(self.pieces[i][0], self.pieces[j][1], min(alive, key=lambda s: (alive[s], s))))
            i = j + 1
        return tuple(out)

    def _serving(self, first: int, last: int, schedules: Mapping[str, float]) -> dict[str, float]:
        """Those of the schedules that are good in the last piece too, and not known to fail from the first to it."""
        span, good = (self.pieces[first][0], self.pieces[last][1]), self._good[last]
        added = good if last > first else dict.fromkeys(good, 0.0)
        return {s: x + added[s] for s, x in schedules.items() if s in added and (span, s) not in self.failed}

    # ------------------------------------------------------------ what would make it better
    def challenges(self) -> tuple[Challenge, ...]:
        """Races that may shorten the table: of two neighbours each in the other's nearest piece; then, those all held,
        both in the lower half of the piece above, which may move their boundary.
        """
        neighbours = list(pairwise(self.ranges))
        asked: dict[Span, dict[str, None]] = {}
        for below, above in neighbours:
            asked.setdefault(self._ending(below.hi), {})[above.schedule] = None
            asked.setdefault(self._beginning(above.lo), {})[below.schedule] = None
        return self._open(asked) or self._open(dict(self._halves(neighbours)))

    def _halves(self, neighbours: Sequence[tuple[Range, Range]]) -> Iterator[tuple[Span, dict[str, None]]]:
        for below, above in neighbours:
            lo, hi = self._beginning(above.lo)
            middle = -(-(lo + (hi - lo) // 2) // TILE) * TILE
            timed_at_the_top = below.schedule in self._at[bisect_left(self.pieces, (lo, hi))]
            if lo < middle < hi and hi == 2 * (lo - 1) and timed_at_the_top:
                yield (lo, middle), {below.schedule: None, above.schedule: None}

    def _open(self, asked: Mapping[Span, Mapping[str, None]]) -> tuple[Challenge, ...]:
        out = []
        for span, schedules in asked.items():
            known = self._at[self.pieces.index(span)] if span in self.pieces else {}
            new = [s for s in schedules if s not in known and (span, s) not in self.failed]
            if new:
                best = [min(known, key=lambda s: known[s].value)] if known else []
                out.append(Challenge(*span, (*best, *new)))
        return tuple(out)

    def _ending(self, hi: int) -> Span:
        return next(p for p in self.pieces if p[1] == hi)

    def _beginning(self, lo: int) -> Span:
        return next(p for p in self.pieces if p[0] == lo)
