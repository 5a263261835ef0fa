"""Who serves which sizes, from rows: only a win over everything that was raced, and only as far as a time reaches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emmy.codegen.build import source
from emmy.errors import UsageError
from emmy.ir.ops import parse_op
from emmy.ir.target import load_target
from emmy.pack import Choice
from emmy.packing import REACH, Verdict, offers, shared_out
from emmy.records import Measurement
from tests.data.conftest import make_row, write_journal

OP = "matmul:m(1..64)x16x32:f32"
CPU = load_target("cpu")


def row(
    number: int, m: str, ratio: float | None, schedule: str = "k0/split(n,core,8)", **changes: object
) -> Measurement:
    op = OP.replace("m(1..64)", m)
    raced = {"speedup": ratio, "speedup_low": ratio - 0.02, "speedup_high": ratio + 0.02} if ratio else {}
    fields = {
        "source_digest": source(parse_op(op), schedule, CPU).digest,
        "error_norm": 0.1,
        "baseline_us": 110.0,
        **changes,
    }
    made = make_row(5 * number, op=op, schedule=schedule, static=raced, **fields)
    return replace(made, device=replace(made.device, product=CPU.product))


def test_a_size_is_emmys_only_where_a_time_of_it_won(tmp_path: Path) -> None:
    rows = [row(0, "1", 1.5), row(1, "m(2..8)", 1.01), row(2, "m(9..16)", None), row(3, "m(17..48)", 1.2), row(4, "64", 1.3),
            row(5, "64", 0.9, baseline="sdpa:flash")]  # fmt: skip
    write_journal(tmp_path, "run", rows)
    (made,) = offers([parse_op(OP)], CPU, tmp_path)
    nothing = "no right answer with a time is stored of it on cpu"
    assert [(c.lo, c.hi, c.why.partition(":")[0]) for c in made.choices] == [
        (1, 1, ""), (2, 8, "no win"), (9, 16, "it was never raced with the stock kernel"),
        (17, 24, nothing), (25, 48, ""), (49, 63, nothing),
        (64, 64, "no win"),
    ]  # fmt: skip
    assert made.choices[4].op.key == OP.replace("1..64", "17..48")  # the code that was timed
    assert made.choices[6].why == "no win: 0.900 times as fast as sdpa:flash"


def test_of_several_races_the_figures_are_those_of_one_and_of_two_the_worse_decides(tmp_path: Path) -> None:
    won, lost, old = row(0, "8", 1.03), row(1, "8", 0.99), row(2, "8", 2.5, baseline_us=250.0)
    (made,) = _offered(tmp_path / "two", [won, lost])
    assert made.why.startswith("no win: 0.990 times") and made.evidence is not None and made.evidence.row == lost.id
    won, third = replace(won, samples_us=(100.0,)), row(3, "8", 1.04)
    (made,) = _offered(tmp_path / "three", [won, lost, third])
    assert made.evidence is not None and (made.why, made.evidence.row, made.evidence.rows) == ("", won.id, 3)
    assert (made.evidence.time_us, made.evidence.stock_us, made.evidence.ratio) == (100.0, 110.0, 1.03)
    (made,) = _offered(tmp_path / "old", [won, old])  # stock has a faster form now
    assert made.evidence is not None and (made.evidence.ratio, made.evidence.rows) == (1.03, 1)


def _offered(home: Path, rows: list[Measurement]) -> tuple[Choice, ...]:
    write_journal(home, "run", rows)
    (made,) = offers([parse_op(OP.replace("m(1..64)", "8"))], CPU, home)
    return made.choices


def test_kernels_of_a_server_s_backends_are_judged_where_the_pack_is_opened(tmp_path: Path) -> None:
    rivals = {"vllm:TRITON_ATTN": 1.4, "vllm:FLASH_ATTN": 0.9}
    rows = [row(0, "8", 1.5), *(row(i, "8", x, baseline=name) for i, (name, x) in enumerate(rivals.items(), 1))]
    write_journal(tmp_path, "run", rows)
    (made,) = offers([parse_op(OP.replace("m(1..64)", "8"))], CPU, tmp_path)
    assert not made.choices[0].why
    assert made.choices[0].evidence is not None and made.choices[0].evidence.rivals == rivals


def test_a_time_of_another_product_wins_nothing_and_no_rows_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a pack of no op: name one"):
        offers((), CPU, tmp_path)
    with pytest.raises(UsageError, match="nothing is stored on cpu"):
        offers([parse_op(OP)], CPU, tmp_path)
    made = row(0, "8", 1.5)
    write_journal(tmp_path, "run", [replace(made, device=replace(made.device, product="Another CPU"))])
    (offer,) = offers([parse_op(OP.replace("m(1..64)", "8"))], CPU, tmp_path)
    assert offer.choices[0].why == f"it was timed on Another CPU, not on {CPU.product}"


def test_a_schedule_of_another_source_or_that_once_failed_gives_way_to_the_next_best(tmp_path: Path) -> None:
    stale, failed, good = (f"k0/split(n,core,{n})" for n in (2, 4, 8))
    rows = [row(0, "8", 2.0, stale, source_digest="0" * 64, samples_us=(50.0,)), row(1, "8", 1.5, failed, samples_us=(60.0,)),
            row(2, "8", None, failed, status="correctness", samples_us=()), row(3, "8", 1.2, good, samples_us=(90.0,))]  # fmt: skip
    write_journal(tmp_path, "run", rows)
    op = parse_op(OP.replace("m(1..64)", "8"))
    ((choice,),) = (o.choices for o in offers([op], CPU, tmp_path))
    assert (choice.schedule, choice.why) == (good, "")
    write_journal(tmp_path / "2", "run", rows[:1])
    ((choice,),) = (o.choices for o in offers([op], CPU, tmp_path / "2"))
    assert "makes another source now" in choice.why


spans = st.tuples(st.integers(1, 64), st.integers(1, 64)).map(lambda x: (min(x), max(x)))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(spans, st.sampled_from(["", "no win"]), max_size=8))
def test_sizes_are_given_away_once_to_times_that_reach_them(found: dict[tuple[int, int], str]) -> None:
    known = {span: Verdict("", why) for span, why in found.items()}
    at = 0
    for (lo, hi), timed, verdict in shared_out(known, 1):
        assert at < lo <= hi == timed[1] and timed[0] <= lo and known[timed] is verdict
        assert lo > hi // REACH or hi <= 8
        at = hi
    assert {hi for (_, hi) in found} == {hi for (_, hi), _, _ in shared_out(known, 1)}
