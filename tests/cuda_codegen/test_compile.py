"""NVRTC takes the text for every architecture, and tiles that are meant to be fast keep their numbers in registers."""

from __future__ import annotations

import pytest

from emmy.codegen.kernel_gpu import GpuKernel
from emmy.codegen.nvrtc import compile_cubin
from emmy.ir.gpu import thread_registers
from emmy.ir.moves.atom import mnk_axes
from emmy.ir.target import load_target
from tests.cuda_codegen.emulated import GPUS, unit

F16, BF16, F32 = (
    "matmul:512x4096x3840:f16:nk",
    "matmul:512x4096x3840:bf16:bias,gelu_tanh,residual",
    "matmul:512x512x512:f32",
)
TILES = {
    "128x128": (F16, "128,128,32,64,64", "cp_async,3", "mma,16,8,16", True),
    "128x256": (F16, "128,256,32,64,64", "cp_async,3", "mma,16,8,16", True),
    "64x128": (BF16, "64,128,64,32,32", "cp_async,3", "mma,16,8,16", False),
    "hybrid": (F16, "128,128,64,64,32", "cp_async,3", "hybrid,16,8,64", True),
    "simt": (F32, "64,128,16,32,64", "cp_async,3", "simt,32,64,4", False),
}


def schedule(tile: str, transport: str, atom: str, pipeline: bool) -> str:
    m, n, k, wm, wn = tile.split(",")
    loops = (
        f"k0/split(m,grid,{m}) k0/split(n,grid,{n}) k0/split(k,serial,{k}) k0/split(m,warp,{wm}) k0/split(n,warp,{wn})"
    )
    rings = f"k0/stage(A,{transport}) k0/stage(B,{transport}) k0.C/atom({atom})"
    return f"{loops} {rings}" + (" k0.C/pipeline()" if pipeline else "")


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", TILES)
def test_a_tile_compiles_without_spills_and_near_its_estimate(name: str, gpu: str):
    op, tile, transport, atom, pipeline = TILES[name]
    target = load_target(gpu)
    if target.can("tma") and name != "simt":
        transport = "tma,3"
    u = unit(op, schedule(tile, transport, atom, pipeline), gpu)
    cubin = compile_cubin(u.text, target.arch)
    assert cubin.spill_bytes == 0 and not cubin.warnings
    launch = u.plan.launches[0]
    work = launch.tile.work("C")
    estimate = thread_registers(u.plan, launch, work, work.atoms[0], mnk_axes(u.plan.program.stage("C")))
    assert estimate - 80 <= cubin.kernels[0].n_regs <= estimate + 64
    (k,) = u.kernels
    assert isinstance(k, GpuKernel) and cubin.kernels[0].max_threads == k.threads
