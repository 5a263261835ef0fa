"""Schedule text: what parses, what is refused with which words, and that replay gives one plan for one text."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emmy.errors import EmmyError, IllegalMove, PlanError, UsageError
from emmy.ir.moves import MOVES, OPEN, Move, Split
from emmy.ir.moves.base import register
from emmy.ir.ops import parse_op
from emmy.ir.schedule import format_schedule, parse_move, parse_schedule, replay
from emmy.ir.target import load_target

MATMUL = parse_op("matmul:70x33x56:f16:nk").program()
H200 = load_target("h200")
LINE = "k0/split(m,grid,32) k0/split(k,serial,?) k0/stage(A,tma,3) k0.C/atom(wgmma,64,8,16)"


def test_a_line_parses_to_moves_and_prints_back():
    moves = parse_schedule(LINE)
    assert format_schedule(moves) == LINE
    assert moves[0] == Split("k0", None, "m", "grid", 32) and moves[1].knobs == ("step",)
    assert parse_schedule("  k0/split(m,grid,8)\n\tk0/pingpong()  ") == parse_schedule(
        "k0/split(m,grid,8) k0/pingpong()"
    )
    assert parse_schedule("") == ()


def test_arguments_at_their_defaults_are_not_printed_and_others_are():
    for text in ("k0/stage(A,tma,3)", "k0/stage(A,tma,3,row)", "k0.O/atom(mma,16,8,16)", "k0.O/atom(mma,16,8,16,1,o)"):
        assert str(parse_move(text)) == text
    assert str(parse_move("k0.C/atom(mma,16,8,16,1)")) == "k0.C/atom(mma,16,8,16)"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_any_move_with_any_arguments_prints_and_parses_back(data):
    cls = data.draw(st.sampled_from([MOVES[n] for n in sorted(MOVES)]))
    names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
    numbers = st.integers(0, 10**18 - 1) | st.just(OPEN)
    values = {f.name: data.draw(numbers if f.type == "Knob" else names) for f in fields(cls)[2:]}
    move = cls(data.draw(names), data.draw(names | st.none()), **values)
    assert parse_schedule(str(move)) == (move,)


WRONG_FORM = [
    "split", "k0", "k0/split", "k0/split(", "k0/split(m,grid,8", "k0/split m,grid,8)", "/split(m,grid,8)", "k0.C.D/split(m,grid,8)",
    "k0//split(m,grid,8)", "k0/split((m),grid,8)", "k0/split(m,grid,8))", "k0,split(m,grid,8)", "k0/split(m,grid,8)k0/pingpong()",
    "кк/split(m,grid,8)", "k0/split²(m,grid,8)", "k0\x00/split(m,grid,8)", "k0-1/split(m,grid,8)",
]  # fmt: skip
WRONG_ARGUMENTS = [
    "k0/split()", "k0/split(m)", "k0/split(m,grid)", "k0/split(m,grid,8,9)", "k0/split(m,grid,)", "k0/split(,grid,8)",
    "k0/split(m,grid,x)", "k0/split(m,grid,-8)", "k0/split(m,grid,+8)", "k0/split(m,grid,8.0)", "k0/split(m,grid,1e3)",
    "k0/split(m,grid,0x10)", "k0/split(m,grid,8_0)", "k0/split(m,grid,²)", "k0/split(m,grid,٣)", "k0/split(m,grid,８)",
    "k0/split(?,grid,8)", "k0/split(m,?,8)", "k0/split(8,grid,8)", "k0/split(m,grid,??)", "k0/stage(?,tma,1)", "k0/pingpong(1)",
    "k0/split(m,grid," + "9" * 19 + ")", "k0/split(m,grid," + "9" * 5000 + ")", "k0/split(" + "m," * 5000 + "8)",
]  # fmt: skip


@pytest.mark.parametrize("word", WRONG_FORM, ids=range(len(WRONG_FORM)))
def test_a_word_of_another_form_is_refused_with_an_example(word: str):
    with pytest.raises(
        UsageError, match=r"schedule move 1: .* has not the form launch/move\(arguments\), such as"
    ) as e:
        parse_schedule("k0/pingpong() " + word)
    assert len(str(e.value)) < 300


@pytest.mark.parametrize("word", WRONG_ARGUMENTS, ids=range(len(WRONG_ARGUMENTS)))
def test_arguments_of_the_wrong_number_or_kind_are_refused_with_the_form(word: str):
    with pytest.raises(
        UsageError, match=r"schedule move 1: .*(split\(axis,level,step\)|stage\(value|pingpong\(\))"
    ) as e:
        parse_schedule("k0/pingpong() " + word)
    assert len(str(e.value)) < 5500


def test_an_unknown_move_is_refused_with_the_names_there_are():
    with pytest.raises(UsageError, match="names no move; the moves are atom, commute, cut, "):
        parse_schedule("k0/tile(m,8)")


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text(alphabet="k01.C/split(m,grid8)?-² stage\n٣", max_size=40) | st.text(max_size=20))
def test_random_text_never_escapes_as_another_error(text: str):
    try:
        moves = parse_schedule(text)
        assert parse_schedule(format_schedule(moves)) == moves
        replay(MATMUL, moves, H200)
    except EmmyError:
        pass


ILLEGAL = {
    "an open knob": ("k0/split(m,grid,8) k0/split(n,grid,?)", 1, "knob step is open"),
    "the same move twice": ("k0/stage(A,tma,1) k0/stage(A,tma,1)", 1, "A is staged already, with depth 1"),
    "a launch that is not there": ("k7/split(m,grid,8)", 0, "launch k7 does not exist; the plan has k0"),
    "a launch that is not there yet": ("k1/split(m,grid,8) k0/splitk(C,2)", 0, "launch k1 does not exist"),
    "a work that is not there": ("k0.Y/split(m,serial,8)", 0, "k0 has no work Y; it has C"),
    "an axis that is not there": ("k0/split(z,grid,8)", 0, "k0 has no axis z; k0 has m, n, k"),
    "a step of zero": ("k0/split(m,grid,0)", 0, "m has 70 left, the step is 0: it must be 1.."),
    "a huge step": (f"k0/split(m,grid,{10**17})", 0, "m has 70 left, the step is 1000"),
    "a depth of zero": ("k0/split(k,serial,16) k0/stage(A,tma,0)", 1, "depth 0 against 1"),
    "a huge depth": (f"k0/split(k,serial,16) k0/stage(A,tma,{10**17})", 1, "bytes of the 232448"),
    "no workers": ("k0/split(m,grid,8) k0/persist(0)", 1, "0 workers: at least 1 is needed"),
    "parts of nothing": ("k0/splitk(C,0)", 0, "k has 56, which does not make 0 parts"),
    "a huge atom": (f"k0.C/atom(wgmma,64,{10**17},16)", 0, "wgmma has no shape"),
}


@pytest.mark.parametrize("what", ILLEGAL)
def test_replay_refuses_and_says_which_move_and_why(what: str):
    text, index, reason = ILLEGAL[what]
    with pytest.raises(IllegalMove) as e:
        replay(MATMUL, text, H200)
    assert e.value.index == index and reason in e.value.reason
    assert str(e.value) == f"move {index} {text.split()[index]}: {e.value.reason}"


def test_one_text_gives_one_plan_and_moves_that_commute_give_equal_plans():
    head = "k0/split(m,grid,32) k0/split(k,serial,16)"
    one = replay(MATMUL, f"{head} k0.C/split(m,reg,8)", H200)
    assert one == replay(MATMUL, parse_schedule(f"{head} k0.C/split(m,reg,8)"), H200)
    a = replay(MATMUL, "k0/splitk(C,2) k0/split(m,grid,32) k1/split(n,grid,8)", H200)
    b = replay(MATMUL, "k0/splitk(C,2) k1/split(n,grid,8) k0/split(m,grid,32)", H200)
    assert a == b and hash(a) == hash(b) and a.key == b.key
    assert a != one and a.key != one.key


def test_equal_programs_replay_to_the_same_plan_whoever_made_them():
    again = parse_op("matmul:70x33x56:f16:nk").program()
    assert again is not MATMUL
    assert replay(again, "k0/split(m,grid,32)", H200) == replay(MATMUL, "k0/split(m,grid,32)", H200)


def test_a_refused_move_is_refused_again_with_its_place_in_the_new_schedule():
    for prefix in ("", "k0/split(n,grid,8) "):
        with pytest.raises(IllegalMove) as e:
            replay(MATMUL, prefix + "k0/pingpong()", H200)
        assert e.value.index == len(prefix.split())


def test_loops_are_refused_before_they_nest_too_deep_and_moves_may_be_many():
    with pytest.raises(IllegalMove, match="k0 has 32 loops, 32 are allowed") as e:
        replay(MATMUL, "k0/split(k,serial,56) " * 2000, H200)
    assert e.value.index == 32
    with pytest.raises(IllegalMove):
        replay(MATMUL, "k0/split(m,grid,32) " + "k0/split(m,grid,33) " * 20000, H200)


def test_a_move_that_the_text_could_not_name_cannot_be_registered():
    with pytest.raises(PlanError, match="two moves are named split"):
        register(type("Other", (Split,), {}))

    @dataclass(frozen=True)
    class Odd(Move):
        sizes: tuple[int, ...]
        name = "odd"

    with pytest.raises(PlanError, match=r"move odd has arguments sizes: tuple\[int, ...\]; the types are str"):
        register(Odd)
