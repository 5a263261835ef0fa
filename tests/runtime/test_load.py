"""`emmy.load` of what was tuned, of what was not, and of what is named."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

import emmy
from emmy.errors import UsageError
from emmy.measure.fake import FakeMeasurer
from emmy.runtime.launcher import LoadedPlan

OP, OTHER = "matmul:4x8x16:f32", "matmul:5x8x16:f32"


def answers(plan: LoadedPlan, op: str) -> bool:
    parsed = emmy.parse_op(op)
    x = parsed.inputs("integer", 0, {})
    out = {"C": np.zeros((int(op[7]), 8), np.float32)}
    plan.run({**x, **out})
    return parsed.error_norm(out, x, "integer") == 0


def test_an_op_that_was_never_tuned_is_loaded_with_one_warning_or_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "emmy.lookup"):
        assert all(answers(emmy.load(OP, home=tmp_path), OP) for _ in range(3))
        (said,) = (r.getMessage() for r in caplog.records)
        assert "nothing is stored for it" in said and f"emmy tune {OP} --threads 1" in said and "default" in said
        emmy.load(OTHER, home=tmp_path)
        assert len(caplog.records) == 2, "once for each op"
        with pytest.raises(UsageError, match=f"nothing is stored for it. Tune it: `emmy tune {OP}"):
            emmy.load(OP, home=tmp_path, strict=True)


@pytest.mark.parametrize(
    ("op", "ids", "bad", "says"),
    [
        ("embedding:4x16x7:f32", [0, 6, 3, 6], 7, "ids: position 7 of E along v, which has positions 0..6"),
        ("embedding:m(1..9)x16x7:f32", [0, 6, 3, 6], -1, "position -1 of E"),
        ("formula:m=4,n=16,v=7;ids[m]:i32;E[v,n]:f32;Y[m,n]:f32=E[6-ids[m]*2,n]", [0, 3, 1, 2], 4, "position -2 of E"),
        (
            "formula:m=4,n=16,v=7;ids[v]:i32;to[m]:i32;E[v,n]:f32;Y[m,n]:f32=E[ids[to[m]],n]",
            [0, 3, 1, 2, 6, 5, 4],
            9,
            "position 9 of E",
        ),
    ],
)
def test_positions_outside_of_a_table_are_refused_whenever_the_plan_is_called(
    tmp_path: Path, op: str, ids: list[int], bad: int, says: str
) -> None:
    plan, parsed = emmy.load(op, "", home=tmp_path), emmy.parse_op(op)
    x = parsed.inputs("normal", 0, {"m": 4}) | {"ids": np.array(ids, np.int32)}
    out = {"Y": np.zeros((4, 16), np.float32)}
    call = plan.bind({**x, **out}, {"m": 4} if plan.syms else ())
    call()
    assert parsed.error_norm(out, x, "normal") <= 1
    x["ids"][1] = bad
    if "to" in x:
        x["to"][0] = 1
    out["Y"][:] = 5
    with pytest.raises(UsageError, match=says):
        call()
    assert (out["Y"] == 5).all()


def test_what_was_tuned_or_is_named_is_loaded_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = emmy.tune(OTHER, budget="3", strategy="random", home=tmp_path, measurer=FakeMeasurer())
    assert found.best is not None
    with caplog.at_level(logging.WARNING, "emmy.lookup"):
        assert answers(emmy.load(OTHER, home=tmp_path, strict=True), OTHER)
        assert answers(emmy.load(OP, "", home=tmp_path / "none", strict=True), OP)
    assert not caplog.records
