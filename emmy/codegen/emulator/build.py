"""Kernel text to something this machine can run: the emulator's core, built once, and one library for each kernel.

The text is compiled as it is; in front of it stand the helpers' other bodies instead of its own prelude. Everything is cached
by what determines it. Knows no launch.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
from functools import cache
from importlib import resources
from pathlib import Path

from emmy.codegen.files import appearing, locked
from emmy.codegen.ptx import twins, used
from emmy.config import cache_dir, cxx_compiler
from emmy.errors import CompileError
from emmy.ir.cpu_detect import detect

_CORE = ("core.cpp", "race.cpp", "memory.cpp", "barriers.cpp", "copies.cpp", "wgmma.cpp")
_CORE_FLAGS = ("-std=c++20", "-O2", "-march=native", "-fPIC", "-shared")
_FLAGS = ("-std=c++20", "-O1", "-w", "-fPIC", "-fno-strict-aliasing")
_KERNEL = re.compile(r"\bEMMY_KERNEL\([^)]*\)\s*(?:EMMY_CLUSTER\([^)]*\)\s*)?(\w+)\s*\(")


def kernel_names(text: str) -> tuple[str, ...]:
    """Names of the kernels a source defines, in its order."""
    return tuple(_KERNEL.findall(text))


def kernel_library(text: str, kernel: str) -> ctypes.CDLL:
    """A library with `emmy_emu_entry` and `emmy_emu_arity` of one kernel of the source.

    Raises CompileError when the text names an unknown helper or g++ rejects it; its line numbers are those of the text.
    """
    if kernel not in kernel_names(text):
        raise CompileError(f"the source has no kernel {kernel!r}; it has {', '.join(kernel_names(text)) or 'none'}")
    unit = "\n".join(
        (
            "#define EMMY_EMU",
            '#include "emmy_emu.h"',
            twins(used(text)),
            '#line 1 "kernel"',
            text,
            f"EMMY_EMU_EXPORT({kernel})",
        )
    )
    folder = _folder()
    path = folder / "kernels" / f"{_digest(unit)}.so"
    if not path.exists():
        with locked(folder / "locks" / path.name[:2]):
            if not path.exists():
                with appearing(path) as new:
                    _run((cxx_compiler(), *_FLAGS, "-shared", f"-I{_header()}", "-x", "c++", "-", "-x", "none",
                          str(core_path()), "-o", str(new)), unit)  # fmt: skip
    return ctypes.CDLL(str(path))


@cache
def core_path() -> Path:
    """The emulator's core as a shared library; the first call on a machine takes some seconds."""
    path = _folder() / "core.so"
    with locked(_folder() / "locks" / "core"):
        if not path.exists():
            sources = [str(_cpp() / name) for name in _CORE]
            with appearing(path) as new:
                _run((cxx_compiler(), *_CORE_FLAGS, *sources, "-o", str(new)))
    return path


@cache
def _header() -> Path:
    """A folder with the header kernels see, and its precompiled form: half of what a kernel would take to compile."""
    folder = _folder() / "include"
    compiled = folder / "emmy_emu.h.gch"
    with locked(_folder() / "locks" / "header"):
        if not compiled.exists():
            folder.mkdir(exist_ok=True)
            (folder / "emmy_emu.h").write_text((_cpp() / "emmy_emu.h").read_text())
            with appearing(compiled) as new:
                _run((cxx_compiler(), *_FLAGS, "-x", "c++-header", str(folder / "emmy_emu.h"), "-o", str(new)))
    return folder


@cache
def _folder() -> Path:
    """Where everything built from this core, by this compiler, for this processor is kept."""
    version = subprocess.run((cxx_compiler(), "--version"), capture_output=True, text=True, check=False).stdout
    sources = [p.read_text() for p in sorted(_cpp().iterdir()) if p.suffix in (".cpp", ".h")]
    cpu = " ".join(sorted(detect().features))
    return cache_dir() / "emulator" / _digest("\n".join((version, cpu, *_CORE_FLAGS, *_FLAGS, *sources)))[:16]


def _cpp() -> Path:
    return Path(str(resources.files("emmy.codegen.emulator"))) / "cpp"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _run(command: tuple[str, ...], stdin: str = "") -> None:
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise CompileError(
            f"{command[0]} is not installed; the emulator compiles kernels with it. Install g++."
        ) from None
    if done.returncode:
        raise CompileError(f"{command[0]} rejected the source:\n{done.stderr[:4000]}")
