"""What Emmy does, as functions that return typed results: the surface that `import emmy` and the command line share.

Nothing here prints. Rows that a call measures go through a journal into the dataset below `home`, whatever the call is for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import overload

from emmy import __version__, config
from emmy.benchmark.cases import bench_cases
from emmy.benchmark.lanes import LANES, Lane
from emmy.benchmark.results import Results
from emmy.benchmark.sitting import BenchSitting, Setting, Told
from emmy.codegen.files import alone_in
from emmy.collection import Collection, requests
from emmy.collection import collect as collect_rows
from emmy.costmodel.dataset import Dataset
from emmy.costmodel.doctor import Diagnosis, diagnose, why_stale
from emmy.costmodel.recording import recording
from emmy.costmodel.train import Progress
from emmy.costmodel.upkeep import Upkeep
from emmy.costmodels import (
    costmodel_curve,
    costmodel_versions,
    evaluate_across_gpus,
    evaluate_costmodel,
    rollback_costmodel,
    train_costmodel,
)
from emmy.emulation import emulated
from emmy.errors import NoSuchDevice, UsageError, WrongAnswer
from emmy.explanation import Explanation
from emmy.explanation import explain as explain_op
from emmy.fleet.tuning import FleetResult
from emmy.fleet.tuning import tune_fleet as fleet_tune
from emmy.ir.ops import Op, parse_op
from emmy.ir.roofline import roofline_us
from emmy.ir.schedule import replay
from emmy.ir.target import Target, load_target
from emmy.lookup import as_op, export, load, prediction, serving, show, subject, subjects, table, winner
from emmy.measure.factory import measurer_for
from emmy.measure.measurer import Measurer
from emmy.pack import Built, Pack
from emmy.packing import offers
from emmy.records import Candidate, Measurement
from emmy.search.budget import Budget, parse_budget
from emmy.search.events import Listener, Note, ignore
from emmy.search.finished import Finished
from emmy.search.predictions import Prediction, find_prediction
from emmy.search.ranges import RangeWinner
from emmy.search.registry import check_strategy
from emmy.search.session import load_model
from emmy.search.sitting import Sitting
from emmy.search.tuner import Stop, TuneResult
from emmy.tuning import Terms, Tuning
from emmy.winner import best_first, by_schedule, find_winner, measured_rows
from emmy.workloads import op_texts

__all__ = [
    "BenchResult", "VerifyReport", "as_op", "bench", "bench_kernels", "build_pack", "collect", "costmodel_curve",
    "costmodel_versions",
    "diagnose_data", "emulated", "evaluate_across_gpus", "evaluate_costmodel", "expand", "explain", "export", "load", "prediction",
    "rollback_costmodel", "roof_us", "serving", "show", "subject", "subjects", "table", "train_costmodel", "tune",
    "tune_fleet", "verify", "winner", "with_pdl",
]  # fmt: skip


def expand(names: str | Sequence[str]) -> tuple[Op, ...]:
    """The ops that texts and names of sets (`@gemma4-12b`) stand for, each once. Raises UsageError for an unknown one."""
    listed = (names,) if isinstance(names, str) else names
    texts = (text for name in listed for text in (op_texts(name) if name.startswith("@") else (name,)))
    return tuple({op.key: op for op in map(parse_op, texts)}.values())


def roof_us(op: Op | str, gpu: str, threads: int) -> float:
    """The least time the op can take on `threads` of the target, in microseconds."""
    op = as_op(op)
    return roofline_us(op.work(), load_target(gpu), op.program().dtype, threads).time_us


# ---------------------------------------------------------------- tune
# fmt: off
@overload
def tune(  # type: ignore[overload-overlap]  # a text is a Sequence too; it means one op
    op: Op | str, *, gpu: str = ..., threads: int = ..., budget: Budget | str = ..., strategy: str = ...,
    model: str | None = ..., seed: int = ..., on_event: Listener = ..., fresh: bool = ..., wait: bool = ...,
    home: Path | None = ..., measurer: Measurer | None = ..., stop: Stop | None = ..., by_range: bool = ...,
    ahead: int = ..., searches: int = ...,
) -> TuneResult: ...
@overload
def tune(
    op: Sequence[Op | str], *, gpu: str = ..., threads: int = ..., budget: Budget | str = ..., strategy: str = ...,
    model: str | None = ..., seed: int = ..., on_event: Listener = ..., fresh: bool = ..., wait: bool = ...,
    home: Path | None = ..., measurer: Measurer | None = ..., stop: Stop | None = ..., by_range: bool = ...,
    ahead: int = ..., searches: int = ...,
) -> tuple[TuneResult, ...]: ...
# fmt: on
def tune(
    op: Op | str | Sequence[Op | str],
    *,
    gpu: str = "cpu",
    threads: int = 1,
    budget: Budget | str = "60s",
    strategy: str = "auto",
    model: str | None = None,
    seed: int = 0,
    on_event: Listener = ignore,
    fresh: bool = False,
    wait: bool = False,
    home: Path | None = None,
    measurer: Measurer | None = None,
    stop: Stop | None = None,
    by_range: bool = True,
    ahead: int = 0,
    searches: int = 1,
) -> TuneResult | tuple[TuneResult, ...]:
    """The fastest schedule found for an op; for a sequence of ops one result each, the most valuable first (`at_stake`), open sizes last.

    Where the GPU is not here nothing is measured: `best` is None, and `predicted` is the schedule that a model and the
    card's roofline rank first among those that compile without spills and that the emulator finds right.

    budget:   of each op: "60s", "300" trials, "patience=80", or several; a run that was interrupted goes on where it ended
    by_range: an op whose size is open until run time gets a table of schedules by ranges of it (`TuneResult.ranges`), the
              budget being divided among the ranges; False = one schedule for all sizes
    model:    a model's file, "roofline" for none, or None for the one deployed for the target; for a GPU that is not here
              and has none, that of the nearest card that has one
    fresh:    begin anew: neither resume nor use what earlier runs measured of the op
    wait:     queue behind whoever measures on the device, instead of raising DeviceBusy
    measurer: who measures, instead of the device that `gpu` names; it stays open
    stop:     set `stop.asked` from elsewhere to end after the measurement in flight
    ahead:    batches of proposals that may be out at once, which the course of a run depends on; 0 = one for one device, more
              for several (`docs/fleet.md`)
    searches: ops that are searched at a time, each in a process of its own that asks this one to measure: a device serves
              several searches faster than one, and a GPU that is not here bounds none of them. On a CPU they would disturb
              what is timed. `on_event` is called by one thread at a time, and events of several ops mingle; a `measurer` is
              asked by several threads at once

    Raises UsageError, NoSuchDevice (of a CPU, or an unknown name), DeviceBusy or StaleModel.
    """
    alone = isinstance(op, Op | str)
    check_strategy(strategy)
    ops, limits, target = _asked(op, budget, gpu)
    home, stop = home or config.home(), stop or Stop()
    terms = Terms(limits, strategy, seed, threads, fresh, by_range, ahead, model, searches)
    tuning = Tuning(target, ops, terms, home, on_event, stop)
    with ExitStack() as held:
        try:
            here = held.enter_context(device(target, threads, wait=wait, measurer=measurer))
        except NoSuchDevice as absent:
            if target.is_cpu:
                raise
            on_event(Note(f"{absent} What follows is predicted, not measured."))
            results = tuning.on(None)
        else:
            results = tuning.on(here, alone)
    return results[0] if alone else tuple(results)


def tune_fleet(
    ops: Op | str | Sequence[Op | str],
    *,
    gpu: str = "all",
    fleet: str | None = None,
    threads: int = 1,
    budget: Budget | str = "60s",
    strategy: str = "auto",
    model: str | None = None,
    seed: int = 0,
    on_event: Listener = ignore,
    fresh: bool = False,
    wait: bool = False,
    home: Path | None = None,
    stop: Stop | None = None,
    by_range: bool = True,
    ahead: int = 0,
    searches: int = 1,
    metrics_port: int = 0,
    lost_after_s: float = 300.0,
) -> FleetResult:
    """The fastest schedules of the ops for each kind of device, several devices measuring at once: those of this machine, or
    with `fleet`, an address that Ray takes, those of a cluster (`docs/fleet.md`).

    gpu:          "all" kinds, or some, with commas
    on_event:     called by one thread at a time; events of several searches mingle
    metrics_port: where Prometheus may read how it goes; 0 = nowhere
    lost_after_s: until a device of a cluster that does not answer is given up, and what it had is measured elsewhere

    The others are as in `tune`. Raises as `tune` does; an error of one kind alone is told in the result.
    """
    listed = [as_op(o) for o in ((ops,) if isinstance(ops, Op | str) else ops)]
    limits = budget if isinstance(budget, Budget) else parse_budget(budget)
    return fleet_tune(
        listed,
        Terms(limits, strategy, seed, threads, fresh, by_range, ahead, model, searches),
        address=fleet,
        targets=() if gpu == "all" else tuple(gpu.split(",")),
        on_event=on_event,
        wait=wait,
        home=home,
        stop=stop,
        metrics_port=metrics_port,
        patience_s=lost_after_s,
    )


def collect(
    op: Op | str | Sequence[Op | str],
    *,
    gpu: str = "cpu",
    threads: int = 1,
    budget: Budget | str = "10m",
    model: str | None = None,
    seed: int = 0,
    on_event: Listener = ignore,
    fresh: bool = False,
    wait: bool = False,
    home: Path | None = None,
    measurer: Measurer | None = None,
    stop: Stop | None = None,
) -> Collection:
    """Rows that teach a cost model, measured of some ops (`emmy.search.collect` says which); no winner is looked for.

    budget: of all ops together, dealt equally to their kinds; the other arguments are those of `tune`

    Raises UsageError, DeviceBusy or StaleModel; NoSuchDevice where the target cannot be measured.
    """
    ops, limits, target = _asked(op, budget, gpu)
    home, stop = home or config.home(), stop or Stop()
    asked = requests(ops, limits, target, seed, threads, fresh)
    leader = load_model(model, target, home, on_event)
    with device(target, threads, wait=wait, measurer=measurer) as here:
        upkeep = Upkeep(home, target.name) if model is None and len(asked) > 1 else None
        finished = Finished.of(asked, here.device.product, home, __version__)
        sitting = Sitting(asked, here, home, __version__, leader, upkeep, finished, on_event, stop)
        if asked:
            on_event(finished.plan(asked))
        collected = collect_rows(asked, sitting.run)
        if not collected.interrupted:
            finished.forget()
        return collected


def _asked(op: Op | str | Sequence[Op | str], budget: Budget | str, gpu: str) -> tuple[list[Op], Budget, Target]:
    """What is asked for, read. Raises UsageError or NoSuchDevice."""
    ops = [as_op(o) for o in ((op,) if isinstance(op, Op | str) else op)]
    return ops, budget if isinstance(budget, Budget) else parse_budget(budget), load_target(gpu)


@contextmanager
def device(target: Target, threads: int, *, wait: bool = False, measurer: Measurer | None = None) -> Iterator[Measurer]:
    """Who measures on the target: `measurer`, or this machine's device, held until the end of the block.

    Raises NoSuchDevice when the target cannot be measured here, DeviceBusy when another process measures on it.
    """
    if measurer is not None:
        yield measurer
        return
    with measurer_for(target, threads, floor_us=lambda op: roof_us(op, target.name, threads), wait=wait) as here:
        yield here


# ---------------------------------------------------------------- look up, explain
def with_pdl(op: Op | str, schedule: str, *, gpu: str) -> str:
    """The schedule with every launch made early (`emmy.ir.moves.pdl`), for plans that are launched in a chain.


    Between its plans a chain may hold anything, as long as no launch in it writes an input that the op calls constant.
    Raises IllegalMove where launches cannot begin early.
    """
    target = load_target(gpu)
    launches = replay(as_op(op).program(), schedule, target).launches
    out = " ".join((schedule, *(f"{la.name}/pdl()" for la in launches if not la.early)))
    replay(as_op(op).program(), out, target)
    return out


def explain(
    op: Op | str, schedule: str | None = None, *, gpu: str = "cpu", threads: int = 1, home: Path | None = None
) -> Explanation:
    """Why the stored winner (or `schedule`) is as it is: what binds it, what each move brings, what was refused, what the
    model says.

    Raises UsageError for an op that a table serves, or the text of a table, naming its ranges: each is explained by itself.
    """
    op, home, target = as_op(op), home or config.home(), load_target(gpu)
    if ranges := table(op, schedule, gpu=gpu, threads=threads, home=home):
        raise UsageError(
            f"{op} on {gpu} is served by a table of {len(ranges)} ranges ({_named(ranges)}): name one, with its schedule"
        )
    rows = measured_rows(home, op.key, target, threads)
    pick = None if schedule is not None else find_prediction(home, op, target)
    return explain_op(op, target, threads, rows, load_model(None, target, home), pick, schedule)


def diagnose_data(dataset: Dataset, gpu: str | None = None) -> Diagnosis:
    """Rows that should not be believed, of one target or of all: also those whose schedule gives another source now."""
    dataset.ingest()
    with dataset.snapshot() as snapshot:
        return diagnose(snapshot, stale=why_stale, target=gpu)


# ---------------------------------------------------------------- measure again
@dataclass(frozen=True, slots=True)
class BenchResult:
    """`row` is the new measurement; `stored_us` the time on record, None for a schedule that has none.

    predicted: what was claimed of the schedule before the card was there, where it comes from that
    """

    row: Measurement
    stored_us: float | None
    roof_us: float
    predicted: Prediction | None = None


def _of_ranges(op: Op, gpu: str, threads: int, home: Path) -> str:
    """What is stored of the op's ranges instead, for a message."""
    ranges = table(op, gpu=gpu, threads=threads, home=home)
    return f" as one schedule, but of its ranges ({_named(ranges)}): name one" if ranges else ""


def _named(ranges: Sequence[RangeWinner]) -> str:
    return ", ".join(repr(w.op) for w in ranges)


def bench(
    op: Op | str,
    schedule: str | None = None,
    *,
    gpu: str = "cpu",
    threads: int = 1,
    rounds: int = 7,
    against: str = "",
    wait: bool = False,
    home: Path | None = None,
    measurer: Measurer | None = None,
) -> BenchResult:
    """The stored winner (or `schedule`, or what was predicted) measured again, in turns with the stock kernel.

    against: which stock kernel, one of `emmy.measure.rivals.RIVALS`; "" for the usual, which is eager torch where it is installed.

    A raced schedule is believed before one that was not. So a stored winner that was never raced is raced beside the one given.

    Raises UsageError when nothing is stored and no schedule given, NoSuchDevice where there is nothing to measure on,
    WrongAnswer when the kernel's answer is wrong.
    """
    op, home, target = as_op(op), home or config.home(), load_target(gpu)
    rows = measured_rows(home, op.key, target, threads)
    pick, best = None, find_winner(rows, target.product)
    if schedule is None:
        pick = None if best else find_prediction(home, op, target)
        if best is None and pick is None:
            if not target.is_cpu:
                with device(target, threads, wait=wait, measurer=measurer):
                    pass  # that the card is not here is the first thing to say
            raise UsageError(
                f"nothing is stored of {op} on {gpu} with --threads {threads}{_of_ranges(op, gpu, threads, home)}. Tune it: "
                f"`emmy tune {quote(op.key)} --gpu {gpu} --threads {threads}`, or name a schedule: --schedule '...'"
            )
        schedule = best.schedule if best else pick.schedule if pick else ""
    plan = replay(op.program(), schedule, target)  # refused before the device is taken
    if early := [la.name for la in plan.launches if la.early and not la.depends_on]:
        raise UsageError(
            f"{', '.join(early)} of {schedule!r} would begin before the launch before it has ended: back to back with itself "
            "its time is not the op's. Measure the schedule without pdl(), and with it in a chain (experiments/h200_chain.py)"
        )
    with (
        device(target, threads, wait=wait, measurer=measurer) as here,
        recording(home, "bench", op.key, gpu, __version__) as keep,
    ):
        rival = [best.schedule] if best and not best.raced and best.schedule != schedule else []
        row, *_ = [keep(r) for r in here.race([Candidate(op.key, s) for s in (schedule, *rival)], rounds, against)]
    if row.status == "correctness":
        raise WrongAnswer(f"{op}: {row.message}. Schedule: {schedule}")
    return BenchResult(row, by_schedule(rows).get(schedule), roof_us(op, gpu, threads), pick)


def bench_kernels(
    names: str | Sequence[str],
    out: Path | str,
    *,
    gpu: str = "cpu",
    threads: int = 1,
    lanes: Sequence[Lane] = LANES,
    seconds: float | None = None,
    rounds: int = 7,
    again: bool = False,
    compilers: int = 0,
    wait: bool = False,
    home: Path | None = None,
    measurer: Measurer | None = None,
    told: Told = lambda what, done, of, rows: None,
    stop: Stop | None = None,
) -> tuple[Results, int]:
    """Every case of ops and sets with all `lanes` in turns: what the folder `out` holds then, and how many cases are left.

    What an earlier sitting measured there on this product stays, and the rest is measured, the most valuable first; for
    `seconds`, `again` and `compilers` see `emmy.benchmark.sitting.Setting`. Rows of Emmy's lanes enter the dataset too.

    Raises UsageError, NoSuchDevice or DeviceBusy; FolderBusy when another process measures into the folder.
    """
    cases, target = bench_cases((names,) if isinstance(names, str) else names), load_target(gpu)
    with device(target, threads, wait=wait, measurer=measurer) as here:
        setting = Setting(
            target, threads, tuple(lanes), home or config.home(), __version__, seconds, rounds, again, compilers
        )
        with alone_in(Path(out)):
            results = Results.open(Path(out))
            try:
                _, left = BenchSitting(setting, cases, here, results, told, stop or Stop()).go()
            finally:
                results.write_parquet()
    return results, left


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """New measurements of the best stored schedules. A row whose status is "correctness" is a wrong answer."""

    rows: tuple[Measurement, ...]

    @property
    def wrong(self) -> tuple[Measurement, ...]:
        return tuple(r for r in self.rows if r.status == "correctness")

    @property
    def failed(self) -> tuple[Measurement, ...]:
        """Those without an answer that could be checked. A row that is `implausible` had one, and it was right."""
        return tuple(r for r in self.rows if r.status not in ("ok", "implausible", "correctness"))

    @property
    def unbelieved(self) -> tuple[Measurement, ...]:
        """Those that answered right in less time than the device's peaks allow: kept as evidence, chosen by nothing."""
        return tuple(r for r in self.rows if r.status == "implausible")


def verify(
    op: Op | str | Sequence[str] | None = None,
    *,
    gpu: str = "cpu",
    threads: int = 1,
    top: int = 5,
    wait: bool = False,
    home: Path | None = None,
    measurer: Measurer | None = None,
    on_progress: Progress = lambda what, done, of: None,
) -> VerifyReport:
    """The `top` best stored schedules of every op (or of `op`, or those of a set), compiled and checked against the reference once more.

    What `load` takes comes first; of an op that a table serves, those of each of its ranges, the table's own first.
    """
    home, target, rows = home or config.home(), load_target(gpu), list[Measurement]()
    with device(target, threads, wait=wait, measurer=measurer) as here:  # that it is not here is the first thing to say
        candidates = _best_stored(op, gpu, threads, top, home)
        named = ",".join(dict.fromkeys(c.op for c in candidates))
        with recording(home, "verify", named, gpu, __version__) as keep:
            for row in here.stream(candidates):
                rows.append(keep(row))
                on_progress(f"checking on {gpu}", len(rows), len(candidates))
    return VerifyReport(tuple(rows))


def _best_stored(
    op: Op | str | Sequence[str] | None, gpu: str, threads: int, top: int, home: Path
) -> tuple[Candidate, ...]:
    dataset = Dataset.of(home)
    dataset.ingest()
    stored = dataset.rows(target=gpu, statuses=("ok",), origins=("measured",))
    asked: list[Candidate] = []
    names = dict.fromkeys(r.op for r in stored)
    if op:
        named = (op,) if isinstance(op, Op) else expand(op)
        ranges = [w for o in named for w in table(o, gpu=gpu, threads=threads, home=home)]
        names = dict.fromkeys((*(o.key for o in named), *(w.op for w in ranges)))
        asked = [Candidate(w.op, w.range.schedule) for w in ranges]
    rows: dict[str, list[Measurement]] = {name: [] for name in names}
    for r in stored:
        if r.op in rows:
            rows[r.op].append(r)
    asked += [
        Candidate(name, s) for name, of in rows.items() for s in best_first(of, load_target(gpu).product, threads)[:top]
    ]
    if not asked:
        raise UsageError(
            f"nothing is stored on {gpu}{f' of {_asked_for(op)}' if op else ''}. Tune something: `emmy tune OP`"
        )
    return tuple(dict.fromkeys(asked))


def _asked_for(ops: Op | str | Sequence[str]) -> str:
    return str(ops) if isinstance(ops, Op | str) else ", ".join(ops)


# ---------------------------------------------------------------- ship
def build_pack(
    ops: Op | str | Sequence[Op | str],
    path: Path | str,
    *,
    gpu: str = "cpu",
    threads: int = 1,
    workers: int = 0,
    home: Path | None = None,
    on_progress: Progress = lambda what, done, of: None,
) -> Built:
    """Writes a pack of what is stored of the ops and sets: measured wins, and of a card with no rows what is predicted.

    workers: threads that compile; 0 = one a core
    Raises UsageError when nothing is known of any of them, CompileError without a compiler.
    """
    listed = (ops,) if isinstance(ops, Op | str) else ops
    named = {op.key: op for o in listed for op in (expand(o) if isinstance(o, str) else (o,))}
    target = load_target(gpu)
    found = offers(tuple(named.values()), target, home or config.home(), threads)
    return Pack.build(found, path, target, workers=workers, on_progress=on_progress)
