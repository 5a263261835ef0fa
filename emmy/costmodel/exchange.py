"""Shard folders that this home writes: what was measured here, to ship; what came from elsewhere, to be read beside it.

Rows are only ever added, as new parts. Merging is a union by id; a faster row never replaces a slower one.
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
    count_cards,
    read_manifest,
    read_part,
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


def export_shard(dataset: Dataset, target: str, out: Path, *, licence: str = "", provenance: str = "") -> ExportReport:
    """Writes the rows measured on `target` that `out/<target>` lacks, as one new part. Raises UsageError if none."""
    folder = out / check_target(target)
    rows = [
        r for r in dataset.rows(target=target, origins=("measured",)) if r.status != "passed_over"
    ]  # nothing was learnt
    if not rows:
        raise UsageError(
            f"no measured rows of target {target} in {dataset.home}. `emmy data stats` lists what there is."
        )
    held = {row.id for row in rows_in(folder)}
    new = [row for row in rows if row.id not in held]
    if not new:
        return ExportReport(folder, None, 0, len(rows))
    part = append_part(folder, new, Manifest(target, licence, provenance))
    return ExportReport(folder, part, len(new), len(rows) - len(new))


def append_part(folder: Path, rows: Sequence[Measurement], terms: Manifest) -> Path:
    """The part that now holds `rows` in a shard folder.

    terms: the folder's target; the rows' licence and provenance, "" being what the folder says, or what is usual
    Raises DataError when the folder's rows are under another licence: then nothing was written.
    """
    usual = replace(
        terms,
        licence=terms.licence or LICENCE,
        provenance=terms.provenance or provenance_of(rows),
        parts=(),
    )
    old = read_manifest(folder) if (folder / MANIFEST).exists() else usual
    if terms.licence not in ("", old.licence):
        raise DataError(other_licence(folder, old.licence, terms.licence))
    provenance = old.provenance if terms.provenance in old.provenance else f"{old.provenance}; {terms.provenance}"
    counted = old.parts == () or old.cards != ()
    cards = count_cards(rows, old.cards) if counted else count_cards([*rows_in(folder), *rows])
    part = write_part(folder, rows)
    write_manifest(folder, replace(old, provenance=provenance, parts=(*old.parts, part), cards=cards))
    return folder / part.file


def other_licence(folder: Path, there: str, here: str) -> str:
    """Why rows cannot be added to a folder."""
    return (
        f"{folder} holds rows under {there}, these are under {here}. Import them into a home of their own (EMMY_HOME)."
    )


def rows_in(folder: Path) -> Sequence[Measurement]:
    """Every row of a shard folder; none where there is no manifest."""
    parts = read_manifest(folder).parts if (folder / MANIFEST).exists() else ()
    return [row for part in parts for row in read_part(folder / part.file)]


def provenance_of(rows: Sequence[Measurement]) -> str:
    """Whence rows are, in a sentence that names no machine."""
    return "measured by Emmy on " + ", ".join(sorted({row.device.product for row in rows}))
