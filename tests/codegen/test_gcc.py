"""Building: the cache on disk, what a compiler's failure looks like, and facts read off the assembly."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from emmy import hostcc
from emmy.codegen import gcc
from emmy.codegen.build import SourceUnit, source
from emmy.errors import CompileError
from emmy.ir.ops import parse_op
from emmy.ir.target import load_target
from emmy.measure.compile_pool import CompilePool, NotBuilt, builder
from emmy.records import Candidate

PORTABLE = load_target("cpu-portable")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache of compiled libraries."""
    monkeypatch.setenv("EMMY_CACHE", str(tmp_path / "cache"))
    hostcc.version.cache_clear()
    yield tmp_path / "cache"
    hostcc.version.cache_clear()


def unit(schedule: str = "") -> SourceUnit:
    return source(parse_op("matmul:4x8x8:f32"), schedule, PORTABLE)


def test_the_second_build_comes_from_the_cache_with_the_same_facts() -> None:
    first, second = gcc.build(unit(), PORTABLE), gcc.build(unit(), PORTABLE)
    assert first.seconds > 0 and second.seconds == 0
    assert first.path == second.path and first.path.is_file()
    assert first.static == second.static


def test_another_instruction_set_is_another_library(cache: Path) -> None:
    narrow = gcc.build(unit(), PORTABLE)
    assert "-mavx2" in gcc.flags(replace(PORTABLE, capabilities=PORTABLE.capabilities | {"avx2"}))
    wide = hostcc.compile_library(unit().text, "c", (*gcc.flags(PORTABLE), "-DOTHER"))
    assert narrow.path != wide.path


def test_facts_count_multiply_adds_and_code() -> None:
    atom = gcc.build(unit("k0.C/atom(fma,4,8,1,4)"), PORTABLE).static
    assert atom["asm_instructions"] > 100 and atom["library_bytes"] > 1000
    text = "f:\n\tvmovups\t(%rax), %zmm1\n\tvfmadd231ps\t%zmm1, %zmm2, %zmm3\n\tvmovaps\t%zmm3, -64(%rsp)\n\taddq\t$1, %rax\n\tret\n"
    want = {"asm_instructions": 5.0, "asm_fma": 1.0, "asm_vector_moves": 2.0, "asm_spills": 1.0}
    assert gcc.assembly_facts(text) == want


def test_rejected_text_raises_with_the_compilers_own_words() -> None:
    with pytest.raises(CompileError, match="undeclared_name"):
        gcc.build(replace(unit(), text="int f(void) { return undeclared_name; }"), PORTABLE)


def test_a_missing_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMMY_CC", "no-such-compiler")
    with pytest.raises(CompileError, match=r"no-such-compiler.*apt install gcc.*EMMY_CC"):
        gcc.build(unit(), PORTABLE)


def test_a_compiler_that_takes_too_long_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "slow-cc"
    slow.write_text('#!/bin/sh\ncase "$1" in -dump*) echo 1;; *) exec sleep 60;; esac\n', encoding="utf-8")
    slow.chmod(0o755)
    monkeypatch.setenv("EMMY_CC", str(slow))
    with pytest.raises(CompileError, match="not done after"):
        gcc.build(unit(), PORTABLE, timeout_s=0.2)


def test_a_failed_build_leaves_nothing_behind_and_the_next_one_succeeds(cache: Path) -> None:
    with pytest.raises(CompileError):
        gcc.build(replace(unit(), text="no C"), PORTABLE)
    assert not [p for p in cache.rglob("*") if p.is_file()]
    assert gcc.build(unit(), PORTABLE).path.is_file()


def test_many_threads_that_build_the_same_text_compile_it_once() -> None:
    with ThreadPoolExecutor(4) as pool:
        built = list(pool.map(lambda _: gcc.build(unit(), PORTABLE), range(4)))
    assert len({b.path for b in built}) == 1
    assert sum(b.seconds > 0 for b in built) == 1


@pytest.mark.parametrize("suffix", ["so", "json"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "overwritten"])
def test_a_damaged_library_in_the_cache_is_compiled_again(suffix: str, damage: str) -> None:
    """A power cut or a full disk can leave one: it must not become the fault of the candidate."""
    first = gcc.build(unit(), PORTABLE)
    path = first.path.with_suffix(f".{suffix}")
    whole = path.read_bytes()
    path.write_bytes({"truncated": whole[:100], "empty": b"", "overwritten": b"\x80" * len(whole)}[damage])
    again = gcc.build(unit(), PORTABLE)
    assert again.seconds > 0 and (again.path, again.static) == (first.path, first.static)
    assert gcc.build(unit(), PORTABLE).seconds == 0


def compiler_that(folder: Path, does: str) -> str:
    """A command that names itself as a compiler must and then does only that."""
    script = folder / "cc"
    script.write_text(f'#!/bin/sh\ncase "$1" in -dump*) echo 1; exit 0;; esac\n{does}\n', encoding="utf-8")
    script.chmod(0o755)
    return str(script)


@pytest.mark.parametrize(
    "does",
    ["echo 'fatal error: error writing to plan.s: No space left on device' >&2; exit 1", "exit 0"],
)
def test_a_machine_that_fails_the_compiler_is_no_fault_of_the_source(
    does: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMMY_CC", compiler_that(tmp_path, does))
    with pytest.raises(hostcc.BrokenToolchain):
        gcc.build(unit(), PORTABLE)


def test_a_compiler_that_was_killed_is_told_from_one_that_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMMY_CC", compiler_that(tmp_path, "kill -9 $$"))
    with pytest.raises(hostcc.CompilerKilled, match="killed from outside"):
        gcc.build(unit(), PORTABLE)
    (row,) = CompilePool(builder(PORTABLE), 1).compile([Candidate("matmul:4x8x8:f32", "")])
    assert isinstance(row.result, NotBuilt) and row.result.status == "device_lost"


def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("emmy.config.cache_dir", lambda: tmp_path / "file" / "cache")
    with pytest.raises(hostcc.BrokenToolchain, match="EMMY_CACHE"):
        gcc.build(unit(), PORTABLE)


def test_a_command_that_is_no_compiler_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMMY_CC", "true")
    with pytest.raises(CompileError, match="'true' does not say which compiler it is"):
        gcc.build(unit(), PORTABLE)
