"""Tables by ranges of a size: their text, what they refuse, and the plans that they name."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emmy.errors import UsageError
from emmy.ir.dispatch import Dispatch, Range, is_dispatch, parse_dispatch
from emmy.ir.ops import parse_op
from emmy.ir.program import Sym
from emmy.ir.target import load_target

CPU = load_target("cpu-portable")
OP = parse_op("matmul:m(1..90)x40x24:f32:bias")
PACKED, DIRECT = "k0/stage(B,pack,1) k0.C/atom(fma,4,8,1,4)", "k0.C/atom(fma,1,8,1,4)"
TEXT = f"m 1: {DIRECT} | m 2..33: | m 34..90: {PACKED}"


@st.composite
def tables(draw: st.DrawFn) -> Dispatch:
    cuts = sorted(draw(st.sets(st.integers(1, 5000), min_size=2, max_size=12)))
    schedules = st.sampled_from(["", PACKED, DIRECT])
    return Dispatch("m", tuple(Range(a, b - 1, draw(schedules)) for a, b in pairwise(cuts)))


@given(tables())
def test_a_table_reads_back_from_its_text(table: Dispatch) -> None:
    assert parse_dispatch(str(table)) == table and is_dispatch(str(table)) and not is_dispatch(PACKED)


@given(tables(), st.integers(-5, 5100))
def test_each_size_has_the_one_range_that_holds_it_or_is_refused(table: Dispatch, size: int) -> None:
    holding = [r for r in table.ranges if r.lo <= size <= r.hi]
    if holding:
        assert [table.at(size)] == holding
    else:
        with pytest.raises(UsageError, match=f"m is {size}, this table serves {table.lo}..{table.hi}"):
            table.at(size)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("m 1..8: | m 10..20:", "gap after m 1..8: the next range must begin at 9, it begins at 10"),
        ("m 1..8: | m 8..20:", "overlap after m 1..8: the next range must begin at 9, it begins at 8"),
        ("m 9..20: | m 1..8:", "overlap"),
        ("m 8..1:", "8..1 is no range"),
        ("m 0..1:", "0..1 is no range"),
        ("m 1..8: | n 9..20:", "ranges are of m and n"),
        ("m 1..8", "has not the form"),
        ("", "has not the form"),
        ("m 1..8: | m 9..16: k0/jump(m)", "m 9..16: .* names no move"),
    ],
)
def test_what_is_no_table_is_refused_in_words(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_dispatch(text)


def test_a_plan_s_guard_is_its_range_and_a_range_of_one_size_asks_for_none() -> None:
    plans = list(parse_dispatch(TEXT).plans(OP.program(), CPU))
    assert [p.guard for p in plans] == [(), (Sym("m", 2, 33),), (Sym("m", 34, 90),)]
    assert plans[0].program.dim("m") == 1 and "m=m(34..90)" in str(plans[2])


@pytest.mark.parametrize("text", ["m 1..89:", "m 2..90:", "m 1..91:", "n 1..90:"])
def test_a_table_must_serve_the_very_sizes_of_the_op(text: str) -> None:
    with pytest.raises(UsageError, match=r"open sizes of the op: m\(1..90\)"):
        list(parse_dispatch(text).plans(OP.program(), CPU))


def test_a_part_of_an_op_is_an_op_of_the_same_program() -> None:
    part = OP.within("m", 34, 90)
    assert part.key == "matmul:m(34..90)x40x24:f32:bias" and part.program() == OP.program().within("m", 34, 90)
    assert OP.within("m", 7, 7).key == "matmul:7x40x24:f32:bias"
    with pytest.raises(UsageError, match=r"m 34..91 is no part of m 1..90"):
        OP.within("m", 34, 91)
