"""What a dataset holds, in numbers. Counts and ratios only; judging rows is `doctor`'s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

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
class Kind:
    """Rows of one kind of op on one target, and the bests of its ops beside their stock kernels.

    with_best: ops that have one; raced: bests that were; ratio: the median of stock over ours, above 1 = ours is faster;
    wins: ratios above 1
    """

    target: str
    kind: str
    rows: int
    ops: int
    with_best: int
    raced: int
    wins: int
    ratio: float | None


@dataclass(frozen=True, slots=True)
class DataStats:
    rows: int
    duplicate_rows: int  # stored again, in a shard or the database, under an id that is counted once
    kinds: tuple[Kind, ...]
    groups: tuple[Group, ...]
    bests: tuple[Best, ...]


def data_stats(snapshot: Snapshot, *, target: str | None = None) -> DataStats:
    """Counts by target and kind, the same by status and origin, and the best of every op against its baseline."""
    kind = "target, split_part(op, ':', 1)"
    of_kind = snapshot.query(f"SELECT {kind}, count(*), count(DISTINCT op) FROM measurement GROUP BY ALL ORDER BY ALL")
    of_group = snapshot.query(
        f"SELECT {kind}, status, origin, count(*), count(DISTINCT op), count(DISTINCT (op, schedule)) "
        "FROM measurement GROUP BY ALL ORDER BY ALL"
    )
    groups = (Group(*cells) for cells in of_group.rows)  # type: ignore[arg-type]  # the query's types
    stored = snapshot.query("SELECT count(*), (SELECT count(*) FROM measurement) FROM stored").rows[0]
    n_stored, n = (int(str(x)) for x in stored)
    bests = snapshot.best(target=target)
    kinds = (_kind(bests, *cells) for cells in of_kind.rows)  # type: ignore[arg-type]  # the query's types
    return DataStats(
        n,
        n_stored - n,
        tuple(k for k in kinds if target in (None, k.target)),
        tuple(g for g in groups if target in (None, g.target)),
        bests,
    )


def _kind(bests: Sequence[Best], target: str, kind: str, rows: int, ops: int) -> Kind:
    own = [b for b in bests if (b.row.device.target, b.row.op.partition(":")[0]) == (target, kind)]
    ratios = [b.ratio for b in own if b.ratio is not None]
    wins = sum(r > 1 for r in ratios)
    return Kind(
        target, kind, rows, ops, len({b.row.op for b in own}), len(ratios), wins, median(ratios) if ratios else None
    )
