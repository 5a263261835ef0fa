"""`emmy verify` of cards that are not here: what would be loaded is replayed, compiled and emulated."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from emmy import api, config, emulation
from emmy.codegen import gpu_build
from emmy.codegen.build import SourceUnit, plan_source, source
from emmy.codegen.nvrtc import Cubin
from emmy.emulation import Emulated
from emmy.ir.ops import parse_op
from emmy.ir.plan import Plan
from emmy.ir.target import Target, load_target
from emmy.search.emulator_check import check
from emmy.search.predictions import Prediction, keep
from tests.cli.conftest import Emmy

OP = "matmul:64x64x64:f16"
USUAL = (
    "k0/split(m,grid,64) k0/split(n,grid,64) k0/split(k,serial,32) k0/split(m,warp,32) k0/split(n,warp,32) "
    "k0/stage(A,cp_async,2) k0/stage(B,cp_async,2) k0.C/atom(mma,16,8,16)"
)

pytest.importorskip("cuda.bindings.nvrtc")


def pick(op: str, schedule: str, gpu: str = "rtx4090") -> None:
    """Makes the schedule the one that is loaded of the op."""
    digest = source(parse_op(op), schedule, load_target(gpu)).digest
    found = Prediction(
        op, gpu, schedule, digest, 2, 1, 3, 0.8, False, "", 1, "", "", op, "0", "2026-01-01T00:00:00"
    )  # fmt: skip
    keep(config.home(), found)


def test_what_would_be_loaded_is_right_and_a_table_says_so_for_each_card(emmy: Emmy) -> None:
    pick(OP, USUAL)
    said = emmy("verify", OP, "--gpu", "rtx4090,a100", "--orders", "1", "--jobs", "1")
    assert said.code == 0, said.err
    assert "1 predicted" in said.out and "1 default" in said.out and "a100" in said.out
    assert "rtx4090 is not here" in said.err and "0 failures of 2" in said.err
    again = emmy("verify", OP, "--gpu", "rtx4090", "--orders", "1", "--jobs", "1", "--json")
    (row,), (line,) = again.of("emulated"), again.of("kind")
    assert (row["case"], row["kind"], row["verdict"], row["schedule"], row["ran"]) == (OP, "matmul", "ok", USUAL, OP)
    assert 0 < float(str(row["error"])) <= 1 and line["cases"] == line["ok"] == 1 and line["spill_bytes"] == 0


def test_a_wrong_kernel_is_exit_code_4_and_named(emmy: Emmy, monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(plan: Plan, target: Target) -> SourceUnit:
        unit = plan_source(plan, target)
        assert "emmy_syncthreads();" in unit.text
        return replace(unit, text=unit.text.replace("emmy_syncthreads();", ""))

    pick(OP, USUAL)
    monkeypatch.setattr(emulation, "check", partial(check, source=hasty))
    said = emmy("verify", OP, "--gpu", "rtx4090", "--jobs", "1")
    assert said.code == 4 and f"wrong: {OP} on rtx4090: race" in said.err and "1 failure of 1" in said.err


def test_a_schedule_that_spills_fails_with_the_numbers(emmy: Emmy, monkeypatch: pytest.MonkeyPatch) -> None:
    log = "16 bytes stack frame, 24 bytes spill stores, 32 bytes spill loads\nUsed 255 registers"
    monkeypatch.setattr(gpu_build, "compile_cubin", lambda text, arch: Cubin(b"", arch, log, 0.0))
    pick(OP, USUAL)
    said = emmy("verify", OP, "--gpu", "rtx4090", "--jobs", "1")
    assert said.code == 1 and f"compiler: {OP} on rtx4090: ptxas: spills 56 bytes a thread at 255" in said.err


def test_sets_count_cases_and_run_an_op_that_two_share_once(emmy: Emmy, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def quick(op: str, gpu: str, orders: object, home: Path | None) -> tuple[Emulated, ...]:
        asked.append((op, gpu))
        return (Emulated(op, op, gpu, "ok", schedule="k0", error=0.5),)

    monkeypatch.setattr(emulation, "_emulated", quick)
    said = emmy("verify", "@gemma4-12b", "--gpu", "rtx4090,h100", "--jobs", "1", "--emulate", "--json")
    assert said.code == 0 and len(asked) == len(set(asked)) == 2 * len(api.expand("@gemma4-12b"))
    lines = said.of("kind")
    assert sum(int(str(line["cases"])) for line in lines) == 2 * 258 and len(said.of("emulated")) == 2 * 258


def test_a_variable_that_cannot_be_read_is_a_fault_of_usage_and_of_no_op(
    emmy: Emmy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMMY_FAST_MATH", "2")
    said = emmy("verify", OP, "--gpu", "rtx4090")
    assert said.code == 2 and "EMMY_FAST_MATH is '2', allowed are 1 and 0" in said.err and "illegal" not in said.err


def test_a_cpu_is_not_emulated(emmy: Emmy) -> None:
    said = emmy("verify", OP, "--gpu", "cpu", "--emulate")
    assert said.code == 2 and "needs no emulator" in said.err
