"""A residual that waits in the last-level cache: each element is asked for once, nothing else changes, and searches find it."""

from __future__ import annotations

import random
import re
from difflib import ndiff
from itertools import islice

import pytest

from emmy.codegen.nvrtc import compile_cubin
from emmy.errors import EmuError
from emmy.ir.moves import Prefetch
from emmy.ir.ops import parse_op
from emmy.ir.schedule import parse_move, replay
from emmy.ir.target import load_target
from emmy.search.schedule_space import ScheduleSpace
from tests.cuda_codegen.emulated import Run, unit
from tests.emulator.generated import emulated_as

H200 = load_target("h200")
GROUP = "k0/split(m,grid,{m}) k0/split(n,grid,32) k0/split(k,serial,64) k0/split(m,warpgroup,64) k0/stage(A,tma,2) k0/stage(B,tma,2)"
WGMMA = "k0.C/atom(wgmma,64,32,16)"
PRODUCER = f"{GROUP.format(m=128)} k0/specialize(2,40,232) {{order}} {WGMMA} k0/prefetch(R,1)"
RUNS = {
    "a producer, tiles walked": Run("matmul:200x72x256:f16:nk,residual", "h200", PRODUCER.format(order="k0/persist(2)")),
    "a producer, steps shared": Run("matmul:200x72x256:f16:nk,residual", "h200", PRODUCER.format(order="k0/streamk(5)")),
    "no share has so many fills": Run(
        "matmul:128x32x256:f16:nk,residual", "h200", PRODUCER.format(order="k0/streamk(3)").replace("R,1", "R,3")
    ),
    "tiles in turn": Run(
        "matmul:150x72x192:f16:nk,residual", "h200",
        f"{GROUP.format(m=64)} k0/specialize(2,40,232) k0/persist(2) k0/pingpong() {WGMMA} k0/prefetch(R,2)".replace(
            "k0/split(m,warpgroup,64) ", ""
        ),
    ),
    "self-fed, stored by the engine": Run(
        "matmul:100x72x200:bf16:nk,bias,residual", "h200", f"{GROUP.format(m=64)} {WGMMA} k0/store(Y,tma) k0/prefetch(R,0)"
    ),
    "a bias too": Run(
        "matmul:60x72x200:f16:nk,bias,residual", "h200", f"{GROUP.format(m=64)} {WGMMA} k0/prefetch(R,1) k0/prefetch(bias,3)"
    ),
    "early": Run("matmul:200x72x256:f16:nk,residual", "h200", f"{PRODUCER.format(order='')} k0/pdl()"),
    "early, self-fed": Run("matmul:100x72x200:f16:nk,residual", "h200", f"{GROUP.format(m=64)} {WGMMA} k0/prefetch(R,0) k0/pdl()"),
    "blocks side by side": Run(
        "matmul:200x64x128:f16:nk,residual", "h200",
        f"{GROUP.format(m=128).replace('k0/split(k', 'k0/split(m,cluster,64) k0/split(k')} k0/specialize(1,0,0) {WGMMA} k0/prefetch(R,1)",
    ),
    "swapped, blocks share k": Run(
        "matmul:m(1..16)x136x256:f16:nk,residual", "h200",
        "k0/swap(C) k0/split(m,grid,16) k0/split(n,grid,64) k0/split(k,cluster,128) k0/split(k,serial,64) k0/split(n,warpgroup,64) "
        "k0/stage(A,tma,2) k0/stage(B,tma,2) k0/specialize(1,0,0) k0.C/atom(wgmma,64,16,16) k0/prefetch(R,1)",
        (("m", 13),),
    ),
    "warps": Run(
        "matmul:m(1..50)x40x104:bf16:residual", "rtx5090",
        "k0/split(m,grid,32) k0/split(n,grid,24) k0/split(k,serial,32) k0/split(m,warp,16) k0/split(n,warp,24) "
        "k0/stage(A,cp_async,3) k0/stage(B,cp_async,3) k0.C/atom(mma,16,8,16) k0/prefetch(R,2)",
        (("m", 45),),
    ),
}  # fmt: skip
QUICK = ("a producer, tiles walked", "no share has so many fills", "early", "swapped, blocks share k", "warps")


@pytest.mark.parametrize("name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in RUNS])
def test_each_element_is_asked_for_once_and_the_answer_is_right(name: str):
    run = RUNS[name]
    error, (stats,) = run.error_norm()
    op, sizes = parse_op(run.op), dict(run.sizes)
    size = op.program().sizes(sizes)
    rows = {"R": size["m"], "bias": 1}  # of tiles, where a bias is asked for
    asked = re.findall(r"prefetch\((\w+),", run.schedule)
    assert error <= 1 and stats.prefetch_bytes == 2 * size["n"] * sum(rows[v] for v in asked)


@pytest.mark.parametrize("name", RUNS)
def test_nothing_else_changes(name: str):
    run = RUNS[name]
    text, without = (
        unit(run.op, s, run.gpu).text.rsplit("#endif")[-1].replace("EMMY_TENSORMAP(R_map), ", "").splitlines()
        for s in (run.schedule, re.sub(r" k0/prefetch\(\w+,\d+\)", "", run.schedule))
    )
    added = [x.strip() for x in ndiff(without, text) if x[0] == "+"]
    removed = [x for x in ndiff(without, text) if x[0] == "-" and "EMMY_KERNEL" not in x]
    assert not removed and any("emmy_tma_prefetch_2d(&R_map" in x for x in added)
    allowed = r"\+ +(if \(|\}|EMMY_KERNEL|emmy_syncwarp|emmy_tma_prefetch_2d|const int elected)"
    assert all(re.match(allowed, x) for x in added)


def test_an_early_launch_asks_for_what_is_not_constant_only_after_its_wait():
    run = RUNS["early"]
    u = unit(run.op, run.schedule, run.gpu)
    asked = re.search(r"emmy_tma_prefetch_2d\(.*?;", u.text[u.text.rindex("#endif") :])
    assert asked
    hasty = u.text.replace("emmy_pdl_launch();", "emmy_pdl_launch(); emmy_tma_prefetch_2d(&R_map, 0, 0);", 1)
    with pytest.raises(EmuError, match="wait does not come first"):
        emulated_as(run.op, u, hasty)


REFUSED = {
    "matmul:64x72x128:f16:nk,bias": ("k0/prefetch(R,1)", "finishes its elements with bias, not R"),
    "matmul:64x70x128:f16:nk,residual": ("k0/prefetch(R,1)", "rows of 4 bytes at a time: the copy engine takes 16"),
    "matmul:64x72x128:f16:nk,residual": ("k0/prefetch(R,2)", "a tile has 2 fills over k: fill 2 is none of 0..1"),
    "matmul:64x72x128:bf16:nk,residual": ("k0/prefetch(A,1)", "finishes its elements with R, not A"),
}


@pytest.mark.parametrize("op", REFUSED)
def test_it_refuses(op: str):
    move, why = REFUSED[op]
    plan = replay(parse_op(op).program(), GROUP.format(m=64), H200)
    assert why in (parse_move(move).refuse(plan, H200) or "")


def test_it_refuses_where_nothing_turns_and_where_there_is_no_engine():
    program, move = parse_op("matmul:64x72x128:f16:nk,residual").program(), Prefetch("k0", None, "R", 1)
    assert "0 rings, none filled in a loop" in (move.refuse(replay(program, "", H200), H200) or "")
    ampere = load_target("rtx4090")
    assert "no copy engine" in (move.refuse(replay(program, "", ampere), ampere) or "")


def test_a_tile_of_128_by_256_compiles_without_spills():
    schedule = (
        "k0/split(m,grid,128) k0/split(n,grid,256) k0/split(k,serial,64) k0/split(m,warpgroup,64) k0/split(n,warpgroup,256) "
        "k0/raster(16) k0/stage(A,tma,4) k0/stage(B,tma,4) k0/specialize(2,40,232) k0/persist(132) k0.C/atom(wgmma,64,256,16) "
        "k0/prefetch(R,30)"
    )
    cubin = compile_cubin(unit("matmul:2048x4096x3840:f16:nk,residual", schedule, "h200").text, H200.arch)
    assert cubin.spill_bytes == 0 and not cubin.warnings


@pytest.mark.slow
def test_a_search_finds_it():
    space, rng = ScheduleSpace(parse_op("matmul:2048x4096x3840:f16:nk,residual"), H200), random.Random(0)
    sampled = (space.sample(rng).key for _ in range(400))
    found = list(islice((key for key in sampled if "/prefetch(R," in key), 3))
    assert len(found) == 3 and all("emmy_tma_prefetch_2d" in unit(str(space.op), key, "h200").text for key in found)
