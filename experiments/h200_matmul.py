"""Tunes many matmuls on one GPU within a time limit and writes the rows, a table of winners against cuBLAS, and a log.

    python experiments/h200_matmul.py --out OUT --seconds 500

One process holds the GPU; a few others search, one op each at a time, and ask it through pipes (`emmy.measure.served`), so
that searching, compiling and measuring go on side by side. Each op is searched twice: at random, which is what a cost model
learns from, then by evolution from what is known; then the best five are raced against torch (cuBLAS). Rows are journalled
as they come below --work, where the same command goes on after an interruption. With --strategy another search than
evolution follows, with --model one led by a model's file. OUT gets few and small files:

    summary.md summary.jsonl log.txt    journals.tar.gz, made anew every minute    rows.tar.gz, a shard folder, at the end
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import queue
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from emmy import api, config
from emmy.costmodel.dataset import Dataset
from emmy.costmodel.exchange import export_shard
from emmy.ir.target import load_target
from emmy.measure.journal import Journal, closed_journals, is_live, open_journals
from emmy.measure.measurer import Heat, Look, Measurer
from emmy.measure.served import Served, ServedMeasurer, Turns
from emmy.records import Candidate, Device, Measurement
from emmy.search.tuner import TuneResult
from emmy.workloads import op_texts

log = logging.getLogger("experiment")
LAST_S = 25.0  # kept for closing journals, loading them, the shard and the archive
RACE_S = 8.0  # kept for an op's race
LEAST_SEARCH_S = 10.0
# Searches side by side, each with a thread a core for its small matrices, hold each other and the compilers up by minutes.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
LOSES_WORKER = ("did not come back", "the device gave up", "ended the worker", "SIG")  # how such rows' messages begin

# Projections of one model at decode, mixed and prefill widths: (M, N, K); both weight layouts occur in the catalogue.
SHAPES = [
    (m, n, k)
    for m in (1, 8, 16, 32, 64, 256, 512, 2048, 4096)
    for n, k in (
        (4096, 3840),
        (2048, 3840),
        (3840, 4096),
        (8192, 3840),
        (3840, 15360),
        (512, 3840),
        (3840, 8192),
        (8704, 3840),
    )
]


def default_ops() -> list[str]:
    """The catalogue's f16 matmuls of SHAPES, one layout each, widths mixed so that any beginning of the list has them all."""
    known = set(op_texts("@gemma4-12b"))
    found: dict[int, list[str]] = {}
    for i, (m, n, k) in enumerate(SHAPES):
        kn = f"matmul:{m}x{n}x{k}:f16"
        forms = [t for t in (kn, f"{kn}:nk") if t in known]
        if forms:
            found.setdefault(m, []).append(forms[i % len(forms)])
    longest = max(map(len, found.values()))
    return [column[i] for i in range(longest) for column in found.values() if i < len(column)]


# ---------------------------------------------------------------- one search, in a process of its own
class WithoutRace(Measurer):
    """Another measurer, except that races are not held."""

    def __init__(self, measurer: Measurer) -> None:
        self._measurer = measurer

    @property
    def device(self) -> Device:
        return self._measurer.device

    def stream(
        self, candidates: Sequence[Candidate], best_us: float | None = None, look: Look | None = None
    ) -> Iterator[Measurement]:
        yield from self._measurer.stream(candidates, best_us, look)

    def heat(self, op: str, schedules: Sequence[str], rivals: Sequence[str] = ("",), rounds: int = 7) -> Heat:
        return Heat((), ())


def search(args: argparse.Namespace) -> int:
    """Searches one op through the pipe that standard input and output are, and writes what came of it beside its rows."""
    answers, requests = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not speak to the device
    measurer = ServedMeasurer(answers, requests)
    begin_s, home = time.monotonic(), Path(args.work)
    share = {"random": args.random, args.strategy: args.trials - args.random}
    result: TuneResult | None = None
    for strategy, trials in share.items():
        left_s = args.seconds - (time.monotonic() - begin_s)
        if trials <= 0 or left_s < 1:
            continue
        seconds = left_s * (0.4 if strategy == "random" and args.trials > args.random else 1.0)
        last = strategy == list(share)[-1]
        result = api.tune(
            args.search,
            gpu=args.target,
            budget=f"{trials},{seconds:.1f}s",
            strategy=strategy,
            model=args.model,
            seed=args.seed,
            fresh=args.fresh,
            measurer=measurer if last else WithoutRace(measurer),
            home=home,
        )
    if result is not None:
        (home / "result.json").write_text(json.dumps(as_record(args.search, result)))
    return 0


def as_record(op: str, result: TuneResult) -> dict[str, object]:
    """The race's outcome, as one line of the summary."""
    best = result.best
    if best is None:
        return {"op": op, "schedule": None, "counts": dict(result.counts)}
    s = best.static
    return {
        "op": op,
        "schedule": best.schedule,
        "time_us": best.time_us,
        "warm_us": s.get("warm_us"),
        "sustained_us": s.get("sustained_us"),
        "baseline_us": best.baseline_us,
        "baseline_warm_us": s.get("baseline_warm_us"),
        "baseline_sustained_us": s.get("baseline_sustained_us"),
        "speedup": s.get("speedup"),
        "speedup_low": s.get("speedup_low"),
        "speedup_high": s.get("speedup_high"),
        "raced": result.raced,
        "default_us": result.default.time_us if result.default else None,
    }


# ---------------------------------------------------------------- the process that holds the device
@dataclass(slots=True)
class Tally:
    """What was measured so far."""

    begin_s: float = field(default_factory=time.monotonic)
    statuses: Counter[str] = field(default_factory=Counter)
    by_op: dict[str, Counter[str]] = field(default_factory=dict)
    faults: int = 0
    last_fault: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, row: Measurement) -> None:
        with self.lock:
            self.statuses[row.status] += 1
            self.by_op.setdefault(row.op, Counter())[row.status] += 1
            if row.status == "device_lost" or row.message.startswith(LOSES_WORKER):
                self.faults += 1
                self.last_fault = f"{row.op} {row.schedule}: {row.message}"
                log.warning("fault: %s", self.last_fault)

    def __str__(self) -> str:
        with self.lock:
            n, seconds = sum(self.statuses.values()), time.monotonic() - self.begin_s
            parts = ", ".join(f"{status} {count}" for status, count in self.statuses.most_common())
        return f"{n} rows in {seconds:.0f} s, {60 * n / seconds:.0f} a minute ({parts})"


class Counting(Measurer):
    """Another measurer whose rows are counted."""

    def __init__(self, measurer: Measurer, tally: Tally) -> None:
        self._measurer, self._tally = measurer, tally

    @property
    def device(self) -> Device:
        return self._measurer.device

    def stream(self, candidates: Sequence[Candidate], best_us: float | None = None) -> Iterator[Measurement]:
        for row in self._measurer.stream(candidates, best_us):
            self._tally.add(row)
            yield row

    def heat(self, op: str, schedules: Sequence[str], rivals: Sequence[str] = ("",), rounds: int = 7) -> Heat:
        found = self._measurer.heat(op, schedules, rivals, rounds)
        for row in found.rows:
            self._tally.add(row)
        return found


@dataclass(slots=True)
class Collection:
    """All searches of one call."""

    args: argparse.Namespace
    out: Path
    work: Path
    measurer: Measurer
    deadline_s: float
    tally: Tally
    todo: queue.SimpleQueue[str]
    n_todo: int
    seconds_of: dict[str, float] = field(default_factory=dict)
    children: set[subprocess.Popen[bytes]] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def lane(self) -> None:
        """Takes one op after another until there are none, or no time."""
        while True:
            try:
                op = self.todo.get_nowait()
            except queue.Empty:
                return
            with self.lock:
                waves = math.ceil(self.n_todo / self.args.searches)
                self.n_todo -= 1
            left_s = self.deadline_s - time.monotonic()
            seconds = left_s / max(1, waves) - RACE_S
            if seconds < LEAST_SEARCH_S:
                log.info("%s: no time left", op)
                continue
            begin_s = time.monotonic()
            try:
                self.search(op, seconds)
            except Exception:  # one search's failure is not the others'
                log.exception("%s: the search failed", op)
            with self.lock:
                self.seconds_of[op] = time.monotonic() - begin_s
                write_summary(self)

    def end(self, why: str) -> None:
        """Ends the searches at work; what they measured is kept."""
        if self.deadline_s:
            log.info("%s; searches still at work are ended, their rows are kept", why)
        self.deadline_s = 0.0
        for child in list(self.children):
            child.kill()

    def search(self, op: str, seconds: float) -> None:
        """Runs one search to its end and serves it meanwhile."""
        home = self.work / "runs" / slug(op)
        home.mkdir(parents=True, exist_ok=True)
        a = self.args
        with (home / "log.txt").open("ab") as errors:
            child = subprocess.Popen(
                [sys.executable, __file__, "--search", op, "--target", a.target, "--work", str(home), "--out", "-",
                 "--trials", str(a.trials), "--random", str(a.random), "--seconds", f"{seconds:.1f}", "--seed", str(a.seed),
                 "--strategy", a.strategy, "--model", a.model, *(["--fresh"] if a.fresh else [])],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=config.child_env(**ONE_THREAD),
            )  # fmt: skip
            self.children.add(child)
            assert child.stdin is not None and child.stdout is not None
            try:
                Served(self.measurer, child.stdout, child.stdin, Turns(lambda: False)).serve()
            except BrokenPipeError:
                pass
            finally:
                child.stdout.close()
                child.wait()
                self.children.discard(child)
        if child.returncode:
            tail = (home / "log.txt").read_text(errors="replace").strip().splitlines()[-1:]
            log.warning("%s: its search ended with %d: %s", op, child.returncode, tail)


def collect(args: argparse.Namespace) -> int:
    """Everything: searches in lanes, a heartbeat, and at the end the shard."""
    begin_s = time.monotonic()
    out, work = Path(args.out), Path(args.work)
    out.mkdir(parents=True, exist_ok=True)
    (work / "runs").mkdir(parents=True, exist_ok=True)
    set_up_logging(out / "log.txt")
    ops = [op.key for op in api.expand(args.ops or default_ops())][args.skip_ops :][: args.most_ops]
    todo: queue.SimpleQueue[str] = queue.SimpleQueue()
    waiting = [op for op in ops if not (work / "runs" / slug(op) / "result.json").exists()]
    for op in waiting:
        todo.put(op)
    log.info("%d ops, %d of them done before", len(ops), len(ops) - len(waiting))
    tally = Tally()
    with make_measurer(args) as device:
        log.info("measuring on %s", device.device)
        job = Collection(
            args, out, work, Counting(device, tally), begin_s + args.seconds - LAST_S, tally, todo, len(waiting)
        )
        with ThreadPoolExecutor(args.searches) as lanes:
            futures = [lanes.submit(job.lane) for _ in range(args.searches)]
            last_archive_s = time.monotonic()
            while not all(f.done() for f in futures):
                time.sleep(2)
                if time.monotonic() > job.deadline_s:  # again and again: a lane may just have started another
                    job.end("time is up")
                elif tally.faults > args.most_faults:
                    job.end(f"{tally.faults} candidates hung or broke the device's context: {tally.last_fault}")
                if time.monotonic() - last_archive_s > 60:
                    last_archive_s = time.monotonic()
                    log.info("%s", tally)
                    archive(out / "journals.tar.gz", work / "runs", "*.jsonl")
            for f in futures:
                f.result()
    log.info("%s", tally)
    write_summary(job)
    gather(args, out, work)
    log.info("done after %.0f s", time.monotonic() - begin_s)
    sys.stdout.write((out / "summary.md").read_text())
    return 0


def make_measurer(args: argparse.Namespace) -> Measurer:
    """Who measures: the target's device, or a formula (--fake) to try the script out."""
    target = load_target(args.target)
    if args.fake:
        from emmy.measure.fake import FakeMeasurer

        return FakeMeasurer(args.target, delay_s=0.01, fault_share=0.05, product=target.product)
    if target.is_cpu:
        from emmy.measure.factory import measurer_for

        return measurer_for(target)
    from emmy.measure.cuda import CudaMeasurer

    return CudaMeasurer(
        target, compile_workers=args.compilers, floor_us=lambda op: api.roof_us(op, args.target, 1), wait=False
    )


# ---------------------------------------------------------------- what is written
def gather(args: argparse.Namespace, out: Path, work: Path) -> None:
    """All runs' rows in one dataset, as a shard folder in an archive."""
    home = work / "home"
    shutil.rmtree(home, ignore_errors=True)  # made anew from the journals
    for run in sorted((work / "runs").iterdir()):
        for path in open_journals(run):
            if not is_live(path):
                Journal.reopen(path)[0].close()
        sources = (*closed_journals(run), *(run / "journal" / "ingested").glob("*.jsonl"))
        for path in sources:
            (home / "journal").mkdir(parents=True, exist_ok=True)
            shutil.copy(path, home / "journal" / path.name)
    if not (home / "journal").exists():
        log.warning("no rows at all")
        return
    dataset = Dataset(home)
    log.info("loaded: %s", dataset.ingest())
    report = export_shard(dataset, args.target, work / "shards", provenance=f"experiments/{Path(__file__).name}")
    log.info("exported: %s", report)
    archive(out / "rows.tar.gz", work / "shards", "*")
    archive(out / "journals.tar.gz", work / "runs", "*.jsonl")


def archive(path: Path, folder: Path, pattern: str) -> None:
    """The files below a folder that match, as one archive that is whole or absent."""
    temporary = path.with_name(f".{path.name}")
    with tarfile.open(temporary, "w:gz", compresslevel=6) as tar:
        for file in sorted(folder.rglob(pattern)):
            if file.is_file():
                tar.add(file, file.relative_to(folder))
    temporary.replace(path)


def write_summary(job: Collection) -> None:
    """summary.jsonl and summary.md, from the results there are."""
    records = []
    for file in sorted((job.work / "runs").glob("*/result.json")):
        record = json.loads(file.read_text())
        counts = job.tally.by_op.get(record["op"], Counter())
        seconds = job.seconds_of.get(record["op"])
        records.append({**record, "seconds": seconds, "rows": sum(counts.values()), "statuses": dict(counts)})
    (job.out / "summary.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (job.out / "summary.md").write_text(table(records, job))


def table(records: Sequence[dict[str, object]], job: Collection) -> str:
    """Winners against torch. Ratios: torch's time over Emmy's, round by round, above 1 where Emmy is faster."""
    lines = [
        f"Measured on {job.measurer.device}. {job.tally}.",
        "",
        "| op | torch cold us | Emmy cold us | ratio (range) | ratio warm | ratio sustained | rows | seconds | schedule |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in sorted(records, key=lambda r: str(r["op"])):
        warm, sustained = over(r, "baseline_warm_us", "warm_us"), over(r, "baseline_sustained_us", "sustained_us")
        band = f"{number(r, 'speedup', 3)} ({number(r, 'speedup_low', 3)}..{number(r, 'speedup_high', 3)})"
        lines.append(
            f"| {r['op']} | {number(r, 'baseline_us', 2)} | {number(r, 'time_us', 2)} | {band} | {warm} | {sustained} | "
            f"{r['rows']} | {number(r, 'seconds', 0)} | `{r['schedule']}` |"
        )
    ratios = [float(x) for r in records if isinstance(x := r.get("speedup"), float)]
    if ratios:
        geomean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        lines += ["", f"{len(ratios)} ops raced, geometric mean of the ratios {geomean:.3f}."]
    return "\n".join(lines) + "\n"


def number(record: dict[str, object], name: str, digits: int) -> str:
    x = record.get(name)
    return f"{x:.{digits}f}" if isinstance(x, float) else "-"


def over(record: dict[str, object], upper: str, lower: str) -> str:
    a, b = record.get(upper), record.get(lower)
    return f"{a / b:.3f}" if isinstance(a, float) and isinstance(b, float) else "-"


def slug(op: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in op)


def set_up_logging(path: Path) -> None:
    handlers: list[logging.Handler] = [logging.StreamHandler(), logging.FileHandler(path)]
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)8d ms %(message)s", handlers=handlers)
    logging.getLogger("emmy").setLevel(logging.WARNING)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder for the few files that are wanted")
    parser.add_argument("--work", default="/tmp/emmy-collect", help="folder for journals; what is there goes on")
    parser.add_argument("--seconds", type=float, default=500.0, help="for everything")
    parser.add_argument("--target", default="h200")
    parser.add_argument("--ops", nargs="*", help="ops or @SETs instead of the default list")
    parser.add_argument("--most-ops", type=int, default=24)
    parser.add_argument("--skip-ops", type=int, default=0, help="so many of the list's first ops are left out")
    parser.add_argument(
        "--most-faults", type=int, default=40, help="candidates that may cost a worker, until all is ended"
    )
    parser.add_argument("--trials", type=int, default=320, help="of each op, races excluded")
    parser.add_argument("--random", type=int, default=120, help="how many of them are drawn at random")
    parser.add_argument("--strategy", default="evolve", help="what follows the random ones")
    parser.add_argument("--model", default="roofline", help="a model's file that leads the search")
    parser.add_argument("--fresh", action="store_true", help="as if nothing had been measured; goes with --random 0")
    parser.add_argument("--searches", type=int, default=6, help="processes that search, one op each at a time")
    parser.add_argument("--compilers", type=int, default=0, help="processes that compile; 0 = one a core")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fake", action="store_true", help="times by a formula, to try the script out")
    parser.add_argument("--search", metavar="OP", help=argparse.SUPPRESS)
    args = parser.parse_args()
    return search(args) if args.search else collect(args)


if __name__ == "__main__":
    sys.exit(main())
