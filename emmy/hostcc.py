"""The host compiler and its cache on disk: text in, shared library out. Knows neither plans nor what the text does.

A library is kept under the digest of everything that decides it: text, language, flags, compiler version, machine.
Beside it lies a note with its digest: a library that a full disk or a power cut left damaged is compiled again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from emmy import config
from emmy.errors import CompileError, EmmyError

Language = Literal["c", "c++"]
Facts = Mapping[str, float]
TIMEOUT_S = 60.0
# What a compiler (LC_ALL=C) says when the machine fails it, whatever the source.
_MACHINE = re.compile(
    r"No space left on device|Disk quota exceeded|File too large|file size limit|Read-only file system|Input/output error"
    r"|Too many open files|Permission denied|cannot execute|installation problem|error while loading shared libraries"
)


class BrokenToolchain(EmmyError):
    """The machine, not the source, keeps the compiler from its work: a full disk, a missing part. No candidate is to blame."""


class CompilerKilled(CompileError):
    """The compiler was killed from outside, or memory ran out."""


@dataclass(frozen=True, slots=True)
class Library:
    """A shared library on disk. `static`: what was read off its assembly. `seconds` is 0 when the cache had it."""

    path: Path
    diagnostics: str
    static: Facts
    seconds: float


@cache
def version(compiler: str) -> str:
    """The compiler by name, version and machine, such as `gcc 12.2.0 x86_64-linux-gnu`. Raises CompileError without one."""
    if shutil.which(compiler) is None:
        raise CompileError(
            f"no compiler {compiler!r} on the PATH. Install it (Debian: apt install gcc g++), or name another with "
            f"EMMY_CC for C and EMMY_CXX for C++"
        )
    shown = [_run([compiler, option], 10).stdout.strip() for option in ("-dumpfullversion", "-dumpmachine")]
    if not all(shown):
        raise CompileError(f"{compiler!r} does not say which compiler it is; EMMY_CC and EMMY_CXX need gcc or clang")
    return " ".join([Path(compiler).name, *shown])


def compile_library(
    text: str,
    language: Language,
    flags: tuple[str, ...],
    inspect: Callable[[str], Facts] | None = None,
    timeout_s: float = TIMEOUT_S,
    *,
    fresh: bool = False,
) -> Library:
    """The library that `text` compiles to, from the cache when it is there. `inspect` reads facts off the assembly.

    fresh: compiled now, in the place of what the cache has

    Raises CompileError with the compiler's diagnostics, or when it takes longer than `timeout_s`; BrokenToolchain when
    the machine is at fault.
    """
    compiler = config.c_compiler() if language == "c" else config.cxx_compiler()
    identity = "\0".join((text, language, *flags, version(compiler), platform.machine(), str(inspect is not None)))
    key = hashlib.sha256(identity.encode()).hexdigest()
    folder = config.cache_dir() / "lib" / key[:2]
    library, note = folder / f"{key}.so", folder / f"{key}.json"
    try:
        if not fresh and (kept := _kept(library, note)) is not None:
            return kept
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{key}.lock"):
            if not fresh and (kept := _kept(library, note)) is not None:  # another process was first
                return kept
            return _compile(text, language, (compiler, *flags), library, note, inspect, timeout_s)
    except OSError as e:
        raise BrokenToolchain(
            f"{folder}: cannot keep compiled kernels: {e.strerror}. Free space, or name another folder with EMMY_CACHE."
        ) from e


def _kept(library: Path, note: Path) -> Library | None:
    """The library as the cache has it; None when it is not there, or not what was put there."""
    try:
        raw = json.loads(note.read_text(encoding="utf-8"))
        if raw["sha256"] != _digest(library.read_bytes()):
            return None
        facts = {str(name): float(value) for name, value in raw["facts"].items()}
        return Library(library, str(raw["diagnostics"]), facts, 0.0)
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _compile(
    text: str,
    language: Language,
    command: tuple[str, ...],
    library: Path,
    note: Path,
    inspect: Callable[[str], Facts] | None,
    timeout_s: float,
) -> Library:
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="new-") as folder:
        source, assembly, made = (
            Path(folder) / name for name in (f"plan.{'c' if language == 'c' else 'cpp'}", "plan.s", "plan.so")
        )
        source.write_text(text, encoding="utf-8")
        first = _run([*command, "-S", str(source), "-o", str(assembly)], timeout_s)
        second = _run([*command, "-shared", str(assembly), "-o", str(made), "-lm"], timeout_s)
        facts = dict(inspect(assembly.read_text(encoding="utf-8"))) if inspect else {}
        facts["library_bytes"] = float(made.stat().st_size)
        described = Path(folder) / "note"
        diagnostics = (first.stderr + second.stderr).replace(str(source), source.name)
        described.write_text(
            json.dumps({"diagnostics": diagnostics, "facts": facts, "sha256": _digest(made.read_bytes())}),
            encoding="utf-8",
        )
        os.replace(made, library)
        os.replace(described, note)
    return Library(library, diagnostics, facts, time.monotonic() - start)


def _run(command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    what = f"{Path(command[0]).name} {' '.join(w for w in command[1:] if w.startswith('-'))}"
    try:
        # A group of its own: Ctrl-C in the terminal must not kill the compiler and make its candidate look broken.
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=config.child_env(LC_ALL="C"),
            process_group=0,
        )
    except subprocess.TimeoutExpired:
        raise CompileError(
            f"{what}: not done after {timeout_s:g} s; this source is too large, try a smaller tile or unroll"
        ) from None
    if done.returncode:
        shown = "\n".join(done.stderr.splitlines()[:20])
        if _MACHINE.search(done.stderr):
            raise BrokenToolchain(
                f"{what}: exit code {done.returncode}\n{shown}\nMend that, then give the same command again."
            )
        if done.returncode == -signal.SIGKILL or "Killed signal terminated program" in done.stderr:
            raise CompilerKilled(f"{what}: the compiler was killed from outside, or memory ran out\n{shown}")
        raise CompileError(f"{what}: exit code {done.returncode}\n{shown}")
    return done


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the lock goes when the process does."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
