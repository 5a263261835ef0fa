"""Keys and values in pages: rows that a transport finds by a table on the way, in exact generated text on the emulator."""

from __future__ import annotations

import random

import numpy as np
import pytest

from emmy.api import with_pdl
from emmy.codegen.emulated import emulate_plan
from emmy.codegen.gpu_build import build
from emmy.errors import PlanError
from emmy.ir.gpu import accumulation
from emmy.ir.ops import Storage, parse_op
from emmy.ir.schedule import replay
from emmy.ir.target import load_target
from emmy.search.schedule_space import ScheduleSpace
from tests.cuda_codegen.emulated import nothing_but_numbers, unit

HEADS = "k0/split(b,grid,1) k0/split(g,grid,1)"
NOWHERE = 1 << 24  # a page that no pool has


def by_warps(rows: int, keys: int, how: str, depth: int) -> str:
    return (
        f"k0/online(O) {HEADS} k0/split(q,grid,{rows}) k0/split(t,serial,{keys}) k0/split(q,warp,16) k0/stage(K,{how},{depth}) "
        f"k0/stage(Q,{how},1) k0/stage(V,{how},{depth}) k0.O/atom(mma,16,8,16,1,o) k0.S/atom(mma,16,8,16)"
    )


def in_parts(schedule: str, parts: int, dim: int) -> str:
    last = f"k1/split(b,grid,1) k1/split(g,grid,1) k1/split(q,grid,2) k1/split(e,grid,{dim})"
    return schedule.replace("k0/online(O)", f"k0/online(O) k0/splitk(O,{parts})") + f" {last}"


def by_groups(keys: int, depth: int, dim: int) -> str:
    return (
        f"k0/online(O) {HEADS} k0/split(q,grid,128) k0/split(t,serial,{keys}) k0/split(q,warpgroup,64) k0/stage(K,tma,{depth}) "
        f"k0/stage(Q,tma,1) k0/stage(V,tma,{depth}) k0/specialize(2,40,232) k0.O/atom(wgmma,64,{dim},16,1,o) "
        f"k0.S/atom(wgmma,64,{keys},16)"
    )


def without_values(schedule: str, how: str, depth: int) -> str:
    return schedule.replace(f"k0/stage(V,{how},{depth}) ", "")


# (op, target, schedule, lengths)
CASES = {
    "decode, by cp.async": (
        "paged_attention:4x4x1x150x32:f16:causal,kv2,page16",
        "rtx4090",
        in_parts(by_warps(16, 32, "cp_async", 2), 3, 32),
        (150, 64, 1, 0),
    ),
    "decode, by the copy engine": (
        "paged_attention:3x8x1x180x32:f16:causal,kv2,page16,pool50",
        "h200",
        in_parts(by_warps(16, 32, "tma", 3), 3, 32),
        (0, 180, 17),
    ),
    "four queries": (
        "paged_attention:3x8x4x96x32:bf16:causal,kv2,page16",
        "h200",
        by_warps(16, 48, "tma", 2),
        (2, 96, 50),
    ),
    "pages of 32, a window": (
        "paged_attention:2x4x3x160x32:f16:causal,window40,kv2,page32",
        "rtx5090",
        by_warps(16, 32, "tma", 2),
        (150, 33),
    ),
    "pages of 8 rows, through registers": (
        "paged_attention:2x2x1x60x32:f16:page8",
        "a100",
        by_warps(16, 16, "ldg", 2),
        (60, 9),
    ),
    "prompts, a producer": (
        "paged_attention:2x2x150x150x64:f16:causal,kv1,page16",
        "h200",
        by_groups(64, 2, 64),
        (150, 21),
    ),
    "keys that are values": (
        "paged_attention:2x4x1x100x64:f16:causal,kv1,page16,k_is_v",
        "h200",
        without_values(by_warps(16, 32, "tma", 2), "tma", 2),
        (100, 40),
    ),
    "a batch that is open": (
        "paged_attention:m(1..3)x2x1x64x32:f16:causal,kv1,page16",
        "rtx4090",
        by_warps(16, 32, "cp_async", 2),
        (64, 5),
    ),
}
RARER = {"pages of 32, a window", "pages of 8 rows, through registers", "a batch that is open", "four queries"}


def unasked(
    text: str, lengths: tuple[int, ...], *, stale: float = np.nan
) -> tuple[dict[str, Storage], dict[str, Storage]]:
    """Inputs of sequences so long; the same with a table that says nothing behind them, and `stale` rows there."""
    op = parse_op(text)
    x = op.inputs("normal", 1, {"m": len(lengths)} if op.program().syms else {})
    x["lengths"] = np.array(lengths, np.int32)
    page, marked = x["K_pages"].shape[1], {k: v.copy() for k, v in x.items()}
    for b, n in enumerate(lengths):
        marked["table"][b, -(-n // page) :] = NOWHERE
        for pages in ("K_pages", "V_pages"):
            if pages in x and n % page and x[pages].dtype == np.float16:
                marked[pages][x["table"][b, n // page], n % page :] = stale
    return x, marked


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow) if x in RARER else x for x in CASES])
def test_it_is_right_and_asks_for_no_page_behind_a_sequence(name: str) -> None:
    text, gpu, schedule, lengths = CASES[name]
    op, u = parse_op(text), unit(text, schedule, gpu)
    plain, marked = unasked(text, lengths, stale=1e4 if "tma" in schedule else np.nan)
    out, stats = emulate_plan(u, marked, {"m": len(lengths)} if op.program().syms else {}, seed=1)
    assert op.error_norm(out, plain, "normal", accumulation(u.plan)) < 0.5
    assert nothing_but_numbers(stats)
    if 0 in lengths:
        assert not out["O"][lengths.index(0)].any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decode, by the copy engine", "prompts, a producer"])
def test_a_launch_that_begins_early_looks_up_no_more_than_table_and_lengths_before_it_waits(name: str) -> None:
    text, gpu, schedule, lengths = CASES[name]
    op, u = parse_op(text), unit(text, with_pdl(text, schedule, gpu=gpu), gpu)
    plain, marked = unasked(text, lengths, stale=1e4)
    out, _ = emulate_plan(u, marked, {}, seed=2)
    assert op.error_norm(out, plain, "normal", accumulation(u.plan)) < 0.5


def test_blocks_walk_only_keys_that_a_sequence_has() -> None:
    text = unit(*(CASES["decode, by cp.async"][i] for i in (0, 2, 1))).text
    assert "const int lengths_here = emmy_ldg_nc_index(lengths + b_block);" in text
    assert "const int t_end = min(min(t_lo + 64, 150), lengths_here);" in text
    assert "for (int t = t_lo; t < t_end; t += 32)" in text


def test_the_copy_engine_brings_a_box_of_each_page() -> None:
    text = unit(*(CASES["decode, by the copy engine"][i] for i in (0, 2, 1))).text
    assert "emmy_tma_load_4d(smem + slot * 2048 + 1024, &K_pages_map" in text
    assert text.count("emmy_ldg_nc_index(table") == 2 * 2 * 3  # two pages of 32 keys, of K and V, at three places


@pytest.mark.parametrize(
    ("text", "move", "why"),
    [
        (
            "paged_attention:2x2x1x64x32:f16:page4",
            "k0/stage(K,tma,2)",
            "K has 4 rows in a piece: tma brings multiples of 8",
        ),
        ("paged_attention:2x2x1x64x128:f16:page16", "k0/stage(K,tma,2,panels)", "K comes in boxes of 16 rows"),
    ],
)
def test_rows_that_the_engine_cannot_find_are_refused(text: str, move: str, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        replay(
            parse_op(text).program(),
            f"k0/online(O) {HEADS} k0/split(q,grid,16) k0/split(t,serial,32) {move}",
            load_target("h200"),
        )


SPACES = (
    ("paged_attention:3x8x1x200x32:f16:causal,kv2,page16", "h200"),
    ("paged_attention:2x4x40x70x32:bf16:causal,window20,kv2,page16", "rtx4090"),
    ("paged_attention:2x4x5x90x64:f16:page32,k_is_v,kv1", "rtx5090"),
)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("text", "gpu"), SPACES)
def test_whatever_a_search_finds_is_right(text: str, gpu: str, seed: int) -> None:
    rng, op = random.Random(seed), parse_op(text)
    schedule = ScheduleSpace(op, load_target(gpu)).sample(rng).key
    u = unit(text, schedule, gpu)
    lengths = tuple(rng.randint(0, u.plan.extent((), "t")) for _ in range(u.plan.extent((), "b")))
    plain, marked = unasked(text, lengths, stale=100.0)
    out, stats = emulate_plan(u, marked, {}, seed=seed)
    assert op.error_norm(out, plain, "normal", accumulation(u.plan)) <= 1, schedule
    assert nothing_but_numbers(stats)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["rtx4090", "rtx5090", "a100", "h200"])
def test_decoding_compiles_without_spills(gpu: str) -> None:
    target, how = load_target(gpu), "cp_async" if gpu in ("rtx4090", "a100") else "tma"
    op = "paged_attention:8x16x1x4096x256:f16:causal,kv8,page16"
    assert build(unit(op, in_parts(by_warps(16, 32, how, 2), 8, 64), gpu), target).static["spill_bytes"] == 0
