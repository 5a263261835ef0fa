"""What is stored of an op, and the op under it: as schedules, as a table by ranges, as text, ready to run. Measures nothing."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from functools import cache
from itertools import chain, islice
from pathlib import Path
from shlex import quote

from emmy import config
from emmy.codegen.build import plan_source
from emmy.codegen.export import Part
from emmy.costmodel.dataset import Dataset
from emmy.errors import PlanError, UsageError
from emmy.exporting import ExportedFiles, export_files
from emmy.ir.dispatch import Dispatch, is_dispatch, parse_dispatch
from emmy.ir.ops import Op, parse_op
from emmy.ir.schedule import replay, sums_of
from emmy.ir.target import Target, load_target
from emmy.levels import LEVELS, Level, LevelName, Origin, Subject, describe, example
from emmy.loading import load_plan, load_table
from emmy.ranged import find_table
from emmy.runtime.launcher import LoadedPlan
from emmy.search.near import carried_winners, distance, near_winners
from emmy.search.predictions import Prediction, find_prediction, has_stale_prediction
from emmy.search.ranges import RangeWinner, dispatch_of
from emmy.search.schedule_space import ScheduleSpace
from emmy.search.session import fastest
from emmy.winner import Winner, find_winner, measured_rows, sums_wanted

log = logging.getLogger("emmy.lookup")
_NEAR = 4.0  # of sizes whose ratios multiply to more than 16, a winner is no better guess than the default


def as_op(op: Op | str) -> Op:
    return parse_op(op) if isinstance(op, str) else op


def winner(op: Op | str, *, gpu: str = "cpu", threads: int = 1, home: Path | None = None) -> Winner | None:
    """The best schedule stored for the op on this machine's device; None when nothing right was measured of it."""
    target = load_target(gpu)
    return find_winner(measured_rows(home or config.home(), as_op(op).key, target, threads), target.product)


def prediction(op: Op | str, *, gpu: str, home: Path | None = None) -> Prediction | None:
    """The schedule that `tune` predicted to be the best on a card that was not there; None without one that holds still."""
    return find_prediction(home or config.home(), as_op(op), load_target(gpu))


def subject(
    op: Op | str, schedule: str | None = None, *, gpu: str = "cpu", threads: int = 1, home: Path | None = None
) -> Subject:
    """The op under `schedule`: by default the stored winner's, else the predicted one, else what a search measures first."""
    op, target = as_op(op), load_target(gpu)
    origin: Origin = "given"
    note = "as given"
    if schedule is None:
        if (best := winner(op, gpu=gpu, threads=threads, home=home)) is not None:
            schedule, origin, note = best.schedule, "measured", "the stored winner"
        elif (pick := prediction(op, gpu=gpu, home=home)) is not None:
            schedule, origin, note = pick.schedule, "predicted", str(pick)
        else:
            schedule, origin = ScheduleSpace(op, target, threads, sums_wanted()).default().key, "default"
            stale = has_stale_prediction(home or config.home(), op, target)
            why = (
                "the schedule predicted for it makes another source now: tune again"
                if stale
                else "nothing is stored for it"
            )
            note = f"the default: {why}"
    return Subject(op.key, op.program(), schedule, target, op, note, threads, origin)


def near_subjects(
    op: Op | str, *, gpu: str = "cpu", threads: int = 1, home: Path | None = None, most: int = 6
) -> tuple[Subject, ...]:
    """The op under winners of the nearest problems that were tuned, carried over to it: `most` of them, the nearest first.

    They were not measured on this op; on one of nearly its sizes they are mostly better than the default.
    """
    op, target = as_op(op), load_target(gpu)
    dataset = Dataset.of(home or config.home())
    dataset.ingest()
    with dataset.snapshot() as snapshot:
        winners = fastest(snapshot, target, threads)
    out: list[Subject] = []
    space = ScheduleSpace(op, target, threads, sums_wanted())
    for other, schedule in near_winners(op, [w for w in winners if sums_of(w[1]) in ("f32", sums_wanted())]):
        if len(out) == most or (distance(op, other) or 0.0) > _NEAR:
            break
        points = (p.key for _, p in carried_winners(space, [(other, schedule)]))
        made = (_made(op, text, target, f"the winner of {other}", threads) for text in chain((schedule,), points))
        out += islice((s for s in made if s), 1)
    return tuple(out)


def _made(op: Op, schedule: str, target: Target, note: str, threads: int) -> Subject | None:
    """The op under a schedule of another problem; None where that is refused, or no code is generated for it."""
    s = Subject(op.key, op.program(), schedule, target, op, note, threads, "near")
    try:
        plan_source(s.plan, target)
    except (PlanError, UsageError):
        return None
    return s


def table(
    op: Op | str, text: str | None = None, *, gpu: str = "cpu", threads: int = 1, home: Path | None = None
) -> tuple[RangeWinner, ...]:
    """The ranges of the op's stored table, ascending, or those of a table's text; () where one schedule serves all sizes.

    Each has its sizes and schedule (`range`), the op of those sizes, which `explain` and `bench` take, and the row or the
    prediction that it rests on; of a text neither. A stored table follows from all rows: what is measured later may change it.

    Raises UsageError for a text that is no table, or one of other sizes than the op's, and IllegalMove, naming the range,
    for one with a schedule that does not replay there.
    """
    op, target = as_op(op), load_target(gpu)
    if text is None:
        found = find_table(home or config.home(), op, target, threads)
        return found if len(found) > 1 else ()
    if not is_dispatch(text):
        return ()
    given = parse_dispatch(text)
    deque(given.plans(op.program(), target), maxlen=0)
    symbol = given.symbol
    return tuple(RangeWinner(symbol, r, op.within(symbol, r.lo, r.hi).key) for r in given.ranges)


def serving(op: Op | str, *, gpu: str = "cpu", threads: int = 1, home: Path | None = None) -> str | None:
    """What `load` takes of what was measured: a table's text or a schedule's; None where nothing is stored."""
    best = winner(op, gpu=gpu, threads=threads, home=home)
    found = dispatch_of(table(op, gpu=gpu, threads=threads, home=home))
    return str(found) if found else best.schedule if best else None


def subjects(
    op: Op | str, schedule: str | None = None, *, gpu: str = "cpu", threads: int = 1, home: Path | None = None
) -> tuple[Subject, ...]:
    """The op as `subject` gives it; where a table serves it (see `table`), each of its ranges."""
    ranges = table(op, schedule, gpu=gpu, threads=threads, home=home)
    if not ranges:
        return (subject(op, schedule, gpu=gpu, threads=threads, home=home),)
    target, out = load_target(gpu), []
    for w in ranges:
        part = parse_op(w.op)
        origin: Origin = "measured" if w.row else "predicted" if w.predicted else "given"
        note = str(w.predicted) if w.predicted else f"{origin}, for {w.symbol} {w.range.sizes}"
        out.append(Subject(part.key, part.program(), w.range.schedule, target, part, note, threads, origin))
    return tuple(out)


def show(
    op: Op | str,
    schedule: str | None = None,
    *,
    gpu: str = "cpu",
    threads: int = 1,
    levels: Sequence[LevelName] = LEVELS,
    home: Path | None = None,
) -> tuple[Level, ...]:
    """The op's levels as text under `schedule` (see `subjects`; of a table, those of each range in turn).

    `plan:NAME` names one of the five worked plans.
    """
    if isinstance(op, str) and op.startswith("plan:"):
        return describe(example(op.removeprefix("plan:")), levels)
    found = subjects(op, schedule, gpu=gpu, threads=threads, home=home)
    return tuple(level for s in found for level in describe(s, levels))


def load(
    op: Op | str,
    schedule: str | None = None,
    *,
    gpu: str = "cpu",
    threads: int = 1,
    home: Path | None = None,
    strict: bool = False,
) -> LoadedPlan:
    """The op ready to run on arrays of its sizes, under `schedule`, a table's text, or what is stored (see `subjects`).

    Of a table every run takes the plan whose range holds the size; the choice is made in C++. Arrays are in storage form
    (`emmy.ir.dtype.encode`), on a GPU addresses in its memory. `threads` says whose winners: it is given to `run` again.

    Of an op that was never tuned it is the schedule that a search measures first, which may be many times slower than what
    a search finds: a warning is logged, once for each op; with `strict` UsageError is raised instead.
    """
    op, target = as_op(op), load_target(gpu)
    if ranges := table(op, schedule, gpu=gpu, threads=threads, home=home):
        return load_table(op, Dispatch(ranges[0].symbol, tuple(w.range for w in ranges)), target)
    found = subject(op, schedule, gpu=gpu, threads=threads, home=home)
    if found.origin == "default":
        where = f"--threads {threads}" if target.is_cpu else f"--gpu {gpu}"
        why = f"{op} on {gpu}: {found.note.removeprefix('the default: ')}. Tune it: `emmy tune {quote(op.key)} {where}`"
        if strict:
            raise UsageError(f"{why}, or load the default schedule: strict=False")
        _warn(f"{why}; the default schedule is loaded, which may be many times slower")
    return load_plan(op, found.schedule, target)


@cache
def _warn(text: str) -> None:
    """Logged once: a caller may load the same op for each of its layers."""
    log.warning(text)


def export(
    op: Op | str,
    schedule: str | None = None,
    *,
    gpu: str = "cpu",
    threads: int = 1,
    out: Path | str,
    name: str | None = None,
    data: bool = False,
    home: Path | None = None,
) -> ExportedFiles:
    """The op as source that needs no Emmy, in the folder `out`: kernels, a launcher, a header, a main that checks it, a README.

    schedule: as `load` takes it; of a table the launcher chooses the plan whose range holds the size
    name:     of the function; by default made of the op's key
    data:     also inputs and float64 answers for the main, of an open size at its upper end

    The folder is made, is empty, or holds an earlier export of the same name, which is replaced.
    Raises UsageError, IllegalMove, or PlanError when no code is generated for the plan.
    """
    if not str(out):
        raise UsageError("the folder's name is empty; '.' is the one you are in")
    op, target = as_op(op), load_target(gpu)
    program = op.program()
    if ranges := table(op, schedule, gpu=gpu, threads=threads, home=home):
        symbol, ends = ranges[0].symbol, [(w.range, program.within(w.symbol, w.range.lo, w.range.hi)) for w in ranges]
        parts = [Part(replay(part, r.schedule, target), r.schedule, (r.lo, r.hi)) for r, part in ends]
        return export_files(op, parts, target, Path(out), name, symbol, data=data)
    text = subject(op, schedule, gpu=gpu, threads=threads, home=home).schedule
    return export_files(op, [Part(replay(program, text, target), text)], target, Path(out), name, data=data)
