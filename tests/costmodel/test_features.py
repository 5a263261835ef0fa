"""Features count what they say, hold for every plan a schedule can make, and change their digest with their meaning."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emmy.costmodel.features import VERSION, dominant_work, feature_names, feature_set, features
from emmy.costmodel.gpu_features import NAMES as GPU_NAMES
from emmy.costmodel.traffic import LoopNest, set_share, steps
from emmy.ir.ops import parse_op
from emmy.ir.plan import Plan
from emmy.ir.schedule import replay
from emmy.ir.target import Target, load_target

CPU = replace(
    load_target("cpu-portable"),
    cores=2,
    l1d_bytes=32 << 10,
    l2_bytes=1 << 20,
    l3_bytes=32 << 20,
    dram_gbs=50.0,
    boost_mhz=3000.0,
    peak_tflops={"f32": 0.1, "f16->f32": 0.1, "bf16->f32": 0.1},
    capabilities=frozenset({"pack", "vector"}),
    vector_bits=128,
)
TILED = "k0/split(m,core,64) k0/split(n,serial,96) k0/split(k,serial,128) k0/stage(B,pack,1) k0.C/atom(fma,2,12,1,4) k0.C/unroll(4)"


def _plan(op: str, schedule: str, target: Target = CPU) -> Plan:
    return replay(parse_op(op).program(), schedule, target)


def _values(op: str, schedule: str, target: Target = CPU, threads: int = 1) -> dict[str, float]:
    row = features(parse_op(op), _plan(op, schedule, target), target, threads)
    return dict(zip(feature_names(), row.tolist(), strict=True))


def test_blocks_tiles_and_sums_are_those_of_the_printed_plan() -> None:
    v = _values("matmul:200x192x256:f32", TILED, threads=2)
    assert 2 ** v["log2_blocks"] == pytest.approx(4) and v["blocks_per_unit"] == 2 and v["tail_idle"] == 0
    assert [2 ** v[f"log2_tile_{a}"] for a in "mnk"] == [64, 96, 128]
    assert (v["sums"], v["registers_of_limit"], v["loads_per_fma"]) == (6, 6 / 16, 5 / 6)
    assert (v["order_code"], v["k_depth"], v["unroll"]) == (2 * 5 + 3, 1, 4)


def test_blocks_that_do_not_fill_the_last_wave_leave_cores_idle() -> None:
    assert _values("matmul:192x192x256:f32", TILED, threads=2)["tail_idle"] == 0.25


def test_packing_counts_every_copy_of_a_block() -> None:
    v = _values("matmul:200x192x256:f32", TILED)
    assert v["b_staged"] == 1 and v["a_staged"] == 0
    assert 2 ** v["b_repeats"] == pytest.approx(4)  # each of the four blocks packs all of B
    assert np.isnan(v["b_stride_zeros"]) and v["a_stride_zeros"] == 10  # rows of A are 1024 bytes apart


def test_padding_is_counted_where_pieces_are_ragged() -> None:
    v = _values("matmul:200x200x256:f32", "k0/split(n,serial,100) k0.C/atom(fma,3,12,1,4)")
    assert v["waste_m"] == pytest.approx(201 / 200 - 1)
    assert v["waste_n"] == pytest.approx(2 * 108 / 200 - 1)
    assert v["waste_k"] == 0


@given(st.integers(1, 60), st.lists(st.integers(1, 20), max_size=3))
def test_steps_counts_the_innermost_pieces_of_a_walk(extent: int, pieces: list[int]) -> None:
    def walk(left: int, rest: list[int]) -> int:
        if not rest:
            return 1
        return sum(walk(min(rest[0], left - at), rest[1:]) for at in range(0, left, rest[0]))

    assert steps(extent, tuple(pieces)) == walk(extent, pieces)


@settings(deadline=None, max_examples=60)
@given(
    st.permutations(["m", "n", "k"]), st.sampled_from((4, 8, 16)), st.sampled_from((4, 8, 16)), st.integers(64, 3000)
)
def test_moved_bytes_are_those_of_walking_the_loops_with_one_block_kept(
    order, outer: int, inner: int, size: int
) -> None:
    """A cache that keeps, of each operand, the block last used: count its fetches by running the loops."""
    words = [f"k0/split({a},serial,{outer})" for a in order] + [
        f"k0/split({a},serial,{min(inner, outer)})" for a in order
    ]
    plan = _plan("matmul:16x32x16:f32", " ".join(words))
    launch, work = dominant_work(plan)
    nest = LoopNest(plan, launch.tile, work)
    depth = nest.depth_that_fits(size)
    counts = [int(nest.trips(i)) for i in range(depth)]
    for i, operand in enumerate(nest.operands):
        held, fetched = None, 0
        for at in product(*map(range, counts)):
            block = tuple(x for x, loop in zip(at, nest.loops, strict=False) if loop.axis in operand.axes)
            fetched += block != held
            held = block
        assert nest.moved_bytes(size)[i] == pytest.approx(max(fetched, 1) * nest.block_bytes(operand, depth))


def test_a_larger_cache_never_lets_more_bytes_pass() -> None:
    plan = _plan("matmul:200x192x256:f32", TILED)
    launch, work = dominant_work(plan)
    nest = LoopNest(plan, launch.tile, work)
    moved = [sum(nest.moved_bytes(size)) for size in (1 << i for i in range(6, 24))]
    assert moved == sorted(moved, reverse=True) and moved[-1] == nest.footprint(0)


SCHEDULES = (
    "",
    TILED,
    "k0/split(n,core,64) k0/stage(A,pack,1) k0.C/atom(fma,4,8,1,4)",
    "k0.C/atom(fma,1,4,1,4)",
)


@pytest.mark.parametrize(
    "op", ["matmul:200x192x256:f32", "matmul:131x127x257:f32:bias,gelu_tanh", "matmul:m(1..512)x192x256:bf16"]
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_plan_has_features_that_are_finite_or_do_not_apply(op: str, schedule: str) -> None:
    v = _values(op, schedule)
    assert tuple(v) == feature_names() and not np.isinf(list(v.values())).any()
    assert np.isfinite([v["log2_roof_us"], v["log2_flops"], v["intensity_near"], v["log2_blocks"]]).all()


GPU_OP = "matmul:512x4096x3840:f16:nk"
GPU_TILE = "k0/split(m,grid,128) k0/split(n,grid,128) k0/split(k,serial,64) k0/split(m,warp,64) k0/split(n,warp,32)"
GPU_SCHEDULES = (
    "k0/split(m,grid,128) k0/split(n,grid,128) k0/split(k,serial,64)",
    f"{GPU_TILE} k0/stage(A,cp_async,3,pad) k0/stage(B,cp_async,3,row) k0.C/atom(mma,16,8,16)",
    f"{GPU_TILE} k0/raster(4) k0/stage(A,tma,4) k0/stage(B,tma,4) k0.C/atom(hybrid,16,8,32) k0.C/pipeline()",
)


def test_a_gpu_plan_has_features_too() -> None:
    gpu = load_target("h200")
    for schedule in GPU_SCHEDULES:
        v = _values(GPU_OP, schedule, gpu)
        assert 2 ** v["log2_blocks"] == pytest.approx(128) and v["tail_idle"] == pytest.approx(4 / 132)
        assert not np.isinf(list(v.values())).any()


def test_a_gpu_plan_tells_conflicts_residency_and_what_is_under_way() -> None:
    v = _values(GPU_OP, GPU_SCHEDULES[1], load_target("h200"))
    # rows of 128 bytes meet in the same banks: one wave for each of eight; 16 of 24 reads are A's, without conflicts
    assert 2 ** v["log2_read_conflict"] == pytest.approx((16 * 1 + 8 * 8) / 24)
    assert (v["blocks_together"], v["threads_of_limit"], v["by_tma"]) == (2, 2 * 256 / 2048, 0)
    assert v["wave_idle"] == pytest.approx(1 - 128 / 264)
    assert v["in_flight"] == pytest.approx(128 * 2 * 2 * 128 * 64 * 2 / 4.8e6)  # all blocks have a place
    v = _values(GPU_OP, GPU_SCHEDULES[2], load_target("h200"))
    assert (v["log2_read_conflict"], v["log2_fill_conflict"], v["by_tma"], v["ahead"]) == (0, 0, 1, 1)
    assert (v["log2_raster"], v["log2_store_conflict"]) == (2, 0)  # vectors of 16 bytes, in whole sectors
    assert v["log2_bound_over_roof"] >= max(
        0, v["log2_chain_over_roof"], v["log2_shared_over_roof"], v["log2_arithmetic_over_roof"]
    )


FEW_ROWS = "matmul:8x4096x3840:f16:nk"
DIRECT = "k0/split(m,grid,8) k0/split(n,grid,16) k0/split(k,warp,480) k0.C/atom(direct,8,16,32) k0.C/unroll(8)"
BOTH = "k0/split(m,grid,8) k0/split(n,grid,16) k0/split(k,cluster,1920) k0/split(k,warp,480) k0.C/atom(direct,8,16,32)"
CLUSTERED = (
    "k0/split(m,grid,64) k0/split(n,grid,128) k0/split(k,cluster,1024) k0/split(k,serial,64) k0/split(m,warpgroup,64) "
    "k0/split(n,warpgroup,128) k0/stage(A,tma,8) k0/stage(B,tma,8) k0/specialize(1,0,0) k0.C/atom(wgmma,64,128,16)"
)


def test_blocks_that_make_neighbouring_tiles_share_no_sums_and_ask_memory_for_less() -> None:
    gpu, op = load_target("h200"), "matmul:512x4096x3840:f16:nk"
    alone = CLUSTERED.replace("k0/split(k,cluster,1024) ", "")
    paired = alone.replace("split(m,grid,64)", "split(m,grid,128)").replace(
        "k0/split(k", "k0/split(m,cluster,64) k0/split(k", 1
    )
    v, single = (_values(op, s, gpu) for s in (paired, alone))
    assert (v["log2_cluster"], v["log2_k_sharers"], v["exchanged_of_fetched"], v["cluster_idle"]) == (1, 0, 0, 0)
    assert v["log2_l2_over_roof"] < single["log2_l2_over_roof"]


def test_a_cluster_is_told_by_its_size_its_exchange_and_the_multiprocessors_it_cannot_reach() -> None:
    gpu, op = load_target("h200"), "matmul:64x4096x4096:f16:nk"
    v, alone = (_values(op, s, gpu) for s in (CLUSTERED, CLUSTERED.replace("k0/split(k,cluster,1024) ", "")))
    assert (v["log2_cluster"], v["log2_k_sharers"], v["blocks_together"], v["fill_warps"]) == (2, 2, 1, 1)
    assert v["cluster_idle"] == pytest.approx(12 / 132) and v["wave_idle"] == pytest.approx(1 - 128 / 240)
    assert v["exchanged_of_fetched"] == pytest.approx(4 * 3 * 64 * 4096 / (2 * 4096 * (4096 + 32 * 64)))
    assert alone["exchanged_of_fetched"] == alone["log2_cluster"] == alone["cluster_idle"] == 0
    assert v["log2_turns"] == alone["log2_turns"] - 2
    assert v["in_flight"] == pytest.approx(120 / 32 * alone["in_flight"])  # 128 blocks, 120 places
    assert v["launches_over_roof"] == 0
    assert v["log2_wave_bytes"] == pytest.approx(
        alone["log2_wave_bytes"], abs=0.01
    )  # A once more for the last two tiles


def test_direct_loads_are_told_by_their_size_and_what_is_under_way() -> None:
    gpu, op = load_target("h200"), "matmul:1x4096x3840:f16:nk"
    v = _values(op, DIRECT, gpu)
    assert (v["log2_load_bytes"], v["turns_under_way"], v["log2_k_sharers"], v["log2_warps"]) == (4, 8, 3, 3)
    assert 2 ** v["log2_turns"] == pytest.approx(15) and v["a_repeats"] == 8 and v["b_repeats"] == 0
    assert max(v["log2_arithmetic_over_roof"], v["log2_shared_over_roof"]) < v["log2_bound_over_roof"] == 0
    assert v["staged_of_tile_memory"] == pytest.approx((4 * 8 * 8 * 20 + 1024) / gpu.smem_block_bytes)
    busy = min(256, 132 * v["blocks_together"])
    assert v["in_flight"] == pytest.approx(busy * 8 * 8 * 32 * 2 * 17 / 4.8e6)
    split = _values(op, f"k0/splitk(C,2) {DIRECT} k1/split(m,grid,8) k1/split(n,grid,64)", gpu)
    assert split["launches_over_roof"] == pytest.approx(2 / 2 ** split["log2_roof_us"])
    assert not any(np.isnan(x) for name, x in v.items() if name in GPU_NAMES)


SWAPPED = (
    "k0/swap(C) k0/split(m,grid,8) k0/split(n,grid,64) k0/split(k,serial,64) k0/split(n,warpgroup,64) "
    "k0/stage(A,tma,8) k0/stage(B,tma,8) k0.C/atom(wgmma,64,8,16)"
)


def test_swapped_factors_are_told_by_a_flag_alone_a_and_b_stay_rows_and_columns() -> None:
    gpu = load_target("h200")
    v, plain = _values(FEW_ROWS, SWAPPED, gpu), _values(FEW_ROWS, DIRECT, gpu)
    assert (v["is_swapped"], plain["is_swapped"], v["is_wgmma"], v["atom_m"], v["atom_n"]) == (1, 0, 1, 64, 8)
    assert [v[x] for x in ("log2_m", "log2_n", "b_along_k")] == [plain[x] for x in ("log2_m", "log2_n", "b_along_k")]
    rows, columns = parse_op(FEW_ROWS).program().sizes()["m"], parse_op(FEW_ROWS).program().sizes()["n"]
    assert v["waste_m"] == pytest.approx(8 / rows - 1) and v["waste_n"] == pytest.approx(
        -(-columns // 64) * 64 / columns - 1
    )
    assert not any(np.isnan(x) for name, x in v.items() if name in GPU_NAMES)


def test_tiles_taken_in_turn_are_told_from_those_that_warpgroups_share() -> None:
    gpu, op = load_target("h200"), "matmul:4096x4096x3840:f16:nk"
    ring = "k0/stage(A,tma,4) k0/stage(B,tma,4) k0/specialize(2,40,232) k0/persist(132)"
    loops, atom = "k0/split(m,grid,{}) k0/split(n,grid,256) k0/split(k,serial,64)", "k0.C/atom(wgmma,64,256,16)"
    turns = _values(op, f"{loops.format(64)} {ring} k0/pingpong() {atom}", gpu)
    shared = _values(op, f"{loops.format(128)} k0/split(m,warpgroup,64) {ring} {atom}", gpu)
    assert (turns["in_turn"], shared["in_turn"]) == (2, 0)
    for name in ("log2_warps", "fill_warps", "dealt_registers", "registers_of_allowed", "blocks_together"):
        assert turns[name] == shared[name]
    assert turns["log2_tiles_a_worker"] == shared["log2_tiles_a_worker"] + 1
    assert not any(np.isnan(x) for name, x in turns.items() if name in GPU_NAMES)


def test_a_cpu_plan_has_nothing_of_multiprocessors() -> None:
    v = _values("matmul:200x192x256:f32", TILED)
    assert np.isnan([v[name] for name in GPU_NAMES]).all()


def test_the_same_ratios_describe_a_plan_on_a_machine_twice_as_large() -> None:
    twice = replace(CPU, l1d_bytes=2 * CPU.l1d_bytes)
    small, large = _values("matmul:200x192x256:f32", TILED), _values("matmul:200x192x256:f32", TILED, twice)
    assert large["tile_of_near"] == pytest.approx(small["tile_of_near"] - 1)


def test_a_changed_meaning_needs_a_new_version() -> None:
    """When this fails, features changed under models already trained: raise `VERSION`, then put the new hash here."""
    rows = [features(parse_op("matmul:200x192x256:f32"), _plan("matmul:200x192x256:f32", s), CPU, 2) for s in SCHEDULES]
    gpu = load_target("h200")
    rows += [features(parse_op(GPU_OP), _plan(GPU_OP, s, gpu), gpu) for s in GPU_SCHEDULES]
    rows += [features(parse_op(FEW_ROWS), _plan(FEW_ROWS, s, gpu), gpu) for s in (CLUSTERED, DIRECT, BOTH, SWAPPED)]
    text = "\n".join(" ".join(f"{x:.9g}" for x in row) for row in rows)
    assert (VERSION, hashlib.sha256(text.encode()).hexdigest()[:16]) == (6, "dd9d0dd23d933807")


def test_the_digest_follows_names_and_version(monkeypatch: pytest.MonkeyPatch) -> None:
    import emmy.costmodel.features as module

    before = feature_set().digest
    feature_set.cache_clear()
    monkeypatch.setattr(module, "VERSION", VERSION + 1)
    assert feature_set().digest != before
    feature_set.cache_clear()
    monkeypatch.undo()
    assert feature_set().digest == before


@given(st.integers(1, 4), st.integers(1, 16), st.sampled_from((64, 512, 1024, 2048, 4096, 8192, 320, 4160)))
def test_the_share_of_a_cache_is_that_of_its_busiest_set(periods: int, width: int, stride: int) -> None:
    """32 KiB in eight ways of 64 sets: count the lines of rows of up to a line that fall into each set."""
    rows = 64 * periods
    per_set = np.bincount([r * stride // 64 % 64 for r in range(rows)], minlength=64)
    assert set_share(rows, 4.0 * width, stride, 32 << 10) == per_set.max() / 8


def test_rows_a_page_apart_share_few_sets() -> None:
    assert set_share(128, 64, 4096, 32 << 10) == 16.0
    assert set_share(128, 64, 4160, 32 << 10) == 0.25


def test_a_vector_along_the_strided_axis_is_gathered_lane_by_lane_unless_it_was_packed() -> None:
    along_n, along_k = "matmul:200x192x256:f32", "matmul:200x192x256:f32:nk"
    packed = "k0/split(n,core,64) k0/stage(B,pack,1) k0.C/atom(fma,4,8,1,4)"
    plain = "k0/split(n,core,64) k0.C/atom(fma,4,8,1,4)"
    assert _values(along_n, plain)["loads_per_fma"] == 6 / 8
    assert _values(along_k, packed)["loads_per_fma"] == 6 / 8
    assert _values(along_k, plain)["loads_per_fma"] == (4 + 2 * 4) / 8
