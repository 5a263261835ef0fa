"""The meaning of programs: folds against numpy, and that any way of cutting an axis folds to the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emmy.errors import PlanError
from emmy.ir import interpret
from emmy.ir.expr import Block, Named, parse
from emmy.ir.ops import parse_op
from emmy.ir.program import MAX, SUM, Monoid, Program, Reduce, Stage, Value
from emmy.ir.schedule import replay
from emmy.ir.target import load_target
from emmy.testing.five_plans import attention, norm_linear
from emmy.testing.move_contract import random_inputs


def reduce_rows(monoid: Monoid, m: int, k: int) -> Program:
    stage = Stage("s", ("m",), parse("X[m,k]"), (Reduce("k", monoid),))
    return Program((("m", m), ("k", k)), (Value("X", ("m", "k")),), (stage,), ("s",))


@pytest.mark.parametrize("k", [1, 2, 3, 7, 8, 33])
def test_sum_and_max_fold_like_numpy(k: int):
    x = np.random.default_rng(k).standard_normal((5, k))
    np.testing.assert_allclose(interpret.run(reduce_rows(SUM, 5, k), {"X": x})["s"], x.sum(1), rtol=1e-13)
    np.testing.assert_array_equal(interpret.run(reduce_rows(MAX, 5, k), {"X": x})["s"], x.max(1))


def test_a_body_that_ignores_a_folded_axis_counts_once_for_each_position():
    stage = Stage("s", ("m",), parse("y[m]"), (Reduce("k", SUM),))
    p = Program((("m", 2), ("k", 7)), (Value("y", ("m",)),), (stage,), ("s",))
    np.testing.assert_array_equal(interpret.run(p, {"y": np.array([1.0, 2.0])})["s"], [7, 14])


def test_several_axes_fold_at_once():
    stage = Stage("s", (), parse("X[m,k]"), (Reduce("m", SUM), Reduce("k", SUM)))
    p = Program((("m", 3), ("k", 5)), (Value("X", ("m", "k")),), (stage,), ("s",))
    x = np.arange(15.0).reshape(3, 5)
    assert interpret.run(p, {"X": x})["s"] == x.sum()


def test_attention_means_a_masked_softmax():
    x = random_inputs(attention(2, 3, 8, 4))
    s = np.einsum("hqd,hkd->hqk", x["Q"], x["K"]) / 2
    s = np.where(np.arange(8) <= np.arange(3)[:, None] + 5, s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    want = np.einsum("hqk,hke->hqe", p / p.sum(-1, keepdims=True), x["V"])
    np.testing.assert_allclose(interpret.run(attention(2, 3, 8, 4), x)["O"], want, rtol=1e-12)


def test_norm_linear_means_a_scaled_product():
    x = random_inputs(norm_linear(5, 4, 6))
    r = 1 / np.sqrt((x["X"] ** 2).mean(1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(interpret.run(norm_linear(5, 4, 6), x)["Y"], x["X"] * r * x["g"] @ x["W"].T, rtol=1e-12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.integers(0, 99), st.floats(0.1, 50))
def test_a_recurrence_folds_the_same_however_its_axis_is_cut(cuts: list[int], seed: int, spread: float):
    k = sum(cuts)
    program = replay(attention(1, 3, max(k, 3), 4), "k0/online(O)", load_target("cpu")).program
    stage, monoid = program.stage("O"), program.stage("O").monoid
    assert monoid is not None
    rng = np.random.default_rng(seed)
    blocks = {
        "A": Block("A", ("h", "q", "k"), (0, 0, 0), spread * rng.standard_normal((1, 3, k))),
        "V": Block("V", ("h", "k", "e"), (0, 0, 0), rng.standard_normal((1, k, 4))),
    }
    env = {"h": (0, 1), "q": (0, 3), "k": (0, k), "e": (0, 4), "d": (0, 4)}
    state: dict[str, Named] | None = None
    for lo, n in zip(np.cumsum([0, *cuts]), cuts, strict=False):
        piece = interpret.lift(stage, {**env, "k": (int(lo), int(lo) + n)}, blocks.__getitem__)
        state = interpret.combine(monoid, state, piece) if state else piece
    assert state is not None
    got = interpret.finish(monoid, state)
    whole = interpret.value_of(stage, env, blocks.__getitem__)
    np.testing.assert_allclose(got.to(stage.axes), whole.to(stage.axes), rtol=1e-9, atol=1e-12)


def test_the_state_of_nothing_changes_nothing():
    program = replay(attention(1, 3, 5, 4), "k0/online(O)", load_target("cpu")).program
    for stage in (program.stage("S"), program.stage("O")):
        m = stage.monoid
        assert m is not None
        rng = np.random.default_rng(0)
        shape = {"h": 1, "q": 3, "k": 5, "e": 4}
        state = {c: Named(axes, rng.random([shape[a] for a in axes])) for c, axes in m.components(stage)}
        identity = zip(m.components(stage), m.identity, strict=True)
        nothing = {c: Named(axes, np.full([shape[a] for a in axes], v)) for (c, axes), v in identity}
        for got in (interpret.combine(m, nothing, state), interpret.combine(m, state, nothing)):
            for c in state:
                np.testing.assert_array_equal(got[c].to(state[c].axes), state[c].data)


def test_inputs_are_checked_by_name_and_shape():
    p = parse_op("matmul:3x4x5:f32").program()
    with pytest.raises(PlanError, match=r"input B: got nothing, needs shape \(5, 4\)"):
        interpret.run(p, {"A": np.zeros((3, 5))})
    with pytest.raises(PlanError, match=r"input A: got \(3, 4\), needs shape \(3, 5\)"):
        interpret.run(p, {"A": np.zeros((3, 4)), "B": np.zeros((5, 4))})


def test_a_monoid_may_not_read_values():
    odd = Monoid("odd", (("x", None),), (0.0,), (parse("a_x + X[m,k]"),), parse("x"))
    with pytest.raises(PlanError, match="a monoid's expression reads the value X"):
        interpret.run(reduce_rows(odd, 2, 3), {"X": np.zeros((2, 3))})
