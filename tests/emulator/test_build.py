"""How kernels and the emulator itself are built and kept."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from emmy.codegen.emulator import build, run
from emmy.codegen.emulator.build import kernel_library, kernel_names
from emmy.errors import CompileError
from tests.emulator.cases import CASES


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Nothing that was built so far is known to this process; afterwards, nothing of what the test built."""
    found = (build._folder, build.core_path, build._header, run._core)
    for f in found:
        f.cache_clear()
    yield monkeypatch
    for f in found:
        f.cache_clear()


def test_kernels_are_found_in_a_source_with_and_without_a_cluster() -> None:
    text = "EMMY_KERNEL(128, 1) one(int x) {}\nEMMY_KERNEL(64, 2) EMMY_CLUSTER(2, 1, 1)\n  two() {}"
    assert kernel_names(text) == ("one", "two")


def test_a_kernel_is_compiled_once() -> None:
    source = CASES["rms_norm"].source()
    first, again = kernel_library(source, "rms_norm"), kernel_library(source, "rms_norm")
    assert first._name == again._name
    changed = kernel_library(source.replace("1024.f", "1023.f"), "rms_norm")
    assert changed._name != first._name
    assert Path(changed._name).exists()


def test_without_a_compiler_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    CASES["rms_norm"].run()  # the core is there, and only a kernel is to be compiled
    monkeypatch.setattr(build, "cxx_compiler", lambda: "no-such-compiler")
    with pytest.raises(CompileError, match="no-such-compiler is not installed"):
        kernel_library(f"{CASES['ring'].source()}// {uuid.uuid4()}", "ring")


@pytest.mark.slow
def test_fibers_of_the_c_library_do_too(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh.setenv("EMMY_CACHE", str(tmp_path))
    fresh.setattr(build, "_CORE_FLAGS", (*build._CORE_FLAGS, "-DEMMY_EMU_UCONTEXT"))
    for name in ("ring", "multicast", "wgmma_ring"):
        CASES[name].run(seed=5)
    case = CASES["ring"]
    with pytest.raises(Exception, match="race"):
        case.run(case.kernel.replace("    emmy_syncthreads();\n", ""))
