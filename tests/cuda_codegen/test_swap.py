"""Few rows by wgmma with its operands swapped: right on the emulator, compiled as meant, offered and refused where it should be."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from emmy.codegen.execute import execute
from emmy.codegen.lower import complete, lower
from emmy.codegen.nvrtc import compile_cubin
from emmy.codegen.steps import BlockSync, Close, ClusterSync, Gather, Outline, RoleSync, Share, Store
from emmy.errors import IllegalMove, PlanError, Race
from emmy.ir.gpu import exchange_bytes
from emmy.ir.moves.atom import mnk_axes
from emmy.ir.moves.swap import Swap
from emmy.ir.ops import parse_op
from emmy.ir.plan import naive
from emmy.ir.program import swapped
from emmy.ir.schedule import replay
from emmy.ir.target import load_target
from emmy.search.emulator_check import reduced
from emmy.search.schedule_space import ScheduleSpace
from emmy.testing.move_contract import check_meaning, random_inputs
from tests.cuda_codegen.emulated import Run, nothing_but_numbers, unit

H200 = load_target("h200")
PRODUCER, PAIR = "k0/specialize({},0,0) ", "k0/split(k,cluster,{}) "


def tile(
    m: int, n: int, k: int, *, each: int = 64, depth: int = 2, share: int = 0, then: str = "", roles: int = 0
) -> str:
    """A tile of m rows and n columns, `each` of them a warpgroup's; blocks of a cluster fold `share` of k each."""
    loops = f"k0/swap(C) k0/split(m,grid,{m}) k0/split(n,grid,{n}) {PAIR.format(share) if share else ''}"
    rings = f"k0/split(k,serial,{k}) k0/split(n,warpgroup,{each}) k0/stage(A,tma,{depth}) k0/stage(B,tma,{depth})"
    return f"{loops}{rings} {PRODUCER.format(roles) if roles else ''}{then}k0.C/atom(wgmma,64,{m},16)"


RUNS = {
    "16 rows, B along k": Run("matmul:16x64x128:f16:nk", "h200", tile(16, 64, 64)),
    "16 rows, B along n": Run("matmul:16x64x128:bf16", "h200", tile(16, 64, 64)),
    "one row": Run("matmul:1x72x136:f16:nk,bias", "h200", tile(8, 64, 32, roles=1)),
    "33 rows, all edges": Run("matmul:33x136x200:bf16:bias,residual", "h200", tile(48, 128, 32, roles=2)),
    "33 rows in two blocks, B along k": Run("matmul:33x72x104:f16:nk,gelu_tanh", "h200", tile(32, 64, 32, depth=3)),
    "64 rows, a cluster": Run("matmul:64x136x256:f16:nk,bias,gelu_tanh", "h200", tile(64, 64, 64, share=128, roles=1)),
    "64 rows, a cluster that feeds itself": Run("matmul:64x64x256:bf16:residual", "h200", tile(64, 64, 32, share=128)),
    "three warpgroups": Run("matmul:24x200x96:f16:bias,silu", "h200", tile(24, 192, 32, roles=3)),
    "a warpgroup of 128 columns": Run("matmul:16x136x64:f16:residual", "h200", tile(16, 128, 64, each=128, depth=1)),
    "rows of odd length": Run("matmul:16x33x64:f16:nk,bias", "h200", tile(16, 64, 64, depth=1)),
    "a symbol for rows": Run("matmul:m(1..40)x72x96:f16:nk,scale", "h200", tile(16, 64, 32, roles=1), (("m", 19),)),
    "workers walk tiles": Run("matmul:40x136x96:bf16", "h200", tile(16, 64, 32, roles=1, then="k0/persist(2) ")),
    "workers that feed themselves walk tiles": Run("matmul:40x72x64:f16", "h200", tile(16, 64, 32, then="k0/persist(1) ")),
    "an early launch": Run("matmul:16x64x192:f16:nk,bias", "h200", tile(16, 64, 64, roles=1) + " k0/pdl()"),
    "blocks share k too": Run(
        "matmul:16x72x256:f16:nk,bias", "h200",
        tile(16, 64, 64).replace("k0/swap(C)", "k0/swap(C) k0/splitk(C,2)") + " k1/split(m,grid,4) k1/split(n,grid,64)",
    ),
    "mma, B along k": Run(
        "matmul:16x64x96:f16:nk,bias", "rtx4090",
        "k0/swap(C) k0/split(m,grid,16) k0/split(n,grid,64) k0/split(k,serial,32) k0/split(n,warp,32) "
        "k0/stage(A,cp_async,2) k0/stage(B,cp_async,2) k0.C/atom(mma,16,8,16)",
    ),
    "single lanes": Run(
        "matmul:16x64x48:f32", "a100",
        "k0/swap(C) k0/split(m,grid,16) k0/split(n,grid,32) k0/split(k,serial,16) k0/split(n,warp,16) "
        "k0/stage(A,cp_async,2) k0/stage(B,cp_async,2) k0.C/atom(simt,16,16,4)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["integer", "normal"])
@pytest.mark.parametrize("name", RUNS)
def test_the_text_is_right_on_the_emulator(name: str, kind: str):
    r = RUNS[name]
    error, stats = Run(r.op, r.gpu, r.schedule, r.sizes, kind, order=2).error_norm()
    assert error <= 1 and nothing_but_numbers(stats)
    assert stats[0].smem_store_waves == stats[0].smem_store_waves_ideal or "wgmma" not in r.schedule


@pytest.mark.parametrize("name", [n for n in RUNS if not RUNS[n].sizes])
def test_the_steps_compute_the_program(name: str):
    program = parse_op(RUNS[name].op).program()
    check_meaning(replay(program, RUNS[name].schedule, load_target(RUNS[name].gpu)), program, name)


DECODE = {
    "q_proj, 16 rows": ("matmul:16x4096x3840:f16:nk", tile(16, 64, 64, depth=8, share=1920, roles=1)),
    "kv_proj, 32 rows, weights along n": ("matmul:32x2048x3840:bf16", tile(32, 64, 64, depth=8, share=960, roles=1)),
    "down, 64 rows, a residual": (
        "matmul:64x3840x15360:f16:nk,residual",
        tile(64, 128, 64, depth=8, share=7680, roles=2),
    ),
    "gate_up, 48 rows, GELU": ("matmul:48x30720x3840:f16:bias,gelu_tanh", tile(48, 128, 128, depth=4, roles=2)),
    "three groups": ("matmul:64x8192x3840:bf16:nk", tile(64, 192, 64, depth=5, roles=3)),
    "any number of rows": ("matmul:m(1..64)x4096x3840:f16:nk,bias", tile(64, 64, 64, depth=10, roles=1)),
    "early": ("matmul:16x4096x3840:f16:nk", tile(16, 64, 64, depth=12, roles=1) + " k0/pdl()"),
}


@pytest.mark.parametrize("name", DECODE)
def test_a_decode_kernel_compiles_without_spills_and_without_a_serialised_wgmma(name: str):
    cubin = compile_cubin(unit(*DECODE[name], "h200").text, H200.arch)
    assert cubin.spill_bytes == 0 and not cubin.warnings
    assert cubin.kernels[0].n_regs <= 128


def test_a_plan_of_a_decode_kernel_is_checked_on_a_smaller_op():
    op, schedule = DECODE["gate_up, 48 rows, GELU"]
    small = reduced(parse_op(op), schedule, H200)
    assert small is not None and small[0].work().flops < 1e9


def test_sums_are_given_to_places_below_one_another_and_leave_16_bytes_at_a_time():
    text = unit("matmul:16x64x128:f16", tile(16, 64, 64, roles=1), "h200").text
    body = text[text.rindex("#endif") :]
    assert "emmy_wgmma_n16_f16_ss_ta" in body and "emmy_sts_b32" in body and "emmy_sts_b64" not in body
    assert "emmy_bar_sync(1, 128)" in body and "emmy_lds_b128" in body and "emmy_stg_b128" in body
    assert body.count("emmy_syncthreads") == 1  # of all, when the barriers are made; a producer never meets again


# ---------------------------------------------------------------- what is derived
def meetings(schedule: str, op: str = "matmul:40x136x128:f16", role: int = -1) -> list[type]:
    plan = replay(parse_op(op).program(), schedule, H200)
    kinds = [type(s) for s in lower(plan)[0].roles[role].steps]
    return [k for k in kinds if k in (BlockSync, RoleSync, ClusterSync, Share, Gather, Close, Store)]


def test_threads_meet_between_giving_their_sums_and_taking_others():
    assert meetings(tile(16, 64, 32)) == [Share, BlockSync, Gather, Close, Store]
    assert meetings(tile(16, 64, 32, roles=1)) == [Share, RoleSync, Gather, Close, Store]
    assert meetings(tile(16, 64, 32, roles=1), role=0) == []


def test_where_tiles_are_walked_they_meet_before_they_give_the_next_too():
    found = meetings(tile(16, 64, 32, roles=1, then="k0/persist(2) "))
    assert found == [RoleSync, Share, RoleSync, Gather, Close, Store]


def test_in_a_cluster_the_exchange_is_the_one_there_is():
    found = meetings(tile(16, 64, 32, share=64, roles=1))
    assert found == [Share, ClusterSync, Gather, Close, Store, ClusterSync]


@pytest.mark.parametrize("roles", [0, 1])
def test_sums_that_are_taken_before_all_have_met_are_noticed(roles: int):
    program = parse_op("matmul:16x64x64:f16").program()

    def unmet(o: Outline) -> Outline:
        last = o.roles[-1]
        steps = tuple(s for s in last.steps if not isinstance(s, RoleSync | BlockSync))
        return replace(o, roles=(*o.roles[:-1], replace(last, steps=steps)))

    with pytest.raises(Race, match="gathers C before all agents have met"):
        execute(replay(program, tile(16, 64, 32, roles=roles), H200), random_inputs(program), damage=unmet)


def test_rings_leave_room_for_sums():
    program = parse_op("matmul:64x192x4096:f16:nk").program()
    loops = tile(64, 192, 64, depth=6).partition("k0/stage")[0]
    plan = replay(program, loops, H200)
    assert exchange_bytes(plan, plan.launches[0].tile) == 4 * 64 * (192 + 4)
    with pytest.raises(IllegalMove, match=r"the rings take 246\d\d\d bytes of the 232448"):
        replay(program, f"{loops}k0/stage(A,tma,6) k0/stage(B,tma,6)", H200)


# ---------------------------------------------------------------- the move
def test_m_is_the_own_axis_of_the_first_factor():
    program = parse_op("matmul:16x64x128:f16").program()
    after = replay(program, "k0/swap(C)", H200).program.stage("C")
    assert (mnk_axes(program.stage("C")), mnk_axes(after)) == (("m", "n", "k"), ("n", "m", "k"))
    assert (swapped(program.stage("C")), swapped(after)) == (False, True)
    assert str(after.body) == "B[k,n] * A[m,k]" and after.axes == ("m", "n")


REFUSED = {
    "twice": ("f16", "k0/swap(C) k0/swap(C)", "h200", "the factors of C are swapped already: B[k,n] * A[m,k]"),
    "on a CPU": ("f32", "k0/swap(C)", "cpu-portable", "atoms of cpu-portable have any number of rows"),
    "no sum": ("f16:bias", "k0/swap(Y)", "h200", "Y is not a sum"),
    "behind a loop": ("f16", "k0/split(m,grid,16) k0/swap(C)", "h200", "k0 has 1 loops and 0 channels"),
    "direct": ("f16:nk", "k0/swap(C) k0.C/atom(direct,8,16,32)", "h200", "direct has the rows of C for its own"),
    "mma along n": (
        "f16", "k0/swap(C) k0.C/atom(mma,16,8,16)", "h200", "mma reads its first operand along k, B[k,n] is contiguous along n",
    ),
    "by boxes": (
        "f16", f"{tile(16, 64, 64)} k0/store(C,tma)", "h200", "C is made with its operands swapped: threads share out",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name: str):
    kind, schedule, target, reason = REFUSED[name]
    with pytest.raises(IllegalMove) as e:
        replay(parse_op(f"matmul:16x64x128:{kind}").program(), schedule, load_target(target))
    assert reason in e.value.reason


def test_roles_that_take_tiles_in_turn_have_no_place_for_each():
    schedule = tile(16, 64, 32).replace("k0/split(n,warpgroup,64) ", "").partition("k0.C/")[0]
    schedule += "k0/specialize(2,40,232) k0/persist(2) k0/pingpong() k0.C/atom(wgmma,64,16,16)"
    plan = replay(parse_op("matmul:40x136x128:f16").program(), schedule, H200)
    assert "sums of C pass through one place in shared memory, 2 roles make them in turn" in (complete(plan) or "")
    with pytest.raises(PlanError):
        lower(plan)


# ---------------------------------------------------------------- the search
@pytest.mark.parametrize(
    ("op", "gpu", "offered"),
    [
        ("matmul:64x4096x3840:f16:nk", "h200", True), ("matmul:1x4096x3840:bf16:bias", "h200", True),
        ("matmul:m(1..64)x4096x3840:f16", "h100", True), ("matmul:65x4096x3840:f16:nk", "h200", False),
        ("matmul:64x4096x3840:f32:nk", "h200", False), ("matmul:64x4096x3840:f16:nk", "rtx5090", False),
        ("matmul:64x4095x3840:f16", "h200", False), ("matmul:64x4096x3840:f32:nk", "cpu-portable", False),
    ],
)  # fmt: skip
def test_it_is_offered_for_few_rows_of_16_bits_where_warpgroups_can(op: str, gpu: str, offered: bool):
    assert bool(list(Swap.sites(naive(parse_op(op).program()), load_target(gpu)))) == offered


@pytest.mark.parametrize(
    "op",
    [
        "matmul:16x4096x3840:f16:nk",
        "matmul:33x3840x15360:bf16:bias",
        "matmul:7x40x72:f16",
        "matmul:50x64x48:f16:nk,silu",
    ],
)
def test_every_walk_that_swaps_ends_in_text_and_is_found_again(op: str):
    space, rng, found = ScheduleSpace(parse_op(op), H200), random.Random(op), []
    while len(found) < 8:
        point = space.sample(rng)
        found += [point] if "swap" in point.key else []
    for point in found:
        assert "wgmma_n" in unit(op, point.key, "h200").text
        assert space.locate(point.key) is not None


@pytest.mark.slow
def test_at_most_two_blocks_read_a_weight_and_k_comes_64_or_128_at_a_time():
    space = ScheduleSpace(parse_op("matmul:16x4096x3840:f16:nk"), H200)
    rng = random.Random(0)
    keys = [k for k in (space.sample(rng).key for _ in range(150)) if "swap" in k and "splitk" not in k]
    assert {k.partition("(m,grid,")[2].partition(")")[0] for k in keys} == {"8", "16"}
    assert {k.partition("(k,serial,")[2].partition(")")[0] for k in keys} == {"64", "128"}
