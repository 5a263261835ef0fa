"""Rows with a planted law: a schedule's time follows from its knobs and its op's shape, with a little noise."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import log2

import pytest

from emmy.costmodel.samples import Prepared, prepare
from emmy.errors import PlanError
from emmy.ir.ops import parse_op
from emmy.ir.ops.op import Op
from emmy.ir.roofline import roofline_us
from emmy.ir.schedule import replay
from emmy.ir.target import Target, load_target
from emmy.records import Device, Measurement, Protocol

TARGET = "cpu-portable"  # the same vector width on every machine of a kind
SHAPES = ((64, 256, 512), (128, 512, 256), (256, 256, 256), (96, 384, 768), (512, 128, 512), (192, 1024, 128))

Rows = list[Measurement]
Synthetic = Callable[..., Rows]


def synthetic_rows(
    per_op: int = 40,
    seed: int = 0,
    shapes: Sequence[tuple[int, int, int]] = SHAPES,
    repeats: int = 1,
    noise: float = 0.01,
) -> Rows:
    """`per_op` random schedules of each shape, timed by the planted law. The same arguments give the same rows."""
    target, rng, rows = load_target(TARGET), random.Random(seed), []
    for m, n, k in shapes:
        op = f"matmul:{m}x{n}x{k}:f32"
        texts: set[str] = set()
        while len(texts) < per_op:
            text, factor = _draw(rng, m, n, k)
            if text in texts:
                continue
            try:
                replay(parse_op(op).program(), text, target)
            except PlanError:
                continue
            texts.add(text)
            roof = roofline_us(parse_op(op).work(), target, "f32", 1).time_us
            for _ in range(repeats):
                us = roof * factor * (1 + noise * rng.random())
                rows.append(_row(target, op, text, us, len(rows)))
    return rows


def plan_digest(op: Op, schedule: str, target: Target) -> str:
    """What stands for the generated source: the plan. Raises as a replay does."""
    return str(replay(op.program(), schedule, target))


def _draw(rng: random.Random, m: int, n: int, k: int) -> tuple[str, float]:
    """A schedule, and how many times slower than its roofline it is: by vector sums, by packing, by the piece of k."""
    step_m, step_n = rng.choice((16, 32, 64)), rng.choice((32, 64, 128))
    step_k = rng.choice((32, 64, 128, 256))
    rows, vectors, width = rng.choice((1, 2, 3, 4, 6)), rng.choice((1, 2, 3)), 4
    packs, unroll = rng.random() < 0.5, rng.choice((1, 2, 4))
    words = [f"k0/split(m,core,{min(step_m, m // 2)})", f"k0/split(n,serial,{min(step_n, n // 2)})"]
    words += [f"k0/split(k,serial,{step_k})"] if step_k < k else []
    words += ["k0/stage(B,pack,1)"] if packs else []
    words += [f"k0.C/atom(fma,{rows},{vectors * width},1,{width})"]
    words += [f"k0.C/unroll({unroll})"] if unroll > 1 else []
    starved = 8.0 / min(8, rows * vectors)
    distance = abs(log2(min(step_k, k)) - 7)  # 128 is best
    return " ".join(words), 1.5 * starved * (1 + 0.3 * distance) * (1.0 if packs else 1.4) * (1 + 0.05 / unroll)


def _row(target: Target, op: str, text: str, us: float, number: int) -> Measurement:
    return Measurement(
        op=op,
        schedule=text,
        source_digest=plan_digest(parse_op(op), text, target),
        device=Device(target.name, target.product, "ab", "", "gcc"),
        status="ok",
        samples_us=(us,) * 3,
        protocol=Protocol(clock="thread_cpu"),
        id=f"{number:032x}",
        time_utc=f"2026-01-01T{number // 3600 % 24:02d}:{number // 60 % 60:02d}:{number % 60:02d}.000+00:00",
    )


@pytest.fixture(name="synthetic_rows", scope="session")
def _synthetic_rows() -> Synthetic:
    return synthetic_rows


@pytest.fixture(name="plan_digest", scope="session")
def _plan_digest() -> Callable[[Op, str, Target], str]:
    return plan_digest


@pytest.fixture(scope="session")
def prepare_rows(target: Target) -> Callable[[Rows], Prepared]:
    return lambda rows: prepare(rows, target, plan_digest)


@pytest.fixture(scope="session")
def target() -> Target:
    return load_target(TARGET)
