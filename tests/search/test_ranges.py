"""Ranges to begin with, and the shortest table that the known costs allow."""

from __future__ import annotations

import random
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emmy.ir.ops import parse_op
from emmy.ir.parts import span_of
from emmy.search.budget import Budget, parse_budget
from emmy.search.ranges import LEAST_TRIALS, Cost, Known, share, starting_ranges

OP = parse_op("matmul:m(1..4096)x64x32:f32")


def cost(us: float, spread: float = 0.0) -> Cost:
    return Cost(us, us * (1 - spread), us * (1 + spread))


def known(costs: dict[tuple[int, int], dict[str, float]], **more: object) -> Known:
    lo, hi = min(a for a, _ in costs), max(b for _, b in costs)
    times = {span: {s: cost(us) for s, us in of.items()} for span, of in costs.items()}
    return Known(lo, hi, times, **more)  # type: ignore[arg-type]


def table(k: Known) -> list[tuple[int, int, str]]:
    return [(r.lo, r.hi, r.schedule) for r in k.ranges]


@given(st.integers(1, 5000), st.integers(0, 5000))
def test_starting_ranges_have_no_gap_and_each_starts_as_one(lo: int, more: int) -> None:
    op = parse_op(f"matmul:m({lo}..{lo + more})x64x32:f32")
    spans = [span_of(op, part.key) for part in starting_ranges(op)]
    if more == 0:
        assert starting_ranges(op) == (op,)
        return
    assert spans[0] is not None and spans[-1] is not None and (spans[0][0], spans[-1][1]) == (lo, lo + more)
    assert all(a is not None and b is not None and b[0] == a[1] + 1 for a, b in pairwise(spans))
    assert all(starting_ranges(part) == (part,) for part in starting_ranges(op)[:-1])


def test_a_row_is_a_range_by_itself_and_the_others_double() -> None:
    assert [p.key.split("x")[0] for p in starting_ranges(parse_op("matmul:m(1..70)x64x32:f32"))] == [
        "matmul:1", "matmul:m(2..8)", "matmul:m(9..16)", "matmul:m(17..32)", "matmul:m(33..64)", "matmul:m(65..70)",
    ]  # fmt: skip


def test_only_parts_of_the_same_op_are_its_ranges() -> None:
    assert span_of(OP, "matmul:m(17..64)x64x32:f32") == (17, 64) and span_of(OP, "matmul:1x64x32:f32") == (1, 1)
    for other in ("matmul:m(17..64)x64x32:f16", "matmul:m(1..8192)x64x32:f32", "matmul:m(1..4)x65x32:f32", "nonsense"):
        assert span_of(OP, other) is None
    assert span_of(parse_op("matmul:8x64x32:f32"), "matmul:8x64x32:f32") is None


def test_a_budget_is_divided_among_ranges_but_patience_is_each_one_s() -> None:
    assert share(parse_budget("60s,132,patience=9"), 11) == Budget(12, 60 / 11, 9)
    assert share(Budget(trials=3), 11) == Budget(trials=LEAST_TRIALS) and share(Budget(trials=1), 1) == Budget(trials=1)


def test_neighbours_that_tie_are_one_range() -> None:
    k = known({(1, 8): {"a": 10, "b": 10.05}, (9, 16): {"b": 20, "a": 24}, (17, 32): {"c": 30, "b": 33}})
    assert table(k) == [(1, 16, "b"), (17, 32, "c")]
    apart = Known(1, 16, {(1, 8): {"a": cost(10), "b": cost(10.4)}, (9, 16): {"b": cost(20)}})
    assert table(apart) == [(1, 8, "a"), (9, 16, "b")]
    within_the_spread = Known(1, 16, {(1, 8): {"a": cost(10, 0.03), "b": cost(10.4, 0.03)}, (9, 16): {"b": cost(20)}})
    assert table(within_the_spread) == [(1, 16, "b")]
    too_wide = Known(1, 16, {(1, 8): {"a": cost(10, 0.2), "b": cost(10.6, 0.2)}, (9, 16): {"b": cost(20)}})
    assert table(too_wide) == [(1, 8, "a"), (9, 16, "b")]


@given(st.lists(st.sets(st.sampled_from("abcd"), min_size=1), min_size=1, max_size=7))
def test_no_table_of_ties_is_shorter_and_none_loses(good: list[set[str]]) -> None:
    spans = [(8 * i + 1, 8 * i + 8) for i in range(len(good))]
    k = known({span: {s: 10.0 if s in ties else 11.0 for s in "abcd"} for span, ties in zip(spans, good, strict=True)})
    served = [next(r.schedule for r in k.ranges if r.lo <= lo and hi <= r.hi) for lo, hi in spans]
    assert all(s in ties for s, ties in zip(served, good, strict=True))
    fewest = min(1 + sum(a != b for a, b in pairwise(each)) for each in product(*good))
    assert len(k.ranges) == fewest


def test_a_size_that_nothing_serves_leaves_no_table() -> None:
    assert table(Known(1, 64, {(33, 64): {"a": cost(1)}})) == []
    assert table(Known(1, 64, {})) == []


def test_a_wider_range_serves_where_nothing_nearer_is_known() -> None:
    k = Known(1, 64, {(1, 64): {"wide": cost(9), "x": cost(12)}, (33, 64): {"near": cost(5)}})
    assert table(k) == [(1, 32, "wide"), (33, 64, "near")]


def test_a_single_size_fills_a_piece_and_cuts_none() -> None:
    k = Known(1, 64, {(1, 1): {"one": cost(1)}, (2, 64): {"a": cost(5)}, (32, 32): {"fixed": cost(1)}})
    assert table(k) == [(1, 1, "one"), (2, 64, "a")]


def test_what_fails_over_the_merged_range_is_not_merged() -> None:
    costs = {(1, 8): {"b": 10.0}, (9, 16): {"b": 20.0}}
    assert table(known(costs)) == [(1, 16, "b")]
    assert table(known(costs, failed=frozenset({((1, 16), "b")}))) == [(1, 8, "b"), (9, 16, "b")]


def test_neighbours_are_raced_in_each_other_s_range_and_then_in_the_lower_half_of_the_upper_one() -> None:
    k = known({(1, 64): {"a": 10}, (65, 128): {"b": 20}})
    assert [(c.lo, c.hi, c.schedules) for c in k.challenges()] == [(1, 64, ("a", "b")), (65, 128, ("b", "a"))]
    k = known({(1, 64): {"a": 10, "b": 12}, (65, 128): {"b": 20, "a": 25}})
    assert [(c.lo, c.hi, c.schedules) for c in k.challenges()] == [(65, 96, ("a", "b"))]
    moved = known({(1, 64): {"a": 10, "b": 12}, (65, 128): {"b": 20, "a": 25}, (65, 96): {"a": 14, "b": 16}})
    assert table(moved) == [(1, 96, "a"), (97, 128, "b")] and moved.challenges() == ()
    kept = known({(1, 64): {"a": 10, "b": 12}, (65, 128): {"b": 20, "a": 25}, (65, 96): {"a": 17, "b": 16}})
    assert table(kept) == [(1, 64, "a"), (65, 128, "b")] and kept.challenges() == ()


@pytest.mark.parametrize("seed", range(20))
def test_races_come_to_an_end(seed: int) -> None:
    """Whatever they find, schedules failing included; and then no neighbour's schedule is unknown in the nearest piece."""
    rng = random.Random(seed)
    costs = {s: {rng.choice("abcdef"): cost(10)} for s in (span_of(OP, p.key) for p in starting_ranges(OP)) if s}
    failed: set[tuple[tuple[int, int], str]] = set()
    for _ in range(100):
        k = Known(1, 4096, costs, frozenset(failed))
        if not (races := k.challenges()):
            break
        for race in races:
            for s in race.schedules:
                if s not in costs.get((race.lo, race.hi), {}) and rng.random() < 0.2:
                    failed.add(((race.lo, race.hi), s))
                else:
                    costs.setdefault((race.lo, race.hi), {})[s] = cost(rng.choice((10, 10.05, 11)))
    assert not races and k.ranges[0].lo == 1 and k.ranges[-1].hi == 4096
    assert all(b.lo == a.hi + 1 for a, b in pairwise(k.ranges))
