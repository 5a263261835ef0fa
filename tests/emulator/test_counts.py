"""What a run counts, against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from emmy.codegen.emulator import EmuStats, emulate
from emmy.codegen.ptx import prelude, used
from tests.emulator.cases import CASES


def run(kernel: str, *args: object, block: int = 32, smem_bytes: int = 0) -> EmuStats:
    return emulate(prelude(used(kernel), "sm_90a") + kernel, "k", (1,), (block,), smem_bytes, args).stats


@pytest.mark.parametrize(("stride", "waves"), [(4, 1), (8, 2), (16, 4), (128, 32), (0, 1), (132, 1)])
def test_a_stride_of_words_costs_as_many_waves_as_lanes_share_a_bank(stride: int, waves: int) -> None:
    kernel = f"""EMMY_KERNEL(32, 1) k(u32* out) {{
  EMMY_SMEM(smem);
  u32 r[1];
  emmy_lds_b32(r, smem + threadIdx.x * {stride});
  emmy_stg_b32(out + threadIdx.x, r);
}}"""
    stats = run(kernel, np.zeros(32, np.uint32), smem_bytes=8192)
    assert (stats.smem_load_waves, stats.smem_load_waves_ideal) == (waves, 1)
    assert stats.bank_conflict == waves
    assert stats.uninitialised_words == 32


def test_16_byte_loads_go_by_quarters_of_a_warp() -> None:
    kernel = """EMMY_KERNEL(32, 1) k(u32* out) {
  EMMY_SMEM(smem);
  u32 r[4];
  emmy_lds_b128(r, smem + threadIdx.x * 32);
  emmy_stg_b128(out + threadIdx.x * 4, r);
}"""
    stats = run(kernel, np.zeros(128, np.uint32), smem_bytes=1024)
    assert (stats.smem_load_waves, stats.smem_load_waves_ideal) == (8, 4)


@pytest.mark.parametrize(("stride", "sectors"), [(1, 4), (2, 8), (8, 32), (64, 32)])
def test_a_global_load_moves_every_sector_it_touches(stride: int, sectors: int) -> None:
    kernel = f"""EMMY_KERNEL(32, 1) k(const u32* in, u32* out) {{
  u32 r[1];
  emmy_ldg_b32(r, in + threadIdx.x * {stride});
  emmy_stg_b32(out + threadIdx.x, r);
}}"""
    stats = run(kernel, np.zeros(2048, np.uint32), np.zeros(32, np.uint32))
    assert (stats.global_load_sectors, stats.global_load_sectors_ideal) == (sectors, 4)
    assert (stats.global_store_sectors, stats.global_load_bytes, stats.global_store_bytes) == (4, 128, 128)


def test_lanes_of_a_divergent_branch_are_counted_together() -> None:
    kernel = """EMMY_KERNEL(32, 1) k(const u32* in, u32* out) {
  u32 r[1] = {0u};
  if (threadIdx.x < 8) emmy_ldg_b32(r, in + threadIdx.x);
  emmy_stg_b32(out + threadIdx.x, r);
}"""
    assert run(kernel, np.zeros(32, np.uint32), np.zeros(32, np.uint32)).global_load_sectors == 1


def test_the_swizzle_of_a_ring_saves_its_bank_conflicts() -> None:
    case = CASES["ring"]
    swizzled, plain = case.run(), case.run(case.kernel.replace("chunk ^ (row >> 1 & 3)", "chunk"))
    assert swizzled.smem_load_waves == swizzled.smem_load_waves_ideal == plain.smem_load_waves_ideal
    assert plain.smem_load_waves == 4 * plain.smem_load_waves_ideal  # 8 rows of 64 bytes meet in 2 of 8 groups of banks


def test_stmatrix_and_cp_async_write_in_waves_too() -> None:
    kernel = """EMMY_KERNEL(32, 1) k(const u32* in) {
  EMMY_SMEM(smem);
  const int lane = threadIdx.x;
  u32 r[4] = {0u, 1u, 2u, 3u};
  emmy_stmatrix_x4(smem + lane * STRIDE, r);
  emmy_syncwarp();
  emmy_cp_async_b128(smem + 4096 + lane * STRIDE, in + 4 * lane);
  emmy_cp_async_commit();
  emmy_cp_async_wait<0>();
}"""
    for stride, waves in ((16, 1), (32, 2), (64, 4), (128, 8), (144, 1)):
        stats = run(kernel.replace("STRIDE", str(stride)), np.zeros(128, np.uint32), smem_bytes=4096 * 3)
        assert (stats.smem_store_waves, stats.smem_store_waves_ideal) == (2 * 4 * waves, 2 * 4)
        assert stats.smem_store_bytes == 2 * 512 and stats.smem_load_bytes == 0


def test_work_and_traffic_of_a_matmul_are_exact() -> None:
    stats = CASES["ring"].run()
    blocks, steps = 4, 5
    assert stats.mma == blocks * steps * 4 * 2 * 2 * 2
    assert stats.block_syncs == blocks * steps
    # of 128 rows in two blocks along m, 100 are there
    assert stats.cp_async_bytes == steps * 64 * (2 * 100 + 2 * 64)
    stats = CASES["multicast"].run()
    assert stats.tma_load_bytes == 5 * (8192 + 2 * 4096)  # A once for both blocks
    stats = CASES["wgmma_ring"].run()
    assert stats.wgmma_macs == 128 * 64 * 320
    assert stats.wgmma_bytes == 2 * (64 + 64) * 320 * 2  # two groups, each its half of A and all of B
