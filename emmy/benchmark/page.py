"""The report: one HTML page with pictures, tables and the winning sources, that asks nothing of any network. Computes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from emmy import __version__
from emmy.benchmark.chart import chart_svg, roofline_svg, shares_svg, visible
from emmy.benchmark.evidence import MOST_RANKED, Evidence
from emmy.benchmark.lanes import RIVALS, Lane
from emmy.benchmark.results import NONE, LaneRow
from emmy.benchmark.summary import BEHIND, OURS, CaseLanes, failures, geometric_mean, groups, lanes_of, worst
from emmy.records import STATUSES, source_mark

_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;color:#222;max-width:1650px;margin:24px auto;padding:0 20px}
h1{font-size:24px}h2{font-size:18px;margin-top:36px;border-bottom:1px solid #ddd}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:2px 10px;text-align:right;border-bottom:1px solid #eee;white-space:nowrap}
th{background:#f6f6f4;position:sticky;top:0}th.sort{cursor:pointer}
td.t,th.t{text-align:left}td.lost{color:#b3261e;font-weight:600}
.scroll{overflow:auto;max-height:760px}td code{white-space:nowrap}
pre{overflow:auto;max-height:560px;background:#f7f7f5;padding:10px;font-size:12px}
svg{max-width:100%;height:auto}.note{color:#666}code{font-size:12px;white-space:normal;overflow-wrap:anywhere}
details{margin:3px 0}summary{cursor:pointer}
"""
# Sorts a table's body by the column whose head is clicked, again to turn it round; empty cells last.
_SCRIPT = """
document.querySelectorAll('table.sorted').forEach(t=>t.querySelectorAll('th').forEach((h,i)=>{h.onclick=()=>{
const up=h.dataset.up!=='1';h.dataset.up=up?'1':'0';const b=t.tBodies[0],v=r=>r.cells[i].dataset.v??r.cells[i].textContent;
[...b.rows].sort((x,y)=>{const p=v(x),q=v(y),m=parseFloat(p),n=parseFloat(q);
if(p===''||q==='')return (p==='')-(q==='');
return (isNaN(m)||isNaN(n)?p.localeCompare(q):m-n)*(up?1:-1)}).forEach(r=>b.append(r))}}));
"""


def page(cases: Sequence[CaseLanes], known: Evidence) -> str:
    """The whole page."""
    parts = [
        f"<h1>Emmy beside torch: {len(cases)} cases</h1>",
        _about(cases),
        "<h2>Chart</h2>",
        chart_svg(cases, alone=False),
        "<h2>Geometric means</h2>",
        f"<p class=note>Ratios are the rival's time over Emmy's, the median over rounds of one heat; above 1 Emmy is faster. "
        f"Where torch.compile leaves an op to one kernel of eager's, eager's time stands for it. Behind: below {BEHIND}.</p>",
        _groups(cases),
        "<h2>The worst ten</h2>",
        *(_worst(cases, lane, rival) for lane, rival in _pairs(cases)),
        "<h2>Roofline</h2>",
        _roofline(cases, known),
        "<h2>Regret</h2>",
        _regret(cases, known),
        "<h2>Stored measurements by status</h2>",
        _statuses(known),
        _failures(cases),
        "<h2>Cases</h2><p class=note>A click on a head sorts.</p>",
        _cases(cases, known),
        "<h2>Sources</h2><p class=note>What ran in Emmy's lanes, as generated.</p>",
        *_sources(cases, known),
    ]
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Emmy beside torch</title><style>{_STYLE}</style></head>'
    return head + "<body>" + "\n".join(parts) + f"<script>{_SCRIPT}</script></body></html>\n"


def _about(cases: Sequence[CaseLanes]) -> str:
    rows = [r for c in cases for r in c.lanes.values()]
    if not rows:
        return "<p>There are no results.</p>"
    said = {
        "device": _distinct(f"{r.product} ({r.target})" for r in rows),
        "driver": _distinct(r.driver for r in rows),
        "toolkit": _distinct(r.toolkit for r in rows),
        "torch": _distinct(r.torch for r in rows),
        "Emmy": _distinct([*(r.emmy_version for r in rows), __version__]),
        "measured": f"{min(r.time_utc for r in rows)} to {max(r.time_utc for r in rows)}, in {len({r.heat for r in rows})} heats",
        "timing": _distinct(
            f"{r.rounds} rounds in turns, caches {r.cache}, clocks {r.clocks}" for r in rows if r.cache
        ),
        "disturbed": str(sum(r.contended for r in rows)) + " rows",
    }
    body = "".join(f"<tr><td class=t>{visible(k)}</td><td class=t>{visible(v)}</td></tr>" for k, v in said.items())
    return f"<table>{body}</table>"


def _distinct(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(t for t in texts if t))


def _pairs(cases: Sequence[CaseLanes]) -> list[tuple[Lane, Lane]]:
    here = lanes_of(cases)
    return [(lane, rival) for lane in OURS if lane in here for rival in RIVALS if rival in here]


def _groups(cases: Sequence[CaseLanes]) -> str:
    """A line a kind or tier, and for each pair of lanes the mean and how many are behind."""
    found, pairs = {(g.by, g.name, g.lane, g.rival): g for g in groups(cases)}, _pairs(cases)
    head = "".join(f"<th>{lane} / {rival}</th><th>behind</th>" for lane, rival in pairs)
    lines = []
    for by, name in dict.fromkeys((by, name) for by, name, _, _ in found):
        cells = []
        for lane, rival in pairs:
            g = found.get((by, name, lane, rival))
            cells.append(f"<td>{_number(g.mean)}</td><td>{g.behind} of {g.cases}</td>" if g else "<td></td><td></td>")
        lines.append(f"<tr><td class=t>{visible(by)}</td><td class=t>{visible(name)}</td>{''.join(cells)}</tr>")
    head = f"<thead><tr><th class=t>by</th><th class=t></th>{head}</tr></thead>"
    return f"<div class=scroll><table>{head}<tbody>{''.join(lines)}</tbody></table></div>"


def _worst(cases: Sequence[CaseLanes], lane: Lane, rival: Lane) -> str:
    lines = [
        f"<tr><td class=t>{visible(c.case)}</td><td class=t>{visible(c.kind)}</td><td class=t>{visible(c.tier)}</td>{_ratio(r)}"
        f"<td>{_number(c.time_us(lane))}</td><td class=t>{visible(c.lanes[lane].origin)}</td></tr>"
        for c, r in worst(cases, lane, rival)
    ]
    head = "<tr><th class=t>case</th><th class=t>kind</th><th class=t>tier</th><th>ratio</th><th>us</th><th class=t>schedule is</th></tr>"
    return f"<details><summary>{lane} against {rival}</summary><table>{head}{''.join(lines)}</table></details>"


def _roofline(cases: Sequence[CaseLanes], known: Evidence) -> str:
    if known.target is None or known.target.is_cpu:
        return "<p class=note>Drawn for GPUs, whose roofs a data sheet gives.</p>"
    roofs = {name: rate for name, rate in known.target.peak_tflops.items() if name in ("f16->f32", "f32")}
    return roofline_svg(cases, roofs, known.target.dram_gbs)


def _regret(cases: Sequence[CaseLanes], known: Evidence) -> str:
    """How much slower than the best stored of the op: the schedules used here, and the deployed model's first."""
    here = lanes_of(cases)
    values: dict[str, list[float]] = {}
    for lane in (lane for lane in OURS[:1] if lane in here):
        values[f"{lane}, as run here"] = [r for c in cases if (r := known.regret(c, lane)) is not None]
    if known.model_regret:
        values[f"the first of model {known.model}"] = list(known.model_regret.values())
    lines = "".join(
        f"<tr><td class=t>{visible(name)}</td><td>{len(v)}</td><td>{_percent(geometric_mean([1 / (1 + max(x, -0.5)) for x in v]))}</td>"
        f"<td>{_percent(1 / (1 + max(v)))}</td></tr>"
        for name, v in values.items()
        if v
    )
    note = (
        "The best stored time is another sitting's, mostly while screening, so that what runs here may be a little faster or slower. "
        f"The model orders up to {MOST_RANKED} stored schedules of an op, which it has learned from: <code>emmy eval costmodel</code> "
        "judges it on problems held out."
    )
    table = f"<table><tr><th class=t>schedules</th><th>cases</th><th>of the best known, mean</th><th>worst</th></tr>{lines}</table>"
    return f"<p class=note>{note}</p>{table}{shares_svg({k: v for k, v in values.items() if v})}"


def _statuses(known: Evidence) -> str:
    head = "".join(f"<th>{s}</th>" for s in STATUSES)
    lines = ""
    for kind, of in sorted(known.statuses.items()):
        counts = "".join(f"<td>{of[s]}</td>" if s in of else "<td></td>" for s in STATUSES)
        lines += f"<tr><td class=t>{visible(kind)}</td>{counts}</tr>"
    return f"<table><tr><th class=t>kind of op</th>{head}</tr>{lines}</table>"


def _failures(cases: Sequence[CaseLanes]) -> str:
    found = failures(cases)
    lines = "".join(
        f"<li>{visible(r.case)}, {visible(r.lane)}: {visible(r.status)}: {visible(r.message)}</li>" for r in found
    )
    return f"<p>{len(found)} lanes of these cases gave no time.</p><ul>{lines}</ul>"


def _cases(cases: Sequence[CaseLanes], known: Evidence) -> str:
    here, pairs = lanes_of(cases), _pairs(cases)
    words = ["case", "kind", "tier", "op"]
    numbers = [*(f"{x} us" for x in here), *(f"{a} / {b}" for a, b in pairs), "of roofline", "error", "regret"]
    head = "".join(f"<th class='t sort'>{w}</th>" for w in words) + "".join(f"<th class=sort>{w}</th>" for w in numbers)
    lines = []
    for c in cases:
        own = c.lanes.get("emmy") or c.lanes.get("emmy-hybrid")
        op = next(iter(c.lanes.values())).op
        cells = [
            f"<td class=t>{_case_link(c, own, known)}</td>",
            *(f"<td class=t>{visible(x)}</td>" for x in (c.kind, c.tier)),
        ]
        cells.append(f"<td class=t><code>{visible(op)}</code></td>")
        cells += [f"<td title='{_why(c.lanes.get(lane))}'>{_number(c.time_us(lane))}</td>" for lane in here]
        cells += [_ratio(c.ratio(lane, rival)) for lane, rival in pairs]
        share = own.roof_us / own.time_us if own and own.time_us else None
        cells += [
            f"<td data-v='{share or ''}'>{_percent(share)}</td>",
            f"<td>{_number(own.error_norm if own else None)}</td>",
        ]
        regret = known.regret(c, "emmy")
        cells.append(f"<td data-v='{'' if regret is None else regret}'>{_percent(regret)}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<div class=scroll><table class=sorted><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"


def _why(row: LaneRow | None) -> str:
    return visible(row.message) if row is not None and row.status in (NONE, "ok") else ""


def _case_link(c: CaseLanes, own: LaneRow | None, known: Evidence) -> str:
    digest = known.sources.get((own.op, own.schedule)) if own else None
    return f'<a href="#{digest}">{visible(c.case)}</a>' if digest else visible(c.case)


def _sources(cases: Sequence[CaseLanes], known: Evidence) -> Iterable[str]:
    """Each text once, under the cases that it ran for."""
    of: dict[str, list[tuple[CaseLanes, LaneRow]]] = {}
    for c in cases:
        for lane in OURS:
            row = c.lanes.get(lane)
            if row is not None and (digest := known.sources.get((row.op, row.schedule))):
                of.setdefault(digest, []).append((c, row))
    for digest, users in of.items():
        names = ", ".join(f"{c.case} ({r.lane})" for c, r in users)
        stale = (
            ""
            if all(source_mark(r.source_digest) == source_mark(digest) for _, r in users)
            else " <b>This Emmy generates another text than the one measured.</b>"
        )
        schedules = "<br>".join(f"<code>{visible(s)}</code>" for s in dict.fromkeys(r.schedule for _, r in users))
        yield (
            f'<details id="{digest}"><summary>{visible(names)}</summary><p>{schedules}{stale}</p>'
            f"<pre>{visible(known.texts[digest])}</pre></details>"
        )


def _ratio(ratio: float | None) -> str:
    lost = " class=lost" if ratio is not None and ratio < BEHIND else ""
    return f"<td{lost}>{'' if ratio is None else f'{ratio:.3f}'}</td>"


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.4g}" if x < 10_000 else f"{x:.0f}"


def _percent(x: float | None) -> str:
    return "" if x is None else f"{100 * x:.1f} %"
