"""Batched matmuls on a GPU: every transport, role and atom at a position of the batch; random schedules of the search space."""

from __future__ import annotations

import random

import pytest

from emmy.codegen.nvrtc import compile_cubin
from emmy.ir.ops import parse_op
from emmy.ir.target import load_target
from emmy.search.schedule_space import ScheduleSpace
from tests.cuda_codegen.emulated import GPUS, SCHEDULES, Run, nothing_but_numbers, unit

H200 = load_target("h200")
BLOCKS = "k0/split(b,grid,1) k0/split(m,grid,64) k0/split(n,grid,64) k0/split(k,serial,64) "
GROUP, RINGS, ATOM = "k0/split(m,warpgroup,64) ", "k0/stage(A,tma,2) k0/stage(B,tma,2) ", "k0.C/atom(wgmma,64,64,16)"
WARPS = "k0/split(b,grid,1) k0/split(m,grid,32) k0/split(n,grid,32) k0/split(k,serial,32) k0/split(m,warp,16) k0/split(n,warp,16) "
BOTH = "k0/stage(A,{0}) k0/stage(B,{0}) "
CASES: dict[str, tuple[str, str, str]] = {
    "a producer": ("bmm:3x72x136x200:f16:nk", "h200", f"{BLOCKS}{GROUP}{RINGS}k0/specialize(1,0,0) {ATOM}"),
    "persistent, stored by the copy engine": (
        "bmm:3x40x72x136:bf16", "h200", f"{BLOCKS}{GROUP}{RINGS}k0/specialize(1,0,0) k0/persist(5) {ATOM} k0/store(C,tma)",
    ),
    "tiles in turn": (
        "bmm:3x72x136x200:f16", "h200",
        f"{BLOCKS}{RINGS}k0/specialize(2,40,232) k0/persist(3) k0/pingpong() {ATOM} k0/store(C,tma)",
    ),
    "shared tiles": ("bmm:3x72x136x200:f16:nk", "h200", f"{BLOCKS}{GROUP}{RINGS}k0/specialize(1,0,0) k0/streamk(7) {ATOM}"),
    "A in registers": (
        "bmm:3x72x136x200:bf16", "h200",
        f"{BLOCKS}{GROUP}k0/raster(2) k0/stage(A,cp_async,2) k0/stage(B,tma,2) k0.C/atom(wgmma_rs,64,64,16)",
    ),
    "panels": (
        "bmm:3x72x192x256:f16", "h200",
        f"{BLOCKS.replace('n,grid,64', 'n,grid,128').replace('l,64', 'l,128')}{GROUP}{BOTH.format('tma,2,panels')}"
        "k0/specialize(1,0,0) k0.C/atom(wgmma,64,128,16)",
    ),
    "pairs bring each other B": (
        "bmm:2x200x128x256:f16:nk", "h200",
        f"{BLOCKS.replace('m,grid,64', 'm,grid,128').replace('l,64', 'l,128').replace('k0/split(k', 'k0/split(m,cluster,64) k0/split(k')}"
        f"{GROUP}{BOTH.format('tma,2,panels')}k0/specialize(1,0,0) {ATOM}",
    ),
    "a cluster shares k": (
        "bmm:3x16x136x256:f16:nk", "h200",
        f"k0/swap(C) {BLOCKS.replace('m,grid,64', 'm,grid,16').replace('k0/split(k', 'k0/split(k,cluster,128) k0/split(k')}"
        f"k0/split(n,warpgroup,64) {RINGS}k0/specialize(1,0,0) k0.C/atom(wgmma,64,16,16)",
    ),
    "any number of rows": ("bmm:2xm(1..80)x72x136:f16", "h200", f"{BLOCKS}{GROUP}{RINGS}{ATOM} k0/store(C,tma)"),
    "cp_async": (
        "bmm:3x40x72x136:f16:nk", "rtx4090", f"{WARPS}{BOTH.format('cp_async,3')}k0.C/atom(hybrid,16,8,16) k0.C/pipeline()",
    ),
    "ldg": ("bmm:3x40x33x35:bf16", "rtx4090", f"{WARPS}{BOTH.format('ldg,2')}k0.C/atom(mma,16,8,16)"),
    "f32": ("bmm:3x40x72x36:f32:nk", "rtx3090", f"{WARPS}{BOTH.format('cp_async,2')}k0.C/atom(simt,16,16,4)"),
    "parts of k": (
        "bmm:3x40x72x128:f16", "rtx4090",
        f"k0/splitk(C,2) {WARPS}k1/split(b,grid,1) k1/split(m,grid,8) k1/split(n,grid,64) {BOTH.format('cp_async,2')}"
        "k0.C/atom(mma,16,8,16)",
    ),
    "straight to registers": (
        "bmm:3x7x72x256:f16:nk", "a100",
        "k0/split(b,grid,1) k0/split(m,grid,8) k0/split(n,grid,16) k0/split(k,warp,64) k0.C/atom(direct,8,16,32) k0.C/unroll(2)",
    ),
    "straight to registers, along n": (
        "bmm:3x7x72x264:bf16", "h200",
        "k0/split(b,grid,1) k0/split(m,grid,8) k0/split(n,grid,32) k0/split(k,warp,96) k0.C/atom(direct,8,32,32) k0.C/unroll(2)",
    ),
}  # fmt: skip


def right(run: Run) -> None:
    error, stats = run.error_norm()
    assert error <= 1 and nothing_but_numbers(stats), f"error {error:.3g} of what is allowed: {run}"


@pytest.mark.parametrize("order", [1, *(pytest.param(i, marks=pytest.mark.slow) for i in (0, 2, 3, 4, 5))])
@pytest.mark.parametrize("name", CASES)
def test_the_text_is_right_on_the_emulator(name: str, order: int):
    op, gpu, schedule = CASES[name]
    right(Run(op, gpu, schedule, (("m", 57),) if "m(" in op else (), order=order))


def random_run(seed: int) -> Run:
    """A walk of the search space of a small batched matmul."""
    rng = random.Random(seed)
    gpu, dtype = rng.choice((*GPUS, "h200")), rng.choice(("f16", "bf16", "f16", "bf16", "f32"))
    b, m, n, k = (rng.choice(x) for x in ((1, 2, 3), (1, 7, 33, 64, 70), (8, 24, 33, 72, 130), (8, 33, 40, 96, 200)))
    symbolic = m > 1 and rng.random() < 0.25
    op = f"bmm:{b}x{f'm(1..{m})' if symbolic else m}x{n}x{k}:{dtype}{rng.choice(('', ':nk'))}"
    schedule = ScheduleSpace(parse_op(op), load_target(gpu)).sample(rng).key
    sizes = (("m", rng.randint(1, m)),) if symbolic else ()
    return Run(op, gpu, schedule, sizes, rng.choice(("normal", "integer")), rng.randrange(len(SCHEDULES)))


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(i, marks=pytest.mark.slow) for i in range(4, 200))])
def test_a_random_schedule_is_right(seed: int):
    right(random_run(seed))


@pytest.mark.slow
def test_a_search_finds_every_kind_of_tile():
    """The batch's loop comes first, in pieces of 1; behind it a tile is what it is of one product."""

    def found(op: str, words: tuple[str, ...], n: int) -> None:
        rng, space = random.Random(0), ScheduleSpace(parse_op(op), H200)
        keys = [space.sample(rng).key for _ in range(n)]
        first = {next(x for x in key.split() if x.startswith("k0/split(")) for key in keys}
        assert first == {"k0/split(b,grid,1)"}
        missing = [w for w in words if not any(w in key for key in keys)]
        assert not missing, f"{op}: {', '.join(missing)} of {len(keys)}"

    found(
        "bmm:8x512x512x256:f16:nk",
        ("wgmma,", "wgmma_rs,", "mma,", "store(C,tma)", "specialize", "persist", "raster"),
        60,
    )
    found("bmm:64x8x1024x128:f16:nk", ("swap(C)", "direct,", "splitk(C"), 30)


LARGE = {
    "3-D": ("bmm:16x2048x256x2048:f16", "k0/split(b,grid,1) k0/split(m,grid,128) k0/split(n,grid,256) k0/split(k,serial,64) "
            f"{GROUP}{BOTH.format('tma,4')}k0/specialize(2,40,232) k0/persist(132) k0.C/atom(wgmma,64,256,16)"),
    "4-D": ("bmm:16x2048x256x2048:f16", "k0/split(b,grid,1) k0/split(m,grid,128) k0/split(n,grid,256) k0/split(k,serial,64) "
            f"{GROUP}k0/stage(A,tma,4) k0/stage(B,tma,4,panels) k0/specialize(2,40,232) k0.C/atom(wgmma,64,256,16)"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_a_full_tile_compiles_without_spills(name: str):
    op, schedule = LARGE[name]
    assert compile_cubin(unit(op, schedule, "h200").text, H200.arch).refusal is None
