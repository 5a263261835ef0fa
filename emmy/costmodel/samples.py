"""Dataset rows as training samples: which rows count, and what their schedules replay to now. Trains nothing.

Features are never stored. A row's schedule is replayed with this Emmy, and where that no longer gives the source that
was measured the row says nothing about what would be generated today: it is dropped, and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from emmy.costmodel.built import built_features
from emmy.costmodel.features import ROOF, feature_set
from emmy.costmodel.fit import Samples
from emmy.costmodel.replayed import Replays, SourceDigest, generated_digest, outcome_of
from emmy.ir.target import Target
from emmy.records import Device, Measurement, Protocol

FAILED = "not timed: the status is not ok"
CONTENDED = "contended, by a clock that runs on while others do"
DISTURBED = "contended, and the candidate has rows that are not"
DERIVED = "derived from other rows"
ELSEWHERE = "measured on another target or product"
ILLEGAL = "its schedule is refused now"
CHANGED = "its schedule generates another source now"


__all__ = ["Prepared", "generated_digest", "prepare"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Samples, and how many rows were left out for which reason. `contended`: samples that have no calm row."""

    samples: Samples
    dropped: Mapping[str, int]
    contended: int = 0


def prepare(
    rows: Sequence[Measurement],
    target: Target,
    source_digest: SourceDigest = generated_digest,
    on_replayed: Callable[[int, int], None] = lambda done, of: None,
    replays: Replays | None = None,
) -> Prepared:
    """The samples of `rows` on `target`. Several rows of one candidate become one sample, their median.

    replays: what earlier trainings replayed; it takes in what this one does

    A thread's own CPU clock hardly sees its neighbours: on a machine with a load of 5, two passes over 60 kernels agreed
    to 0.4 % (Spearman 0.998). So contended rows under that clock train where a candidate has no better ones.
    """
    dropped: Counter[str] = Counter()
    again: dict[tuple[str, str, Device, Protocol], list[Measurement]] = {}
    for row in rows:
        if (why := _unfit(row, target)) is not None:
            dropped[why] += 1
        else:
            again.setdefault((row.op, row.schedule, row.device, row.protocol), []).append(row)
    x, kept = [], []
    for done, ((op, schedule, _, protocol), same) in enumerate(again.items()):
        on_replayed(done, len(again))
        make = partial(outcome_of, op, schedule, target, protocol.threads, source_digest)
        outcome = replays.get(op, schedule, protocol.threads, make) if replays is not None else make()
        if outcome is None:
            dropped[ILLEGAL] += len(same)
            continue
        row_x, digest = outcome
        now = [row for row in same if row.source_digest == digest]
        if len(now) < len(same):
            dropped[CHANGED] += len(same) - len(now)
        calm = [row for row in now if not row.contended]
        if calm and len(calm) < len(now):
            dropped[DISTURBED] += len(now) - len(calm)
        now = calm or now
        if now:
            x.append(row_x)
            kept.append(now)
    return Prepared(_samples(x, kept, target), dict(dropped), sum(same[0].contended for same in kept))


def _unfit(row: Measurement, target: Target) -> str | None:
    if row.origin == "derived":
        return DERIVED
    # Cache sizes and vector width are this machine's: another CPU's rows would get features that are not theirs.
    if row.device.target != target.name or (target.is_cpu and row.device.product != target.product):
        return ELSEWHERE
    if row.time_us is None:
        return FAILED
    return CONTENDED if row.contended and row.protocol.clock != "thread_cpu" else None


def _samples(x: Sequence[np.ndarray], kept: Sequence[Sequence[Measurement]], target: Target) -> Samples:
    problems: dict[str, int] = {}
    workloads: dict[str, int] = {}
    first = [same[0] for same in kept]
    of_problem = [problems.setdefault(_problem(row), len(problems)) for row in first]
    of_workload = [workloads.setdefault(row.op, len(workloads)) for row in first]
    return Samples(
        x=np.stack(x) if x else np.empty((0, len(feature_set().names))),
        time_us=np.array([median(t for row in same if (t := row.time_us)) for same in kept], dtype=np.float64),
        problem=np.array(of_problem, dtype=np.int64),
        problems=tuple(problems),
        workload=np.array(of_workload, dtype=np.int64),
        workloads=tuple(workloads),
        schedules=tuple(row.schedule for row in first),
        ids=tuple(row.id for row in first),
        features=feature_set(),
        offset=ROOF,
        built=np.stack([built_features(row.static, target) for row in first]) if first and not target.is_cpu else None,
    )


def _problem(row: Measurement) -> str:
    p, d = row.protocol, row.device
    return f"{row.op} on {d.product} {d.uuid_hash[:8]}, {p.cache} {p.clocks} {p.clock}, {p.threads} threads"
