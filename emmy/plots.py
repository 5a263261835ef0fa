"""Pictures of what `emmy eval` found, as PNG files. Draws what it is given; computes nothing. matplotlib is optional."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from emmy.search.evaluate import SearchScore

_SIZE = (7.0, 4.5)  # inches


def best_so_far(rows: Sequence[SearchScore], folder: Path) -> list[Path]:
    """A picture a space: how near the optimum's speed each strategy is after so many evaluations, best first in the legend."""
    out = []
    for space in dict.fromkeys(r.space for r in rows):
        own = sorted((r for r in rows if r.space == space), key=lambda r: -r.score)
        figure, axes = _figure()
        for r in own:
            random = r.strategy == "random"
            label = f"{r.strategy} ({r.score:.2f})"
            axes.plot(
                range(1, len(r.speed) + 1),
                r.speed,
                label=label,
                color="black" if random else None,
                lw=2 if random else 1,
            )
        axes.set(
            xscale="log",
            xlabel="evaluations",
            ylabel="optimum / best time so far",
            title=f"{space}, {own[0].points} points",
        )
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="lower right", title="strategy (score)", title_fontsize=7)
        out.append(_saved(figure, folder / f"search-{_file_name(space)}.png"))
    return out


def _figure() -> tuple[object, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, layout="constrained")
    return figure, figure.subplots()


def _saved(figure: object, path: Path) -> Path:
    from matplotlib.figure import Figure

    assert isinstance(figure, Figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _file_name(text: str) -> str:
    """Of a space that may be a path."""
    return re.sub(r"[^\w.-]+", "_", Path(text).name.removesuffix(".gz").removesuffix(".json"))
