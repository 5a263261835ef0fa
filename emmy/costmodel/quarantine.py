"""Rows that came from elsewhere and are not believed yet: where they wait, and how they come in. Judging them is `calibrate`'s.

    <home>/quarantine/<target>-<digest>/manifest.json, part-*.parquet   as they were pushed; no reader of rows looks here
    <home>/quarantine/<target>-<digest>/standing.json                   held, released or dropped, and why

What was released or dropped leaves manifest and standing behind, so that it is not brought in again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from emmy.codegen.files import locked
from emmy.costmodel.dataset import Dataset
from emmy.costmodel.exchange import append_part, rows_in
from emmy.costmodel.files import write_atomically
from emmy.costmodel.shards import MANIFEST, Manifest, manifest_bytes, manifest_digest, read_manifest
from emmy.errors import DataError, UsageError
from emmy.records import Measurement, now_utc

FOLDER = "quarantine"
_STANDING = "standing.json"

State = Literal["held", "released", "dropped"]


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a set of rows came from, and what became of it."""

    source: str
    state: State = "held"
    why: str = "not calibrated yet"
    time_utc: str = ""  # of its last change


@dataclass(frozen=True, slots=True)
class Arrival:
    """A set of rows that one manifest brought."""

    folder: Path
    manifest: Manifest
    standing: Standing

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def n_rows(self) -> int:
        return sum(p.rows for p in self.manifest.parts)

    def rows(self) -> Sequence[Measurement]:
        """Its rows, as they were pushed; none once they were released or dropped."""
        return rows_in(self.folder) if self.standing.state == "held" else ()


@dataclass(frozen=True, slots=True)
class Release:
    """What a release brought in: `new` rows, and `known` ones, whose ids were here already."""

    arrival: Arrival
    new: int
    known: int


@dataclass(frozen=True, slots=True)
class Quarantine:
    """The sets of rows below one home."""

    dataset: Dataset

    @property
    def root(self) -> Path:
        return self.dataset.home / FOLDER

    def arrivals(self, state: State | None = None) -> tuple[Arrival, ...]:
        """Every set, or those in one state, by name. Raises DataError for one whose record is damaged."""
        found = (self._read(m.parent) for m in sorted(self.root.glob(f"[!.]*/{MANIFEST}")))
        return tuple(a for a in found if state in (None, a.standing.state))

    def taken(self) -> frozenset[str]:
        """Digests of every part that ever came in here, whatever became of it."""
        return frozenset(p.sha256 for a in self.arrivals() for p in a.manifest.parts)

    def find(self, name: str) -> Arrival:
        """The held set whose name begins so. Raises UsageError when there is none, or more than one."""
        held = [a for a in self.arrivals("held") if a.name.startswith(name)]
        if len(held) != 1:
            what = "no set" if not held else f"{len(held)} sets"
            raise UsageError(f"{what} of rows in quarantine begins with {name!r}; `emmy data quarantine` lists them")
        return held[0]

    def admit(self, parts: Path, manifest: Manifest, source: str) -> Arrival:
        """Holds the parts that lie in a folder and that `manifest` lists. They are there as a whole or not at all."""
        self.root.mkdir(parents=True, exist_ok=True)
        data = manifest_bytes(manifest)
        folder = self.root / f"{manifest.target}-{manifest_digest(data)}"
        new = self.root / f".{folder.name}"
        shutil.rmtree(new, ignore_errors=True)  # of one who was killed; the lock is ours
        new.mkdir()
        for part in manifest.parts:
            (parts / part.file).replace(new / part.file)
        write_atomically(new / _STANDING, _bytes(Standing(source, time_utc=now_utc())))
        write_atomically(new / MANIFEST, data)
        new.rename(folder)
        return self._read(folder)

    def release(self, arrival: Arrival, why: str, *, own: bool = False) -> Release:
        """Brings a set's rows into the dataset, as `imported`, or as they are when they are one's `own`.

        Kill this at any moment and do it again: a row counts once. Brings in nothing of a set that somebody else settled meanwhile.
        Raises DataError, and changes nothing, when rows of the target are here under another licence.
        """
        with self.locked():
            arrival = self._read(arrival.folder)
            if arrival.standing.state != "held":
                return Release(arrival, 0, 0)
            known = {row.id for row in self.dataset.rows()}
            rows = arrival.rows()
            new = [row if own else _imported(row) for row in rows if row.id not in known]
            if new:
                append_part(self.dataset.imported / arrival.manifest.target, new, arrival.manifest)
            done = self._settle(arrival, "released", why)
        return Release(done, len(new), len(rows) - len(new))

    def drop(self, arrival: Arrival, why: str) -> Arrival:
        """Deletes a set's rows, and remembers that it was here. Leaves a set that somebody else settled meanwhile as it is."""
        with self.locked():
            return self._settle(arrival, "dropped", why)

    def hold(self, arrival: Arrival, why: str) -> Arrival:
        """Leaves a set where it is, for this reason, unless somebody else settled it meanwhile."""
        with self.locked():
            return self._settle(arrival, "held", why)

    def locked(self) -> AbstractContextManager[None]:
        """Held while anything here changes: one process at a time."""
        return locked(self.root / ".lock")

    def _settle(self, arrival: Arrival, state: State, why: str) -> Arrival:
        """Within the lock. Judging takes minutes, in which another process may have decided."""
        arrival = self._read(arrival.folder)
        if arrival.standing.state != "held":
            return arrival
        standing = replace(arrival.standing, state=state, why=why, time_utc=now_utc())
        write_atomically(arrival.folder / _STANDING, _bytes(standing))
        if state != "held":
            for part in arrival.manifest.parts:
                (arrival.folder / part.file).unlink(missing_ok=True)
        return replace(arrival, standing=standing)

    def _read(self, folder: Path) -> Arrival:
        path = folder / _STANDING
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            standing = Standing(**raw)
        except (OSError, ValueError, TypeError, RecursionError) as e:
            raise DataError(f"{path}: not the standing of rows in quarantine: {e}. Move {folder} away.") from None
        if standing.state not in get_args(State):
            raise DataError(f"{path}: state {standing.state!r} is none of {get_args(State)}. Move {folder} away.")
        return Arrival(folder, read_manifest(folder), standing)


def _imported(row: Measurement) -> Measurement:
    return row if row.origin == "derived" else replace(row, origin="imported")


def _bytes(standing: Standing) -> bytes:
    return (json.dumps(asdict(standing), indent=1) + "\n").encode()
