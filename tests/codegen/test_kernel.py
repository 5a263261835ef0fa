"""Kernel IR: whole-number arithmetic folds without changing its value, and the interpreter notices damaged kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emmy.codegen import kernel_run
from emmy.codegen.build import SourceUnit, source
from emmy.codegen.kernel import (
    For,
    If,
    Int,
    IntVar,
    Kernel,
    Load,
    Stmt,
    Store,
    Whole,
    both,
    differ,
    either,
    evaluated,
    least,
    minus,
    over,
    pieces,
    plus,
    rest,
    same,
    show_int,
    times,
)
from emmy.errors import PlanError
from emmy.ir.ops import parse_op
from emmy.ir.target import load_target

NAMES = {"x": 3, "y": 11}
WHOLES = st.recursive(
    st.one_of(st.integers(0, 20).map(Int), st.sampled_from([IntVar(n) for n in NAMES])),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda ab: plus(*ab)),
        st.tuples(inner, st.integers(0, 5).map(Int)).map(lambda ab: times(*ab)),
        st.tuples(inner, inner).map(lambda ab: least(*ab)),
        st.tuples(inner, st.integers(1, 9).map(Int)).map(lambda ab: over(*ab)),
        st.tuples(inner, st.integers(1, 9).map(Int)).map(lambda ab: rest(*ab)),
    ),
    max_leaves=8,
)


def value(x: Whole) -> int:
    return evaluated(x, NAMES)


@settings(max_examples=200, deadline=None)
@given(WHOLES, WHOLES, st.integers(1, 9))
def test_folded_arithmetic_has_the_value_of_the_plain_one(a: Whole, b: Whole, step: int) -> None:
    x, y = value(a), value(b)
    assert value(plus(a, b)) == x + y
    assert value(minus(a, b)) == x - y
    assert value(times(a, b)) == x * y
    assert value(pieces(a, step)) == -(-x // step)
    assert value(least(a, b)) == min(x, y)
    assert value(same(a, b)) == int(x == y) and value(differ(a, b)) == int(x != y)
    assert bool(value(both(a, b))) == (bool(x) and bool(y)) and bool(value(either(a, b))) == (bool(x) or bool(y))


@settings(max_examples=200, deadline=None)
@given(WHOLES)
def test_the_printed_expression_means_the_same(a: Whole) -> None:
    text = show_int(a).replace("/", "//").replace("imin", "min").replace("imax", "max")
    assert eval(text, {"__builtins__": {}, "min": min, "max": max}, dict(NAMES)) == value(a)


# ---------------------------------------------------------------- damage
OP = parse_op("matmul:5x20x6:f32")
SCHEDULE = "k0/split(m,core,2) k0/split(k,serial,3) k0/stage(A,pack,1) k0/stage(B,pack,1) k0.C/atom(fma,2,16,1,4)"


def unit() -> SourceUnit:
    return source(OP, SCHEDULE, load_target("cpu-portable"))


def changed(body: tuple[Stmt, ...], change: object) -> tuple[Stmt, ...]:
    """`body` with every statement, at any depth, replaced by change(statement); None drops it."""
    out: list[Stmt] = []
    for s in body:
        new = change(s)  # type: ignore[operator]
        if isinstance(new, For):
            new = replace(new, body=changed(new.body, change))
        if isinstance(new, If):
            new = replace(new, then=changed(new.then, change), other=changed(new.other, change))
        if new is not None:
            out.append(new)
    return tuple(out)


def run(kernel: Kernel) -> dict[str, np.ndarray]:
    return kernel_run.run((kernel,), OP.inputs("normal", 0))


def test_the_undamaged_kernel_is_right() -> None:
    inputs = OP.inputs("integer", 0)
    got = kernel_run.run(unit().kernels, inputs)["C"].reshape(5, 20)
    assert OP.error_norm({"C": got}, inputs, "integer") == 0


def test_a_copy_that_is_left_out_is_noticed_as_a_read_of_unwritten_memory() -> None:
    k = unit().kernels[0]
    damaged = changed(
        k.body, lambda s: None if isinstance(s, Store) and s.view.startswith("to") and isinstance(s.value, Load) else s
    )
    with pytest.raises(PlanError, match="nobody has written"):
        run(replace(k, body=damaged))


def test_a_panel_that_is_too_small_is_noticed_as_out_of_bounds() -> None:
    k = unit().kernels[0]
    small = tuple(replace(s, elements=Int(4)) if s.name.startswith("B_pack") else s for s in k.scratch)
    with pytest.raises(PlanError, match=r"element .* of B_pack"):
        run(replace(k, scratch=small))


def test_a_block_too_few_is_noticed_as_an_unwritten_output() -> None:
    k = unit().kernels[0]
    with pytest.raises(PlanError, match="never written"):
        run(replace(k, blocks=Int(2)))


def test_a_loop_that_runs_too_far_is_noticed() -> None:
    k = unit().kernels[0]
    damaged = changed(
        k.body, lambda s: replace(s, hi=plus(s.hi, Int(s.step))) if isinstance(s, For) and s.var.startswith("n") else s
    )
    with pytest.raises(PlanError):
        run(replace(k, body=damaged))


def test_an_input_that_is_written_is_noticed() -> None:
    k = unit().kernels[0]
    damaged = changed(
        k.body, lambda s: replace(s, view="A", at=Int(0)) if isinstance(s, Store) and s.view.startswith("to") else s
    )
    with pytest.raises(PlanError, match="writes the input A"):
        run(replace(k, body=damaged))


# ---------------------------------------------------------------- golden texts
GOLDEN = {
    "naive": ("matmul:5x20x6:f32:bias,gelu_tanh", ""),
    "packed": (
        "matmul:m(1..64)x96x40:bf16:nk,bias",
        "k0/split(m,core,16) k0/split(k,serial,16) k0/stage(A,pack,1) k0/stage(B,pack,1) k0.C/atom(fma,2,8,1,4) k0.C/unroll(2)",
    ),
    "splitk": ("matmul:4x6x40:f32:nk,silu", "k0/splitk(C,2) k0.C/atom(dot,2,2,4,4)"),
}


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_kernel_and_c_text_are_as_reviewed(name: str, golden: object) -> None:
    op, schedule = GOLDEN[name]
    made = source(parse_op(op), schedule, load_target("cpu-portable"))
    plan, kernels = str(made.plan), "\n\n".join(str(k) for k in made.kernels)
    code = made.text[made.text.index("static void k0(") :]
    golden(f"cpu_{name}.txt", f"# {op}  {schedule}\n{plan}\n\n{kernels}\n\n{code}")  # type: ignore[operator]


def test_the_same_schedule_gives_the_same_digest_and_another_one_another() -> None:
    assert unit().digest == unit().digest
    assert unit().digest != source(OP, "", load_target("cpu-portable")).digest
