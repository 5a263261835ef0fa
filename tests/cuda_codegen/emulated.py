"""Shared by these tests: a schedule's CUDA text, run on the emulator and compared with the op's own reference."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from emmy.api import with_pdl
from emmy.codegen.build import SourceUnit, source
from emmy.codegen.emulated import emulate_plan
from emmy.codegen.emulator import SCHEDULES, EmuStats
from emmy.ir.gpu import accumulation
from emmy.ir.ops import parse_op
from emmy.ir.target import load_target
from emmy.search.schedule_space import ScheduleSpace

GPUS = ("rtx4090", "rtx5090", "rtx3090", "a100", "h200")


def unit(op: str, schedule: str, gpu: str = "rtx4090") -> SourceUnit:
    return source(parse_op(op), schedule, load_target(gpu))


@dataclass(frozen=True, slots=True)
class Run:
    """A schedule to run once: on which sizes, inputs and order of the threads."""

    op: str
    gpu: str
    schedule: str
    sizes: tuple[tuple[str, int], ...] = ()
    kind: str = "normal"
    order: int = 1
    times: int = 1

    def error_norm(self) -> tuple[float, tuple[EmuStats, ...]]:
        """(largest error in units of what is allowed, counts of each launch)."""
        op, u = parse_op(self.op), unit(self.op, self.schedule, self.gpu)
        inputs = op.inputs(self.kind, 1, dict(self.sizes))  # type: ignore[arg-type]
        seed, eager = SCHEDULES[self.order]
        out, stats = emulate_plan(u, inputs, dict(self.sizes), seed=seed, eager=eager, times=self.times)
        return op.error_norm(out, inputs, self.kind, accumulation(u.plan)), stats  # type: ignore[arg-type]


def random_run(seed: int) -> Run:
    """A walk of the search space of a small problem: odd and even sizes, every dtype, layout, epilogue and transport."""
    rng = random.Random(seed)
    gpu, dtype = rng.choice(GPUS), rng.choice(("f16", "bf16", "f16", "bf16", "f32"))
    m = rng.choice((1, 7, 16, 33, 64, 70, 100))
    n = rng.choice((8, 16, 24, 40, 64, 72, 33, 100, 130))
    k = rng.choice((8, 16, 40, 64, 72, 96, 33, 130, 200))
    options = [w for w in ("nk", "bias", "scale", "residual") if rng.random() < 0.3]
    options += [rng.choice(("gelu_tanh", "silu"))] * (rng.random() < 0.3)
    symbolic = m > 1 and rng.random() < 0.25
    rows = f"m(1..{m})" if symbolic else str(m)
    op = f"matmul:{rows}x{n}x{k}:{dtype}" + (f":{','.join(options)}" if options else "")
    schedule = ScheduleSpace(parse_op(op), load_target(gpu)).sample(rng).key
    if load_target(gpu).can("pdl") and random.Random(schedule).random() < 0.3:  # which no walk chooses by itself
        schedule = with_pdl(op, schedule, gpu=gpu)
    sizes = (("m", rng.randint(1, m)),) if symbolic else ()
    return Run(op, gpu, schedule, sizes, rng.choice(("normal", "integer")), rng.randrange(len(SCHEDULES)))


def nothing_but_numbers(stats: tuple[EmuStats, ...]) -> bool:
    """Whether every word that was read from shared memory had been written."""
    return not np.any([s.uninitialised_words for s in stats])
