"""Views of inputs, whole numbers that are known at run time only, and attention of pages: what they mean, and what is refused."""

from __future__ import annotations

import random

import numpy as np
import pytest

from emmy.codegen.build import source
from emmy.codegen.execute import execute
from emmy.errors import PlanError, UsageError
from emmy.ir import interpret
from emmy.ir.dtype import decode
from emmy.ir.expr import Axis, Const, Read, parse
from emmy.ir.masks import Bound, Place, bounds, compared
from emmy.ir.ops import PagedAttention, parse_op
from emmy.ir.program import Program, Stage, Sym, Value
from emmy.ir.schedule import parse_move, replay
from emmy.ir.target import load_target
from emmy.search.schedule_space import ScheduleSpace
from emmy.testing.op_contract import OpContract
from tests.codegen.running import interpreted

DECODE = "paged_attention:3x4x2x40x8:f16:causal,kv2,page8"
LOOPS = "k0/online(O) k0/split(b,grid,1) k0/split(g,grid,1) k0/split(q,grid,2) k0/split(t,serial,8)"


class TestPagedAttention(OpContract):
    ops = (
        PagedAttention(1, 1, 1, 1, 1, page=1),
        PagedAttention(2, 4, 1, 20, 4, "f32", kv_heads=2, page=8),
        PagedAttention(3, 4, 5, 9, 4, "f16", causal=True, kv_heads=1, page=4, pool=20),  # queries that see no key
        PagedAttention(2, 4, 3, 12, 4, "bf16", causal=True, window=3, kv_heads=2, shared=True, scale=0.25),
        PagedAttention(Sym("m", 2, 5), 2, 1, 8, 4, "f16", causal=True, page=4),
    )


def gathered(views: tuple[Stage, ...], *stages: Stage) -> Program:
    inputs = Value("X", ("p", "j"), "f16"), Value("ids", ("u",), "i32"), Value("F", ("u",), "f32")
    return Program((("t", 12), ("u", 3), ("p", 7), ("j", 4)), inputs, stages, (stages[-1].out,), views)


def view(body: str, axes: tuple[str, ...] = ("t",)) -> Stage:
    return Stage("V", axes, parse(body), (), "f16")


def test_a_view_is_an_input_whose_elements_lie_in_another() -> None:
    p = gathered((view("X[ids[t // 4],t % 4]"),), Stage("Y", ("t",), parse("V[t] + 1"), (), "f16"))
    x = np.arange(28.0).reshape(7, 4)
    got = interpret.run(p, {"X": x, "ids": np.array([6.0, 0.0, 3.0]), "F": np.zeros(3)})["Y"]
    assert np.array_equal(got, x[[6, 0, 3]].reshape(-1) + 1)
    assert p.is_input("V") and p.value("V") == Value("V", ("t",), "f16") and "V" not in p.gathered
    assert p.found(Read("V", (Const(2.0),))) == parse("X[ids[2 // 4],2 % 4]")
    assert p.found(Read("V", ("t",))) == p.views[0].body


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("X[ids[t // 4],t % 4] * 2", "no input read at positions along these axes"),
        ("X[ids[t // 4],j]", "no input read at positions along these axes"),
        ("X[ids[t // 2],t % 4]", "u has positions 0..2"),
        ("X[ids[t // 4],t % 5]", "j has positions 0..3"),
        ("X[F[t // 4],t % 4]", "a position is made of whole numbers, axes and i32 inputs"),
        ("X[ids[t // 4],t % ids[0]]", "a position is made of whole numbers, axes and i32 inputs"),
    ],
)
def test_what_is_no_view_is_refused(body: str, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        gathered((view(body),), Stage("Y", ("t",), parse("V[t]"), (), "f16"))


def test_whole_numbers_are_compared_and_never_computed_with() -> None:
    gathered((), Stage("Y", ("u",), parse("where(u < ids[u], F[u], u % 2)")))
    with pytest.raises(
        PlanError, match="computes with ids, which is i32: it may only be a position, or compared with one"
    ):
        gathered((), Stage("Y", ("u",), parse("F[u] * ids[u]")))
    with pytest.raises(PlanError, match="are of positions, by a number of 1 or more"):
        gathered((), Stage("Y", ("u",), parse("F[u] // 2")))


def test_conditions_may_compare_what_is_known_at_run_time() -> None:
    length = Read("n", ("b",))
    assert compared(parse("t < n[b]")) == (Place("t"), Place(read=length), -1)
    assert compared(parse("t + 3 <= q // 4 + n[b]")) == (Place("t"), Place("q", 4, length), -3)
    assert compared(parse("t + q <= n[b]")) is None


def test_a_block_walks_the_keys_that_its_sequence_has() -> None:
    op = parse_op(DECODE)
    p = replay(op.program(), LOOPS, load_target("rtx4090"))
    length = Read("lengths", ("b",))
    assert bounds(p, p.launches[0]) == (Bound("t", Place("q", 2, length), -2, True),)
    several = replay(op.program(), LOOPS.replace("split(b,grid,1)", "split(b,grid,2)"), load_target("rtx4090"))
    assert bounds(several, several.launches[0]) == ()


@pytest.mark.parametrize("lengths", [(40, 17, 1), (0, 8, 39)])
def test_what_is_left_out_adds_nothing(lengths: tuple[int, ...]) -> None:
    op = parse_op(DECODE)
    x = op.inputs("normal", 0)
    x["lengths"] = np.array(lengths, np.int32)
    given = {v.name: decode(x[v.name], v.dtype) for v in op.program().inputs}
    got = execute(replay(op.program(), LOOPS, load_target("rtx4090")), given)
    np.testing.assert_allclose(got["O"], op.reference(x)["O"], atol=1e-12)


def test_pages_that_are_not_there_are_named() -> None:
    op = parse_op(DECODE)
    x = {v.name: decode(y, v.dtype) for v, y in zip(op.program().inputs, op.inputs("normal", 0).values(), strict=True)}
    x["table"][1, 2] = 15
    with pytest.raises(PlanError, match=r"reads p at 0..15, outside the block held, 0..14"):
        interpret.run(op.program(), x)


def test_a_cpu_reads_pages_where_they_lie() -> None:
    target = load_target("cpu-portable")
    op = parse_op("paged_attention:2x2x2x12x4:f32:causal,window7,kv1,page3,k_is_v")
    unit, x = source(op, ScheduleSpace(op, target).sample(random.Random(1)).key, target), op.inputs("normal", 1)
    assert op.error_norm(interpreted(unit, x), x, "normal") < 0.5
    program = parse_op(DECODE).program()
    for bad, why in (
        ("k0/stage(K,pack,1)", "pack does not"),
        ("k0.S/atom(fma,2,8,1,4)", r"fma reads K where it lies, which is K_pages\[table"),
    ):
        assert why.replace("\\", "") in str(parse_move(bad).refuse(replay(program, "", target), target))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("paged_attention:2x4x1x64:f16", "the shape is not sequencesxheadsxqueriesxkeysxdim"),
        ("paged_attention:2x4x1xm(1..8)x8:f16", "of which B may be open"),
        ("paged_attention:2x4x1x64x8:f16:paged", "causal, window<N>, kv<N>, page<N>, pool<N>, k_is_v and scale<X>"),
        ("paged_attention:2x4x1x64x8:f16:kv3", "3 heads of K and V do not divide the 4 of Q"),
        ("paged_attention:2x4x1x64x8:f16:window3", "a window of 3 positions needs causal"),
    ],
)
def test_its_text_says_what_is_wrong(text: str, why: str) -> None:
    with pytest.raises(UsageError) as e:
        parse_op(text)
    assert why in str(e.value)


def test_axes_are_no_values() -> None:
    assert Axis("e") in Read("K", ("g", "t", Axis("e"))).index
    assert Read("K", ("g", "t", Axis("e"))).along == ("g", "t", "e")
