"""The dataset's one table: its columns, how a measurement becomes a row, and back. Knows no files.

The table is append-only: no primary key, no index, no UPDATE, DELETE or ALTER, because those are what DuckDB's
write-ahead log has failed to replay after a crash (duckdb issues 15836, 19712, 22044, 25395). A new schema is a new
file. Values are stored exactly: a measurement that comes out again is equal, and prints as the same JSON line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from emmy.errors import DataError
from emmy.measure.rivals import RIVALS
from emmy.records import ORIGINS, SCHEMA_VERSION, SOURCE_DIGITS, STATUSES, Device, Measurement, Protocol

if TYPE_CHECKING:
    import duckdb

Cell = str | float | int | bool | None | list[float]


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its SQL type and the part of a measurement it holds."""

    name: str
    sql: str
    get: Callable[[Measurement], Cell]


def _number(value: float | None) -> float | None:
    return None if value is None else float(value)


COLUMNS: tuple[Column, ...] = (
    Column("id", "VARCHAR", lambda m: m.id),
    Column("run_id", "VARCHAR", lambda m: m.run_id),
    Column("time_utc", "VARCHAR", lambda m: m.time_utc),
    Column("op", "VARCHAR", lambda m: m.op),
    Column("schedule", "VARCHAR", lambda m: m.schedule),
    Column("source_digest", "VARCHAR", lambda m: m.source_digest),
    Column("target", "VARCHAR", lambda m: m.device.target),
    Column("product", "VARCHAR", lambda m: m.device.product),
    Column("uuid_hash", "VARCHAR", lambda m: m.device.uuid_hash),
    Column("driver", "VARCHAR", lambda m: m.device.driver),
    Column("toolkit", "VARCHAR", lambda m: m.device.toolkit),
    Column("status", "VARCHAR", lambda m: m.status),
    Column("origin", "VARCHAR", lambda m: m.origin),
    Column("samples_us", "DOUBLE[]", lambda m: [float(x) for x in m.samples_us]),
    Column("cache", "VARCHAR", lambda m: m.protocol.cache),
    Column("clocks", "VARCHAR", lambda m: m.protocol.clocks),
    Column("clock", "VARCHAR", lambda m: m.protocol.clock),
    Column("threads", "INTEGER", lambda m: m.protocol.threads),
    Column("repeats", "INTEGER", lambda m: m.protocol.repeats),
    Column("error_norm", "DOUBLE", lambda m: _number(m.error_norm)),
    Column("static", "VARCHAR", lambda m: json.dumps(dict(m.static), separators=(",", ":"), sort_keys=True)),
    Column("message", "VARCHAR", lambda m: m.message),
    Column("clock_mhz", "DOUBLE", lambda m: _number(m.clock_mhz)),
    Column("temperature_c", "DOUBLE", lambda m: _number(m.temperature_c)),
    Column("contended", "BOOLEAN", lambda m: m.contended),
    Column("compile_s", "DOUBLE", lambda m: _number(m.compile_s)),
    Column("wall_s", "DOUBLE", lambda m: _number(m.wall_s)),
    Column("baseline_us", "DOUBLE", lambda m: _number(m.baseline_us)),
    Column("baseline", "VARCHAR", lambda m: m.baseline),
    Column("emmy_version", "VARCHAR", lambda m: m.emmy_version),
)
NAMES = tuple(c.name for c in COLUMNS)
COLUMN_LIST = ", ".join(NAMES)
# The same of a file that may be older than the cut of digests.
READ_LIST = COLUMN_LIST.replace("source_digest", f"left(source_digest, {SOURCE_DIGITS}) AS source_digest")
DEVICE_COLUMNS = ("target", "product", "uuid_hash", "driver", "toolkit")
PROTOCOL_COLUMNS = ("cache", "clocks", "clock", "threads", "repeats")

CREATE = f"""
CREATE TABLE measurement ({", ".join(f"{c.name} {c.sql}" for c in COLUMNS)});
CREATE TABLE schema_version (version INTEGER);
INSERT INTO schema_version VALUES ({SCHEMA_VERSION});
"""

# `ok`: times one may compare. `best`: per op, device and protocol the fastest source, a source's time being the median
# over its rows, so that measuring it often does not make it look faster.
# How often a row repeated its timing does not set it apart.
_WHERE = ", ".join((*DEVICE_COLUMNS, *(c for c in PROTOCOL_COLUMNS if c != "repeats")))
# Ratios to rivals that were named are another matter than those to what a user would run.
_USUAL = f"WHERE baseline NOT IN ({', '.join(repr(x) for x in ('', *RIVALS[1:]))})"
VIEWS = f"""
CREATE VIEW ok AS
    SELECT *, list_median(samples_us) AS time_us FROM measurement
    WHERE status = 'ok' AND origin = 'measured' AND NOT contended;
CREATE VIEW best AS
    SELECT op, schedule, source_digest, {_WHERE},
           median(time_us) AS time_us, count(*) AS n_rows, arg_max(id, (time_utc, id)) AS id,
           coalesce(median(baseline_us) FILTER ({_USUAL}), median(baseline_us)) AS baseline_us,
           coalesce(arg_max(baseline, (time_utc, id)) FILTER ({_USUAL}), arg_max(baseline, (time_utc, id))) AS baseline
    FROM ok GROUP BY op, schedule, source_digest, {_WHERE}
    QUALIFY row_number() OVER (PARTITION BY op, {_WHERE} ORDER BY median(time_us), schedule, source_digest) = 1;
"""


def insert(con: duckdb.DuckDBPyConnection, table: str, rows: Sequence[Measurement]) -> None:
    """Appends rows to `table`, column-wise: 50 times faster than one by one, and exact."""
    if not rows:
        return
    columns: list[list[Cell]] = [[c.get(m) for m in rows] for c in COLUMNS]
    select = ", ".join(f"unnest(?::{c.sql}[])" for c in COLUMNS)
    con.execute(f"INSERT INTO {table} ({COLUMN_LIST}) SELECT {select}", columns)


def check_version(con: duckdb.DuckDBPyConnection, table: str, where: str) -> None:
    """Raises DataError when `table` does not say that `where` has the schema this Emmy reads."""
    found = con.execute(f"SELECT version FROM {table}").fetchall()
    if found != [(SCHEMA_VERSION,)]:
        raise DataError(
            f"{where} has schema version {[v for (v,) in found]}, this Emmy reads {SCHEMA_VERSION}. "
            "Make it anew from the journals: `emmy data rebuild`."
        )


def from_cells(cells: Sequence[object]) -> Measurement:
    """The measurement of a table row whose cells follow `COLUMNS`. Raises DataError when a cell is out of range."""
    v = dict(zip(NAMES, cells, strict=True))
    static = json.loads(str(v["static"]))
    samples = tuple(cast("list[float]", v["samples_us"]))
    if (
        v["status"] not in STATUSES
        or v["origin"] not in ORIGINS
        or any(not (math.isfinite(x) and x > 0) for x in samples)
    ):
        raise DataError(
            f"row {v['id']}: status {v['status']!r}, origin {v['origin']!r}, samples {samples}: "
            f"expected one of {STATUSES}, one of {ORIGINS}, and positive times. `emmy data verify` names the shard."
        )
    device = Device(**{name: v[name] for name in DEVICE_COLUMNS})  # type: ignore[arg-type]  # the table's types
    protocol = Protocol(**{name: v[name] for name in PROTOCOL_COLUMNS})  # type: ignore[arg-type]
    rest = {
        n: v[n]
        for n in NAMES
        if n not in DEVICE_COLUMNS and n not in PROTOCOL_COLUMNS and n not in ("static", "samples_us")
    }
    return Measurement(device=device, protocol=protocol, static=static, samples_us=samples, **rest)  # type: ignore[arg-type]


def fetch(con: duckdb.DuckDBPyConnection, sql: str, parameters: Iterable[object] = ()) -> tuple[Measurement, ...]:
    """The measurements a query gives whose columns are `COLUMN_LIST`."""
    return tuple(from_cells(cells) for cells in con.execute(sql, list(parameters)).fetchall())
