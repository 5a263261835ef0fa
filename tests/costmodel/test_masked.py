"""Blocks of causal attention are counted as they walk, and the order of a tile's loops decides how even the end is."""

from __future__ import annotations

import pytest

from emmy.costmodel.features import feature_names, features
from emmy.costmodel.masked import Walked, walked
from emmy.ir.ops import parse_op
from emmy.ir.schedule import replay
from emmy.ir.target import load_target

H200 = load_target("h200")
OP = "attention:16x2048x2048x256:f16:causal"
TILE = (
    "k0/online(O) {} k0/split(t,serial,64) k0/split(s,warpgroup,64) k0/stage(K,tma,2) k0/stage(Q,tma,1) k0/stage(V,tma,2) "
    "k0/specialize(2,40,232) k0.O/atom(wgmma,64,256,16,1,o) k0.S/atom(wgmma,64,64,16)"
)
HEADS, ROWS = "k0/split(h,grid,1) k0/split(s,grid,128)", "k0/split(s,grid,128) k0/split(h,grid,1)"


def _walked(loops: str, op: str = OP, places: int = 132) -> Walked | None:
    plan = replay(parse_op(op).program(), TILE.format(loops), H200)
    return walked(plan, plan.launches[0], places)


@pytest.mark.parametrize("loops", [HEADS, ROWS])
def test_a_block_of_128_rows_walks_the_keys_before_its_last_row(loops: str) -> None:
    found = _walked(loops)
    steps = [2 * (i + 1) for i in range(16)]  # of 64 keys, of 32
    assert found is not None and found.share == sum(steps) / 16 / 32


def test_heads_outermost_leave_whole_rows_for_the_end() -> None:
    """256 blocks on 132 multiprocessors; the least there can be is the sum over all, or the longest block."""
    rows, heads = _walked(ROWS), _walked(HEADS)
    assert rows is not None and heads is not None
    total = 16 * sum(2 * (i + 1) for i in range(16))
    assert 1.0 <= rows.longest < 1.1 < 1.5 < heads.longest <= (32 + 32) * 132 / total


def test_multiprocessors_without_a_block_count_as_idle() -> None:
    few, alone = _walked(ROWS, "attention:16x512x512x256:f16:causal"), _walked(ROWS, places=256)
    assert few is not None and few.longest == 8 * 132 / (16 * (2 + 4 + 6 + 8))
    assert alone is not None and alone.longest == 32 / 17  # every block has a place of its own


def test_without_a_mask_all_walk_alike_and_features_tell_the_orders_apart_only_with_one() -> None:
    assert _walked(ROWS, OP.removesuffix(":causal")) is None
    at = feature_names().index("log2_bound_over_roof")
    for text, differ in ((OP, True), (OP.removesuffix(":causal"), False)):
        op = parse_op(text)
        heads, rows = (features(op, replay(op.program(), TILE.format(x), H200), H200)[at] for x in (HEADS, ROWS))
        assert (heads > rows + 0.3) == differ
