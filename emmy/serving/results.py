"""What is kept of an experiment: a line a measurement, on disk before the next begins. Computes no ratios."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from emmy.codegen.files import appearing, append_lines, whole_lines
from emmy.errors import DataError
from emmy.typed import Mistyped, read_as

VERSION = 1
LINES = "serving.jsonl"


@dataclass(frozen=True, slots=True)
class Row:
    """One lane at one point in one wave.

    key:     of all that decides what is measured (`Experiment.key`)
    kind:    "online" through a server, "offline" in process
    point:   the published one; `note` says what was cut of it
    figures: medians, percentiles, throughput of that wave; of an offline row also every sample
    about:   circumstances: versions, card, pack, backends that vLLM chose
    """

    key: str
    experiment: str
    kind: str
    wave: int
    lane: str
    against: str
    dtype: str
    point: str
    status: str
    message: str = ""
    note: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    samples: tuple[float, ...] = ()
    about: Mapping[str, object] = field(default_factory=dict)
    time_utc: str = ""


_OPTIONAL = {"message": "", "note": "", "figures": {}, "samples": [], "about": {}, "time_utc": ""}


@dataclass(slots=True)
class Results:
    """The rows of a folder, in the order they were measured."""

    folder: Path
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def open(cls, folder: Path) -> Results:
        """What the folder holds; it is made. A torn last line, of a killed sitting, is dropped for good. Raises DataError."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / LINES
        rows = list(_lines(path))
        with appearing(path) as new:
            append_lines(new, map(_line, rows))
        return cls(folder, rows)

    def append(self, row: Row) -> None:
        append_lines(self.folder / LINES, [_line(row)])
        self.rows.append(row)

    def has(self, key: str, wave: int) -> bool:
        """Whether that was measured; what failed was not."""
        return any(r.key == key and r.wave == wave and r.status == "ok" for r in self.rows)


def _line(row: Row) -> str:
    return json.dumps({"v": VERSION, **asdict(row)}, separators=(",", ":"))


def _lines(path: Path) -> Iterable[Row]:
    for n, line in enumerate(whole_lines(path), 1):
        try:
            raw = json.loads(line)
            if raw.pop("v") != VERSION:
                raise ValueError("another version")
            yield read_as(Row, {**_OPTIONAL, **raw})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, Mistyped) as e:
            raise DataError(
                f"{path}, line {n} is no row of `emmy bench serving` of this version ({e}). Move the file away, or remove the line"
            ) from None
