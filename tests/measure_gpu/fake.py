"""A machine with a GPU that is not there: stand-ins for NVIDIA's libraries, and plans whose kernels they pretend to run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from uuid import UUID

from emmy.codegen.files import appearing
from emmy.errors import CompileError, IllegalMove
from emmy.ir.ops import parse_op
from emmy.measure.compile_pool import Builder, Built
from emmy.records import Candidate
from emmy.runtime.cuda_driver import Gpu

HERE = Path(__file__).parent
OP = "matmul:33x17x9:f32"


def libraries(folder: Path) -> Path:
    """A folder with the stand-ins, to be named by LD_LIBRARY_PATH of a process that is about to start."""
    for source, name in (("fake_cuda.c", "libcuda.so.1"), ("fake_nvml.c", "libnvidia-ml.so.1")):
        made = folder / name
        if not made.exists():
            command = [
                "gcc",
                "-O1",
                "-w",
                "-shared",
                "-fPIC",
                f"-Wl,-soname,{name}",
                str(HERE / source),
                "-o",
                str(made),
                "-lm",
            ]
            subprocess.run(command, check=True)
    return folder


def environment(folder: Path, **more: str) -> dict[str, str]:
    """The environment of a process that is to see the stand-ins."""
    path = os.pathsep.join(p for p in (str(libraries(folder)), os.environ.get("LD_LIBRARY_PATH", "")) if p)
    return {**os.environ, "LD_LIBRARY_PATH": path, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **more}


def run(script: str, folder: Path, **more: str) -> str:
    """What a Python script prints that sees the stand-ins."""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment(folder, **more), check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def plan(kernels: str, lines: str = "") -> bytes:
    """A plan file of the lines between its first and its last; `kernels` is what the stand-in takes for a cubin."""
    cubin = kernels.encode()
    return f"emmy-gpu-plan 2\n{lines}cubin {len(cubin)}\n".encode() + cubin


def matmul_plan(behaviour: str, m: int, n: int, k: int, us: float = 10.0) -> bytes:
    """C = A @ B in one launch that behaves as named."""
    lines = (
        f"argument A 4 {m * k}\nargument B 4 {k * n}\nargument C 4 {m * n}\n"
        f"kernel k0 128 1024 {m}\npass A\npass B\npass C\n"
    )
    return plan(f"k0 {behaviour} {m} {n} {k} {us}\n", lines)


def gpu(index: int = 0, product: str = "NVIDIA GeForce RTX 4090") -> Gpu:
    """What the stand-in's `gpus()` says of its GPU."""
    uuid = f"GPU-{UUID(bytes=bytes(i + 16 * index for i in range(16)))}"
    return Gpu(index, product, uuid, (8, 9), 24 << 30, 1 << 20, 128, "13.0")


def builder(folder: Path) -> Builder:
    """Makes a plan of the kernel that a schedule names: a behaviour and the microseconds that it takes, `right 10`."""

    def build(candidate: Candidate) -> Built:
        behaviour, us, *_ = [*candidate.schedule.split(), "10"]
        if behaviour == "refused":
            raise IllegalMove(0, "k0/split(m,grid,0)", "a step of 0 makes no progress; allowed 1..33")
        if behaviour == "spills":
            raise CompileError("ptxas: spills 40 bytes a thread at 255 registers")
        sizes = parse_op(candidate.op).program().sizes()
        path = folder / f"{behaviour}-{us}-{'x'.join(map(str, sizes.values()))}.plan"
        with appearing(path) as new:
            new.write_bytes(matmul_plan(behaviour, sizes["m"], sizes["n"], sizes["k"], float(us)))
        return Built(path, f"digest of {behaviour}", {"registers": 40.0})

    return build
