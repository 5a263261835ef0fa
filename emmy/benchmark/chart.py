"""Pictures of results as SVG text, by hand: no package draws them and no network shows them. Computes no ratios."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import ceil, floor, log10

from emmy.benchmark.lanes import Lane
from emmy.benchmark.summary import CaseLanes, lanes_of, tier_order

COLOURS: dict[Lane, str] = {
    "eager": "#555", "compile": "#8195b5", "max-autotune": "#a78bc0", "emmy": "#d9472b", "emmy-hybrid": "#eda54a",
}  # fmt: skip
_A_ROW, _PITCH, _PLOT, _LABELS, _LEFT, _HEAD = 65, 24, 170, 150, 46, 44  # cases a row, then pixels
_MOST = 3.0  # times eager's speed: what is higher is cut off, and its number written
_ROOMY = 14.0
_LEGEND, _LEAST = 130, 520  # pixels of a lane in the legend, and at least of all, for the title
_UNSEEN = re.compile(r"\x1b\[[0-9;]*m|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\uffff]")


def chart_svg(cases: Sequence[CaseLanes], *, alone: bool = True) -> str:
    """Bars a case and lane: its speed over eager's, 1 = as fast. Cases by kind, then tier, the fastest first.

    alone: with the name space that a file by itself needs
    """
    shown = [lane for lane in lanes_of(cases) if lane != "eager"]
    drawn = sorted(
        (c for c in cases if _speeds(c, shown)),
        key=lambda c: (c.kind, tier_order(c.tier), -max(_speeds(c, shown).values())),
    )
    rows = [drawn[i : i + _A_ROW] for i in range(0, len(drawn), _A_ROW)]
    width = max(_LEFT + _PITCH * min(_A_ROW, max(1, len(drawn))) + 20, _LEAST, _LEFT + _LEGEND * len(shown))
    height = _HEAD + (_PLOT + _LABELS) * len(rows)
    body = [*_legend(shown)]
    for i, row in enumerate(rows):
        body += _row(row, shown, _HEAD + i * (_PLOT + _LABELS) + _ROOMY)
    return _svg(width, height, body, alone)


def _speeds(case: CaseLanes, lanes: Sequence[Lane]) -> dict[Lane, float]:
    """Times eager's speed of each lane that has a time; {} where eager has none."""
    ratios = ((lane, case.ratio(lane, "eager")) for lane in lanes)
    return {lane: r for lane, r in ratios if r is not None}


def _legend(lanes: Sequence[Lane]) -> Iterator[str]:
    yield _text(_LEFT, 16, "speed, times that of eager torch (the line at 1); cases by kind and tier", 13)
    for i, lane in enumerate(lanes):
        yield f'<rect x="{_LEFT + _LEGEND * i}" y="25" width="11" height="11" fill="{COLOURS[lane]}"/>'
        yield _text(_LEFT + _LEGEND * i + 16, 35, lane, 12)


def _row(cases: Sequence[CaseLanes], lanes: Sequence[Lane], top: float) -> Iterator[str]:
    bottom, right = top + _PLOT - 2 * _ROOMY, _LEFT + _PITCH * len(cases)

    def at(speed: float) -> float:
        return bottom - (bottom - top) * min(speed, _MOST) / _MOST

    for tick in (0, 0.5, 1, 1.5, 2, 2.5, 3):
        colour = COLOURS["eager"] if tick == 1 else "#e3e3e3"
        yield f'<line x1="{_LEFT}" x2="{right}" y1="{at(tick):.1f}" y2="{at(tick):.1f}" stroke="{colour}"/>'
        yield _text(_LEFT - 6, at(tick) + 4, f"{tick:g}", 10, "end")
    bar, kind, said, high = (_PITCH - 6) / max(1, len(lanes)), "", -100, False
    for i, case in enumerate(cases):
        x = _LEFT + _PITCH * i
        if case.kind != kind:
            kind = case.kind
            yield f'<line x1="{x}" x2="{x}" y1="{top - 8}" y2="{bottom + 4}" stroke="#999" stroke-dasharray="3 3"/>'
            high = x - said < 5 * _PITCH and not high  # above the label before, where that is near
            said = x
            yield _text(x + 3, top - (13 if high else 3), kind, 10)
        for lane, speed in _speeds(case, lanes).items():
            left = x + 3 + bar * lanes.index(lane)
            title = f"<title>{visible(case.case)}, {lane}: {speed:.3f} times eager, {case.time_us(lane):.4g} us</title>"
            yield (
                f'<rect x="{left:.1f}" y="{at(speed):.1f}" width="{bar - 0.5:.1f}" height="{bottom - at(speed):.1f}" '
                f'fill="{COLOURS[lane]}">{title}</rect>'
            )
            if speed > _MOST:
                yield f'<text x="{left:.1f}" y="{top + 9:.1f}" font-size="8" fill="#fff">{speed:.0f}</text>'
        y = bottom + 10
        yield (
            f'<text x="{x + _PITCH / 2:.1f}" y="{y:.1f}" font-size="9" text-anchor="end" '
            f'transform="rotate(-60 {x + _PITCH / 2:.1f} {y:.1f})">{visible(case.case)}</text>'
        )


def roofline_svg(cases: Sequence[CaseLanes], roofs: Mapping[str, float], dram_gbs: float) -> str:
    """A dot a case and lane: arithmetic a byte against the rate reached, under the card's roofs (TFLOP/s by name)."""
    dots = [
        (row.flops / row.bytes, row.flops / us / 1e6, lane, case)
        for case in cases
        for lane, row in case.lanes.items()
        if (us := row.time_us) and row.flops > 0 and row.bytes > 0
    ]
    if not dots:
        return ""
    width, height, left, bottom = 900, 480, 60, 430
    x0, x1 = floor(log10(min(d[0] for d in dots))), ceil(log10(max(max(d[0] for d in dots), 1e3)))
    y0 = floor(log10(min(d[1] for d in dots)))
    y1 = ceil(log10(max([*roofs.values(), *(d[1] for d in dots)])))

    def x(v: float) -> float:
        return left + (log10(v) - x0) / max(1, x1 - x0) * (width - left - 20)

    def y(v: float) -> float:
        return bottom - (log10(v) - y0) / max(1, y1 - y0) * (bottom - 20)

    body = []
    for e in range(x0, x1 + 1):
        body.append(f'<line x1="{x(10.0**e):.1f}" x2="{x(10.0**e):.1f}" y1="20" y2="{bottom}" stroke="#eee"/>')
        body.append(_text(x(10.0**e), bottom + 15, f"{10.0**e:g}", 11, "middle"))
    for e in range(y0, y1 + 1):
        body.append(f'<line x1="{left}" x2="{width - 20}" y1="{y(10.0**e):.1f}" y2="{y(10.0**e):.1f}" stroke="#eee"/>')
        body.append(_text(left - 6, y(10.0**e) + 4, f"{10.0**e:g}", 11, "end"))
    for name, peak in roofs.items():
        knee = min(max(peak * 1e3 / dram_gbs, 10.0**x0), 10.0**x1)
        slope = (10.0**x0, 10.0**x0 * dram_gbs / 1e3)
        points = [slope, (knee, knee * dram_gbs / 1e3), (10.0**x1, max(peak, knee * dram_gbs / 1e3))]
        path = " ".join(f"{x(a):.1f},{y(max(b, 10.0**y0)):.1f}" for a, b in points)
        body.append(f'<polyline points="{path}" fill="none" stroke="#333"/>')
        body.append(_text(width - 24, y(peak) - 4, f"{name} {peak:g} TFLOP/s", 11, "end"))
    for intensity, rate, lane, case in dots:
        title = f"<title>{visible(case.case)}, {lane}: {rate:.4g} TFLOP/s</title>"
        body.append(
            f'<circle cx="{x(intensity):.1f}" cy="{y(rate):.1f}" r="3" fill="{COLOURS[lane]}" fill-opacity=".6">{title}</circle>'
        )
    body.append(_text(width / 2, bottom + 36, f"flop a byte moved; memory {dram_gbs:g} GB/s", 12, "middle"))
    body.append(_text(left, 14, "TFLOP/s reached", 12))
    return _svg(width, height, body, alone=False)


def shares_svg(values: Mapping[str, Sequence[float]]) -> str:
    """For each name the cumulative share of cases against the regret in per cent: how many lie below each."""
    colours = ("#d9472b", "#3b6ea8", "#7a9a3b")
    width, height, left, bottom, most = 900, 300, 60, 250, 50.0
    body = []
    for tick in range(0, 51, 10):
        x = left + tick / most * (width - left - 20)
        body.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="20" y2="{bottom}" stroke="#eee"/>')
        body.append(_text(x, bottom + 15, f"{tick} %", 11, "middle"))
    for i, (name, found) in enumerate(values.items()):
        ordered = sorted(found)
        points = [(left + min(max(v, 0) * 100, most) / most * (width - left - 20), bottom - (n + 1) / len(ordered) * (bottom - 20))
                  for n, v in enumerate(ordered)]  # fmt: skip
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in [(left, bottom), *points])
        body.append(f'<polyline points="{path}" fill="none" stroke="{colours[i % 3]}" stroke-width="1.5"/>')
        y, colour = bottom - 14 - 16 * i, colours[i % 3]
        body.append(f'<circle cx="{width - 30}" cy="{y - 4}" r="4" fill="{colour}"/>')
        body.append(_text(width - 40, y, name, 12, "end"))
    body.append(_text(left, 14, "share of cases whose regret is at most", 12))
    body.append(_text(left - 6, bottom + 4, "0", 11, "end") + _text(left - 6, 24, "1", 11, "end"))
    return _svg(width, height, body, alone=False)


def _text(x: float, y: float, text: str, size: int, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="#222">{visible(text)}</text>'


def _svg(width: float, height: float, body: Sequence[str], alone: bool) -> str:
    space = ' xmlns="http://www.w3.org/2000/svg"' if alone else ""
    paper = f'<rect width="{width}" height="{height}" fill="#fff"/>' if alone else ""
    head = f'<svg{space} viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" font-family="sans-serif">'
    return head + paper + "\n".join(body) + "</svg>\n"


def visible(text: str) -> str:
    """A text as markup shows it. Compilers colour what they say, and no XML may hold the characters for that."""
    return escape(_UNSEEN.sub("", text))
