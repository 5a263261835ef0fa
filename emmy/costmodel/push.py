"""Measurements that leave this home for a place that others read. Sends what was measured here, and only what is not there yet.

    <place>/<target>/part-<digest>.parquet     rows; named by content, so that one file is sent once, whoever has it
    <place>/<target>/manifest-<digest>.json    what one push added
    <place>/index.json                         the manifests' names, for those who read through a web server

Parts go first, then the manifest that lists them, then the index: whatever is cut short is not read by anybody, and the next
push goes on from there. No two pushers write one file with different content but the index, which is written until it names
every manifest that is there: the last of several pushers has seen all of them.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from emmy import __version__
from emmy.codegen.files import locked
from emmy.costmodel.dataset import DATABASE, Dataset
from emmy.costmodel.exchange import append_part, rows_in
from emmy.costmodel.place import NotThere, Place
from emmy.costmodel.shards import (
    MANIFEST,
    Manifest,
    Part,
    count_cards,
    is_manifest_name,
    manifest_bytes,
    manifest_digest,
    parse_manifest,
    read_manifest,
    read_part,
    verify,
)
from emmy.errors import DataError, UsageError
from emmy.measure.identity import gives_away, names_machine
from emmy.records import SCHEMA_VERSION, Measurement

log = logging.getLogger("emmy.costmodel.push")

INDEX = "index.json"
OUTBOX = "outbox"  # of a home: rows that were pushed, as shard folders
_LISTED = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/manifest-[0-9a-f]{16}\.json")
_TRIES = 5  # to write an index that names all; somebody who pushes meanwhile writes it anew himself

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class PushReport:
    """What a push did. `sent`: parts that were not there; `rows`: of the parts that are listed since then.

    already:   parts that a manifest of the place listed before
    held_back: rows that stay here, by reason: they would name this machine
    """

    place: str
    sent: int = 0
    rows: int = 0
    already: int = 0
    manifests: tuple[str, ...] = ()
    held_back: dict[str, int] = field(default_factory=dict)


def push(
    dataset: Dataset,
    place: Place,
    *,
    target: str | None = None,
    licence: str = "",
    provenance: str = "",
    on_progress: Progress = lambda what, done, of: None,
) -> PushReport:
    """Sends the rows measured in this home, of `target` or of all. Raises UsageError when there are none.

    A row leaves in a part of the shard folder it lies in, or else of one that is kept below `<home>/outbox` for it.
    provenance: whence the rows are, in a sentence; default: the devices' names
    Raises DataError when the place does not answer, or a shard of this home is damaged; nothing is lost then.
    """
    if why := names_machine(provenance):
        raise UsageError(f"the provenance {provenance!r} would name this machine: {why}. Say it in other words")
    with locked(dataset.home / OUTBOX / ".lock"):
        for folder in _folders(dataset):
            _must_be_sound(folder)
        held_back = _fill_outbox(dataset, target, licence, provenance)
        folders = [f for f in _folders(dataset) if target in (None, read_manifest(f).target)]
    if not folders:
        raise UsageError(
            f"no rows measured in {dataset.home}{f' on {target}' if target else ''} can be pushed"
            + "".join(f"; {n} are held back: {why}" for why, n in held_back.items())
            + ". `emmy data stats` lists what there is."
        )
    report = PushReport(place.where, held_back=held_back)
    for done, folder in enumerate(folders):
        on_progress("folders pushed", done, len(folders))
        report = _push_folder(folder, place, report)
    _index(place)
    on_progress("folders pushed", len(folders), len(folders))
    return report


def manifests_at(place: Place) -> tuple[str, ...]:
    """Names of the manifests that a place holds, in order. Raises DataError when it is a web server without an index."""
    if place.lists:
        return tuple(f"{folder}/{name}" for folder in place.folders() for name in _manifests_in(place, folder))
    try:
        return read_index(place)
    except NotThere:
        raise DataError(
            f"{place.where}/{INDEX}: there is none, and a web server does not say which files it has. "
            "`emmy data push` writes one into the folder that is served."
        ) from None


def read_index(place: Place) -> tuple[str, ...]:
    """The manifests that a place's index names. Raises NotThere without one, DataError when it is none."""
    where = f"{place.where}/{INDEX}"
    data = place.read(INDEX)
    try:
        raw = json.loads(data.decode())
        names = [str(name) for name in raw["manifests"]]
        version = raw["schema_version"]
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise DataError(f"{where}: not an index of pushed manifests: {e!r}") from None
    if version != SCHEMA_VERSION:
        raise DataError(f"{where}: schema version {version}, this Emmy reads {SCHEMA_VERSION}. Update this Emmy.")
    if wrong := [name for name in names if not _LISTED.fullmatch(name)]:
        raise DataError(f"{where}: {wrong[0]!r} is not named TARGET/manifest-<16 hex digits>.json")
    return tuple(names)


# ---------------------------------------------------------------- what leaves
def _folders(dataset: Dataset) -> list[Path]:
    """Shard folders of what was measured here."""
    roots = (dataset.home, dataset.home / OUTBOX)
    return [m.parent for root in roots for m in sorted(root.glob(f"*/{MANIFEST}"))]


def _must_be_sound(folder: Path) -> None:
    if faults := verify(folder):
        raise DataError(
            f"{folder}: nothing is pushed, it is damaged: {faults[0].file.name}: {faults[0].reason}. "
            "Restore it, or move it away: rows that are in the database are sent all the same."
        )


def _fill_outbox(dataset: Dataset, target: str | None, licence: str, provenance: str) -> dict[str, int]:
    """Rows held back by reason; all others that were measured here and lie in no shard folder are in the outbox now."""
    lying = {row.id for folder in _folders(dataset) for row in rows_in(folder)}
    new: dict[str, list[Measurement]] = {}
    held_back: Counter[str] = Counter()
    for row in _measured_here(dataset, target):
        if row.id in lying:
            continue
        if why := gives_away(row):
            held_back[why] += 1
        else:
            new.setdefault(row.device.target, []).append(row)
    for name, rows in new.items():
        append_part(dataset.home / OUTBOX / name, rows, Manifest(name, licence, provenance))
    return dict(held_back)


def _measured_here(dataset: Dataset, target: str | None) -> Sequence[Measurement]:
    """Rows of the home's database, which holds none that came from elsewhere; not those that nothing was learnt from."""
    with dataset.snapshot() as snapshot:
        return [
            row
            for row in snapshot.stored(DATABASE)
            if row.origin == "measured" and row.status != "passed_over" and target in (None, row.device.target)
        ]


# ---------------------------------------------------------------- how it leaves
def _push_folder(folder: Path, place: Place, report: PushReport) -> PushReport:
    own = read_manifest(folder)
    listed = _listed_at(place, own.target)
    parts = [p for p in own.parts if p.sha256 not in listed]
    report = replace(report, already=report.already + len(own.parts) - len(parts))
    if not parts:
        return report
    manifest = _manifest_of(folder, own, parts)
    there = place.files(own.target)
    missing = [p for p in parts if there.get(p.file) != (folder / p.file).stat().st_size]
    for part in missing:
        place.send(folder / part.file, f"{own.target}/{part.file}")
    data = manifest_bytes(manifest)
    name = f"{own.target}/manifest-{manifest_digest(data)}.json"
    place.write(name, data)
    return replace(
        report,
        sent=report.sent + len(missing),
        rows=report.rows + sum(p.rows for p in parts),
        manifests=(*report.manifests, name),
    )


def _manifest_of(folder: Path, own: Manifest, parts: Sequence[Part]) -> Manifest:
    """What lists these parts of a folder. Raises DataError when a row of theirs must not leave."""
    rows = [row for part in parts for row in read_part(folder / part.file)]
    if why := next((why for row in rows if (why := gives_away(row))), names_machine(own.provenance)):
        raise DataError(
            f"{folder}: not pushed, it would name a machine: {why}. Export it anew without such rows, or move it away."
        )
    return replace(own, parts=tuple(parts), emmy_version=__version__, cards=count_cards(rows))


def _listed_at(place: Place, target: str) -> set[str]:
    """Digests of the target's parts that some manifest of the place lists. One that cannot be read lists none."""
    found: set[str] = set()
    for name in _manifests_in(place, target):
        where = f"{place.where}/{target}/{name}"
        try:
            found |= {p.sha256 for p in parse_manifest(place.read(f"{target}/{name}"), where).parts}
        except DataError as e:
            log.warning("%s", e)
    return found


def _manifests_in(place: Place, folder: str) -> tuple[str, ...]:
    return tuple(sorted(name for name in place.files(folder) if is_manifest_name(name)))


def _index(place: Place) -> None:
    """Writes the index until it names every manifest that is there, those of others who push meanwhile included."""
    for _ in range(_TRIES):
        names = [name for name in manifests_at(place) if _LISTED.fullmatch(name)]
        try:
            if list(read_index(place)) == names:
                return
        except DataError:  # none yet, or a damaged one
            pass
        record = {"schema_version": SCHEMA_VERSION, "manifests": names}
        place.write(INDEX, (json.dumps(record, indent=1) + "\n").encode())
