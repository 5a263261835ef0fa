"""CUDA text: golden for three plans, self-contained, and synchronised where the steps say and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from emmy.codegen.kernel_gpu import GpuKernel
from emmy.codegen.lower import lower
from emmy.codegen.steps import BlockSync, Commit, For, Step, WaitGroup
from emmy.ir.ops import parse_op
from emmy.ir.target import load_target
from emmy.search.schedule_space import ScheduleSpace
from tests.cuda_codegen.emulated import GPUS, unit

TILE = "k0/split(m,grid,128) k0/split(n,grid,128) k0/split(k,serial,64) k0/split(m,warp,64) k0/split(n,warp,32)"
GOLDEN = {
    "cp_async": (
        "matmul:512x4096x3840:f16:nk,bias,gelu_tanh", "rtx4090",
        f"{TILE} k0/raster(4) k0/stage(A,cp_async,3) k0/stage(B,cp_async,3) k0.C/atom(mma,16,8,16) k0.C/pipeline()",
    ),
    "tma": (
        "matmul:512x4096x3840:bf16:residual", "rtx5090",
        f"{TILE} k0/stage(A,tma,3) k0/stage(B,tma,3) k0.C/atom(mma,16,8,16)",
    ),
    "splitk": (
        "matmul:m(1..64)x4095x3840:f16", "rtx4090",
        "k0/splitk(C,4) k0/split(m,grid,16) k0/split(n,grid,64) k0/split(k,serial,64) k0/split(m,warp,16) k0/split(n,warp,16) "
        "k1/split(m,grid,4) k1/split(n,grid,256) k0/stage(A,ldg,2) k0/stage(B,ldg,2) k0.C/atom(hybrid,16,8,64)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_the_text_of_a_plan(name: str, golden: Callable[[str, str], None]):
    op, gpu, schedule = GOLDEN[name]
    text = unit(op, schedule, gpu).text
    golden(f"cuda_{name}.txt", text[text.rindex("#endif") + len("#endif") :].lstrip())


@pytest.mark.parametrize("name", GOLDEN)
def test_the_kernel_ir_of_a_plan_prints_one_statement_a_line(name: str):
    op, gpu, schedule = GOLDEN[name]
    for k in unit(op, schedule, gpu).kernels:
        assert isinstance(k, GpuKernel)
        lines = str(k).splitlines()
        assert lines[0].startswith(f"kernel {k.name}(") and f"{k.threads} threads" in lines[0]
        assert not any(";" in line for line in lines)


@pytest.mark.parametrize("name", GOLDEN)
def test_the_text_needs_no_header_and_holds_assembly_only_in_helpers(name: str):
    text = unit(*GOLDEN[name][::2], GOLDEN[name][1]).text
    assert "#include" not in text
    assert "asm" not in text[text.rindex("#endif") :]


def every_step(steps: tuple[Step, ...]) -> Iterator[Step]:
    for s in steps:
        yield s
        if isinstance(s, For):
            yield from every_step(s.body)


@pytest.mark.parametrize("name", GOLDEN)
def test_waits_stand_where_the_steps_say_and_nowhere_else(name: str):
    op, gpu, schedule = GOLDEN[name]
    u = unit(op, schedule, gpu)
    steps = [s for o in lower(u.plan) for r in o.roles for s in every_step(r.steps)]
    barriers = sum(bool(o.barriers) for o in lower(u.plan))  # the block meets once more after making them
    body = u.text[u.text.rindex("#endif") :]

    def called(helper: str) -> int:
        return len(re.findall(rf"\bemmy_{helper}\b", body))

    assert called("syncthreads") == barriers + sum(isinstance(s, BlockSync) for s in steps)
    if "cp_async" in schedule:
        assert called("cp_async_commit") == sum(isinstance(s, Commit) for s in steps)
        assert called("cp_async_wait") == sum(isinstance(s, WaitGroup) for s in steps)


def test_the_same_schedule_gives_the_same_text():
    op, gpu, schedule = GOLDEN["tma"]
    assert unit(op, schedule, gpu).digest == unit(op, schedule, gpu).digest


OPS = (
    "matmul:512x4096x3840:f16:nk,bias,gelu_tanh", "matmul:1x4096x3840:bf16", "matmul:m(1..4096)x3840x15360:f16:residual",
    "matmul:7x33x41:f32:scale", "matmul:1x1x1:f16", "matmul:4095x4097x4099:bf16:nk,silu", "matmul:2048x2048x2048:f32",
)  # fmt: skip


ALIKE = (pytest.param(x, marks=pytest.mark.slow) for x in ("h100", "l40s", "rtxpro6000"))  # in what code they take


@pytest.mark.parametrize("gpu", (*GPUS, *ALIKE))
@pytest.mark.parametrize("op", OPS)
def test_code_is_generated_for_the_default_and_for_walks_of_the_space(op: str, gpu: str):
    import random

    space, rng = ScheduleSpace(parse_op(op), load_target(gpu)), random.Random(op + gpu)
    for point in (space.default(), *(space.sample(rng) for _ in range(3))):
        assert "EMMY_KERNEL" in unit(op, point.key, gpu).text
