"""What a dataset holds, in numbers. Counts and ratios only; judging rows is `doctor`'s."""

from __future__ import annotations

from dataclasses import dataclass

from emmy.costmodel.snapshot import Best, Snapshot
from emmy.records import Origin, Status


@dataclass(frozen=True, slots=True)
class Group:
    """How many rows share a target, kind of op, status and origin."""

    target: str
    kind: str  # the op text up to its first colon
    status: Status
    origin: Origin
    rows: int
    ops: int
    schedules: int


@dataclass(frozen=True, slots=True)
class DataStats:
    rows: int
    duplicate_rows: int  # stored again, in a shard or the database, under an id that is counted once
    groups: tuple[Group, ...]
    bests: tuple[Best, ...]


def data_stats(snapshot: Snapshot, *, target: str | None = None) -> DataStats:
    """Counts by target, kind, status and origin, and the best of every op against its baseline."""
    table = snapshot.query(
        "SELECT target, split_part(op, ':', 1), status, origin, count(*), count(DISTINCT op), "
        "count(DISTINCT (op, schedule)) FROM measurement GROUP BY ALL ORDER BY ALL"
    )
    groups = (Group(*cells) for cells in table.rows)  # type: ignore[arg-type]  # the query's types
    stored = snapshot.query("SELECT count(*), (SELECT count(*) FROM measurement) FROM stored").rows[0]
    n_stored, n = (int(str(x)) for x in stored)
    return DataStats(
        n, n_stored - n, tuple(g for g in groups if target in (None, g.target)), snapshot.best(target=target)
    )
