"""Sums of squares of rows, folded on the way to memory: the exact text is emulated, on tiles that end beyond the matrix."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import numpy as np
import pytest

from emmy.codegen.build import source
from emmy.codegen.cubin import read_cubin
from emmy.codegen.emulated import emulate_plan
from emmy.codegen.emulator import SCHEDULES
from emmy.codegen.execute import execute
from emmy.codegen.gpu_plan import gpu_plan
from emmy.codegen.nvrtc import compile_cubin
from emmy.errors import IllegalMove
from emmy.ir import interpret
from emmy.ir.dtype import decode
from emmy.ir.expr import parse
from emmy.ir.ops import parse_op
from emmy.ir.program import MAX, Reduce, Stage
from emmy.ir.schedule import replay
from emmy.ir.target import load_target
from emmy.search.schedule_space import ScheduleSpace
from tests.cuda_codegen.emulated import GPUS, Run, nothing_but_numbers

END = "k1/split(m,grid,64)"


def warps(
    parts: int, m: int, wm: int, wn: int, how: str = "cp_async,2", atom: str = "mma,16,8,16", more: str = ""
) -> str:
    return (
        f"k0/splitk(S,{parts}) k0/split(m,grid,{m}) k0/split(k,serial,32) k0/split(m,warp,{wm}) k0/split(n,warp,{wn}) {END} "
        f"k0/stage(A,{how}) k0/stage(B,{how}) k0.C/atom({atom}) {more}"
    )


def groups(parts: int, m: int, n: int, roles: str = "", more: str = "") -> str:
    """Warpgroups of 64 rows and n columns."""
    return (
        f"k0/splitk(S,{parts}) k0/split(m,grid,{m}) k0/split(k,serial,64) k0/split(m,warpgroup,64) k0/split(n,warpgroup,{n}) {END} "
        f"k0/stage(A,tma,2) k0/stage(B,tma,2) {roles} k0.C/atom(wgmma,64,{n},16) {more}"
    )


TURNS = (
    f"k0/splitk(S,2) k0/split(m,grid,64) k0/split(k,serial,64) {END} k0/stage(A,tma,2) k0/stage(B,tma,2) "
    "k0/specialize(2,40,232) k0/persist(3) k0/pingpong() k0.C/atom(wgmma,64,48,16)"
)
SWAPPED = (
    f"k0/swap(C) k0/splitk(S,4) k0/split(m,grid,16) k0/split(k,cluster,128) k0/split(k,serial,64) k0/split(n,warpgroup,64) {END} "
    "k0/stage(A,tma,2) k0/stage(B,tma,2) k0/specialize(1,0,0) k0.C/atom(wgmma,64,16,16)"
)
RUNS = {
    "a warp has a row": Run("matmul:20x96x64:f16:nk,residual,sum_squares", "rtx4090", warps(3, 32, 16, 32)),
    "warps share rows": Run("matmul:33x100x64:f16:nk,residual,sum_squares", "rtx4090", warps(4, 32, 16, 16), kind="integer"),
    "lanes": Run("matmul:9x50x36:f32:bias,sum_squares", "rtx4090", warps(2, 16, 16, 16, atom="simt,16,16,4")),
    "the copy engine stores": Run(
        "matmul:m(1..50)x88x64:bf16:sum_squares", "rtx5090", warps(2, 32, 16, 16, "tma,2", more="k0/store(C,tma)"), (("m", 37),)
    ),
    "groups share rows": Run("matmul:100x136x128:f16:nk,residual,sum_squares", "h200", groups(3, 64, 16, "k0/specialize(3,0,0)")),
    "groups walk": Run(
        "matmul:m(1..300)x200x128:bf16:nk,residual,sum_squares", "h200",
        groups(3, 128, 80, "k0/specialize(2,40,232) k0/persist(3)", "k0/store(Y,tma)"), (("m", 211),),
    ),
    "in turn": Run("matmul:400x90x128:f16:nk,residual,sum_squares", "h200", TURNS),
    "swapped, in clusters": Run("matmul:13x200x256:f16:nk,residual,sum_squares", "h200", SWAPPED),
    "direct": Run(
        "matmul:5x64x256:f16:nk,residual,sum_squares", "h200",
        f"k0/splitk(S,4) k0/split(m,grid,8) k0/split(k,warp,64) {END} k0.C/atom(direct,8,16,32)",
    ),
    "where parts are finished": Run(
        "matmul:20x72x128:f16:nk,bias,sum_squares", "rtx4090",
        "k0/splitk(C,2) k0/split(m,grid,16) k0/split(n,grid,48) k0/split(k,serial,32) k0/split(m,warp,16) k0/split(n,warp,48) "
        "k1/split(m,grid,4) k0/stage(A,cp_async,2) k0/stage(B,cp_async,2) k0.C/atom(mma,16,8,16)",
    ),
    "cut off": Run(
        "matmul:20x300x64:f16:nk,residual,sum_squares", "rtx4090",
        "k0/cut(S) k0/split(m,grid,32) k0/split(n,grid,48) k0/split(k,serial,32) k0/split(m,warp,16) k0/split(n,warp,48) "
        "k1/split(m,grid,4) k0/stage(A,cp_async,2) k0/stage(B,cp_async,2) k0.C/atom(mma,16,8,16)",
    ),
}  # fmt: skip


# The same, each with its parts combined by the last block and no second launch; twice, on the same counts.
LAST = {
    name: replace(
        run, schedule=re.sub(r"(k0/splitk\(S,\d+\))", r"\1 k0/finish(S)", run.schedule.replace(f"{END} ", "")), times=2
    )
    for name, run in RUNS.items()
    if "k0/splitk(S," in run.schedule
}
LAST["where parts are finished"] = replace(
    RUNS["where parts are finished"],
    schedule=RUNS["where parts are finished"].schedule.replace("k1/split(m", "k1/splitk(S,2) k1/finish(S) k1/split(m"),
    times=2,
)
EARLY = "groups walk"  # beside a residual that is asked for, behind a wait
LAST[f"{EARLY}, early"] = replace(LAST[EARLY], schedule=f"{LAST[EARLY].schedule} k0/prefetch(R,1) k0/pdl()")

# The same by the last block to begin, which waits for the others' marked parts; and by memory, which adds them.
LAST |= {
    f"{name}, {when}": replace(run, schedule=run.schedule.replace("finish(S)", f"finish(S,{when})"))
    for name, run in LAST.items()
    for when in ("begun", "added")
}
QUICK = (
    "warps share rows",
    "groups walk",
    "cut off",
    "warps share rows, begun",
    "in turn, begun",
    "warps share rows, added",
    "groups walk, early, added",
)


@pytest.mark.parametrize("what", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in RUNS])
def test_sums_of_squares_are_right(what: str):
    error, stats = RUNS[what].error_norm()
    assert error <= 1 and nothing_but_numbers(stats)


@pytest.mark.parametrize("what", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in LAST])
def test_the_last_block_combines_all_parts_and_does_so_again_on_the_same_counts(what: str):
    run = LAST[what]
    for order in range(1 if what in QUICK else len(SCHEDULES)):
        error, stats = replace(run, order=order).error_norm()
        assert error <= 1 and nothing_but_numbers(stats) and stats[-1].atomics > 1


@pytest.mark.parametrize("what", ["warps share rows", "warps share rows, begun"])
def test_parts_are_combined_in_one_order_whoever_is_last(what: str):
    run = LAST[what]
    u, inputs = source(parse_op(run.op), run.schedule, load_target(run.gpu)), parse_op(run.op).inputs("normal", 1)
    outs = {emulate_plan(u, inputs, seed=seed, eager=eager)[0]["S"].tobytes() for seed, eager in SCHEDULES[:4]}
    assert len(outs) == 1


@pytest.mark.parametrize(("what", "words"), [("groups walk", 3), ("groups walk, begun", 6)])
def test_a_launcher_clears_the_counts_once(what: str, words: int):
    u = source(parse_op(LAST[what].op), LAST[what].schedule, load_target("h200"))
    lines = gpu_plan(u.plan, u.kernels, b"").decode().splitlines()  # type: ignore[arg-type]
    assert f"workspace S_x_parts 4 $0 {words} *" in lines and "workspace S_counts 4 $0 127 + 128 /" in lines
    assert len(u.kernels) == 1 and [b.name for b in u.arguments] == ["A", "B", "R", "Y", "S"]


@pytest.mark.parametrize("what", [*RUNS, *(f"{x}: last" for x in LAST)])
def test_the_steps_mean_the_same(what: str):
    run = RUNS[what] if what in RUNS else LAST[what.removesuffix(": last")]
    op, sizes = parse_op(run.op), dict(run.sizes)
    x = {v: decode(a, op.program().value(v).dtype) for v, a in op.inputs("normal", 1, sizes).items()}
    got, want = (
        execute(replay(op.program(), run.schedule, load_target(run.gpu)), x, sizes),
        interpret.run(op.program(), x, sizes),
    )
    assert all(np.allclose(got[v], want[v], rtol=1e-12) for v in ("S", op.output))  # type: ignore[attr-defined]


def test_another_fold_of_the_row_goes_the_same_way():
    op = parse_op("matmul:33x100x64:f16:nk,residual")
    highest = Stage("S", ("m",), parse("Y[m,n]"), (Reduce("n", MAX),))
    program = replace(op.program(), stages=(*op.program().stages, highest), outputs=("Y", "S"))
    inputs = op.inputs("normal", 1)
    out, _ = emulate_plan(source(program, warps(4, 32, 16, 16), load_target("rtx4090")), inputs)
    assert np.allclose(out["S"], op.reference(inputs)["Y"].max(1), atol=1e-4)
    with pytest.raises(IllegalMove, match="memory adds f32 sums that leave the program: S is f32, max, of 2 outputs"):
        replay(program, "k0/splitk(S,4) k0/finish(S,added)", load_target("rtx4090"))


REFUSED = {
    "k0/split(n,grid,64)": "blocks cannot share n, which S folds: splitk",
    "k0/split(m,grid,64) k0/splitk(S,4) k0/split(n,cluster,16)": "blocks of a cluster share an axis that C folds into a matrix, n is none",
    "k0/splitk(S,4) k0/splitk(S,2)": "k0 has 1 loops",
    "k0/finish(S)": "k0 leaves 0 parts of S: splitk",
    "k0/splitk(S,4) k0/finish(S) k0/finish(S)": "the last block combines the 4 parts of S already",
    "k0/splitk(S,4) k0/finish(S,soon)": "parts are combined by the last to leave one, the last that has begun, or added, not soon",
    "k0/splitk(S,4) k1/split(m,grid,32) k0/finish(S)": "k1 makes S in 1 loops: finish comes right after splitk",
    "k0/splitk(C,4) k0/finish(C)": "C is no statistic of what k0 makes: its 4 parts",
    "k0/splitk(S,4) k0/finish(S) k0/split(m,grid,64) k0/split(k,serial,32) k0/stage(A,tma,2) k0/stage(B,tma,2) k0/streamk(2)": (
        "k0 has 2 sums among 3 works: streamk takes one"
    ),
}


@pytest.mark.parametrize("schedule", REFUSED)
def test_it_refuses(schedule: str):
    with pytest.raises(IllegalMove, match=REFUSED[schedule]):
        replay(parse_op("matmul:64x256x64:f16:nk,residual,sum_squares").program(), schedule, load_target("h200"))


def random_run(seed: int) -> Run:
    rng = random.Random(seed)
    gpu, m, n = rng.choice(GPUS), rng.choice((1, 7, 16, 33, 70)), rng.choice((8, 24, 40, 72, 100, 130, 200))
    words = [w for w in ("nk", "bias", "residual", "silu") if rng.random() < 0.4]
    op = f"matmul:{m}x{n}x{rng.choice((16, 40, 64, 130, 192))}:{rng.choice(('f16', 'bf16', 'f32'))}:{','.join((*words, 'sum_squares'))}"
    schedule = ScheduleSpace(parse_op(op), load_target(gpu)).sample(rng).key
    return Run(op, gpu, schedule, (), rng.choice(("normal", "integer")), rng.choice((0, 1, 2)))


def test_a_search_draws_each_way_to_combine_parts():
    drawn = {word.split("/")[1] for seed in (8, 26, 28) for word in random_run(seed).schedule.split()}
    assert {"finish(S)", "finish(S,begun)", "finish(S,added)"} <= drawn


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_a_random_schedule_is_right(seed: int):
    run = random_run(seed)
    error, stats = run.error_norm()
    assert error <= 1 and nothing_but_numbers(stats), run


OP = "matmul:{m}x3840x4096:f16:nk,residual,sum_squares"
FULL = (
    ("h200", 2048, "k0/splitk(S,15) k0/split(m,grid,64) k0/split(k,serial,64) k1/split(m,grid,64) k0/raster(8) k0/stage(A,tma,4) "
     "k0/stage(B,tma,4) k0/specialize(2,40,232) k0/persist(132) k0/pingpong() k0.C/atom(wgmma,64,256,16)"),
    ("h200", 512, groups(30, 128, 64, "k0/specialize(2,40,232)").replace("(m,warpgroup,64)", "(m,warpgroup,128)")),
    ("rtx4090", 512, warps(30, 128, 64, 32, "cp_async,3")),
    ("rtx5090", 512, warps(30, 64, 32, 64, "tma,3")),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "m", "schedule"), FULL, ids=[x[0] + f" {x[1]}" for x in FULL])
def test_a_full_size_compiles_without_spills(gpu: str, m: int, schedule: str):
    target = load_target(gpu)
    parts = int(schedule.split("splitk(S,")[1].split(")")[0])
    last = schedule.replace(f"k0/splitk(S,{parts})", f"k0/splitk(S,{parts}) k0/finish(S)").replace(f"{END} ", "")
    alone = last.replace(f"k0/splitk(S,{parts}) k0/finish(S)", f"k0/split(n,grid,{3840 // parts})")
    op, (begun, added) = OP.format(m=m), (last.replace("finish(S)", f"finish(S,{x})") for x in ("begun", "added"))
    stacks = []
    for text, moves in ((op, schedule), (op, last), (op, begun), (op, added), (op.replace(",sum_squares", ""), alone)):
        cubin = compile_cubin(source(parse_op(text), moves, target).text, target.arch)
        stacks.append(max(k.stack_bytes for k in read_cubin(cubin.data)))
    assert len({*stacks}) == 1 and stacks[0] <= 8  # sm_120 keeps 8 bytes where the copy engine is told where to write
