"""Blocks of a cluster that bring each other what they read alike: right on the emulator, and compiled without spills."""

from __future__ import annotations

import pytest

from emmy.codegen.emulator import SCHEDULES
from emmy.codegen.nvrtc import compile_cubin
from emmy.ir.target import load_target
from tests.cuda_codegen.emulated import Run, nothing_but_numbers, unit

GROUPS = "k0/split(m,warpgroup,64) k0/stage(A,tma,2) k0/stage(B,tma,2)"
WARPS = "k0/split(k,serial,32) k0/split(m,warp,16) k0/split(n,warp,16) k0/stage(A,tma,2) k0/stage(B,tma,2) k0.C/atom(mma,16,8,16)"
# name -> (op, schedule, sizes of symbols)
CASES: dict[str, tuple[str, str, tuple[tuple[str, int], ...]]] = {
    "B of two blocks": (
        "matmul:200x100x192:f16:nk",
        f"k0/split(m,grid,128) k0/split(n,grid,64) k0/split(m,cluster,64) k0/split(k,serial,64) {GROUPS} k0.C/atom(wgmma,64,64,16)",
        (),
    ),
    "A of two blocks, a producer": (
        "matmul:130x104x160:bf16",
        "k0/split(m,grid,64) k0/split(n,grid,64) k0/split(n,cluster,32) k0/split(k,serial,32) "
        f"{GROUPS} k0/specialize(1,0,0) k0.C/atom(wgmma,64,32,16)",
        (),
    ),
    "four blocks walk tiles": (
        "matmul:40x320x72:bf16:nk,bias",
        f"k0/split(m,grid,32) k0/split(n,grid,128) k0/split(n,cluster,32) {WARPS} k0/persist(4)",
        (),
    ),
    "a producer, walked, a cluster that is half beyond the edge": (
        "matmul:m(1..200)x48x192:f16:nk",
        "k0/split(m,grid,128) k0/split(n,grid,16) k0/raster(2) k0/split(m,cluster,64) k0/split(k,serial,64) "
        f"{GROUPS} k0/specialize(1,0,0) k0/persist(2) k0.C/atom(wgmma,64,16,16)",
        (("m", 140),),
    ),
    "operands ahead, stored by the copy engine": (
        "matmul:40x64x72:bf16:nk",
        f"k0/split(m,grid,32) k0/split(n,grid,32) k0/split(m,cluster,16) {WARPS} k0.C/pipeline() k0/store(C,tma)",
        (),
    ),
    "early": (
        "matmul:40x160x72:bf16:nk",
        f"k0/split(m,grid,32) k0/split(n,grid,64) k0/split(n,cluster,32) {WARPS} k0/pdl()",
        (),
    ),
    "tokens of two blocks, weights as rows": (
        "matmul:16x256x160:f16:bias",
        "k0/swap(C) k0/split(m,grid,16) k0/split(n,grid,128) k0/split(n,cluster,64) k0/split(k,serial,64) "
        "k0/split(n,warpgroup,64) k0/stage(A,tma,2) k0/stage(B,tma,2) k0/specialize(1,0,0) k0/persist(2) "
        "k0.C/atom(wgmma,64,16,16)",
        (),
    ),
    "partial sums": (
        "matmul:40x64x128:f16",
        f"k0/splitk(C,2) k0/split(m,grid,32) k0/split(n,grid,32) k0/split(m,cluster,16) {WARPS}",
        (),
    ),
}


@pytest.mark.parametrize("order", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, len(SCHEDULES)))])
@pytest.mark.parametrize("name", CASES)
def test_what_a_cluster_shares_is_right_in_every_order(name: str, order: int):
    op, schedule, sizes = CASES[name]
    error, stats = Run(op, "h200", schedule, sizes, order=order).error_norm()
    assert error <= 1 and nothing_but_numbers(stats)
    assert "_multicast(" in unit(op, schedule, "h200").text.rsplit("#endif")[-1]


@pytest.mark.parametrize("name", ["B of two blocks", "operands ahead, stored by the copy engine", "early"])
def test_a_cluster_asks_memory_once_for_what_its_blocks_read_alike(name: str):
    op, schedule, sizes = CASES[name]
    alone = " ".join(w for w in schedule.split() if ",cluster," not in w)
    both = (Run(op, "h200", x, sizes).error_norm()[1][0].tma_load_bytes for x in (schedule, alone))
    assert next(both) == next(both)


LARGE = {
    "128 x 256 by two warpgroups, B shared": (
        "matmul:4096x8192x3840:f16:nk",
        "k0/split(m,grid,256) k0/split(n,grid,160) k0/split(m,cluster,128) k0/split(k,serial,64) k0/split(m,warpgroup,64) "
        "k0/stage(A,tma,5) k0/stage(B,tma,5) k0/specialize(2,40,232) k0/persist(132) k0.C/atom(wgmma,64,160,16)",
    ),
    "activations shared": (
        "matmul:32x30720x3840:f16:nk",
        "k0/split(m,grid,64) k0/split(n,grid,256) k0/split(n,cluster,128) k0/split(k,serial,64) k0/split(m,warpgroup,64) "
        "k0/stage(A,tma,6) k0/stage(B,tma,6) k0/specialize(1,0,0) k0/persist(132) k0.C/atom(wgmma,64,128,16)",
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_tiles_of_a_cluster_compile_without_spills(name: str):
    op, schedule = LARGE[name]
    cubin = compile_cubin(unit(op, schedule, "h200").text, load_target("h200").arch)
    assert cubin.spill_bytes == 0 and not cubin.warnings
