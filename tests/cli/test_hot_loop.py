"""Finding the loop that does the arithmetic in what objdump prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from emmy.codegen import gcc
from emmy.codegen.build import source
from emmy.errors import CompileError
from emmy.hot_loop import hot_loop, loops
from emmy.ir.ops import parse_op
from emmy.ir.target import load_target

X86 = """
0000000000001000 <outer>:
    1000:\tmov    $0x0,%eax
    1005:\tmov    $0x0,%ecx
    100a:\tvfmadd231ps %ymm1,%ymm2,%ymm3
    100f:\tvfmadd231ps %ymm1,%ymm2,%ymm4   # a comment
    1014:\tadd    $0x1,%ecx
    1017:\tjne    100a <outer+0xa>
    1019:\tadd    $0x1,%eax
    101c:\tjne    1005 <outer+0x5>
    101e:\tjmp    1023 <outer+0x23>
    1023:\tret

0000000000002000 <plain>:
    2000:\tmov    %rax,%rbx
    2003:\tjmp    2000 <plain>
"""
ARM = """
0000000000001000 <k0>:
    1000:\tmov\tx0, #0
    1004:\tfmla\tv0.4s, v1.4s, v2.s[0]
    1008:\tsubs\tx1, x1, #1
    100c:\tb.ne\t1004 <k0+0x4>  // b.any
    1010:\tret
"""


def test_only_innermost_loops_count() -> None:
    found = loops(X86)
    assert [(f.function, len(f.lines), f.arithmetic) for f in found] == [("outer", 4, 2), ("plain", 2, 0)]
    assert found[0].lines[1] == "vfmadd231ps %ymm1,%ymm2,%ymm4"


def test_branches_of_arm_are_known() -> None:
    (found,) = loops(ARM)
    assert found.arithmetic == 1 and found.lines[0].startswith("fmla")


def test_a_library_without_a_loop_has_none() -> None:
    assert loops("0000000000001000 <f>:\n    1000:\tret\n") == []


def test_the_loop_of_a_real_kernel_holds_a_multiply_for_each_sum() -> None:
    target = load_target("cpu")
    lanes = target.vector_bits // 32
    unit = source(
        parse_op("matmul:64x96x128:f32"), f"k0/stage(B,pack,1) k0.C/atom(fma,4,{2 * lanes},1,{lanes})", target
    )
    loop = hot_loop(gcc.build(unit, target).path)
    assert loop is not None and loop.arithmetic >= 8


def test_what_is_no_library_is_an_error_of_emmy(tmp_path: Path) -> None:
    (tmp_path / "x.so").write_text("no library")
    with pytest.raises(CompileError, match="objdump"):
        hot_loop(tmp_path / "x.so")
