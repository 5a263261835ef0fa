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
) -> tuple[dict[str, Storage], tuple[EmuStats, ...]]:
    """(every output in storage form, the counts of each launch). `seed` and `eager` choose a schedule of the threads.

    Outputs and workspaces begin as NaN. An early launch touches nothing but constants before it has waited for the
    launches before. Raises EmuError when a kernel is at fault, PlanError for a CPU's source.
    """
    program = unit.plan.program
    size = program.sizes(sizes)
    syms = {f"len_{s.name}": (sizes or {})[s.name] for s in program.syms}
    memory = {name: _frozen(x) for name, x in inputs.items()}
    stats = []
    for b in buffers(unit.plan):
        if b.name not in memory:
            memory[b.name] = encode(np.full(evaluated(b.elements, syms), np.nan, np.float32), b.dtype)
    for k in unit.kernels:
        if not isinstance(k, GpuKernel):
            raise PlanError(f"{k.name} is a CPU's kernel; the emulator runs those of GPUs")
        args = [_tensor_map(m, memory[m.value], syms) for m in k.maps]
        everything: list[Storage | TensorMap | int] = [
            *args,
            *(memory[b.name] for b in k.buffers),
            *(syms[s] for s in k.syms),
        ]
        touched = {*(b.name for b in k.buffers), *(m.value for m in k.maps)}
        late = [memory[name] for name in touched if k.early and not _is_constant(program, name)]
        result = emulate(
            unit.text, k.name, (evaluated(k.blocks, syms),), (k.threads,), k.smem_bytes, everything,
            cluster=(k.cluster,), seed=seed, eager=eager, late=late,
        )  # fmt: skip
        stats.append(result.stats)
    shapes = {o: [size[a] for a in program.value(o).axes] for o in program.outputs}
    return {o: memory[o].reshape(shape) for o, shape in shapes.items()}, tuple(stats)


def _tensor_map(m: Map, memory: Storage, syms: Mapping[str, int]) -> TensorMap:
    """The map as a launcher makes it."""
    rows, columns = evaluated(m.rows, syms), evaluated(m.columns, syms)
    swizzle = 16 << m.swizzle if m.swizzle else 0
    wide, row = m.box_columns, columns * memory.itemsize
    if not m.panels:
        return TensorMap(memory, (wide, m.box_rows), swizzle, (columns, rows), (row,))
    shape, strides = (wide, rows, columns // wide), (row, wide * memory.itemsize)
    return TensorMap(memory, (wide, m.box_rows, m.panels), swizzle, shape, strides)


def _is_constant(program: Program, buffer: str) -> bool:
    """Whether a buffer, which may be of partial states and no value, is written by nobody."""
    return any(v.name == buffer and v.constant for v in program.inputs)


def _frozen(x: Storage) -> Storage:
    """The array as the kernels get it: contiguous, and not to be written."""
    out = np.array(x, order="C")
    out.flags.writeable = False
    return out
