"""Right kernels are right on the emulator under every schedule, and compile for every architecture they are for."""

from __future__ import annotations

import pytest

from emmy.codegen.emulator import SCHEDULES
from emmy.codegen.nvrtc import compile_cubin
from tests.emulator.cases import CASES, Case


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_right_kernel_is_right_under_every_schedule(case: Case) -> None:
    for seed, eager in SCHEDULES:
        case.run(seed=seed, eager=eager)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_right_kernel_is_right_under_many_more_schedules(case: Case) -> None:
    for seed in range(3, 40):
        case.run(seed=seed)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_kernel_compiles_for_every_architecture_it_is_for(case: Case) -> None:
    for arch in case.archs:
        assert compile_cubin(case.source(arch=arch), arch).refusal is None


def test_the_same_seed_gives_the_same_run() -> None:
    first, again = (CASES["pingpong"].run(seed=5) for _ in range(2))
    assert first == again
