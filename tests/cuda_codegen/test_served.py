"""A server's attention on the emulator: rows of [tokens, heads, D] and one cache of keys and values, in exact generated text."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from emmy.codegen.build import source
from emmy.codegen.emulated import emulate_plan
from emmy.codegen.gpu_build import build
from emmy.codegen.gpu_plan import ENDLESS, plan_lines
from emmy.codegen.kernel_gpu import GpuKernel
from emmy.ir.gpu import accumulation
from emmy.ir.ops import ServedAttention, parse_op
from emmy.ir.target import load_target
from tests.cuda_codegen.emulated import nothing_but_numbers, unit
from tests.cuda_codegen.test_paged import NOWHERE, in_parts

HEADS = "k0/split(b,grid,1) k0/split(g,grid,1)"


def by_warps(axis: str, rows: int, keys: int, how: str, depth: int = 2) -> str:
    alone = " k0/split(q,grid,1)" * (axis == "s")
    return (
        f"k0/online(O) {HEADS}{alone} k0/split({axis},grid,{rows}) k0/split(t,serial,{keys}) k0/split({axis},warp,16) "
        f"k0/stage(K,{how},{depth}) k0/stage(Q,{how},1) k0/stage(V,{how},{depth}) k0.O/atom(mma,16,8,16,1,o) k0.S/atom(mma,16,8,16)"
    )


def by_groups(keys: int, depth: int, dim: int, columns: str = "") -> str:
    return (
        f"k0/online(O) {HEADS} k0/split(q,grid,1) k0/split(s,grid,{64 if columns else 128}) k0/split(t,serial,{keys}) "
        f"k0/split(s,warpgroup,64) {columns}k0/stage(K,tma,{depth}) k0/stage(Q,tma,1) k0/stage(V,tma,{depth}) "
        f"k0/specialize(2,40,232) k0.O/atom(wgmma,64,{dim},16,1,o) k0.S/atom(wgmma,64,{keys},16)"
    )


# (op, target, schedule, size of m, lengths or keys before)
CASES = {
    "decode on Hopper": (
        "served_attention:m(1..3)x4x1x96x32:bf16:kv2,page16,window40,pcjgd", "h200",
        in_parts(by_warps("q", 16, 32, "tma"), 3, 32), 3, (90, 0, 33),
    ),
    "decode on Blackwell": (
        "served_attention:3x4x1x96x32:f16:kv2,page16,pjgcd", "rtx5090", by_warps("q", 16, 32, "tma"), 0, (96, 1, 50),
    ),
    "decode of wide heads": (
        "served_attention:m(1..2)x16x1x128x64:bf16:kv1,page64,pcjgd", "h200",
        in_parts(by_warps("q", 16, 32, "cp_async"), 4, 32).replace("k0/stage(K", "k0/split(e,warp,32) k0/stage(K", 1), 2, (128, 7),
    ),
    "a prompt on Hopper": (
        "served_attention:1x4xm(2..200)x256x64:bf16:kv2,page16,window90,pcjgd", "h200", by_groups(64, 2, 64), 150, (37,),
    ),
    "a prompt on Blackwell": (
        "served_attention:1x4xm(2..70)x96x32:bf16:kv2,page16,window24,pjgcd", "rtx5090", by_warps("s", 32, 32, "tma"), 50, (17,),
    ),
    "a prompt of wide heads": (
        "served_attention:1x2xm(2..70)x128x64:f16:kv1,page64,pcjgd", "h200", by_groups(64, 1, 32, "k0/split(e,warpgroup,32) "), 70, (5,),
    ),
}  # fmt: skip
RARER = {"decode of wide heads", "a prompt of wide heads", "decode on Blackwell", "a prompt on Hopper"}


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow) if x in RARER else x for x in CASES])
def test_it_is_right_and_asks_for_no_page_behind_a_sequence(name: str) -> None:
    text, gpu, schedule, size, told = CASES[name]
    op, u, sizes = parse_op(text), unit(text, schedule, gpu), {"m": size} if size else {}
    assert isinstance(op, ServedAttention)
    x = op.inputs("normal", 1, sizes)
    x[op.told] = np.array(told, np.int32)
    marked = {k: v.copy() for k, v in x.items()}
    for b, n in enumerate(told):
        marked["table"][b, -(-(n if op.decodes else n + size) // op.page) :] = NOWHERE
    out, stats = emulate_plan(u, marked, sizes, seed=1)
    assert op.error_norm(out, x, "normal", accumulation(u.plan)) < 0.5
    assert nothing_but_numbers(stats)
    if 0 in told and op.decodes:
        assert not out["O"][told.index(0)].any()


def test_a_kernel_serves_a_pool_of_any_size() -> None:
    text, gpu, schedule, *_ = CASES["decode on Hopper"]
    op, target = parse_op(text), load_target(gpu)
    assert isinstance(op, ServedAttention)
    units = [source(replace(op, pool=n, length=m), schedule, target) for n, m in ((0, 0), (500, 64))]
    assert units[0].digest == units[1].digest
    lines = [plan_lines(u.plan, tuple(k for k in u.kernels if isinstance(k, GpuKernel))) for u in units]
    maps = [[x for x in some if x.startswith("map cache")] for some in lines]
    assert maps[0] == maps[1] and len(maps[0]) == 2  # keys' and values'
    assert all(x.rsplit(" : ", 2)[1] == str(ENDLESS) for x in maps[0])


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["h200", "rtx5090"])
@pytest.mark.parametrize("queries", ["1", "m(2..8192)"])
def test_gemma_s_layers_compile_without_spills(gpu: str, queries: str) -> None:
    target, shape = load_target(gpu), "m(1..64)x16x1x1152x256" if queries == "1" else f"1x16x{queries}x16384x256"
    op = f"served_attention:{shape}:bf16:kv8,window1024,page16,pcjgd"
    schedule = by_groups(64, 2, 256) if gpu == "h200" else by_warps("s", 64, 32, "tma", 1)
    schedule = in_parts(by_warps("q", 16, 32, "tma"), 9, 64) if queries == "1" else schedule
    assert build(unit(op, schedule, gpu), target).static["spill_bytes"] == 0
