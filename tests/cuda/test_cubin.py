"""Static facts of a cubin against what the assembler said, and against nvdisasm where it is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

from emmy.codegen.build import source
from emmy.codegen.cubin import MATRIX, LoopFacts, _branch_bytes, opcodes, read_cubin
from emmy.codegen.nvrtc import Cubin, compile_cubin
from emmy.errors import CompileError
from emmy.ir.ops import parse_op
from emmy.ir.target import load_target
from tests.emulator.cases import CASES

COMPILED = [(c.name, arch) for c in CASES.values() for arch in c.archs]


def cubin(name: str, arch: str) -> Cubin:
    return compile_cubin(CASES[name].source(arch=arch), arch)


@pytest.mark.parametrize(("name", "arch"), COMPILED)
def test_the_facts_are_those_of_the_assembler(name: str, arch: str) -> None:
    made = cubin(name, arch)
    (facts,) = made.kernels
    said = re.search(r"(\d+) bytes stack frame.*?Used (\d+) registers", made.log, re.DOTALL)
    assert said is not None
    assert (facts.n_regs, facts.name, facts.max_threads) == (int(said[2]), name, CASES[name].block)
    assert facts.stack_bytes >= int(said[1])
    assert f"sm_{facts.arch}" in arch
    assert facts.code_bytes % 128 == 0
    assert facts.smem_static_bytes == (1024 if facts.arch >= 90 else 0)


@pytest.mark.parametrize(("name", "arch"), COMPILED)
def test_every_instruction_has_a_name(name: str, arch: str) -> None:
    (facts,) = cubin(name, arch).kernels
    assert [m for m in facts.mix if m.startswith("op_")] == []


def test_the_main_loop_is_the_one_that_multiplies() -> None:
    (facts,) = cubin("ring", "sm_80").kernels
    loop = facts.main_loop
    assert loop is not None
    unrolled = loop.count("HMMA") // 8
    assert loop.count("HMMA") == 8 * unrolled > 0
    assert loop.count("LDSM") == 6 * unrolled
    assert loop.issue_cycles >= loop.n_instrs
    assert facts.mix["LDGSTS"] >= 6
    (facts,) = cubin("wgmma_ring", "sm_90a").kernels
    assert facts.main_loop is not None and facts.main_loop.count(*MATRIX) == 4
    assert facts.mix["UTMALDG"] >= 2


@pytest.mark.parametrize("transport", ["tma", "cp_async"])
@pytest.mark.parametrize("pipeline", ["", " k0.C/pipeline()"])
def test_the_main_loop_of_a_generated_kernel_is_its_step_along_k(transport: str, pipeline: str) -> None:
    """A step of 64 along k of a warp's 64 x 32: 4 x 4 x 4 instructions. Loops that spin may lie in it or behind it."""
    schedule = (
        "k0/split(m,grid,128) k0/split(n,grid,128) k0/split(k,serial,64) k0/split(m,warp,64) k0/split(n,warp,32) "
        f"k0/stage(A,{transport},3) k0/stage(B,{transport},3) k0.C/atom(mma,16,8,16){pipeline}"
    )
    text = source(parse_op("matmul:512x4096x3840:f16"), schedule, load_target("h200")).text
    (facts,) = compile_cubin(text, "sm_90a").kernels
    loop = facts.main_loop
    assert loop is not None
    assert (loop.count("HMMA"), loop.count("LDSM")) == (64, 24)


def test_the_main_loop_may_hold_loops_that_wait_for_copies() -> None:
    """As ptxas laid out a ring of tma: loops around mbarrier.try_wait inside the step, and branches from behind back into it."""
    (facts,) = cubin("tma_ring", "sm_90a").kernels

    def loop(first: int, last: int, hmma: int) -> LoopFacts:
        return LoopFacts(first, last, 2 * (last - first), {"HMMA": hmma, "SYNCS": 2})

    spin, step, tail, tiles = loop(208, 212, 0), loop(176, 356, 64), loop(199, 479, 64), loop(100, 600, 80)
    assert replace(facts, loops=(tiles, step, tail, spin)).main_loop is step
    assert replace(facts, loops=(loop(10, 90, 0), spin)).main_loop == loop(10, 90, 0)
    assert replace(facts, loops=(loop(200, 300, 0), spin)).main_loop is spin


def test_a_kernel_without_a_loop_has_no_main_loop() -> None:
    (facts,) = cubin("rms_norm", "sm_120a").kernels
    assert facts.loops == () and facts.main_loop is None


def test_bytes_that_are_no_cubin_are_refused() -> None:
    with pytest.raises(CompileError, match="not a cubin: it begins with b'PK"):
        read_cubin(b"PK\x03\x04 and so on")


def test_no_opcode_has_two_names() -> None:
    text = (Path(read_cubin.__globals__["__file__"]).parent / "sass_opcodes.json").read_text()
    codes = [code for group in json.loads(text).values() for code in group]
    assert len(codes) == len(set(codes)) == len(opcodes())


def nvdisasm() -> str | None:
    installed = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin" / "nvdisasm"
    return shutil.which("nvdisasm") or (str(installed) if installed.exists() else None)


@pytest.mark.skipif(nvdisasm() is None, reason="nvdisasm is not installed")
@pytest.mark.parametrize(("name", "arch"), COMPILED)
def test_names_and_branches_are_those_of_nvdisasm(name: str, arch: str, tmp_path: Path) -> None:
    made = cubin(name, arch)
    (tmp_path / "x.cubin").write_bytes(made.data)
    said = subprocess.run([str(nvdisasm()), "-json", "x.cubin"], cwd=tmp_path, capture_output=True, check=True).stdout
    (function,) = json.loads(said)[1]
    code = function["sass-instructions"]
    (facts,) = made.kernels
    assert len(code) == facts.code_bytes // 16
    start = made.data.index(_code(made))
    for i, instruction in enumerate(code):
        word, high = (int.from_bytes(made.data[start + 16 * i + o : start + 16 * i + o + 8], "little") for o in (0, 8))
        mnemonic = instruction["opcode"].split(".")[0]
        assert opcodes()[word & 0xFFF] == mnemonic
        target = re.search(r"`?\(?0x([0-9a-f]+)\)?$", instruction.get("operands", ""))
        if mnemonic == "BRA" and target is not None:
            assert 16 * (i + 1) + _branch_bytes(word, high, facts.arch) == int(target[1], 16)


def _code(made: Cubin) -> bytes:
    from emmy.codegen.cubin import _sections

    return _sections(made.data)[f".text.{made.kernels[0].name}"]
