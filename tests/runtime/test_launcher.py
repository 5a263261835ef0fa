"""The launcher: runs plans on buffers by name or in order, with threads, and words what it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emmy import hostcc
from emmy.codegen import gcc
from emmy.codegen.build import SourceUnit, source
from emmy.errors import UsageError
from emmy.ir.ops import parse_op
from emmy.ir.target import load_target
from emmy.loading import load_plan
from emmy.runtime.arguments import refuse_memory
from emmy.runtime.launcher import LaunchError, LoadedPlan

TARGET = load_target("cpu")
OP = parse_op("matmul:m(1..90)x40x24:f32:bias")
SCHEDULE = "k0/splitk(C,2) k0/split(m,core,8) k0/stage(B,pack,1) k0.C/atom(fma,4,16,1,4) k1/split(m,core,16)"


def unit() -> SourceUnit:
    return source(OP, SCHEDULE, TARGET)


@pytest.fixture
def plan() -> LoadedPlan:
    return LoadedPlan(gcc.build(unit(), TARGET).path)


def arrays(m: int, seed: int = 0) -> dict[str, np.ndarray]:
    return {**OP.inputs("integer", seed, {"m": m}), "Y": np.full((m, 40), np.nan, np.float32)}


def error(got: dict[str, np.ndarray]) -> float:
    return OP.error_norm({"Y": got["Y"]}, {k: v for k, v in got.items() if k != "Y"}, "integer")


def n_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_a_plan_knows_its_arguments_sizes_and_launches(plan: LoadedPlan) -> None:
    assert plan.arguments == ("A", "B", "bias", "Y") and plan.syms == ("m",) and plan.n_launches == 2
    assert plan.argument_bytes([10]) == (10 * 24 * 4, 24 * 40 * 4, 40 * 4, 10 * 40 * 4)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_sizes_may_change_from_run_to_run_with_any_number_of_threads(plan: LoadedPlan, threads: int) -> None:
    for m in (3, 90, 1, 41):
        got = arrays(m, seed=m)
        plan.run(got, {"m": m}, threads)
        assert error(got) == 0


def test_arguments_go_by_order_too_as_arrays_or_addresses(plan: LoadedPlan) -> None:
    got = arrays(7)
    plan.run([got[n] for n in plan.arguments], [7])
    assert error(got) == 0
    got["Y"][...] = np.nan
    plan.run([got[n].ctypes.data for n in plan.arguments], [7])
    assert error(got) == 0


def test_a_bound_plan_runs_again_and_again_and_outlives_its_name() -> None:
    got = arrays(33)
    call = LoadedPlan(gcc.build(unit(), TARGET).path).bind(got, {"m": 33}, threads=2)
    for _ in range(50):
        got["Y"][...] = np.nan
        call()
        assert error(got) == 0


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")
def test_one_thread_means_the_callers_and_closing_ends_the_others(plan: LoadedPlan) -> None:
    before, got = n_threads(), arrays(50)
    plan.run(got, {"m": 50}, threads=1)
    assert n_threads() == before
    plan.run(got, {"m": 50}, threads=3)
    assert n_threads() == before + 2
    plan.close()
    assert n_threads() == before


def test_results_do_not_depend_on_the_number_of_threads(plan: LoadedPlan) -> None:
    inputs, results = OP.inputs("normal", 0, {"m": 64}), []
    for threads in (1, 2, 3):
        out = np.full((64, 40), np.nan, np.float32)
        plan.run({**inputs, "Y": out}, {"m": 64}, threads)
        results.append(out)
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])


def test_wrong_arguments_are_refused_by_name(plan: LoadedPlan) -> None:
    good = arrays(10)
    with pytest.raises(UsageError, match="no argument bias"):
        plan.run({k: v for k, v in good.items() if k != "bias"}, {"m": 10})
    with pytest.raises(UsageError, match="argument A has 960 bytes"):
        plan.run(good, {"m": 11})
    with pytest.raises(UsageError, match=r"argument B .* not C-contiguous"):
        plan.run({**good, "B": np.asfortranarray(good["B"])}, {"m": 10})
    with pytest.raises(UsageError, match="takes 4: A, B, bias, Y"):
        plan.run([good["A"]], {"m": 10})
    with pytest.raises(UsageError, match="0 threads"):
        plan.run(good, {"m": 10}, threads=0)
    with pytest.raises(UsageError, match="argument A is a list"):
        plan.run({**good, "A": good["A"].tolist()}, {"m": 10})


def test_what_is_wrong_with_a_call_is_said_of_the_op_and_without_a_name_of_the_file(plan: LoadedPlan) -> None:
    with (
        load_plan(OP, SCHEDULE, TARGET) as named,
        pytest.raises(UsageError, match=f"^{re.escape(OP.key)}: no argument"),
    ):
        assert repr(named).startswith(f"LoadedPlan({OP.key!r}, 'cpu', ")
        named.run({}, {"m": 10})
    with pytest.raises(UsageError, match=r"\.so: no argument"):
        plan.run({}, {"m": 10})


def test_sizes_that_a_plan_was_not_made_for_are_refused() -> None:
    with load_plan(OP, SCHEDULE, TARGET) as plan:
        plan.run(arrays(90), {"m": 90})
        for size in (0, 91, (1 << 64) + 3):
            with pytest.raises(UsageError, match=f"m is {size}, the plan serves 1..90"):
                plan.run(arrays(90), [size])
        with pytest.raises(UsageError, match="m is '3', a whole number is needed"):
            plan.run(arrays(3), ["3"])  # type: ignore[list-item]


def test_a_closed_plan_refuses_to_run(plan: LoadedPlan) -> None:
    plan.close()
    plan.close()
    with pytest.raises(UsageError, match="is closed"):
        plan.run(arrays(3), {"m": 3})


def test_what_is_no_plan_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="cannot be loaded"):
        LoadedPlan(tmp_path / "missing.so")
    other = hostcc.compile_library("int nothing;", "c", ("-fPIC",))
    with pytest.raises(LaunchError, match="exports no plan"):
        LoadedPlan(other.path)
    stale = unit().text.replace("emmy_plan = {EMMY_PLAN_VERSION", "emmy_plan = {EMMY_PLAN_VERSION + 1")
    with pytest.raises(LaunchError, match="no plan of this version"):
        LoadedPlan(hostcc.compile_library(stale, "c", gcc.flags(TARGET)).path)
    with pytest.raises(LaunchError, match="no backend"):
        LoadedPlan(other.path, device="abacus")


def read_only(x: np.ndarray) -> np.ndarray:
    x.flags.writeable = False
    return x


def shifted(x: np.ndarray) -> np.ndarray:
    """The same numbers, one byte beside where their dtype may lie."""
    raw = np.empty(x.nbytes + 1, np.uint8)[1:]
    raw[:] = x.view(np.uint8).ravel()
    return raw.view(x.dtype).reshape(x.shape)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("A", lambda x: x.astype(np.int32), r"argument A is int32; the plan needs float32"),
        ("A", lambda x: np.zeros((20, 24), np.float16), r"argument A is float16; the plan needs float32"),
        ("A", lambda x: x.reshape(24, 10), r"argument A has shape \(24, 10\); the plan needs \(10, 24\) at m = 10"),
        ("B", lambda x: x.reshape(-1), r"argument B has shape \(960,\); the plan needs \(24, 40\)"),
        ("B", np.asfortranarray, "argument B has 3840 bytes, not C-contiguous; the plan needs 3840, C-contiguous"),
        ("B", lambda x: np.tile(x, 2)[:, ::2], "argument B .* not C-contiguous"),
        ("B", lambda x: shifted(x), "argument B .* not aligned to 4 bytes"),
        ("bias", lambda x: 0, "argument bias is the address 0"),
        ("bias", lambda x: x.tolist(), "argument bias is a list; an array or an address"),
        ("Y", read_only, "argument Y is read-only"),
        ("Y", lambda x: np.broadcast_to(np.float32(0), x.shape), "argument Y"),
    ],
)
def test_an_array_that_is_not_as_the_plan_needs_it_is_refused_by_name(
    name: str, change: Callable[[np.ndarray], Any], said: str
) -> None:
    with load_plan(OP, SCHEDULE, TARGET) as plan:
        good = arrays(10)
        plan.run({k: x if k == "Y" else read_only(x) for k, x in good.items()}, {"m": 10})  # inputs may be read-only
        assert error(good) == 0
        with pytest.raises(UsageError, match=said):
            plan.run({**good, name: change(good[name].copy())}, {"m": 10})


def test_an_output_has_memory_of_its_own() -> None:
    op = parse_op("matmul:24x24x24:f32")
    with load_plan(op, "", TARGET) as plan:
        x = np.ones((24, 24), np.float32)
        plan.run({"A": x, "B": x, "C": np.empty_like(x)})  # inputs may be one
        with pytest.raises(UsageError, match="argument C shares memory with A"):
            plan.run({"A": x, "B": x.copy(), "C": x})


def test_a_gpu_is_given_addresses_of_its_own_memory() -> None:
    x = np.zeros(3, np.float32)
    assert "is an array in this machine's memory" in str(refuse_memory(x, x.nbytes, on_gpu=True))
    assert refuse_memory(x, x.nbytes, on_gpu=False) is None and refuse_memory(1 << 40, x.nbytes, on_gpu=True) is None


def test_bf16_is_taken_in_its_storage_form() -> None:
    op = parse_op("matmul:8x8x8:bf16")
    given = op.inputs("integer", 0, {})
    with load_plan(op, "", TARGET) as plan:
        out = np.zeros((8, 8), np.uint16)
        plan.run({**given, "C": out})
        assert op.error_norm({"C": out}, given, "integer") == 0
        with pytest.raises(UsageError, match=r"argument A is float16; the plan needs uint16 \(bits of bf16"):
            plan.run({**given, "A": np.zeros((8, 8), np.float16), "C": out})
