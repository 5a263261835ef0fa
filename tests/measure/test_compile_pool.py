"""Candidates to binaries."""

from __future__ import annotations

import threading
from pathlib import Path

from emmy.errors import CompileError
from emmy.ir.target import load_target
from emmy.measure.compile_pool import Built, CompilePool, NotBuilt, builder
from emmy.records import Candidate


def test_results_come_in_order_and_failures_have_the_status_of_their_row(tmp_path: Path) -> None:
    pool = CompilePool(builder(load_target("cpu-portable")), 2)
    schedules = ["", "k0/split(m,core,", "k0/split(q,core,4)", "k0/split(m,core,4)"]
    results = [c.result for c in pool.compile([Candidate("matmul:8x8x8:f32", s) for s in schedules])]
    pool.close()
    good, unread, illegal, other = results
    assert isinstance(good, Built)
    assert isinstance(other, Built)
    assert good.library.exists()
    assert good.digest != other.digest
    assert isinstance(unread, NotBuilt)
    assert isinstance(illegal, NotBuilt)
    assert {unread.status, illegal.status} == {"constraints"}
    assert "move 0 k0/split(q,core,4)" in illegal.message


def test_a_compiler_s_failure_is_a_compile_status_with_the_start_of_its_diagnostics() -> None:
    def build(candidate: Candidate) -> Built:
        raise CompileError(f"plan.c:1: error: {candidate.schedule}" + "x" * 10_000)

    pool = CompilePool(build, 1)
    (compiled,) = pool.compile([Candidate("matmul:8x8x8:f32", "s")])
    pool.close()
    assert isinstance(compiled.result, NotBuilt)
    assert compiled.result.status == "compile"
    assert compiled.result.message.startswith("plan.c:1: error: s")
    assert len(compiled.result.message) < 2000


def test_the_first_result_is_there_while_others_compile() -> None:
    release = threading.Event()

    def build(candidate: Candidate) -> Built:
        if candidate.schedule != "first":
            assert release.wait(30)
        return Built(Path(candidate.schedule), "")

    pool = CompilePool(build, 2)
    results = pool.compile([Candidate("op", "first"), Candidate("op", "second")])
    assert next(results).candidate.schedule == "first"
    release.set()
    assert next(results).candidate.schedule == "second"
    pool.close()


def test_leaving_early_drops_what_has_not_begun() -> None:
    release, begun = threading.Event(), []

    def build(candidate: Candidate) -> Built:
        begun.append(candidate.schedule)
        if candidate.schedule != "0":
            assert release.wait(30)
        return Built(Path(candidate.schedule), "")

    pool = CompilePool(build, 1)
    results = pool.compile([Candidate("op", str(i)) for i in range(20)])
    next(results)
    results.close()  # type: ignore[attr-defined]  # a generator's
    release.set()
    pool.close()
    assert len(begun) <= 2


def test_what_is_begun_ahead_is_compiled_once_and_taken_by_whoever_asks_for_it() -> None:
    asked: list[str] = []

    def build(candidate: Candidate) -> Built:
        asked.append(candidate.schedule)
        return Built(Path(candidate.schedule), "")

    pool = CompilePool(build, 1)
    a, b = (Candidate("matmul:8x8x8:f32", s) for s in "ab")
    pool.begin([b])
    assert [c.candidate for c in pool.compile([a, b])] == [a, b]
    assert asked == ["b", "a"]
    assert [c.candidate for c in pool.compile([b])] == [b]  # taken once
    pool.close()
    assert asked == ["b", "a", "b"]
