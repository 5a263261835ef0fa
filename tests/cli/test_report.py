"""Numbers, tables, JSON values and progress: how Emmy looks."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emmy.report import Screen, number, percent, table, to_plain

ROOT = Path(__file__).resolve().parents[2]


NUMBERS = {3.14159: "3.142", 231.44: "231.4", 18240.4: "18240", 0.00123: "0.0012", 1e7: "10000000", 0.0: "0"}


@pytest.mark.parametrize(("x", "text"), [*NUMBERS.items(), (None, "-"), (float("inf"), "-")])
def test_numbers_have_four_digits_and_no_exponent(x: float | None, text: str) -> None:
    assert number(x) == text


@given(st.floats(0.1, 1e9))
def test_a_number_is_right_to_a_thousandth(x: float) -> None:
    assert abs(float(number(x)) - x) <= x / 1000


def test_shares_are_percent() -> None:
    assert [percent(x) for x in (0.5, 0.0123, 1.0, None)] == ["50 %", "1.2 %", "100 %", "-"]


def test_columns_of_numbers_stand_to_the_right_and_text_to_the_left() -> None:
    lines = table(("name", "us"), [("a", 3.0), ("longer", 18240.0), ("none", None)]).splitlines()
    assert lines == ["name       us", "------  -----", "a       3.000", "longer  18240", "none        -"]


@given(st.lists(st.tuples(st.text("ab c", max_size=9), st.integers()), max_size=5))
def test_a_table_has_one_line_a_row_and_no_trailing_blanks(rows: list[tuple[str, int]]) -> None:
    lines = table(("t", "n"), rows).splitlines()
    assert len(lines) == len(rows) + 2 and all(line == line.rstrip() for line in lines)


@dataclass(frozen=True)
class Inner:
    path: Path
    share: float


def test_json_holds_dataclasses_paths_and_what_json_has_no_number_for() -> None:
    plain = to_plain({"a": Inner(Path("/x"), float("nan")), "b": (1, None, True), 3: {"s"}})
    assert plain == {"a": {"path": "/x", "share": None}, "b": [1, None, True], "3": ["s"]}
    json.dumps(plain, allow_nan=False)


def test_data_goes_to_stdout_and_people_are_told_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    records = [{"op": "x", "roof_share": 0.5}, {"op": "y", "roof_share": None}]
    for as_json in (False, True):
        screen = Screen(as_json)
        screen.say("hello")
        screen.rows("thing", records, {"op": "op", "roof_share": "of roofline"})
        out, err = capsys.readouterr()
        assert err == "hello\n"
        if as_json:
            assert [json.loads(line) for line in out.splitlines()] == [
                {"v": 1, "record": "thing", **r} for r in records
            ]
        else:
            assert out.splitlines()[2:] == ["x          50 %", "y             -"]


def on_a_terminal(*command: str, **variables: str) -> str:
    """What a command draws on a terminal that is its stderr."""
    ours, theirs = pty.openpty()
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
        "TERM": "xterm",
        "COLUMNS": "160",
        **variables,
    }
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=theirs, stdin=subprocess.DEVNULL)
    os.close(theirs)
    drawn = b""
    try:
        while chunk := os.read(ours, 65536):
            drawn += chunk
    except OSError:  # Linux: the other end is closed
        pass
    os.close(ours)
    assert process.wait() == 0, drawn.decode()
    return drawn.decode()


@pytest.mark.parametrize("no_color", ["", pytest.param("1", marks=pytest.mark.slow)])
def test_on_a_terminal_a_search_draws_a_bar_with_rate_and_eta(tmp_path: Path, no_color: str) -> None:
    fake = str(ROOT / "tests" / "search" / "fake_tune.py")
    drawn = on_a_terminal(
        sys.executable, fake, "0.01", "matmul:64x96x128:f32", "--budget", "60", "--strategy", "random",
        EMMY_HOME=str(tmp_path), NO_COLOR=no_color,
    )  # fmt: skip
    assert "━" in drawn and "/s, " in drawn and "s left, best" in drawn
    assert "stopped (60 trials)" in drawn
    assert (re.search(r"\x1b\[[39]\d", drawn) is not None) == (not no_color)
