"""What is counted from a plan is what the emulator counts from its text: exactly, where blocks are whole."""

from __future__ import annotations

import numpy as np
import pytest

from emmy.codegen.build import SourceUnit, source
from emmy.codegen.emulated import emulate_plan
from emmy.codegen.emulator import EmuStats
from emmy.codegen.gpu_build import build
from emmy.costmodel.counting import WAVE_BYTES, Traffic
from emmy.costmodel.features import dominant_work, feature_names, features
from emmy.costmodel.gpu_features import NAMES as GPU_NAMES
from emmy.costmodel.multiprocessor import (
    Residency,
    bounds,
    filled_by_clusters,
    residency,
    traffic,
    wave_bytes,
)
from emmy.ir.ops import parse_op
from emmy.ir.schedule import replay
from emmy.ir.target import load_target
from emmy.testing.five_plans import FIVE_PLANS, Example
from tests.cuda_codegen.emulated import random_run
from tests.cuda_codegen.test_direct import tile
from tests.tiers import some

TILE = "k0/split(m,grid,64) k0/split(n,grid,64) k0/split(k,serial,32) k0/split(m,warp,32) k0/split(n,warp,32)"
MMA, SIMT, SMALL = "mma,16,8,16", "simt,16,32,4", "simt,8,8,4"
# op's dtype and options, gpu, transport, layout, atom
CASES = [
    *((f"f16{nk}", "rtx4090", "cp_async", layout, MMA) for nk in ("", ":nk") for layout in ("", ",pad", ",row")),
    *((f"f16{nk}", "h200", "tma", layout, "hybrid,16,8,32") for nk in ("", ":nk") for layout in ("", ",row")),
    *((f"f32{nk}", "a100", "cp_async", layout, SIMT) for nk in ("", ":nk") for layout in ("", ",pad", ",row")),
    ("bf16:nk,bias", "rtx5090", "tma", "", MMA),
    ("f16", "rtx3090", "ldg", "", MMA),
    ("f32:nk", "rtx4090", "ldg", ",pad", SMALL),
    ("f16", "rtx4090", "cp_async", "", SMALL),
]  # fmt: skip


def _unit(op: str, schedule: str, gpu: str) -> SourceUnit:
    return source(parse_op(op), schedule, load_target(gpu))


def _schedule(transport: str, layout: str, atom: str, depth: int = 2) -> str:
    return f"{TILE} k0/stage(A,{transport},{depth}{layout}) k0/stage(B,{transport},{depth}{layout}) k0.C/atom({atom})"


def _both(op: str, schedule: str, gpu: str) -> tuple[Traffic, EmuStats]:
    unit = _unit(op, schedule, gpu)
    launch, work = dominant_work(unit.plan)
    moved = traffic(unit.plan, launch, work, work.atoms[0], load_target(gpu))
    assert moved is not None
    _, stats = emulate_plan(unit, parse_op(op).inputs("normal", 1), eager=True)
    return moved, stats[unit.plan.launches.index(launch)]


@pytest.mark.parametrize(("kind", "gpu", "transport", "layout", "atom"), some(CASES, 2))
def test_the_plan_tells_the_waves_bytes_and_sectors_of_its_text(
    kind: str, gpu: str, transport: str, layout: str, atom: str
) -> None:
    moved, counted = _both(f"matmul:128x128x96:{kind}", _schedule(transport, layout, atom), gpu)
    assert (moved.reads.taken, moved.reads.ideal) == (counted.smem_load_waves, counted.smem_load_waves_ideal)
    assert (moved.stores.taken, moved.stores.ideal) == (
        counted.global_store_sectors,
        counted.global_store_sectors_ideal,
    )
    assert counted.global_store_bytes == 128 * 128 * (4 if kind.startswith("f32") else 2)
    if transport == "ldg":
        assert moved.fills.taken == counted.smem_store_waves
        assert moved.asked_bytes == counted.smem_store_bytes <= counted.global_load_bytes
        return
    assert moved.asked_bytes == counted.cp_async_bytes + counted.tma_load_bytes
    # What the last iterations ask for beyond the end, cp.async fills with zeros: as many conflicts, more waves.
    ideal = counted.smem_store_waves_ideal
    assert moved.fills.conflict == (counted.smem_store_waves / ideal if ideal else 1)
    assert moved.fills.taken <= counted.smem_store_waves


_GROUPS = TILE.split(" k0/split(m,warp")[0].replace("serial,32", "serial,64") + " k0/split(m,warpgroup,64)"
_FEW = "k0/split(m,grid,8) k0/split(n,grid,16) k0/split(k,warp,64) k0.C/atom(direct,8,16,32) k0.C/unroll(2)"
BATCHED = {
    "warps": ("3x128x128x96:f16", "rtx4090", _schedule("cp_async", "", MMA)),
    "warpgroups": ("3x128x128x128:f16:nk", "h200", f"{_GROUPS} k0/stage(A,tma,2) k0/stage(B,tma,2) k0.C/atom(wgmma,64,64,16)"),
    "panels": (
        "3x128x128x128:f16", "h200",
        f"{_GROUPS.replace('l,64', 'l,128')} k0/stage(A,tma,2,panels) k0/stage(B,tma,2) k0.C/atom(wgmma,64,64,16)",
    ),
    "swapped": (
        "3x16x128x128:f16:nk", "h200",
        "k0/swap(C) k0/split(m,grid,16) k0/split(n,grid,64) k0/split(k,serial,64) k0/split(n,warpgroup,64) k0/stage(A,tma,2) "
        "k0/stage(B,tma,2) k0.C/atom(wgmma,64,16,16)",
    ),
    "straight to registers": ("3x8x64x256:f16:nk", "h200", _FEW),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHED)
def test_a_batch_of_products_moves_as_much_as_so_many_of_them(name: str) -> None:
    shape, gpu, schedule = BATCHED[name]
    first = "k0/swap(C) " if "swap" in schedule else ""
    op, one = f"bmm:{shape}", f"matmul:{shape.split('x', 1)[1]}"
    moved, counted = _both(op, f"{first}k0/split(b,grid,1) {schedule.removeprefix(first)}", gpu)
    of_one, _ = _both(one, schedule, gpu)
    by_engine = counted.wgmma_bytes / WAVE_BYTES
    assert moved.reads.taken == counted.smem_load_waves + by_engine == 3 * of_one.reads.taken
    assert moved.stores.taken == counted.global_store_sectors == 3 * of_one.stores.taken
    if "direct" not in schedule:
        assert moved.asked_bytes == counted.cp_async_bytes + counted.tma_load_bytes
    assert moved.fetched_bytes == 3 * of_one.fetched_bytes and moved.blocks == 3 * of_one.blocks
    unit = _unit(op, f"{first}k0/split(b,grid,1) {schedule.removeprefix(first)}", gpu)
    launch, work = dominant_work(unit.plan)
    assert wave_bytes(unit.plan, launch, work, 1e9) == sum(x.nbytes for x in parse_op(op).inputs("normal", 0).values())
    values = dict(zip(feature_names(), features(parse_op(op), unit.plan, load_target(gpu)), strict=True))
    assert all(np.isfinite(values[x]) for x in GPU_NAMES)


@pytest.mark.parametrize(
    ("op", "columns"),
    [("f16", 40), ("f16:bias", 48), ("bf16:nk,bias,residual,gelu_tanh", 32), ("f16", 8), ("f16:splitk", 40)],
)
def test_atoms_that_neighbours_exchange_are_stored_in_whole_sectors(op: str, columns: int) -> None:
    split = "k0/splitk(C,2) " if op.endswith("splitk") else ""
    schedule = (
        f"{split}k0/split(m,grid,32) k0/split(n,grid,{columns}) k0/split(k,serial,32) k0/split(m,warp,16) "
        f"k0/split(n,warp,{columns}) k0/stage(A,ldg,2) k0/stage(B,ldg,2) k0.C/atom(mma,16,8,16)"
    )
    moved, counted = _both(f"matmul:64x{4 * columns}x64:{op.removesuffix(':splitk')}", schedule, "rtx4090")
    assert (moved.stores.taken, moved.stores.ideal) == (
        counted.global_store_sectors,
        counted.global_store_sectors_ideal,
    )


@pytest.mark.parametrize("axis", ["m", "n"])
def test_blocks_that_bring_each_other_what_they_read_alike_ask_for_what_one_block_of_their_tiles_would(
    axis: str,
) -> None:
    schedule, op = _schedule("tma", "", MMA), "matmul:128x128x96:f16"
    clustered = schedule.replace("k0/split(k", f"k0/split({axis},cluster,32) k0/split(k")
    moved, counted = _both(op, clustered, "h200")
    assert moved.asked_bytes == counted.tma_load_bytes == _both(op, schedule, "h200")[0].asked_bytes


def test_a_block_that_the_copy_engine_stores_takes_shared_memory() -> None:
    schedule = _schedule("tma", "", MMA)
    op = "matmul:128x128x96:f16"
    moved, counted = _both(op, f"{schedule} k0/store(C,tma)", "h200")
    assert 32 * moved.stores.taken == counted.tma_store_bytes and moved.stores.conflict == 1
    deep = _schedule("tma", "", MMA, depth=6)
    alone, placed = (_residency("h200", x, op)[1].blocks for x in (deep, f"{deep} k0/store(C,tma)"))
    assert (alone, placed) == (4, 3)


@pytest.mark.parametrize("nk", ["", ":nk"])
@pytest.mark.parametrize(("columns", "roles", "together"), [(64, "", 6), (32, "k0/specialize(2,40,232) ", 1)])
def test_warpgroups_read_operands_for_every_instruction(nk: str, columns: int, roles: str, together: int) -> None:
    op = f"matmul:128x128x128:f16{nk}"
    schedule = (
        "k0/split(m,grid,64) k0/split(n,grid,64) k0/split(k,serial,64) k0/split(m,warpgroup,64) "
        f"k0/split(n,warpgroup,{columns}) k0/stage(A,tma,2) k0/stage(B,tma,2) {roles}k0.C/atom(wgmma,64,{columns},16)"
    )
    moved, counted = _both(op, schedule, "h200")
    assert moved.reads.taken * WAVE_BYTES == counted.wgmma_bytes and moved.reads.conflict == 1
    assert moved.stores.taken == counted.global_store_sectors and moved.asked_bytes == counted.tma_load_bytes
    assert _residency("h200", schedule, op)[1].blocks == together


@pytest.mark.parametrize(("nk", "store"), [("", ""), (":nk", " k0/store(C,tma)")])
def test_consumers_that_take_tiles_in_turn_move_what_their_text_does(nk: str, store: str) -> None:
    op = f"matmul:320x128x128:f16{nk}"
    schedule = (
        "k0/split(m,grid,64) k0/split(n,grid,64) k0/split(k,serial,64) k0/stage(A,tma,2) k0/stage(B,tma,2) "
        f"k0/specialize(2,40,232) k0/persist(3) k0/pingpong() k0.C/atom(wgmma,64,64,16){store}"
    )
    moved, counted = _both(op, schedule, "h200")
    assert moved.reads.taken * WAVE_BYTES == counted.wgmma_bytes and moved.asked_bytes == counted.tma_load_bytes
    assert 32 * moved.stores.taken == counted.global_store_bytes + counted.tma_store_bytes
    _, r = _residency("h200", schedule, op)
    assert (r.threads, r.blocks) == (3 * 128, 1)
    each = 64 * 64 * 2  # bytes of a slot of A, of one of B, of a stored tile; two are stored at a time
    assert (r.smem_bytes - 1024) // each == 2 * 2 + (2 if store else 0)


PAIR = f"{TILE} " + " ".join(f"k0/stage({v},{{by}},2)" for v in "AGU") + " k0.gate/atom({atom})"
PAIRS = {
    "matrices": ("f16:nk", "rtx4090", PAIR.format(by="cp_async", atom=MMA)),
    "sums in halves": ("f16", "rtx5090", PAIR.format(by="tma", atom="hybrid,16,8,32")),
    "f32": ("f32:nk", "h200", PAIR.format(by="tma", atom=SIMT)),
    "blocks share k": ("f16", "h200", f"k0/splitk(gate,2) {PAIR.format(by='tma', atom=MMA)}"),
    "a cluster": ("bf16:nk", "h200", PAIR.format(by="tma", atom=MMA).replace("k0/split(k", "k0/split(k,cluster,64) k0/split(k")),
    "warpgroups": (
        "f16:nk", "h200",
        PAIR.format(by="tma", atom="wgmma,64,64,16").replace(TILE, "k0/split(m,grid,64) k0/split(n,grid,64) k0/split(k,serial,64) "
        "k0/split(m,warpgroup,64)"),
    ),
    "warpgroups with A in registers": (
        "bf16", "h200",
        PAIR.format(by="tma", atom="wgmma_rs,64,64,16").replace(TILE, "k0/split(m,grid,64) k0/split(n,grid,64) "
        "k0/split(k,serial,64) k0/split(m,warpgroup,64)"),
    ),
    "swapped": (
        "f16:nk", "h200",
        "k0/swap(gate) " + PAIR.format(by="tma", atom="wgmma,64,32,16").replace(TILE, "k0/split(m,grid,32) k0/split(n,grid,64) "
        "k0/split(k,serial,64) k0/split(n,warpgroup,64)"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_sums_side_by_side_move_what_their_text_does(name: str) -> None:
    kind, gpu, schedule = PAIRS[name]
    moved, counted = _both(f"geglu:128x128x128:{kind}", schedule, gpu)
    by_engine = counted.wgmma_bytes / WAVE_BYTES
    assert (moved.reads.taken, moved.reads.ideal) == (
        counted.smem_load_waves + by_engine,
        counted.smem_load_waves_ideal + by_engine,
    )
    assert (moved.stores.taken, moved.stores.ideal) == (
        counted.global_store_sectors,
        counted.global_store_sectors_ideal,
    )
    assert moved.asked_bytes == counted.cp_async_bytes + counted.tma_load_bytes
    assert moved.exchanged_bytes == counted.dsmem_bytes
    if not counted.cp_async_bytes:
        assert moved.fills.taken == counted.smem_store_waves


@pytest.mark.parametrize("share", ["k0/split(k,warp,64)", "k0/split(k,cluster,128) k0/split(k,warp,64)"])
@pytest.mark.parametrize("nk", ["", ":nk"])
def test_few_rows_of_both_weights_move_what_their_text_does(nk: str, share: str) -> None:
    schedule = f"k0/split(m,grid,8) k0/split(n,grid,16) {share} k0.gate/atom(direct,8,16,32) k0.gate/unroll(2)"
    moved, counted = _both(f"geglu:8x64x256:f16{nk}", schedule, "h200")
    assert moved.reads.taken == counted.smem_load_waves and moved.fills.taken == counted.smem_store_waves
    assert moved.stores.taken == counted.global_store_sectors and moved.asked_bytes == counted.global_load_bytes
    assert moved.exchanged_bytes == counted.dsmem_bytes


@pytest.mark.parametrize(
    ("op", "a", "b"),
    [("128x128x256:f16:nk", "tma,2,panels", "tma,2,panels"), ("128x128x260:f16", "cp_async,2", "tma,2")],
)
def test_lanes_load_the_operand_that_a_warpgroup_has_in_registers_once_for_all_its_columns(
    op: str, a: str, b: str
) -> None:
    schedule = (
        "k0/split(m,grid,64) k0/split(n,grid,64) k0/split(k,serial,128) k0/split(m,warpgroup,64) "
        f"k0/split(n,warpgroup,64) k0/stage(A,{a}) k0/stage(B,{b}) k0.C/atom(wgmma_rs,64,32,16)"
    )
    moved, counted = _both(f"matmul:{op}", schedule, "h200")
    assert moved.reads.taken == counted.smem_load_waves + counted.wgmma_bytes / WAVE_BYTES and moved.reads.conflict == 1
    assert moved.asked_bytes == counted.tma_load_bytes or "cp_async" in a


SHARED_K = "k0/split(m,grid,64) k0/split(n,grid,64) k0/split(k,cluster,{}) k0/split(k,serial,32) "
WARPS, GROUPS = "k0/split(m,warp,32) k0/split(n,warp,32) ", "k0/split(m,warpgroup,64) k0/split(n,warpgroup,32) "
TMA = "k0/stage(A,tma,2) k0/stage(B,tma,2) "
CLUSTERS = {
    "matrices": ("f16", 2, f"{WARPS}{TMA}k0.C/atom({MMA})"),
    "matrices, four blocks, a bias": ("bf16:nk,bias", 4, f"{WARPS}{TMA}k0.C/atom({MMA})"),
    "sums in halves": ("f16:nk", 2, f"{WARPS}{TMA}k0.C/atom(hybrid,16,8,32)"),
    "f32": ("f32", 4, f"{WARPS}{TMA}k0.C/atom({SIMT})"),
    "f32, small atoms": ("f32:nk", 2, f"{WARPS}{TMA}k0.C/atom({SMALL})"),
    "warpgroups and a producer": ("f16:nk", 4, f"{GROUPS}{TMA}k0/specialize(2,40,232) k0.C/atom(wgmma,64,32,16)"),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_blocks_of_a_cluster_give_take_and_store_what_their_text_does(name: str) -> None:
    kind, blocks, rest = CLUSTERS[name]
    moved, counted = _both(f"matmul:128x128x256:{kind}", SHARED_K.format(256 // blocks) + rest, "h200")
    by_engine = counted.wgmma_bytes / WAVE_BYTES
    assert moved.reads.taken == counted.smem_load_waves + by_engine
    assert moved.reads.ideal == counted.smem_load_waves_ideal + by_engine
    assert (moved.fills.taken, moved.fills.ideal) == (counted.smem_store_waves, counted.smem_store_waves_ideal)
    assert (moved.stores.taken, moved.stores.ideal) == (
        counted.global_store_sectors,
        counted.global_store_sectors_ideal,
    )
    assert moved.exchanged_bytes == counted.dsmem_bytes == 4 * 128 * 128 * (blocks - 1)
    assert (moved.asked_bytes, moved.blocks) == (counted.tma_load_bytes, 4 * blocks)


def test_sums_that_blocks_exchange_take_shared_memory_and_clusters_leave_multiprocessors_empty() -> None:
    target, op = load_target("h200"), "matmul:128x128x256:f16"
    ring = 2 * 2 * (32 * 64 * 2) + 64 + 1024  # two operands of two slots, barriers, what every block reserves
    for blocks in (2, 4):
        _, r = _residency("h200", SHARED_K.format(256 // blocks) + f"{WARPS}{TMA}k0.C/atom({MMA})", op)
        assert r.blocks == min(6, target.smem_sm_bytes // (ring + 4 * 64 * 72))
        assert r.places == 132 * r.blocks  # several blocks of one multiprocessor
    assert [round(132 * filled_by_clusters(n, 1)) for n in (1, 2, 3, 4, 8)] == [132, 132, 120, 120, 112]
    assert filled_by_clusters(8, 2) == filled_by_clusters(4, 1) and filled_by_clusters(2, 6) == 1


def test_what_the_copy_engine_brings_beyond_a_block_is_asked_for_and_at_the_edge_not_there() -> None:
    schedule = (
        "k0/split(m,grid,64) k0/split(n,grid,240) k0/split(k,serial,32) k0/split(m,warpgroup,64) "
        f"k0/split(n,warpgroup,240) {TMA}k0.C/atom(wgmma,64,240,16)"
    )
    moved, counted = _both("matmul:64x480x64:f16", schedule, "h200")
    assert moved.asked_bytes == counted.tma_load_bytes == 2 * 64 * (2 * 64 + 2 * 256)
    assert moved.fetched_bytes == 2 * 64 * (2 * 64 + 256 + 240)


DIRECT = {
    "B along k": ("matmul:8x64x256:f16:nk", 16, 64, 16, 2),
    "B along n": ("matmul:8x64x256:f16", 64, 64, 64, 2),
    "two tiles a warp": ("matmul:8x64x256:bf16:nk", 32, 64, 16, 2),
    "loads of 8 bytes": ("matmul:8x64x128:f16", 32, 64, 32, 1),
    "one warp": ("matmul:8x64x64:f16:nk", 16, 64, 16, 2),
    "one warp, B along n": ("matmul:8x64x64:f16", 64, 64, 64, 2),
}


@pytest.mark.parametrize("name", DIRECT)
def test_lanes_that_load_operands_bring_and_share_what_their_text_does(name: str) -> None:
    op, columns, share, atom, unroll = DIRECT[name]
    moved, counted = _both(op, tile(columns, share, atom, unroll), "h200")
    assert moved.asked_bytes == moved.fetched_bytes == counted.global_load_bytes
    assert (moved.reads.taken, moved.reads.ideal) == (counted.smem_load_waves, counted.smem_load_waves_ideal)
    assert (moved.fills.taken, moved.fills.ideal) == (counted.smem_store_waves, counted.smem_store_waves_ideal)
    assert (moved.stores.taken, moved.stores.ideal) == (
        counted.global_store_sectors,
        counted.global_store_sectors_ideal,
    )
    assert (moved.turns, moved.depth, moved.load_bytes) == (share // 32, unroll, 16 if "nk" in op else atom // 4)
    warps = parse_op(op).program().dim("k") // share  # type: ignore[operator]
    assert moved.in_flight_bytes == warps * unroll * 32 * 2 * (columns + 8)


@pytest.mark.parametrize(
    ("op", "columns", "share", "atom", "part"),
    [("f16:nk", 16, 64, 16, 256), ("bf16:nk", 32, 32, 16, 128), ("f16", 64, 128, 64, 128)],
)
def test_blocks_of_a_cluster_take_the_shares_of_all_their_warps(
    op: str, columns: int, share: int, atom: int, part: int
) -> None:
    schedule = tile(columns, share, atom, 1, more=f"k0/split(k,cluster,{part}) ")
    moved, counted = _both(f"matmul:8x64x512:{op}", schedule, "h200")
    assert moved.asked_bytes == counted.global_load_bytes
    assert (moved.reads.taken, moved.reads.ideal) == (counted.smem_load_waves, counted.smem_load_waves_ideal)
    assert moved.fills.taken == counted.smem_store_waves and moved.stores.taken == counted.global_store_sectors
    assert moved.exchanged_bytes == counted.dsmem_bytes == 4 * 8 * 64 * (512 - part) // share
    assert moved.blocks == 64 // columns * 512 // part
    pitch = columns + (4 if "nk" in op else 1)
    assert _residency("h200", schedule, f"matmul:8x64x512:{op}")[1].smem_bytes == 1024 + 4 * 8 * pitch * part // share


@pytest.mark.parametrize("op", ["matmul:3x64x256:f16:nk", "matmul:1x64x256:bf16"])
def test_rows_that_do_not_exist_bring_nothing(op: str) -> None:
    moved, counted = _both(op, tile(64, 64, 16, 2), "h200")
    rows = int(op.split(":")[1].split("x")[0])
    assert moved.fetched_bytes == 2 * 256 * (64 + rows) <= counted.global_load_bytes
    assert moved.stores.taken == counted.global_store_sectors


def test_rows_without_a_layout_conflict_and_the_swizzle_does_not() -> None:
    plain, _ = _both("matmul:128x128x96:f16:nk", _schedule("cp_async", ",row", MMA), "rtx4090")
    swizzled, _ = _both("matmul:128x128x96:f16:nk", _schedule("cp_async", "", MMA), "rtx4090")
    assert plain.reads.conflict == 4 and swizzled.reads.conflict == swizzled.fills.conflict == 1


@pytest.mark.parametrize("op", ["f16", "f16:nk,bias", "bf16:nk,residual"])
@pytest.mark.parametrize("share", ["", "k0/split(k,cluster,128) "])
@pytest.mark.parametrize("producer", ["", "k0/specialize(2,0,0) "])
def test_sums_of_swapped_factors_change_hands_and_leave_along_rows(op: str, share: str, producer: str) -> None:
    schedule = (
        f"k0/swap(C) k0/split(m,grid,32) k0/split(n,grid,128) {share}k0/split(k,serial,64) k0/split(n,warpgroup,64) "
        f"k0/stage(A,tma,2) k0/stage(B,tma,2) {producer}k0.C/atom(wgmma,64,32,16)"
    )
    moved, counted = _both(f"matmul:32x256x256:{op}", schedule, "h200")
    assert moved.reads.taken == counted.smem_load_waves + counted.wgmma_bytes / WAVE_BYTES
    assert (moved.fills.taken, moved.fills.ideal) == (counted.smem_store_waves, counted.smem_store_waves_ideal)
    assert moved.fills.conflict == 1  # no two lanes write to one bank
    assert (moved.stores.taken, moved.stores.ideal) == (
        counted.global_store_sectors,
        counted.global_store_sectors_ideal,
    )
    assert moved.asked_bytes == counted.tma_load_bytes and moved.exchanged_bytes == counted.dsmem_bytes


@pytest.mark.parametrize("op", ["matmul:100x128x96:f16", "matmul:128x136x96:f16:nk"])
def test_ragged_edges_are_counted_as_whole_blocks(op: str) -> None:
    moved, counted = _both(op, _schedule("cp_async", "", MMA), "rtx4090")
    assert moved.reads.taken == counted.smem_load_waves
    assert moved.asked_bytes >= counted.cp_async_bytes and moved.stores.taken >= counted.global_store_sectors


def test_workers_that_fill_for_the_next_tile_wait_for_memory_once() -> None:
    target, op = load_target("h200"), "matmul:2048x2048x512:f16:nk"
    schedule = (
        "k0/split(m,grid,64) k0/split(n,grid,64) k0/split(k,serial,64) k0/split(m,warpgroup,64) "
        "k0/split(n,warpgroup,32) k0/stage(A,tma,4) k0/stage(B,tma,4) k0/specialize(2,40,232) "
    )
    atom, chains = "k0.C/atom(wgmma,64,32,16)", []
    for persist in ("", "k0/persist(132) "):
        unit, r = _residency("h200", schedule + persist + atom, op)
        launch, work = dominant_work(unit.plan)
        moved = traffic(unit.plan, launch, work, work.atoms[0], target)
        assert moved is not None and (r.places, moved.blocks) == (132, 1024)
        chains.append(bounds(moved, r, target, 10.0, joined=bool(persist)).chain_us)
    assert chains == [8 * (8 + 4) / 4, (8 * 8 + 4) / 4]  # eight tiles a multiprocessor, eight fills each


def test_parts_of_a_split_fold_are_stored_in_f32() -> None:
    schedule = "k0/splitk(C,3) " + _schedule("cp_async", "", MMA)
    moved, counted = _both("matmul:128x128x192:f16", schedule, "rtx4090")
    assert (moved.stores.taken, moved.blocks, moved.turns) == (counted.global_store_sectors, 12, 2)
    assert counted.global_store_bytes == 3 * 4 * 128 * 128


def _residency(gpu: str, schedule: str, op: str = "matmul:512x512x512:f16") -> tuple[SourceUnit, Residency]:
    unit = _unit(op, schedule, gpu)
    launch, work = dominant_work(unit.plan)
    return unit, residency(unit.plan, launch, work, work.atoms[0], load_target(gpu))


def test_shared_memory_or_threads_or_registers_say_how_many_blocks_fit() -> None:
    _, small = _residency("h200", _schedule("cp_async", "", MMA))
    # 32 sums, two sets of 16 operands, 16 others; a quarter of a multiprocessor deals its 16,384 registers to 6 warps
    assert (small.threads, small.registers, small.blocks) == (128, 80, 6)
    _, deep = _residency("h200", _schedule("cp_async", "", MMA, depth=6))
    assert deep.blocks == 233472 // (6 * 8192 + 1024)


def test_the_estimate_of_registers_is_near_what_the_compiler_takes() -> None:
    unit, r = _residency("h200", _schedule("tma", "", MMA, depth=3))
    taken = build(unit, load_target("h200")).static["registers"]
    assert taken * 0.7 <= r.registers <= taken * 1.4


def test_a_wave_in_groups_of_rows_touches_less() -> None:
    tma = _schedule("tma", "", MMA)
    stage = tma.index("k0/stage")
    bytes_of = {}
    for raster in ("", "k0/raster(8) "):
        plan = _unit("matmul:2048x2048x512:f16", tma[:stage] + raster + tma[stage:], "h200").plan
        launch, work = dominant_work(plan)
        assert wave_bytes(plan, launch, work, 32 * 32) == 2 * 2 * 2048 * 512  # one wave reads both operands once
        bytes_of[raster] = wave_bytes(plan, launch, work, 64)
    # 16 waves of 64 blocks, of 64 x 64 each: two rows of 32, or eight rows of 8
    assert list(bytes_of.values()) == [16 * 2 * 512 * 64 * (2 + 32), 16 * 2 * 512 * 64 * (8 + 8)]


def test_bounds_are_those_of_the_busiest_multiprocessor() -> None:
    target = load_target("h200")
    unit, r = _residency("h200", _schedule("tma", "", MMA, depth=4), "matmul:1024x1024x2048:f16")
    launch, work = dominant_work(unit.plan)
    moved = traffic(unit.plan, launch, work, work.atoms[0], target)
    assert moved is not None and moved.blocks == 256 and moved.turns == 64
    least = bounds(moved, r, target, compute_us=10.0)
    assert least.arithmetic_us == pytest.approx(10.0 * 2 * 132 / 256)  # two blocks on some, one on others
    assert least.chain_us == (64 + 4) / 4  # both at once, four fills under way
    assert least.time_us == max(least.chain_us, least.arithmetic_us, least.shared_us, least.l2_us, least.stores_us)


@pytest.mark.parametrize("example", [e for e in FIVE_PLANS if not e.target.startswith("cpu")], ids=lambda e: e.name)
def test_plans_that_are_no_plain_matmul_are_counted_or_left_out(example: Example) -> None:
    target = load_target(example.target)
    plan = replay(example.program, example.schedule, target)
    for launch in plan.launches:
        for work in launch.tile.works:
            for atom in (a for a in work.atoms if a.stage == work.stage):
                assert 1 <= residency(plan, launch, work, atom, target).blocks <= target.max_blocks_sm
                moved = traffic(plan, launch, work, atom, target)
                assert moved is None or (moved.asked_bytes > 0 and moved.reads.conflict == 1)


@pytest.mark.parametrize("seed", range(25))
def test_whatever_a_search_may_choose_has_features(seed: int) -> None:
    run = random_run(seed)
    op, target = parse_op(run.op), load_target(run.gpu)
    v = dict(zip(feature_names(), features(op, replay(op.program(), run.schedule, target), target), strict=True))
    assert not np.isinf(list(v.values())).any()
    if (v["a_staged"] and v["b_staged"]) or v["is_direct"]:
        assert v["log2_read_conflict"] >= 0 and v["log2_bound_over_roof"] >= 0 and v["blocks_together"] >= 1
        assert not np.isnan([v[name] for name in GPU_NAMES]).any()
