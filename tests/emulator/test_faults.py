"""What the emulator says about a kernel at fault, and about a launch that does not fit it."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from emmy.codegen.build import source
from emmy.codegen.emulated import emulate_plan
from emmy.codegen.emulator import EmuResult, TensorMap, emulate
from emmy.codegen.ptx import prelude, used
from emmy.errors import CompileError, EmuError, UsageError
from emmy.ir.ops import parse_op
from emmy.ir.target import load_target
from tests.emulator.cases import CASES


def run(kernel: str, *args: object, block: int = 32, smem_bytes: int = 1024, budget: int = 100_000) -> EmuResult:
    return emulate(prelude(used(kernel), "sm_90a") + kernel, "k", (1,), (block,), smem_bytes, args, budget=budget)


def fault(kernel: str, *args: object, **options: int) -> EmuError:
    with pytest.raises(EmuError) as caught:
        run(kernel, *args, **options)
    return caught.value


def test_a_race_names_both_accesses_and_their_lines() -> None:
    case = CASES["rms_norm"]
    with pytest.raises(EmuError) as caught:
        case.run(case.kernel.replace("  emmy_syncthreads();\n", ""))
    text = str(caught.value)
    assert caught.value.kind == "race"
    assert "emmy_sts_b32(smem + emmy_warp_index() * 4, part);" in text
    assert "emmy_lds_b128(parts, smem);" in text
    assert "block (0, 0, 0), thread" in text


@pytest.mark.parametrize("pipeline", ["", " k0.C/pipeline()"])
def test_a_generated_ring_needs_its_readers_fences_before_tma_refills_it(pipeline: str) -> None:
    schedule = (
        "k0/split(m,grid,32) k0/split(n,grid,32) k0/split(k,serial,32) k0/split(m,warp,16) k0/split(n,warp,16) "
        f"k0/stage(A,tma,2) k0/stage(B,tma,2) k0.C/atom(mma,16,8,16){pipeline}"
    )
    op = parse_op("matmul:32x32x160:f16:nk")
    unit = source(op, schedule, load_target("rtx5090"))
    emulate_plan(unit, op.inputs("normal", 1), seed=1)
    without = replace(unit, text=re.sub(r"^ +emmy_fence_async\(\);\n", "", unit.text, flags=re.MULTILINE))
    assert without.text != unit.text
    with pytest.raises(EmuError, match=r"TMA load of .* passes no fence.proxy.async before it lets go") as caught:
        emulate_plan(without, op.inputs("normal", 1), seed=1)
    assert caught.value.kind == "proxy"


def test_lanes_of_one_warp_race_too() -> None:
    kernel = """EMMY_KERNEL(32, 1) k(u32* out) {
  EMMY_SMEM(smem);
  u32 r[1] = {threadIdx.x};
  emmy_sts_b32(smem + 4 * threadIdx.x, r);
  SYNC
  emmy_lds_b32(r, smem + 4 * (31 - threadIdx.x));
  emmy_stg_b32(out + threadIdx.x, r);
}"""
    out = np.zeros(32, np.uint32)
    assert fault(kernel.replace("SYNC", ""), out).kind == "race"
    run(kernel.replace("SYNC", "emmy_syncwarp();"), out)
    assert out.tolist() == list(range(31, -1, -1))


def test_halves_of_a_word_may_be_written_by_different_threads() -> None:
    kernel = """EMMY_KERNEL(32, 1) k(u32* out) {
  EMMY_SMEM(smem);
  u16 h[1] = {(u16)threadIdx.x};
  emmy_sts_b16(smem + 2 * (threadIdx.x OFFSET), h);
  emmy_syncwarp();
  u32 r[1];
  emmy_lds_b32(r, smem + 4 * (threadIdx.x / 2));
  emmy_stg_b32(out + threadIdx.x, r);
}"""
    out = np.zeros(32, np.uint32)
    run(kernel.replace("OFFSET", ""), out)
    assert out[2] == 2 | 3 << 16
    assert fault(kernel.replace("OFFSET", "/ 2"), out).kind == "race"


def test_a_deadlock_says_who_waits_for_what() -> None:
    kernel = """EMMY_KERNEL(64, 1) k() {
  EMMY_SMEM(smem);
  if (threadIdx.x == 0) { emmy_mbar_init(smem, 2); emmy_mbar_fence_init(); }
  emmy_syncthreads();
  if (threadIdx.x < 32) emmy_mbar_expect_tx(smem + 0 * 8, 16);
  if (threadIdx.x < 32) emmy_mbar_wait(smem, 0);
  emmy_syncthreads();
}"""
    kernel = kernel.replace("threadIdx.x < 32) emmy_mbar_expect", "threadIdx.x == 0) emmy_mbar_expect")
    error = fault(kernel, block=64)
    assert error.kind == "deadlock"
    assert "threads 0 to 31: waits for parity 0 of the mbarrier" in str(error)
    assert "phase 0: 1 of 2 arrivals and 16 bytes missing" in str(error)
    assert "threads 32 to 63: waits at syncthreads (32 of 64 threads there)" in str(error)


@pytest.mark.parametrize(
    ("access", "says"),
    [
        ("out[1024] = 1u;", "leaves array 0, at byte 4096 of 256"),
        ("out[-1024] = 1u;", "leaves array 0, at byte -4096 of 256"),
        ("out[64] = 1u;", "leaves array 0, at byte 256 of 256"),
        ("((u32*)in)[0] = 1u;", "writes read-only array 1, at byte 0 of 4"),
        ("((u32*)in)[3] = 1u;", "array 1"),
        ("*(volatile u32*)16 = 1u;", "access to address 0x10"),
    ],
)
def test_a_plain_access_out_of_bounds_is_noticed(access: str, says: str) -> None:
    read_only = np.zeros(1, np.uint32)
    read_only.flags.writeable = False
    error = fault(f"EMMY_KERNEL(32, 1) k(u32* out, const u32* in) {{ {access} }}", np.zeros(64, np.uint32), read_only)
    assert error.kind in ("bounds", "fault")
    assert says in str(error)


def test_a_plain_store_just_behind_an_array_is_noticed() -> None:
    error = fault("EMMY_KERNEL(32, 1) k(u32* out) { out[1] = 1u; }", np.zeros(1, np.uint32))
    assert "just outside array 0" in str(error)


def test_a_loop_without_end_is_given_up() -> None:
    kernel = "EMMY_KERNEL(32, 1) k() { for (int i = 0; i >= 0; i = i == 5 ? 0 : i + 1) emmy_syncwarp(); }"
    assert fault(kernel, budget=10_000).kind == "budget"


def test_a_run_after_a_fault_is_not_disturbed() -> None:
    assert fault("EMMY_KERNEL(32, 1) k(u32* out) { out[1024] = 1u; }", np.zeros(64, np.uint32)).kind == "bounds"
    CASES["tma_ring"].run()


def test_a_variable_nobody_set_is_not_zero() -> None:
    kernel = """EMMY_KERNEL(32, 1) k(float* out) {
  float d[4];
  u32 a[4] = {0u, 0u, 0u, 0u}, b[2] = {0u, 0u};
  emmy_mma_f32_f16(d, a, b);
  emmy_stg_b128(out + threadIdx.x * 4, (u32*)d);
}"""
    out = np.zeros(128, np.float32)
    run(kernel, out)
    assert np.isnan(out).all()


def test_unwritten_shared_memory_reads_as_nan() -> None:
    kernel = """EMMY_KERNEL(32, 1) k(float* out) {
  EMMY_SMEM(smem);
  u32 r[1];
  emmy_lds_b32(r, smem + 4 * threadIdx.x);
  emmy_stg_b32(out + threadIdx.x, r);
}"""
    out = np.zeros(32, np.float32)
    assert run(kernel, out).stats.uninitialised_words == 32
    assert np.isnan(out).all()


def test_text_that_does_not_compile_is_shown_with_its_line() -> None:
    with pytest.raises(CompileError, match=r"kernel:\d+:.*nonsense"):
        run("EMMY_KERNEL(32, 1) k() { nonsense; }")


def test_a_helper_that_does_not_exist_is_named() -> None:
    with pytest.raises(CompileError, match="there is no helper emmy_ldmatrix_x3"):
        run("EMMY_KERNEL(32, 1) k() { emmy_ldmatrix_x3(); }")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "takes 1 arguments, got 0"),
        ({"args": [np.zeros((4, 4), np.uint32).T]}, "must be contiguous"),
        ({"args": [1], "block": (33,)}, "blocks of 33 threads"),
        ({"args": [1], "grid": (3,), "cluster": (2,)}, "is not a multiple of cluster"),
        ({"args": [1], "grid": (32,), "cluster": (32,)}, "more than 16 blocks"),
    ],
)
def test_a_launch_that_does_not_fit_is_refused(arguments: dict[str, object], says: str) -> None:
    launch = {"grid": (1,), "block": (32,), "args": [], "cluster": (1,), **arguments}
    with pytest.raises(UsageError, match=says):
        emulate(
            "EMMY_KERNEL(32, 1) k(u64 x) {}", "k", launch["grid"], launch["block"], 0, launch["args"],
            cluster=launch["cluster"],
        )  # fmt: skip


def test_two_views_of_one_array_are_refused() -> None:
    whole = np.zeros(64, np.uint32)
    with pytest.raises(UsageError, match="views of the same memory"):
        run("EMMY_KERNEL(32, 1) k(u32* a, u32* b) {}", whole, whole[:32])


def test_a_source_without_the_kernel_is_refused() -> None:
    with pytest.raises(CompileError, match="no kernel 'other'; it has k"):
        emulate("EMMY_KERNEL(32, 1) k() {}", "other", (1,), (32,), 0, [])


@pytest.mark.parametrize(
    ("box", "options", "says"),
    [
        ((64, 8), {"swizzle_bytes": 64}, "rows of 128 bytes under a swizzle of 64"),
        ((64, 8), {"swizzle_bytes": 16}, "swizzle of 16 bytes"),
        ((4, 8), {}, "rows of 8 bytes"),
        ((64, 300), {}, "each side is 1 to 256"),
        ((64, 8, 2), {}, "do not go together"),
        ((8, 8), {"dims": (64, 64), "strides_bytes": (128,)}, "covers 8192 bytes of an array of 4096"),
        ((8, 8), {"dims": (60, 32), "strides_bytes": (120,)}, "strides"),
    ],
)
def test_a_tensor_map_that_the_hardware_does_not_take_is_refused(
    box: tuple[int, ...], options: dict[str, object], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        TensorMap(np.zeros((32, 64), np.float16), box, **options)


def test_a_tensor_map_of_another_rank_than_its_copy_is_noticed() -> None:
    kernel = """EMMY_KERNEL(32, 1) k(EMMY_TENSORMAP(map)) {
  EMMY_SMEM(smem);
  if (threadIdx.x == 0) {
    emmy_mbar_init(smem + 512, 1);
    emmy_mbar_fence_init();
    emmy_tma_load_3d(smem, &map, smem + 512, 0, 0, 0);
  }
}"""
    error = fault(kernel, TensorMap(np.zeros((32, 64), np.float16), (8, 8)))
    assert "TMA load of 3 dimensions with a tensor map of 2" in str(error)
