"""Blocks of several panels that one instruction of the copy engine brings: right on the emulator, offered and refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from emmy.codegen.emulated import emulate_plan
from emmy.codegen.emulator import SCHEDULES
from emmy.codegen.gpu_plan import gpu_plan
from emmy.codegen.kernel_gpu import GpuKernel
from emmy.codegen.nvrtc import compile_cubin
from emmy.errors import EmuError, IllegalMove
from emmy.ir.moves.stage import Stage
from emmy.ir.ops import parse_op
from emmy.ir.schedule import replay
from emmy.ir.target import load_target
from tests.cuda_codegen.emulated import Run, nothing_but_numbers, unit

H200 = load_target("h200")


def tile(m: int, n: int, k: int, then: str, *, a: str = "", b: str = ",panels", pair: str = "", depth: int = 2) -> str:
    loops = f"k0/split(m,grid,{m}) k0/split(n,grid,{n}) {pair}k0/split(k,serial,{k}) k0/split(m,warpgroup,64) "
    return f"{loops}k0/split(n,warpgroup,{n}) k0/stage(A,tma,{depth}{a}) k0/stage(B,tma,{depth}{b}) {then}k0.C/atom(wgmma,64,{n},16)"


ONE, PAIR = "k0/specialize(1,0,0) ", "k0/split(m,cluster,64) "
CASES = {
    "B along n": ("matmul:72x192x160:f16", tile(64, 128, 32, ONE)),
    "both along k": ("matmul:72x136x320:bf16:nk", tile(64, 64, 128, "", a=",panels")),
    "panels of 64 bytes": ("matmul:72x192x192:bf16:bias", tile(64, 96, 96, f"{ONE}k0/persist(2) ", a=",panels")),
    "panels of 32 bytes": ("matmul:72x208x192:f16", tile(64, 48, 48, ONE, a=",panels")),
    "any number of rows": ("matmul:m(1..200)x128x256:f16:nk", tile(64, 64, 128, ONE, a=",panels")),
    "a pair shares B's panels": ("matmul:200x128x128:f16", tile(128, 128, 32, ONE, pair=PAIR)),
    "a pair, kept in the cache": (
        "matmul:256x64x256:bf16:nk",
        tile(128, 64, 128, f"k0/hint(B,evict_first) {ONE}", a=",panels", pair=PAIR),
    ),
    "mma": (
        "matmul:40x128x96:f16",
        "k0/split(m,grid,32) k0/split(n,grid,128) k0/split(k,serial,32) k0/split(m,warp,32) k0/split(n,warp,64) "
        "k0/stage(A,tma,2) k0/stage(B,tma,2,panels) k0.C/atom(mma,16,8,16)",
    ),
}


@pytest.mark.parametrize("order", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, len(SCHEDULES)))])
@pytest.mark.parametrize(
    "name", ["B along n", *(pytest.param(n, marks=pytest.mark.slow) for n in CASES if n != "B along n")]
)
def test_the_text_is_right_on_the_emulator_and_brings_as_much_as_panel_by_panel(name: str, order: int):
    op, schedule = CASES[name]
    sizes = (("m", 131),) if "m(" in op else ()
    error, stats = Run(op, "h200", schedule, sizes, order=order).error_norm()
    assert error <= 1 and nothing_but_numbers(stats)
    if order:
        return
    apart = Run(op, "h200", schedule.replace(",panels", ""), sizes).error_norm()[1]
    assert stats[0].tma_load_bytes == apart[0].tma_load_bytes
    assert stats[0].tma_loads < apart[0].tma_loads  # a box for each fill of each operand that has panels


def test_a_launcher_is_told_how_many_panels_a_box_has():
    u = unit(*CASES["both along k"], "h200")
    kernels = tuple(k for k in u.kernels if isinstance(k, GpuKernel))
    lines = gpu_plan(u.plan, kernels, b"").decode().splitlines()
    assert "map A bf16 64 64 3 2 : 320 : 72" in lines and "map B bf16 64 64 3 2 : 320 : 136" in lines
    u = unit(CASES["both along k"][0], CASES["both along k"][1].replace(",panels", ""), "h200")
    kernels = tuple(k for k in u.kernels if isinstance(k, GpuKernel))
    assert "map A bf16 64 64 3 : 320 : 72" in gpu_plan(u.plan, kernels, b"").decode().splitlines()


@pytest.mark.parametrize(
    ("op", "schedule", "words"),
    [
        ("matmul:64x200x64:f16", tile(64, 128, 32, ""), "B has blocks of 128 columns, of a multiple of 200: no whole panels of 64"),
        ("matmul:64x64x64:f16", tile(64, 64, 32, ""), "no panels to bring at once"),
        ("matmul:300x64x128:f16", tile(320, 64, 128, "", a=",panels", b=""), "320 rows of A against 256"),
        ("matmul:256x96x64:f16", tile(128, 96, 32, "", pair=PAIR), "2 blocks cannot share 3 panels of B evenly"),
        ("matmul:64x128x64:f16", tile(64, 128, 32, "").replace("B,tma", "B,cp_async"), "cp_async: tma brings panels"),
        ("matmul:64x480x64:f16", tile(64, 240, 32, ""), "B has blocks of 240 columns, of a multiple of 480: no whole panels of 64"),
    ],
)  # fmt: skip
def test_blocks_that_one_instruction_cannot_bring_are_refused(op: str, schedule: str, words: str):
    with pytest.raises(IllegalMove, match=words):
        replay(parse_op(op).program(), schedule, H200)


def test_consumers_of_whole_tiles_are_refused_panels_that_would_overlap():
    schedule = (
        "k0/split(m,grid,64) k0/split(n,grid,240) k0/split(k,serial,32) k0/stage(A,tma,2) k0/stage(B,tma,2,panels) "
    )
    with pytest.raises(IllegalMove, match="read more of B than its blocks have"):
        replay(
            parse_op("matmul:64x480x64:f16").program(),
            schedule + "k0/specialize(2,0,0) k0/persist(2) k0/pingpong()",
            H200,
        )


def test_panels_are_offered_only_where_a_slot_has_several():
    def offered(n: int, op: str) -> list[tuple[str, str | None]]:
        plan = replay(parse_op(op).program(), tile(64, n, 64, "").split(" k0/stage")[0], H200)
        first = [x.move for x in Stage.sites(plan, H200)]
        second = [x.move for x in Stage.sites(Stage("k0", None, "A", "tma", 2).rewrite(plan, H200), H200)]
        return [(x.value, x.layout) for x in (*first, *second) if isinstance(x, Stage)]

    assert offered(128, "matmul:64x256x128:f16") == [("A", None), ("B", None), ("B", "panels")]
    assert offered(64, "matmul:64x256x128:f16") == [("A", None), ("B", None)]
    assert offered(128, "matmul:64x256x128:f16:nk") == [("A", None), ("B", None)]
    assert offered(128, "matmul:64x200x128:f16") == [("A", None), ("B", None)]


def test_a_box_of_too_few_panels_leaves_the_barrier_waiting():
    op, schedule = CASES["B along n"]
    u = unit(op, schedule, "h200")
    (kernel,) = (k for k in u.kernels if isinstance(k, GpuKernel))
    maps = tuple(replace(m, panels=1) if m.panels else m for m in kernel.maps)
    with pytest.raises(EmuError) as e:
        emulate_plan(replace(u, kernels=(replace(kernel, maps=maps),)), parse_op(op).inputs("normal", 1), {})
    assert e.value.kind == "deadlock"


LARGE = {
    "kn": ("matmul:512x4096x3840:f16", tile(128, 256, 64, "k0/specialize(2,40,232) ", depth=4)),
    "nk": ("matmul:512x4096x3840:f16:nk", tile(128, 128, 128, "k0/specialize(2,40,232) ", a=",panels", depth=3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_a_full_tile_compiles_without_spills(name: str):
    op, schedule = LARGE[name]
    cubin = compile_cubin(unit(op, schedule, "h200").text, H200.arch)
    assert cubin.spill_bytes == 0 and not cubin.warnings
