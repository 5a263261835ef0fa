"""Rows on GPUs: elements that stay in registers, divisions among lanes and warps, gathers, early launches, registers."""

from __future__ import annotations

import random

import pytest

from emmy.codegen.build import source
from emmy.codegen.execute import execute
from emmy.codegen.lower import lower
from emmy.codegen.nvrtc import compile_cubin
from emmy.errors import IllegalMove, PlanError
from emmy.ir import interpret
from emmy.ir.dtype import decode
from emmy.ir.moves.row_loops import rows_only
from emmy.ir.ops import parse_op
from emmy.ir.plan import naive
from emmy.ir.row_tiles import row_tile
from emmy.ir.schedule import replay
from emmy.ir.target import load_target
from emmy.search.emulator_check import reduced
from emmy.search.schedule_space import ScheduleSpace
from emmy.workloads import load
from tests.cuda_codegen.emulated import GPUS, Run, unit

LAYER_NORM = (
    "formula:m=5,n=64;X[m,n]:f16;S[m]=sum(n,X[m,n]);D[m,n]=X[m,n]-S[m]*0.015625;Q[m]=sum(n,D[m,n]*D[m,n]);"
    "Y[m,n]:f16=D[m,n]*rsqrt(Q[m]*0.015625+0.001)"
)
GATHERS = (
    "formula:m=5,n=16,v=9;E[v,n]:f16:constant;i[m]:i32;j[m]:i32;Y[m,n]:f16=E[i[m],n]-E[j[m],n]+E[8,n]",
    "formula:m=5,n=8,v=9;E[m,v]:f32;i[n]:i32;Y[m,n]:f32=E[m,i[n]]",
    "formula:m=5,r=2,n=8;X[m,r,n]:f16;Y[m,r,n]:f16=X[m,1-r,n]*2",
)
BY_WARPS = "k0/split(m,grid,4) k0/split(n,warp,128) k0/split(m,warp,2)"
BY_LANES = "k0/split(m,grid,4) k0/split(n,warp,256) k0/split(m,warp,4) k0/split(m,lane,1)"
RUNS = [
    Run("rms_norm:6x256:f16", "h200", BY_WARPS),
    Run("rms_norm:6x256:bf16:residual", "rtx4090", BY_LANES),
    Run("rms_norm:m(1..6)x251:f32:residual", "h200", "k0/split(m,grid,2) k0/split(n,warp,64)", (("m", 3),)),
    Run("rms_norm:6x252:f16", "h200", "k0/split(m,grid,1) k0/split(n,warp,64) k0/pdl()"),
    Run("softmax:6x200:f16", "a100", "k0/split(m,grid,2) k0/split(n,warp,64)"),
    Run("rstd:6x200:f16", "h200", "k0/split(m,grid,2) k0/split(n,warp,104)", kind="integer"),
    Run("row_sum:6x200:f16", "h200", "k0/split(m,grid,2) k0/split(n,warp,64)", kind="integer"),
    Run("rope:2x6x64:f16", "h200", "k0/split(h,grid,1) k0/split(m,grid,4) k0/split(m,warp,2) k0/split(r,lane,1)"),
    Run("rope:2x6x64:bf16:16", "h200", "k0/split(h,grid,1) k0/split(m,grid,4) k0/split(i,warp,8) k0/split(m,warp,1)"),
    Run("embedding:6x64x100:f16", "h200", "k0/split(m,grid,4) k0/split(m,warp,2) k0/pdl()"),
    Run("norm_scale:6x200:f32", "h200", "k0/split(m,grid,2) k0/split(n,grid,64) k0/split(n,warp,32)"),
    Run("cast:6x200:f32:f16", "h200", "k0/split(m,grid,2) k0/split(n,grid,128) k0/split(n,warp,32)", kind="integer"),
    Run(LAYER_NORM, "h200", "k0/split(m,grid,2) k0/split(n,warp,32)"),
    Run("softmax:6x200:f16", "h200", "k0/split(m,grid,4) k0/split(n,warp,64) k0/split(m,warp,2) k0/split(m,lane,2)"),
    Run(
        "formula:m=6,n=64,v=9;ids[v]:i32;to[m]:i32;E[v,n]:f16;Y[m,n]:f16=E[ids[to[m]],n]",
        "h200",
        "k0/split(m,grid,4) k0/split(m,warp,2)",
    ),
    *(Run(op, "h200", s) for op in GATHERS for s in ("k0/split(m,grid,2)", "k0/split(m,grid,2) k0/split(n,warp,4)")),
]


FIRST = (0, 1, 2, 7, 9)


@pytest.mark.parametrize(
    "run",
    [r if i in FIRST else pytest.param(r, marks=pytest.mark.slow) for i, r in enumerate(RUNS)],
    ids=lambda r: f"{r.op[:40]} {r.schedule}",
)
def test_rows_are_right(run: Run) -> None:
    assert run.error_norm()[0] <= 1


def test_every_element_is_read_once_and_stays_in_registers() -> None:
    text = unit("rms_norm:8x256:f16", BY_WARPS, "h200").text
    kernel = text[text.index(") k0(") :]
    assert kernel.count("emmy_ldg_b128_nc_l1(X_row") == 1 and kernel.count("emmy_ldg_b128_nc_l1(w_row") == 1


def test_weights_are_fetched_before_the_launches_before_have_ended() -> None:
    text = unit("rms_norm:8x256:f16", f"{BY_WARPS} k0/pdl()", "h200").text
    kernel = text[text.index(") k0(") :]
    assert kernel.index("w_row,") < kernel.index("emmy_pdl_wait") < kernel.index("X_row +")
    gathered = unit("embedding:6x64x100:f16", "k0/split(m,grid,4) k0/split(m,warp,2) k0/pdl()", "h200").text
    kernel = gathered[gathered.index(") k0(") :]
    assert kernel.index("emmy_pdl_wait") < kernel.index("E_row +")  # constant, but not what tells where


def test_steps_walk_a_loop_again_for_what_reads_its_fold() -> None:
    plan = replay(parse_op("rms_norm:6x256:f16:residual").program(), BY_WARPS, load_target("h200"))
    text = str(lower(plan)[0])
    assert text.count("for n in pieces of 128:  # warp") == 2
    order = [
        "open S",
        "compute H",
        "compute S",
        "share accumulators of S",
        "block sync",
        "gather S",
        "close S",
        "compute Y",
        "store Y",
    ]
    assert sorted(order, key=text.index) == order


def test_a_division_that_registers_do_not_hold_is_refused_with_numbers() -> None:
    with pytest.raises(PlanError, match=r"keeps its rows in about \d+ registers, it has 255: more warps"):
        unit("rms_norm:8x3840:f16", "k0/split(m,grid,8) k0/split(n,warp,3840) k0/split(m,warp,8)", "h200")


def test_a_value_read_at_computed_positions_is_not_staged() -> None:
    with pytest.raises(IllegalMove, match="read at computed positions"):
        replay(parse_op(GATHERS[0]).program(), "k0/split(m,grid,2) k0/stage(E,cp_async,1)", load_target("h200"))


@pytest.mark.parametrize(
    "op", ["matmul:64x64x64:f16", "geglu:64x64x64:f16", "matmul:64x64x64:f16:residual,sum_squares"]
)
def test_contractions_are_no_rows(op: str) -> None:
    plan = naive(parse_op(op).program())
    assert not rows_only(plan, load_target("h200")) and row_tile(plan, plan.launches[0]) is None


@pytest.mark.parametrize(
    ("op", "schedule"),
    [
        ("rms_norm:64x3840:f16", "k0/split(m,grid,1) k0/split(n,warp,256) k0/split(m,warp,1) k0/split(m,lane,1)"),
        ("rms_norm:65536x256:f16", "k0/split(m,grid,16) k0/split(n,warp,256) k0/split(m,warp,4) k0/split(m,lane,2)"),
        ("geglu_mul:32x15360:f32", "k0/split(m,grid,1) k0/split(n,grid,512) k0/split(n,warp,128) k0/split(m,warp,1) k0/split(m,lane,1)"),
        (
            "rope:16x512x256:f16",
            "k0/split(h,grid,1) k0/split(m,grid,8) k0/split(i,grid,128) k0/split(i,warp,128) k0/split(m,warp,2) k0/split(r,lane,1)",
        ),
    ],
)  # fmt: skip
def test_a_search_reaches_good_divisions_by_itself(op: str, schedule: str) -> None:
    assert ScheduleSpace(parse_op(op), load_target("h200")).locate(schedule) is not None


def test_a_check_in_the_emulator_takes_fewer_rows_of_the_same_division() -> None:
    schedule = "k0/split(m,grid,4) k0/split(n,grid,1024) k0/split(n,warp,256) k0/split(m,warp,1) k0/split(m,lane,1)"
    small = reduced(parse_op("embedding:512x1024x262144:f16"), schedule, load_target("h200"))
    assert small is not None and small[0].program().sizes() == {"m": 8, "n": 1024, "v": 7}


def random_rows(seed: int) -> Run:
    """A walk of the search space of a small op of rows: odd and even sizes, every dtype and kind."""
    rng = random.Random(f"rows {seed}")
    gpu, dtype = rng.choice(GPUS), rng.choice(("f16", "bf16", "f32"))
    m, n = rng.choice((1, 3, 7, 20, 33)), rng.choice((8, 24, 64, 100, 250, 33, 256, 511, 1030))
    rows = f"m(1..{m})" if m > 1 and rng.random() < 0.3 else str(m)
    kinds = ["rms_norm", "rstd", "row_sum", "softmax", "scale", "norm_scale", "geglu_mul", "copy"]
    op = f"{rng.choice(kinds)}:{rows}x{n}:{dtype}"
    if op.startswith("rms_norm") and rng.random() < 0.5:
        op += ":residual"
    other = rng.random()
    if other < 0.15:
        op = f"rope:{rng.choice((1, 3))}x{rows}x{2 * rng.choice((8, 20, 33, 64))}:{dtype}"
    elif other < 0.3:
        op = f"embedding:{rows}x{n}x50:{dtype}"
    space = ScheduleSpace(parse_op(op), load_target(gpu))
    schedule = space.sample(rng).key
    if load_target(gpu).can("pdl") and rng.random() < 0.3:
        schedule += " k0/pdl()"
    size = rng.randint(1, m)
    return Run(
        op, gpu, schedule, (("m", size),) if rows != str(m) else (), rng.choice(("normal", "integer")), rng.randrange(3)
    )


@pytest.mark.parametrize("seed", range(2))
def test_a_random_division_of_rows_is_right(seed: int) -> None:
    random_division_is_right(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1150))
def test_many_random_divisions_of_rows_are_right(seed: int) -> None:
    random_division_is_right(seed)


def random_division_is_right(seed: int) -> None:
    run = random_rows(seed)
    assert run.error_norm()[0] <= 1, run
    op, target = parse_op(run.op), load_target(run.gpu)
    x = op.inputs("normal", 3, dict(run.sizes))
    inputs = {v.name: decode(x[v.name], v.dtype) for v in op.program().inputs}
    got = execute(replay(op.program(), run.schedule, target), inputs, dict(run.sizes), seed=seed)
    for name, want in interpret.run(op.program(), inputs, dict(run.sizes)).items():
        assert abs(got[name] - want).max() < 1e-9, run


# ---------------------------------------------------------------- the catalogue
KINDS = ("rms_norm", "pointwise", "reduce", "rope", "embedding")
OPS = sorted({case.op_text() or "" for case in load("@gemma4-12b") if case.kind in KINDS})


@pytest.mark.slow
@pytest.mark.parametrize("card", ["rtx4090", "rtx5090", "h100", "h200"])
@pytest.mark.parametrize("op", OPS)
def test_what_a_search_may_choose_for_the_catalogue_compiles_without_spills(op: str, card: str) -> None:
    target = load_target(card)
    space = ScheduleSpace(parse_op(op), target)
    rng = random.Random(op)
    for schedule in {space.default().key, *(space.sample(rng).key for _ in range(3))}:
        assert compile_cubin(source(parse_op(op), schedule, target).text, target.arch).refusal is None, schedule
