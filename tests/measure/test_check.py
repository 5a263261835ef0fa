"""What counts as right."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emmy.ir.dtype import decode, encode
from emmy.ir.ops import parse_op
from emmy.measure.answers import compare
from emmy.measure.check import cases

OPS = ["matmul:5x7x64:f32", "matmul:4x6x33:bf16:nk,bias,gelu_tanh", "matmul:3x5x16:f16:residual,scale"]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(OPS),
    st.sampled_from(["integer", "normal"]),
    st.floats(-3, 3),
    st.integers(0, 2**32 - 1),
)
def test_an_answer_is_right_exactly_when_the_op_says_so(op_text: str, kind: str, size: float, seed: int) -> None:
    op = parse_op(op_text)
    inputs = op.inputs(kind, seed)  # type: ignore[arg-type]
    want = op.reference(inputs)
    absolute, relative = op.tolerance()
    rng = np.random.default_rng(seed)
    got = {
        name: encode(
            ref + size * rng.random(ref.shape) * (absolute + relative * np.abs(ref)), op.program().value(name).dtype
        )
        for name, ref in want.items()
    }
    norm = op.error_norm(got, inputs, kind)  # type: ignore[arg-type]
    verdict = compare(op, kind, got, want)  # type: ignore[arg-type]
    assert (verdict.wrong is None) == (norm <= 1)
    assert verdict.error_norm == pytest.approx(norm)


def test_the_first_wrong_element_is_named_with_what_was_got_and_wanted() -> None:
    op = parse_op("matmul:5x7x64:f32")
    want = op.reference(op.inputs("integer", 0))
    got = {"C": want["C"].astype(np.float32)}
    got["C"][2, 3] += 1
    got["C"][4, 6] = np.nan
    verdict = compare(op, "integer", got, want)
    assert verdict.wrong is not None
    assert verdict.wrong.startswith(f"C[2,3] is {want['C'][2, 3] + 1:g}, want {want['C'][2, 3]:g}")
    assert "2 of 35 elements" in verdict.wrong
    assert verdict.error_norm is None


def test_no_number_is_right_where_it_is_wanted_unless_it_was_never_written() -> None:
    op = parse_op("formula:m=4,n=16;X[m,n]:f32;Y[m,n]:f32=1/sqrt(X[m,n])")
    assert op.tolerance()[0] < 1e-4  # of those elements that have an answer
    inputs = op.inputs("normal", 0)
    inputs["X"][0, 0] = 0.0
    with np.errstate(divide="ignore"):
        want = op.reference(inputs)
    got = {"Y": want["Y"].astype(np.float32)}
    wanted = np.argwhere(np.isnan(want["Y"]))
    assert np.isinf(want["Y"][0, 0]) and 10 < len(wanted) < 50
    assert compare(op, "normal", got, want).wrong is None and op.error_norm(got, inputs, "normal") <= 1
    for at, x, says in (((0, 0), np.nan, "is nan, want inf"), (tuple(wanted[0]), 1.0, "is 1, want nan")):
        bad = got["Y"].copy()
        bad[at] = x
        assert says in (compare(op, "normal", {"Y": bad}, want).wrong or "")
        assert op.error_norm({"Y": bad}, inputs, "normal") == np.inf
    got["Y"].view(np.uint32)[tuple(wanted[-1])] = 0xFFFFFFFF
    assert "never written" in (compare(op, "normal", got, want).wrong or "")


def test_poison_that_was_left_is_called_unwritten() -> None:
    op = parse_op("matmul:5x7x64:bf16")
    want = op.reference(op.inputs("integer", 0))
    got = {"C": encode(want["C"], "bf16")}
    got["C"][1, 6] = 0xFFFF
    assert "C[1,6] was never written" in str(compare(op, "integer", got, want).wrong)


def test_a_fixed_shape_is_checked_on_integers_and_two_normal_seeds() -> None:
    assert [(c.kind, c.seed, c.sizes) for c in cases(parse_op(OPS[0]))] == [
        ("integer", 0, {}),
        ("normal", 1, {}),
        ("normal", 2, {}),
    ]


@given(st.integers(1, 100), st.integers(0, 300))
def test_a_symbol_is_checked_at_both_ends_and_at_an_odd_size(lo: int, length: int) -> None:
    op = parse_op(f"matmul:m({lo}..{lo + length})x8x8:f32")
    sizes = [c.sizes["m"] for c in cases(op)]
    assert {lo, lo + length} <= set(sizes)
    assert all(lo <= m <= lo + length for m in sizes)
    assert length < 2 or any(m % 2 for m in sizes)
    for m in sizes:
        assert {c.kind for c in cases(op) if c.sizes["m"] == m} == {"integer", "normal"}
    assert sum(c.kind == "normal" and c.sizes["m"] == lo + length for c in cases(op)) == 2


def test_a_row_that_is_summed_short_of_a_column_is_noticed() -> None:
    op = parse_op("matmul:9x3840x64:f16:nk,residual,sum_squares")
    for kind in ("integer", "normal"):
        x = op.inputs(kind, 1)  # type: ignore[arg-type]
        want = op.reference(x)
        rounded = decode(encode(want["Y"], "f16"), "f16")
        got = {"Y": encode(want["Y"], "f16"), "S": encode(np.square(rounded).sum(1), "f32")}
        assert compare(op, kind, got, want).wrong is None, "squares of stored numbers are right too"  # type: ignore[arg-type]
        column = np.abs(want["Y"][4]).argmax()
        got["S"][4] -= want["Y"][4, column] ** 2
        assert str(compare(op, kind, got, want).wrong).startswith("S[4] is ")  # type: ignore[arg-type]
