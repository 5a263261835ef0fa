"""What the lanes' times come to: ratios by kind and tier, the cases that lose, the worst. Renders nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

from emmy.benchmark.lanes import LANES, RIVALS, Lane
from emmy.benchmark.results import NONE, LaneRow, latest

BEHIND = 0.95  # a ratio below it is a case lost
OURS: tuple[Lane, ...] = ("emmy", "emmy-hybrid")
ALL = "all"


@dataclass(frozen=True, slots=True)
class CaseLanes:
    """One case: its lanes, of one heat."""

    case: str
    kind: str
    tier: str
    lanes: Mapping[Lane, LaneRow]

    def time_us(self, lane: Lane) -> float | None:
        return self.lanes[lane].time_us if lane in self.lanes else None

    def stands_for(self, rival: Lane) -> LaneRow | None:
        """The rival's row; of torch.compile where it compiles nothing, eager's: the same kernel runs."""
        row = self.lanes.get(rival)
        if rival == "compile" and row is not None and row.status == NONE:
            return self.lanes.get("eager")
        return row

    def ratio(self, lane: Lane, rival: Lane) -> float | None:
        """How many times faster the lane is than the rival, the median over rounds."""
        own, other = self.lanes.get(lane), self.stands_for(rival)
        return own.ratio(other) if own is not None and other is not None else None


@dataclass(frozen=True, slots=True)
class Group:
    """The cases of a kind, of a tier, or all: how a lane does against a rival there. mean: geometric, None of no case."""

    by: str
    name: str
    lane: Lane
    rival: Lane
    cases: int
    mean: float | None
    least: float | None
    greatest: float | None
    behind: int


def case_lanes(rows: Sequence[LaneRow]) -> tuple[CaseLanes, ...]:
    """The cases of results, each with its latest heat."""
    out = []
    for case, lanes in latest(rows).items():
        any_row = next(iter(lanes.values()))
        out.append(CaseLanes(case, any_row.kind, any_row.tier, lanes))
    return tuple(out)


def lanes_of(cases: Sequence[CaseLanes]) -> tuple[Lane, ...]:
    """The lanes that have a time in some case, in their order."""
    return tuple(lane for lane in LANES if any(c.time_us(lane) for c in cases))


def groups(cases: Sequence[CaseLanes]) -> list[Group]:
    """Emmy's lanes against each rival: over all cases, by kind and by tier."""
    keys: list[tuple[str, Callable[[CaseLanes], str]]] = [
        (ALL, lambda c: ALL),
        ("kind", lambda c: c.kind),
        ("tier", lambda c: c.tier),
    ]
    here = lanes_of(cases)
    pairs = [(lane, rival) for lane in OURS if lane in here for rival in RIVALS if rival in here]
    out = []
    for lane, rival in pairs:
        for by, key in keys:
            for name in sorted(set(map(key, cases)), key=tier_order if by == "tier" else None):
                ratios = [r for c in cases if key(c) == name and (r := c.ratio(lane, rival)) is not None]
                if ratios:
                    out.append(_group(by, name, lane, rival, ratios))
    return out


def tier_order(tier: str) -> tuple[int, str]:
    """Orders tiers by the number in them."""
    return int("".join(c for c in tier if c.isdigit()) or 0), tier


def _group(by: str, name: str, lane: Lane, rival: Lane, ratios: Sequence[float]) -> Group:
    behind = sum(r < BEHIND for r in ratios)
    return Group(by, name, lane, rival, len(ratios), geometric_mean(ratios), min(ratios), max(ratios), behind)


def geometric_mean(ratios: Sequence[float]) -> float | None:
    return exp(sum(map(log, ratios)) / len(ratios)) if ratios else None


def worst(cases: Sequence[CaseLanes], lane: Lane, rival: Lane, most: int = 10) -> list[tuple[CaseLanes, float]]:
    """The cases in which the lane does worst against the rival, with the ratio."""
    found = [(c, r) for c in cases if (r := c.ratio(lane, rival)) is not None]
    return sorted(found, key=lambda x: x[1])[:most]


def failures(cases: Sequence[CaseLanes]) -> list[LaneRow]:
    """Lanes that there should be and that gave no time."""
    return [r for c in cases for r in c.lanes.values() if r.status not in ("ok", NONE)]
