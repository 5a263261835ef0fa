"""What rows of an experiment come to: each lane beside stock of its own dtype, wave by wave. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from emmy.serving.results import Row

# figure -> whether more is better
ONLINE = {"ttft_p50_ms": False, "tpot_p50_ms": False, "output_tokens_per_s": True}
OFFLINE = {"ms": False}


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times better than stock: above 1 the lane is better. low..high: the spread over waves, or rounds offline."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        spread = f" ({self.low:.3f}..{self.high:.3f})" if self.low != self.high else ""
        return f"{self.median:.3f}{spread}"


@dataclass(frozen=True, slots=True)
class Entry:
    """A lane at a point: figures are medians over waves, ratios by figure of what was measured in one wave."""

    kind: str
    point: str
    note: str
    lane: str
    against: str
    waves: int
    figures: dict[str, float]
    ratios: dict[str, Ratio]


def entries(rows: Sequence[Row]) -> tuple[Entry, ...]:
    """Every lane at every point that has a figure, in the order they were first measured.

    Of a wave measured twice the last counts, and of a lane at a point only rows with the key of its last: not those of another pack.
    """
    rows = [r for r in rows if r.status == "ok"]
    keys = {(r.kind, r.point, r.note, r.lane): r.key for r in rows}
    latest = {
        (r.kind, r.point, r.note, r.lane, r.wave): r for r in rows if r.key == keys[r.kind, r.point, r.note, r.lane]
    }
    grouped: dict[tuple[str, str, str, str], list[Row]] = {}
    for (kind, point, note, lane, _), row in latest.items():
        grouped.setdefault((kind, point, note, lane), []).append(row)
    found = [_entry(of, latest) for of in grouped.values()]
    places = list(dict.fromkeys((e.kind, e.point, e.note) for e in found))
    return tuple(sorted(found, key=lambda e: places.index((e.kind, e.point, e.note))))


def _entry(of: Sequence[Row], latest: dict[tuple[str, str, str, str, int], Row]) -> Entry:
    first = of[-1]
    names = dict.fromkeys(n for r in of for n in r.figures)
    pairs = [
        (r, stock) for r in of if (stock := latest.get((r.kind, r.point, r.note, r.against, r.wave))) and r.against
    ]
    wanted = ONLINE if first.kind == "online" else OFFLINE
    ratios = {n: ratio for n, more in wanted.items() if (ratio := _ratio(pairs, n, more))}
    figures = {n: median([r.figures[n] for r in of if n in r.figures]) for n in names}
    return Entry(first.kind, first.point, first.note, first.lane, first.against, len(of), figures, ratios)


def _ratio(pairs: Sequence[tuple[Row, Row]], name: str, more_is_better: bool) -> Ratio | None:
    values = [v for row, stock in pairs for v in _ratios(row, stock, name, more_is_better)]
    return Ratio(median(values), min(values), max(values)) if values else None


def _ratios(row: Row, stock: Row, name: str, more_is_better: bool) -> Iterator[float]:
    """Of rows with samples one a round, in which the two took turns; else one of their figures. A time of a token is a difference
    of two, which noise may turn below 0: it says nothing."""
    if row.samples and len(row.samples) == len(stock.samples):
        yield from (s / r for r, s in zip(row.samples, stock.samples, strict=True) if r > 0 and s > 0)
    elif (ours := row.figures.get(name, 0.0)) > 0 and (theirs := stock.figures.get(name, 0.0)) > 0:
        yield ours / theirs if more_is_better else theirs / ours
