"""Op and schedule -> source text: the whole way down, in one call. Compiles and runs nothing."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from emmy.codegen import c, cpu
from emmy.codegen.kernel import Buffer, Kernel
from emmy.codegen.lower import lower
from emmy.errors import PlanError
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
    kernels: tuple[Kernel, ...]

    @property
    def arguments(self) -> tuple[Buffer, ...]:
        return tuple(b for b in self.kernels[0].buffers if b.role != "workspace")

    @property
    def syms(self) -> tuple[str, ...]:
        return self.kernels[0].syms


def source(what: Op | Program, schedule: str | tuple[Move, ...], target: Target) -> SourceUnit:
    """The source a schedule makes of an op or program. Raises IllegalMove, UsageError, or PlanError when it is incomplete."""
    program = what.program() if isinstance(what, Op) else what
    return plan_source(replay(program, schedule, target), target)


def plan_source(plan: Plan, target: Target) -> SourceUnit:
    """The source of a plan."""
    if not target.is_cpu:
        raise PlanError(f"{target.name} has no code generator yet; targets with one: cpu, cpu-avx2, cpu-portable")
    kernels = tuple(cpu.expand(outline, target) for outline in lower(plan))
    text = c.emit(kernels)
    return SourceUnit(text, hashlib.sha256(text.encode()).hexdigest(), plan, kernels)
