"""Warpgroups that take tiles in turn: the exact text is emulated, compiled, and found in the search space."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from emmy.api import with_pdl
from emmy.codegen.emulator import SCHEDULES
from emmy.codegen.nvrtc import compile_cubin
from emmy.costmodel.features import features
from emmy.errors import PlanError
from emmy.ir.ops import parse_op
from emmy.ir.schedule import replay
from emmy.ir.target import load_target
from emmy.search.schedule_space import ScheduleSpace
from emmy.testing.five_plans import FIVE_PLANS
from tests.cuda_codegen.emulated import Run, nothing_but_numbers, unit

H200 = load_target("h200")
EXAMPLE = next(e.schedule for e in FIVE_PLANS if e.name == "pingpong")
LARGE = ("matmul:4096x4096x3840:f16:nk", "matmul:4096x4096x3840:f16")


def turns(
    n: int, depth: int, blocks: int, m: int = 64, k: int = 64, roles: str = "2,40,232", raster: str = "", more: str = ""
) -> str:
    """So many blocks, whose consumers each make tiles of m x n by themselves."""
    return (
        f"k0/split(m,grid,{m}) k0/split(n,grid,{n}) k0/split(k,serial,{k}) {raster} k0/stage(A,tma,{depth}) k0/stage(B,tma,{depth}) "
        f"k0/specialize({roles}) k0/persist({blocks}) k0/pingpong() k0.C/atom(wgmma,64,{n},16) {more}"
    )


RUNS = {
    "no tile left for the second": Run("matmul:192x32x192:f16:nk", "h200", turns(32, 2, 2)),
    "seven tiles for two of two": Run("matmul:448x32x192:f16", "h200", turns(32, 2, 2)),
    "five tiles for one block": Run("matmul:320x32x256:bf16:nk,bias,gelu_tanh", "h200", turns(32, 3, 1)),
    "stored by the engine": Run(
        "matmul:300x96x128:bf16:bias,residual", "h200", turns(48, 3, 1, more="k0/store(Y,tma)")
    ),
    "exchanged": Run("matmul:m(1..300)x120x128:f16:nk,bias,residual", "h200", turns(120, 2, 1), (("m", 200),)),
    "a ring that holds several tiles": Run("matmul:640x16x72:f16:nk", "h200", turns(16, 5, 1)),
    "a tile is one fill": Run("matmul:640x16x64:f16", "h200", turns(16, 3, 1)),
    "one slot": Run("matmul:320x32x160:f16:nk", "h200", turns(32, 1, 1)),
    "three in turn": Run("matmul:m(1..700)x32x192:bf16:scale", "h200", turns(32, 2, 1, roles="3,32,160"), (("m", 650),)),
    "three warps' worth of registers": Run("matmul:320x64x128:f16:nk", "h200", turns(32, 2, 3, roles="2,0,0")),
    "tiles of two instructions": Run("matmul:384x64x128:f16:nk", "h200", turns(64, 2, 1, m=128, more="k0/store(C,tma)")),
    "in groups of rows": Run("matmul:320x96x128:f16", "h200", turns(32, 2, 2, raster="k0/raster(2)")),
    "the example among the five plans": Run("matmul:256x64x160:f16:nk", "h200", EXAMPLE),
    "beyond the edge of k": Run("matmul:256x32x200:f16:nk", "h200", turns(32, 2, 1), kind="integer"),
}  # fmt: skip


def body(run: Run) -> str:
    text = unit(run.op, run.schedule, run.gpu).text
    return text[text.rindex("#endif") :]


@pytest.mark.parametrize("order", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, len(SCHEDULES)))])
@pytest.mark.parametrize("name", RUNS)
def test_tiles_taken_in_turn_are_right_in_every_order_of_the_threads(name: str, order: int):
    error, stats = replace(RUNS[name], order=order).error_norm()
    assert error <= 1, f"error {error:.3g} of what is allowed"
    assert nothing_but_numbers(stats)


def random_turns(seed: int) -> Run:
    """Tiles of any size, rings and blocks for a problem of any size that they make."""
    rng = random.Random(seed)
    m, n, k = rng.choice((64, 64, 128)), rng.choice((16, 32, 48, 64)), rng.choice((16, 32, 64))
    rows, columns, depth = rng.randint(m, 9 * m), n * rng.randint(1, 3), 8 * rng.randint(k // 8, 48)
    options = [x for x in ("nk", "bias", "residual") if rng.random() < 0.4]
    op = f"matmul:{rows}x{columns}x{depth}:{rng.choice(('f16', 'bf16'))}" + ":" * bool(options) + ",".join(options)
    roles, out = rng.choice(("2,40,232", "3,32,160", "2,0,0")), "Y" if {*options} - {"nk"} else "C"
    more = rng.choice(("", f"k0/store({out},tma)"))
    schedule = turns(n, rng.randint(1, 5), rng.randint(1, 3), m, k, roles, more=more)
    return Run(op, "h200", schedule, kind=rng.choice(("normal", "integer")), order=rng.randrange(len(SCHEDULES)))


def check(run: Run) -> None:
    error, stats = run.error_norm()
    assert error <= 1 and nothing_but_numbers(stats), f"error {error:.3g} of what is allowed: {run}"


@pytest.mark.parametrize("seed", range(12))
def test_any_tiles_taken_in_turn_are_right(seed: int):
    check(random_turns(seed))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_many_tiles_taken_in_turn_are_right(block: int):
    for seed in range(100 + 20 * block, 120 + 20 * block):
        check(random_turns(seed))


def test_an_early_launch_may_take_tiles_in_turn():
    run = RUNS["five tiles for one block"]
    early = replace(run, schedule=with_pdl(run.op, run.schedule, gpu=run.gpu))
    assert "emmy_pdl_wait" in body(early) and early.error_norm()[0] <= 1


def test_consumers_share_one_text_and_one_turn_barrier_each():
    for name, n in (("seven tiles for two of two", 2), ("three in turn", 3)):
        text = body(RUNS[name])
        assert text.count("emmy_wgmma_commit") == text.count("setmaxnreg_inc") == 1
        assert f"(team + 1) % {n}" in text and f"warp < {4 * n})" in text


def test_counters_pass_over_the_fills_of_others():
    """A tile is four fills in a ring of three slots: a lap and a slot for each that another consumer takes."""
    text = body(RUNS["five tiles for one block"])
    assert "slot = slot + team * 4 % 3;" in text and "phase = phase ^ (team * 4 / 3 % 2);" in text
    assert re.search(r"phase = phase \^ 1;\n +slot = slot \+ 1;\n +if \(2 < slot\)", text)


def test_code_is_refused_where_tiles_differ_in_fills():
    program = "matmul:256x64x160:f16:nk"
    ragged = "k0/splitk(C,3) " + turns(32, 2, 1, k=16) + " k1/split(m,grid,32) k1/split(n,grid,32)"
    with pytest.raises(PlanError, match="fills over k differ from tile to tile"):
        unit(program, ragged, "h200")


@pytest.mark.parametrize(
    ("depth", "more"), [(4, ""), (5, ""), (4, "k0/store(Y,tma)")]
)  # boxes leave room for four slots
@pytest.mark.parametrize("layout", ["nk,", ""])
def test_a_tile_of_64_by_256_compiles_without_spills_or_notes(depth: int, layout: str, more: str):
    u = unit(f"matmul:4096x4096x3840:f16:{layout}bias", turns(256, depth, 132, more=more), "h200")
    cubin = compile_cubin(u.text, H200.arch)
    assert cubin.spill_bytes == 0 and not cubin.warnings and cubin.kernels[0].n_regs == 168
    assert cubin.kernels[0].mix["HGMMA"] == 4


@pytest.mark.parametrize("op", LARGE)
def test_a_search_finds_it_and_whatever_it_finds_has_code_and_features(op: str):
    space, rng = ScheduleSpace(parse_op(op), H200), random.Random(0)
    found = [key for _ in range(60) if "/pingpong(" in (key := space.sample(rng).key)]
    assert len(found) >= 5
    for key in found:
        assert "emmy_wgmma" in unit(op, key, "h200").text
        row = features(space.op, replay(space.program, key, H200), H200)
        assert row.shape == (len(space.feature_names),)


@pytest.mark.parametrize("op", LARGE)
def test_the_tree_reaches_two_consumers_of_64_by_256(op: str):
    key = turns(256, 4, 132, raster="k0/raster(8)", more="k0/store(C,tma)").strip()
    point = ScheduleSpace(parse_op(op), H200).locate(key)
    assert point is not None and point.key == key
