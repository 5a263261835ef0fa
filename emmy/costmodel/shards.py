"""Measurements as files to ship: a folder a device, holding Parquet parts and a manifest. Knows no database.

    <root>/<target>/manifest.json
    <root>/<target>/part-<first 16 digits of its SHA-256>.parquet

Parts are written once and never changed; new rows make a new part. Only parts that the manifest lists are read, so a
part left behind by an export that died is never half trusted. Parquet is read and written by DuckDB.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from emmy import __version__
from emmy.costmodel.database import in_memory, quote
from emmy.costmodel.files import sha256_of, write_atomically
from emmy.costmodel.schema import COLUMN_LIST, COLUMNS, CREATE, NAMES, fetch, insert
from emmy.errors import DataError
from emmy.records import SCHEMA_VERSION, Measurement

if TYPE_CHECKING:
    import duckdb

MANIFEST = "manifest.json"
_PART = re.compile(r"part-[0-9a-f]{16}\.parquet")
# A part is written once and lies in every checkout: rows of one schedule side by side, compressed for long (a third smaller).
_LEVEL, _ROWS = 19, 200_000
_TARGET = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class Part:
    """One Parquet file of a shard folder."""

    file: str
    sha256: str
    rows: int
    emmy_version: str  # of the Emmy that wrote it


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a shard folder holds, and under which terms."""

    target: str
    licence: str
    provenance: str  # who measured it, on what
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class ShardFault:
    """Something in a shard folder that is not as its manifest, or the schema, says."""

    file: Path
    reason: str


def check_target(name: str) -> str:
    """`name`, when it can be a folder's name. Raises DataError otherwise: it may come from a foreign manifest."""
    if not _TARGET.fullmatch(name):
        raise DataError(f"target name {name!r} is not letters, digits, '.', '_' and '-'")
    return name


def shard_folders(roots: Sequence[Path]) -> tuple[Path, ...]:
    """Folders with a manifest directly below any of the roots, each once."""
    found = (m.parent for root in roots for m in sorted(root.glob(f"*/{MANIFEST}")))
    return tuple(dict.fromkeys(folder.resolve() for folder in found))


def shard_folders_at(path: Path) -> tuple[Path, ...]:
    """`path` itself when it is a shard folder, else those directly below it."""
    return (path.resolve(),) if (path / MANIFEST).exists() else shard_folders((path,))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a shard folder. Raises DataError when it is not one, or names files outside the folder."""
    path = folder / MANIFEST
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise DataError(f"{path}: not a readable manifest: {e}") from None
    if not isinstance(raw, dict) or raw.get("schema_version") != SCHEMA_VERSION:
        got = raw.get("schema_version") if isinstance(raw, dict) else type(raw).__name__
        raise DataError(
            f"{path}: schema version {got}, this Emmy reads {SCHEMA_VERSION}. Export again with the Emmy that wrote it."
        )
    names = {f.name for f in fields(Manifest)}
    if raw.keys() != names | {"schema_version"}:
        raise DataError(f"{path}: keys {sorted(raw)}, expected {sorted(names | {'schema_version'})}")
    if not all(isinstance(raw[k], str) for k in ("target", "licence", "provenance")) or not isinstance(
        raw["parts"], list
    ):
        raise DataError(f"{path}: target, licence and provenance must be text, parts a list")
    parts = tuple(_part(entry, path) for entry in raw["parts"])
    return Manifest(check_target(raw["target"]), raw["licence"], raw["provenance"], parts)


def _part(raw: object, path: Path) -> Part:
    expected = {"file": str, "sha256": str, "rows": int, "emmy_version": str}
    if (
        not isinstance(raw, dict)
        or raw.keys() != expected.keys()
        or not all(isinstance(raw[k], t) for k, t in expected.items())
    ):
        raise DataError(f"{path}: a part must have exactly {expected.keys()}, got {raw}")
    if not _PART.fullmatch(raw["file"]):
        raise DataError(f"{path}: {raw['file']!r} is not named part-<16 hex digits>.parquet")
    return Part(**raw)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replaces the folder's manifest in one step."""
    record = {"schema_version": SCHEMA_VERSION, **asdict(manifest)}
    write_atomically(folder / MANIFEST, (json.dumps(record, indent=1) + "\n").encode())


def write_part(folder: Path, rows: Sequence[Measurement]) -> Part:
    """The part that now holds `rows` in `folder`. It counts once a manifest lists it."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".part.{os.getpid()}.tmp"
    con = in_memory()
    try:
        con.execute(CREATE)
        insert(con, "measurement", rows)
        con.execute(
            f"COPY (SELECT {COLUMN_LIST} FROM measurement ORDER BY op, schedule, time_utc, id) TO {quote(temporary)} "
            f"(FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL {_LEVEL}, ROW_GROUP_SIZE {_ROWS})"
        )
    finally:
        con.close()
    digest = sha256_of(temporary)
    file = f"part-{digest[:16]}.parquet"
    temporary.replace(folder / file)
    return Part(file, digest, len(rows), __version__)


def read_part(path: Path) -> tuple[Measurement, ...]:
    """Every row of a part. Raises DataError when its columns or values are not the schema's."""
    con = in_memory()
    try:
        check_part_columns(con, path)
        return fetch(con, f"SELECT {COLUMN_LIST} FROM read_parquet({quote(path)}) ORDER BY time_utc, id")
    except DataError as e:
        raise DataError(f"{path}: {e}") from None
    finally:
        con.close()


def check_part_columns(con: duckdb.DuckDBPyConnection, path: Path) -> None:
    """Raises DataError when the file is no Parquet file with exactly the schema's columns and types."""
    import duckdb

    try:
        found = con.execute(f"DESCRIBE SELECT * FROM read_parquet({quote(path)})").fetchall()
    except duckdb.Error as e:
        raise DataError(f"{path}: not a readable Parquet file: {str(e).splitlines()[0]}") from None
    got = {name: kind for name, kind, *_ in found}
    wanted = {c.name: c.sql for c in COLUMNS}
    if got != wanted:
        wrong = sorted(k for k in got.keys() | wanted.keys() if got.get(k) != wanted.get(k))
        raise DataError(
            f"{path}: columns {', '.join(wrong)} differ from schema version {SCHEMA_VERSION} ({len(NAMES)} columns)"
        )


def verify(folder: Path) -> tuple[ShardFault, ...]:
    """Every way in which a shard folder is not what its manifest and the schema say; () = sound."""
    try:
        manifest = read_manifest(folder)
    except DataError as e:
        return (ShardFault(folder / MANIFEST, str(e)),)
    listed = {p.file for p in manifest.parts}
    faults = [
        ShardFault(p, "the manifest does not list it") for p in sorted(folder.glob("*.parquet")) if p.name not in listed
    ]
    seen: set[str] = set()
    for part in manifest.parts:
        path = folder / part.file
        faults += (ShardFault(path, reason) for reason in _part_faults(path, part, manifest.target, seen))
    return tuple(faults)


def _part_faults(path: Path, part: Part, target: str, seen: set[str]) -> list[str]:
    if not path.is_file():
        return ["listed by the manifest, but missing"]
    if (digest := sha256_of(path)) != part.sha256:
        return [f"SHA-256 is {digest}, the manifest says {part.sha256}"]
    try:
        rows = read_part(path)
    except DataError as e:
        return [str(e).removeprefix(f"{path}: ")]
    faults = [] if len(rows) == part.rows else [f"holds {len(rows)} rows, the manifest says {part.rows}"]
    for row in rows:
        if row.device.target != target:
            faults.append(f"row {row.id} is of target {row.device.target}, the folder of {target}")
        if row.status == "ok" and not row.samples_us:
            faults.append(f"row {row.id} is ok but has no sample")
        if not row.id or row.id in seen:
            faults.append(f"row id {row.id!r} is empty or occurs twice")
        seen.add(row.id)
    return faults
