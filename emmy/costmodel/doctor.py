"""Rows that should not be believed, each with the reason. Finds and names; changes nothing: rows are never edited."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from emmy.costmodel.replayed import SourceDigest
from emmy.costmodel.samples import generated_digest
from emmy.costmodel.snapshot import Snapshot
from emmy.errors import EmmyError
from emmy.ir.ops.op import parse_op
from emmy.ir.roofline import roofline_us
from emmy.ir.target import load_target
from emmy.records import Measurement, source_mark

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


def roof_us(row: Measurement) -> float | None:
    """The least time the row's op can take where and how it was measured; None where the figures are not at hand."""
    try:
        op, target = parse_op(row.op), load_target(row.device.target)
        if target.is_cpu and target.product != row.device.product:
            return None  # a CPU's figures are detected, and this is another CPU
        dtype, protocol = op.program().dtype, row.protocol
        bound = roofline_us(op.work(), target, dtype, protocol.threads, cache=protocol.cache, clock_mhz=row.clock_mhz)
    except EmmyError:
        return None
    return bound.time_us


def why_stale(row: Measurement, source_digest: SourceDigest = generated_digest) -> str | None:
    """Why the row's schedule no longer gives the source that was measured; None when it does, or is for another CPU."""
    try:
        op, target = parse_op(row.op), load_target(row.device.target)
        if target.is_cpu and target.product != row.device.product:
            return None
        now = source_mark(source_digest(op, row.schedule, target))
    except EmmyError as e:
        return f"it does not replay: {e}"
    return None if now == row.source_digest else f"its source was {row.source_digest[:8]}, now it is {now[:8]}"


def diagnose(
    snapshot: Snapshot,
    *,
    roof: Callable[[Measurement], float | None] | None = roof_us,
    stale: Callable[[Measurement], str | None] | None = None,
    target: str | None = None,
) -> Diagnosis:
    """Every fault found, the gravest kinds first.

    roof:  the least time a row can have, as `roof_us` gives it; None = do not test
    stale: why a row's source is not what its schedule gives now, as `why_stale` says it; None = do not test
    """
    rows = snapshot.rows(target=target)
    faults = list(_conflicts(snapshot))
    for row in rows:
        least = roof(row) if roof is not None and row.time_us is not None else None
        if least is not None and row.time_us is not None and row.time_us * ROOF_MARGIN < least:
            faults.append(_fault("implausible", row, f"{row.time_us:.4g} us, its roofline is {least:.4g} us"))
        if row.origin == "derived":
            faults.append(_fault("derived", row, "computed from other rows, not measured; never used for training"))
        if row.contended:
            faults.append(_fault("contended", row, "the machine was busy or throttled, or the samples are far apart"))
        if stale is not None and (why := stale(row)) is not None:
            faults.append(_fault("stale", row, why))
    faults += _drifts(rows)
    order: tuple[FaultKind, ...] = ("conflict", "implausible", "drifted", "stale", "derived", "contended")
    faults = [f for f in faults if target in (None, f.target)]
    faults.sort(key=lambda f: order.index(f.kind))
    missing: tuple[FaultKind, ...] = (
        *(("implausible",) if roof is None else ()),
        *(("stale",) if stale is None else ()),
    )
    return Diagnosis(len(rows), tuple(faults), missing)


def _fault(kind: FaultKind, row: Measurement, detail: str) -> Fault:
    return Fault(kind, row.device.target, row.op, (row.id,), detail)


def _conflicts(snapshot: Snapshot) -> Iterator[Fault]:
    """Ids under which different rows are stored. Twice alike is harmless; an import changes the origin, a part rounds."""
    table = snapshot.query(
        "SELECT id, any_value(target), any_value(op), count(*), string_agg(DISTINCT file, ', ' ORDER BY file) "
        "FROM stored GROUP BY id HAVING count(*) > count(DISTINCT file) OR "
        "count(DISTINCT (op, schedule, source_digest, target, product, uuid_hash, status, samples_us::FLOAT[], time_utc)) > 1 "
        "ORDER BY id"
    )
    for row_id, target, op, n, files in table.rows:
        yield Fault("conflict", str(target), str(op), (str(row_id),), f"{n} rows under one id in {files}")


def _drifts(rows: tuple[Measurement, ...]) -> Iterator[Fault]:
    """Candidates whose times, on one device under one protocol and from one source, lie further apart than `DRIFT`."""
    times: dict[object, list[Measurement]] = {}
    for row in rows:
        if row.time_us is not None and not row.contended and row.origin != "derived":
            how = replace(row.protocol, repeats=0)
            times.setdefault((row.op, row.schedule, row.source_digest, row.device, how), []).append(row)
    for again in times.values():
        us = [t for row in again if (t := row.time_us) is not None]
        if max(us) > min(us) * (1 + DRIFT):
            spread = max(us) / min(us) - 1
            detail = (
                f"{len(us)} measurements from {min(us):.4g} to {max(us):.4g} us ({spread:.0%}): {again[0].schedule}"
            )
            yield Fault("drifted", again[0].device.target, again[0].op, tuple(r.id for r in again), detail)
