"""The store of all measurements of a data home: journals come in, rows go out. Runs nothing, judges nothing.

    <home>/journal/*.jsonl           written by tuners, one writer each
    <home>/journal/ingested/         journals whose rows are in the database; kept, so that it can be rebuilt
    <home>/emmy.duckdb               what was measured here
    <home>/<target>/part-*.parquet   shipped shards; <home>/imported/<target>/ holds other people's

Nobody keeps the database open: `ingest` opens it for a batch, readers copy it into memory, together with the shards,
and let go of it at once (`Snapshot`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from emmy import config
from emmy.codegen.files import locked
from emmy.costmodel.database import append_new, copy_rows, in_memory, new_rows_sql, quote, writing
from emmy.costmodel.schema import CREATE, READ_LIST
from emmy.costmodel.snapshot import Snapshot
from emmy.errors import DataError
from emmy.measure.journal import JournalContents, closed_journals, ingested_path, is_live, open_journals, read_journal
from emmy.records import Measurement, Origin, Status

log = logging.getLogger("emmy.costmodel.dataset")

DATABASE = "emmy.duckdb"
PATIENCE_S = 60.0  # of what has begun, and would end for it: other searches write, and people look
WAIT_S = 5.0  # patience with another process
_TURNS = threading.Lock()  # threads of one process would share the database too


@dataclass(frozen=True, slots=True)
class IngestReport:
    """What `ingest` did. `damaged` journals stay where they are; each entry says what is wrong with one, and where."""

    journals: int
    rows: int
    new_rows: int
    torn: tuple[Path, ...] = ()  # journals with an unfinished last line, which was dropped
    damaged: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """What `rebuild` did. `salvaged` rows were in the old database but in no journal; None = it could not be read."""

    journals: int
    rows: int
    salvaged: int | None
    kept_as: Path | None  # where the old database went
    damaged: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Dataset:
    """The measurements below `home`, with the shards of further roots. `wait_s`: patience with another process."""

    home: Path
    shard_roots: tuple[Path, ...] = ()
    wait_s: float = WAIT_S

    @classmethod
    def of(cls, home: Path, wait_s: float = WAIT_S) -> Dataset:
        """The dataset of a home, with the shards a checkout ships when the home is another folder."""
        checkout = config.checkout() if config.uses_shipped() else None
        shipped = (checkout / "datasets",) if checkout and checkout / "datasets" != home else ()
        return cls(home, shipped, wait_s)

    @property
    def database(self) -> Path:
        return self.home / DATABASE

    @property
    def imported(self) -> Path:
        return self.home / "imported"

    @property
    def roots(self) -> tuple[Path, ...]:
        """Folders whose subfolders may be shard folders; where one row is in several, the first counts."""
        return (self.home, *self.shard_roots, self.imported)

    def ingest(self, *, dead: bool = False) -> IngestReport:
        """Brings closed journals into the database; with `dead`, also those of runs that died and will not be resumed.

        A row counts once, however often its journal is ingested: kill this at any moment and do it again.
        """
        if not self._waiting(dead):
            return IngestReport(0, 0, 0)
        with _turn(self.home / "journal"):
            return self._ingest(dead)

    def _waiting(self, dead: bool) -> tuple[Path, ...]:
        left = tuple(p for p in open_journals(self.home) if not is_live(p)) if dead else ()
        return (*closed_journals(self.home), *left)

    def _ingest(self, dead: bool) -> IngestReport:
        contents, damaged = _read_all(self._waiting(dead))
        if not contents:
            return IngestReport(0, 0, 0, damaged=damaged)
        with writing(self.database, self.wait_s) as con:
            new_rows = sum(append_new(con, c.rows) for c in contents)
        ingested_path(contents[0].path).parent.mkdir(exist_ok=True)
        for journal in contents:
            journal.path.rename(ingested_path(journal.path))
        torn = tuple(c.path for c in contents if c.torn)
        return IngestReport(len(contents), sum(len(c.rows) for c in contents), new_rows, torn, damaged)

    def rebuild(self) -> RebuildReport:
        """Makes the database anew from the journals and what the old one still gives; keeps the old file."""
        archive = self.home / "journal" / "ingested"
        contents, damaged = _read_all((*sorted(archive.glob("*.jsonl")), *closed_journals(self.home)))
        fresh = self.home / f".{DATABASE}.new"
        for leftover in (fresh, _log_of(fresh)):
            leftover.unlink(missing_ok=True)
        exists = self.database.exists()
        with writing(fresh, self.wait_s) as con:
            rows = sum(append_new(con, c.rows) for c in contents)
            salvaged: int | None = 0
            if exists:
                try:
                    copy_rows(con, self.database, self.wait_s, new_rows_sql)
                    salvaged = int(con.execute("SELECT count(*) FROM measurement").fetchall()[0][0]) - rows
                except DataError as e:
                    log.warning("%s; rebuilt from the journals alone", e)
                    salvaged = None
        kept_as = self._keep_old() if exists else None
        fresh.replace(self.database)
        return RebuildReport(len(contents), rows, salvaged, kept_as, damaged)

    def snapshot(self) -> Snapshot:
        """A copy in memory of every row, to read and query; use it as a context manager."""
        con = in_memory()
        try:
            con.execute(CREATE.replace("TABLE measurement (", "TABLE stored (file VARCHAR, "))
            if self.database.exists():
                copy_rows(
                    con,
                    self.database,
                    self.wait_s,
                    lambda t: f"INSERT INTO stored SELECT {quote(DATABASE)}, {READ_LIST} FROM {t}",
                )
            return Snapshot(con, self.roots)
        except BaseException:
            con.close()
            raise

    def rows(
        self,
        *,
        target: str | None = None,
        op: str | None = None,
        statuses: Sequence[Status] = (),
        origins: Sequence[Origin] = (),
    ) -> tuple[Measurement, ...]:
        """Every row that matches, oldest first; an omitted filter matches all."""
        with self.snapshot() as s:
            return s.rows(target=target, op=op, statuses=statuses, origins=origins)

    def _keep_old(self) -> Path:
        """A second name for the old database, so that replacing it loses nothing, at whatever moment this is killed.

        Its write-ahead log is renamed first: a new database must never meet an old log.
        """
        kept = self.database.with_name(f"{DATABASE}.{time.time_ns()}.old")
        if _log_of(self.database).exists():
            _log_of(self.database).rename(_log_of(kept))
        kept.hardlink_to(self.database)
        return kept


def _log_of(database: Path) -> Path:
    return database.with_name(f"{database.name}.wal")


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Within: nobody else, thread or process, brings in the folder's journals, which two would take from each other."""
    with _TURNS, locked(folder / "turn.lock"):
        yield


def _read_all(paths: Sequence[Path]) -> tuple[tuple[JournalContents, ...], tuple[str, ...]]:
    contents: list[JournalContents] = []
    damaged: list[str] = []
    for path in paths:
        try:
            contents.append(read_journal(path))
        except DataError as e:
            log.error("%s", e)
            damaged.append(str(e))
    return tuple(contents), tuple(damaged)
