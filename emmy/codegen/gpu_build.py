"""A GPU plan's source -> a plan file on disk, with facts read off the cubin. Needs neither a GPU nor a CUDA toolkit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from emmy.codegen.build import SourceUnit
from emmy.codegen.cubin import KernelFacts
from emmy.codegen.files import appearing
from emmy.codegen.gpu_plan import gpu_plan
from emmy.codegen.kernel_gpu import GpuKernel
from emmy.codegen.nvrtc import Cubin, compile_cubin
from emmy.config import cache_dir
from emmy.errors import CompileError
from emmy.ir.target import Target

# Instructions counted over the whole cubin, and in the loop with the most matrix instructions.
_COUNTED = {
    "mma": ("HMMA", "HGMMA"),
    "fma": ("FFMA", "FFMA2", "HFMA2"),
    "load_global": ("LDG", "LDGSTS", "UBLKCP", "UTMALDG"),
    "load_shared": ("LDS", "LDSM"),
    "store_shared": ("STS", "STSM"),
    "barrier": ("BAR", "SYNCS"),
}


@dataclass(frozen=True, slots=True)
class GpuLibrary:
    """A plan file. `static`: what was read off the cubin and the compiler's log."""

    path: Path
    static: Mapping[str, float]


def build(unit: SourceUnit, target: Target) -> GpuLibrary:
    """The plan file of a GPU plan's source. Raises CompileError; also for code that spills, or that ptxas says is slow.

    The file is kept under the digest of its contents, the cubin under that of its source and compiler.
    """
    kernels = tuple(k for k in unit.kernels if isinstance(k, GpuKernel))
    assert len(kernels) == len(unit.kernels)
    cubin = compile_cubin(unit.text, target.arch)
    if cubin.refusal:
        raise CompileError(f"ptxas: {cubin.refusal}")
    path = kept(gpu_plan(unit.plan, kernels, cubin.data), ".plan")
    return GpuLibrary(path, facts(kernels, cubin))


def kept(data: bytes, suffix: str) -> Path:
    """A file in the cache that holds these bytes, under their digest."""
    digest = hashlib.sha256(data).hexdigest()
    path = cache_dir() / "plans" / digest[:2] / f"{digest}{suffix}"
    if not path.exists() or path.read_bytes() != data:
        with appearing(path) as new:
            new.write_bytes(data)
    return path


def facts(kernels: tuple[GpuKernel, ...], cubin: Cubin) -> dict[str, float]:
    """Numbers of a plan: of the launch with the most instructions, unless they are sums; `loop_` is its main loop."""
    main = max(cubin.kernels, key=lambda k: (_count(k.mix, "mma"), sum(k.mix.values())))
    launch = next(k for k in kernels if k.name == main.name)
    out = {
        "registers": float(main.n_regs),
        "stack_bytes": float(main.stack_bytes),
        "spill_bytes": float(cubin.spill_bytes),
        "smem_bytes": float(launch.smem_bytes + main.smem_static_bytes),
        "threads": float(launch.threads),
        "launches": float(len(kernels)),
        "code_bytes": float(sum(k.code_bytes for k in cubin.kernels)),
        "instructions": float(sum(sum(k.mix.values()) for k in cubin.kernels)),
    }
    out |= {f"sass_{name}": _count(main.mix, name) for name in _COUNTED}
    return out | _loop_facts(main)


def _loop_facts(main: KernelFacts) -> dict[str, float]:
    loop = main.main_loop
    if loop is None:
        return {}
    counts = {f"loop_{name}": _count(loop.mix, name) for name in _COUNTED}
    return {"loop_instructions": float(loop.n_instrs), "loop_issue_cycles": float(loop.issue_cycles), **counts}


def _count(mix: Mapping[str, int], name: str) -> float:
    return float(sum(mix.get(m, 0) for m in _COUNTED[name]))
