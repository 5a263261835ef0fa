"""The report of an experiment, as cells of a table and as a page of Markdown. Computes no ratios and measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from emmy.serving.compare import Entry
from emmy.serving.results import Results

REPORT = "report.md"
HEADINGS = {
    "point": "point", "note": "note", "lane": "lane", "waves": "waves", "ms": "ms", "kernels_a_step": "launches/step",
    "ttft_p50_ms": "TTFT p50 ms", "ttft_p90_ms": "p90", "ttft_p99_ms": "p99", "tpot_p50_ms": "TPOT p50 ms", "tpot_p90_ms": "p90",
    "tpot_p99_ms": "p99", "itl_p50_ms": "ITL p50 ms", "itl_p99_ms": "p99", "output_tokens_per_s": "output tok/s", "against": "against",
    "ratio_ms": "times as fast", "ratio_ttft_p50_ms": "TTFT times better", "ratio_tpot_p50_ms": "TPOT times better",
    "ratio_output_tokens_per_s": "tok/s times", "positions": "positions", "max_abs": "largest difference", "mean_abs": "mean",
    "kl_mean": "KL mean, nats", "kl_max": "most", "top1": "same top-1", "same_sequences": "same sequences",
}  # fmt: skip
KINDS = {"online": "Through a server", "offline": "In process", "quality": "Logits beside stock's"}
_ABOUT = (
    "device",
    "vllm",
    "torch",
    "emmy",
    "pack",
    "deterministic",
    "EMMY_FAST_MATH",
    "startup_s",
    "import_s",
    "init_s",
    "choices",
)


def cells(e: Entry) -> dict[str, object]:
    """An entry as a flat record; ratios as texts, above 1 better than stock."""
    ratios = {f"ratio_{name}": str(r) for name, r in e.ratios.items()}
    figures = {k: f"{v:.3g}" for k, v in e.figures.items()} if e.kind == "quality" else e.figures
    return {
        "kind": e.kind, "point": e.point, "note": e.note, "lane": e.lane, "against": e.against, "waves": e.waves, **figures, **ratios,
    }  # fmt: skip


def headings(rows: Sequence[Mapping[str, object]]) -> dict[str, str]:
    """Of the columns those that some row fills, key -> heading."""
    return {k: h for k, h in HEADINGS.items() if any(r.get(k) not in (None, "") for r in rows)}


def page(results: Results, found: Sequence[Entry]) -> str:
    """Tables by kind, what each lane was measured with, and what failed."""
    parts = [f"# {results.rows[-1].experiment}: vLLM with a kernel pack and without\n"]
    for kind, title in KINDS.items():
        rows = [cells(e) for e in found if e.kind == kind]
        if rows:
            shown = headings(rows)
            parts.append(
                f"## {title}\n\n{_markdown(tuple(shown.values()), [[_cell(r.get(k)) for k in shown] for r in rows])}\n"
            )
    parts.append(
        "Figures are medians over waves; p50, p90 and p99 are of the requests of one wave. A ratio above 1 is better than stock of the "
        "same dtype; its range is that of the waves, or offline of the rounds, in which the lanes took turns.\n"
    )
    parts.append(f"## Measured with\n\n{_lanes(results)}\n")
    if failed := [r for r in results.rows if r.status != "ok" and not results.has(r.key, r.wave)]:
        listed = "\n".join(f"* {r.lane}, {r.point}, wave {r.wave}:\n\n```\n{r.message}\n```" for r in failed)
        parts.append(f"## Failed\n\n{listed}\n")
    return "\n".join(parts)


def _lanes(results: Results) -> str:
    """The circumstances of each lane's last row."""
    latest = {(r.lane, r.kind): r for r in results.rows if r.status == "ok"}
    rows = []
    for (lane, kind), r in latest.items():
        about = "; ".join(f"{k} {_said(r.about[k])}" for k in _ABOUT if r.about.get(k) not in (None, "", []))
        rows.append([lane, kind, r.dtype, about])
    return _markdown(("lane", "how", "dtype", "circumstances"), rows) if rows else "nothing yet"


def _said(value: object) -> str:
    return (
        ", ".join(map(str, value))
        if isinstance(value, list)
        else f"{value:.1f}"
        if isinstance(value, float)
        else str(value)
    )


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}" if value >= 100 else f"{value:.2f}" if value >= 0.1 else f"{value:.3g}"
    return "" if value is None else str(value)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    body = "\n".join(f"| {' | '.join(c.replace('|', '/') for c in row)} |" for row in rows)
    return f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n{body}"
