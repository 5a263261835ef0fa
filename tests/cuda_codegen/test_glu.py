"""Gated pairs: two contractions whose sums meet in registers. The exact text is emulated, compiled, and found in the search space."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from emmy.api import with_pdl
from emmy.codegen.emulator import SCHEDULES
from emmy.codegen.execute import execute
from emmy.codegen.lower import lower
from emmy.codegen.nvrtc import compile_cubin
from emmy.codegen.steps import BarArrive, Gather, Settle, Share
from emmy.codegen.steps import For as ForStep
from emmy.costmodel.features import features
from emmy.errors import IllegalMove
from emmy.ir.beside import beside, operands
from emmy.ir.expr import FUNCTIONS
from emmy.ir.gpu import exchange_bytes, thread_registers
from emmy.ir.moves.atom import mnk_axes
from emmy.ir.moves.cut import Cut
from emmy.ir.ops import parse_op
from emmy.ir.plan import naive
from emmy.ir.schedule import replay
from emmy.ir.target import load_target
from emmy.search.emulator_check import reduced
from emmy.search.schedule_space import ScheduleSpace
from emmy.testing.move_contract import random_inputs
from tests.cuda_codegen.emulated import GPUS, Run, nothing_but_numbers, unit

H200 = load_target("h200")
MMA, WARPS, GROUPS = "mma,16,8,16", "k0/split(m,warp,16) k0/split(n,warp,16)", "k0/split(m,warpgroup,64)"
ROLES = "k0/specialize(2,40,232) "
LARGE = "geglu:512x15360x3840:f16:nk"


def tile(
    m: int,
    n: int,
    k: int,
    atom: str,
    *,
    depth: int = 2,
    by: str = "tma",
    loops: str = "",
    agents: str = "",
    then: str = "",
) -> str:
    """A tile of m rows of n columns of both weights. loops: between those over blocks and the one over k."""
    rings = " ".join(f"k0/stage({v},{by},{depth})" for v in "AGU")
    return f"k0/split(m,grid,{m}) k0/split(n,grid,{n}) {loops} k0/split(k,serial,{k}) {agents} {rings} {then}k0.gate/atom({atom})"


def few(m: int, k: int, *, n: int = 64, depth: int = 2, loops: str = "", then: str = "") -> str:
    """A tile of swapped factors: n columns are the rows of one warpgroup's instructions."""
    agents = "k0/split(n,warpgroup,64)"
    return "k0/swap(gate) " + tile(m, n, k, f"wgmma,64,{m},16", depth=depth, loops=loops, agents=agents, then=then)


RUNS = {
    "cp.async": Run("geglu:40x48x72:f16:nk", "rtx4090", tile(32, 32, 32, MMA, depth=3, by="cp_async", agents=WARPS)),
    "cp.async, along n": Run("swiglu:40x48x72:bf16", "rtx4090", tile(32, 32, 32, MMA, by="cp_async", agents=WARPS)),
    "odd sizes": Run("geglu:37x41x70:f16:nk", "rtx3090", tile(32, 32, 32, MMA, depth=1, by="cp_async", agents=WARPS)),
    "odd sizes through registers": Run("geglu:37x41x71:f16", "a100", tile(32, 32, 32, MMA, by="ldg", agents=WARPS)),
    "hybrid": Run("geglu:40x48x136:f16:nk", "rtx4090", tile(32, 32, 64, "hybrid,16,8,32", by="cp_async", agents=WARPS)),
    "sums in f16": Run("geglu:40x48x72:f16:nk", "rtx5090", tile(32, 32, 64, "f16,16,8,16", agents=WARPS)),
    "f32": Run("swiglu:40x41x33:f32:nk", "rtx4090", tile(32, 32, 16, "simt,16,16,4", by="cp_async", agents=WARPS)),
    "operands ahead": Run(
        "geglu:40x48x136:f16", "rtx5090", tile(32, 32, 32, MMA, depth=3, agents=WARPS) + " k0.gate/pipeline() k0/store(Y,tma)"
    ),
    "wgmma": Run("geglu:100x72x136:f16:nk", "h200", tile(64, 64, 32, "wgmma,64,64,16", depth=3, agents=GROUPS)),
    "wgmma, one slot": Run("geglu:70x72x136:bf16", "h200", tile(64, 64, 32, "wgmma,64,64,16", depth=1, agents=GROUPS)),
    "wgmma, a symbol for rows": Run(
        "swiglu:m(1..100)x72x136:f16:nk", "h200", tile(64, 64, 32, "wgmma,64,64,16", agents=GROUPS), (("m", 70),)
    ),
    "roles walk tiles": Run(
        "geglu:200x72x136:f16", "h200",
        tile(128, 64, 64, "wgmma,64,64,16", agents=GROUPS, then=f"{ROLES}k0/persist(2) ") + " k0/store(Y,tma)",
    ),
    "roles take tiles in turn": Run(
        "geglu:300x72x136:bf16:nk", "h200", tile(64, 64, 64, "wgmma,64,64,16", then=f"{ROLES}k0/persist(2) k0/pingpong() ")
    ),
    "pairs of blocks": Run(
        "geglu:200x72x136:f16:nk", "h200", tile(128, 64, 32, "wgmma,64,64,16", loops="k0/split(m,cluster,64)", agents=GROUPS)
    ),
    "a cluster along k": Run(
        "geglu:40x48x256:f16:nk", "h200", tile(64, 32, 32, "wgmma,64,32,16", loops="k0/split(k,cluster,128)", agents=GROUPS)
    ),
    "swapped": Run("geglu:20x136x136:bf16", "h200", few(32, 64, depth=3)),
    "swapped, roles walk tiles": Run("geglu:20x136x136:f16:nk", "h200", few(32, 64, then="k0/specialize(1,0,0) k0/persist(2) ")),
    "swapped, a cluster along k": Run(
        "geglu:20x136x256:bf16:nk", "h200", few(32, 64, loops="k0/split(k,cluster,128)", then="k0/specialize(1,0,0) ")
    ),
    "blocks share k": Run(
        "geglu:40x48x256:f16:nk", "h200",
        f"k0/splitk(gate,3) {tile(64, 32, 32, 'wgmma,64,32,16', agents=GROUPS)} k1/split(m,grid,4) k1/split(n,grid,64)",
    ),
    "the product in a launch of its own": Run(
        "geglu:40x48x72:f16:nk", "rtx4090",
        f"k0/cut(Y) {tile(32, 32, 32, MMA, by='cp_async', agents=WARPS)} k1/split(m,grid,4) k1/split(n,grid,64)",
    ),
    "a piece of k is all of it": Run("geglu:40x48x32:f16:nk", "rtx4090", tile(32, 32, 32, MMA, depth=1, by="cp_async", agents=WARPS)),
    "few rows": Run(
        "geglu:5x40x520:f16:nk", "h200",
        "k0/split(m,grid,8) k0/split(n,grid,16) k0/split(k,warp,128) k0.gate/atom(direct,8,16,32) k0.gate/unroll(2)",
    ),
    "few rows, along n, a cluster": Run(
        "swiglu:7x40x512:bf16", "h200",
        "k0/split(m,grid,8) k0/split(n,grid,32) k0/split(k,cluster,256) k0/split(k,warp,64) k0.gate/atom(direct,8,32,32)",
    ),
}  # fmt: skip


FIRST = (
    "odd sizes", "operands ahead", "wgmma", "roles walk tiles", "roles take tiles in turn", "swapped, roles walk tiles",
    "a cluster along k", "blocks share k", "few rows",
)  # fmt: skip


@pytest.mark.parametrize("name", [n if n in FIRST else pytest.param(n, marks=pytest.mark.slow) for n in RUNS])
def test_a_pair_is_right(name: str):
    for kind, order in (("normal", len(name) % len(SCHEDULES)), ("integer", 0)):
        check(replace(RUNS[name], kind=kind, order=order))


def random_pair(seed: int) -> Run:
    """A walk of the search space of a small pair."""
    rng = random.Random(seed)
    gpu, dtype = rng.choice((*GPUS, "h200")), rng.choice(("f16", "bf16", "f16", "bf16", "f32"))
    m, n = rng.choice((1, 7, 16, 33, 64, 70, 130)), rng.choice((8, 16, 24, 40, 64, 72, 33, 100, 136))
    k, symbolic = rng.choice((8, 16, 40, 64, 72, 96, 33, 136, 200, 256)), m > 1 and rng.random() < 0.25
    rows = f"m(1..{m})" if symbolic else str(m)
    op = f"{rng.choice(('geglu', 'swiglu'))}:{rows}x{n}x{k}:{dtype}{rng.choice(('', ':nk'))}"
    schedule = ScheduleSpace(parse_op(op), load_target(gpu)).sample(rng).key
    if load_target(gpu).can("pdl") and rng.random() < 0.3:
        schedule = with_pdl(op, schedule, gpu=gpu)
    sizes = (("m", rng.randint(1, m)),) if symbolic else ()
    return Run(op, gpu, schedule, sizes, rng.choice(("normal", "integer")), rng.randrange(len(SCHEDULES)))


def check(run: Run) -> None:
    error, stats = run.error_norm()
    assert error <= 1 and nothing_but_numbers(stats), f"error {error:.3g} of what is allowed: {run}"


@pytest.mark.parametrize("seed", range(2))
def test_any_pair_is_right(seed: int):
    check(random_pair(seed))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_many_pairs_are_right(block: int):
    for seed in range(100 + 20 * block, 120 + 20 * block):
        check(random_pair(seed))


# ---------------------------------------------------------------- what is derived
def test_what_a_pair_reads_shares_barriers_and_its_sums_are_exchanged_at_one_meeting():
    o = lower(
        replay(parse_op("geglu:20x136x256:bf16:nk").program(), few(32, 64, loops="k0/split(k,cluster,128)"), H200)
    )[0]
    assert [b.name for b in o.barriers] == ["full_A_G_U", "empty_A_G_U"]
    kinds = [type(s) for s in o.roles[0].steps]
    assert kinds.count(Share) == kinds.count(Gather) == 2 and str(o).count("cluster sync") == 2
    assert kinds.index(Gather) > kinds.index(Share) + 2
    (ring,) = (s for s in o.roles[0].steps if isinstance(s, ForStep) and s.loop.level == "serial")
    assert [s for s in ring.body if isinstance(s, Settle)] == [Settle("gate", 1), Settle("up", 1)]
    assert sum(isinstance(s, BarArrive) and s.barrier.startswith("empty") for s in ring.body) == 1


@pytest.mark.parametrize(
    "name", ["wgmma", "roles take tiles in turn", "swapped, a cluster along k", "cp.async", "blocks share k"]
)
def test_steps_of_a_pair_can_be_executed(name: str):
    run = RUNS[name]
    program = parse_op(run.op).program()
    x = random_inputs(program)
    got = execute(replay(program, run.schedule, load_target(run.gpu)), x)
    gate, up = (x["A"] @ x[w].T for w in "GU")
    want = FUNCTIONS["gelu_tanh"][1](gate) * up
    assert abs(got["Y"] - want).max() < 1e-9 * abs(want).max()


def test_one_fill_of_a_serves_both_and_a_step_is_one_group():
    text = body(RUNS["wgmma"])
    assert text.count("&A_map, smem + ") == text.count("&G_map, smem + ") == text.count("&U_map, smem + ") == 3
    assert (
        text.count("emmy_wgmma_commit") == text.count("emmy_wgmma_fence()") == 1 and text.count("emmy_wgmma_wait") == 2
    )
    assert len(re.findall("emmy_wgmma_n64_f16_ss.gate_sums, A_desc", text)) == 1
    assert "gate_here" not in text and "emmy_sts" not in text  # sums stay where they are
    warps = body(RUNS["cp.async"])
    assert warps.count("emmy_ldmatrix_x4(A_frag") == 2 and warps.count("emmy_ldmatrix_x4(U_frag") == 2


def body(run: Run) -> str:
    text = unit(run.op, run.schedule, run.gpu).text
    return text[text.rindex("#endif") :]


def test_both_sums_and_all_operands_are_counted():
    op = parse_op("geglu:128x128x128:f16:nk")
    plan = replay(op.program(), tile(128, 128, 64, "wgmma,64,128,16", agents=GROUPS), H200)
    la = plan.launches[0]
    work = la.tile.work("gate")
    assert thread_registers(plan, la, work, work.atoms[0], mnk_axes(plan.program.stage("gate"))) == 2 * 64 + 16
    swapped = replay(op.program(), few(32, 64), H200)
    assert exchange_bytes(swapped, swapped.launches[0].tile) == 2 * 4 * 32 * (64 + 4)
    assert beside(plan.program, la.tile, "up") == ("gate", "up")
    assert operands(plan.program, ("gate", "up")) == (("A",), ("G", "U"))


REFUSED = {
    "a tile for each": (tile(64, 64, 32, "wgmma,64,64,16", agents=GROUPS).replace("k0.gate/", "k0.up/"),
                        "up is folded beside gate: atom of gate is of both"),
    "atoms one by one": (tile(64, 64, 32, "wgmma,64,64,16", agents=GROUPS) + " k0.up/atom(wgmma,64,64,16)",
                         "up has the atom wgmma m:64 n:64 k:16 already"),
    "the second swapped": ("k0/swap(up)", "up is folded beside gate: swap of gate is of both"),
    "the second shared": ("k0/splitk(up,2)", "up is folded beside gate: splitk of gate is of both"),
    "sums of 64 x 256 twice": (tile(64, 256, 32, "wgmma,64,256,16", agents=GROUPS), "wgmma needs about 272 registers"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name: str):
    schedule, reason = REFUSED[name]
    with pytest.raises(IllegalMove) as e:
        replay(parse_op("geglu:512x512x512:f16:nk").program(), schedule, H200)
    assert reason in e.value.reason


# ---------------------------------------------------------------- compiled
COMPILED = {
    "two consumers of 64 x 128 twice": (LARGE, tile(128, 128, 64, "wgmma,64,128,16", depth=4, agents=GROUPS,
                                                    then=f"{ROLES}k0/persist(132) ") + " k0/store(Y,tma)"),
    "tiles of 64 x 112 twice in turn": (LARGE, tile(64, 112, 64, "wgmma,64,112,16", depth=5,
                                                    then=f"{ROLES}k0/persist(132) k0/pingpong() ")),
    "weights along n": (LARGE.removesuffix(":nk"), tile(128, 128, 64, "wgmma,64,128,16", depth=4, agents=GROUPS,
                                                        then=f"{ROLES}k0/persist(132) ")),
    "32 rows": ("geglu:32x15360x3840:f16:nk", few(32, 64, depth=8, then="k0/specialize(1,0,0) ")),
}  # fmt: skip


@pytest.mark.parametrize("name", [n if "two" in n else pytest.param(n, marks=pytest.mark.slow) for n in COMPILED])
def test_it_compiles_without_spills_and_without_a_serialised_wgmma(name: str):
    cubin = compile_cubin(unit(*COMPILED[name], "h200").text, H200.arch)
    assert cubin.spill_bytes == 0 and not cubin.warnings and cubin.kernels[0].mix["HGMMA"] == 8


def test_a_large_plan_is_checked_on_a_smaller_op():
    small = reduced(parse_op(LARGE), COMPILED["two consumers of 64 x 128 twice"][1], H200)
    assert small is not None and small[0].work().flops < 1e9 and small[0].kind == "geglu"


# ---------------------------------------------------------------- the search
@pytest.mark.parametrize("gpu", ["h200", "rtx4090", "rtx5090", "cpu-portable"])
@pytest.mark.parametrize("op", [LARGE, "swiglu:3x15360x3840:bf16"])
def test_whatever_a_search_finds_has_code_and_features(op: str, gpu: str):
    space, rng = ScheduleSpace(parse_op(op), load_target(gpu)), random.Random(op)
    for _ in range(3):
        key = space.sample(rng).key
        assert unit(op, key, gpu).text
        assert features(space.op, replay(space.program, key, space.target), space.target).shape == (
            len(space.feature_names),
        )


def test_a_search_finds_roles_and_turns_and_swapped_factors_and_f16_sums():
    def found(op: str, gpu: str, word: str, walks: int = 60) -> bool:
        space, rng = ScheduleSpace(parse_op(op), load_target(gpu)), random.Random(0)
        return any(word in space.sample(rng).key for _ in range(walks))

    assert found(LARGE, "h200", "/pingpong(") and found(LARGE, "rtx4090", "/atom(hybrid")
    assert found("geglu:32x15360x3840:f16:nk", "h200", "/swap(gate)")


def test_a_search_does_not_cut_between_the_two():
    sites = Cut.sites(naive(parse_op(LARGE).program()), H200)
    assert [str(s.move) for s in sites] == ["k0/cut(Y)"]


def test_the_tree_reaches_two_consumers_of_64_by_128_twice():
    key = " ".join(COMPILED["two consumers of 64 x 128 twice"][1].split())
    key = key.replace(f"{GROUPS} ", f"{GROUPS} k0/split(n,warpgroup,128) k0/raster(4) ")
    point = ScheduleSpace(parse_op(LARGE), H200).locate(key)
    assert point is not None and point.key == key
