"""CUDA source to cubin with NVRTC, on any machine: no GPU, no driver, no CUDA toolkit. Knows no kernel.

Cubins are cached on disk by everything that determines them. The wheels are imported when the first compilation misses the
cache; NVRTC lets the interpreter's lock go, so a pool of threads compiles on every core.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType

from emmy.codegen.cubin import KernelFacts, read_cubin
from emmy.codegen.files import appearing, locked
from emmy.codegen.ptx import ARCHS
from emmy.config import cache_dir
from emmy.errors import CompileError

_FORMAT = 1
_OPTIONS = ("--std=c++17", "--ptxas-options=-v")
_SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
# C75xx: ptxas serialises wgmma or ignores setmaxnreg. Such a kernel runs, and is no candidate: measured 2 times slower.
_BAD = re.compile(r"\(C75\d\d\)|setmaxnreg ignored|serialized")


@dataclass(frozen=True)
class Cubin:
    """A compiled source. `log` is what NVRTC and ptxas said; `compile_s` is 0 when it came from the cache."""

    data: bytes
    arch: str
    log: str
    compile_s: float

    @cached_property
    def kernels(self) -> tuple[KernelFacts, ...]:
        """Static facts of each kernel."""
        return read_cubin(self.data)

    @property
    def spill_bytes(self) -> int:
        """Bytes a thread spills to local memory, stores and loads together, in the worst kernel."""
        return max((int(stores) + int(loads) for _, stores, loads in _SPILL.findall(self.log)), default=0)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Lines of the log that say the code is not what was asked for."""
        return tuple(line.strip() for line in self.log.splitlines() if _BAD.search(line))

    @property
    def refusal(self) -> str | None:
        """Why this code is not worth running, or None."""
        if self.warnings:
            return self.warnings[0]
        if self.spill_bytes:
            registers = max(int(n) for n in _USED.findall(self.log))
            return f"spills {self.spill_bytes} bytes a thread at {registers} registers"
        return None


def compile_cubin(text: str, arch: str, options: tuple[str, ...] = (), *, fresh: bool = False) -> Cubin:
    """The cubin of a header-free CUDA C++ source for "sm_90a" and the like, from the cache when it is there.

    fresh: compiled now, beside the cache, to see whether the same comes out

    Raises CompileError with the compiler's diagnostics, or when the compiler is not installed.
    """
    if arch not in ARCHS:
        raise CompileError(f"architecture {arch!r} is not supported. Supported are {', '.join(ARCHS)}.")
    flags = (f"--gpu-architecture={arch}", *_OPTIONS, *options)
    if fresh:
        nvrtc_version()  # raises CompileError without a compiler
        return _fresh(text, arch, flags)
    key = "\n".join((str(_FORMAT), nvrtc_version(), *flags, text))
    digest = hashlib.sha256(key.encode()).hexdigest()
    folder = cache_dir() / "nvrtc"
    path = folder / digest[:2] / digest
    if (known := _read(path, arch)) is not None:
        return known
    with locked(folder / "locks" / digest[:2]):
        if (known := _read(path, arch)) is not None:  # another process was first
            return known
        made = _fresh(text, arch, flags)
        _write(path, made)
    return made


def _fresh(text: str, arch: str, flags: tuple[str, ...]) -> Cubin:
    began = time.perf_counter()
    data, log = _compile(text, flags)
    return Cubin(data, arch, log, time.perf_counter() - began)


def compile_many(jobs: Iterable[tuple[str, str]], workers: int | None = None) -> Iterator[Cubin | CompileError]:
    """The cubin of each (text, arch), or why there is none, in the order given; `workers` threads, one a core by default."""

    def one(job: tuple[str, str]) -> Cubin | CompileError:
        try:
            return compile_cubin(*job)
        except CompileError as e:
            return e

    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0)), "nvrtc") as pool:
        yield from pool.map(one, jobs)


@cache
def nvrtc_version() -> str:
    """Version of the compiler, such as "13.0". Raises CompileError when it is not installed."""
    nvrtc = _nvrtc()
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as e:  # the bindings look for the library at the first call
        raise CompileError(f"NVRTC cannot be loaded: {e}. {_INSTALL}") from None
    _check(status, "nvrtcVersion")
    return f"{major}.{minor}"


def compiled_archs() -> tuple[str, ...]:
    """Emmy's architectures that the installed NVRTC compiles for. Raises CompileError when it is not installed."""
    nvrtc_version()
    status, numbers = _nvrtc().nvrtcGetSupportedArchs()
    _check(status, "nvrtcGetSupportedArchs")
    return tuple(arch for arch in ARCHS if int(arch.removeprefix("sm_").rstrip("a")) in numbers)


_INSTALL = "Install it with `pip install 'emmy[cuda]'`; it needs neither a GPU nor a CUDA toolkit."


def _nvrtc() -> ModuleType:
    try:
        return importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as e:
        raise CompileError(f"the CUDA compiler is not installed: {e}. {_INSTALL}") from None


def _check(status: int, call: str) -> None:
    if int(status) != 0:
        raise CompileError(f"{call} failed: NVRTC status {status!r}")


def _compile(text: str, flags: tuple[str, ...]) -> tuple[bytes, str]:
    nvrtc = _nvrtc()
    status, program = nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, [], [])
    _check(status, "nvrtcCreateProgram")
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [f.encode() for f in flags])
        log = _fetch(nvrtc, "ProgramLog", program).rstrip(b"\0").decode()
        if int(status) != 0:
            raise CompileError(f"NVRTC rejected the source ({' '.join(flags)}):\n{log.strip()}")
        return _fetch(nvrtc, "CUBIN", program), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _fetch(nvrtc: ModuleType, what: str, program: object) -> bytes:
    status, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
    _check(status, f"nvrtcGet{what}Size")
    out = b" " * int(size)  # the binding writes into it
    (status,) = getattr(nvrtc, f"nvrtcGet{what}")(program, out)
    _check(status, f"nvrtcGet{what}")
    return out


# ---------------------------------------------------------------- the cache: a line of JSON, then the cubin
def _read(path: Path, arch: str) -> Cubin | None:
    """The cubin kept there; None when there is none, or not what was written."""
    try:
        head, _, data = path.read_bytes().partition(b"\n")
        said = json.loads(head)
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(said, dict) or said.get("sha256") != hashlib.sha256(data).hexdigest():
        return None
    return Cubin(data, arch, str(said.get("log", "")), 0.0)


def _write(path: Path, cubin: Cubin) -> None:
    head = {"arch": cubin.arch, "log": cubin.log, "sha256": hashlib.sha256(cubin.data).hexdigest()}
    with appearing(path) as new:
        new.write_bytes(json.dumps(head).encode() + b"\n" + cubin.data)
