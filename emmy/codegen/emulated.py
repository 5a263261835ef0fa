"""A GPU plan's outputs from its exact text, on the emulator: correctness without a GPU. Knows no driver and no timing."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from emmy.codegen.build import SourceUnit
from emmy.codegen.cpu import buffers
from emmy.codegen.emulator import EmuStats, TensorMap, emulate
from emmy.codegen.kernel import evaluated
from emmy.codegen.kernel_gpu import GpuKernel
from emmy.codegen.kernel_gpu import TensorMap as Map
from emmy.errors import PlanError
from emmy.ir.dtype import encode
from emmy.ir.program import Program

Storage = NDArray[np.generic]


def emulate_plan(
    unit: SourceUnit,
    inputs: Mapping[str, Storage],
    sizes: Mapping[str, int] | None = None,
    *,
    seed: int = 0,
    eager: bool = False,
    times: int = 1,
) -> tuple[dict[str, Storage], tuple[EmuStats, ...]]:
    """(every output in storage form, the counts of each launch). `seed` and `eager` choose a schedule of the threads.

    times: how often the plan runs, on the same workspaces; the counts are those of the last time

    Outputs begin as NaN, each time, workspaces too, flags as zeros. An early launch touches nothing but constants before it has
    waited for the launches before. Raises EmuError when a kernel is at fault, PlanError for a CPU's source.
    """
    program = unit.plan.program
    size = program.sizes(sizes)
    syms = {f"len_{s.name}": (sizes or {})[s.name] for s in program.syms}
    memory = {name: _frozen(x) for name, x in inputs.items()}
    for b in buffers(unit.plan):
        if b.name not in memory:
            begin = 0.0 if b.role == "flags" else np.nan
            memory[b.name] = encode(np.full(evaluated(b.elements, syms), begin, np.float32), b.dtype)
    stats = list[EmuStats]()
    for _ in range(times):
        for o in program.outputs:
            memory[o][...] = encode(np.full(memory[o].shape, np.nan, np.float32), program.value(o).dtype)
        stats = [_launch(unit, k, memory, syms, seed, eager) for k in unit.kernels]
    shapes = {o: [size[a] for a in program.value(o).axes] for o in program.outputs}
    return {o: memory[o].reshape(shape) for o, shape in shapes.items()}, tuple(stats)


def _launch(
    unit: SourceUnit, k: object, memory: Mapping[str, Storage], syms: Mapping[str, int], seed: int, eager: bool
) -> EmuStats:
    """One launch; what it writes is in `memory`."""
    if not isinstance(k, GpuKernel):
        raise PlanError(f"{unit.plan.launches[0].name} is a CPU's kernel; the emulator runs those of GPUs")
    everything: list[Storage | TensorMap | int] = [
        *(_tensor_map(m, memory[m.value], syms) for m in k.maps),
        *(memory[b.name] for b in k.buffers),
        *(syms[s] for s in k.syms),
    ]
    touched = {*(b.name for b in k.buffers), *(m.value for m in k.maps)}
    late = [memory[name] for name in touched if k.early and not _is_constant(unit.plan.program, name)]
    return emulate(
        unit.text, k.name, (evaluated(k.blocks, syms),), (k.threads,), k.smem_bytes, everything,
        cluster=(k.cluster,), seed=seed, eager=eager, together=k.together, few=not k.resident, late=late,
    ).stats  # fmt: skip


def _tensor_map(m: Map, memory: Storage, syms: Mapping[str, int]) -> TensorMap:
    """The map as a launcher makes it."""
    rows, columns = evaluated(m.rows, syms), evaluated(m.columns, syms)
    swizzle = 16 << m.swizzle if m.swizzle else 0
    wide, row = m.box_columns, columns if m.pitch is None else evaluated(m.pitch, syms)
    further = [(m.panels, columns // wide, wide)] if m.panels else []  # (of a box, of the value, elements apart)
    further += [(1, evaluated(n, syms), evaluated(apart, syms)) for n, apart in m.outer]
    box, shape, strides = zip((wide, wide if m.panels else columns, 1), (m.box_rows, rows, row), *further, strict=True)
    return TensorMap(memory, box, swizzle, shape, tuple(x * memory.itemsize for x in strides[1:]))


def _is_constant(program: Program, buffer: str) -> bool:
    """Whether a buffer, which may be of partial states and no value, is written by nobody."""
    return any(v.name == buffer and v.constant for v in program.inputs)


def _frozen(x: Storage) -> Storage:
    """The array as the kernels get it: contiguous, and not to be written."""
    out = np.array(x, order="C")
    out.flags.writeable = False
    return out
