"""What would be loaded of some ops on some cards, found right without the cards: its schedule replays, NVRTC compiles its text
without spills, and the emulator runs that text of a smaller op (`emmy.search.emulator_check`). Times nothing.

A schedule is chosen as `load` chooses it: the stored winner, else the predicted one, else the default; of a table each range.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Literal

from emmy import config
from emmy.codegen import gpu_build
from emmy.codegen.build import plan_source
from emmy.codegen.emulator import SCHEDULES
from emmy.costmodel.dataset import Dataset
from emmy.errors import CompileError, EmmyError, UsageError
from emmy.ir.gpu import accumulation
from emmy.ir.ops import Op, parse_op
from emmy.ir.target import load_target
from emmy.levels import Origin, Subject
from emmy.lookup import subjects
from emmy.search.emulator_check import check
from emmy.workloads import NamedOp, named_ops

# What stopped a schedule: no legal one, no code for it, the compiler (or a spill), no smaller op to run, a wrong answer.
Verdict = Literal["ok", "illegal", "generator", "compiler", "not run", "wrong"]
# The first are those that find most: copies as late as may be, warps in order and by chance.
ORDERS = (*SCHEDULES[1:], SCHEDULES[0])


@dataclass(frozen=True, slots=True)
class Emulated:
    """One schedule of an op on a card. `error`: the largest, in units of what `tolerance` allows ((absolute, relative) of
    random inputs; whole numbers must be exact but for the last rounding).

    ran: the op that the emulator ran; static: facts of the binary (`emmy.codegen.gpu_build.facts`)
    """

    asked: str  # the op's text, of which `op` may be a range
    op: str
    target: str
    verdict: Verdict
    message: str = ""
    schedule: str = ""
    origin: Origin = "given"
    source_digest: str = ""
    ran: str = ""
    error: float | None = None
    tolerance: tuple[float, float] | None = None
    static: Mapping[str, float] = field(default_factory=dict)
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Emulation:
    """What is to be emulated, and what is found as it goes: at least one result for each op of the cases and each card."""

    cases: tuple[NamedOp, ...]
    results: Iterator[Emulated]
    count: int  # ops times cards


def emulated(
    ops: Sequence[str], gpus: Sequence[str], *, orders: int = 2, jobs: int = 1, home: Path | None = None
) -> Emulation:
    """What would be loaded of ops and sets (without any: of what is stored) on cards that need not be here: replayed,
    compiled, and run in the emulator, with whole numbers under so many `orders` of the threads, by `jobs` processes.

    Raises UsageError for a CPU, where nothing is named nor stored, or for an EMMY_FAST_MATH that is not 0 or 1.
    """
    home, _ = home or config.home(), config.fast_math()  # which may be wrong once, not once an op
    for target in map(load_target, gpus):
        if target.is_cpu:
            raise UsageError(f"{target.name} needs no emulator: `emmy verify` compiles its schedules and runs them")
    if not ops:
        dataset = Dataset.of(home)
        dataset.ingest()
        rows = [r for gpu in gpus for r in dataset.rows(target=gpu, statuses=("ok",), origins=("measured",))]
        ops = tuple(dict.fromkeys(r.op for r in rows))
    if not ops:
        raise UsageError(f"nothing is stored on {', '.join(gpus)}: name ops, or a set such as @gemma4-12b")
    cases = named_ops(ops)
    work = [(op, gpu) for op in dict.fromkeys(c.op for c in cases) for gpu in gpus]
    return Emulation(cases, _emulate(work, orders, jobs, home), len(work))


def _emulate(work: Sequence[tuple[str, str]], orders: int, jobs: int, home: Path) -> Iterator[Emulated]:
    """Each (op, card), as they are done."""
    jobs_of = [(op, gpu, ORDERS[:orders], home) for op, gpu in work]
    if jobs == 1:
        for each in jobs_of:
            yield from _emulated(*each)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), _end_with_parent) as pool:
        try:
            for done in as_completed([pool.submit(_emulated, *each) for each in jobs_of]):
                yield from done.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _end_with_parent() -> None:
    """In a worker: when its parent was killed it ends too; an interruption is the parent's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        parent = parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _emulated(op: str, gpu: str, orders: Sequence[tuple[int, bool]], home: Path | None) -> tuple[Emulated, ...]:
    begun = time.perf_counter()
    try:
        found = subjects(op, gpu=gpu, home=home)
    except EmmyError as e:
        return (Emulated(op, op, gpu, "illegal", str(e)),)
    done = []
    for s in found:
        row = Emulated(op, s.title, gpu, "illegal", "", s.schedule, s.origin)
        done.append(replace(_judged(row, s, parse_op(s.title), orders), wall_s=time.perf_counter() - begun))
        begun = time.perf_counter()
    return tuple(done)


def _judged(row: Emulated, s: Subject, op: Op, orders: Sequence[tuple[int, bool]]) -> Emulated:
    try:
        plan = s.plan
    except EmmyError as e:
        return replace(row, message=str(e))
    try:
        unit = plan_source(plan, s.target)
    except EmmyError as e:
        return replace(row, verdict="generator", message=str(e))
    row = replace(row, source_digest=unit.digest, tolerance=op.tolerance(accumulation(plan)))
    try:
        row = replace(row, static=dict(gpu_build.build(unit, s.target).static))
    except CompileError as e:
        return replace(row, verdict="compiler", message=str(e))
    found = check(op, s.schedule, s.target, orders=orders)
    verdict: Verdict = "ok" if not found.wrong else "wrong" if found.op else "not run"
    return replace(row, verdict=verdict, message=found.wrong, ran=found.op, error=found.error)
