"""Finished elements leave as vectors of 16 bytes where rows allow it, or by the copy engine; the exact text is emulated."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from emmy.codegen.emulated import emulate_plan
from emmy.codegen.emulator import SCHEDULES, emulate
from emmy.codegen.nvrtc import compile_cubin
from emmy.codegen.ptx import prelude, used
from emmy.errors import EmuError
from emmy.ir.ops import parse_op
from emmy.ir.target import load_target
from tests.cuda_codegen.emulated import Run, nothing_but_numbers, unit


@pytest.mark.parametrize(("helper", "lanes"), [("transpose_pair", 2), ("transpose_quad", 4)])
def test_an_exchange_transposes_the_words_of_neighbouring_lanes(helper: str, lanes: int):
    kernel = f"""EMMY_KERNEL(64, 1) k(const u32* in, u32* out) {{
  u32 x[4];
  emmy_ldg_b128(x, in + threadIdx.x * 4);
  emmy_{helper}(x);
  emmy_stg_b128(out + threadIdx.x * 4, x);
}}"""
    given, out = np.arange(256, dtype=np.uint32), np.zeros(256, np.uint32)
    emulate(prelude(used(kernel), "sm_80") + kernel, "k", (1,), (64,), 0, (given, out))
    blocks = given.reshape(
        -1, lanes, lanes, 4 // lanes
    )  # group of lanes, lane, which vector the words belong to, words
    assert np.array_equal(out, blocks.swapaxes(1, 2).ravel())


def tile(m: int, n: int, wm: int, wn: int, how: str = "cp_async,2", atom: str = "mma,16,8,16", k: int = 32) -> str:
    return (
        f"k0/split(m,grid,{m}) k0/split(n,grid,{n}) k0/split(k,serial,{k}) k0/split(m,warp,{wm}) k0/split(n,warp,{wn}) "
        f"k0/stage(A,{how}) k0/stage(B,{how}) k0.C/atom({atom})"
    )


def groups(m: int, n: int, walk: bool) -> str:
    """Warpgroups of 64 rows; `walk`: three blocks of them walk all tiles, fed by a producer."""
    roles = f"k0/specialize({m // 64},40,232) k0/persist(3) " if walk else ""
    return (
        f"k0/split(m,grid,{m}) k0/split(n,grid,{n}) k0/split(k,serial,64) k0/split(m,warpgroup,64) "
        f"k0/stage(A,tma,2) k0/stage(B,tma,2) {roles}k0.C/atom(wgmma,64,{n},16)"
    )


SPLIT = "k1/split(m,grid,16) k1/split(n,grid,32)"
RUNS = (
    Run("matmul:32x64x64:f16", "rtx4090", tile(32, 64, 32, 32)),
    Run("matmul:20x64x64:bf16:nk,bias,gelu_tanh", "rtx4090", tile(32, 64, 16, 64)),
    Run("matmul:m(1..70)x96x64:f16:bias,scale,residual", "h200", tile(32, 64, 16, 32, "tma,2"), (("m", 45),)),
    Run(
        "matmul:33x40x64:bf16:residual,silu", "rtx4090", tile(16, 64, 16, 64)
    ),  # columns end inside the second four atoms
    Run("matmul:16x80x64:f16:nk,bias", "a100", tile(16, 80, 16, 40)),  # four atoms and one alone
    Run("matmul:16x96x64:f16:bias,residual", "a100", tile(16, 96, 16, 48), kind="integer"),  # four atoms and two alone
    Run("matmul:64x64x128:f16", "rtx4090", tile(64, 64, 32, 64, atom="hybrid,16,8,32")),
)
WGMMA = (
    Run("matmul:m(1..300)x240x128:bf16:nk,bias,residual", "h200", groups(128, 120, True), (("m", 200),)),
    Run("matmul:300x200x64:f16:gelu_tanh", "h200", groups(128, 64, False)),
)
PARTS = (
    Run("matmul:m(1..32)x64x128:f16:nk", "rtx4090", f"k0/splitk(C,2) {tile(16, 32, 16, 32)} {SPLIT}", (("m", 21),)),
    Run("matmul:16x40x128:bf16:bias", "rtx4090", f"k0/splitk(C,2) {tile(16, 64, 16, 16)} {SPLIT}"),
    Run("matmul:16x44x128:f16", "rtx4090", f"k0/splitk(C,2) {tile(16, 64, 16, 32)} {SPLIT}"),  # half of an atom exists
)
ENGINE = (
    Run("matmul:32x64x64:f16", "h200", f"{tile(32, 64, 32, 32)} k0/store(C,tma)"),
    Run(
        "matmul:m(1..70)x96x64:f16:bias,scale,residual",
        "h200",
        f"{tile(32, 64, 16, 32, 'tma,2')} k0/store(Y,tma)",
        (("m", 45),),
    ),
    Run("matmul:33x40x64:bf16:residual,silu", "rtx5090", f"{tile(16, 64, 16, 64)} k0/store(Y,tma)"),
    Run(
        "matmul:64x384x64:bf16:nk,gelu_tanh",
        "h200",
        f"{tile(64, 192, 32, 96, 'tma,2')} k0/store(Y,tma)",
        kind="integer",
    ),
    Run("matmul:70x256x128:f16:nk", "rtx5090", f"{tile(64, 128, 32, 128, 'tma,2')} k0.C/pipeline() k0/store(C,tma)"),
    Run("matmul:20x80x64:f16:bias,residual", "h200", f"{tile(32, 80, 32, 80)} k0/store(Y,tma)"),  # ten atoms
    Run(
        "matmul:m(1..33)x24x64:bf16:residual", "h200", f"{tile(16, 24, 16, 24)} k0/store(Y,tma)", (("m", 33),)
    ),  # three
    Run("matmul:33x40x64:f16:bias", "h200", f"{tile(32, 48, 16, 16)} k0/store(Y,tma)"),  # two
    Run("matmul:64x64x128:f16", "h200", f"{tile(64, 64, 32, 64, atom='hybrid,16,8,32')} k0/store(C,tma)"),
)
WALKED = (
    Run("matmul:256x128x128:f16:nk", "h200", f"{groups(128, 128, True)} k0/store(C,tma)"),
    *(replace(r, schedule=f"{r.schedule} k0/store(Y,tma)") for r in WGMMA),
)
NARROW = (
    Run("matmul:16x24x64:f16:bias,residual", "rtx4090", tile(16, 24, 16, 24)),  # three atoms
    Run("matmul:16x100x64:f16:bias", "rtx4090", tile(16, 64, 16, 32)),  # rows are no multiple of 16 bytes
    Run("matmul:16x33x64:bf16:residual", "rtx4090", tile(16, 64, 16, 64, "ldg,2")),
)


def body(run: Run) -> str:
    text = unit(run.op, run.schedule, run.gpu).text
    return text[text.rindex("#endif") :]


def right(run: Run) -> None:
    for order in range(3):
        error, stats = replace(run, order=order).error_norm()
        assert error <= 1, f"error {error:.3g} of what is allowed: {run}"
        assert nothing_but_numbers(stats)


@pytest.mark.parametrize("run", (*RUNS, *WGMMA), ids=lambda r: r.op)
def test_pairs_that_are_exchanged_are_right_and_leave_as_16_bytes(run: Run):
    assert "emmy_transpose_quad" in body(run) and "emmy_stg_b128" in body(run)
    right(run)


@pytest.mark.parametrize("run", PARTS, ids=lambda r: r.op)
def test_partial_sums_leave_as_16_bytes_of_f32(run: Run):
    assert "emmy_transpose_pair" in body(run) and "emmy_stg_b64" not in body(run).split("EMMY_KERNEL")[1]
    right(run)


@pytest.mark.parametrize("order", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, len(SCHEDULES)))])
@pytest.mark.parametrize("run", (*ENGINE, *WALKED), ids=lambda r: f"{r.gpu} {r.op}")
def test_a_placed_result_is_right_and_leaves_by_the_copy_engine(run: Run, order: int):
    assert "emmy_stg" not in body(run) and "emmy_stmatrix" in body(run)
    error, (stats,) = replace(run, order=order).error_norm()
    assert error <= 1, f"error {error:.3g} of what is allowed: {run}"
    assert nothing_but_numbers((stats,))
    assert stats.tma_store_bytes and not stats.global_store_bytes


@pytest.mark.parametrize("run", ENGINE[:5], ids=lambda r: f"{r.gpu} {r.op}")
def test_warps_of_32_columns_write_their_boxes_without_bank_conflicts(run: Run):
    (stats,) = run.error_norm()[1]
    assert stats.smem_store_waves == stats.smem_store_waves_ideal


def test_without_its_fence_or_its_meeting_a_placed_result_is_found_at_fault():
    """The emulator tells whether the steps before the copy engine's turn are there: each is taken out of the text once."""
    u = unit(ENGINE[0].op, ENGINE[0].schedule, ENGINE[0].gpu)
    at = u.text.rindex("emmy_fence_async();")
    for gone in ("emmy_fence_async();", "emmy_syncwarp();", "emmy_bulk_commit();"):
        broken = replace(u, text=u.text[:at] + u.text[at:].replace(gone, "", 1))
        with pytest.raises(EmuError):
            emulate_plan(broken, parse_op(ENGINE[0].op).inputs("normal", 1))


@pytest.mark.parametrize("run", NARROW, ids=lambda r: r.op)
def test_rows_without_vectors_of_16_bytes_are_stored_in_pairs_or_alone(run: Run):
    assert "emmy_transpose" not in body(run) and "emmy_stg_b128" not in body(run)
    right(run)


@pytest.mark.parametrize("run", RUNS, ids=lambda r: r.op)
def test_every_element_is_stored_once(run: Run):
    m, n, _ = run.op.split(":")[1].split("x")
    rows = dict(run.sizes)["m"] if run.sizes else int(m)
    (stats,) = run.error_norm()[1]
    assert stats.global_store_bytes == rows * int(n) * 2


@pytest.mark.parametrize("run", RUNS[:2], ids=lambda r: r.op)
def test_four_atoms_side_by_side_fill_whole_sectors(run: Run):
    (stats,) = run.error_norm()[1]
    assert stats.global_store_sectors * 32 == stats.global_store_bytes


def test_no_lane_leaves_before_an_exchange():
    """Shuffles need the whole warp: rows and columns that do not exist skip nothing but the store."""
    (run,) = (r for r in RUNS if "m(1..70)" in r.op)
    guarded = re.findall(r"^ *if \(.*$", body(run)[body(run).rindex("emmy_mma") :], re.MULTILINE)
    stores = [g for g in guarded if "emmy_stg" in g]
    assert stores and all("transpose" not in g for g in guarded)
    assert body(run).count("emmy_stg_b128") == len(stores)


def test_a_quarter_of_the_store_instructions_remains():
    """A warp's tile is 64 x 32, so a lane has 64 sums: 8 stores of 16 bytes in f16, where there were 32 of 4."""
    schedule = tile(128, 128, 64, 32, "cp_async,3", k=64)
    cubin = compile_cubin(unit("matmul:512x4096x3840:f16:nk,bias", schedule).text, load_target("rtx4090").arch)
    mix = cubin.kernels[0].mix
    assert mix["STG"] == 8 and mix["SHFL"] >= 4 * mix["STG"] and cubin.spill_bytes == 0
