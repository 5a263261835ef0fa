"""What else is known of the cases, for the report: stored rows by status, the best known times, the model's picks, source texts."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from emmy import config
from emmy.benchmark.lanes import Lane
from emmy.benchmark.summary import OURS, CaseLanes
from emmy.codegen.build import source
from emmy.costmodel.dataset import Dataset
from emmy.costmodel.model import CostModel
from emmy.errors import CompileError, PlanError, UsageError
from emmy.ir.ops import parse_op
from emmy.ir.target import Target, load_target
from emmy.records import Measurement
from emmy.search.schedule_space import ScheduleSpace
from emmy.search.session import load_model
from emmy.search.space import Point
from emmy.winner import by_schedule

log = logging.getLogger("emmy.benchmark")

MOST_RANKED = 48  # of an op's stored schedules, evenly from the fastest to the slowest
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Evidence:
    """statuses: rows stored on the target by kind and status; known_us: best stored time by op as it was timed;
    model_regret: by op, how much slower than the best the deployed model's first among stored schedules is, 0 = as fast;
    sources: by (op, schedule) the digest of its text; texts: by digest
    """

    target: Target | None
    statuses: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    known_us: Mapping[str, float] = field(default_factory=dict)
    model_regret: Mapping[str, float] = field(default_factory=dict)
    model: str = ""
    sources: Mapping[tuple[str, str], str] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)

    def regret(self, case: CaseLanes, lane: Lane) -> float | None:
        """How much slower the case's schedule was here than the best that is stored of the op: 0 = as fast."""
        us, row = case.time_us(lane), case.lanes.get(lane)
        best = self.known_us.get(row.op) if row else None
        return us / best - 1 if us and best else None


def evidence(
    cases: Sequence[CaseLanes], home: Path | None, on_progress: Progress = lambda what, n, of: None
) -> Evidence:
    """What the dataset below `home`, the deployed model and the code generator have to say of the cases' target."""
    ours = [row for c in cases for lane in OURS if (row := c.lanes.get(lane)) is not None and row.schedule]
    if not ours:
        return Evidence(None)
    target, threads, home = load_target(ours[0].target), ours[0].threads, home or config.home()
    dataset = Dataset.of(home)
    dataset.ingest()
    rows: dict[str, list[Measurement]] = defaultdict(list)
    statuses: dict[str, Counter[str]] = defaultdict(Counter)
    for r in dataset.rows(target=target.name):
        statuses[r.op.partition(":")[0]][r.status] += 1
        if r.origin == "measured" and r.protocol.threads == threads:
            rows[r.op].append(r)
    times = {op: by_schedule(rows[op]) for op in dict.fromkeys(r.op for r in ours) if op in rows}
    model = load_model(None, target, home)
    regrets = {}
    for n, (op, of) in enumerate(times.items(), 1):
        on_progress("ranking what is stored by the model", n, len(times))
        if model is not None and (regret := _model_regret(op, of, target, threads, model)) is not None:
            regrets[op] = regret
    sources, texts = {}, {}
    asked = list(dict.fromkeys((r.op, r.schedule) for r in ours))
    for n, (op, schedule) in enumerate(asked, 1):
        on_progress("generating sources", n, len(asked))
        try:
            unit = source(parse_op(op), schedule, target)
        except (PlanError, UsageError, CompileError) as e:
            log.info("%s: no source: %s", op, e)
            continue
        sources[op, schedule], texts[unit.digest] = unit.digest, unit.text
    known = {op: min(of.values()) for op, of in times.items() if of}
    return Evidence(
        target, {k: dict(v) for k, v in statuses.items()}, known, regrets, model.digest if model else "", sources, texts
    )


def _model_regret(op: str, times: Mapping[str, float], target: Target, threads: int, model: CostModel) -> float | None:
    """Of schedules with a time, the model's first against the fastest; None with fewer than two that replay."""
    ordered = sorted(times, key=times.__getitem__)
    step = max(1.0, (len(ordered) - 1) / (MOST_RANKED - 1))
    chosen = list(dict.fromkeys(ordered[round(i * step)] for i in range(min(MOST_RANKED, len(ordered)))))
    space = ScheduleSpace(parse_op(op), target, threads)
    known, rows = [], []
    for schedule in chosen:
        try:
            rows.append(space.features([Point(schedule, ())]))
        except (PlanError, UsageError):
            continue
        known.append(schedule)
    if len(known) < 2:
        return None
    first = known[int(model.pick(np.concatenate(rows)).argmin())]
    return times[first] / times[ordered[0]] - 1
