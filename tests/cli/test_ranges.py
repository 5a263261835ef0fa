"""Ops with a size that is open until run time, at the command line: tables by ranges."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from shlex import split

import pytest

from emmy import api, config
from emmy.errors import UsageError
from emmy.ir.dispatch import parse_dispatch
from emmy.ir.ops import parse_op
from emmy.records import Candidate
from emmy.search.ranges import RangeWinner, dispatch_of
from tests.cli.conftest import Emmy
from tests.search.by_size import BySize

OP = "matmul:m(33..128)x64x96:f32"
TUNE = ("tune", OP, "--budget", "24", "--strategy", "random")
TABLE = "m 33..70: k0.C/atom(fma,4,16,1,4) | m 71..128: k0/stage(B,pack,1) k0.C/atom(fma,4,16,1,8)"


@pytest.fixture
def by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "device", lambda *_, **__: nullcontext(BySize()))


@pytest.fixture(scope="module")
def tuned_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("ranges")
    api.tune(OP, budget="24", strategy="random", home=home, measurer=BySize())
    return home


@pytest.fixture
def tuned(tuned_home: Path, by_size: None) -> None:
    """The home has a table of OP."""
    shutil.copytree(tuned_home, config.home(), dirs_exist_ok=True)


def test_tune_shows_the_table_and_show_and_bench_find_it_again(emmy: Emmy, by_size: None) -> None:
    said = emmy(*TUNE)
    assert said.code == 0 and "table      m 33" in said.out and f"emmy bench '{OP}' --threads 1" in said.out
    text = next(line.split("table      ")[1] for line in said.out.splitlines() if "table      " in line)
    parse_dispatch(text).check(parse_op(OP).program())
    assert f"table: {text}" in emmy("show", OP).out
    shown, raced = emmy("show", OP, "--json").of("range"), emmy("bench", OP, "--json").of("bench")
    assert [r["op"] for r in shown] == [r["op"] for r in raced] and len(shown) > 1
    assert [r["schedule"] for r in shown] == [r["schedule"] for r in raced] and {r["known"] for r in shown} == {
        "measured"
    }


def test_bench_explain_and_verify_know_the_ranges_of_a_table_in_python_too(emmy: Emmy, tuned: None) -> None:
    ranges = api.table(OP)
    named = ", ".join(repr(w.op) for w in ranges)
    for ask in (api.bench, api.explain):
        with pytest.raises(UsageError) as refused:
            ask(OP)
        assert named in str(refused.value)
    for w in ranges:
        assert api.explain(w.op, w.range.schedule).schedule == w.range.schedule
    checked = [(r.op, r.schedule) for r in api.verify(OP, top=2).rows]
    assert checked[: len(ranges)] == [(w.op, w.range.schedule) for w in ranges] and len(checked) > len(ranges)
    assert len(set(checked)) == len(checked)
    said = emmy("verify", "--op", OP, "--top", "1")
    assert said.code == 0 and "schedules checked, 0 wrong" in said.err
    explained = emmy("explain", OP, "--json").of("explanation")
    assert [(e["op"], e["schedule"]) for e in explained] == [(w.op, w.range.schedule) for w in ranges]
    explained = emmy("explain", OP, "--schedule", TABLE, "--json").of("explanation")
    assert [e["schedule"] for e in explained] == [r.schedule for r in parse_dispatch(TABLE).ranges]


def test_tune_in_json_gives_the_table_and_a_race_for_each_range(emmy: Emmy, by_size: None) -> None:
    said = emmy(*TUNE, "--json")
    (whole,) = said.of("dispatch")
    assert whole["op"] == OP and whole["trials"] == 24
    ranges, races = said.of("range"), said.of("tune")
    assert str(whole["dispatch"]).count("|") == len(ranges) - 1 and [r["op"] for r in ranges] == [
        r["op"] for r in races
    ]
    assert all(r["ratio"] and r["time_us"] for r in races)


def test_one_schedule_serves_all_sizes_when_asked(emmy: Emmy, by_size: None) -> None:
    said = emmy(*TUNE, "--one-schedule").out
    assert "one schedule for all of m(33..128)" in said and "--schedule" not in said and "a table of" not in said
    assert emmy("show", OP, "--ir", "tile", "--json").of("level")[0]["origin"] == "measured"


def test_show_takes_the_text_of_a_table(emmy: Emmy) -> None:
    assert [r["sizes"] for r in emmy("show", OP, TABLE, "--json").of("range")] == ["m 33..70", "m 71..128"]
    levels = emmy("show", OP, TABLE, "--ir", "tile", "--json").of("level")
    assert [(x["subject"], x["origin"]) for x in levels] == [
        ("matmul:m(33..70)x64x96:f32", "given"), ("matmul:m(71..128)x64x96:f32", "given"),
    ]  # fmt: skip
    assert "B.pack" in str(levels[1]["text"]) and "B.pack" not in str(levels[0]["text"])


def test_one_schedule_beside_a_table_says_what_it_serves_and_is_reproduced_by_name(emmy: Emmy, tuned: None) -> None:
    said = emmy(*TUNE, "--one-schedule").out
    assert "sizes      one schedule for all of m(33..128), " in said and "us at m = 128" in said
    assert "a table of" in said and "serves where no schedule is named" in said
    command = next(line.split("reproduce  emmy ")[1] for line in said.splitlines() if "reproduce  " in line)
    (raced,) = emmy(*split(command), "--json").of("bench")
    assert raced["op"] == OP and f"schedule   {raced['schedule']}\n" in said


@pytest.mark.slow
def test_bench_says_when_another_schedule_serves_an_op_afterwards(
    emmy: Emmy, tuned: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = str(dispatch_of(api.table(OP)))
    same = emmy("bench", OP, "--json")
    assert same.of("serving") == [] and "what serves it is now" not in same.err
    top = api.table(OP)[-1].range.schedule

    class AnotherDay(BySize):
        def time_us(self, candidate: Candidate) -> float:
            return super().time_us(candidate) * (100 if candidate.schedule == top else 1)

    monkeypatch.setattr(api, "device", lambda *_, **__: nullcontext(AnotherDay()))
    told = (emmy("bench", OP, "--json") for _ in range(9))  # the median of a schedule's rows counts
    said = next(s for s in told if s.of("serving"))
    (change,) = said.of("serving")
    after = str(dispatch_of(api.table(OP)))
    assert change["op"] == OP and (change["before"], change["after"]) == (before, after) and before != after
    assert f"what serves it is now {after}, instead of {before}" in said.err


def test_a_stored_table_with_a_schedule_that_is_illegal_today_is_not_shown(
    emmy: Emmy, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = parse_dispatch("m 33..64: | m 65..128: k0.C/atom(fma,4,16,1,7)").ranges
    ranges = tuple(RangeWinner("m", r, parse_op(OP).within("m", r.lo, r.hi).key) for r in older)
    monkeypatch.setattr("emmy.lookup.find_table", lambda *_: ranges)
    said = emmy("show", OP)
    assert said.code == 2 and said.out == "" and "m 65..128: move 0 k0.C/atom(fma,4,16,1,7): " in said.err


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("m 1..8: | m 10..32:", "gap after m 1..8"),
        ("m 1..31:", "open sizes of the op"),
        ("m 1..32", "has not the form"),
        ("m 33..64: | m 65..128: k0/jump(m)", "m 65..128: "),
        ("m 33..64: | m 65..128: k0.C/atom(fma,4,16,1,7)", "m 65..128: move 0 k0.C/atom(fma,4,16,1,7): "),
    ],
)
def test_a_table_with_a_gap_or_of_other_sizes_or_with_an_illegal_move_is_a_usage_error(
    emmy: Emmy, table: str, said: str
) -> None:
    for command in (("show", OP, table), ("bench", OP, "--schedule", table), ("explain", OP, "--schedule", table)):
        answer = emmy(*command)
        assert answer.code == 2 and said in answer.err


@pytest.mark.slow
def test_a_card_that_is_not_here_gets_a_predicted_table_which_show_repeats(emmy: Emmy) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    op = "matmul:m(9..32)x64x64:f16"
    said = emmy("tune", op, "--gpu", "rtx4090", "--budget", "6", "--strategy", "random", "--model", "roofline")
    assert said.code == 0 and "predicted, not measured" in said.out
    assert "reproduce" not in said.out and f"inspect    emmy show '{op}' --gpu rtx4090" in said.out
    shown = emmy("show", op, "--gpu", "rtx4090", "--ir", "tile", "--json").of("level")
    assert shown and {x["origin"] for x in shown} == {"predicted"}
    if "table      " in said.out:
        text = next(line.split("table      ")[1] for line in said.out.splitlines() if "table      " in line)
        assert [r.schedule for r in parse_dispatch(text).ranges] == [x["schedule"] for x in shown]
    else:
        assert f"schedule   {shown[0]['schedule']}" in said.out and len(shown) == 1
