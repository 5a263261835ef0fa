"""Compiling in processes of their own: results, refusals, and what becomes of a process that dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from emmy.errors import CompileError, PlanError
from emmy.ir.target import load_target
from emmy.measure import build_main
from emmy.measure.remote_builder import RemoteBuilder
from emmy.records import Candidate

TARGET = load_target("rtx4090")
OP = "matmul:64x64x64:f16:nk"
TILE = "k0/split(m,grid,32) k0/split(n,grid,32) k0/split(k,serial,32) k0/split(m,warp,16) k0/split(n,warp,16)"
SCHEDULE = f"{TILE} k0/stage(A,cp_async,2) k0/stage(B,cp_async,2) k0.C/atom"
GOOD = Candidate(OP, f"{SCHEDULE}(mma,16,8,16)")


@pytest.fixture(scope="module")
def builder() -> Iterator[RemoteBuilder]:
    made = RemoteBuilder(TARGET, 2)
    yield made
    made.close()


def test_a_process_builds_what_this_one_would(builder: RemoteBuilder) -> None:
    assert builder(GOOD) == build_main.build(GOOD, TARGET)


def test_the_file_is_a_plan_and_the_facts_are_the_cubins(builder: RemoteBuilder) -> None:
    built = builder(GOOD)
    head, _, cubin = built.library.read_bytes().partition(b"\ncubin ")
    assert head.decode().splitlines() == [
        "emmy-gpu-plan 2",
        "argument A 2 4096",
        "argument B 2 4096",
        "argument C 2 4096",
        "kernel k0 128 8192 4",
        "pass A",
        "pass B",
        "pass C",
    ]
    size, _, image = cubin.partition(b"\n")
    assert int(size) == len(image)
    assert image.startswith(b"\x7fELF")
    assert built.static["threads"] == 128
    assert built.static["smem_bytes"] >= 8192
    assert built.static["sass_mma"] > 0


@pytest.mark.parametrize(
    ("atom", "sums"), [("mma,16,8,16", "f32"), ("hybrid,16,8,32", "hybrid"), ("f16,16,8,16", "f16")]
)
def test_a_binary_says_how_its_sums_are_kept(atom: str, sums: str, builder: RemoteBuilder) -> None:
    assert builder(Candidate(OP, f"{SCHEDULE}({atom})")).accumulate == sums


def test_refusals_come_back_as_what_they_were(builder: RemoteBuilder) -> None:
    with pytest.raises(PlanError, match="C has no atom"):
        builder(Candidate(OP, "k0/split(m,grid,3)"))


@pytest.mark.slow
def test_a_process_that_dies_costs_one_candidate(tmp_path: Path) -> None:
    lonely = RemoteBuilder(TARGET, 1)
    try:
        lonely(GOOD)
        process = lonely._all[0]._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with pytest.raises(CompileError, match="process ended by itself"):
            lonely(GOOD)
        assert lonely(GOOD).accumulate == "f32"
    finally:
        lonely.close()


def test_as_many_threads_as_there_are_processes_build_at_once(builder: RemoteBuilder) -> None:
    stages = [
        Candidate(OP, f"{TILE} k0/stage(A,cp_async,{d}) k0/stage(B,cp_async,{d}) k0.C/atom(mma,16,8,16)")
        for d in (1, 2, 3)
    ]
    with ThreadPoolExecutor(2) as pool:
        built = list(pool.map(builder, stages * 2))
    assert [b.digest for b in built[:3]] == [b.digest for b in built[3:]]
    assert len({b.digest for b in built}) == 3
