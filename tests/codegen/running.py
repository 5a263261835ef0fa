"""Running generated code in tests: compiled by gcc through the launcher, or interpreted, always into poisoned outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from emmy.codegen import gcc, kernel_run
from emmy.codegen.build import SourceUnit
from emmy.ir.dtype import storage
from emmy.ir.ops.op import Storage
from emmy.ir.program import Program
from emmy.ir.target import Target, load_target
from emmy.runtime.launcher import LoadedPlan


def poisoned(program: Program, size: Mapping[str, int]) -> dict[str, Storage]:
    """Output arrays of all ones bits: NaN in every dtype."""
    out = {}
    for name in program.outputs:
        v = program.value(name)
        x = np.empty([size[a] for a in v.axes], storage(v.dtype))
        x.reshape(-1).view(np.uint8)[...] = 0xFF
        out[name] = x
    return out


def compiled(
    unit: SourceUnit,
    target: Target,
    inputs: Mapping[str, Storage],
    sizes: Mapping[str, int] | None = None,
    threads: int = 1,
) -> dict[str, Storage]:
    """Outputs of the compiled plan."""
    p = unit.plan.program
    out = poisoned(p, p.sizes(sizes))
    with LoadedPlan(gcc.build(unit, target).path) as plan:
        plan.run({**inputs, **out}, sizes or {}, threads)
    return out


def interpreted(
    unit: SourceUnit,
    inputs: Mapping[str, Storage],
    sizes: Mapping[str, int] | None = None,
    order: Callable[[int], Sequence[int]] = range,
) -> dict[str, Storage]:
    """Outputs of the plan's kernels, executed by the interpreter of Kernel IR."""
    p = unit.plan.program
    size = p.sizes(sizes)
    flat = kernel_run.run(unit.kernels, inputs, sizes, order)
    return {name: x.reshape([size[a] for a in p.value(name).axes]) for name, x in flat.items()}


def usable(*names: str) -> tuple[str, ...]:
    """Those of the CPU targets that this machine can run."""
    from emmy.errors import NoSuchDevice

    out = []
    for name in names:
        try:
            load_target(name)
        except NoSuchDevice:
            continue
        out.append(name)
    return tuple(out)
