"""How Emmy opens DuckDB: in memory, for writing alone, or attached to be read. Knows no folders and no policy.

While one process has a database file open for writing, nobody else gets in, not even to read. Everybody here opens,
works for a moment and closes; who finds the file taken waits a little, then raises DataBusy naming the holder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from emmy.costmodel.schema import COLUMN_LIST, CREATE, check_version, insert
from emmy.errors import DataBusy, DataError
from emmy.records import Measurement

if TYPE_CHECKING:
    import duckdb

_POLL_S = 0.05


def quote(text: str | Path) -> str:
    """`text` as an SQL string literal, for the places where SQL takes no parameter (ATTACH, COPY)."""
    return "'" + str(text).replace("'", "''") + "'"


def in_memory() -> duckdb.DuckDBPyConnection:
    """An empty database: one thread, no downloads, no peeking at Python variables."""
    import duckdb

    return duckdb.connect(
        config={"threads": 1, "autoinstall_known_extensions": False, "python_enable_replacements": False}
    )


@contextmanager
def writing(path: Path, wait_s: float) -> Iterator[duckdb.DuckDBPyConnection]:
    """The database at `path`, made when missing; checkpointed and closed at the end. Raises DataBusy or DataError."""
    import duckdb

    path.parent.mkdir(parents=True, exist_ok=True)
    con = _patiently(lambda: duckdb.connect(str(path), config={"threads": 1}), path, wait_s)
    try:
        if not _has_tables(con):  # new, or its maker was killed before the tables were committed
            con.execute(f"BEGIN; {CREATE} COMMIT;")
        check_version(con, "schema_version", str(path))
        yield con
        con.execute("CHECKPOINT")
    except (duckdb.IOException, duckdb.FatalException) as e:  # a full disk, one that fails
        first = str(e).splitlines()[0]
        raise DataError(
            f"{path}: DuckDB cannot write the database: {first} Free space, or name another --home."
        ) from None
    finally:
        con.close()


def copy_rows(con: duckdb.DuckDBPyConnection, path: Path, wait_s: float, select: Callable[[str], str]) -> None:
    """Runs the INSERT that `select` makes of the table of measurements at `path`, then lets go of the file."""
    import duckdb

    _patiently(lambda: con.execute(f"ATTACH {quote(path)} AS source (READ_ONLY)"), path, wait_s)
    try:
        if con.execute(
            "SELECT 1 FROM duckdb_tables() WHERE database_name = 'source' AND table_name = 'measurement'"
        ).fetchall():
            check_version(con, "source.schema_version", str(path))
            con.execute(select("source.measurement"))
    except duckdb.Error as e:
        raise _damaged(path, e) from None
    finally:
        con.execute("DETACH source")


def append_new(con: duckdb.DuckDBPyConnection, rows: Sequence[Measurement]) -> int:
    """How many of `rows` were not there yet; they are now, in one transaction."""
    con.execute("BEGIN")
    con.execute("CREATE TEMP TABLE incoming AS FROM measurement LIMIT 0")
    insert(con, "incoming", rows)
    n = con.execute(new_rows_sql("incoming")).fetchall()[0][0]
    con.execute("DROP TABLE incoming")
    con.execute("COMMIT")
    return int(n)


def new_rows_sql(table: str) -> str:
    """The INSERT of those rows of `table` whose id the table of measurements lacks, each id once."""
    return (
        f"INSERT INTO measurement SELECT {COLUMN_LIST} FROM {table} WHERE id NOT IN (SELECT id FROM measurement) "
        "QUALIFY row_number() OVER (PARTITION BY id) = 1"
    )


def _has_tables(con: duckdb.DuckDBPyConnection) -> bool:
    return bool(con.execute("SELECT 1 FROM duckdb_tables() WHERE table_name = 'schema_version'").fetchall())


def _patiently(action: Callable[[], duckdb.DuckDBPyConnection], path: Path, wait_s: float) -> duckdb.DuckDBPyConnection:
    import duckdb

    give_up = time.monotonic() + wait_s
    while True:
        try:
            return action()
        except duckdb.Error as e:
            busy = "lock on file" in str(e) or "file handle conflict" in str(e) or "different configuration" in str(e)
            if not busy:
                raise _damaged(path, e) from None
            if time.monotonic() >= give_up:
                first = str(e).splitlines()[0]
                raise DataBusy(
                    f"{path} is in use by another process: {first} Close what reads it, then try again."
                ) from None
        time.sleep(_POLL_S)


def _damaged(path: Path, error: Exception) -> DataError:
    first = str(error).splitlines()[0]
    return DataError(
        f"{path}: DuckDB cannot use the database: {first} Make it anew from the journals: `emmy data rebuild`."
    )
