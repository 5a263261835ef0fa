"""Few rows: operands that go from memory straight to mma.sync, and warps that share k. Right on the emulator, fast as SASS."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from emmy.codegen.cubin import _sections, opcodes
from emmy.codegen.lower import lower
from emmy.codegen.nvrtc import compile_cubin
from emmy.codegen.ptx import ARCHS
from emmy.codegen.steps import BlockSync, Gather, Share
from emmy.ir.gpu import thread_registers
from emmy.ir.ops import parse_op
from emmy.ir.target import load_target
from emmy.search.schedule_space import ScheduleSpace
from tests.cuda_codegen.emulated import GPUS, Run, nothing_but_numbers, unit


def tile(n: int, k: int, atom: int, unroll: int = 1, before: str = "", more: str = "", then: str = "") -> str:
    """A tile of 8 rows and n columns whose warps fold k each; `unroll` steps of loads are under way."""
    loops = f"{before}k0/split(m,grid,8) k0/split(n,grid,{n}) {more}k0/split(k,warp,{k}){then}"
    return f"{loops} k0.C/atom(direct,8,{atom},32)" + (f" k0.C/unroll({unroll})" if unroll > 1 else "")


FINISH = " k1/split(m,grid,8) k1/split(n,grid,64)"
RUNS = {
    "one row, B along k": Run("matmul:1x48x256:f16:nk", "rtx4090", tile(16, 64, 16, 2)),
    "one row, B along n": Run("matmul:1x64x256:f16", "rtx4090", tile(64, 64, 64, 2)),
    "three rows, bias, a step left over": Run("matmul:3x32x480:bf16:nk,bias", "h200", tile(32, 160, 16, 2)),
    "three rows, loads of 8 bytes": Run("matmul:3x32x320:bf16:bias", "h200", tile(32, 160, 32, 3)),
    "eight rows, loads of 4 bytes": Run("matmul:8x34x128:f16", "a100", tile(16, 32, 16)),
    "eight rows, a loop of loads": Run("matmul:8x16x704:bf16:nk", "rtx5090", tile(16, 352, 16, 3)),
    "columns and k end inside a tile": Run("matmul:5x41x200:f16:nk,bias,gelu_tanh", "rtx3090", tile(32, 64, 16, 2)),
    "columns and k end inside a tile, B along n": Run("matmul:7x72x200:bf16:residual", "rtx3090", tile(64, 128, 64, 4)),
    "a symbol for rows": Run("matmul:m(1..8)x32x128:f16:nk,scale", "h200", tile(16, 64, 16, 2), (("m", 3),)),
    "one warp": Run("matmul:2x32x64:f16:nk", "h200", tile(16, 64, 16, 2)),
    "warps along n too": Run("matmul:2x64x128:f16", "h200", tile(64, 64, 32, 2, more="k0/split(n,warp,32) ")),
    "time around the shares": Run(
        "matmul:2x32x256:f16:nk", "h200", tile(16, 64, 16, 2, more="k0/split(k,serial,128) ")
    ),
    "blocks of a cluster share k too": Run(
        "matmul:3x80x512:f16:nk,bias", "h200", tile(16, 64, 16, 2, more="k0/split(k,cluster,256) ")
    ),
    "blocks of a cluster alone": Run(
        "matmul:8x41x256:bf16:nk", "h200", tile(16, 64, 16, 2, more="k0/split(k,cluster,64) ")
    ),
    "blocks share k too": Run("matmul:4x64x512:f16:nk", "a100", tile(32, 64, 16, 2, "k0/splitk(C,2) ", then=FINISH)),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["integer", "normal"])
@pytest.mark.parametrize("name", RUNS)
def test_the_text_is_right_on_the_emulator(name: str, kind: str):
    r = RUNS[name]
    error, stats = Run(r.op, r.gpu, r.schedule, r.sizes, kind, order=2).error_norm()
    assert error <= 1 and nothing_but_numbers(stats)


def test_weights_are_read_once_and_in_whole_sectors():
    for op, atom in (("matmul:2x64x512:f16:nk", 16), ("matmul:2x64x512:f16", 64)):
        _, stats = Run(op, "h200", tile(64, 128, atom, 2)).error_norm()
        assert stats[0].global_load_sectors == stats[0].global_load_sectors_ideal
        rows = 32 * 16 * (512 // 32)  # every lane reads 16 bytes of A in a step of 32
        assert stats[0].global_load_bytes == 64 * 512 * 2 + rows


def test_shared_sums_meet_no_bank_conflicts_where_b_lies_along_k():
    _, stats = Run("matmul:8x32x256:f16:nk", "h200", tile(32, 64, 16, 2)).error_norm()
    assert stats[0].bank_conflict == 1


# ---------------------------------------------------------------- what is derived
def test_shares_of_a_fold_meet_once():
    (o,) = lower(unit("matmul:1x64x256:f16:nk", tile(16, 64, 16, 2)).plan)
    kinds = [s for s in o.roles[0].steps if isinstance(s, Share | BlockSync | Gather)]
    assert kinds == [Share("C"), BlockSync(), Gather("C")]


def test_one_warp_shares_nothing():
    u = unit("matmul:1x64x64:f16:nk", tile(16, 64, 16, 2))
    assert "emmy_syncthreads" not in u.text and "EMMY_SMEM(smem)" not in u.text


def test_weights_are_under_way_before_an_early_launch_waits_and_activations_are_not():
    r = Run("matmul:3x32x256:f16:nk,bias", "h200", tile(16, 64, 16, 2) + " k0/pdl()")
    text = unit(r.op, r.schedule, r.gpu).text
    before, after = text[text.rindex("emmy_pdl_launch();") :].split("emmy_pdl_wait();")
    assert before.count("ldg_b128(B_held") == 2 and "A_held +" not in before
    assert "B_from" not in after and "ldg_b128(A_held" in after
    assert r.error_norm()[0] <= 1


def test_resident_blocks_use_the_memory_of_their_sums_again():
    for order in range(4):
        r = Run("matmul:3x80x256:f16:nk,bias", "h200", tile(16, 64, 16, 2) + " k0/persist(2)", order=order)
        error, stats = r.error_norm()
        assert error <= 1 and stats[0].block_syncs == 2 * 5


# ---------------------------------------------------------------- machine code
LARGE = {
    "nk": ("matmul:1x4096x3840:f16:nk", tile(16, 480, 16, 8), 2),
    "kn": ("matmul:8x4096x3840:bf16:bias,gelu_tanh", tile(32, 480, 32, 5), 8),
}


def mnemonics(cubin: bytes, kernel: str) -> list[str]:
    """Names of a kernel's instructions in order."""
    words = struct.iter_unpack("<QQ", _sections(cubin)[f".text.{kernel}"])
    return [opcodes().get(w & 0xFFF, "?") for w, _ in words]


@pytest.mark.parametrize(
    "arch_gpu", [(a, g) for g in GPUS for a in ARCHS if load_target(g).arch == a], ids=lambda x: x[0]
)
@pytest.mark.parametrize("name", LARGE)
def test_all_loads_of_the_slots_are_under_way_before_the_first_product(name: str, arch_gpu: tuple[str, str]):
    op, schedule, loads = LARGE[name]
    arch, gpu = arch_gpu
    u = unit(op, schedule, gpu)
    cubin = compile_cubin(u.text, arch)
    assert cubin.spill_bytes == 0 and not cubin.warnings
    code = mnemonics(cubin.data, "k0")
    slots = u.plan.launches[0].tile.work("C").unroll
    before = code[: code.index("HMMA")].count("LDG")
    assert before >= slots * (loads + 1) - 3  # ptxas may put the last ones behind the first product
    la = u.plan.launches[0]
    work = la.tile.work("C")
    estimate = thread_registers(u.plan, la, work, work.atoms[0], ("m", "n", "k"))
    assert estimate - 40 <= cubin.kernels[0].n_regs <= estimate + 8


@pytest.mark.parametrize("gpu", ["h200", "rtx5090"])
def test_weights_stay_before_the_wait_in_machine_code_too(gpu: str):
    op, schedule, loads = LARGE["nk"]
    text = unit(op, f"{schedule} k0/pdl()", gpu).text
    code = mnemonics(compile_cubin(text, load_target(gpu).arch).data, "k0")
    wait = code.index("ACQBULK")
    assert code[:wait].count("LDG") == 8 * loads and "HMMA" not in code[:wait]


def test_a_loop_of_loads_stays_a_loop():
    op, _, _ = LARGE["nk"]
    cubin = compile_cubin(unit(op.replace("3840", "15360"), tile(16, 1920, 16, 4), "h200").text, "sm_90a")
    loop = cubin.kernels[0].main_loop
    assert loop is not None and (loop.count("LDG"), loop.count("HMMA")) == (12, 8)
    assert cubin.kernels[0].n_regs <= 128  # two blocks of eight warps a multiprocessor


# ---------------------------------------------------------------- what a search is offered
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    "op", ["matmul:1x4096x3840:f16", "matmul:m(1..8)x512x15360:bf16:nk,bias", "matmul:8x41x200:f16:nk"]
)
def test_the_default_of_few_rows_reads_operands_directly(op: str, gpu: str):
    key = ScheduleSpace(parse_op(op), load_target(gpu)).default().key
    assert "atom(direct," in key and "stage(" not in key
    assert compile_cubin(unit(op, key, gpu).text, load_target(gpu).arch).spill_bytes == 0


@pytest.mark.parametrize(
    "op", ["matmul:9x4096x3840:f16", "matmul:1x4096x3840:f32", "matmul:1x4096x3841:f16", "matmul:1x33x64:f16"]
)
def test_other_shapes_are_staged(op: str):
    assert "stage(" in ScheduleSpace(parse_op(op), load_target("h200")).default().key


def test_both_forms_are_points_of_one_space():
    import random

    space, rng = ScheduleSpace(parse_op("matmul:1x30720x3840:f16:nk"), load_target("h200")), random.Random(0)
    points = [space.sample(rng) for _ in range(60)]
    forms = {("direct" in p.key, "stage(" in p.key) for p in points}
    assert forms == {(True, False), (False, True)}
    assert all("unroll(" in p.key for p in points if "direct" in p.key)
    for p in points[:20]:
        found = space.locate(p.key)
        assert found is not None and found.key == p.key


def test_the_text_of_a_direct_plan(golden: Callable[[str, str], None]):
    text = unit("matmul:m(1..8)x4096x3840:bf16:nk,bias,gelu_tanh", tile(16, 480, 16, 8), "h200").text
    golden("cuda_direct.txt", text[text.rindex("#endif") + len("#endif") :].lstrip())
