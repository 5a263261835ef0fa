"""Where masks leave anything to fold, and states relative to running ones."""

from __future__ import annotations

import numpy as np
import pytest

from emmy.codegen.execute import execute
from emmy.ir.dtype import decode
from emmy.ir.expr import parse
from emmy.ir.masks import Bound, Place, bounds, compared, layers
from emmy.ir.ops import parse_op
from emmy.ir.plan import Plan
from emmy.ir.program import MAX, SUM
from emmy.ir.relative import relative
from emmy.ir.schedule import replay
from emmy.ir.target import load_target

LOOPS = "k0/online(O) k0/split(h,grid,1) k0/split(s,grid,8) k0/split(t,serial,4)"


def plan(text: str, schedule: str = LOOPS) -> Plan:
    return replay(parse_op(text).program(), schedule, load_target("rtx4090"))


def test_conditions_compare_positions() -> None:
    assert compared(parse("t <= s + 5")) == (Place("t"), Place("s"), 5)
    assert compared(parse("t + 2 < s")) == (Place("t"), Place("s"), -3)
    assert compared(parse("3 < t")) == (Place(), Place("t"), -4)
    assert compared(parse("t * 2 < s")) is None


def test_masks_come_off_innermost_first() -> None:
    inner, masks = layers(
        parse_op("attention:1x8x8x4:f16").program(), parse("where(s < t + 3, where(t <= s, S[s,t] * 2, -1e30), -1e30)")
    )
    assert str(inner) == "S[s,t] * 2"
    assert [str(c) for c, _ in masks] == ["t <= s", "s < t + 3"]


def test_a_causal_window_bounds_both_ends() -> None:
    p = plan("attention:1x32x40x4:f16:causal,window6")
    assert bounds(p, p.launches[0]) == (Bound("t", Place("s"), 8, True), Bound("t", Place("s"), 3, False))


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("attention:1x32x32x4:f16", LOOPS),  # nothing is masked
        ("attention:1x32x32x4:f16:causal", LOOPS.replace("k0/split(s,grid,8) ", "")),  # a block has all rows
        (
            "attention:1x32x32x4:f16:causal",
            "k0/split(h,grid,1) k0/split(s,grid,8)",
        ),  # weights of masked logits are read
        ("attention:1x32x32x4:f16:causal", LOOPS.replace(" k0/split(t,serial,4)", "")),
    ],
)
def test_without_masks_rows_in_blocks_or_a_loop_there_is_nothing_to_leave_out(text: str, schedule: str) -> None:
    p = plan(text, schedule)
    assert bounds(p, p.launches[0]) == ()


@pytest.mark.parametrize(
    "text",
    ["attention:2x21x21x4:f16:causal", "attention:1x21x30x4:f16:causal,window5", "attention:1x30x13x4:f16:causal"],
)
def test_what_is_left_out_adds_nothing(text: str) -> None:
    op, p = parse_op(text), plan(text)
    inputs = op.inputs("normal", 0)
    got = execute(p, {name: decode(x, "f16") for name, x in inputs.items()})
    np.testing.assert_allclose(got["O"], op.reference(inputs)["O"], atol=1e-12)


def test_the_state_of_a_softmax_is_taken_relative_to_a_running_maximum() -> None:
    monoid = plan("attention:1x8x8x4:f16").program.stage("O").monoid
    assert monoid is not None
    how = relative(monoid)
    assert how is not None
    assert how.base == "m"
    assert {c: str(e) for c, e in how.scales.items()} == {"l": "exp(a_m - m)", "o": "exp(a_m - m)"}


def test_sums_and_maxima_are_relative_to_nothing() -> None:
    assert relative(SUM) is None
    assert relative(MAX) is None
