"""From a request to a run: what is known already, which problems are near, which model leads, resume or start anew."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from emmy.costmodel.dataset import PATIENCE_S, Dataset
from emmy.costmodel.model import CostModel
from emmy.costmodel.model_files import found
from emmy.costmodel.recording import try_ingest
from emmy.costmodel.registry import find, kept, model_roots
from emmy.costmodel.snapshot import Snapshot
from emmy.errors import DataError, PlanError, StaleModel, UsageError
from emmy.ir.ops import Op
from emmy.ir.ops.op import Accumulate
from emmy.ir.roofline import roofline_us
from emmy.ir.schedule import sums_of
from emmy.ir.target import Target
from emmy.measure.journal import Journal, RunHeader, is_live, journal_path, open_journals, read_journal
from emmy.measure.measurer import Measurer
from emmy.records import Candidate, Device, Measurement, source_mark
from emmy.search.budget import Budget
from emmy.search.carry import carried, same_as
from emmy.search.collect import SHARES
from emmy.search.events import Listener, Note, ignore
from emmy.search.near import carried_winners
from emmy.search.registry import COLLECT, make_strategy
from emmy.search.schedule_space import ScheduleSpace
from emmy.search.second_look import SecondLook
from emmy.search.space import Trial
from emmy.search.tuner import PASSED_OVER, Plan, Run, Start, Stop, is_complete
from emmy.winner import by_schedule, find_winner

log = logging.getLogger("emmy.search.session")

_NEAREST = 8  # schedules after the winners of other problems, tried first
_RESPELT = 16  # known schedules, the fastest of those that a search writes otherwise
_MOST_KNOWN = 2000
_MOST_CHECKED = (
    64  # schedules that were timed, the fastest, of which the source is generated: tens of milliseconds each
)
_PLAIN = 3.0  # times the roofline that a schedule nobody searched for may take


@dataclass(frozen=True, slots=True)
class Request:
    """One op to tune. `protocol` names how it is timed (cache, threads): rows of another protocol are not known trials.

    sums:  how its schedules keep their sums; None = as it pays on the target
    ahead: batches of proposals that may be out at once; 0 = as many as keep the measurer busy
    """

    op: Op
    target: Target
    strategy: str
    seed: int
    budget: Budget
    threads: int
    fresh: bool = False
    sums: Accumulate | None = None
    ahead: int = 0


def open_run(
    request: Request,
    measurer: Measurer,
    home: Path,
    emmy_version: str,
    model: CostModel | None = None,
    on_event: Listener = ignore,
    stop: Stop | None = None,
) -> Run:
    """A run ready to go: the interrupted one with the same request if there is one, else a new one that knows earlier rows."""
    space = ScheduleSpace(request.op, request.target, request.threads, request.sums)
    plan, device = _plan(request, model.digest if model else ""), measurer.device
    run_id = _next_run_id(plan, request, device, home, emmy_version)
    _set_aside(request, home, "" if request.fresh else run_id, on_event)
    run_id = _next_run_id(plan, request, device, home, emmy_version)
    path = journal_path(home, run_id)
    if path.exists():
        start = Start.from_text(read_journal(path).header.start)
    else:
        start = _start(request, space, measurer, home, on_event)
        start = replace(start, ahead=request.ahead or measurer.ahead)
        if request.strategy == COLLECT:
            start = replace(start, elsewhere=_elsewhere(request, space, device, home), shares=SHARES)
    known = _trials(space, start.known)
    study = home / "studies" / f"{run_id}.log"
    elsewhere = [p for s in start.elsewhere if (p := space.locate(s)) is not None]
    strategy = make_strategy(
        request.strategy, space, seed=request.seed, model=model, known=known, study=study, elsewhere=elsewhere
    )
    plan = replace(plan, start=start)
    races = request.strategy != COLLECT
    look = SecondLook.of(space, model) if request.strategy not in (COLLECT, "random") else None
    return Run(plan, run_id, space, strategy, measurer, home, emmy_version, on_event, stop or Stop(), races, look)


def leading(
    request: Request, model: CostModel | None, measurer: Measurer, home: Path, emmy_version: str
) -> CostModel | None:
    """Who is to lead: the model; or who led the request's run that was interrupted, where another model was deployed since."""
    digest = model.digest if model else ""

    def run_id(digest: str) -> str:
        return _next_run_id(_plan(request, digest), request, measurer.device, home, emmy_version)

    if request.fresh or journal_path(home, run_id(digest)).exists():
        return model
    for path in open_journals(home):
        try:
            header = read_journal(path).header
        except DataError:  # `open_run` says so
            continue
        if header.op != request.op.key or header.run_id != run_id(header.model):
            continue
        led = kept(request.target.name, header.model, model_roots(home)) if header.model else None
        if led is not None or not header.model:
            return led
    return model


def _plan(request: Request, model: str) -> Plan:
    return Plan(request.op.key, request.target.name, request.strategy, request.seed, request.budget, model)


def _next_run_id(plan: Plan, request: Request, device: Device, home: Path, emmy_version: str) -> str:
    """The id of the first run of this plan that has not ended: interrupted, or not begun."""
    protocol, generation = f"{request.threads} threads on {device.identity}", 0
    protocol += " with hybrid sums" if request.sums == "hybrid" else ""
    while is_complete(home, plan.run_id(protocol, generation, emmy_version)):
        generation += 1
    return plan.run_id(protocol, generation, emmy_version)


def _set_aside(request: Request, home: Path, keep: str, on_event: Listener) -> None:
    """Close journals of interrupted runs of this op that the present request does not resume: their rows are known trials."""

    def others(header: RunHeader) -> bool:
        return header.run_id != keep and (header.op, header.target) == (request.op.key, request.target.name)

    close_dead(home, others, on_event)


def close_dead(home: Path, which: Callable[[RunHeader], bool], on_event: Listener) -> None:
    """Closes those of the journals that nobody writes any more, so that their rows count."""
    for path in open_journals(home):
        try:
            header = read_journal(path).header
        except DataError as e:  # somebody else's run: it must not stop this one
            on_event(Note(str(e)))
            continue
        if not which(header) or is_live(path):
            continue
        try:
            Journal.reopen(path)[0].close()
        except DataError:  # where another run was quicker, it goes on with the journal, or has closed it
            if path.exists() and not is_live(path):
                raise


def _trials(space: ScheduleSpace, known: Sequence[tuple[str, float | None]]) -> list[Trial]:
    """What was measured, as points of the space; of what others wrote in another order the fastest."""
    found = {k: space.locate(k) for k, _ in known}
    others = sorted((t, k) for k, t in known if t is not None and found[k] is None)[:_RESPELT]
    found |= {k: same_as(space, k) for _, k in others}
    return [Trial(p, t) for k, t in known if (p := found[k]) is not None]


def _start(request: Request, space: ScheduleSpace, measurer: Measurer, home: Path, on_event: Listener) -> Start:
    """Earlier trials of this op on this device under this protocol, and the winners of the nearest other problems.

    A fresh run knows neither; the stored winner races in it too.
    """
    device = measurer.device
    if why := try_ingest(home):
        on_event(Note(why))
    with Dataset.of(home, PATIENCE_S).snapshot() as snapshot:
        rows = snapshot.rows(op=request.op.key, target=request.target.name, origins=("measured", "imported"))
        winners = fastest(snapshot, request.target, request.threads)
    here = [r for r in rows if r.device.product == device.product and r.protocol.threads == request.threads]
    here = [r for r in here if space.sums in (None, sums_of(r.schedule))]
    stored = find_winner([r for r in here if r.origin == "measured"], device.product)
    best = (stored.schedule,) if stored else ()
    if request.fresh:
        return Start(best=best)
    known: dict[str, float | None] = {}
    best_first = by_schedule(here)
    checked = set(sorted(best_first, key=best_first.__getitem__)[:_MOST_CHECKED])
    for r in here:
        if _is_due_again(r, measurer, checked):
            continue
        # The least time: what disturbs a measurement makes it slower.
        known[r.schedule] = min((x for x in (known.get(r.schedule), r.time_us) if x is not None), default=None)
    found = list(islice(carried_winners(space, winners), _NEAREST))
    first = tuple(p.key for _, p in found)
    if first and not known:
        near = len({other for other, _ in found})
        on_event(Note(f"starting from {len(first)} schedules after the winners of {near} near problems"))
    return Start(first, tuple(list(known.items())[-_MOST_KNOWN:]), best=best)


def _elsewhere(request: Request, space: ScheduleSpace, device: Device, home: Path) -> tuple[str, ...]:
    """The winners of this problem and the nearest others on other cards, or on other processors; the nearest first."""
    with Dataset.of(home, PATIENCE_S).snapshot() as snapshot:
        winners = snapshot.query(
            "SELECT target, product, op, arg_min(schedule, list_median(samples_us)) FROM measurement "
            "WHERE status = 'ok' GROUP BY target, product, op ORDER BY target, product, op"
        ).rows
    cards = [x for x in winners if (x[0], x[1]) != (device.target, device.product)]
    kept = [(str(op), str(schedule)) for target, _, op, schedule in cards if (target == "cpu") == request.target.is_cpu]
    same = (carried(space, space.program, schedule) for op, schedule in kept if op == request.op.key)
    points = (*(p for p in same if p), *(p for _, p in islice(carried_winners(space, kept), _NEAREST)))
    return tuple(dict.fromkeys(p.key for p in points))[:_NEAREST]


def _is_due_again(row: Measurement, measurer: Measurer, checked: Collection[str]) -> bool:
    """Whether a schedule deserves another try: it generates another source today, or failed and was not to blame.

    checked: of those that did not fail the ones that are worth the time to generate their source
    """
    if row.status in ("device_lost", PASSED_OVER):  # it is not known to be guilty, or slow
        return True
    if row.status == "ok" and row.schedule not in checked:
        return False
    try:
        return source_mark(measurer.source_digest(Candidate(row.op, row.schedule))) != row.source_digest
    except (PlanError, UsageError):
        return False  # refused still


def fastest(snapshot: Snapshot, target: Target, threads: int) -> tuple[tuple[str, str], ...]:
    """(op, its schedule with the least time) of every op that was measured on so many threads of the target: what is best
    on one divides nothing among several."""
    rows = snapshot.query(
        "SELECT op, arg_min(schedule, list_median(samples_us)) FROM measurement "
        f"WHERE status = 'ok' AND target = '{target.name}' AND threads = {threads} GROUP BY op ORDER BY op"
    ).rows
    return tuple((str(op), str(schedule)) for op, schedule in rows)


def at_stake(target: Target, threads: int, home: Path) -> Callable[[Op], float]:
    """Microseconds that a search of an op may still gain: what its best stored time, or of one that was never measured a
    plain schedule, takes beyond the roofline. The op with the most is the most valuable to tune.
    """
    dataset = Dataset.of(home)
    dataset.ingest()
    with dataset.snapshot() as snapshot:
        rows = snapshot.query(
            "SELECT op, min(list_median(samples_us)) FROM measurement WHERE status = 'ok' AND origin = 'measured' "
            f"AND target = '{target.name}' AND threads = {threads} GROUP BY op"
        ).rows
    known = {str(op): float(str(us)) for op, us in rows}

    def stake_us(op: Op) -> float:
        roof_us = roofline_us(op.work(), target, op.program().dtype, threads).time_us
        return known.get(op.key, _PLAIN * roof_us) - roof_us

    return stake_us


def load_model(choice: str | None, target: Target, home: Path, on_event: Listener = ignore) -> CostModel | None:
    """The model that leads: the one deployed for the target; None for `roofline`, or without a usable one.

    A deployed model that is damaged, or of other features, is said and left out. One that the user named raises DataError
    or StaleModel then, and UsageError when there is none of that name.
    """
    if choice == "roofline":
        return None
    if choice is not None and not found(Path(choice)).is_file():
        raise UsageError(f"model {choice!r} is no file; name a model's .txt.xz, or roofline to search without one")
    try:
        return find(target.name, model_roots(home)) if choice is None else CostModel.load(Path(choice))
    except (StaleModel, DataError) as e:
        if choice is not None:
            raise
        on_event(Note(str(e)))
        return None
