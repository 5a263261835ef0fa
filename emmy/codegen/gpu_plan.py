"""A GPU plan as one file: lines that say how its kernels are launched, then the cubin that holds them.

The launcher reads it (`emmy/runtime/cuda.cpp`). The lines, in this order, words separated by blanks:

    emmy-gpu-plan 2
    sym m 1 4096                            size known at run time, and the range it is allowed to have
    argument A 2 15360 $0 *                 bytes of an element, number of elements
    workspace C_parts 4 4096 $0 *
    kernel k0 256 49152 $0 127 + 128 /      threads, dynamic shared memory, blocks; what follows belongs to it:
    cluster 2                               so many neighbouring blocks form a cluster; without the line, none do
    early                                   it may begin before the launch before it has ended
    map A f16 128 64 3 : 3840 : $0          of a buffer: dtype, box rows, box columns, swizzle : columns : rows
    map B f16 64 64 3 4 : 3840 : $0         the same in boxes of 4 panels of 64 columns: a third dimension
    map Q f16 64 64 3 : 64 : $0 : 512 : 8 : 64    rows 512 elements apart; a further dimension of 8 positions, 64 apart
    pass A                                  the address of a buffer
    size m                                  a symbol's size, 32-bit
    cubin 20480                             as many bytes follow

Whole numbers are expressions in postfix; $0 is the first symbol's size. Knows no file on disk and no compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from emmy.codegen.cpu import buffers
from emmy.codegen.kernel import Int, IntLoad, IntOp, IntVar, Whole
from emmy.codegen.kernel_gpu import GpuKernel
from emmy.errors import PlanError
from emmy.ir.dtype import size_bytes
from emmy.ir.plan import Plan

VERSION = 2
ENDLESS = 1 << 31  # positions that a map of pages says its pool has; twice as many are allowed


def gpu_plan(plan: Plan, kernels: tuple[GpuKernel, ...], cubin: bytes) -> bytes:
    """The file's bytes for the kernels of a plan, launched in that order, and the cubin they were compiled to."""
    return plan_file(plan_lines(plan, kernels), cubin)


def plan_file(lines: Sequence[str], cubin: bytes) -> bytes:
    """The file's bytes of the lines before the cubin's, and the cubin."""
    return "\n".join((*lines, f"cubin {len(cubin)}")).encode("ascii") + b"\n" + cubin


def plan_lines(plan: Plan, kernels: tuple[GpuKernel, ...]) -> tuple[str, ...]:
    """The lines before the cubin's: everything that a launch needs to know of the kernels."""
    syms = {f"len_{s.name}": i for i, s in enumerate(plan.program.syms)}
    lines = [f"emmy-gpu-plan {VERSION}"]
    lines += [f"sym {s.name} {s.lo} {s.hi}" for s in plan.guard]
    for b in buffers(plan):
        kind = "argument" if b.is_argument else "workspace"  # which begins as zeros
        lines.append(f"{kind} {b.name} {size_bytes(b.dtype)} {_postfix(b.elements, syms)}")
    for k in kernels:
        lines.append(f"kernel {k.name} {k.threads} {k.smem_bytes} {_postfix(k.blocks, syms)}")
        lines += [f"cluster {k.cluster}"] * (k.cluster > 1) + ["early"] * k.early
        dtypes = {b.name: b.dtype for b in k.buffers}
        for m in k.maps:
            box = f"{m.box_rows} {m.box_columns} {m.swizzle}" + (f" {m.panels}" if m.panels else "")
            apart = () if m.pitch is None and not m.outer else (m.columns if m.pitch is None else m.pitch,)
            outer = (*m.outer[:-1], (Int(ENDLESS), m.outer[-1][1])) if m.endless else m.outer
            sizes = (m.columns, m.rows, *apart, *(x for dimension in outer for x in dimension))
            words = " : ".join((box, *(_postfix(x, syms) for x in sizes)))
            lines.append(f"map {m.value} {dtypes.get(m.value) or _dtype(plan, m.value)} {words}")
        lines += [f"pass {b.name}" for b in k.buffers]
        lines += [f"size {plan.program.syms[syms[name]].name}" for name in k.syms]
    return tuple(lines)


def _dtype(plan: Plan, name: str) -> str:
    return next(b.dtype for b in buffers(plan) if b.name == name)


def _postfix(x: Whole, syms: dict[str, int]) -> str:
    match x:
        case Int(v):
            return str(v)
        case IntVar(name):
            if name not in syms:
                raise PlanError(f"a launch's size depends on {name}; it may depend on {', '.join(syms) or 'no symbol'}")
            return f"${syms[name]}"
        case IntOp("+" | "-" | "*" | "/" | "%" | "min" | "max" as fn, a, b):
            return f"{_postfix(a, syms)} {_postfix(b, syms)} {fn}"
        case IntOp(fn, _, _):
            raise PlanError(f"a launch's size is computed with {fn}; + - * / % min max are allowed")
        case IntLoad(view):
            raise PlanError(f"a launch's size depends on what {view} holds")
        case _:
            assert_never(x)
