"""Plans by ranges behind one launcher: every size gets the right answer, and the choice costs nothing that matters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from emmy.codegen import gcc
from emmy.codegen.build import source
from emmy.errors import UsageError
from emmy.ir.dispatch import parse_dispatch
from emmy.ir.ops import Op, parse_op
from emmy.ir.target import load_target
from emmy.loading import load_table
from emmy.runtime.launcher import LaunchError
from emmy.runtime.table import LoadedTable, PlanRange

TARGET = load_target("cpu")
OP = parse_op("matmul:m(1..45)x40x24:f32:bias")
SPLIT = "k0/splitk(C,2) k0/split(m,core,8) k0/stage(B,pack,1) k0.C/atom(fma,4,16,1,4) k1/split(m,core,16)"
TABLE = parse_dispatch(f"m 1: | m 2..7: k0.C/atom(fma,2,8,1,4) | m 8..31: {SPLIT} | m 32..45: k0.C/atom(fma,4,16,1,8)")


@pytest.fixture(scope="module")
def table() -> LoadedTable:
    return load_table(OP, TABLE, TARGET)


def built(op: Op, schedule: str = "") -> Path:
    return gcc.build(source(op, schedule, TARGET), TARGET).path


def arrays(m: int) -> dict[str, np.ndarray]:
    return {**OP.inputs("integer", m, {"m": m}), "Y": np.full((m, 40), np.nan, np.float32)}


@pytest.mark.parametrize("threads", [1, 3])
def test_every_size_gets_the_right_answer_in_any_order(table: LoadedTable, threads: int) -> None:
    sizes = [*range(1, 46), *range(45, 0, -4)]
    for m in sizes:
        got = arrays(m)
        table.run(got, {"m": m}, threads)
        assert OP.error_norm({"Y": got["Y"]}, {k: v for k, v in got.items() if k != "Y"}, "integer") == 0


def test_the_plan_is_that_of_the_range(table: LoadedTable) -> None:
    assert [TABLE.ranges[table.choose(m)] for m in range(1, 46)] == [TABLE.at(m) for m in range(1, 46)]
    assert table.arguments == ("A", "B", "bias", "Y") and table.syms == ("m",) and table.n_launches == 2
    assert table.argument_bytes([1]) == (24 * 4, 24 * 40 * 4, 40 * 4, 40 * 4)


@pytest.mark.parametrize("size", [0, -1, 46, 1 << 40])
def test_a_size_outside_is_refused_with_what_is_served(table: LoadedTable, size: int) -> None:
    for refused in (
        lambda: table.choose(size),
        lambda: table.bind(arrays(1), {"m": size}),
        lambda: table.choice_ns([size]),
    ):
        with pytest.raises(UsageError, match=f"m is {size}, this table serves 1..45"):
            refused()


def test_the_c_interface_refuses_a_size_outside_too(table: LoadedTable) -> None:
    call = table.bind(arrays(45), {"m": 45})
    call._syms[0] = 46  # as a caller in C could
    with pytest.raises(LaunchError, match=r"m is 46, this table serves 1\.\.45"):
        call()


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        (((1, 8), (10, 45)), "m 10..45 does not begin"),
        (((1, 8), (8, 45)), "m 8..45 does not begin"),
        ((), "without a range"),
    ],
)
def test_ranges_with_a_gap_or_an_overlap_are_no_table(spans: tuple[tuple[int, int], ...], said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        LoadedTable("m", [PlanRange(lo, hi, built(OP)) for lo, hi in spans])


def test_plans_of_other_ops_are_no_table() -> None:
    other = parse_op("matmul:m(1..45)x40x24:f32")
    with pytest.raises(LaunchError, match="takes other arguments"):
        LoadedTable("m", [PlanRange(1, 8, built(OP)), PlanRange(9, 45, built(other))])
    with pytest.raises(LaunchError, match="asked for other sizes"):
        LoadedTable("n", [PlanRange(1, 45, built(OP))])
    with pytest.raises(LaunchError, match="cannot be loaded"):
        LoadedTable("m", [PlanRange(1, 8, built(OP)), PlanRange(9, 45, Path("missing.so"))])


def test_a_closed_table_refuses_in_words() -> None:
    closed = load_table(OP, parse_dispatch("m 1..45:"), TARGET)
    closed.close()
    with pytest.raises(UsageError, match="is closed"):
        closed.choose(3)
    with pytest.raises(UsageError, match="is closed"):
        closed.run(arrays(3), {"m": 3})


def test_choosing_among_many_ranges_takes_less_than_two_microseconds(tmp_path: Path) -> None:
    """A bound some hundred times above what it takes: it fails when the choice is no longer a search in memory."""
    plan = built(OP)
    many = LoadedTable("m", [PlanRange(m, m, plan) for m in range(1, 46)])
    assert [many.choose(m) for m in range(1, 46)] == list(range(45))
    assert min(many.choice_ns(range(1, 46), rounds=200) for _ in range(5)) < 2000
