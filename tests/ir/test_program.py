"""Programs: what they refuse, how they print, and what sizes they take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from emmy.errors import PlanError
from emmy.ir.expr import parse
from emmy.ir.ops import parse_op
from emmy.ir.program import MAX, SUM, Program, Reduce, Stage, Sym, Value
from emmy.testing.five_plans import attention, norm_linear

A, B = Value("A", ("m", "k")), Value("B", ("k", "n"))
C = Stage("C", ("m", "n"), parse("A[m,k] * B[k,n]"), (Reduce("k", SUM),))
DIMS = (("m", 3), ("n", 4), ("k", 5))


BROKEN = {
    "reads what is computed later": (
        ((A, B), (Stage("D", ("m", "n"), parse("C[m,n]")), C), ("D",)), "D reads C, which no input or earlier",
    ),
    "reads what does not exist": (((A,), (C,), ("C",)), "C reads B, which no input"),
    "uses an axis that it does not walk": (((A, B), (replace(C, axes=("m",)),), ("C",)), "C uses axes n; it walks m, k"),
    "walks an axis that is no dimension": (((A, B, Value("x", ("z",))), (C,), ("C",)), "x has axes z; the program has m, n, k"),
    "folds an axis that is no dimension": (
        ((A,), (Stage("C", ("m", "k"), parse("A[m,k]"), (Reduce("z", SUM),)),), ("C",)), "C has axes z; the program has m, n, k",
    ),
    "reads a value across": (
        ((A,), (Stage("T", ("k", "m"), parse("A[k,m]")),), ("T",)), r"T reads A\[k,m\]; a value is read at its own axes, in order",
    ),
    "names two values alike": (((A, B, Value("C", ("m",))), (C,), ("C",)), "two values of the program are named C"),
    "folds two axes by two monoids": (
        ((A,), (Stage("s", (), parse("A[m,k]"), (Reduce("m", SUM), Reduce("k", MAX))),), ("s",)), "s folds by 2 monoids",
    ),
    "gives out what no stage computes": (((A, B), (C,), ("C", "D")), "outputs D are computed by no stage"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_program_is_refused_that(what: str):
    (inputs, stages, outputs), reason = BROKEN[what]
    with pytest.raises(PlanError, match=reason):
        Program(DIMS, inputs, stages, outputs)


def test_equal_programs_are_equal_and_hash_alike_and_others_are_not():
    one, same = (parse_op("matmul:8x4x3:f32:bias").program() for _ in range(2))
    assert one == same and hash(one) == hash(same) and one is not same
    assert one != parse_op("matmul:8x4x3:f32:residual").program()


def test_it_prints_one_stage_a_line():
    assert str(norm_linear(64, 32, 16)) == "\n".join(
        [
            "program m=64 n=32 k=16",
            "  in  X[m,k] f16",
            "  in  g[k] f16  constant",
            "  in  W[n,k] f16  constant",
            "      ss[m] sum= X[m,k] * X[m,k]  over k",
            "      r[m] = rsqrt(ss[m] / 16 + 1e-06)",
            "      Xn[m,k] = X[m,k] * r[m] * g[k]",
            "  out Y[m,n] sum= Xn[m,k] * W[n,k]  over k  f16",
        ]
    )


def test_sizes_are_asked_for_by_symbol_and_checked():
    p = Program(
        (("m", Sym("t", 8, 64, 8)), ("k", 5)), (A,), (Stage("s", ("m",), parse("A[m,k]"), (Reduce("k", SUM),)),), ("s",)
    )
    assert p.sizes({"t": 16}) == {"m": 16, "k": 5}
    for wrong in (None, {}, {"t": 12}, {"t": 72}, {"m": 16}):
        with pytest.raises(
            PlanError, match=r"size of m: got .*, allowed 8..64 in multiples of 8; pass it as sizes=\{'t'"
        ):
            p.sizes(wrong)


def test_stages_that_replace_others_are_put_where_what_they_read_is_ready():
    p = attention(1, 2, 4, 2)
    swapped = p.with_stages(("P",), (Stage("P", ("h", "q", "k"), parse("exp(A[h,q,k])")),))
    order = [s.out for s in swapped.stages]
    assert all(order.index(v) < order.index(s.out) for s in swapped.stages for v in s.reads if v in order)
    circle = (Stage("S", ("h", "q", "k"), parse("O[h,q,e] * K[h,k,d]"), (Reduce("d", SUM), Reduce("e", SUM))),)
    with pytest.raises(PlanError, match="read each other in a circle"):
        p.with_stages(("S",), circle)
