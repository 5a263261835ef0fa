"""Vectors that lanes ask for while the last sums are made: the answer stays right, they come sooner, and searches find it."""

from __future__ import annotations

import random
from itertools import islice, pairwise

import pytest

from emmy.codegen.cubin import read_cubin
from emmy.codegen.nvrtc import compile_cubin
from emmy.ir.ops import parse_op
from emmy.ir.schedule import parse_move, replay
from emmy.ir.target import load_target
from emmy.search.schedule_space import ScheduleSpace
from tests.cuda_codegen.emulated import Run, unit

H200 = load_target("h200")
TILE = "k0/split(m,grid,{m}) k0/split(n,grid,{n}) k0/split(k,serial,64) k0/split(m,warpgroup,64) k0/stage(A,tma,{d}) k0/stage(B,tma,{d})"
ALONE = TILE.format(m=64, n=64, d=2).replace(" k0/split(m,warpgroup,64)", "")
RUNS = {
    "tiles walked, columns that make no vector": Run(
        "matmul:200x80x256:f16:nk,bias,residual", "h200",
        f"{TILE.format(m=128, n=80, d=2)} k0/specialize(2,40,232) k0/persist(2) k0.C/atom(wgmma,64,80,16) k0/preload(R,3)",
    ),
    "tiles in turn": Run(
        "matmul:150x72x192:f16:nk,residual", "h200",
        f"{ALONE} k0/specialize(2,40,232) k0/persist(2) k0/pingpong() k0.C/atom(wgmma,64,64,16) k0/preload(R,4)",
    ),
    "self-fed, a bias and a number too, fewer fills than slots": Run(
        "matmul:100x80x120:bf16:nk,bias,scale,residual", "h200",
        f"{TILE.format(m=64, n=80, d=3)} k0.C/atom(wgmma,64,80,16) k0/preload(R,3) k0/preload(bias,2) k0/preload(scale,1)",
    ),
    "a statistic, stored by the engine": Run(
        "matmul:100x128x128:f16:nk,residual,sum_squares", "h200",
        f"k0/splitk(S,2) k0/finish(S) {TILE.format(m=64, n=64, d=2).replace('k0/split(n,grid,64) ', '')} k0/specialize(1,0,0) "
        "k0/persist(3) k0.C/atom(wgmma,64,64,16) k0/store(Y,tma) k0/prefetch(R,1) k0/preload(R,4)",
    ),
    "a vector a step, those that make none too, a bias meanwhile": Run(
        "matmul:100x80x512:f16:nk,bias,residual", "h200",
        f"{TILE.format(m=64, n=80, d=2)} k0/specialize(1,0,0) k0/persist(1) k0.C/atom(wgmma,64,80,16) k0/preload(R,4,7,1) "
        "k0/preload(bias,2,5)",
    ),
    "two vectors a step, of three": Run(
        "matmul:200x72x384:f16:nk,residual", "h200",
        f"{TILE.format(m=128, n=64, d=2)} k0/specialize(2,40,232) k0/persist(3) k0.C/atom(wgmma,64,64,16) k0/preload(R,3,4,2)",
    ),
    "two at steps that overlap": Run(
        "matmul:100x64x360:f16:nk,bias,residual", "h200",
        f"{TILE.format(m=64, n=64, d=2)} k0.C/atom(wgmma,64,64,16) k0/preload(R,4,6,1) k0/preload(bias,2,4,1) k0/pdl()",
    ),
    "early, an open size": Run(
        "matmul:m(1..100)x64x200:f16:nk,residual", "h200",
        f"{TILE.format(m=64, n=64, d=2)} k0/specialize(1,0,0) k0.C/atom(wgmma,64,64,16) k0/preload(R,1) k0/pdl()", (("m", 77),),
    ),
}  # fmt: skip
QUICK = ("tiles walked, columns that make no vector", "self-fed, a bias and a number too, fewer fills than slots")


@pytest.mark.parametrize("name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in RUNS])
def test_the_answer_is_right(name: str):
    error, _ = RUNS[name].error_norm()
    assert error <= 1


def test_vectors_are_asked_for_one_turn_of_the_rings_before_the_end_and_exchanged_before_the_last_step():
    run = RUNS["tiles walked, columns that make no vector"]
    lines = [x.strip() for x in unit(run.op, run.schedule, run.gpu).text.rsplit("#endif")[-1].splitlines()]
    starts = [
        next(i for i, x in enumerate(lines) if x.startswith(begin))
        for begin in (
            "for (int k1 = 0; k1 < 128;",
            "for (int ahead = 0; ahead < 3;",
            "for (int k1 = 128; k1 < 192;",
            "for (int come = 0; come < 3;",
            "for (int k1 = 192; k1 < 256;",
            "emmy_wgmma_wait<0>",
        )
    ]
    assert starts == sorted(starts)


GROUP = TILE.format(m=64, n=64, d=2)
SWAPPED = (
    f"k0/swap(C) {GROUP.replace('k0/split(m,warpgroup,64)', 'k0/split(n,warpgroup,64)')} k0.C/atom(wgmma,64,64,16)"
)
WARPS = "k0/split(m,grid,16) k0/split(n,grid,64) k0/split(k,serial,32) k0/stage(A,tma,2) k0/stage(B,tma,2) k0.C/atom(mma,16,8,16)"
WGMMA = f"{GROUP} k0.C/atom(wgmma,64,64,16)"
REFUSED = {
    "not read": ("64x64x128:f16:nk,bias", WGMMA, "preload(R,1)", "finishes its elements with bias, not R"),
    "sums done": ("64x64x128:f16:nk,residual", WARPS, "preload(R,1)", "has mma and 2 rings: no sums are under way"),
    "one slot": (
        "64x64x128:f16:nk,residual",
        WGMMA.replace(",tma,2", ",tma,1"),
        "preload(R,1)",
        "no sums are under way",
    ),
    "swapped": (
        "64x64x128:f16:nk,residual",
        SWAPPED,
        "preload(R,1)",
        "sums of C change hands among threads of 1 blocks",
    ),
    "short rows": ("64x70x128:f16:nk,residual", WGMMA, "preload(R,1)", "rows of Y, R allow 4 bytes at a time"),
    "too many": ("64x64x128:f16:nk,residual", WGMMA, "preload(R,5)", "a lane has 4 vectors of R: 5 is none of 1..4"),
    "a part of a bias": ("64x64x128:f16:nk,bias", WGMMA, "preload(bias,1)", "2 vectors of bias: 1 is none of 2..2"),
    "shared tiles": (
        "200x72x256:f16:nk,residual",
        f"{TILE.format(m=128, n=64, d=2)} k0/specialize(2,40,232) k0/streamk(5) k0.C/atom(wgmma,64,64,16)",
        "preload(R,4)",
        "5 blocks share tiles of k0: only the sums' end tells",
    ),
    "too soon": (
        "64x64x128:f16:nk,residual",
        WGMMA,
        "preload(R,4,3)",
        "asked for 3 steps before the end of 2: none of 2..2",
    ),
    "too few steps": (
        "64x64x512:f16:nk,residual",
        WGMMA,
        "preload(R,4,4,1)",
        "4 vectors of R, 1 a step, take 4 steps: from 4 before the end, 3 are left",
    ),
    "at once": ("64x64x512:f16:nk,residual", WGMMA, "preload(R,4,6,4)", "4 vectors of R are no more than 4 a step"),
    "registers": (
        "128x192x128:f16:nk,residual",
        TILE.format(m=128, n=192, d=2).replace("warpgroup,64", "warpgroup,128") + " k0.C/atom(wgmma,64,192,16)",
        "preload(R,24)",
        "24 vectors of R take 112 registers with their addresses, beside 208: a thread has 255",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_refuses(what: str):
    op, schedule, move, why = REFUSED[what]
    assert why in (
        parse_move(f"k0/{move}").refuse(replay(parse_op(f"matmul:{op}").program(), schedule, H200), H200) or ""
    )


def test_a_tile_of_128_by_256_holds_all_its_vectors_without_spills_while_it_multiplies():
    schedule = (
        "k0/split(m,grid,128) k0/split(n,grid,256) k0/split(k,serial,64) k0/split(m,warpgroup,64) k0/split(n,warpgroup,256) "
        "k0/raster(16) k0/stage(A,tma,4) k0/stage(B,tma,4) k0/specialize(2,40,232) k0/persist(132) k0.C/atom(wgmma,64,256,16) "
    )
    cubin = compile_cubin(
        unit("matmul:2048x4096x3840:f16:nk,residual", f"{schedule} k0/preload(R,16)", "h200").text, H200.arch
    )
    (facts,) = read_cubin(cubin.data)
    assert cubin.spill_bytes == 0 and not cubin.warnings
    assert facts.mix["LDG"] == 16 and facts.mix["HGMMA"] == 3 * 4


def test_asked_for_sooner_they_come_one_a_step_and_are_exchanged_some_at_each_of_the_last():
    run = RUNS["a vector a step, those that make none too, a bias meanwhile"]
    lines = [x.strip() for x in unit(run.op, run.schedule, run.gpu).text.rsplit("#endif")[-1].splitlines()]
    begins = (
        "emmy_ldg_b128_nc(R_words",
        "emmy_ldg_b128_nc(bias_words",
        "emmy_transpose_quad(R_words",
        "emmy_wgmma_wait<0>",
    )
    at = [next(i for i, x in enumerate(lines) if begin in x) for begin in begins]
    steps = [i for i, x in enumerate(lines) if x.startswith("for (int k1")]
    assert at == sorted(at) and all(any(a < i < b for i in steps) for a, b in pairwise(at))
    cubin = compile_cubin(unit(run.op, run.schedule, run.gpu).text, H200.arch)
    (facts,) = read_cubin(cubin.data)
    assert cubin.spill_bytes == 0 and not cubin.warnings and facts.mix["HGMMA"] > 4 * 5


@pytest.mark.slow
def test_a_search_finds_it():
    space, rng = ScheduleSpace(parse_op("matmul:2048x4096x3840:f16:nk,residual"), H200), random.Random(0)
    sampled = (space.sample(rng).key for _ in range(400))
    found = list(islice((key for key in sampled if "/preload(R," in key), 3))
    assert len(found) == 3 and all("u32 R_words" in unit(str(space.op), key, "h200").text for key in found)
