"""Op and schedule -> source text: the whole way down, in one call. Compiles and runs nothing."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from emmy.codegen import c, cpu, cuda, cuda_tile
from emmy.codegen.kernel import Buffer, Kernel
from emmy.codegen.kernel_gpu import GpuKernel
from emmy.codegen.lower import lower
from emmy.codegen.ptx import prelude, used
from emmy.ir.moves import Move
from emmy.ir.ops import Op
from emmy.ir.plan import Plan
from emmy.ir.program import Program
from emmy.ir.schedule import replay
from emmy.ir.target import Target


@dataclass(frozen=True, slots=True)
class SourceUnit:
    """Generated text of a plan, and what its caller must pass.

    arguments: inputs in the program's order, then outputs; syms: names of the sizes given at run time, in order.
    """

    text: str
    digest: str  # sha256 of the text
    plan: Plan
    kernels: tuple[Kernel, ...] | tuple[GpuKernel, ...]  # one a launch, of a CPU or of a GPU

    @property
    def arguments(self) -> tuple[Buffer, ...]:
        return tuple(b for b in cpu.buffers(self.plan) if b.is_argument)

    @property
    def syms(self) -> tuple[str, ...]:
        return tuple(s.name for s in self.plan.program.syms)


def source(what: Op | Program, schedule: str | tuple[Move, ...], target: Target) -> SourceUnit:
    """The source a schedule makes of an op or program. Raises IllegalMove, UsageError, or PlanError when it is incomplete."""
    program = what.program() if isinstance(what, Op) else what
    return plan_source(replay(program, schedule, target), target)


def plan_source(plan: Plan, target: Target) -> SourceUnit:
    """The source of a plan: C for a CPU, CUDA C++ for a GPU. Raises PlanError when no code is generated for it."""
    kernels: tuple[Kernel, ...] | tuple[GpuKernel, ...]
    if target.is_cpu:
        kernels = tuple(cpu.expand(outline, target) for outline in lower(plan))
        text = c.emit(kernels)
    else:
        kernels = tuple(cuda_tile.expand(outline, target) for outline in lower(plan))
        text = cuda.emit(kernels)
        text = prelude(used(text), target.arch) + text
    return SourceUnit(text, hashlib.sha256(text.encode()).hexdigest(), plan, kernels)
