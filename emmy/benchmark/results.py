"""What the benchmark keeps: a row a case and lane, as lines while it goes on and as one Parquet file for everybody else.

`FOLDER/heats.jsonl` gets a line as soon as a case is measured, so that a killed sitting loses at most the one in flight;
`FOLDER/lanes.parquet` is written from it whenever a sitting ends. docs/bench.md lists the columns.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from math import isfinite
from pathlib import Path

from emmy.benchmark.lanes import Lane
from emmy.codegen.files import appearing, append_lines, whole_lines
from emmy.costmodel.database import quote
from emmy.errors import DataError
from emmy.measure.measurer import speedup
from emmy.records import Device
from emmy.typed import Mistyped, read_as

VERSION = 1
LINES, PARQUET = "heats.jsonl", "lanes.parquet"
_LEAST_US = 1e-6  # nothing is measured in less
NONE = "none"  # the status of a lane that there is not for the case
_SQL = {"str": "VARCHAR", "float": "DOUBLE", "float | None": "DOUBLE", "int": "INTEGER", "bool": "BOOLEAN"}


@dataclass(frozen=True, slots=True)
class LaneRow:
    """One lane of one case. Rows of one `heat` took turns in one process; times are microseconds of the whole op.

    case:    name in its set; `op` is what was timed, of an open size the range that ends at the case's hint
    status:  of a measurement, or "none": there is no such lane for the case, and `message` says why
    runs:    what ran: "torch", "torch.compile", ...; "emmy"
    origin:  of Emmy's schedule: "measured", "predicted", "near" or "default"; "" of stock
    static:  JSON of the circumstances and of facts of the binary, as in the dataset
    """

    heat: str
    time_utc: str
    case: str
    kind: str
    tier: str
    op: str
    lane: Lane
    status: str
    message: str = ""
    runs: str = ""
    schedule: str = ""
    source_digest: str = ""
    origin: str = ""
    samples_us: tuple[float, ...] = ()
    time_us: float | None = None
    warm_us: float | None = None
    sustained_us: float | None = None
    error_norm: float | None = None
    roof_us: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    best_known_us: float | None = None  # the best time stored of the op when the sitting began
    contended: bool = False
    clock_mhz: float | None = None
    temperature_c: float | None = None
    target: str = ""
    product: str = ""
    uuid_hash: str = ""
    driver: str = ""
    toolkit: str = ""
    torch: str = ""
    cache: str = ""
    clocks: str = ""
    clock: str = ""
    threads: int = 1
    rounds: int = 0
    static: str = "{}"
    emmy_version: str = ""

    def ratio(self, other: LaneRow) -> float | None:
        """How many times faster this lane is than the other, round by round; None when one has no times or they took no turns."""
        found = speedup(self.samples_us, other.samples_us) if self.heat == other.heat else None
        return found.median if found else None


NAMES = tuple(f.name for f in fields(LaneRow))
_OPTIONAL = {f.name: [] if f.name == "samples_us" else f.default for f in fields(LaneRow) if f.default is not MISSING}
COLUMNS = {f.name: "DOUBLE[]" if f.name == "samples_us" else _SQL.get(str(f.type), "VARCHAR") for f in fields(LaneRow)}


def device_columns(device: Device) -> dict[str, str]:
    return asdict(device)


@dataclass(slots=True)
class Results:
    """The rows of a folder, in the order they were measured."""

    folder: Path
    rows: list[LaneRow] = field(default_factory=list)

    @classmethod
    def open(cls, folder: Path) -> Results:
        """The folder's results so far; the folder is made. A torn last line, of a killed sitting, is dropped for good."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / LINES
        rows = list(_lines(path))
        if not path.exists() and (folder / PARQUET).exists():
            rows = read_parquet(folder / PARQUET)
        results = cls(folder, rows)
        with appearing(path) as new:  # what a kill left torn is left out
            append_lines(new, map(_line, rows))
        return results

    def append(self, rows: Sequence[LaneRow]) -> None:
        """Keeps the rows of one heat; they are on disk when this returns."""
        append_lines(self.folder / LINES, map(_line, rows))
        self.rows += rows

    def write_parquet(self) -> Path:
        """The file with all rows, replaced as a whole."""
        path = self.folder / PARQUET
        write_parquet(self.rows, path)
        return path


def latest(rows: Iterable[LaneRow]) -> dict[str, dict[Lane, LaneRow]]:
    """Of each case the lanes of its latest heat that has a time, in the order of the rows."""
    heats: dict[str, dict[str, dict[Lane, LaneRow]]] = {}
    for r in rows:
        heats.setdefault(r.case, {}).setdefault(r.heat, {})[r.lane] = r
    out = {}
    for case, of in heats.items():
        timed = [lanes for lanes in of.values() if any(r.samples_us for r in lanes.values())]
        out[case] = timed[-1] if timed else list(of.values())[-1]
    return out


def read(path: Path) -> list[LaneRow]:
    """The rows of a folder, or of one of its files. Raises DataError where there are none, or of another form."""
    if path.is_file():
        return list(_lines(path)) if path.suffix == ".jsonl" else read_parquet(path)
    if (path / LINES).exists():
        return list(_lines(path / LINES))
    if (path / PARQUET).exists():
        return read_parquet(path / PARQUET)
    raise DataError(f"{path} holds no results of `emmy bench kernels`: neither {LINES} nor {PARQUET}")


def write_parquet(rows: Sequence[LaneRow], path: Path) -> None:
    import duckdb

    path.parent.mkdir(parents=True, exist_ok=True)
    with duckdb.connect() as con, appearing(path) as new:
        names = ", ".join(f'"{name}" {sql}' for name, sql in COLUMNS.items())
        con.execute(f"CREATE TABLE lane ({names})")
        if rows:
            columns = [[_cell(getattr(r, n)) for r in rows] for n in NAMES]
            select = ", ".join(f"unnest(?::{sql}[])" for sql in COLUMNS.values())
            con.execute(f"INSERT INTO lane SELECT {select}", columns)
        con.execute(f"COPY lane TO {quote(new)} (FORMAT parquet, COMPRESSION zstd)")


def read_parquet(path: Path) -> list[LaneRow]:
    import duckdb

    with duckdb.connect() as con:
        try:
            found = con.execute(f"SELECT * FROM read_parquet({quote(path)})")
        except duckdb.Error as e:
            raise DataError(
                f"{path} is damaged, or no Parquet file: {str(e).splitlines()[0]}. Move it away; `emmy bench kernels` writes it anew"
            ) from None
        have = [d[0] for d in found.description or ()]
        if lacking := [n for n in NAMES if n not in have]:
            raise DataError(f"{path} has no column {', '.join(lacking)}: it was not written by `emmy bench kernels`")
        try:
            return [_row(dict(zip(have, cells, strict=True))) for cells in found.fetchall()]
        except (ValueError, Mistyped, RecursionError) as e:
            raise DataError(f"{path} holds what is no row of the benchmark: {e}. Move it away") from None


def _row(raw: Mapping[str, object]) -> LaneRow:
    """Raises Mistyped, or ValueError for what no heat gives."""
    known = {**_OPTIONAL, **{n: raw[n] for n in NAMES if n in raw}}
    error = known["error_norm"]
    if isinstance(error, float) and not isfinite(error):  # of a wrong answer
        return replace(_row({**known, "error_norm": None}), error_norm=error)
    row = read_as(LaneRow, known)
    if not all(
        t > _LEAST_US
        for t in (*row.samples_us, *(t for t in (row.time_us, row.warm_us, row.sustained_us) if t is not None))
    ):
        raise ValueError(f"a time is not above {_LEAST_US:g} us")
    if not isinstance(json.loads(row.static), dict):
        raise ValueError("static is no object")
    return row


def _cell(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _line(row: LaneRow) -> str:
    return json.dumps({"v": VERSION, **asdict(row)}, separators=(",", ":"))


def _lines(path: Path) -> Iterable[LaneRow]:
    for n, line in enumerate(whole_lines(path), 1):
        try:
            raw = json.loads(line)
            if raw.pop("v") != VERSION:
                raise DataError(f"{path}, line {n} is of another version than {VERSION}")
            yield _row(raw)
        except (ValueError, KeyError, AttributeError, Mistyped, RecursionError) as e:
            raise DataError(f"{path}, line {n} is no row of the benchmark: {e}. Remove it to go on") from None
