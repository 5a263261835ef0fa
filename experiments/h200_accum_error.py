"""How far off sums kept in f32, in f16, and in f16 promoted to f32 every p elements are, against float64, on a GPU.

    python experiments/h200_accum_error.py --out errors.jsonl

Operands are N(0,1) in f16, the product is 512 x 512 and stored in f32, so that only the sums err; three seeds. The kernels are
Emmy's. Beside them: torch's product of f32 operands, and of f16 operands, which rounds its output.
`--emulate` runs small ones on the emulator instead, which adds in f32 without a tensor core's truncation.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from emmy.codegen import gpu_build
from emmy.codegen.build import SourceUnit, source
from emmy.codegen.kernel import Int
from emmy.codegen.kernel_gpu import GpuKernel
from emmy.ir.expr import parse
from emmy.ir.program import SUM, Program, Reduce, Stage, Value
from emmy.ir.target import Target, load_target

KS = (256, 3840, 4096, 15360, 32768)
ATOMS = {
    "f32": "mma,16,8,16",
    "hybrid 16": "hybrid,16,8,16",
    "hybrid 32": "hybrid,16,8,32",
    "hybrid 64": "hybrid,16,8,64",
    "hybrid 128": "hybrid,16,8,128",
    "f16": "f16,16,8,16",
}
TILE = "k0/split(m,grid,64) k0/split(n,grid,64) k0/split(k,serial,128) k0/split(m,warp,32) k0/split(n,warp,32)"
STAGES = "k0/stage(A,cp_async,2) k0/stage(B,cp_async,2)"
Array = NDArray[np.generic]
Run = Callable[[SourceUnit, Array, Array], NDArray[np.float64]]


def program(m: int, n: int, k: int) -> Program:
    """C[m,n] in f32 of A[m,k] and B[n,k] in f16."""
    inputs = (Value("A", ("m", "k"), "f16"), Value("B", ("n", "k"), "f16"))
    stage = Stage("C", ("m", "n"), parse("A[m,k] * B[n,k]"), (Reduce("k", SUM),), "f32")
    return Program((("m", m), ("n", n), ("k", k)), inputs, (stage,), ("C",))


def errors(got: NDArray[np.float64], want: NDArray[np.float64]) -> tuple[float, float]:
    """(relative L2 error, largest error over the mean magnitude)."""
    off = got - want
    return float(np.linalg.norm(off) / np.linalg.norm(want)), float(np.abs(off).max() / np.abs(want).mean())


def on_gpu(target: Target) -> Run:
    from emmy.measure.cuda_memory import ZONE_BYTES, CudaBuffer
    from emmy.runtime.cuda_driver import Context
    from emmy.runtime.launcher import LoadedPlan

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


def on_emulator(unit: SourceUnit, a: Array, b: Array) -> NDArray[np.float64]:
    from emmy.codegen.emulator import emulate

    (kernel,) = unit.kernels
    assert isinstance(kernel, GpuKernel) and isinstance(kernel.blocks, Int)
    c = np.full((len(a), len(b)), np.nan, np.float32)
    given = {"A": np.ascontiguousarray(a), "B": np.ascontiguousarray(b), "C": c}
    arguments = [given[x.name] for x in kernel.buffers]
    emulate(unit.text, kernel.name, (kernel.blocks.value,), (kernel.threads,), kernel.smem_bytes, arguments)
    return c.astype(np.float64)


def by_torch(a: Array, b: Array) -> dict[str, NDArray[np.float64]]:
    """Products of f32 and of f16 operands by torch on the GPU; {} without one."""
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", default="h200")
    parser.add_argument("--emulate", action="store_true")
    args = parser.parse_args()
    target = load_target(args.target)
    size, ks, seeds, run = (64, (256, 512), 1, on_emulator) if args.emulate else (512, KS, 3, on_gpu(target))
    with args.out.open("w") as out:
        for k in ks:
            found: dict[str, list[tuple[float, float]]] = {}
            for seed in range(seeds):
                random = np.random.default_rng(1000 * seed + k)
                a, b = (random.standard_normal((size, k)).astype(np.float16) for _ in range(2))
                want = a.astype(np.float64) @ b.astype(np.float64).T
                for name, atom in ATOMS.items():
                    unit = source(program(size, size, k), f"{TILE} {STAGES} k0.C/atom({atom})", target)
                    found.setdefault(name, []).append(errors(run(unit, a, b), want))
                for name, got in by_torch(a, b).items():
                    found.setdefault(name, []).append(errors(got, want))
            means = {name: float(np.mean([l2 for l2, _ in e])) for name, e in found.items()}
            record = {"target": args.target, "k": k, "relative_l2": means}
            record["largest"] = {name: max(worst for _, worst in e) for name, e in found.items()}
            out.write(json.dumps(record) + "\n")
            out.flush()
            sys.stdout.write(f"K={k:6d}  " + "  ".join(f"{name} {x:.2e}" for name, x in means.items()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
