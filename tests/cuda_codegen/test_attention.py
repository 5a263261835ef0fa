"""Attention on GPUs: exact generated text on the emulator, against the op's own reference."""

from __future__ import annotations

import random

import numpy as np
import pytest

from emmy.codegen.emulated import emulate_plan
from emmy.codegen.emulator import SCHEDULES
from emmy.codegen.gpu_build import build
from emmy.errors import PlanError
from emmy.ir.gpu import accumulation
from emmy.ir.ops import parse_op
from emmy.ir.schedule import replay
from emmy.ir.target import load_target
from emmy.search.schedule_space import ScheduleSpace
from tests.cuda_codegen.emulated import nothing_but_numbers, unit

HEADS, GROUPS = "k0/split(h,grid,1)", "k0/split(g,grid,1) k0/split(r,grid,1)"
ROLES = "k0/specialize(2,40,232)"


def by_warps(heads: str, rows: int, keys: int, how: str, depth: int, atom: str = "mma,16,8,16") -> str:
    return (
        f"k0/online(O) {heads} k0/split(s,grid,{rows}) k0/split(t,serial,{keys}) k0/split(s,warp,16) k0/stage(K,{how},{depth}) "
        f"k0/stage(Q,{how},1) k0/stage(V,{how},{depth}) k0.O/atom({atom},1,o) k0.S/atom(mma,16,8,16)"
    )


def by_groups(heads: str, keys: int, depth: int, dim: int, roles: str = ROLES) -> str:
    return (
        f"k0/online(O) {heads} k0/split(s,grid,128) k0/split(t,serial,{keys}) k0/split(s,warpgroup,64) k0/stage(K,tma,{depth}) "
        f"k0/stage(Q,tma,1) k0/stage(V,tma,{depth}) {roles} k0.O/atom(wgmma,64,{dim},16,1,o) k0.S/atom(wgmma,64,{keys},16)"
    )


def in_parts(schedule: str, parts: int, second: str) -> str:
    """Keys shared out among blocks, whose states a second launch combines."""
    first, rest = schedule.split(" ", 1)
    return f"{first} k0/splitk(O,{parts}) {rest} {second}"


DECODE = (
    "k0/online(O) k0/splitk(O,3) k0/split(g,grid,1) k0/split(r,grid,16) k0/split(t,serial,32) k0/split(r,warp,16) "
    "k0/stage(K,tma,3) k0/stage(Q,tma,1) k0/stage(V,tma,3) k0.O/atom(mma,16,8,16,1,o) k0.S/atom(mma,16,8,16) "
    "k1/split(g,grid,1) k1/split(r,grid,2) k1/split(e,grid,64)"
)
# (op, target, schedule, sizes)
CASES = {
    "causal, by cp.async": ("attention:2x70x70x32:f16:causal", "rtx4090", by_warps(HEADS, 32, 32, "cp_async", 2), {}),
    "sums in f16 for a while": (
        "attention:1x33x70x32:f16",
        "rtx4090",
        by_warps(HEADS, 32, 64, "cp_async", 1, "hybrid,16,8,32"),
        {},
    ),
    "a window, shared heads": (
        "attention:4x70x90x32:bf16:causal,window40,kv2",
        "h200",
        by_warps(GROUPS, 32, 32, "tma", 3),
        {},
    ),
    "f32, by single lanes": (
        "attention:2x70x90x32:f32:causal,window40",
        "rtx4090",
        by_warps(HEADS, 32, 32, "cp_async", 2)
        .replace("mma,16,8,16,1,o", "simt,16,32,4,1,o")
        .replace("mma,16,8,16", "simt,16,16,4"),
        {},
    ),
    "open sizes": (
        "attention:2xm(1..90)xm(1..90)x16:f16:causal",
        "rtx5090",
        by_warps(HEADS, 32, 16, "tma", 2),
        {"m": 41},
    ),
    "queries that see no key": (
        "attention:1x90x37x16:f16:causal",
        "rtx4090",
        by_warps(HEADS, 16, 16, "cp_async", 2),
        {},
    ),
    "warpgroups, a producer": ("attention:2x150x150x64:f16:causal", "h200", by_groups(HEADS, 64, 2, 64), {}),
    "logits of the next keys": (
        "attention:1x150x150x64:f16:causal",
        "h200",
        by_groups(HEADS, 32, 2, 64) + " k0.S/pipeline()",
        {},
    ),
    "columns shared out": (
        "attention:1x70x70x128:f16:causal",
        "h200",
        by_groups(HEADS, 32, 1, 64)
        .replace("split(s,grid,128)", "split(s,grid,64)")
        .replace("split(s,warpgroup,64)", "split(s,warpgroup,64) k0/split(e,warpgroup,64)"),
        {},
    ),
    "warpgroups that fill their slots": (
        "attention:1x130x100x64:bf16",
        "h200",
        by_groups(HEADS, 32, 1, 64, ""),
        {},
    ),
    "keys in parts": (
        "attention:2x40x150x32:f16:causal",
        "rtx4090",
        in_parts(
            by_warps(HEADS, 32, 16, "cp_async", 2), 3, "k1/split(h,grid,1) k1/split(s,grid,4) k1/split(e,grid,32)"
        ),
        {},
    ),
    "one query": ("attention:4x1x190x32:f16:causal,kv2", "h200", DECODE, {}),
    "K is V": (
        "attention:2x40x40x32:f16:causal,k_is_v",
        "rtx4090",
        by_warps(HEADS, 32, 16, "cp_async", 2).replace("k0/stage(V,cp_async,2) ", ""),
        {},
    ),
    "K is V, columns shared out": (
        "attention:2x70x70x128:f16:causal,k_is_v,kv1",
        "h200",
        by_groups(GROUPS, 32, 2, 64)
        .replace("split(s,grid,128)", "split(s,grid,64)")
        .replace("split(s,warpgroup,64)", "split(s,warpgroup,64) k0/split(e,warpgroup,64)")
        .replace("k0/stage(V,tma,2) ", "")
        + " k0.S/pipeline()",
        {},
    ),
}


RARER = {"columns shared out", "open sizes", "warpgroups that fill their slots", "sums in f16 for a while", "K is V"}


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow) if x in RARER else x for x in CASES])
def test_it_is_right(name: str) -> None:
    text, gpu, schedule, sizes = CASES[name]
    op, u = parse_op(text), unit(text, schedule, gpu)
    inputs = op.inputs("normal", 1, sizes)
    out, stats = emulate_plan(u, inputs, sizes, seed=1)
    assert op.error_norm(out, inputs, "normal", accumulation(u.plan)) < 0.5
    assert nothing_but_numbers(stats)


@pytest.mark.parametrize("name", ["causal, by cp.async", "warpgroups, a producer"])
def test_logits_of_thousands_leave_numbers(name: str) -> None:
    text, gpu, schedule, _ = CASES[name]
    op, u = parse_op(text), unit(text, schedule, gpu)
    inputs = op.inputs("normal", 2)
    inputs["Q"] = inputs["Q"] * np.float16(1000)
    out, _ = emulate_plan(u, inputs, seed=1)
    want = op.reference(inputs)["O"]
    near = np.isclose(out["O"], want, atol=0.05)  # of two keys that tie, either wins by its rounding
    assert np.isfinite(out["O"]).all()
    assert near.mean() > 0.99


def test_blocks_walk_only_keys_that_their_queries_see() -> None:
    text = unit("attention:1x256x256x32:f16:causal,window40", by_warps(HEADS, 64, 32, "cp_async", 2)).text
    assert "const int t_end = min(256, s_lo + 64);" in text
    assert "const int t_begin = max(s_lo - 39, 0) / 32 * 32;" in text
    assert "for (int t = t_begin; t < t_end; t += 32)" in text


def test_the_longest_tiles_begin_first() -> None:
    text = unit("attention:1x256x256x32:f16:causal", by_warps(HEADS, 64, 32, "cp_async", 2)).text
    assert "const int s_block = 3 - block % 4;" in text


def test_masks_are_applied_only_where_they_hide_something() -> None:
    text = unit("attention:1x256x256x32:f16:causal", by_warps(HEADS, 64, 32, "cp_async", 2)).text
    assert "if (t + 31 < s_lo + warp_s + 1 == 0) {" in text
    assert text.count("? S_sums[") == 1


def test_keys_that_are_values_are_fetched_once_and_read_along_both_axes() -> None:
    text = unit(*(CASES["K is V, columns shared out"][i] for i in (0, 2, 1))).text
    assert text.count("K_map") == 4  # a parameter, made ready, and both panels of a fill
    assert "emmy_desc_k_sw128" in text
    assert "emmy_desc_mn_sw128" in text


def test_a_block_of_keys_that_are_values_has_all_their_columns() -> None:
    program, loops = parse_op("attention:2x64x64x128:f16:k_is_v").program(), "k0/online(O) k0/split(d,serial,64)"
    with pytest.raises(PlanError, match="K is read along e too: a block needs all 128 of d, has 64"):
        replay(program, f"{loops} k0/stage(K,cp_async,2)", load_target("rtx4090"))


def test_what_no_lift_can_take_is_refused() -> None:
    h200, program = load_target("h200"), parse_op("attention:1x512x512x256:f16").program()
    loops = "k0/online(O) k0/split(h,grid,1) k0/split(s,grid,128) k0/split(t,serial,64) k0/split(s,warpgroup,64)"
    rings = "k0/stage(K,tma,1) k0/stage(Q,tma,1) k0/stage(V,tma,1)"
    with pytest.raises(PlanError, match="wgmma_rs leaves sums of S where no lift can take them"):
        replay(program, f"{loops} {rings} k0.S/atom(wgmma_rs,64,64,16)", h200)
    groups = f"{loops} {rings} k0/specialize(2,40,232) k0.O/atom(wgmma,64,256,16,1,o) k0.S/atom(wgmma,64,64,16)"
    with pytest.raises(PlanError, match="no ring of 2 slots: to be begun ahead"):
        replay(program, f"{groups} k0.S/pipeline()", h200)
    with pytest.raises(PlanError, match=r"wgmma needs about \d+ registers a thread for 64 x 256 sums"):
        replay(program, f"{loops} {rings} k0/specialize(2,0,0) k0.O/atom(wgmma,64,256,16,1,o)", h200)


def test_lanes_that_make_weights_fold_them() -> None:
    program = parse_op("attention:1x64x64x32:f32").program()
    lanes = by_warps(HEADS, 32, 32, "cp_async", 1).replace("mma,16,8,16,1,o", "simt,16,32,4,1,o")
    with pytest.raises(PlanError, match="simt of 8 rows makes what simt m:16 n:32 k:4 folds"):
        replay(program, lanes.replace("mma,16,8,16", "simt,8,16,4"), load_target("rtx4090"))


SPACES = (
    ("attention:4x64x64x64:f16:causal,kv2", "h200"),
    ("attention:2x33x90x32:bf16:causal,window20", "rtx4090"),
    ("attention:4x1x200x32:f16:kv1", "rtx5090"),
    ("attention:1xm(1..150)xm(1..150)x48:f16", "a100"),
    ("attention:4x70x90x24:f32:causal,kv2", "h200"),
)


@pytest.mark.parametrize(("text", "gpu"), SPACES[:1])
def test_what_a_search_finds_is_right(text: str, gpu: str) -> None:
    assert wrong_of_space(text, gpu, seed=0) is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 13))
@pytest.mark.parametrize(("text", "gpu"), SPACES)
def test_whatever_a_search_finds_is_right(text: str, gpu: str, seed: int) -> None:
    assert wrong_of_space(text, gpu, seed) is None


def wrong_of_space(text: str, gpu: str, seed: int) -> str | None:
    """A schedule from a random walk whose answer is wrong, with the error."""
    rng, op = random.Random(seed), parse_op(text)
    schedule = ScheduleSpace(op, load_target(gpu)).sample(rng).key
    u, sizes = unit(text, schedule, gpu), {s.name: rng.randint(s.lo, s.hi) for s in op.program().syms}
    inputs = op.inputs("normal", seed, sizes)
    order, eager = rng.choice(SCHEDULES)
    out, stats = emulate_plan(u, inputs, sizes, seed=order, eager=eager)
    error = op.error_norm(out, inputs, "normal", accumulation(u.plan))
    return None if error <= 1 and nothing_but_numbers(stats) else f"{schedule} {sizes}: {error}"


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["rtx4090", "rtx5090", "a100", "h200"])
def test_heads_of_256_compile_without_spills(gpu: str) -> None:
    target, how = load_target(gpu), "cp_async" if gpu in ("rtx4090", "a100") else "tma"
    for op in ("attention:16x2048x2048x256:f16:causal", "attention:16x2048x2048x256:f16:causal,kv8"):
        heads = GROUPS if "kv8" in op else HEADS
        schedules = [by_warps(heads, 64, 32, how, 2)] + [by_groups(heads, 64, 2, 256)] * (gpu == "h200")
        for schedule in schedules:
            assert build(unit(op, schedule, gpu), target).static["spill_bytes"] == 0
