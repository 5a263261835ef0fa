"""Agents that fold shares of one element: what is derived for them, what execution means by it, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from emmy.codegen.execute import execute
from emmy.codegen.lower import complete, lower
from emmy.codegen.steps import (
    BlockSync,
    Close,
    Compute,
    For,
    Gather,
    Open,
    Outline,
    RoleSync,
    Share,
    Step,
    Store,
    StoreState,
)
from emmy.errors import IllegalMove, PlanError
from emmy.ir import interpret
from emmy.ir.ops import parse_op
from emmy.ir.program import Program
from emmy.ir.schedule import replay
from emmy.ir.target import load_target
from emmy.testing.five_plans import attention
from emmy.testing.move_contract import random_inputs

TILE = "k0/split(m,grid,8) k0/split(n,grid,16)"
BIASED = parse_op("matmul:5x35x104:f16:nk,bias,silu").program()


def kinds(steps: tuple[Step, ...]) -> list[type[Step]]:
    return [k for s in steps for k in ([For, *kinds(s.body)] if isinstance(s, For) else [type(s)])]


def steps_of(schedule: str, program: Program = BIASED, launch: int = 0) -> list[type[Step]]:
    return kinds(lower(replay(program, schedule, load_target("h200")))[launch].roles[0].steps)


# ---------------------------------------------------------------- what is derived
def test_shares_meet_between_giving_their_sums_and_taking_them():
    assert steps_of(f"{TILE} k0/split(k,warp,32)") == [
        Open, For, Compute, Share, BlockSync, Gather, Close, Compute, Store,
    ]  # fmt: skip


def test_blocks_that_walk_several_tiles_meet_before_they_give_the_next_sums_too():
    assert steps_of(f"{TILE} k0/split(k,warp,32) k0/persist(1)")[3:7] == [BlockSync, Share, BlockSync, Gather]


def test_a_loop_in_time_around_the_fold_meets_twice_too():
    inside = steps_of(f"{TILE} k0/split(n,serial,8) k0/split(k,warp,32)")
    assert inside[:8] == [For, Open, For, Compute, BlockSync, Share, BlockSync, Gather]


def test_one_share_needs_no_meeting():
    assert Share not in steps_of(f"{TILE} k0/split(k,warp,128)")


def test_partial_states_of_blocks_are_gathered_before_they_are_stored():
    out = steps_of(f"k0/splitk(C,2) {TILE} k0/split(k,warp,32)")
    assert out[-4:] == [Share, BlockSync, Gather, StoreState]


# ---------------------------------------------------------------- what it means
PLANS = {
    "warps": f"{TILE} k0/split(k,warp,32)",
    "warps of uneven shares": f"{TILE} k0/split(k,warp,48)",
    "warps inside time": f"{TILE} k0/split(k,serial,64) k0/split(k,warp,16)",
    "time inside warps": f"{TILE} k0/split(k,warp,64) k0/split(k,serial,16)",
    "time around the fold": f"{TILE} k0/split(n,serial,8) k0/split(k,warp,32) k0/persist(2)",
    "warps along n outside": f"{TILE} k0/split(n,warp,8) k0/split(k,warp,32) k0/persist(1)",
    "warps along n inside": f"{TILE} k0/split(k,warp,32) k0/split(n,warp,8) k0/persist(1)",
    "lanes of warps": f"{TILE} k0/split(k,warp,52) k0/split(k,lane,13)",
    "blocks and warps": f"k0/splitk(C,2) {TILE} k0/split(k,warp,32) k0/persist(1)",
    "another launch finishes": f"k0/cut(Y) {TILE} k0/split(k,warp,8)",
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_shares_add_up(name: str):
    plan, x = replay(BIASED, PLANS[name], load_target("h200")), random_inputs(BIASED)
    assert complete(plan) is None
    want = interpret.run(BIASED, x)
    for seed in range(4):
        for v, got in execute(plan, x, seed=seed).items():
            assert abs(got - want[v]).max() < 1e-9


def test_any_monoid_may_be_shared():
    """Online softmax folds by maxima and rescaled sums."""
    program = attention(2, 8, 32, 8)
    plan = replay(program, "k0/online(O) k0/split(h,grid,1) k0/split(q,grid,4) k0/split(k,warp,8)", load_target("h200"))
    x = random_inputs(program)
    want = interpret.run(program, x)
    for v, got in execute(plan, x).items():
        assert abs(got - want[v]).max() < 1e-9
    assert Share in kinds(lower(plan)[0].roles[0].steps)


def test_sums_that_nobody_gathers_are_noticed():
    plan, x = replay(BIASED, PLANS["warps"], load_target("h200")), random_inputs(BIASED)

    def without(o: Outline) -> Outline:
        role = o.roles[0]
        kept = tuple(s for s in role.steps if not isinstance(s, Share | BlockSync | Gather))
        return replace(o, roles=(replace(role, steps=kept),))

    with pytest.raises(PlanError, match="closes C, of which 4 agents hold shares"):
        execute(plan, x, damage=without)


# ---------------------------------------------------------------- refusals
SMALL = "matmul:5x48x256:f16:nk"
REFUSED = {
    "staged operands": (
        SMALL,
        f"{TILE} k0/stage(B,tma,1) k0/split(k,warp,64) k0.C/atom(direct,8,16,32)",
        "direct reads B from memory, k0 stages it",
    ),
    "another atom whose warps share k": (
        SMALL,
        "k0/split(m,grid,16) k0/split(n,grid,16) k0/split(k,warp,64) k0.C/atom(mma,16,8,16)",
        "agents share the folding of C",
    ),
    "rows of odd length": (
        "matmul:5x48x260:f16:nk",
        f"{TILE} k0.C/atom(direct,8,16,32)",
        "rows of A have 520 bytes, direct loads 16",
    ),
    "rows of B too odd for its loads": (
        "matmul:5x44x256:f16",
        "k0/split(m,grid,8) k0/split(n,grid,64) k0/split(k,warp,64) k0.C/atom(direct,8,64,32)",
        "rows of B have 88 bytes",
    ),
    "wide loads where B lies along k": (
        SMALL,
        "k0/split(m,grid,8) k0/split(n,grid,32) k0.C/atom(direct,8,32,32)",
        "takes 16 columns of B at once",
    ),
    "more rows than the instruction has columns": (
        SMALL,
        "k0/split(m,grid,16) k0/split(n,grid,16) k0.C/atom(direct,8,16,32)",
        "direct computes 8 of m, the tile has 16",
    ),
    "shares that are no whole steps": (
        SMALL,
        f"{TILE} k0/split(k,warp,48) k0.C/atom(direct,8,16,32)",
        "direct computes 32 of k at once, the tile has 48",
    ),
    "f32": ("matmul:5x48x256:f32", f"{TILE} k0.C/atom(direct,8,16,32)", "direct multiplies f16, bf16; A is f32"),
    "more loads than registers": (
        "matmul:5x512x4096:f16:nk",
        "k0/split(m,grid,8) k0/split(n,grid,128) k0/split(k,warp,512) k0.C/atom(direct,8,16,32) k0.C/unroll(8)",
        "direct needs about",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_refuses(what: str):
    op, schedule, reason = REFUSED[what]
    with pytest.raises(IllegalMove, match=reason) as e:
        replay(parse_op(op).program(), schedule, load_target("h200"))
    assert e.value.index == len(schedule.split()) - 1, "an earlier move was refused"


def test_agents_of_one_role_meet_by_themselves_and_those_of_several_cannot():
    program = parse_op("matmul:16x16x64:f16:nk").program()
    text = "k0/split(m,grid,16) k0/split(k,serial,32) k0/stage(A,tma,2) k0/stage(B,tma,2) k0/split(k,warp,16) k0/specialize(1,40,232)"
    plan = replay(program, text, load_target("h200"))
    assert kinds(lower(plan)[0].roles[1].steps)[-5:] == [Share, RoleSync, Gather, Close, Store]
    la = plan.launches[0]
    twice = (*la.tile.roles, replace(la.tile.roles[1], name="another"))
    plan = replace(plan, launches=(replace(la, tile=replace(la.tile, roles=twice)),))
    assert "2 agents share the folding of C among 2 roles" in (complete(plan) or "")
