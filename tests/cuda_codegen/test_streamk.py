"""Blocks that share the steps of tiles: the exact text is emulated, launched again on the same flags, compiled, and found by a search."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import islice

import pytest

from emmy.codegen.emulated import emulate_plan
from emmy.codegen.emulator import SCHEDULES
from emmy.codegen.gpu_plan import gpu_plan
from emmy.codegen.nvrtc import compile_cubin
from emmy.costmodel.features import features
from emmy.errors import EmuError
from emmy.ir.ops import parse_op
from emmy.ir.schedule import replay
from emmy.ir.target import load_target
from emmy.search.schedule_space import ScheduleSpace
from tests.cuda_codegen.emulated import Run, nothing_but_numbers, unit

H200 = load_target("h200")


def shared(workers: int, m: int = 64, n: int = 32, k: int = 64, depth: int = 2, groups: int = 1, more: str = "") -> str:
    """So many blocks on shares of tiles of m x n, which `groups` consumers make by wgmma beside a producer."""
    roles = "2,40,232" if groups > 1 else "1,0,0"
    return (
        f"k0/split(m,grid,{m}) k0/split(n,grid,{n}) k0/split(k,serial,{k}) k0/split(m,warpgroup,{m // groups}) "
        f"k0/stage(A,tma,{depth}) k0/stage(B,tma,{depth}) k0/specialize({roles}) k0/streamk({workers}) "
        f"k0.C/atom(wgmma,64,{n},16) {more}"
    )


def warps(workers: int, transport: str, depth: int = 2, atom: str = "mma,16,8,16") -> str:
    """The same by warps that fill for themselves."""
    return (
        "k0/split(m,grid,32) k0/split(n,grid,32) k0/split(k,serial,32) k0/split(m,warp,16) k0/split(n,warp,16) "
        f"k0/stage(A,{transport},{depth}) k0/stage(B,{transport},{depth}) k0.C/atom({atom}) k0/streamk({workers})"
    )


RUNS = {
    "a last tile begins in each share": Run("matmul:190x32x256:f16:nk,bias,residual", "h200", shared(5)),
    "one worker shares nothing": Run("matmul:64x32x256:f16", "h200", shared(1)),
    "a tile of three workers and more": Run("matmul:64x64x640:f16:nk", "h200", shared(7)),
    "a share inside a tile": Run("matmul:64x32x640:bf16:bias", "h200", shared(3)),
    "steps to as many": Run("matmul:64x32x200:f16:nk", "h200", shared(4)),
    "fewer steps than workers": Run("matmul:60x32x128:f16:nk,bias", "h200", shared(5)),
    "tiles that come out even": Run("matmul:128x64x128:f16:nk", "h200", shared(2)),
    "two consumers": Run("matmul:200x32x256:f16:nk", "h200", shared(3, m=128, groups=2)),
    "edges everywhere": Run("matmul:70x40x200:f16:nk,residual", "h200", shared(5)),
    "sizes told late": Run("matmul:m(1..200)x64x256:f16:bias,gelu_tanh", "h200", shared(5), (("m", 130),)),
    "two made whole by each first": Run("matmul:192x96x256:f16:nk,bias", "h200", shared(2)),
    "as many whole as the size allows": Run("matmul:m(1..400)x64x192:f16", "h200", shared(2), (("m", 330),)),
    "one row": Run("matmul:m(1..200)x64x256:f16:nk", "h200", shared(5), (("m", 1),)),
    "in groups of rows": Run(
        "matmul:192x64x192:f16", "h200", shared(5).replace(" k0/stage", " k0/raster(2) k0/stage", 1)
    ),
    "stored by the engine": Run("matmul:130x64x192:f16:nk,bias", "h200", shared(4, more="k0/store(Y,tma)")),
    "one slot": Run("matmul:64x64x320:f16:nk", "h200", shared(3, depth=1)),
    "early": Run("matmul:64x64x320:f16:nk,bias", "h200", shared(3, more="k0/pdl()")),
    "warps by tma": Run("matmul:64x40x168:bf16:nk,bias", "h200", warps(5, "tma", 3)),
    "warps by cp.async": Run("matmul:40x64x168:f16", "rtx4090", warps(5, "cp_async", 3)),
    "warps by registers": Run("matmul:40x64x168:f16:nk", "rtx4090", warps(3, "ldg", 2)),
    "sums in f16": Run("matmul:40x64x160:f16:nk", "rtx4090", warps(3, "cp_async", 2, "f16,16,8,16"), kind="integer"),
    "sums promoted": Run("matmul:40x64x160:f16:nk", "rtx4090", warps(3, "cp_async", 2, "hybrid,16,8,32")),
    "lanes": Run("matmul:40x64x168:f32", "rtx4090", warps(3, "cp_async", 2, "simt,16,16,4")),
}  # fmt: skip


def body(run: Run) -> str:
    text = unit(run.op, run.schedule, run.gpu).text
    return text[text.rindex("#endif") :]


def check(run: Run) -> None:
    error, stats = run.error_norm()
    assert error <= 1 and nothing_but_numbers(stats), f"error {error:.3g} of what is allowed: {run}"


@pytest.mark.parametrize("name", ["edges everywhere", "as many whole as the size allows", "warps by cp.async"])
def test_shares_of_tiles_make_whole_ones_and_so_they_do_again_on_the_same_flags(name: str):
    check(replace(RUNS[name], times=2))


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_shares_of_tiles_are_right_in_every_order_of_the_threads(name: str):
    for order in range(len(SCHEDULES)):
        check(replace(RUNS[name], order=order, times=2))


def random_shares(seed: int) -> Run:
    rng = random.Random(seed)
    m, n, k = rng.choice((64, 64, 128)), rng.choice((16, 32, 48)), rng.choice((16, 32, 64))
    rows, columns, depth = rng.randint(m // 2 + 1, 4 * m), 8 * rng.randint(1, n // 4), 8 * rng.randint(1, 48)
    options = [x for x in ("nk", "bias", "residual") if rng.random() < 0.4]
    size = f"m(1..{rows})" if rng.random() < 0.3 else str(rows)
    op = f"matmul:{size}x{columns}x{depth}:{rng.choice(('f16', 'bf16'))}" + ":" * bool(options) + ",".join(options)
    schedule = shared(rng.randint(1, 9), m, n, k, rng.randint(1, 4), m // 64)
    sizes = (("m", rng.randint(1, rows)),) if "(" in size else ()
    return Run(
        op,
        "h200",
        schedule,
        sizes,
        rng.choice(("normal", "integer")),
        rng.randrange(len(SCHEDULES)),
        rng.choice((1, 3)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("block", range(5))
def test_any_shares_are_right(block: int):
    for seed in range(12 * block, 12 * block + 12):
        check(random_shares(seed))


def test_sums_are_added_in_one_order_whatever_the_threads_do():
    run = RUNS["a tile of three workers and more"]
    u, inputs = unit(run.op, run.schedule, run.gpu), parse_op(run.op).inputs("normal", 1, {})
    outs = {emulate_plan(u, inputs, seed=seed, eager=eager)[0]["C"].tobytes() for seed, eager in SCHEDULES[:4]}
    assert len(outs) == 1


def test_a_launcher_clears_the_flags_once_and_owns_them():
    u = unit(RUNS["two consumers"].op, RUNS["two consumers"].schedule, "h200")
    lines = gpu_plan(u.plan, u.kernels, b"").decode().splitlines()  # type: ignore[arg-type]
    assert "workspace C_left 4 12288" in lines and "workspace C_flags 4 3" in lines
    assert [b.name for b in u.arguments] == ["A", "B", "C"]


def test_a_flag_that_is_up_before_the_launch_is_noticed():
    """What a launch that left one up would do to the next."""
    run = RUNS["a tile of three workers and more"]
    u = unit(run.op, run.schedule, "h200")
    text = u.text.replace("emmy_flag_lower(C_flags + helper);", "")

    inputs = parse_op(run.op).inputs("normal", 1, {})
    emulate_plan(replace(u, text=text), inputs)
    with pytest.raises(EmuError, match="which nobody has lowered"):
        emulate_plan(replace(u, text=text), inputs, seed=1, times=2)


LARGE = (
    "k0/split(m,grid,256) k0/split(n,grid,192) k0/split(k,serial,64) k0/split(m,warpgroup,128) k0/split(n,warpgroup,192) "
    "k0/raster(8) k0/stage(A,tma,4) k0/stage(B,tma,4) k0/specialize(2,40,232) k0/streamk(132) k0.C/atom(wgmma,64,192,16)"
)


def test_a_tile_of_256_by_192_compiles_without_spills_or_notes():
    cubin = compile_cubin(unit("matmul:4096x30720x3840:f16:nk", LARGE, "h200").text, H200.arch)
    assert cubin.spill_bytes == 0 and not cubin.warnings and cubin.kernels[0].n_regs == 168


def test_features_tell_shares_from_waves():
    """160 tiles make 1.2 waves of 132, and no waves when steps are shared."""
    space = ScheduleSpace(parse_op("matmul:2048x3840x15360:f16:nk"), H200)
    for order, idle in (("persist(132)", 1 - 160 / 264), ("streamk(132)", 0.0)):
        plan = replay(space.program, LARGE.replace("streamk(132)", order), H200)
        row = dict(zip(space.feature_names, features(space.op, plan, H200), strict=True))
        assert row["tail_idle"] == pytest.approx(idle) and row["wave_idle"] == pytest.approx(idle)
        assert (row["workspace_share"] > 0) == (idle == 0)


@pytest.mark.slow
@pytest.mark.parametrize("op", ["matmul:2048x3840x15360:f16:nk", "matmul:512x4096x3840:f16"])
def test_a_search_finds_it_and_whatever_it_finds_has_code_and_features(op: str):
    space, rng = ScheduleSpace(parse_op(op), H200), random.Random(0)
    sampled = (space.sample(rng).key for _ in range(900))
    found = list(islice((key for key in sampled if "/streamk(" in key), 2))  # one walk in a few hundred chooses it
    assert found
    for key in found:
        assert "emmy_flag_await" in unit(op, key, "h200").text
        row = features(space.op, replay(space.program, key, H200), H200)
        assert row.shape == (len(space.feature_names),)


def test_the_tree_reaches_two_consumers_of_256_by_192():
    point = ScheduleSpace(parse_op("matmul:4096x30720x3840:f16:nk"), H200).locate(LARGE)
    assert point is not None and point.key == LARGE
