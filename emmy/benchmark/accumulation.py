"""How far off sums kept in f32, in f16, and in f16 promoted to f32 every p elements are, against float64, by K.

Operands are N(0,1) in f16, the product is stored in f32, so that only the sums err. The kernels are Emmy's, run on the card, or
on the emulator, which adds in f32 without a tensor core's truncation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emmy.codegen.build import SourceUnit, source
from emmy.codegen.kernel import Int
from emmy.codegen.kernel_gpu import GpuKernel
from emmy.errors import UsageError
from emmy.ir.atoms import ATOMS
from emmy.ir.expr import parse
from emmy.ir.program import SUM, Program, Reduce, Stage, Value
from emmy.ir.target import Target

KS = (256, 3840, 4096, 15360, 32768)
EMULATED_KS = (256, 512)
BLOCK_K = 128  # K is folded in blocks of so many, so that every promotion interval divides one
SUMS: dict[str, str] = {
    "f32": "mma,16,8,16",
    "hybrid 16": "hybrid,16,8,16",
    "hybrid 32": "hybrid,16,8,32",
    "hybrid 64": "hybrid,16,8,64",
    "hybrid 128": "hybrid,16,8,128",
    "f16": "f16,16,8,16",
}
_TILE = f"k0/split(m,grid,64) k0/split(n,grid,64) k0/split(k,serial,{BLOCK_K}) k0/split(m,warp,32) k0/split(n,warp,32)"
_STAGES = "k0/stage(A,cp_async,2) k0/stage(B,cp_async,2)"
Array = NDArray[np.generic]
Run = Callable[[SourceUnit, Array, Array], NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class SumError:
    """Sums over `k` elements kept as `sums` says: the relative L2 error, the mean over seeds, and the largest error over
    the mean magnitude, the worst of the seeds. where: the card, or the emulator."""

    k: int
    sums: str
    relative_l2: float
    largest: float
    size: int
    seeds: int
    where: str


def sum_errors(
    target: Target, ks: Sequence[int] = (), size: int = 0, seeds: int = 0, *, emulate: bool = False
) -> Iterator[SumError]:
    """The error of each way to keep sums, K by K; beside them torch's products where it is on the card.

    ks, size, seeds: (), 0 = as many as is usual: 512 x 512 and three seeds on a card, 64 x 64 and one on the emulator

    Raises UsageError for a CPU, for a card without such instructions, and for a K that blocks do not divide.
    """
    if target.is_cpu:
        raise UsageError(
            "the CPU target keeps sums in f32 alone: its atoms have no f16 sums to be off. Name a GPU; "
            "--emulate runs its kernels' text here: `emmy bench accum-error --gpu h200 --emulate`"
        )
    ks, size = tuple(ks) or (EMULATED_KS if emulate else KS), size or (64 if emulate else 512)
    seeds = seeds or (1 if emulate else 3)
    if odd := [n for n in ks if n < BLOCK_K or n % BLOCK_K] + [n for n in (size,) if n % 64]:
        raise UsageError(f"{odd[0]}: each K must be a multiple of {BLOCK_K}, the other sizes of 64")
    run, where = (_on_emulator, "emulator") if emulate else (_on_gpu(target), target.product)
    for k in ks:
        found = _of_k(target, k, size, seeds, run, with_torch=not emulate)
        for name, errors in found.items():
            l2, largest = float(np.mean([e[0] for e in errors])), max(e[1] for e in errors)
            yield SumError(k, name, l2, largest, size, seeds, where)


def _of_k(
    target: Target, k: int, size: int, seeds: int, run: Run, *, with_torch: bool
) -> Mapping[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in range(seeds):
        random = np.random.default_rng(1000 * seed + k)
        a, b = (random.standard_normal((size, k)).astype(np.float16) for _ in range(2))
        want = a.astype(np.float64) @ b.astype(np.float64).T
        for name, atom in SUMS.items():
            unit = source(_program(size, size, k), f"{_TILE} {_STAGES} k0.C/atom({atom})", target)
            found.setdefault(name, []).append(_errors(run(unit, a, b), want))
        for name, got in (_by_torch(a, b) if with_torch else {}).items():
            found.setdefault(name, []).append(_errors(got, want))
    return found


def _program(m: int, n: int, k: int) -> Program:
    """C[m,n] in f32 of A[m,k] and B[n,k] in f16."""
    inputs = (Value("A", ("m", "k"), "f16"), Value("B", ("n", "k"), "f16"))
    stage = Stage("C", ("m", "n"), parse("A[m,k] * B[n,k]"), (Reduce("k", SUM),), "f32")
    return Program((("m", m), ("n", n), ("k", k)), inputs, (stage,), ("C",))


def _errors(got: NDArray[np.float64], want: NDArray[np.float64]) -> tuple[float, float]:
    """(relative L2 error, largest error over the mean magnitude)."""
    off = got - want
    return float(np.linalg.norm(off) / np.linalg.norm(want)), float(np.abs(off).max() / np.abs(want).mean())


def _on_gpu(target: Target) -> Run:
    """Runs on the target's card. Raises NoSuchDevice without one."""
    from emmy.codegen import gpu_build
    from emmy.measure.cuda import find_gpu
    from emmy.measure.cuda_memory import ZONE_BYTES, CudaBuffer
    from emmy.runtime.cuda_driver import Context
    from emmy.runtime.launcher import LoadedPlan

    find_gpu(target)
    context = Context()

    def run(unit: SourceUnit, a: Array, b: Array) -> NDArray[np.float64]:
        m, n = len(a), len(b)
        held = {
            "A": CudaBuffer(context, a.shape, "f16", ZONE_BYTES),
            "B": CudaBuffer(context, b.shape, "f16", ZONE_BYTES),
            "C": CudaBuffer(context, (m, n), "f32", ZONE_BYTES),
        }
        held["A"].write(a)
        held["B"].write(b)
        with LoadedPlan(gpu_build.build(unit, target).path, "cuda") as plan:
            plan.run({name: x.address for name, x in held.items()}, stream=context.stream)
            context.synchronize()
        return held["C"].read().astype(np.float64)

    return run


def _on_emulator(unit: SourceUnit, a: Array, b: Array) -> NDArray[np.float64]:
    from emmy.codegen.emulator import emulate

    (kernel,) = unit.kernels
    assert isinstance(kernel, GpuKernel) and isinstance(kernel.blocks, Int)
    c = np.full((len(a), len(b)), np.nan, np.float32)
    given = {"A": np.ascontiguousarray(a), "B": np.ascontiguousarray(b), "C": c}
    arguments = [given[x.name] for x in kernel.buffers]
    emulate(unit.text, kernel.name, (kernel.blocks.value,), (kernel.threads,), kernel.smem_bytes, arguments)
    return c.astype(np.float64)


def _by_torch(a: Array, b: Array) -> dict[str, NDArray[np.float64]]:
    """Products of f32 and of f16 operands by torch on the GPU, the latter rounded to f16 when stored; {} without one."""
    try:
        import torch
    except ImportError:
        return {}
    if not torch.cuda.is_available():
        return {}
    x, y = torch.from_numpy(a).cuda(), torch.from_numpy(b).cuda()
    return {
        "torch f32 operands": (x.float() @ y.float().t()).double().cpu().numpy(),
        "torch f16 operands": (x @ y.t()).double().cpu().numpy(),
    }


assert {atom.split(",")[0] for atom in SUMS.values()} <= set(ATOMS)
