"""Early launches as text: they wait where they must, are right on the emulator, and planted bugs are caught there."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from emmy import api
from emmy.codegen.build import SourceUnit
from emmy.codegen.emulated import emulate_plan
from emmy.codegen.emulator import SCHEDULES
from emmy.codegen.gpu_plan import gpu_plan
from emmy.codegen.kernel_gpu import GpuKernel
from emmy.errors import EmuError, IllegalMove, UsageError
from emmy.ir.gpu import accumulation
from emmy.ir.ops import parse_op
from tests.cuda_codegen.emulated import unit

TILE = "k0/split(m,grid,32) k0/split(n,grid,32) k0/split(k,serial,32) k0/split(m,warp,16) k0/split(n,warp,16)"
MMA = "k0.C/atom(mma,16,8,16)"
GROUP = (
    "k0/split(m,grid,64) k0/split(n,grid,24) k0/split(k,serial,16) k0/split(m,warpgroup,64) k0/split(n,warpgroup,24)"
)
WGMMA = "k0.C/atom(wgmma,64,24,16)"
OP = "matmul:50x48x104:f16:nk,bias,residual"
# name -> (op, schedule without pdl)
CASES = {
    "cp_async": (OP, f"{TILE} k0/stage(A,cp_async,3) k0/stage(B,cp_async,3) {MMA}"),
    "cp_async read ahead": (OP, f"{TILE} k0/stage(A,cp_async,3) k0/stage(B,cp_async,3) {MMA} k0.C/pipeline()"),
    "tma": (OP, f"{TILE} k0/stage(A,tma,3) k0/stage(B,tma,3) {MMA}"),
    "tma read ahead": (OP, f"{TILE} k0/stage(A,tma,2) k0/stage(B,tma,2) {MMA} k0.C/pipeline()"),
    "ldg": (OP, f"{TILE} k0/stage(A,ldg,2) k0/stage(B,ldg,2) {MMA}"),
    "one slot": (OP, f"{TILE} k0/stage(A,ldg,1) k0/stage(B,ldg,1) {MMA}"),
    "stored by the copy engine": (OP, f"{TILE} k0/stage(A,tma,3) k0/stage(B,tma,3) {MMA} k0/store(Y,tma)"),
    "resident blocks": (OP, f"{TILE} k0/stage(A,tma,3) k0/stage(B,tma,3) k0/persist(2) {MMA}"),
    "deferred": (OP, f"{GROUP} k0/stage(A,tma,3) k0/stage(B,tma,3) {WGMMA}"),
    "producer": (OP, f"{GROUP} k0/stage(A,tma,3) k0/stage(B,tma,2) k0/specialize(1,0,0) {WGMMA}"),
    "producer of resident blocks": (
        OP,
        f"{GROUP} k0/stage(A,tma,3) k0/stage(B,tma,2) k0/specialize(1,0,0) k0/persist(1) {WGMMA}",
    ),
    "statistic of its own": (
        "matmul:50x48x104:f16:nk,residual,sum_squares",
        f"k0/cut(S) {TILE} k1/split(m,grid,8) k0/stage(A,cp_async,2) k0/stage(B,cp_async,2) {MMA}",
    ),
    "split-K": (
        "matmul:50x48x104:bf16:bias",
        f"k0/splitk(C,2) {TILE} k1/split(m,grid,16) k0/stage(A,cp_async,2) k0/stage(B,cp_async,2) {MMA}",
    ),
}


def early(name: str) -> SourceUnit:
    op, schedule = CASES[name]
    return unit(op, api.with_pdl(op, schedule, gpu="h200"), "h200")


def run(u: SourceUnit, name: str, order: int = 1) -> float:
    """The largest error in units of what is allowed."""
    op, (seed, eager) = parse_op(CASES[name][0]), SCHEDULES[order]
    inputs = op.inputs("normal", 1)
    out, _ = emulate_plan(u, inputs, seed=seed, eager=eager)
    return op.error_norm(out, inputs, "normal", accumulation(u.plan))


@pytest.mark.parametrize("name", CASES)
def test_an_early_launch_is_right_and_touches_only_constants_before_it_has_waited(name: str):
    u = early(name)
    assert all(isinstance(k, GpuKernel) and k.early for k in u.kernels)
    for order in range(0, len(SCHEDULES), 2):
        assert run(u, name, order) <= 1


FETCHES_AHEAD = (
    "cp_async", "cp_async read ahead", "tma", "tma read ahead", "ldg", "split-K", "resident blocks", "deferred", "producer",
)  # fmt: skip


@pytest.mark.parametrize("name", FETCHES_AHEAD)
def test_weights_are_fetched_before_the_wait_and_activations_after_it(name: str):
    text = early(name).text
    body = text[text.index(" k0(") :].split("EMMY_KERNEL")[0]
    filling = body[body.index("emmy_pdl_launch();") :]  # of the role that fills, which is the first
    wait = filling.index("emmy_pdl_wait();")
    before, after = filling[:wait], filling[wait:]
    fetch = r"emmy_(?:cp_async_b\w+|tma_load_2d|ldg_b\w+)\("
    assert re.search(fetch + r"[^;]*\bB_(?:map|from)", before)
    assert not re.search(fetch + r"[^;]*\bA_(?:map|from)", before)
    assert re.search(fetch + r"[^;]*\bA_(?:map|from)", after)


def test_what_the_launch_before_may_write_is_not_read_as_if_it_were_constant():
    body = early("tma").text
    assert re.search(r"emmy_ldg_b32\(\w+, R \+", body) and re.search(r"emmy_ldg_b32_nc\(\w+, bias \+", body)
    assert re.search(r"emmy_ldg_b32_nc\(\w+, R \+", unit(*CASES["tma"], "h200").text)


def test_a_schedule_without_pdl_gives_the_text_it_gave():
    op, schedule = CASES["tma"]
    assert "pdl" not in unit(op, schedule, "h200").text


def damaged(u: SourceUnit, how: str) -> str:
    """The text with the wait of its first kernel moved: gone, behind the fills that follow it, or to the end."""
    text, wait = u.text, "  emmy_pdl_wait();\n"
    at = text.index(wait, text.rindex("#endif"))
    without, end = text[:at] + text[at + len(wait) :], text.index("\n}\n", at) - len(wait) + 1
    if how == "no wait":
        return without
    if how == "after the stores":
        return without[:end] + wait + without[end:]
    loop = without.index("  for (int k = ", at)
    return without[:loop] + wait + without[loop:]


@pytest.mark.parametrize("how", ["no wait", "after the stores", "after the activations are fetched"])
@pytest.mark.parametrize("name", ["cp_async", "tma", "tma read ahead", "deferred", "split-K"])
def test_a_wait_that_is_missing_or_late_is_caught(name: str, how: str):
    u = early(name)
    with pytest.raises(EmuError, match=r"griddepcontrol\.wait does not come first"):
        run(replace(u, text=damaged(u, how)), name)


@pytest.mark.parametrize("name", ["producer", "producer of resident blocks"])
def test_a_producer_that_does_not_wait_is_caught(name: str):
    """A consumer that does not is none the wiser here: it has met the producer since. Executing the steps asks all to wait."""
    u, wait = early(name), "emmy_pdl_wait();"
    at = u.text.index(wait)
    assert u.text.count(wait) == 2 and at < u.text.index("emmy_wgmma_fence();")
    with pytest.raises(EmuError, match=r"griddepcontrol\.wait does not come first"):
        run(replace(u, text=u.text[:at] + u.text[at + len(wait) :]), name)


def test_a_second_launch_that_reads_what_the_first_left_without_waiting_is_caught():
    u = early("split-K")
    at = u.text.rindex("  emmy_pdl_wait();\n")
    assert at > u.text.index(" k1(")
    with pytest.raises(EmuError, match=r"griddepcontrol\.wait does not come first"):
        run(replace(u, text=u.text[:at] + u.text[at:].replace("  emmy_pdl_wait();\n", "")), "split-K")


def test_a_store_by_the_copy_engine_that_does_not_wait_is_caught():
    u, inputs = early("stored by the copy engine"), parse_op(OP).program().inputs
    alone = replace(u.plan, program=replace(u.plan.program, inputs=tuple(replace(v, constant=True) for v in inputs)))
    with pytest.raises(EmuError, match=r"TMA store: array \d is written by the grid before this one"):
        run(replace(u, plan=alone, text=u.text.replace("emmy_pdl_wait();", "")), "stored by the copy engine")


def test_a_read_only_load_of_what_may_still_be_written_is_caught():
    u = early("cp_async")
    text = re.sub(r"emmy_ldg_b32\((\w+), R ", r"emmy_ldg_b32_nc(\1, R ", u.text)
    assert text != u.text
    with pytest.raises(EmuError, match=r"ld.global.nc: array \d may still be written"):
        run(replace(u, text=text), "cp_async")


def test_the_plan_file_says_which_kernels_begin_early_and_form_clusters():
    u = early("split-K")
    kernels = tuple(k for k in u.kernels if isinstance(k, GpuKernel))
    lines = (
        gpu_plan(u.plan, (replace(kernels[0], cluster=2), replace(kernels[1], early=False)), b"").decode().splitlines()
    )
    at = next(i for i, line in enumerate(lines) if line.startswith("kernel k0 "))
    assert lines[0] == "emmy-gpu-plan 2" and lines[at + 1 : at + 3] == ["cluster 2", "early"]
    assert lines.count("early") == 1 and "clusters of 2, early" in str(replace(kernels[0], cluster=2))


def test_an_early_schedule_is_not_timed_alone(tmp_path: Path):
    op, schedule = CASES["cp_async"]
    with pytest.raises(UsageError, match=r"k0 of .* its time is not the op's"):
        api.bench(op, api.with_pdl(op, schedule, gpu="h200"), gpu="h200", home=tmp_path)


def test_every_launch_of_a_schedule_is_made_early_once():
    op, schedule = CASES["split-K"]
    assert api.with_pdl(op, schedule, gpu="h200") == f"{schedule} k0/pdl() k1/pdl()"
    assert api.with_pdl(op, f"{schedule} k1/pdl()", gpu="h200") == f"{schedule} k1/pdl() k0/pdl()"
    with pytest.raises(IllegalMove, match="rtx4090 starts a launch when those before it have ended"):
        api.with_pdl("matmul:64x64x64:f16", "k0/split(m,grid,16)", gpu="rtx4090")
