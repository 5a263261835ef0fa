"""Rows that should not be believed, each with the reason. Finds and names; changes nothing: rows are never edited."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from emmy.costmodel.snapshot import Snapshot
from emmy.records import Measurement

FaultKind = Literal["conflict", "implausible", "contended", "drifted", "derived", "stale"]

ROOF_MARGIN = 1.05  # faster than the roofline by more than this cannot be
DRIFT = 0.05


@dataclass(frozen=True, slots=True)
class Fault:
    """One row, or one candidate measured several times, and what is wrong with it."""

    kind: FaultKind
    target: str
    op: str
    ids: tuple[str, ...]
    detail: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`checked` rows were looked at. `unchecked` tests were not made, for want of a roofline or a replay."""

    checked: int
    faults: tuple[Fault, ...]
    unchecked: tuple[FaultKind, ...] = ()

    def count(self, kind: FaultKind) -> int:
        return sum(f.kind == kind for f in self.faults)


def diagnose(
    snapshot: Snapshot,
    *,
    roof_us: Callable[[Measurement], float | None] | None = None,
    stale: Callable[[Measurement], str | None] | None = None,
    target: str | None = None,
) -> Diagnosis:
    """Every fault found, the gravest kinds first.

    roof_us: the least time a row's op can take on its device, None where not known
    stale: why a row's schedule no longer replays to the source it measured, None when it does
    """
    rows = snapshot.rows(target=target)
    faults = list(_conflicts(snapshot))
    for row in rows:
        if roof_us is not None and row.time_us is not None:
            roof = roof_us(row)
            if roof is not None and row.time_us * ROOF_MARGIN < roof:
                faults.append(_fault("implausible", row, f"{row.time_us:.4g} us, its roofline is {roof:.4g} us"))
        if row.origin == "derived":
            faults.append(_fault("derived", row, "computed from other rows, not measured; never used for training"))
        if row.contended:
            faults.append(_fault("contended", row, "another process used the device, or it was throttled"))
        if stale is not None and (why := stale(row)) is not None:
            faults.append(_fault("stale", row, why))
    faults += _drifts(rows)
    order: tuple[FaultKind, ...] = ("conflict", "implausible", "drifted", "stale", "derived", "contended")
    faults = [f for f in faults if target in (None, f.target)]
    faults.sort(key=lambda f: order.index(f.kind))
    missing: tuple[FaultKind, ...] = (
        *(("implausible",) if roof_us is None else ()),
        *(("stale",) if stale is None else ()),
    )
    return Diagnosis(len(rows), tuple(faults), missing)


def _fault(kind: FaultKind, row: Measurement, detail: str) -> Fault:
    return Fault(kind, row.device.target, row.op, (row.id,), detail)


def _conflicts(snapshot: Snapshot) -> Iterator[Fault]:
    """Ids under which different rows are stored. Twice alike is harmless; an import changes the origin only."""
    table = snapshot.query(
        "SELECT id, any_value(target), any_value(op), count(*), string_agg(DISTINCT file, ', ' ORDER BY file) "
        "FROM stored GROUP BY id HAVING count(*) > count(DISTINCT file) OR "
        "count(DISTINCT (op, schedule, source_digest, target, product, uuid_hash, status, samples_us, time_utc)) > 1 "
        "ORDER BY id"
    )
    for row_id, target, op, n, files in table.rows:
        yield Fault("conflict", str(target), str(op), (str(row_id),), f"{n} rows under one id in {files}")


def _drifts(rows: tuple[Measurement, ...]) -> Iterator[Fault]:
    """Candidates whose times, on one device under one protocol and from one source, lie further apart than `DRIFT`."""
    times: dict[object, list[Measurement]] = {}
    for row in rows:
        if row.time_us is not None and not row.contended and row.origin != "derived":
            times.setdefault((row.op, row.schedule, row.source_digest, row.device, row.protocol), []).append(row)
    for again in times.values():
        us = [t for row in again if (t := row.time_us) is not None]
        if max(us) > min(us) * (1 + DRIFT):
            spread = max(us) / min(us) - 1
            detail = (
                f"{len(us)} measurements from {min(us):.4g} to {max(us):.4g} us ({spread:.0%}): {again[0].schedule}"
            )
            yield Fault("drifted", again[0].device.target, again[0].op, tuple(r.id for r in again), detail)
