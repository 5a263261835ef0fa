"""Winners carry over to other problems: by what their moves mean there, with the nearest numbers that are legal."""

from __future__ import annotations

import random
from functools import cache
from itertools import islice

import pytest

from emmy.ir.ops import parse_op
from emmy.ir.target import load_target
from emmy.search.carry import carried, openings, same_as
from emmy.search.near import carried_winners, distance
from emmy.search.schedule_space import ScheduleSpace

H200 = load_target("h200")
MATMUL = "matmul:2048x3840x1024:f16:nk"
TILE = (
    "k0/split(m,grid,128) k0/split(n,grid,192) k0/split(k,serial,64) k0/split(m,warpgroup,64) k0/split(n,warpgroup,192) "
    "k0/raster(2) k0/stage(A,tma,4) k0/stage(B,tma,4) k0/specialize(2,40,232) k0/persist(132) k0.C/atom(wgmma,64,192,16)"
)
DECODE = "attention:16x1x4096x256:f16:causal,kv8"
PARTS = (  # a work's atoms in the order in which people write them, and the second launch last
    "k0/online(O) k0/splitk(O,16) k0/split(g,grid,1) k0/split(r,grid,16) k0/split(t,serial,32) k0/split(r,warp,16) "
    "k0/stage(Q,tma,1) k0/stage(K,tma,3) k0/stage(V,tma,3) k0.S/atom(mma,16,8,16) k0.O/atom(mma,16,8,16,1,o) "
    "k1/split(g,grid,1) k1/split(r,grid,2) k1/split(e,grid,64)"
)


@cache
def _space(op: str) -> ScheduleSpace:
    return ScheduleSpace(parse_op(op), H200)


def _moves(op: str, schedule: str, to: str, opening: tuple[str, ...] = ()) -> list[str]:
    point = carried(_space(to), parse_op(op).program(), schedule, opening)
    assert point is not None and _space(to).locate(point.key) == point  # a search meets it where it says
    return point.key.split()


def test_a_matmuls_tile_stands_behind_a_norm_as_it_stood_alone() -> None:
    found = _moves(MATMUL, TILE, "norm_linear:2048x3840x1024:f16:nk", ("k0/cut(Y)",))
    wanted = {
        m.replace("k0", "k1").replace(".C", ".Y").replace("(A,", "(Xn,").replace("(B,", "(W,") for m in TILE.split()
    }
    assert found[0] == "k0/cut(Y)" and {m for m in found if m.startswith("k1")} == wanted


def test_columns_are_shared_by_sums_side_by_side_and_both_weights_are_staged_alike() -> None:
    found = _moves(MATMUL, TILE, "geglu:2048x3840x1024:f16")
    assert {"k0/split(n,grid,96)", "k0/stage(G,tma,4)", "k0/stage(U,tma,4)", "k0/persist(132)"} <= set(found)
    back = _moves("geglu:2048x3840x1024:f16", " ".join(found), MATMUL)
    assert " ".join(back) == TILE


def test_numbers_become_the_nearest_that_are_legal() -> None:
    found = _moves(MATMUL, TILE, "matmul:64x3840x1024:f16:nk")
    assert "k0/split(m,grid,64)" in found and "k0/split(n,grid,192)" in found and "k0.C/atom(wgmma,64,192,16)" in found


def test_heads_that_share_keys_take_over_what_heads_of_their_own_have() -> None:
    prefill = (
        "k0/online(O) k0/split(s,grid,128) k0/split(h,grid,1) k0/split(t,serial,64) k0/split(s,warpgroup,64) "
        "k0/stage(Q,tma,1) k0/stage(K,tma,2) k0/stage(V,tma,2) k0/specialize(2,40,232) k0.S/atom(wgmma,64,64,16) "
        "k0.O/atom(wgmma,64,256,16,1,o) k0.S/pipeline()"
    )
    found = _moves("attention:16x512x512x256:f16:causal", prefill, "attention:16x512x512x256:f16:causal,kv8")
    apart = {"k0/split(h,grid,1)", "k0/split(r,grid,1)", "k0/split(g,grid,1)"}
    assert found[1] == "k0/split(s,grid,128)" and set(found) ^ set(prefill.split()) == apart


def test_a_schedule_in_another_order_is_found_and_one_that_makes_something_else_is_not() -> None:
    space = _space(DECODE)
    assert space.locate(PARTS) is None
    point = same_as(space, PARTS)
    assert point is not None and sorted(point.key.split()) == sorted(PARTS.split())
    assert same_as(space, PARTS.replace("splitk(O,16)", "splitk(O,7)")) is None
    rows = _space("rms_norm:64x512:f16")
    assert same_as(rows, "k0/split(m,grid,1) k0/split(n,warp,256)") is not None  # loops of one iteration are left out


@pytest.mark.parametrize(
    ("op", "other", "apart"),
    [
        (MATMUL, "matmul:2048x3840x2048:f16:nk", 1.0),
        (MATMUL, "matmul:2048x3840x1024:f16", 1.0),  # the weight lies the other way
        (MATMUL, "norm_linear:2048x3840x1024:f16:nk", 0.5),
        ("geglu:2048x1920x1024:f16:nk", MATMUL, 0.5),  # two sums of 1,920 columns
        (MATMUL, "bmm:4x2048x3840x1024:f16:nk", 2.5),
        (DECODE, "attention:16x1x16384x256:f16:causal,kv8", 2.0),
        (MATMUL, DECODE, None),
        (MATMUL, "rms_norm:2048x3840:f16", None),
        ("rms_norm:64x512:f16", "rms_norm:128x256:f16", 2.0),
        (MATMUL, MATMUL, None),
        (MATMUL, "matmul:of another Emmy", None),
    ],
)
def test_problems_are_near_by_the_product_that_they_make(op: str, other: str, apart: float | None) -> None:
    assert distance(parse_op(op), other) == apart


def test_a_winner_of_another_kind_is_tried_behind_every_way_to_begin() -> None:
    space = _space("norm_linear:8x3840x1024:f16:nk")
    ways = openings(space, 10)
    assert ("k0/cut(Y)",) in ways and len(ways) > 1
    found = list(islice(carried_winners(space, [(MATMUL, TILE)]), 8))
    assert {other for other, _ in found} == {MATMUL} and len({p.key for _, p in found}) == len(found) > 1
    assert {"k0/cut(Y)"} < {p.key.split()[0] for _, p in found}


def test_plain_schedules_have_the_forms_that_were_measured_to_be_fast() -> None:
    default = {
        op: _space(op).default().key for op in (DECODE, "attention:16x512x512x512:f16:causal", "rms_norm:4096x256:f16")
    }
    decode, wide, rows = default.values()
    assert "k0/splitk(O,16)" in decode  # eight tiles for 132 multiprocessors
    assert "k0/split(s,grid,64)" in wide and "k0/split(e,warpgroup,256)" in wide and "(e,grid" not in wide
    assert rows == "k0/split(m,grid,8) k0/split(n,warp,256) k0/split(m,warp,4) k0/split(m,lane,2)"


def test_random_points_keep_to_usual_numbers_and_still_differ() -> None:
    space, rng = _space("matmul:2048x3840x1024:f16:nk"), random.Random(0)
    found = {space.sample(rng).key for _ in range(24)}
    assert len(found) > 20 and sum("k,serial,64" in x for x in found) > 6 and any("k,serial,16" in x for x in found)
