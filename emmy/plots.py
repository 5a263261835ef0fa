"""Pictures of what `emmy eval` found, as PNG files. Draws what it is given; computes nothing. matplotlib is optional."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from emmy.costmodel.exam import CurvePoint, Exam
    from emmy.search.evaluate import SearchScore, Standing

_SIZE = (9.0, 4.5)  # inches
_STYLES = ("-", "--", ":")  # colours repeat after ten


def need_matplotlib() -> None:
    """Raises ModuleNotFoundError where it is missing: before the work whose pictures are wanted, not after it."""
    import matplotlib.figure  # noqa: F401


def best_so_far(rows: Sequence[SearchScore], means: Sequence[Standing], folder: Path) -> list[Path]:
    """A picture a space, and one of the means where there are several: how near the optimum's speed each strategy is after so
    many evaluations, best first in the legend."""
    out = []
    for space in dict.fromkeys(r.space for r in rows):
        own = [r for r in rows if r.space == space]
        out.append(_curves(f"{space}, {own[0].points} points", own, folder / f"search-{_file_name(space)}.png"))
    if len(out) > 1:
        out.append(_curves(f"mean of {len(out)} spaces", means, folder / "search-mean.png"))
    return out


def _curves(title: str, rows: Sequence[SearchScore | Standing], path: Path) -> Path:
    figure = _figure()
    axes = figure.subplots()
    for i, r in enumerate(sorted(rows, key=lambda r: -r.score)):
        random = r.strategy == "random"
        style = {"color": "black", "lw": 2.0} if random else {"lw": 1.0, "ls": _STYLES[i // 10 % len(_STYLES)]}
        axes.plot(range(1, len(r.speed) + 1), r.speed, label=f"{r.strategy} ({r.score:.2f})", **style)
    axes.set(xscale="log", xlabel="evaluations", ylabel="optimum / best time so far", title=title)
    axes.grid(alpha=0.3)
    figure.legend(fontsize=7, loc="outside right upper", title="strategy (score)", title_fontsize=7)
    return _saved(figure, path)


def calibration(name: str, exam: Exam, folder: Path) -> Path:
    """Measured against predicted times of held-out samples, and how often intervals hold what they should."""
    figure = _figure((10.0, 4.5))
    left, right = figure.subplots(1, 2)
    both = [*exam.predicted, *exam.measured]
    low, high = min(both), max(both)
    left.hexbin(exam.predicted, exam.measured, gridsize=60, bins="log", mincnt=1, cmap="viridis")
    left.plot([low, high], [low, high], color="black", lw=0.8)
    left.set(
        xlabel="predicted, log2 us", ylabel="measured, log2 us", title=f"{name}: {len(exam.measured)} held-out samples"
    )
    levels = [c.level for c in exam.coverage]
    right.plot([0, 1], [0, 1], color="black", lw=0.8, label="calibrated")
    right.plot(levels, [c.time for c in exam.coverage], "o-", label="times")
    right.plot(levels, [c.ratio for c in exam.coverage], "s-", label="ratios within a problem")
    right.set(xlabel="interval said to hold", ylabel="held", xlim=(0, 1), ylim=(0, 1), title="coverage")
    right.grid(alpha=0.3)
    right.legend()
    return _saved(figure, folder / f"calibration-{_file_name(name)}.png")


def learning_curve(name: str, points: Sequence[CurvePoint], folder: Path) -> Path:
    """Top-1 and top-10 regret against the share of the card's rows, with donors and without; the best of what needs no model."""
    from matplotlib.ticker import PercentFormatter

    figure = _figure((10.0, 4.5))
    for axes, field in zip(figure.subplots(1, 2), ("top1", "top10"), strict=True):
        for ranker in ("model", "nearest", "fixed", "random"):
            for helped in (False, True):
                own = sorted(
                    (p.share, getattr(p, field)) for p in points if p.ranker == ranker and bool(p.donors) == helped
                )
                if own and (ranker == "model" or not helped):
                    label = ranker + (" and donors" if helped else "")
                    axes.plot(*zip(*own, strict=True), "s--" if helped else "o-", label=label)
        axes.set(
            xlabel="share of the card's rows", ylabel=f"{field.replace('top', 'top-')} regret", yscale="log", title=name
        )
        for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            ticks(PercentFormatter(xmax=1))
        axes.xaxis.set_major_formatter(PercentFormatter(xmax=1))
        axes.grid(alpha=0.3, which="both")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return _saved(figure, folder / f"curve-{_file_name(name)}.png")


def _figure(size: tuple[float, float] = _SIZE) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained")


def _saved(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _file_name(text: str) -> str:
    """Of a space that may be a path."""
    return re.sub(r"[^\w.-]+", "_", Path(text).name.removesuffix(".gz").removesuffix(".json"))
