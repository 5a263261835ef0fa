"""From an op and its schedules to something that runs in this process. Chooses no schedule and measures nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from emmy.codegen import gcc, gpu_build
from emmy.codegen.build import plan_source
from emmy.ir.dispatch import Dispatch
from emmy.ir.dtype import storage
from emmy.ir.gathers import gathers
from emmy.ir.ops import Op
from emmy.ir.plan import Plan
from emmy.ir.program import Program, Sym
from emmy.ir.schedule import replay
from emmy.ir.target import Target
from emmy.runtime.arguments import Buffer, Contents, Form
from emmy.runtime.launcher import LoadedPlan
from emmy.runtime.table import LoadedTable, PlanRange


def load_plan(op: Op, schedule: str, target: Target) -> LoadedPlan:
    """The op under one schedule. Raises IllegalMove, PlanError, CompileError or LaunchError."""
    plan = replay(op.program(), schedule, target)
    serves = {s.name: (s.lo, s.hi) for s in plan.guard}
    return LoadedPlan(
        _built(plan, target), _backend(target), serves, _forms(op.program()), _contents(op.program()), op.key
    )


def load_table(op: Op, table: Dispatch, target: Target) -> LoadedTable:
    """The op under a table: each range compiled by itself. Raises UsageError when the table is not of the op's sizes, too."""
    plans = table.plans(op.program(), target)
    ranges = [PlanRange(r.lo, r.hi, _built(p, target)) for r, p in zip(table.ranges, plans, strict=True)]
    return LoadedTable(table.symbol, ranges, _backend(target), _forms(op.program()), _contents(op.program()), op.key)


def _forms(program: Program) -> dict[str, Form]:
    """What the arrays of the program's inputs and outputs are in storage form."""
    dims = {axis: dim.name if isinstance(dim, Sym) else dim for axis, dim in program.dims}
    names = (*(v.name for v in program.inputs), *program.outputs)
    return {
        v.name: Form(
            storage(v.dtype),
            tuple(dims[a] for a in v.axes),
            v.name in program.outputs,
            "bits of bf16: emmy.ir.dtype.encode" if v.dtype == "bf16" else "",
        )
        for v in map(program.value, names)
    }


def _contents(program: Program) -> Contents | None:
    """Refuses positions outside of what is read there; None for a program that reads nothing at positions that inputs tell."""
    found = gathers(program)

    def refuse(given: Mapping[str, Buffer], sizes: Mapping[str, int]) -> Iterator[str]:
        def size(axis: str) -> int:
            dim = program.dim(axis)
            return sizes[dim.name] if isinstance(dim, Sym) else dim

        for g in found:
            told = {n: x.astype(np.int64) for n in g.told_by if isinstance(x := given[n], np.ndarray)}
            if len(told) < len(g.told_by):  # addresses are taken on trust
                continue
            at = g.positions(told, lambda axis: np.arange(size(axis)))
            if at.size and (why := g.refuse(int(at.min()), int(at.max()), size(g.axis))):
                yield why

    return refuse if found else None


def _built(plan: Plan, target: Target) -> Path:
    unit = plan_source(plan, target)
    return gcc.build(unit, target).path if target.is_cpu else gpu_build.build(unit, target).path


def _backend(target: Target) -> str:
    return "cpu" if target.is_cpu else "cuda"
