"""Expressions: text that parses back, garbage that is refused, and blocks that mean what the whole means."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emmy.errors import EmmyError, PlanError
from emmy.ir.expr import (
    FUNCTIONS,
    Apply,
    Axis,
    Block,
    Const,
    Expr,
    Named,
    Read,
    axes_of,
    evaluate,
    factors,
    parse,
    product,
    reads,
    substitute,
)

NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-99, 99).map(float)
LEAVES = st.one_of(
    NUMBERS.map(Const),
    st.sampled_from("mnk").map(Axis),
    st.sampled_from([Read("A", ("m", "k")), Read("b", ("n",)), Read("s", ())]),
)


def _apply(fn: str, args: list[Expr]) -> Expr:
    arity = FUNCTIONS[fn][0]
    if fn == "neg" and isinstance(args[0], Const):
        return Const(-args[0].value)  # as text, -2 is a number
    return Apply(fn, tuple(args[:arity]))


EXPRESSIONS = st.recursive(
    LEAVES,
    lambda inner: st.builds(_apply, st.sampled_from(sorted(FUNCTIONS)), st.lists(inner, min_size=3, max_size=3)),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(EXPRESSIONS)
def test_printed_expressions_parse_back_to_the_same_tree(e: Expr):
    assert parse(str(e)) == e


@pytest.mark.parametrize(
    "text",
    [
        "a + b + c", "a + (b + c)", "a - (b - c)", "a / (b * c)", "(a <= b) <= c", "a <= (b < c)", "-(a + b) * c", "-A[m,k] * b[n]",
        "where(k <= q + 96, S[h,q,k] * 0.25, -1e+30)", "s[()] * 2", "1e-06", "-0", "a * -2", "--a", "0.1 + 1.0000000000000002",
    ],
)  # fmt: skip
def test_text_is_printed_with_just_the_brackets_it_needs(text: str):
    assert str(parse(text)) == text


GARBAGE = [
    "", " ", "a +", "a b", "(", ")", "a[", "a[m:n]", "a[b()]", "f(a)", "exp()", "exp(a, b)", "exp(x=a)", "a.b", "a == b",
    "a <= b <= c",
    "a ** b", "a ^ b", "a @ b", "not a", "+a", "True", "None", "'a'", "b'a'", "1j", "lambda: a", "[a]", "a if b else c", "a; b", "a = b",
    "1e999", "-1e999", "9" * 400, "9" * 5000, "a\x00b", "²", "a²", "1_", "0x", "(" * 300 + "a" + ")" * 300, "-" * 20000 + "a",
    "a" + "+a" * 5000, "__import__('os')", "a\n+ b", "# a", "\\", "\ud800",
]  # fmt: skip


@pytest.mark.parametrize("text", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_refused_and_the_refusal_shows_it(text: str):
    with pytest.raises(PlanError) as e:
        parse(text)
    message = str(e.value)
    assert message.startswith("expression ") and len(message) < 900
    assert repr(text)[:30].rstrip("'\"") in message or not text.isprintable()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text(alphabet="abmk[](),+-*/<=. 0129e²٣'\n", max_size=30))
def test_random_text_never_escapes_as_another_error(text: str):
    try:
        e = parse(text)
    except EmmyError:
        return
    assert parse(str(e)) == e


def test_what_an_expression_reads_and_depends_on_is_listed_in_order_of_appearance():
    e = parse("where(k <= q + 1, S[h,q,k] * V[h,k,e], S[h,q,k])")
    assert reads(e) == ("S", "V")
    assert axes_of(e) == ("k", "q", "h", "e")
    assert substitute(e, lambda r: Const(1) if r.value == "S" else r) == parse("where(k <= q + 1, 1 * V[h,k,e], 1)")


def test_a_product_falls_into_its_factors_and_back():
    e = parse("X[m,k] * r[m] * (g[k] + 1)")
    assert [str(f) for f in factors(e)] == ["X[m,k]", "r[m]", "g[k] + 1"]
    assert product(factors(e)) == e


def _block(name: str, axes: tuple[str, ...], data: np.ndarray, lo: tuple[int, ...] | None = None) -> Block:
    return Block(name, axes, lo or (0,) * len(axes), data)


ARRAYS = {
    "A": _block("A", ("m", "k"), np.random.default_rng(0).standard_normal((5, 7))),
    "b": _block("b", ("n",), np.random.default_rng(1).standard_normal(4)),
    "s": _block("s", (), np.asarray(0.5)),
}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    EXPRESSIONS, st.tuples(*(st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted).map(tuple) for n in (5, 4, 7)))
)
def test_a_block_of_an_expression_is_the_expression_of_blocks(e: Expr, ranges):
    whole = {"m": (0, 5), "n": (0, 4), "k": (0, 7)}
    part = dict(zip("mnk", ranges, strict=True))
    with np.errstate(all="ignore"):
        all_of_it, piece = evaluate(e, whole, ARRAYS.__getitem__), evaluate(e, part, ARRAYS.__getitem__)
    window = tuple(slice(*part[a]) for a in all_of_it.axes)
    assert piece.axes == all_of_it.axes
    np.testing.assert_array_equal(
        piece.data, np.broadcast_to(all_of_it.data, [whole[a][1] for a in all_of_it.axes])[window]
    )


def test_functions_mean_what_their_names_say():
    x = {"m": (0, 5)}
    got = {
        fn: evaluate(parse(f"{fn}(m)"), x, ARRAYS.__getitem__).data
        for fn in ("exp", "tanh", "sqrt", "silu", "gelu_tanh")
    }
    for fn, data in got.items():
        for i in range(5):
            want = {
                "exp": math.exp(i),
                "tanh": math.tanh(i),
                "sqrt": math.sqrt(i),
                "silu": i / (1 + math.exp(-i)),
                "gelu_tanh": 0.5 * i * (1 + math.tanh(math.sqrt(2 / math.pi) * (i + 0.044715 * i**3))),
            }[fn]
            assert data[i] == pytest.approx(want, rel=1e-12)


def test_reading_outside_the_block_that_is_held_says_what_was_asked_and_what_is_held():
    held = _block("A", ("m", "k"), np.zeros((2, 3)), lo=(4, 0))
    with pytest.raises(PlanError, match=r"A\[m 0..2,k 0..3\] is outside the block held, \[m 4..6,k 0..3\]"):
        evaluate(parse("A[m,k]"), {"m": (0, 2), "k": (0, 3)}, {"A": held}.__getitem__)


def test_a_name_that_is_neither_axis_nor_component_is_refused():
    with pytest.raises(PlanError, match="x is neither an axis of this block nor a known name"):
        evaluate(parse("x + m"), {"m": (0, 2)}, ARRAYS.__getitem__)


def test_arrays_align_by_the_names_of_their_axes():
    x = Named(("k", "m"), np.arange(6).reshape(3, 2).astype(float))
    assert x.to(("m", "n", "k")).shape == (2, 1, 3)
    np.testing.assert_array_equal(x.to(("m", "k")), x.data.T)


def test_silu_of_what_is_not_finite_is_what_its_quotient_is() -> None:
    x = np.array([np.inf, -np.inf, np.nan, -1e30, 1e30, -800.0])
    with np.errstate(invalid="ignore"):
        got = FUNCTIONS["silu"][1](x)
    assert np.array_equal(got, [np.inf, np.nan, np.nan, 0, 1e30, 0], equal_nan=True)
