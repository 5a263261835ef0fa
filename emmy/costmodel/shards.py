"""Measurements as files to ship: a folder a device, holding Parquet parts and a manifest. Knows no database.

    <root>/<target>/manifest.json
    <root>/<target>/part-<first 16 digits of its SHA-256>.parquet

Parts are written once and never changed; new rows make a new part. Only parts that the manifest lists are read, so a
part left behind by an export that died is never half trusted. Parquet is read and written by DuckDB.

A folder that many push into has a manifest a push instead, `manifest-<first 16 digits of its SHA-256>.json`: no two
pushers write one file, and a manifest that changed is no longer what its name says.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
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
_MANIFEST = re.compile(r"manifest(-(?P<digest>[0-9a-f]{16}))?\.json")
# A part is written once and lies in every checkout: rows of one source side by side, the bytes of a number apart, compressed
# for long (a third smaller), numbers no finer than they were measured (another fifth). A clock ticks in nanoseconds at best.
_LEVEL, _ROWS = 22, 200_000
_TIME_BITS, _COST_BITS, _STATIC_DIGITS = 24, 12, 6  # of samples and stock times; of what a row cost; of facts
_TARGET = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_LICENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]*( (AND|OR|WITH) [A-Za-z0-9][A-Za-z0-9.+-]*)*")  # as SPDX writes them


@dataclass(frozen=True, slots=True)
class Part:
    """One Parquet file of a shard folder."""

    file: str
    sha256: str
    rows: int
    emmy_version: str  # of the Emmy that wrote it


@dataclass(frozen=True, slots=True)
class CardRows:
    """How many rows of a manifest's parts one device measured."""

    product: str
    uuid_hash: str
    rows: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a shard folder holds, and under which terms."""

    target: str
    licence: str  # an SPDX expression
    provenance: str  # who measured it, on what
    parts: tuple[Part, ...] = ()
    emmy_version: str = ""  # of the Emmy that wrote it; in those without, no cards are counted either
    cards: tuple[CardRows, ...] = ()


@dataclass(frozen=True, slots=True)
class ShardFault:
    """Something in a shard folder that is not as its manifest, or the schema, says."""

    file: Path
    reason: str


def check_target(name: str) -> str:
    """`name`, when it can be a folder's name. Raises DataError otherwise: it may come from a foreign manifest."""
    if not _TARGET.fullmatch(name):
        raise DataError(f"target name {name[:100]!r} is not at most 100 letters, digits, '.', '_' and '-'")
    return name


def shard_folders(roots: Sequence[Path]) -> tuple[Path, ...]:
    """Folders with a manifest directly below any of the roots, each once."""
    found = (m.parent for root in roots for m in sorted(root.glob(f"*/{MANIFEST}")))
    return tuple(dict.fromkeys(folder.resolve() for folder in found))


def shard_folders_at(path: Path) -> tuple[Path, ...]:
    """`path` itself when it is a shard folder, also one that many push into; else those directly below it."""
    if manifest_files(path):
        return (path.resolve(),)
    below = sorted(path.iterdir()) if path.is_dir() else []
    return tuple(p.resolve() for p in below if p.is_dir() and manifest_files(p))


def manifest_files(folder: Path) -> tuple[Path, ...]:
    """The manifests in a folder: one, or one a push."""
    return tuple(sorted(p for p in folder.glob("manifest*.json") if is_manifest_name(p.name)))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a shard folder. Raises DataError when it is not one, or names files outside the folder."""
    return read_manifest_file(folder / MANIFEST)


def read_manifest_file(path: Path) -> Manifest:
    """The manifest in a file. Raises DataError when it is not one."""
    try:
        data = path.read_bytes()
    except OSError as e:
        raise DataError(f"{path}: not a readable manifest: {e}") from None
    return parse_manifest(data, str(path))


def parse_manifest(data: bytes, where: str) -> Manifest:
    """The manifest that `where` holds as `data`. Raises DataError when it is not one, or not what its name says."""
    named = _MANIFEST.fullmatch(where.rpartition("/")[2])
    if named and named["digest"] and named["digest"] != manifest_digest(data):
        raise DataError(
            f"{where}: its SHA-256 begins with {manifest_digest(data)}, so it was changed after it was written. "
            "Ask its owner to push again."
        )
    try:
        raw = json.loads(data.decode())
    except (ValueError, RecursionError) as e:
        raise DataError(f"{where}: not a readable manifest: {e}") from None
    version = raw.get("schema_version") if isinstance(raw, dict) else type(raw).__name__
    if not isinstance(raw, dict) or version != SCHEMA_VERSION:
        newer = isinstance(version, int) and version > SCHEMA_VERSION
        raise DataError(
            f"{where}: schema version {version}, this Emmy reads {SCHEMA_VERSION}. "
            + ("It is of a newer Emmy: update this one." if newer else "Export again with the Emmy that wrote it.")
        )
    required = {"schema_version", "target", "licence", "provenance", "parts"}
    if not required <= raw.keys() <= required | {"emmy_version", "cards"}:
        raise DataError(f"{where}: keys {sorted(raw)}, expected {sorted(required)}, emmy_version and cards")
    texts = {k: raw.get(k, "") for k in ("target", "licence", "provenance", "emmy_version")}
    if not all(isinstance(t, str) for t in texts.values()) or not isinstance(raw["parts"], list):
        raise DataError(f"{where}: target, licence, provenance and emmy_version must be text, parts a list")
    if not _LICENCE.fullmatch(texts["licence"]):
        raise DataError(f"{where}: licence {texts['licence']!r} is no SPDX expression such as Apache-2.0")
    check_target(texts["target"])
    parts = tuple(_part(entry, where) for entry in raw["parts"])
    return Manifest(**texts, parts=parts, cards=_cards(raw.get("cards", []), where))


def _part(raw: object, where: str) -> Part:
    expected = {"file": str, "sha256": str, "rows": int, "emmy_version": str}
    if (
        not isinstance(raw, dict)
        or raw.keys() != expected.keys()
        or not all(isinstance(raw[k], t) for k, t in expected.items())
    ):
        raise DataError(f"{where}: a part must have exactly {', '.join(expected)}, got {raw}")
    if not _PART.fullmatch(raw["file"]):
        raise DataError(f"{where}: {raw['file']!r} is not named part-<16 hex digits>.parquet")
    return Part(**raw)


def _cards(raw: object, where: str) -> tuple[CardRows, ...]:
    expected = {"product": str, "uuid_hash": str, "rows": int}
    entries = raw if isinstance(raw, list) else [raw]
    out = []
    for e in entries:
        if (
            not isinstance(e, dict)
            or e.keys() != expected.keys()
            or not all(isinstance(e[k], t) for k, t in expected.items())
        ):
            raise DataError(f"{where}: a card must have exactly {', '.join(expected)}, got {e}")
        out.append(CardRows(**e))
    return tuple(out)


def count_cards(rows: Sequence[Measurement], before: Sequence[CardRows] = ()) -> tuple[CardRows, ...]:
    """How many of the rows each device measured, on top of those counted before."""
    found = Counter({(c.product, c.uuid_hash): c.rows for c in before})
    found.update((r.device.product, r.device.uuid_hash) for r in rows)
    return tuple(CardRows(product, uuid_hash, n) for (product, uuid_hash), n in sorted(found.items()))


def manifest_bytes(manifest: Manifest) -> bytes:
    """The file's content: the same for the same manifest."""
    record = {"schema_version": SCHEMA_VERSION, **asdict(manifest)}
    return (json.dumps(record, indent=1) + "\n").encode()


def manifest_digest(data: bytes) -> str:
    """What names a manifest among others."""
    return hashlib.sha256(data).hexdigest()[:16]


def is_manifest_name(name: str) -> bool:
    """Whether a file's name is that of a manifest."""
    return _MANIFEST.fullmatch(name) is not None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replaces the folder's manifest in one step, as of this Emmy."""
    write_atomically(folder / MANIFEST, manifest_bytes(replace(manifest, emmy_version=__version__)))


def write_part(folder: Path, rows: Sequence[Measurement]) -> Part:
    """The part that now holds `rows` in `folder`, as `as_shipped` rounds them. It counts once a manifest lists it."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".part.{os.getpid()}.tmp"
    con = in_memory()
    try:
        con.execute(CREATE)
        insert(con, "measurement", [as_shipped(row) for row in rows])
        con.execute(
            f"COPY (SELECT {COLUMN_LIST} FROM measurement ORDER BY op, schedule, source_digest, time_utc, id) "
            f"TO {quote(temporary)} (FORMAT parquet, PARQUET_VERSION v2, COMPRESSION zstd, COMPRESSION_LEVEL {_LEVEL}, "
            f"ROW_GROUP_SIZE {_ROWS})"
        )
    finally:
        con.close()
    digest = sha256_of(temporary)
    file = f"part-{digest[:16]}.parquet"
    temporary.replace(folder / file)
    return Part(file, digest, len(rows), __version__)


def as_shipped(row: Measurement) -> Measurement:
    """The row as a part holds it: times to 24 bits (as float32), `compile_s` and `wall_s` to 12, facts to six digits or whole.

    Rounding twice changes nothing, so a row is the same however often it is exported.
    """
    return replace(
        row,
        samples_us=tuple(_rounded(x, _TIME_BITS) for x in row.samples_us),
        baseline_us=None if row.baseline_us is None else _rounded(row.baseline_us, _TIME_BITS),
        compile_s=_rounded(row.compile_s, _COST_BITS),
        wall_s=_rounded(row.wall_s, _COST_BITS),
        static={k: x if float(x).is_integer() else float(f"{x:.{_STATIC_DIGITS}g}") for k, x in row.static.items()},
    )


def _rounded(x: float, bits: int) -> float:
    """The number of so many binary digits that is nearest to a finite `x`."""
    mantissa, exponent = math.frexp(x)
    return math.ldexp(round(math.ldexp(mantissa, bits)), exponent - bits)


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
    """Every way in which a shard folder is not what its manifests and the schema say; () = sound."""
    files = manifest_files(folder) or (folder / MANIFEST,)
    faults: list[ShardFault] = []
    listed: set[str] = set()
    for file in files:
        try:
            manifest = read_manifest_file(file)
        except DataError as e:
            faults.append(ShardFault(file, str(e)))
        else:
            listed |= {p.file for p in manifest.parts}
            faults += verify_manifest(folder, manifest, file)
    if len(faults) == len(files) and not listed:
        return tuple(faults)  # without a manifest every part is unlisted, which is no news
    unlisted = (p for p in sorted(folder.glob("part-*.parquet")) if p.name not in listed)
    return (*(ShardFault(p, "no manifest lists it") for p in unlisted), *faults)


def verify_manifest(folder: Path, manifest: Manifest, file: Path) -> tuple[ShardFault, ...]:
    """The faults of the parts that one manifest lists, and of what it says of them."""
    seen: set[str] = set()
    cards: Counter[tuple[str, str]] = Counter()
    faults: list[ShardFault] = []
    for part in manifest.parts:
        path = folder / part.file
        faults += (ShardFault(path, reason) for reason in _part_faults(path, part, manifest.target, seen, cards))
    said = {(c.product, c.uuid_hash): c.rows for c in manifest.cards}
    if not faults and manifest.cards and said != dict(cards):
        faults.append(ShardFault(file, f"its cards are {said}, its parts hold rows of {dict(cards)}"))
    return tuple(faults)


def _part_faults(path: Path, part: Part, target: str, seen: set[str], cards: Counter[tuple[str, str]]) -> list[str]:
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
        cards[row.device.product, row.device.uuid_hash] += 1
    return faults
