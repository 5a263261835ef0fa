"""Measurements that leave this home and come into it, as shard folders. Decides which origin a row has here.

Export appends to a shard folder what it does not hold yet. Import copies other people's parts below `<home>/imported/`,
after they pass `verify`, with origin `imported`: such rows train models, but never stand for a measurement made here.
`derived` rows stay `derived`. Merging is a union by id; a faster row never replaces a slower one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from emmy.costmodel.dataset import Dataset
from emmy.costmodel.shards import (
    MANIFEST,
    Manifest,
    check_target,
    read_manifest,
    read_part,
    shard_folders_at,
    verify,
    write_manifest,
    write_part,
)
from emmy.errors import DataError, UsageError
from emmy.records import Measurement

LICENCE = "Apache-2.0"


@dataclass(frozen=True, slots=True)
class ExportReport:
    """`part` is the file written, None when the folder held every row already."""

    folder: Path
    part: Path | None
    rows: int
    already: int


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What came in; `already` rows were known, by id, and were left as they are."""

    folders: tuple[Path, ...]
    rows: int
    already: int


def export_shard(
    dataset: Dataset, target: str, out: Path, *, licence: str = LICENCE, provenance: str = ""
) -> ExportReport:
    """Writes the rows measured on `target` that `out/<target>` lacks, as one new part. Raises UsageError if none."""
    folder = out / check_target(target)
    rows = [
        r for r in dataset.rows(target=target, origins=("measured",)) if r.status != "passed_over"
    ]  # nothing was learnt
    if not rows:
        raise UsageError(
            f"no measured rows of target {target} in {dataset.home}. `emmy data stats` lists what there is."
        )
    old = (
        read_manifest(folder)
        if (folder / MANIFEST).exists()
        else Manifest(target, licence, provenance or _provenance(rows))
    )
    held = {row.id for part in old.parts for row in read_part(folder / part.file)}
    new = [row for row in rows if row.id not in held]
    if not new:
        return ExportReport(folder, None, 0, len(rows))
    part = write_part(folder, new)
    write_manifest(folder, replace(old, parts=(*old.parts, part)))
    return ExportReport(folder, folder / part.file, len(new), len(rows) - len(new))


def import_shards(source: Path, dataset: Dataset, *, own: bool = False) -> ImportReport:
    """Brings a shard folder, or every one below `source`, into the dataset.

    `own`: the rows were measured by this user on another machine and keep their origin. Raises DataError, and takes
    nothing, when any folder fails `verify`.
    """
    folders = shard_folders_at(source)
    if not folders:
        raise UsageError(f"{source} holds no shard folder: no {MANIFEST} in it, nor in a folder directly below")
    if faults := [f for folder in folders for f in verify(folder)]:
        listed = "\n".join(f"  {f.file}: {f.reason}" for f in faults[:10])
        raise DataError(
            f"{source}: {len(faults)} faults, so nothing was imported:\n{listed}\nAsk its producer to export it again."
        )
    known = {row.id for row in dataset.rows()}
    n_new = n_known = 0
    for folder in folders:
        manifest = read_manifest(folder)
        rows = [row for part in manifest.parts for row in read_part(folder / part.file)]
        new = [row if own else _imported(row) for row in rows if row.id not in known]
        known |= {row.id for row in new}
        n_new, n_known = n_new + len(new), n_known + len(rows) - len(new)
        if new:
            _add(dataset.imported / manifest.target, manifest, new)
    return ImportReport(folders, n_new, n_known)


def _imported(row: Measurement) -> Measurement:
    return row if row.origin == "derived" else replace(row, origin="imported")


def _add(folder: Path, source: Manifest, rows: Sequence[Measurement]) -> None:
    old = read_manifest(folder) if (folder / MANIFEST).exists() else replace(source, parts=())
    if old.licence != source.licence:
        raise DataError(
            f"{folder} holds rows under {old.licence}, these are under {source.licence}. "
            "Import them into a home of their own (EMMY_HOME)."
        )
    provenance = old.provenance if source.provenance in old.provenance else f"{old.provenance}; {source.provenance}"
    part = write_part(folder, rows)
    write_manifest(folder, replace(old, provenance=provenance, parts=(*old.parts, part)))


def _provenance(rows: Sequence[Measurement]) -> str:
    return "measured by Emmy on " + ", ".join(sorted({row.device.product for row in rows}))
