"""C source -> shared library for a CPU target: flags of its instruction set, and facts read off the assembly."""

from __future__ import annotations

import re

from emmy import hostcc
from emmy.codegen.build import SourceUnit
from emmy.hostcc import Library
from emmy.ir.target import Target

# NaN must come through, so that a poisoned output is seen: no -ffast-math. Contraction makes a * b + c one instruction.
_COMMON = ("-std=gnu11", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-w", "-pipe")
_ISA = {
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512"),
    "avx2": ("-mavx2", "-mfma"),
    "portable": (),
}


def flags(target: Target) -> tuple[str, ...]:
    """What the compiler is told for a target."""
    return (*_COMMON, *_ISA[target.isa or "portable"])


def build(unit: SourceUnit, target: Target, timeout_s: float = hostcc.TIMEOUT_S) -> Library:
    """The library of a plan's source, with facts about it. Raises CompileError; cached on disk."""
    return compile_text(unit.text, target, timeout_s)


def compile_text(text: str, target: Target, timeout_s: float = hostcc.TIMEOUT_S, *, fresh: bool = False) -> Library:
    """The same of a text that is such a source."""
    return hostcc.compile_library(text, "c", flags(target), assembly_facts, timeout_s, fresh=fresh)


_INSTRUCTION = re.compile(r"^\t([a-z]\w*)\t?([^\n]*)", re.MULTILINE)
_VECTOR_REGISTER = re.compile(r"%[xyz]mm|\b[vq]\d+\.")
_STACK = re.compile(r"\((%rsp|%rbp)\)|\[sp")


def assembly_facts(assembly: str) -> dict[str, float]:
    """Counts over all functions: instructions, fused multiply-adds, vector moves, and those of them that touch the stack."""
    total = fma = moves = spills = 0
    for name, operands in _INSTRUCTION.findall(assembly):
        total += 1
        fma += name.startswith(("vfmadd", "vfnmadd", "fmla"))
        if _VECTOR_REGISTER.search(operands) and ("mov" in name or name.startswith(("ldr", "str", "ldp", "stp"))):
            moves += 1
            spills += _STACK.search(operands) is not None
    return {
        "asm_instructions": float(total),
        "asm_fma": float(fma),
        "asm_vector_moves": float(moves),
        "asm_spills": float(spills),
    }
