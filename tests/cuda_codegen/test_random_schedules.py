"""Random schedules of the search space: their exact CUDA text is right on the emulator, whatever the order of the threads."""

from __future__ import annotations

import pytest

from tests.cuda_codegen.emulated import Run, nothing_but_numbers, random_run

EVERY_RUN, MORE = range(12), range(12, 576)
# Schedules that were wrong once.
BROKE = (
    Run(
        "matmul:m(1..33)x64x33:bf16:nk,bias,gelu_tanh", "a100",
        "k0/split(m,grid,32) k0/split(n,grid,64) k0/split(k,serial,64) k0/split(m,warp,32) k0/split(n,warp,16) "
        "k0/stage(A,ldg,2) k0/stage(B,ldg,2) k0.C/atom(mma,16,8,16)", (("m", 20),),
    ),
    Run(
        "matmul:33x100x16:f16:silu", "rtx3090",
        "k0/split(m,grid,64) k0/split(n,grid,48) k0/split(k,serial,16) k0/split(m,warp,16) k0/split(n,warp,24) "
        "k0/stage(A,cp_async,3) k0/stage(B,cp_async,3) k0.C/atom(hybrid,16,8,16)",
    ),
    Run(
        "matmul:40x48x72:f16:nk", "rtx5090",
        "k0/split(m,grid,16) k0/split(n,grid,16) k0/split(k,serial,32) k0/split(m,warp,16) k0/split(n,warp,16) "
        "k0/stage(A,tma,3) k0/stage(B,tma,3) k0.C/atom(mma,16,8,16) k0.C/pipeline()",
    ),
)  # fmt: skip


def right(run: Run) -> None:
    error, stats = run.error_norm()
    assert error <= 1, f"error {error:.3g} of what is allowed: {run}"
    assert nothing_but_numbers(stats), f"shared memory was read before it was written: {run}"


@pytest.mark.parametrize("seed", EVERY_RUN)
def test_a_random_schedule_is_right(seed: int):
    right(random_run(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", MORE)
def test_another_random_schedule_is_right(seed: int):
    right(random_run(seed))


@pytest.mark.parametrize("run", BROKE, ids=lambda r: r.op)
def test_a_schedule_that_was_wrong_once_is_right(run: Run):
    right(run)
