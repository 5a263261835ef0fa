"""wgmma with A in registers: right on the emulator, compiled as meant, offered and refused where it should be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from emmy.codegen.execute import execute
from emmy.codegen.lower import complete, lower
from emmy.codegen.nvrtc import compile_cubin
from emmy.codegen.steps import Copy, For, Outline, Step, WaitGroup
from emmy.errors import IllegalMove, Race
from emmy.ir.moves.atom import BindAtom
from emmy.ir.moves.stage import Stage
from emmy.ir.ops import parse_op
from emmy.ir.plan import Plan
from emmy.ir.schedule import replay
from emmy.ir.target import load_target
from emmy.testing.move_contract import check_meaning, random_inputs
from tests.cuda_codegen.emulated import Run, nothing_but_numbers, unit

H200 = load_target("h200")


def tile(m: int, n: int, k: int, mine: tuple[int, int], rings: str, then: str = "") -> str:
    """A block of m rows and n columns, `mine` of them a warpgroup's. rings: transport and depth of A, of B."""
    a, b = rings.split()
    loops = f"k0/split(m,grid,{m}) k0/split(n,grid,{n}) k0/split(k,serial,{k}) k0/split(m,warpgroup,{mine[0]}) "
    loops += f"k0/split(n,warpgroup,{mine[1]}) k0/stage(A,{a}) k0/stage(B,{b}) "
    return f"{loops}{then}{' ' if then else ''}k0.C/atom(wgmma_rs,64,{mine[1]},16)"


FEW = "k0/swap(C) k0/split(m,grid,16) k0/split(n,grid,{0}) k0/split(k,serial,64) k0/split(n,warpgroup,{0}) k0/stage(A,tma,2) "
FEW += "k0/stage(B,tma,2) k0/specialize(1,0,0) k0.C/atom(wgmma_rs,64,16,16)"
RUNS = {
    "a producer": Run("matmul:128x64x256:f16:nk", "h200", tile(128, 64, 64, (64, 64), "tma,2 tma,2", "k0/specialize(2,40,232)")),
    "a block that feeds itself": Run("matmul:72x136x200:bf16:bias", "h200", tile(64, 128, 32, (64, 64), "tma,3 tma,3")),
    "more steps than sets, one slot": Run("matmul:72x64x200:bf16", "h200", tile(64, 64, 128, (64, 64), "tma,1 tma,1")),
    "128 rows a warpgroup": Run(
        "matmul:130x72x384:f16", "h200", tile(128, 64, 128, (128, 64), "tma,2 tma,2", "k0/specialize(1,0,0) k0/persist(2)")
    ),
    "rows of 4 bytes by cp_async": Run("matmul:130x72x202:f16:residual", "h200", tile(128, 64, 32, (64, 64), "cp_async,3 tma,2")),
    "one step a fill": Run("matmul:70x72x100:f16", "h200", tile(64, 64, 16, (64, 64), "cp_async,2 tma,4")),
    "rows of 2 bytes by registers": Run("matmul:70x72x131:bf16", "h200", tile(64, 64, 64, (64, 64), "ldg,2 tma,2")),
    "weights along k in registers": Run("matmul:16x72x128:bf16:nk", "h200", FEW.format(64)),
    "weights along n in registers": Run("matmul:16x136x128:f16:bias", "h200", FEW.format(128)),
    "two weights, A once": Run(
        "geglu:72x72x192:f16", "h200",
        "k0/split(m,grid,64) k0/split(n,grid,64) k0/split(k,serial,64) k0/split(m,warpgroup,64) k0/stage(A,tma,2) k0/stage(G,tma,2) "
        "k0/stage(U,tma,2) k0/specialize(1,0,0) k0.gate/atom(wgmma_rs,64,64,16)",
    ),
    "two weights in registers": Run(
        "geglu:16x72x192:bf16:nk", "h200",
        "k0/swap(gate) k0/split(m,grid,16) k0/split(n,grid,64) k0/split(k,serial,64) k0/split(n,warpgroup,64) k0/stage(A,tma,2) "
        "k0/stage(G,tma,2) k0/stage(U,tma,2) k0/specialize(1,0,0) k0.gate/atom(wgmma_rs,64,16,16)",
    ),
    "a symbol, stored by the copy engine": Run(
        "matmul:m(1..130)x64x128:f16:nk", "h200", f"{tile(64, 64, 64, (64, 64), 'tma,2 tma,2')} k0/store(C,tma)", (("m", 71),)
    ),
}  # fmt: skip


QUICK = ("a producer", "rows of 4 bytes by cp_async")
NAMES = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in RUNS]


@pytest.mark.parametrize("order", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_the_text_is_right_on_the_emulator(name: str, order: int):
    r = RUNS[name]
    error, stats = Run(r.op, r.gpu, r.schedule, r.sizes, "normal", order).error_norm()
    assert error <= 1 and nothing_but_numbers(stats)
    swapped = "swap" in r.schedule  # whose sums pass through shared memory too
    assert stats[0].wgmma and (swapped or stats[0].smem_load_waves == stats[0].smem_load_waves_ideal)


@pytest.mark.parametrize("name", [n for n in RUNS if not RUNS[n].sizes])
def test_the_steps_compute_the_program(name: str):
    program = parse_op(RUNS[name].op).program()
    check_meaning(replay(program, RUNS[name].schedule, H200), program, name)


def _plan(name: str) -> Plan:
    return replay(parse_op(RUNS[name].op).program(), RUNS[name].schedule, H200)


def test_a_ring_that_lanes_load_from_turns_as_for_a_work_that_is_done_when_it_ends():
    plan = _plan("rows of 4 bytes by cp_async")
    (outline,) = lower(plan)
    loop = next(
        s for s in _all(outline.roles[0].steps) if isinstance(s, For) and any(isinstance(x, Copy) for x in s.body)
    )
    assert loop.body[0] == WaitGroup(1) and Copy("A", 2) in loop.body
    assert loop.body.index(Copy("A", 2)) < loop.body.index(
        Copy("B", 1)
    )  # B's slot is read on, and refilled behind the work


def _all(steps: tuple[Step, ...]) -> Iterator[Step]:
    for s in steps:
        yield s
        yield from _all(s.body) if isinstance(s, For) else ()


def _harmed(steps: tuple[Step, ...], old: Step) -> tuple[Step, ...]:
    return tuple(replace(s, body=_harmed(s.body, old)) if isinstance(s, For) else s for s in steps if s != old)


def test_a_fill_that_is_not_waited_for_is_noticed_in_the_steps():
    plan = _plan("rows of 4 bytes by cp_async")

    def damage(outline: Outline) -> Outline:
        role = outline.roles[0]
        return replace(outline, roles=(replace(role, steps=_harmed(role.steps, WaitGroup(1))),))

    with pytest.raises(Race, match="A"):
        execute(plan, random_inputs(plan.program, {}), damage=damage)


LARGE = {
    "nk, 256 columns": ("matmul:512x4096x3840:f16:nk", tile(128, 256, 64, (64, 256), "tma,4 tma,4", "k0/specialize(2,40,232)")),
    "kn, 256 columns": ("matmul:512x4096x3840:f16", tile(128, 256, 64, (64, 256), "tma,4 tma,4", "k0/specialize(2,40,232)")),
    "nk, 128 rows": ("matmul:512x4096x3840:f16:nk", tile(128, 128, 64, (128, 128), "tma,6 tma,6", "k0/specialize(1,0,0)")),
    "kn, long pieces": ("matmul:512x4096x3840:bf16", tile(128, 128, 128, (64, 128), "tma,3 tma,3", "k0/specialize(2,0,0)")),
    "kn, odd rows of A": ("matmul:512x4096x3844:f16", tile(128, 256, 64, (64, 256), "cp_async,4 tma,4")),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_a_full_tile_compiles_without_spills_and_without_a_serialised_wgmma(name: str):
    cubin = compile_cubin(unit(*LARGE[name], "h200").text, H200.arch)
    assert cubin.spill_bytes == 0 and not cubin.warnings


def test_one_tile_compiles_without_a_serialised_wgmma():
    cubin = compile_cubin(unit(*LARGE["nk, 128 rows"], "h200").text, H200.arch)
    assert cubin.spill_bytes == 0 and not cubin.warnings


def test_it_is_offered_wherever_a_warpgroup_makes_the_tile_and_alone_where_the_copy_engine_does_not_bring_a():
    for op, rings, atoms in (
        ("matmul:128x64x128:f16:nk", "tma,2 tma,2", {"wgmma", "wgmma_rs"}),
        ("matmul:128x64x130:f16", "cp_async,2 tma,2", {"wgmma_rs"}),
    ):
        plan = replay(parse_op(op).program(), tile(64, 64, 32, (64, 64), rings).rsplit(" ", 1)[0], H200)
        sites = [x.move for x in BindAtom.sites(plan, H200)]
        assert {x.atom for x in sites if isinstance(x, BindAtom)} == atoms


def test_a_transport_for_each_operand_is_offered_where_the_engine_brings_one_of_them():
    plan = replay(
        parse_op("matmul:128x64x130:f16").program(), tile(64, 64, 32, (64, 64), "x,1 x,1").split(" k0/stage")[0], H200
    )
    (a,) = Stage.sites(plan, H200)
    assert isinstance(a.move, Stage) and (a.move.value, a.move.transport) == ("A", "cp_async")
    (b,) = Stage.sites(Stage("k0", None, "A", "cp_async", 3).rewrite(plan, H200), H200)
    assert isinstance(b.move, Stage) and (b.move.value, b.move.transport, dict(b.domains)) == (
        "B",
        "tma",
        {"depth": (3,)},
    )


@pytest.mark.parametrize(
    ("op", "schedule", "words"),
    [
        (
            "matmul:64x64x64:f16",
            tile(64, 64, 32, (64, 64), "tma,2 cp_async,2"),
            "reads B as tma leaves it, here cp_async",
        ),
        (
            "matmul:64x64x64:f16",
            tile(64, 64, 32, (64, 64), "cp_async,2 tma,2").replace("wgmma_rs", "wgmma"),
            "wgmma reads A as tma leaves it",
        ),
        ("matmul:64x24x64:f16", tile(64, 24, 32, (64, 24), "tma,2 tma,2"), "swizzled rows of 32 bytes or more"),
    ],
)
def test_operands_that_the_instruction_cannot_read_are_refused(op: str, schedule: str, words: str):
    with pytest.raises(IllegalMove, match=words):
        complete(replay(parse_op(op).program(), schedule, H200))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [":nk", ""])
@pytest.mark.parametrize("n", range(8, 257, 8))
def test_every_width_is_offered_and_right(n: int, layout: str):
    op = f"matmul:64x{n}x64:f16{layout}"
    schedule = tile(64, n, 32, (64, n), "tma,2 tma,2", "k0/specialize(1,0,0)")
    plan = replay(parse_op(op).program(), schedule.rsplit(" ", 1)[0], H200)
    found = {x.move.atom: dict(x.domains)["n"] for x in BindAtom.sites(plan, H200) if isinstance(x.move, BindAtom)}
    whole = (
        layout or n % 16 == 0 or n in (120, 184, 232, 248)
    )  # along n a block is made of swizzled rows, or brought with more
    assert found == (dict.fromkeys(("wgmma", "wgmma_rs"), (n,)) if whole else {})
    for atom in found:
        error, _ = Run(op, "h200", schedule.replace("wgmma_rs", atom)).error_norm()
        assert error <= 1
