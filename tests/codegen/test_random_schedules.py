"""Any legal schedule of any small matmul gives the right answer, compiled and interpreted."""

from __future__ import annotations

import random

import pytest

from emmy.codegen.build import plan_source
from emmy.ir.target import load_target
from tests.codegen.random_plans import random_op, random_plan
from tests.codegen.running import compiled, interpreted, usable

TARGETS = usable("cpu", "cpu-avx2", "cpu-portable")


def check(seed: int, how: str) -> None:
    rng = random.Random(seed)
    target = load_target(rng.choice(TARGETS))
    op = random_op(rng, (37, 50, 40) if how == "compiled" else (11, 21, 17))
    plan, schedule = random_plan(rng, op, target)
    unit, kind = plan_source(plan, target), rng.choice(["normal", "integer"])
    sizes = {s.name: rng.randint(s.lo, s.hi) for s in plan.program.syms}
    inputs = op.inputs(kind, seed, sizes)
    if how == "compiled":
        got = compiled(unit, target, inputs, sizes, threads=rng.choice([1, 2]))
    else:
        got = interpreted(unit, inputs, sizes, order=lambda n: rng.sample(range(n), n))
    assert op.error_norm(got, inputs, kind) <= 1, f"{target.name} {op.key} {sizes} {schedule!r} on {kind} inputs"


@pytest.mark.parametrize("seed", range(24))
def test_a_random_schedule_compiled_gives_the_right_answer(seed: int) -> None:
    check(seed, "compiled")


@pytest.mark.parametrize("seed", range(1000, 1040))
def test_a_random_schedule_interpreted_gives_the_right_answer(seed: int) -> None:
    check(seed, "interpreted")


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(10))
def test_hundreds_of_random_schedules_compiled_give_the_right_answer(batch: int) -> None:
    for seed in range(40):
        check(10_000 + 40 * batch + seed, "compiled")


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(10))
def test_hundreds_of_random_schedules_interpreted_give_the_right_answer(batch: int) -> None:
    for seed in range(60):
        check(20_000 + 60 * batch + seed, "interpreted")
