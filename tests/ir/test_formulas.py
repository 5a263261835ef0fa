"""Ops that are their program: the contract, their text, computed positions, and how exact they ask a kernel to be."""

from __future__ import annotations

import numpy as np
import pytest

from emmy.errors import PlanError, UsageError
from emmy.ir import interpret
from emmy.ir.dtype import decode, encode
from emmy.ir.expr import parse
from emmy.ir.ops import formula, parse_op
from emmy.ir.program import Program, Stage, Value
from emmy.testing.op_contract import OpContract

NORM = "m={m},n=20;X[m,n]:{d};w[n]:{d}:constant;S[m]=sum(n,X[m,n]*X[m,n]);Y[m,n]:{d}=X[m,n]*rsqrt(S[m]*0.05+1e-06)*w[n]"


def ops(*texts: str):
    return tuple(map(parse_op, texts))


class TestFormula(OpContract):
    ops = (
        formula(NORM.format(m=3, d="f16")),
        formula(NORM.format(m="m(1..7)", d="bf16")),
        formula("m=4,n=6,k=5;A[m,k]:f32;B[k,n]:f32;C[m,n]:f32=sum(k,A[m,k]*B[k,n])"),
        formula("a=2,b=3,c=4;X[b,c,a]:f16;t[]:f32;M[a]=max(b,c,X[b,c,a]);Y[a,b,c]:f16=where(b<=1,exp(X[b,c,a]-M[a]),t[()])"),
        formula("m=5,n=4,v=9;E[v,n]:f32:constant;i[m]:i32;j[m]:i32;Y[m,n]:f32=E[i[m],n]-E[j[m],n]+E[8,n]"),
        formula("m=5,r=2,n=4;X[m,r,n]:f16;Y[m,r,n]:f16=X[m,1-r,n]*2;S[m]:f32=sum(r,n,X[m,r,n])"),
    )  # fmt: skip


class TestRows(OpContract):
    ops = ops(
        "rms_norm:3x20:f32",
        "rms_norm:m(1..7)x33:f16",
        "rms_norm:4x16:bf16:residual",
        "rms_norm:m(2..3)x8:f16:residual",
        "norm_add_norm:3x20:f32",
        "norm_add_norm:m(2..3)x8:bf16:scale",
        "rstd:5x7:f16",
        "row_sum:m(1..4)x19:f16",
        "row_sum:3x8:f32",
        "softmax:3x17:f16",
    )


class TestPointwise(OpContract):
    ops = ops(
        "scale:3x8:f16",
        "norm_scale:m(1..5)x12:f32",
        "geglu_mul:4x9:f16",
        "swiglu_mul:4x9:bf16",
        "cast:3x5:f32:f16",
        "cast:3x5:bf16:f32",
        "copy:m(1..9)x4:f16",
    )


class TestPositions(OpContract):
    ops = ops(
        "rope:2x3x8:f16",
        "rope:2xm(1..5)x8:f32",
        "rope:1x2x16:bf16:4",
        "embedding:5x6x40:f16",
        "embedding:m(1..5)x6x40:f32",
    )


def test_a_named_op_is_the_formula_that_its_program_says():
    op = parse_op("rms_norm:m(1..7)x20:bf16")
    same = formula(NORM.format(m="m(1..7)", d="bf16"))
    assert same.program() == op.program()
    x = op.inputs("normal", 3, {"m": 5})
    np.testing.assert_allclose(same.reference(x)["Y"], op.reference(x)["Y"], rtol=1e-12)
    assert same.tolerance() == op.tolerance() and same.work({"m": 5}) == op.work({"m": 5})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no size"),
        ("m=4", "nothing leaves"),
        ("m=0;X[m]:f32;Y[m]:f32=X[m]", "allowed are 1"),
        ("m=m(4..2);X[m]:f32;Y[m]:f32=X[m]", "the lower end first"),
        ("m=4;X[m]:f64;Y[m]:f32=X[m]", "neither an input"),
        ("m=4;X[m]:f32;Y[m]=X[m]", "nothing leaves"),
        ("m=4;X[m]:f32;Y[m]:f32=X[m];Z[m]:f32", "inputs come first"),
        ("m=4;X[m]:f32;Y[m]:f32=W[m]", "reads W"),
        ("m=4;X[m]:f32;Y[m]:f32=cosh(X[m])", "cosh"),
        ("m=4,n=2;X[m,n]:f32;Y[m]:f32=1+sum(n,X[m,n])", "sum"),
        ("m=4,n=2;X[m,n]:f32;Y[m]:f32=sum(X[m,n])", "a fold is a whole body"),
        ("m=4,n=2;X[m,n]:f32;Y[n,m]:f32=X[n,m]", "own axes, in order"),
        ("m=4;i[m]:i32;Y[m]:f32=i[m]", "may only be a position"),
        ("m=4;X[m]:f32;Y[m]:f32=X[4]", "positions 0..3"),
        ("m=4,n=8;X[m,n]:f32;Y[m,n]:f32=X[m-1,n]", "positions 0..3"),
        ("m=4,n=8;X[m,n]:f32;Y[m,n]:f32=X[m,2*n]", "positions 0..7"),
        ("m=4,n=8;X[m,n]:f32;Y[m,n]:f32=sum(m,X[m,n])", "folds m, which is one of its own axes"),
        ("m=4;X[m]:f32;Y[m]:f32=X[m*0.5]", "whole numbers"),
        ("m=4;X[m]:f32;Z[m]=-X[m];Y[m]:f32=Z[3-m]", "only an input"),
        ("m=4;X[m]:f32;Y[m]:i32=X[m]", "only an input is constant, or i32"),
    ],
)
def test_a_text_that_means_nothing_is_refused_in_a_sentence(text, said):
    with pytest.raises(UsageError, match="formula") as e:
        parse_op(f"formula:{text}")
    assert said in str(e.value)


@pytest.mark.parametrize(
    "text", ["rms_norm:3x4", "rms_norm:3x4x5:f32", "rms_norm:3x4:f32:bias", "rms_norm:0x4:f32", "copy:3x4:f32:f16",
             "norm_add_norm:3x4:f32:residual",
             "cast:3x4:f32", "cast:3x4:f32:i32", "rope:1x2x7:f32", "rope:1x2x8:f32:6", "rope:m(1..2)xm(1..2)x8:f32",
             "embedding:3x4:f32", "scale:3xm(1..4):f32", "rope:1x2x8:f32:0"],
)  # fmt: skip
def test_a_wrong_key_of_a_row_op_is_refused(text):
    with pytest.raises(UsageError):
        parse_op(text)


def test_a_position_beyond_a_value_is_an_error_of_the_interpreter():
    p = Program((("m", 3), ("v", 4)), (Value("i", ("m",), "i32"), Value("E", ("v",))),
                (Stage("Y", ("m",), parse("E[i[m]]")),), ("Y",))  # fmt: skip
    e = np.arange(4.0)
    assert list(interpret.run(p, {"i": np.array([3.0, 0, 3]), "E": e})["Y"]) == [3, 0, 3]
    for bad in (-1.0, 4.0):
        with pytest.raises(PlanError, match="outside the block held, "):
            interpret.run(p, {"i": np.array([0, bad, 0]), "E": e})


def test_rope_turns_pairs_as_rotate_half_does():
    op = parse_op("rope:2x5x8:f32")
    x = {v: decode(a, "f32") for v, a in op.inputs("normal", 1).items()}
    flat, cos, sin = x["X"].reshape(2, 5, 8), np.tile(x["cos"], 2), np.tile(x["sin"], 2)
    turned = np.concatenate([-flat[..., 4:], flat[..., :4]], -1)
    got = op.reference({v: encode(a, "f32") for v, a in x.items()})["Y"].reshape(2, 5, 8)
    np.testing.assert_allclose(got, flat * cos + turned * sin, rtol=1e-12)


@pytest.mark.parametrize(
    "key", ["rms_norm:64x3840:f32", "softmax:64x999:f32", "rope:2x64x64:f32", "geglu_mul:64x300:f32"]
)
def test_f32_arithmetic_is_within_the_tolerance_but_not_far_within(key):
    """By numpy in f32, in another order of summation; a thousandth off is seen."""
    op = parse_op(key)
    x = op.inputs("normal", 11)
    exact = op.reference(x)["Y"]
    rng = np.random.default_rng(0)
    roundings = 2.0**-23 * rng.uniform(-1, 1, exact.shape)
    assert op.error_norm({"Y": encode(exact * (1 + 4 * roundings), "f32")}, x, "normal") < 1
    assert op.error_norm({"Y": encode(exact * 1.001, "f32")}, x, "normal") > 1
    absolute, relative = op.tolerance()
    assert absolute < 1e-4 and relative < 1e-5


def test_work_counts_what_is_read_of_a_table_not_the_table():
    assert parse_op("embedding:512x3840x262144:f16").work().bytes == 512 * (2 * 3840 * 2 + 4)
    assert parse_op("rope:16x512x256:f16").work().bytes == 2 * (2 * 16 * 512 * 256 + 2 * 512 * 128)
