"""Linears of what is made first: by a launch before, whose values are staged, or by lanes on the way. Emulated, compiled, searched."""

from __future__ import annotations

import random

import pytest

from emmy.api import with_pdl
from emmy.codegen.emulator import SCHEDULES
from emmy.codegen.execute import execute
from emmy.codegen.lower import lower
from emmy.codegen.nvrtc import compile_cubin
from emmy.codegen.steps import BlockSync, Gather, LaunchWait, LetNext, Preload, Share
from emmy.costmodel.features import features
from emmy.errors import IllegalMove
from emmy.ir.dtype import decode
from emmy.ir.ops import parse_op
from emmy.ir.schedule import replay
from emmy.ir.target import load_target
from emmy.search.emulator_check import reduced
from emmy.search.schedule_space import ScheduleSpace
from tests.cuda_codegen.emulated import GPUS, Run, nothing_but_numbers, unit

H200 = load_target("h200")
JOINED = "k0/fuse(Xn,Y) k0/commute(Y) k0/operand(Y_acc,g,X)"
ROWS = "k0/split(m,grid,2) k0/split(k,warp,64) k0/split(m,warp,1)"
WARPS = "k1/split(m,warp,16) k1/split(n,warp,16)"


def direct(n: int, k: int, stage: str = "Y_acc", *, atom: int = 16, unroll: int = 1, at: str = "k0") -> str:
    """A tile of 8 rows and n columns whose warps fold k each."""
    more = f" {at}.{stage}/unroll({unroll})" if unroll > 1 else ""
    return f"{at}/split(m,grid,8) {at}/split(n,grid,{n}) {at}/split(k,warp,{k}) {at}.{stage}/atom(direct,8,{atom},32){more}"


def staged(m: int, n: int, k: int, atom: str, *, agents: str = WARPS, by: str = "cp_async", then: str = "") -> str:
    """The second launch, which stages what the first made."""
    rings = f"k1/stage(W,{by},2) k1/stage(Xn,{by},2)"
    return f"k1/split(m,grid,{m}) k1/split(n,grid,{n}) k1/split(k,serial,{k}) {agents} {rings} {then}k1.Y/atom({atom})"


def groups(n: int) -> str:
    return f"k1/split(m,warpgroup,64) k1/split(n,warpgroup,{n})"


RUNS = {
    "one launch": Run("norm_linear:5x40x136:f16:nk", "h200", f"{JOINED} {direct(16, 64)}"),
    "one launch, W along n, a loop of loads": Run(
        "norm_linear:8x72x520:bf16", "rtx4090", f"{JOINED} {direct(32, 192, atom=32, unroll=2)}"
    ),
    "one launch, a symbol for rows": Run(
        "norm_linear:m(1..8)x40x264:f16:nk", "a100", f"{JOINED} {direct(32, 96, unroll=3)}", (("m", 3),)
    ),
    "a residual, more rows than a tile": Run(
        "norm_linear:11x40x136:f16:nk,residual", "h200",
        f"k0/fuse(Xn,C) k0/commute(C) k0/operand(C_acc,g,X) {direct(16, 64, 'C_acc')} k0/pdl()",
    ),
    "rows scaled on the way, their sums by a launch before": Run(
        "norm_linear:5x40x136:f16:nk", "h200", f"k0/cut(Xn) k0/split(m,grid,4) {direct(16, 64, 'Y', at='k1')} k1/pdl()"
    ),
    "a gated product on the way": Run("geglu_linear:7x40x136:bf16:nk", "h200", direct(16, 64, "Y")),
    "another, with a residual": Run("swiglu_linear:3x40x136:f16:residual", "rtx3090", direct(64, 96, "C", atom=64)),
    "two launches, warps": Run(
        "norm_linear:21x40x72:f16:nk", "rtx4090", f"k0/cut(Y) {ROWS} {staged(16, 16, 32, 'mma,16,8,16')}"
    ),
    "two launches, a warpgroup, both early": Run(
        "norm_linear:m(1..70)x48x136:bf16:nk", "h200",
        f"k0/cut(Y) {ROWS} {staged(64, 16, 64, 'wgmma,64,16,16', agents=groups(16), by='tma')} k0/pdl() k1/pdl()", (("m", 69),),
    ),
    "two launches, swapped factors, a cluster": Run(
        "norm_linear:13x72x256:f16:nk", "h200",
        f"k0/swap(Y) k0/cut(Y) {ROWS} k1/split(m,grid,16) k1/split(n,grid,64) k1/split(k,cluster,128) k1/split(k,serial,64) "
        "k1/split(n,warpgroup,64) k1/stage(W,tma,2) k1/stage(Xn,tma,2) k1/specialize(1,0,0) k1.Y/atom(wgmma,64,16,16) "
        "k0/pdl() k1/pdl()",
    ),
    "two launches, few rows read directly": Run(
        "norm_linear:3x40x136:f16:nk", "h200", f"k0/cut(Y) {ROWS} {direct(16, 64, 'Y', at='k1')} k0/pdl() k1/pdl()"
    ),
    "two launches, a gated product": Run(
        "geglu_linear:40x24x72:f16", "h200",
        "k0/cut(Y) k0/split(m,grid,4) k0/split(k,grid,64) k1/split(m,grid,32) k1/split(n,grid,16) k1/split(k,serial,32) "
        f"{WARPS} k1/stage(P,ldg,2) k1/stage(W,ldg,2) k1.Y/atom(mma,16,8,16) k1/pdl()",
    ),
}  # fmt: skip


FAST = ("one launch", "a symbol", "a residual", "rows scaled", "two launches, warps", "two launches, a warpgroup")


@pytest.mark.parametrize("name", [n if n.startswith(FAST) else pytest.param(n, marks=pytest.mark.slow) for n in RUNS])
def test_steps_and_text_of_every_form_are_right(name: str) -> None:
    r = RUNS[name]
    error, stats = r.error_norm()
    assert error <= 1 and nothing_but_numbers(stats)
    op, sizes = parse_op(r.op), dict(r.sizes)
    stored = op.inputs("normal", 2, sizes)
    x = {v.name: decode(stored[v.name], v.dtype) for v in op.program().inputs}
    got = execute(replay(op.program(), r.schedule, load_target(r.gpu)), x, sizes)
    assert abs(got["Y"] - op.reference(stored)["Y"]).max() < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one launch", "a gated product on the way", "two launches, a warpgroup, both early"])
def test_they_are_right_in_every_order_of_threads(name: str) -> None:
    r = RUNS[name]
    for order in range(len(SCHEDULES)):
        assert Run(r.op, r.gpu, r.schedule, r.sizes, order=order).error_norm()[0] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(120))
def test_random_schedules_are_right(seed: int) -> None:
    rng = random.Random(seed)
    gpu, dtype = rng.choice(GPUS), rng.choice(("f16", "bf16", "f16", "bf16", "f32"))
    m, n = rng.choice((1, 3, 7, 8, 16, 33, 64, 70)), rng.choice((8, 16, 24, 40, 64, 72, 33, 130))
    k = rng.choice((8, 16, 40, 64, 72, 136, 33, 130, 264, 520))
    kind = rng.choice(("norm_linear", "norm_linear", "geglu_linear", "swiglu_linear"))
    options = [w for w in ("nk", "residual") if rng.random() < 0.4]
    symbolic = m > 1 and rng.random() < 0.25
    text = f"{kind}:{f'm(1..{m})' if symbolic else m}x{n}x{k}:{dtype}" + (f":{','.join(options)}" if options else "")
    key = ScheduleSpace(parse_op(text), load_target(gpu)).sample(rng).key
    if load_target(gpu).can("pdl") and rng.random() < 0.3:
        key = with_pdl(text, key, gpu=gpu)
    sizes = (("m", rng.randint(1, m)),) if symbolic else ()
    error, stats = Run(text, gpu, key, sizes, order=rng.randrange(len(SCHEDULES))).error_norm()
    assert error <= 1 and nothing_but_numbers(stats), f"{text} on {gpu}: {key}"


# ---------------------------------------------------------------- what is derived
def test_sums_of_a_product_and_of_its_rows_meet_once() -> None:
    (o,) = lower(unit("norm_linear:5x40x136:f16:nk", f"{JOINED} {direct(16, 64)}", "h200").plan)
    kinds = [s for s in o.roles[0].steps if isinstance(s, Share | BlockSync | Gather)]
    assert kinds == [Share("Y_acc"), Share("ss"), BlockSync(), Gather("Y_acc"), Gather("ss")]


def test_an_early_launch_fetches_weights_before_it_waits_for_the_rows() -> None:
    (o,) = lower(unit("norm_linear:5x40x136:f16:nk", f"{JOINED} {direct(16, 64)} k0/pdl()", "h200").plan)
    steps = [type(s) for s in o.roles[0].steps]
    assert steps.index(Preload) < steps.index(LaunchWait)


def test_a_launch_lets_an_early_one_of_its_plan_begin_and_waits_for_nobody_itself() -> None:
    schedule = f"k0/cut(Y) {ROWS} {staged(64, 16, 64, 'wgmma,64,16,16', agents=groups(16), by='tma')}"
    for then, lets, waits in (("", 0, 0), (" k1/pdl()", 1, 0), (" k0/pdl() k1/pdl()", 1, 1)):
        first = lower(unit("norm_linear:40x48x136:f16:nk", schedule + then, "h200").plan)[0].roles[0].steps
        assert (first.count(LetNext()), first.count(LaunchWait())) == (lets, waits)


REFUSED = {
    "an operand that needs a sum of the launch": (
        "norm_linear:5x40x136:f16:nk", "k0.Y/atom(direct,8,16,32)", "Xn is made of ss, which k0 makes too",
    ),
    "one warp for sums of rows": (
        "norm_linear:5x40x64:f16:nk", f"{JOINED} k0/split(k,warp,64) k0.Y_acc/atom(direct,8,16,32)", "2 warps at least must share k",
    ),
    "a weight made in the launch": (
        "norm_linear:5x40x136:f16:nk", "k0/fuse(Xn,Y) k0/commute(Y) k0/operand(Y_acc,g,W) k0.Y_acc/atom(direct,8,16,32)",
        "takes W_g, which k0 makes, as a weight",
    ),
    "rows of 32-bit elements": ("norm_linear:5x40x136:f32:nk", f"{JOINED} {direct(16, 64)}", "is f32"),
    "staging what the launch makes": ("geglu_linear:5x40x136:f16:nk", "k0/stage(P,cp_async,1)", "P is not an input that k0 reads"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_it_refuses(what: str) -> None:
    op, schedule, reason = REFUSED[what]
    with pytest.raises(IllegalMove, match=reason):
        replay(parse_op(op).program(), schedule, H200)


# ---------------------------------------------------------------- as machine code
COMPILED = {
    "one launch of 8 rows": ("norm_linear:8x8192x3840:f16:nk", f"{JOINED} {direct(16, 480, unroll=4)}"),
    "one launch of a row": ("norm_linear:1x30720x3840:f16:nk", f"{JOINED} {direct(32, 480, unroll=3)}"),
    "a gated product": ("geglu_linear:8x3840x15360:f16:nk", direct(16, 960, "Y", unroll=3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_it_compiles_without_spills(name: str) -> None:
    assert compile_cubin(unit(*COMPILED[name], "h200").text, H200.arch).spill_bytes == 0


# ---------------------------------------------------------------- the search
@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["h200", "rtx4090", "cpu-portable"])
@pytest.mark.parametrize(
    "op", ["norm_linear:256x8192x3840:f16:nk", "norm_linear:3x8192x3840:bf16", "geglu_linear:8x3840x15360:f16:nk"]
)
def test_whatever_a_search_finds_has_code_and_features(op: str, gpu: str) -> None:
    space, rng = ScheduleSpace(parse_op(op), load_target(gpu)), random.Random(op)
    for _ in range(3):
        key = space.sample(rng).key
        assert unit(op, key, gpu).text
        assert features(space.op, replay(space.program, key, space.target), space.target).shape == (
            len(space.feature_names),
        )


@pytest.mark.slow
def test_a_search_finds_one_launch_for_few_rows_and_two_with_any_atom_for_many() -> None:
    def found(op: str, *words: str, walks: int = 40) -> bool:
        space, rng = ScheduleSpace(parse_op(op), H200), random.Random(0)
        return any(all(w in key for w in words) for key in (space.sample(rng).key for _ in range(walks)))

    few, more, many = (f"norm_linear:{m}x8192x3840:f16:nk" for m in (8, 32, 2048))
    assert (
        found(few, "/commute(Y)", "/atom(direct")
        and found(few, "/cut(Xn)", "k1.Y/atom(direct")
        and found(few, "/swap(Y)", "/cut(Y)")
    )
    assert found(more, "/swap(Y)", "/cut(Y)", "k1/split(k,cluster", walks=80) and not found(more, "/commute(Y)")
    assert found(many, "/cut(Y)", "k1.Y/atom(wgmma,") and found(many, "/cut(Y)", "k1/pingpong()", walks=120)


def test_the_default_of_few_rows_is_one_launch() -> None:
    key = ScheduleSpace(parse_op("norm_linear:8x8192x3840:f16:nk"), H200).default().key
    assert key.startswith(JOINED) and "/atom(direct" in key and "/unroll(" in key


def test_a_large_plan_is_checked_on_a_smaller_op() -> None:
    op, schedule = COMPILED["one launch of 8 rows"]
    small = reduced(parse_op(op), schedule, H200)
    assert small is not None and small[0].kind == "norm_linear" and small[0].work().flops < parse_op(op).work().flops
