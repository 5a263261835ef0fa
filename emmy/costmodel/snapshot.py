"""A copy in memory of the dataset, to read and to query without holding any file. Knows no journals and writes nothing.

Tables: `stored` (every row of every file, with its `file`); views: `measurement` (each id once), `ok` and `best`.
After loading, the connection is cut off from the file system, so that a query can change or read nothing but the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, cast

from emmy.costmodel.database import quote
from emmy.costmodel.files import sha256_of
from emmy.costmodel.schema import COLUMN_LIST, NAMES, READ_LIST, VIEWS, fetch, from_cells
from emmy.costmodel.shards import check_part_columns, read_manifest, shard_folders
from emmy.errors import DataError, UsageError
from emmy.records import Measurement, Origin, Status

if TYPE_CHECKING:
    import duckdb


@dataclass(frozen=True, slots=True)
class Table:
    """The answer to a query."""

    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest known schedule of an op on one device under one protocol.

    `time_us` is the median over the schedule's rows, each row being the median of its samples; `row` is its latest row.
    """

    row: Measurement
    time_us: float
    n_rows: int
    baseline_us: float | None
    baseline: str  # whose time that is; "" without one

    @property
    def ratio(self) -> float | None:
        """How many times faster than the stock kernel it was raced against; None when it raced none."""
        return self.baseline_us / self.time_us if self.baseline_us else None


class Snapshot:
    """Every row of a dataset, in memory. Made by `Dataset.snapshot`."""

    def __init__(self, con: duckdb.DuckDBPyConnection, roots: Sequence[Path]) -> None:
        self._con = con
        for folder in shard_folders(roots):
            self._load(folder)
        # Where an id is in several files the first loaded counts: the database, then shipped shards, then imports.
        con.execute(
            f"CREATE VIEW measurement AS SELECT {COLUMN_LIST} FROM stored "
            "QUALIFY row_number() OVER (PARTITION BY id ORDER BY stored.rowid) = 1"
        )
        con.execute(VIEWS)
        con.execute("SET enable_external_access = false; SET lock_configuration = true")

    def _load(self, folder: Path) -> None:
        for part in read_manifest(folder).parts:
            path = folder / part.file
            check_part_columns(self._con, path)
            if sha256_of(path) != part.sha256:
                raise DataError(
                    f"{path}: not the file that its manifest describes, so its rows are not used. "
                    "`emmy data verify` lists such files: restore them, or move the folder away."
                )
            self._con.execute(f"INSERT INTO stored SELECT {quote(path)}, {READ_LIST} FROM read_parquet({quote(path)})")

    def rows(
        self,
        *,
        target: str | None = None,
        op: str | None = None,
        statuses: Sequence[Status] = (),
        origins: Sequence[Origin] = (),
    ) -> tuple[Measurement, ...]:
        """Every row that matches, oldest first; an omitted filter matches all."""
        filters: list[tuple[str, object]] = []
        if target is not None:
            filters.append(("target = ?", target))
        if op is not None:
            filters.append(("op = ?", op))
        if statuses:
            filters.append(("list_contains(?::VARCHAR[], status)", list(statuses)))
        if origins:
            filters.append(("list_contains(?::VARCHAR[], origin)", list(origins)))
        where = f"WHERE {' AND '.join(sql for sql, _ in filters)}" if filters else ""
        return fetch(
            self._con, f"SELECT {COLUMN_LIST} FROM measurement {where} ORDER BY time_utc, id", [v for _, v in filters]
        )

    def stored(self, file: str) -> tuple[Measurement, ...]:
        """Every row of one file, as `stored` names it, oldest first."""
        return fetch(self._con, f"SELECT {COLUMN_LIST} FROM stored WHERE file = ? ORDER BY time_utc, id", [file])

    def best(self, *, op: str | None = None, target: str | None = None) -> tuple[Best, ...]:
        """The fastest schedule per op, device and protocol, over rows that are ok, measured here and not contended."""
        sql = (
            f"SELECT {', '.join(f'm.{n}' for n in NAMES)}, b.time_us, b.n_rows, b.baseline_us, b.baseline "
            "FROM best b JOIN measurement m USING (id) WHERE (?::VARCHAR IS NULL OR m.op = ?) "
            "AND (?::VARCHAR IS NULL OR m.target = ?) ORDER BY m.op, b.time_us, m.id"
        )
        found = self._con.execute(sql, [op, op, target, target]).fetchall()
        return tuple(
            Best(from_cells(r[:-4]), float(r[-4]), int(r[-3]), None if r[-2] is None else float(r[-2]), r[-1] or "")
            for r in found
        )

    def query(self, sql: str) -> Table:
        """The answer to SQL over `measurement`, `ok`, `best` and `stored`. Raises UsageError with DuckDB's words."""
        import duckdb

        try:
            answer = self._con.execute(sql)
            if answer is None:  # DuckDB's answer to a text without a statement
                raise UsageError("the query is empty; an example is: SELECT op, time_us FROM best")
            columns = tuple(str(d[0]) for d in answer.description or ())
            return Table(columns, tuple(cast("list[tuple[object, ...]]", answer.fetchall())))
        except duckdb.Error as e:
            raise UsageError(
                f"the query failed: {e}\nThe tables are measurement, ok, best and stored; `DESCRIBE measurement` lists columns"
            ) from None

    def close(self) -> None:
        self._con.close()

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
