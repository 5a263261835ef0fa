"""Random legal schedules of every kind of op keep its meaning: as steps, and as text, compiled or emulated."""

from __future__ import annotations

import random
from typing import get_args

import pytest

from emmy.codegen.build import plan_source
from emmy.codegen.emulated import emulate_plan
from emmy.codegen.emulator import SCHEDULES
from emmy.codegen.execute import execute
from emmy.ir import interpret
from emmy.ir.dtype import decode
from emmy.ir.gpu import accumulation
from emmy.ir.ops import InputKind
from emmy.ir.ops.op import PARSERS
from emmy.ir.schedule import replay
from emmy.ir.target import load_target
from emmy.search.schedule_space import ScheduleSpace
from tests.codegen.random_ops import kinds, random_op
from tests.codegen.running import compiled, usable
from tests.cuda_codegen.emulated import nothing_but_numbers

CPUS = usable("cpu", "cpu-portable")
KINDS: tuple[InputKind, ...] = get_args(InputKind)
CARDS = ("rtx4090", "rtx5090", "a100", "h200")


def test_every_kind_of_op_has_random_ones() -> None:
    assert kinds() == set(PARSERS)


@pytest.mark.parametrize("kind", sorted(kinds()))
def test_a_random_schedule_of_any_op_keeps_its_meaning(kind: str) -> None:
    schedule_is_right(kind, 0, text=False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 41))
@pytest.mark.parametrize("kind", sorted(kinds()))
def test_many_random_schedules_of_any_op_keep_its_meaning(kind: str, seed: int) -> None:
    schedule_is_right(kind, seed, text=True)


def schedule_is_right(kind: str, seed: int, *, text: bool) -> None:
    """Draws a target, an op and a walk of its space. text: also what the generated text computes."""
    rng = random.Random(f"{kind} {seed}")
    target = load_target(rng.choice((*CPUS, *CARDS)))
    op = random_op(kind, rng, target)
    schedule = ScheduleSpace(op, target).sample(rng).key
    plan, sizes = replay(op.program(), schedule, target), {s.name: rng.randint(s.lo, s.hi) for s in op.program().syms}
    what = f"{op} on {target.name} at {sizes}: {schedule}"
    x = op.inputs("normal", seed, sizes)
    numbers = {v.name: decode(x[v.name], v.dtype) for v in op.program().inputs}
    got = execute(plan, numbers, sizes, seed=seed)
    for name, want in interpret.run(op.program(), numbers, sizes).items():
        assert abs(got[name] - want).max(initial=0) < 1e-9, f"{name} of {what}"
    if not text:
        return
    unit, how = plan_source(plan, target), rng.choice(KINDS)
    inputs = op.inputs(how, seed, sizes)
    if target.is_cpu:
        out = compiled(unit, target, inputs, sizes, threads=rng.choice((1, 2)))
    else:
        order, eager = rng.choice(SCHEDULES)
        out, stats = emulate_plan(unit, inputs, sizes, seed=order, eager=eager)
        assert nothing_but_numbers(stats), f"shared memory was read before it was written: {what}"
    error = op.error_norm(out, inputs, how, accumulation(plan))
    assert error <= 1, f"{error:.3g} times what is allowed on {how} inputs: {what}"
