"""The append-only record of a run: a JSON line a measurement, safe against kill -9 at any byte. Knows no database.

A journal is `<home>/journal/<run>-<worker>.jsonl`. Its first line is the run's header, written together with the file's
name (temporary file, then rename), so a journal without a header never exists. Every further line is one measurement,
appended by a single write and made durable by fsync before `append` returns. A line ends in a newline or was never
finished: what follows the last newline is the one row that was in flight. Each line carries the CRC-32 of the rest of
it, so that damage in the middle is an error with a file and a line number and never a silently different number.

While a writer lives it holds an flock on its journal. `close` renames the file to `.closed.jsonl`; only closed journals
are ingested. An open journal without a lock belongs to a run that died, and may be reopened by the run that resumes it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import zlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType

from emmy.errors import DataError
from emmy.records import SCHEMA_VERSION, Measurement

log = logging.getLogger("emmy.measure.journal")

OPEN_SUFFIX = ".jsonl"
CLOSED_SUFFIX = ".closed.jsonl"
_CRC = re.compile(rb'\{"crc":"([0-9a-f]{8})",')


@dataclass(frozen=True, slots=True)
class RunHeader:
    """What a run set out to do: enough to tell whether another command would resume it."""

    run_id: str
    op: str  # op text, or the name of a workload
    target: str
    strategy: str
    seed: int
    budget: str  # as the user gave it: "300 trials", "60 s"
    model: str = ""  # digest of the cost model that led the search; "" = none
    worker: int = 0
    emmy_version: str = ""
    time_utc: str = ""
    start: str = ""  # what the search was told at its start, as the searcher's own text


@dataclass(frozen=True, slots=True)
class JournalContents:
    """Everything a journal holds. `torn_bytes` counts what followed the last newline and was dropped."""

    path: Path
    header: RunHeader
    rows: tuple[Measurement, ...]
    elapsed_s: tuple[float, ...]  # seconds since the run began, one a row
    torn_bytes: int

    @property
    def torn(self) -> bool:
        return self.torn_bytes > 0


class Journal:
    """The one writer of a journal file. Make one with `create` or `reopen`; use it as a context manager."""

    def __init__(self, path: Path, fd: int, header: RunHeader, n_rows: int) -> None:
        self.path, self.header, self.n_rows = path, header, n_rows
        self._fd = fd
        self._size = os.fstat(fd).st_size

    @classmethod
    def create(cls, path: Path, header: RunHeader) -> Journal:
        """A new journal with its header on disk. Raises DataError when `path` exists or cannot be written."""
        if path.exists() or closed_path(path).exists():
            raise DataError(f"{path} exists already; a journal is written once. Resume it with Journal.reopen.")
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        fd = -1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o644)
            _lock(fd, path)
            os.ftruncate(fd, 0)  # one of the same number may have been killed here; in a container all have it
            _write(fd, _line({"run": asdict(header)}))
            os.rename(temporary, path)
            _sync_folder(path.parent)
        except OSError as e:
            if fd >= 0:
                os.close(fd)
                temporary.unlink(missing_ok=True)
            raise DataError(f"{path}: cannot create the journal: {e.strerror}. Free space or set EMMY_HOME.") from e
        return cls(path, fd, header, 0)

    @classmethod
    def reopen(cls, path: Path) -> tuple[Journal, JournalContents]:
        """The journal of a run that died, ready to append, and what it holds. Cuts an unfinished last line off."""
        if path.name.endswith(CLOSED_SUFFIX):
            raise DataError(f"{path} is closed: its run ended. Start a new run; the rows are in the dataset.")
        try:
            fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        except OSError as e:
            raise DataError(f"{path}: cannot reopen the journal: {e.strerror}") from e
        try:
            _lock(fd, path)
            if not _is_at(path, fd):
                raise DataError(f"{path}: another run has closed this journal. Give the same command again.")
            contents = read_journal(path)
            if contents.torn:
                os.ftruncate(fd, os.fstat(fd).st_size - contents.torn_bytes)
                os.fsync(fd)
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd, contents.header, len(contents.rows)), contents

    def append(self, row: Measurement, elapsed_s: float) -> None:
        """The row is on disk when this returns. Raises DataError if it cannot be; rows before it stay readable."""
        if self._fd < 0:
            raise DataError(f"{self.path}: the journal is closed; a row came after its end")
        if not row.id:
            raise DataError(
                f"{self.path}: a row of {row.op} has no id, so that it could not be told from another. Use new_id()."
            )
        line = _line({"elapsed_s": elapsed_s, "row": json.loads(row.to_json())})
        try:
            _write(self._fd, line)
        except OSError as e:
            self._abandon()
            raise DataError(
                f"{self.path}: row {self.n_rows + 1} cannot be written: {e.strerror}. "
                f"The {self.n_rows} rows before it are kept. Free space, then give the same command again to resume."
            ) from e
        self._size += len(line)
        self.n_rows += 1

    def close(self) -> Path:
        """The closed journal's path. After this the rows may be ingested."""
        target = closed_path(self.path)
        if self._fd >= 0:
            os.rename(self.path, target)
            _sync_folder(target.parent)
            os.close(self._fd)
            self._fd = -1
        return target

    def leave(self) -> None:
        """Let go of the file without closing the run, so that the same command can resume it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.leave()

    def _abandon(self) -> None:
        # A short write leaves half a line: cut it off. If even that fails the reader drops it.
        try:
            os.ftruncate(self._fd, self._size)
        except OSError:
            log.warning("%s: the unfinished last line stays; readers drop it", self.path)
        self.leave()


def journal_path(home: Path, run_id: str, worker: int = 0) -> Path:
    """Where the open journal of a run's worker lies."""
    return home / "journal" / f"{run_id}-{worker}{OPEN_SUFFIX}"


def closed_path(path: Path) -> Path:
    """The name `path` has once closed."""
    return path if path.name.endswith(CLOSED_SUFFIX) else path.with_name(path.name[: -len(OPEN_SUFFIX)] + CLOSED_SUFFIX)


def open_journals(home: Path) -> tuple[Path, ...]:
    """Journals not closed yet, oldest name first: of live runs, and of runs that died (see `is_live`)."""
    found = (home / "journal").glob(f"*{OPEN_SUFFIX}")
    return tuple(sorted(p for p in found if p.is_file() and not p.name.endswith(CLOSED_SUFFIX)))


def closed_journals(home: Path) -> tuple[Path, ...]:
    """Journals that wait to be ingested."""
    return tuple(sorted(p for p in (home / "journal").glob(f"*{CLOSED_SUFFIX}") if p.is_file()))


def is_live(path: Path) -> bool:
    """Whether a writer holds this journal now; nobody holds one that was closed meanwhile."""
    try:
        with path.open("rb") as f:
            fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def ingested_path(path: Path) -> Path:
    """Where a journal goes once its rows are in the database."""
    return path.parent / "ingested" / path.name


def read_journal(path: Path) -> JournalContents:
    """Header, rows, size of the unfinished tail; `path` of the result is where it lies now.

    A journal that its run closes, or that is ingested, between its listing and this is followed to its new place.
    Raises DataError naming file:line for a damaged whole line.
    """
    for place in (path, closed_path(path), ingested_path(closed_path(path)), ingested_path(path)):
        try:
            return _contents(place, place.read_bytes())
        except FileNotFoundError:
            continue
        except OSError as e:
            raise DataError(f"{place}: cannot read the journal: {e.strerror}") from e
    raise DataError(f"{path}: cannot read the journal: no such file")


def _contents(path: Path, data: bytes) -> JournalContents:
    *lines, tail = data.split(b"\n")
    if tail:
        log.warning("%s: dropped %d bytes of an unfinished last line", path, len(tail))
    if not lines:
        raise DataError(f"{path}:1: no header line; this is not a journal, or its beginning is lost")
    header = _header(lines[0], f"{path}:1")
    rows: list[Measurement] = []
    elapsed: list[float] = []
    for number, line in enumerate(lines[1:], start=2):
        where = f"{path}:{number}"
        raw = _checked(line, where)
        if raw.keys() != {"v", "elapsed_s", "row"} or not isinstance(raw["elapsed_s"], (int, float)):
            raise DataError(f"{where}: expected elapsed_s and row, got {sorted(raw)}")
        try:
            rows.append(Measurement.from_json(json.dumps(raw["row"])))
        except DataError as e:
            raise DataError(f"{where}: {e}") from None
        elapsed.append(float(raw["elapsed_s"]))
    return JournalContents(path, header, tuple(rows), tuple(elapsed), len(tail))


def _header(line: bytes, where: str) -> RunHeader:
    raw = _checked(line, where)
    run = raw.get("run")
    if not isinstance(run, dict) or set(run) != {f.name for f in fields(RunHeader)}:
        raise DataError(f"{where}: the first line is not a run header")
    integers = {"seed", "worker"}
    for name, value in run.items():
        expected = int if name in integers else str
        if not isinstance(value, expected):
            raise DataError(f"{where}: header field {name} is {type(value).__name__}, expected {expected.__name__}")
    return RunHeader(**run)


def _line(record: dict[str, object]) -> bytes:
    body = json.dumps({"v": SCHEMA_VERSION, **record}, separators=(",", ":"), sort_keys=True).encode()
    return b'{"crc":"%08x",' % zlib.crc32(body) + body[1:] + b"\n"


def _checked(line: bytes, where: str) -> dict[str, object]:
    """The record of a line, without its checksum. Raises DataError when the line is not what was written."""
    found = _CRC.match(line)
    body = b"{" + line[found.end() :] if found else b""
    if not found or int(found[1], 16) != zlib.crc32(body):
        raise DataError(
            f"{where}: the line is damaged (its checksum does not match). "
            "The lines before it are whole: cut the file there to keep them."
        )
    raw = json.loads(body)
    if raw.get("v") != SCHEMA_VERSION:
        raise DataError(f"{where}: schema version {raw.get('v')}, this Emmy reads {SCHEMA_VERSION}")
    return dict(raw)


def _write(fd: int, line: bytes) -> None:
    """One write of a whole line, durable. A disk that fills up takes a part; the next write raises the OSError."""
    rest = memoryview(line)
    while rest:
        rest = rest[os.write(fd, rest) :]
    os.fsync(fd)


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(
            f"{path}: another run is writing this journal. Wait for it, or start a run of your own."
        ) from None


def _is_at(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
