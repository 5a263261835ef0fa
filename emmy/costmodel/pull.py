"""Measurements that come from elsewhere, into quarantine. Checks that files are what they say; judges no times.

A part is fetched to `<home>/incoming`, where it waits, checked by its digest, until all parts of its manifest are there: a pull
that was cut short goes on from there. One manifest's rows are one set, which comes in as a whole or not at all; a manifest that
is damaged, or whose files a place withholds, keeps no other from coming in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from emmy.costmodel.dataset import Dataset
from emmy.costmodel.files import sha256_of
from emmy.costmodel.place import NotThere, Place, Withheld
from emmy.costmodel.push import OUTBOX, manifests_at
from emmy.costmodel.quarantine import Arrival, Quarantine
from emmy.costmodel.shards import (
    Manifest,
    Part,
    count_cards,
    is_manifest_name,
    parse_manifest,
    read_manifest,
    read_part,
    shard_folders,
    verify_manifest,
)
from emmy.errors import DataError, UsageError

INCOMING = "incoming"

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Refused:
    """A manifest whose rows were not taken, and every reason."""

    manifest: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PullReport:
    """What a pull brought. `already`: manifests all of whose parts had come in before, whatever became of them."""

    place: str
    arrivals: tuple[Arrival, ...] = ()
    already: int = 0
    refused: tuple[Refused, ...] = ()


def pull(dataset: Dataset, place: Place, *, on_progress: Progress = lambda what, done, of: None) -> PullReport:
    """Brings what a place holds and this home never had into quarantine: of a shard folder, or of all that lie below it.

    Raises UsageError when there is nothing to pull from, DataError when the place does not answer. Nothing is lost then.
    """
    names = _manifests(place)
    if not names:
        raise UsageError(
            f"{place.where} holds no shard folder: no manifest in it, nor in a folder directly below. "
            "`emmy data push` or `emmy data export` makes some."
        )
    quarantine, report = Quarantine(dataset), PullReport(place.where)
    for done, name in enumerate(names):
        on_progress("manifests pulled", done, len(names))
        try:
            arrival = _pull_one(quarantine, place, name)
        except _Unsound as e:
            report = replace(report, refused=(*report.refused, Refused(name, e.reasons)))
            continue
        if arrival is None:
            report = replace(report, already=report.already + 1)
        else:
            report = replace(report, arrivals=(*report.arrivals, arrival))
    on_progress("manifests pulled", len(names), len(names))
    return report


class _Unsound(Exception):
    """A manifest, or what it lists, is not as it must be."""

    def __init__(self, *reasons: str) -> None:
        super().__init__(*reasons)
        self.reasons = reasons


def _manifests(place: Place) -> tuple[str, ...]:
    """Those of the place itself when it is a shard folder, else those of the folders in it."""
    own = tuple(sorted(name for name in place.files("") if is_manifest_name(name)))
    return own or manifests_at(place)


def _pull_one(quarantine: Quarantine, place: Place, name: str) -> Arrival | None:
    """The set of rows that a manifest brought; None when every part of it was here before."""
    where = f"{place.where}/{name}"
    folder = name.rpartition("/")[0]
    try:
        data = place.read(name)
    except (NotThere, Withheld) as e:
        raise _Unsound(f"{e}, though the place names it") from None
    try:
        manifest = parse_manifest(data, where)
    except DataError as e:
        raise _Unsound(str(e)) from None
    if folder not in ("", manifest.target):
        raise _Unsound(f"{where}: is of target {manifest.target}, in a folder of {folder}")
    with quarantine.locked():
        here = quarantine.taken() | _lying(quarantine.dataset)
        new = [p for p in manifest.parts if p.sha256 not in here]
        if not new:
            return None
        incoming = quarantine.dataset.home / INCOMING
        for part in new:
            _fetch(place, folder, part, incoming)
        taken = _checked(incoming, manifest, new, where)
        return quarantine.admit(incoming, taken, place.where)


def _lying(dataset: Dataset) -> frozenset[str]:
    """Digests of the parts that are this home's own, or came with Emmy: what it pushed comes back to it."""
    folders = shard_folders((*dataset.roots, dataset.home / OUTBOX))
    return frozenset(p.sha256 for folder in folders for p in read_manifest(folder).parts)


def _fetch(place: Place, folder: str, part: Part, incoming: Path) -> None:
    path = incoming / part.file
    if path.exists() and sha256_of(path) == part.sha256:
        return
    name = f"{folder}/{part.file}".lstrip("/")
    try:
        place.fetch(name, path)
    except (NotThere, Withheld) as e:
        raise _Unsound(f"{e}, though the manifest lists it") from None
    if (digest := sha256_of(path)) != part.sha256:
        path.unlink()
        raise _Unsound(f"{place.where}/{name}: SHA-256 is {digest}, its manifest says {part.sha256}")


def _checked(incoming: Path, manifest: Manifest, new: Sequence[Part], where: str) -> Manifest:
    """The manifest of the parts that are new here. Raises _Unsound naming what is wrong with them."""
    whole = len(new) == len(manifest.parts)  # then what is said of cards holds for these parts
    taken = manifest if whole else replace(manifest, parts=tuple(new), cards=())
    if faults := verify_manifest(incoming, taken, Path(where)):
        for part in new:
            (incoming / part.file).unlink(missing_ok=True)
        raise _Unsound(*(f"{f.file.name}: {f.reason}" for f in faults))
    rows = [row for part in new for row in read_part(incoming / part.file)]
    return replace(taken, cards=count_cards(rows))
