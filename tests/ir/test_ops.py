"""Ops: the contract for matmul, and its text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emmy.errors import EmmyError, UsageError
from emmy.ir.dtype import DTYPES, decode, encode
from emmy.ir.expr import FUNCTIONS
from emmy.ir.ops import Attention, Bmm, Geglu, GegluLinear, Matmul, NormLinear, Swiglu, SwigluLinear, matmul, parse_op
from emmy.ir.ops.matmul import EPILOGUES, STATISTIC
from emmy.ir.program import Sym
from emmy.testing.op_contract import OpContract


class TestMatmul(OpContract):
    ops = (
        matmul(1, 1, 1),
        matmul(5, 7, 33, layout="nk"),
        matmul(1, 19, 40, "f16", "nk", ("bias", "gelu_tanh")),
        matmul(6, 4, 129, "bf16", "kn", ("scale", "residual")),
        matmul(6, 40, 9, "f16", "nk", ("residual", "sum_squares")),
        matmul(Sym("m", 2, 9), 8, 16, "f32", "kn", ("sum_squares",)),
        matmul(Sym("m", 2, 9), 8, 16, "bf16", "nk", ("bias", "silu", "residual")),
        matmul(Sym("m", 1, 1), 3, 2, "f32", "kn", ("residual", "bias", "scale")),
    )


class TestAttention(OpContract):
    ops = (
        Attention(1, 1, 1, 1),
        Attention(2, 3, 7, 8, "f32"),
        Attention(4, 9, 9, 4, "f16", causal=True),
        Attention(4, 5, 12, 4, "bf16", causal=True, window=3, kv_heads=2),
        Attention(2, 9, 4, 4, "f16", causal=True),  # queries that see no key
        Attention(4, 1, 9, 4, "f16", causal=True, window=4, kv_heads=1, shared=True),
        Attention(2, Sym("m", 2, 9), Sym("m", 2, 9), 4, "f16", causal=True, scale=0.25),
    )


class TestGlu(OpContract):
    ops = (
        Geglu(1, 1, 1),
        Geglu(5, 7, 33, layout="nk"),
        Swiglu(6, 4, 129, "bf16"),
        Geglu(Sym("m", 2, 9), 8, 16, "f16", "nk"),
        Swiglu(Sym("m", 1, 1), 3, 2, "f32", "nk"),
    )


class TestBmm(OpContract):
    ops = (
        Bmm(1, 1, 1, 1),
        Bmm(3, 5, 7, 33, layout="nk"),
        Bmm(2, 1, 19, 40, "f16", "nk"),
        Bmm(4, Sym("m", 2, 9), 8, 16, "bf16"),
        Bmm(2, Sym("m", 1, 1), 3, 2, "f32", "nk"),
    )


class TestNormLinear(OpContract):
    ops = (
        NormLinear(1, 1, 1),
        NormLinear(5, 7, 33, layout="nk"),
        NormLinear(6, 4, 129, "bf16"),
        NormLinear(Sym("m", 2, 9), 8, 16, "f16", "nk"),
        NormLinear(Sym("m", 1, 1), 3, 2, "f16", "kn", residual=True),
    )


class TestGluLinear(OpContract):
    ops = (
        GegluLinear(1, 1, 1),
        SwigluLinear(5, 7, 33, "bf16", "nk", residual=True),
        GegluLinear(Sym("m", 2, 9), 8, 16, "f16", "nk"),
        SwigluLinear(Sym("m", 1, 1), 3, 2, "f32", "kn", residual=True),
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    m=st.one_of(st.integers(1, 1 << 24), st.tuples(st.integers(1, 99), st.integers(0, 999))),
    n=st.integers(1, 1 << 24),
    k=st.integers(1, 1 << 24),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(("kn", "nk")),
    epilogue=st.permutations(EPILOGUES).flatmap(lambda p: st.integers(0, 6).map(lambda n: tuple(p[:n]))),
)
def test_any_matmul_has_a_key_that_parses_back(m, n, k, dtype, layout, epilogue):
    epilogue = tuple(sorted(epilogue, key=lambda e: e == STATISTIC))  # the last word, when it is there
    op = matmul(m if isinstance(m, int) else Sym("m", m[0], m[0] + m[1]), n, k, dtype, layout, epilogue)
    assert parse_op(op.key) == op


@pytest.mark.parametrize(
    "text",
    [
        "", "matmul", "matmul:", "conv:3x3", "matmul:3x4:f32", "matmul:3x4x5", "matmul:3x4x5:", "matmul:3x4x5:f64",
        "matmul:0x4x5:f32", "matmul:3x-4x5:f32", "matmul:3x4x5.0:f32", "matmul:3x4x16777217:f32", "matmul:²x4x5:f32",
        "matmul:٣x4x5:f32", "matmul:3x4x5:f32:", "matmul:3x4x5:f32:bias,", "matmul:3x4x5:f32:bias,bias", "matmul:3X4X5:f32",
        "matmul:3x4x5:f32:kn,nk", "matmul:3x4x5:f32:relu", "matmul:m(5..3)x4x5:f32", "matmul:m(0..3)x4x5:f32",
        "matmul:m(1..)x4x5:f32", "matmul:n(1..3)x4x5:f32", "matmul:3xm(1..4)x5:f32", "matmul:3x4x5 :f32", "matmul:3x4x5:f32 x",
        "geglu:3x4x5:f32:bias", "geglu:3x4x5", "swiglu:0x4x5:f32", "swiglu:3x4x5:f32:nk,nk", "geglu:m(1..)x4x5:f16:kn", "glu:3x4x5:f32",
        "matmul:3x4x5:f32:sum_squares,bias",
        "bmm:3x4x5:f32", "bmm:2x3x4x5", "bmm:0x3x4x5:f32", "bmm:2x3x4x5:f32:bias", "bmm:b(1..2)x3x4x5:f32", "bmm:2x3xm(1..4)x5:f16",
        "bmm:16777217x1x1x1:f32", "bmm:2x3x4x5x6:f32", "bmm:" + "9" * 5000 + "x4x5x6:f32",
        "matmul:" + "9" * 5000 + "x4x5:f32", "matmul:3x4x5:f32:" + "bias," * 5000, "matmul:\x00x4x5:f32",
    ],
)  # fmt: skip
def test_garbage_is_refused_with_what_is_expected(text: str):
    with pytest.raises(UsageError) as e:
        parse_op(text)
    assert 20 < len(str(e.value)) < 400
    assert "allowed" in str(e.value) or "such as" in str(e.value) or "one of" in str(e.value)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.text(alphabet="matmul:x123m().,f16b,nk٣²- \n", max_size=40) | st.text(max_size=20).map(lambda t: f"matmul:{t}")
)
def test_random_text_never_escapes_as_another_error(text: str):
    try:
        op = parse_op(text)
    except EmmyError:
        return
    assert parse_op(op.key) == op


@pytest.mark.parametrize(
    "op",
    [
        lambda: matmul(0, 1, 1),
        lambda: matmul(1, 1, 1, "f64"),
        lambda: matmul(1, 1, 1, layout="tn"),
        lambda: matmul(1, 1, 1, epilogue=("relu",)),
        lambda: matmul(1, 1, 1, epilogue=("bias", "bias")),
        lambda: matmul(Sym("b", 1, 4), 1, 1),
        lambda: Geglu(1, 0, 1),
        lambda: Bmm(0, 1, 1, 1),
        lambda: Bmm(1, Sym("b", 1, 4), 1, 1),
        lambda: Swiglu(1, 1, 1, "f64"),
        lambda: matmul(Sym("m", 8, 64, 8), 1, 1),
    ],
)
def test_an_op_that_its_text_could_not_name_cannot_be_made(op):
    with pytest.raises(UsageError, match="allowed"):
        op()


def test_exact_inputs_stay_exact_in_f32_sums():
    op = Matmul(4, 4, 200)
    assert op.is_exact("integer") and not op.is_exact("normal")
    x = op.inputs("integer", 0)
    single = x["A"].astype(np.float32) @ x["B"].astype(np.float32)
    assert op.error_norm({"C": encode(single, "f32")}, x, "integer") == 0
    assert not matmul(1, 1, 1 << 21).is_exact("integer"), "sums of 2^21 products of 4 can pass 2^24 after the epilogue"


@pytest.mark.parametrize("dtype", DTYPES)
def test_arithmetic_in_f32_is_well_within_the_tolerance_and_a_dropped_product_is_not(dtype):
    op = matmul(32, 32, 512, dtype, "nk")
    x = op.inputs("normal", 1)
    a, b = (decode(x[v], dtype).astype(np.float32) for v in "AB")
    assert op.error_norm({"C": encode(a @ b.T, dtype)}, x, "normal") < 0.75
    short = a[:, :-1] @ b[:, :-1].T
    assert op.error_norm({"C": encode(short, dtype)}, x, "normal") > 1


def test_another_batch_is_not_within_the_tolerance_and_the_work_is_that_of_all():
    op, one = parse_op("bmm:3x16x16x64:f16:nk"), parse_op("matmul:16x16x64:f16:nk")
    x = op.inputs("normal", 1)
    c = op.reference(x)["C"]
    assert op.error_norm({"C": encode(c[[0, 2, 1]], "f16")}, x, "normal") > 1
    assert (op.work().flops, op.work().bytes) == (3 * one.work().flops, 3 * one.work().bytes)
    assert not any(v.constant for v in op.program().inputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pair_in_f32_is_well_within_the_tolerance_and_a_dropped_product_or_another_activation_is_not(dtype):
    op = Geglu(32, 32, 512, dtype, "nk")
    x = op.inputs("normal", 1)
    a, *weights = (decode(x[v], dtype).astype(np.float32) for v in "AGU")

    def error(k: int, activation: str = "gelu_tanh") -> float:
        gate, up = (a[:, :k] @ w[:, :k].T for w in weights)
        return op.error_norm({"Y": encode(FUNCTIONS[activation][1](gate) * up, dtype)}, x, "normal")

    assert error(512) < 0.75 and error(511) > 1 and error(512, "silu") > 1


def test_whole_numbers_of_a_pair_fit_the_smallest_format_however_long_k():
    op = Geglu(64, 64, 15360, "f16")
    (y,) = op.reference(op.inputs("integer", 0)).values()
    assert 50 < np.abs(y).max() < 65504


def test_parameters_are_constant_and_what_may_have_been_computed_just_before_is_not():
    p = parse_op("matmul:4x4x4:f16:nk,bias,scale,residual").program()
    assert {v.name: v.constant for v in p.inputs} == {"A": False, "B": True, "bias": True, "scale": False, "R": False}
    assert not p.is_constant("C")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("attention:4x5x6:f16", "the shape is not HEADSxQUERIESxKEYSxDIM"),
        ("attention:4x5x6x8:f64", "the dtype is not one of"),
        ("attention:4x5x6x8:f16:window3", "a window of 3 positions needs causal"),
        ("attention:4x5x6x8:f16:kv3", "3 heads of K and V do not divide the 4 of Q"),
        ("attention:4x5x6x8:f16:causal,causal", "each option may stand once"),
        ("attention:4x5x6x8:f16:soft", "the options are causal, window<N>, kv<N>, k_is_v and scale<X>; got 'soft'"),
        ("attention:4x5x6x8:f16:scale0", "scale is 0, allowed 1e-09..1e+09"),
        ("attention:4x5x6x8:f16:scale1e40", "scale is 1e+40, allowed 1e-09..1e+09"),
        ("paged_attention:2x4x1x64x16:f16:scale0.0", "scale is 0, allowed 1e-09..1e+09"),
        ("paged_attention:2x4x1x64x16:f16:page0", "got 'page0', N is 1 or more"),
        ("attention:4xm(1..6)x6x8:f16", "both are open and equal, or neither"),
        ("attention:0x5x6x8:f16", "heads is 0"),
    ],
)
def test_odd_attention_is_refused_with_words(text: str, words: str) -> None:
    with pytest.raises(UsageError) as e:
        parse_op(text)
    assert words in str(e.value)


def test_attention_counts_only_what_masks_leave() -> None:
    assert parse_op("attention:2x4x4x8:f16").work().flops == 4 * 2 * 16 * 8
    assert parse_op("attention:2x4x4x8:f16:causal").work().flops == 4 * 2 * 10 * 8
    assert parse_op("attention:2x4x4x8:f16:causal,window2").work().flops == 4 * 2 * 7 * 8
