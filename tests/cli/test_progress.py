"""What people are told while a tune runs: lines, where no terminal is."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from emmy.progress import TuneProgress
from emmy.report import Screen, lasting
from emmy.search.budget import parse_budget
from emmy.search.events import Event, Finished, Note, Planned, Racing, Scored, Started


def started(op: str, target: str = "h200") -> Started:
    return Started(op, target, "random", parse_budget("60s"), "", 0, 0, "")


def scored(op: str, n: int, elapsed_s: float, best: bool = True, target: str = "h200") -> Scored:
    return Scored(op, target, f"k0/unroll({n})", n, 5.0, best, elapsed_s, 60.0 - elapsed_s)


def said(events: Iterable[Event], capsys: pytest.CaptureFixture[str]) -> list[str]:
    with TuneProgress(Screen()) as progress:
        for event in events:
            progress(event)
    return capsys.readouterr().err.splitlines()


def test_lines_of_ops_that_are_searched_at_once_say_which_they_are_of_and_how_far_all_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    events = (
        Planned("h200", 258, 11, 2), started("a"), started("b"), scored("b", 1, 1.0), scored("a", 1, 2.0),
        scored("a", 2, 11.9, best=False), scored("a", 3, 22.1, best=False), Racing("b", 5, "h200"),
        Finished("b", "60 s", 1, 80.0, "h200"), Note("c: left out"), scored("a", 4, 24.0),
    )  # fmt: skip
    lines = said(events, capsys)
    assert lines[0] == "258 searches on h200, 2 at a time; 11 ended before the interruption"
    assert lines[3:] == [
        "     1.0 s  b  1 trial, 0.0/s, 59 s left, best predicted 5.000 us  k0/unroll(1)",
        "     2.0 s  a  1 trial, 0.0/s, 58 s left, best predicted 5.000 us  k0/unroll(1)",
        "    22.1 s  a  3 trials, 0.1/s, 38 s left, best predicted 5.000 us",
        "b: racing 5 finalists and the stock kernel, in turns",
        "b: stopped (60 s); 1 trial, 80.0 s in all; 12 of 258 ended, 2 h 44 min left",
        "note: c: left out",
        "    24.0 s  a  4 trials, 0.1/s, 36 s left, best predicted 5.000 us  k0/unroll(4)",
    ]


def test_lines_of_one_op_after_another_need_no_name_and_those_of_several_cards_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = (Planned("h200", 1), started("a"), scored("a", 1, 2.0), Finished("a", "60 s", 1, 60.0, "h200"))
    lines = said((*one, started("b"), scored("b", 1, 3.0)), capsys)
    assert [line.split("  1 trial")[0].strip() for line in lines if "left" in line] == ["2.0 s", "3.0 s"]
    assert lines[2] == "a: stopped (60 s); 1 trial, 60.0 s in all"
    both = (started("a"), started("a", "cpu"), scored("a", 1, 2.0, target="cpu"), Racing("a", 2, "h200"))
    lines = said(both, capsys)
    assert lines[2].startswith("     2.0 s  a on cpu  1 trial") and lines[3].startswith("a on h200: racing 2")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (99.4, "99 s"), (100, "2 min"), (5940, "99 min"), (12_000, "3 h 20 min")]
)
def test_a_time_that_is_left_is_told_in_the_unit_that_counts(seconds: float, text: str) -> None:
    assert lasting(seconds) == text
