"""Walks down a tree with dead ends: every leaf, the nearest legal leaf, a leaf a little different."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from emmy.search.space import Point, Value
from emmy.search.walk import at_random, descend, leaves, nearest, toward, varied
from emmy.testing.strategy_contract import ToySpace

SPACE = ToySpace()
POINTS = sorted({p.key: p for p in leaves(SPACE, random.Random(0))}.values(), key=lambda p: p.key)


def test_leaves_are_the_same_set_in_whatever_order() -> None:
    keys = [{p.key for p in leaves(SPACE, random.Random(seed))} for seed in range(3)]
    assert keys[0] == keys[1] == keys[2] and len(keys[0]) == len(POINTS) > 200


@given(st.sampled_from(POINTS), st.integers(0, 5))
def test_a_legal_wish_is_granted(wanted: Point, seed: int) -> None:
    found = descend(SPACE, toward(wanted.choices, random.Random(seed)))
    assert found is not None and found.key == wanted.key


def test_an_illegal_wish_is_repaired_to_the_nearest_legal_value() -> None:
    space = ToySpace(limit=100)
    wish: list[tuple[str, Value]] = [
        ("move 0", "p"),
        ("move 1", "q"),
        ("move 2", "done"),
        ("p", 9),
        ("q", 8),
        ("size", 32),
    ]
    found = descend(space, toward(wish, random.Random(0)))
    assert found is not None
    assert {n: found.as_dict()[n] for n in ("p", "q", "size")} == {"p": 8, "q": 8, "size": 1}


@given(st.sampled_from(POINTS), st.integers(0, 20), st.integers(1, 3))
def test_a_variation_is_legal_and_mostly_another_point(wanted: Point, seed: int, changes: int) -> None:
    rng = random.Random(seed)
    found = [descend(SPACE, varied(wanted, rng, changes, 0.3)) for _ in range(12)]
    assert {p.key for p in found if p is not None} <= {p.key for p in POINTS}
    assert any(p is not None and p.key != wanted.key for p in found)


def test_one_change_of_an_ordered_value_without_reach_is_one_step() -> None:
    start = next(
        p for p in POINTS if p.as_dict().get("p") == 4 and p.as_dict().get("q") == 4 and p.as_dict()["size"] == 4
    )
    rng, seen = random.Random(0), set()
    for _ in range(200):
        found = descend(SPACE, varied(start, rng, 1, 0.0))
        if found is not None and {n for n, _ in found.choices} == {n for n, _ in start.choices}:
            seen.add(tuple(found.as_dict()[n] for n in ("p", "q", "size")))
    assert seen <= {(4, 4, 4), (2, 4, 4), (8, 4, 4), (4, 2, 4), (4, 8, 4), (4, 4, 2), (4, 4, 8)} and len(seen) >= 6


def test_a_walk_without_any_leaf_gives_none() -> None:
    assert descend(ToySpace(limit=0), at_random(random.Random(0))) is None


def test_nearness_is_by_ratio_for_positive_numbers_and_by_difference_otherwise() -> None:
    assert nearest((1, 4, 16, 64), 9)[0] == 16  # 9/4 = 2.25, 16/9 = 1.78
    assert nearest((-4, 0, 3), 1)[0] == 0
    assert nearest(("row", "col"), "col")[0] == "col"
