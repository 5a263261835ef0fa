"""Derived synchronisation: what each kind of channel gets, and that every damage to it is noticed by execution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest

from emmy.codegen.execute import execute
from emmy.codegen.lower import complete, lower
from emmy.codegen.steps import (
    Advance,
    Ahead,
    Ask,
    At,
    AwaitCleared,
    AwaitFlag,
    BarArrive,
    Barrier,
    BarWait,
    BlockSync,
    Clear,
    Close,
    ClusterSync,
    Commit,
    Compute,
    Copy,
    CountBegun,
    CountFirst,
    CountPart,
    EachTile,
    FoldParts,
    For,
    ForHelpers,
    From,
    Gather,
    Helping,
    IfLast,
    Late,
    LaunchWait,
    LeaveSums,
    LetNext,
    LowerFlag,
    Open,
    Outline,
    Owning,
    PassCleared,
    Prefetch,
    RaiseCleared,
    RaiseFlag,
    ResetCount,
    RoleSync,
    Settle,
    Share,
    Step,
    Store,
    StoreState,
    TakeParts,
    TakeSums,
    Together,
    TurnPass,
    TurnWait,
    WaitGroup,
)
from emmy.errors import PlanError
from emmy.ir import interpret
from emmy.ir.gpu import receivers
from emmy.ir.moves.base import put
from emmy.ir.ops import Geglu, NormLinear, matmul, parse_op
from emmy.ir.plan import Plan
from emmy.ir.program import Program
from emmy.ir.schedule import replay
from emmy.ir.target import load_target
from emmy.testing.five_plans import FIVE_PLANS, attention
from emmy.testing.move_contract import random_inputs

SMALL = matmul(50, 35, 72, "f16", "nk").program()
TILES = "k0/split(m,grid,32) k0/split(n,grid,32) k0/split(k,serial,16)"
AHEAD = matmul(32, 16, 168, "f16", "nk").program()
PIECES, FETCH = (
    "k0/split(m,grid,16) k0/split(n,grid,16) k0/split(k,serial,32)",
    "k0.C/atom(mma,16,8,16) k0.C/pipeline() k0/persist(1)",
)
SWAPPED = (
    "k0/swap(C) k0/split(m,grid,16) k0/split(n,grid,64) k0/split(k,serial,32) k0/split(n,warpgroup,64) "
    "k0/stage(A,tma,2) k0/stage(B,tma,2)"
)
STATISTIC = matmul(50, 35, 72, "f16", "nk", ("residual", "sum_squares")).program()
ROWS = (
    "k0/splitk(S,2) k0/split(m,grid,32) k0/split(k,serial,16) k0/split(m,warpgroup,32) k0/split(n,warpgroup,16) "
    "k0/stage(A,tma,2) k0/stage(B,tma,2)"
)
WARP_SPECIAL = "k0/specialize(2,40,232) k0/persist(1)"

# name -> (program, target, schedule): the five plans, and a plan for every other way to fill a ring
PLANS: dict[str, tuple[Program, str, str]] = {e.name: (e.program, e.target, e.schedule) for e in FIVE_PLANS}
PLANS["pingpong"] = (SMALL, "h200", f"{TILES} k0/stage(A,tma,3) k0/stage(B,tma,3) {WARP_SPECIAL} k0/pingpong()")
PLANS["attention"] = (
    attention(2, 8, 32, 8),
    "h200",
    "k0/online(O) k0/splitk(O,2) k0/split(h,grid,1) k0/split(q,grid,4) k0/split(k,serial,4) k0/stage(Q,tma,1) "
    "k0/stage(K,tma,2) k0/stage(V,tma,2) k0/specialize(1,40,232) k0/persist(2)",
)
ATTENTION = parse_op("attention:1x160x160x16:f16:causal").program()
BLOCKS = (
    "k0/online(O) k0/split(h,grid,1) k0/split(s,grid,128) k0/split(t,serial,32) k0/split(s,warpgroup,64) k0/stage(K,tma,2) "
    "k0/stage(Q,tma,1) k0/stage(V,tma,2) k0/specialize(2,40,232) k0/persist(1) k0.O/atom(wgmma,64,16,16,1,o) k0.S/atom(wgmma,64,32,16)"
)
PLANS |= {
    "attention, logits in turn": (ATTENTION, "h200", BLOCKS),
    "attention, logits ahead": (ATTENTION, "h200", f"{BLOCKS} k0.S/pipeline()"),
    "cp_async read ahead": (AHEAD, "rtx4090", f"{PIECES} k0/stage(A,cp_async,3) k0/stage(B,cp_async,3) {FETCH}"),
    "tma read ahead": (AHEAD, "h200", f"{PIECES} k0/stage(A,tma,2) k0/stage(B,tma,2) {FETCH}"),
    "rows of two folds": (
        parse_op("softmax:5x14:f16").program(),
        "h200",
        "k0/split(m,grid,2) k0/split(n,warp,4) k0/pdl()",
    ),
    "rows early": (
        parse_op("rms_norm:5x14:f16:residual").program(),
        "h200",
        "k0/split(m,grid,2) k0/split(n,warp,4) k0/split(m,warp,1) k0/pdl()",
    ),
    "warps share rows of a statistic": (STATISTIC, "h200", f"{ROWS} {WARP_SPECIAL}"),
    "warps share k and rows": (
        NormLinear(7, 20, 72, "f16", "nk").program(),
        "h200",
        "k0/fuse(Xn,Y) k0/commute(Y) k0/operand(Y_acc,g,X) k0/split(m,grid,8) k0/split(n,grid,16) k0/split(k,warp,32) "
        "k0.Y_acc/atom(direct,8,16,32) k0/pdl()",
    ),
    "rows before a ring": (
        NormLinear(20, 24, 40, "f16", "nk").program(),
        "h200",
        "k0/cut(Y) k0/split(m,grid,4) k0/split(k,warp,24) k1/split(m,grid,16) k1/split(n,grid,16) k1/split(k,serial,16) "
        "k1/stage(W,tma,2) k1/stage(Xn,tma,2) k1/specialize(1,0,0) k0/pdl() k1/pdl()",
    ),
    "warps share k": (SMALL, "rtx4090", "k0/split(m,grid,32) k0/split(n,grid,32) k0/split(k,warp,24) k0/persist(1)"),
    "cooperative": (
        SMALL,
        "h200",
        f"{TILES} k0/stage(A,tma,3) k0/stage(B,tma,2) k0/split(m,warpgroup,16) {WARP_SPECIAL}",
    ),
    "tma without roles": (SMALL, "h200", f"{TILES} k0/stage(A,tma,3) k0/stage(B,tma,2) k0/persist(1)"),
    "tma one slot": (SMALL, "h200", f"{TILES} k0/stage(A,tma,1) k0/stage(B,tma,1) k0/persist(1)"),
    "cp_async": (SMALL, "rtx4090", f"{TILES} k0/stage(A,cp_async,3) k0/stage(B,cp_async,3) k0/persist(1)"),
    "cp_async beside ldg": (SMALL, "rtx4090", f"{TILES} k0/stage(A,cp_async,3) k0/stage(B,ldg,1) k0/persist(1)"),
    "ldg one slot": (SMALL, "rtx4090", f"{TILES} k0/stage(A,ldg,1) k0/stage(B,ldg,1) k0/persist(1)"),
    "ring in ring": (
        SMALL,
        "rtx4090",
        f"{TILES} k0/split(m,serial,16) k0/split(k,serial,4) k0/stage(B,cp_async,3) k0/stage(A,cp_async,2) k0/persist(1)",
    ),
    "deferred, self-fed": (
        SMALL,
        "h200",
        "k0/split(m,grid,64) k0/split(n,grid,16) k0/split(k,serial,16) k0/split(m,warpgroup,64) k0/split(n,warpgroup,16) "
        "k0/stage(A,tma,3) k0/stage(B,tma,3) k0/persist(1) k0.C/atom(wgmma,64,16,16)",
    ),
    "deferred, cooperative": (
        SMALL,
        "h200",
        "k0/split(m,grid,64) k0/split(n,grid,32) k0/split(k,serial,16) k0/split(m,warpgroup,64) k0/split(n,warpgroup,16) "
        "k0/stage(A,tma,3) k0/stage(B,tma,3) k0/specialize(2,40,232) k0/persist(1) k0.C/atom(wgmma,64,16,16)",
    ),
    "deferred, ping-pong": (
        SMALL,
        "h200",
        "k0/split(m,grid,64) k0/split(n,grid,16) k0/split(k,serial,16) k0/stage(A,tma,3) k0/stage(B,tma,3) "
        "k0/specialize(2,40,232) k0/persist(1) k0/pingpong() k0.C/atom(wgmma,64,16,16)",
    ),
    "clusters": (
        AHEAD,
        "h200",
        "k0/split(m,grid,16) k0/split(n,grid,16) k0/split(k,cluster,96) k0/split(k,serial,16) k0/stage(A,tma,2) k0/stage(B,tma,2)",
    ),
    "clusters with a producer": (
        AHEAD,
        "h200",
        "k0/split(m,grid,64) k0/split(n,grid,16) k0/split(k,cluster,96) k0/split(k,serial,16) k0/split(m,warpgroup,64) "
        "k0/split(n,warpgroup,16) k0/stage(A,tma,2) k0/stage(B,tma,2) k0/specialize(1,0,0) k0.C/atom(wgmma,64,16,16)",
    ),
    "swapped, tiles walked": (SMALL, "h200", f"{SWAPPED} k0/persist(1) k0.C/atom(wgmma,64,16,16)"),
    "swapped, a producer": (
        SMALL,
        "h200",
        f"{SWAPPED} k0/specialize(1,0,0) k0/persist(1) k0.C/atom(wgmma,64,16,16)",
    ),
    "deferred, one slot": (
        SMALL,
        "h200",
        "k0/split(m,grid,64) k0/split(n,grid,16) k0/split(k,serial,16) k0/split(m,warpgroup,64) k0/split(n,warpgroup,16) "
        "k0/stage(A,tma,1) k0/stage(B,tma,1) k0/persist(1) k0.C/atom(wgmma,64,16,16)",
    ),
    "ping-pong over a ragged loop": (
        SMALL,
        "h200",
        f"{TILES} k0/split(k,serial,8) k0/stage(A,tma,3) k0/stage(B,tma,3) {WARP_SPECIAL} k0/pingpong()",
    ),
    "ping-pong filled once a tile": (
        SMALL,
        "h200",
        f"k0/split(m,grid,16) k0/split(n,grid,16) k0/stage(A,tma,1) k0/stage(B,tma,1) {WARP_SPECIAL} k0/pingpong()",
    ),
}

GATED = Geglu(50, 35, 72, "f16", "nk").program()
PAIR = f"{TILES} k0/stage(A,{{by}},{{depth}}) k0/stage(G,{{by}},{{depth}}) k0/stage(U,{{by}},{{depth}})"
PLANS |= {
    "a pair by cp_async": (GATED, "rtx4090", PAIR.format(by="cp_async", depth=3) + " k0/persist(1)"),
    "a pair, ping-pong": (GATED, "h200", f"{PAIR.format(by='tma', depth=3)} {WARP_SPECIAL} k0/pingpong()"),
    "a pair, deferred, self-fed": (
        GATED,
        "h200",
        f"{PAIR.format(by='tma', depth=2)} k0/persist(1) k0.gate/atom(wgmma,64,32,16)".replace(
            TILES, "k0/split(m,grid,64) k0/split(n,grid,32) k0/split(k,serial,16) k0/split(m,warpgroup,64)"
        ),
    ),
    "a pair, swapped, a producer": (
        GATED,
        "h200",
        f"{PAIR.format(by='tma', depth=2)} k0/specialize(1,0,0) k0/persist(1) k0.gate/atom(wgmma,64,16,16)".replace(
            TILES, SWAPPED.partition(" k0/stage")[0].replace("swap(C)", "swap(gate)")
        ),
    ),
    "a pair, clusters": (
        GATED,
        "h200",
        PAIR.format(by="tma", depth=2).replace("k0/split(k,", "k0/split(k,cluster,48) k0/split(k,"),
    ),
}

PROJECTION = matmul(50, 35, 72, "f16", "nk", ("bias", "residual")).program()
PLANS |= {
    "early cp_async": (PROJECTION, "h200", f"{TILES} k0/stage(A,cp_async,3) k0/stage(B,cp_async,3) k0/pdl()"),
    "early tma": (PROJECTION, "h200", f"{TILES} k0/stage(A,tma,3) k0/stage(B,tma,2) k0/persist(2) k0/pdl()"),
    "early read ahead": (
        AHEAD,
        "h200",
        f"{PIECES} k0/stage(A,cp_async,3) k0/stage(B,cp_async,3) {FETCH} k0/pdl()",
    ),
    "warps and blocks of a cluster share k": (
        matmul(7, 24, 128, "f16", "nk").program(),
        "h200",
        "k0/split(m,grid,8) k0/split(n,grid,16) k0/split(k,cluster,64) k0/split(k,warp,32) k0.C/atom(direct,8,16,32)",
    ),
    "multicast": (
        SMALL,
        "h200",
        f"{TILES.replace('k0/split(k', 'k0/split(m,cluster,16) k0/split(k')} k0/stage(A,tma,2) k0/stage(B,tma,2) k0/persist(2)",
    ),
    "multicast of A with a producer, walked": (
        SMALL,
        "h200",
        "k0/split(m,grid,16) k0/split(n,grid,32) k0/split(n,cluster,16) k0/split(k,serial,16) k0/stage(A,tma,2) "
        "k0/stage(B,tma,2) k0/specialize(1,40,232) k0/persist(2)",
    ),
    "multicast, deferred": (
        SMALL,
        "h200",
        "k0/split(m,grid,64) k0/split(n,grid,32) k0/split(n,cluster,16) k0/split(k,serial,16) k0/split(m,warpgroup,64) "
        "k0/split(n,warpgroup,16) k0/stage(A,tma,3) k0/stage(B,tma,3) k0/persist(2) k0.C/atom(wgmma,64,16,16)",
    ),
    "early without slots": (
        matmul(7, 40, 104, "f16", "nk").program(),
        "h200",
        "k0/split(m,grid,8) k0/split(n,grid,16) k0/split(k,warp,32) k0.C/atom(direct,8,16,32) k0/pdl()",
    ),
    "early producer": (
        PROJECTION,
        "h200",
        f"{TILES} k0/stage(A,tma,3) k0/stage(B,tma,2) k0/split(m,warpgroup,16) k0/specialize(2,40,232) k0/pdl()",
    ),
    "early ping-pong": (SMALL, "h200", f"{PLANS['pingpong'][2]} k0/pdl()"),
    "early swapped": (
        SMALL,
        "h200",
        f"{SWAPPED} k0/specialize(1,0,0) k0/persist(1) k0.C/atom(wgmma,64,16,16) k0/pdl()",
    ),
    "early split-K": (
        PROJECTION,
        "h200",
        f"k0/splitk(C,2) {TILES} k0/stage(A,cp_async,2) k0/stage(B,cp_async,2) k0/pdl() k1/pdl()",
    ),
}
PLANS |= {  # shares of steps that begin and end inside tiles, and lie inside one
    "stream-K": (
        PROJECTION,
        "h200",
        f"{TILES} k0/stage(A,tma,2) k0/stage(B,tma,2) k0/split(m,warpgroup,16) k0/specialize(2,40,232) k0/streamk(3)",
    ),
    "stream-K, several help": (
        matmul(20, 35, 232, "f16", "nk").program(),
        "h200",
        f"{TILES} k0/stage(A,tma,2) k0/stage(B,tma,2) k0/specialize(1,40,232) k0/streamk(7)",
    ),
    "stream-K without roles": (SMALL, "h200", f"{TILES} k0/stage(A,tma,3) k0/stage(B,tma,2) k0/streamk(3)"),
    "stream-K behind whole tiles": (
        matmul(80, 35, 72, "f16", "nk").program(),
        "h200",
        f"{TILES.replace('32', '16', 1)} k0/stage(A,tma,2) k0/stage(B,tma,2) k0/specialize(1,40,232) k0/streamk(3)",
    ),
    "stream-K, cp_async": (SMALL, "rtx4090", f"{TILES} k0/stage(A,cp_async,3) k0/stage(B,cp_async,3) k0/streamk(3)"),
    "stream-K, deferred": (
        matmul(130, 35, 72, "f16", "nk").program(),
        "h200",
        "k0/split(m,grid,64) k0/split(n,grid,32) k0/split(k,serial,16) k0/split(m,warpgroup,64) k0/split(n,warpgroup,16) "
        "k0/stage(A,tma,2) k0/stage(B,tma,2) k0/specialize(2,40,232) k0/streamk(4) k0.C/atom(wgmma,64,16,16)",
    ),
    "early stream-K": (PROJECTION, "h200", f"{TILES} k0/stage(A,tma,3) k0/stage(B,tma,2) k0/streamk(3) k0/pdl()"),
}
ASKED = matmul(50, 40, 72, "f16", "nk", ("residual", "sum_squares")).program()  # rows that the copy engine takes
LAST = ROWS.replace("k0/splitk(S,2)", "k0/splitk(S,2) k0/finish(S)")
BEGUN, ADDED = (LAST.replace("finish(S)", f"finish(S,{when})") for when in ("begun", "added"))
PLANS |= {  # parts of rows that the last block combines
    "the last block combines": (STATISTIC, "h200", f"{LAST} k0/specialize(2,40,232) k0/persist(2)"),
    "the last block combines, without roles": (STATISTIC, "h200", f"{LAST} k0/persist(2)"),
    "the last block combines, in turn": (
        STATISTIC,
        "h200",
        "k0/splitk(S,2) k0/finish(S) k0/split(m,grid,16) k0/split(k,serial,16) k0/stage(A,tma,2) k0/stage(B,tma,2) "
        "k0/specialize(2,40,232) k0/persist(2) k0/pingpong()",
    ),
    "the last block combines, clusters": (
        STATISTIC,
        "h200",
        "k0/splitk(S,2) k0/finish(S) k0/split(m,grid,16) k0/split(k,cluster,48) k0/split(k,serial,16) "
        "k0/stage(A,tma,2) k0/stage(B,tma,2)",
    ),
    "early, the last block combines": (ASKED, "h200", f"{LAST} k0/persist(3) k0/prefetch(R,2) k0/pdl()"),
    "the last to begin combines": (STATISTIC, "h200", f"{BEGUN} k0/specialize(2,40,232) k0/persist(2)"),
    "early, the last to begin combines": (ASKED, "h200", f"{BEGUN} k0/persist(3) k0/prefetch(R,2) k0/pdl()"),
    "memory adds": (STATISTIC, "h200", f"{ADDED} k0/specialize(2,40,232) k0/persist(2)"),
    "early, memory adds": (ASKED, "h200", f"{ADDED} k0/persist(3) k0/prefetch(R,2) k0/pdl()"),
    "early, lanes ask": (
        parse_op("matmul:130x64x88:f16:nk,bias,residual").program(),
        "h200",
        "k0/split(m,grid,64) k0/split(n,grid,32) k0/split(k,serial,16) k0/split(m,warpgroup,64) k0/stage(A,tma,2) k0/stage(B,tma,2) "
        "k0/specialize(1,0,0) k0/persist(2) k0.C/atom(wgmma,64,32,16) k0/preload(R,1) k0/preload(bias,1) k0/pdl()",
    ),
    "lanes ask at several steps": (
        parse_op("matmul:130x64x104:f16:nk,bias,residual").program(),
        "h200",
        "k0/split(m,grid,64) k0/split(n,grid,64) k0/split(k,serial,16) k0/split(m,warpgroup,64) k0/stage(A,tma,2) k0/stage(B,tma,2) "
        "k0/specialize(1,0,0) k0/persist(2) k0.C/atom(wgmma,64,64,16) k0/preload(R,4,6,1) k0/preload(bias,2,4)",
    ),
    "early, a producer asks": (
        ASKED,
        "h200",
        f"{ROWS} k0/specialize(2,40,232) k0/prefetch(R,4) k0/pdl()",
    ),
}
NESTED = For | From | At | Late | Ahead | Together | Helping | Owning | ForHelpers | EachTile | IfLast | CountFirst


@cache
def plan(name: str) -> Plan:
    program, target, schedule = PLANS[name]
    return replay(program, schedule, load_target(target))


def outline(name: str, launch: str = "k0") -> Outline:
    return next(o for o in lower(plan(name)) if o.launch.name == launch)


def all_steps(steps: tuple[Step, ...]) -> Iterator[Step]:
    for s in steps:
        yield s
        if isinstance(s, NESTED):
            yield from all_steps(s.body)


# ---------------------------------------------------------------- what is derived
def test_a_cpu_panel_needs_no_synchronisation():
    o = outline("cpu_packed")
    kinds = {type(s) for r in o.roles for s in all_steps(r.steps)}
    assert not o.barriers and not kinds & {BarWait, BarArrive, BlockSync, Commit, WaitGroup, TurnWait}


def test_a_deep_cp_async_ring_waits_for_depth_less_two_groups_and_meets_once():
    (role,) = outline("cp_async").roles
    assert [s for s in role.steps if isinstance(s, Copy | Commit)] == [
        Copy("A", 0), Copy("B", 0), Commit(), Copy("A", 1), Copy("B", 1), Commit(),
    ]  # fmt: skip
    (ring,) = (s for s in role.steps if isinstance(s, For))
    assert ring.body == (
        WaitGroup(1), BlockSync(), Copy("A", 2), Copy("B", 2), Commit(), Compute("C"), Advance(("A", "B")),
    )  # fmt: skip


def test_an_early_launch_fetches_constants_as_far_as_the_ring_reaches_then_waits_then_does_the_rest():
    (role,) = outline("early cp_async").roles
    assert role.steps[0] == LetNext()
    assert [s for s in role.steps if isinstance(s, Copy | Commit | LaunchWait)] == [
        Copy("B", 0), Copy("B", 1), LaunchWait(), Copy("A", 0), Commit(), Copy("A", 1), Commit(),
    ]  # fmt: skip


def test_a_producer_of_an_early_launch_makes_the_first_fills_of_constants_ahead_of_its_loop():
    producer, consumer = outline("early producer").roles
    at = producer.steps.index(LaunchWait())
    assert [s for s in producer.steps[:at] if isinstance(s, Copy)] == [Copy("B", 0), Copy("B", 1)]
    (ring,) = producer.steps[at + 1 :]
    assert isinstance(ring, For) and [s for s in ring.body if isinstance(s, Copy)] == [Copy("A", 0)]
    assert [(s.value, s.fill) for s in ring.body if isinstance(s, From)] == [("B", 2)]
    assert consumer.steps.index(LaunchWait()) == consumer.steps.index(Close("C")) - 1


def test_a_producer_that_walks_several_tiles_waits_before_its_first_fill():
    producer = outline("early ping-pong").roles[0]
    assert producer.steps[:2] == (LetNext(), LaunchWait())


def test_both_launches_of_an_early_split_k_wait_for_those_before():
    for launch in ("k0", "k1"):
        (role,) = outline("early split-K", launch).roles
        assert [s for s in role.steps if s == LaunchWait()] == [LaunchWait()]
    assert role.steps[:4] == (LetNext(), LaunchWait(), Open("C"), FoldParts("C"))


def test_one_slot_waits_for_everything_and_meets_twice():
    (role,) = outline("ldg one slot").roles
    (ring,) = (s for s in role.steps if isinstance(s, For))
    assert ring.body == (
        Copy("A", 0), Copy("B", 0), Commit(), WaitGroup(0), BlockSync(), Compute("C"), BlockSync(), Advance(("A", "B")),
    )  # fmt: skip


def test_a_producer_and_consumers_share_a_full_and_an_empty_barrier_a_slot():
    assert outline("cooperative").barriers == (
        Barrier("full_A", 3, 1, 2 * 32 * 16, (0, 0, 0), ("A",)),
        Barrier("empty_A", 3, 2, 0, (1, 1, 1), ("A",)),
        Barrier("full_B", 2, 1, 2 * 32 * 16, (0, 0), ("B",)),
        Barrier("empty_B", 2, 2, 0, (1, 1), ("B",)),
    )


def test_rings_of_one_loop_and_depth_for_the_same_works_share_their_barriers():
    assert [(b.name, b.tx_bytes, b.values) for b in outline("deferred, cooperative").barriers] == [
        ("full_A_B", 2 * (64 + 32) * 16, ("A", "B")), ("empty_A_B", 0, ("A", "B")),
    ]  # fmt: skip
    names = {b.name for b in outline("attention").barriers}  # K is read long before V
    assert {"full_K", "full_V"} <= names


def test_a_dealt_ring_is_emptied_by_one_warpgroup_and_its_roles_take_turns():
    o = outline("pingpong")
    counts = {b.name: (b.slots, b.count, b.first_parity) for b in o.barriers}
    assert counts["empty_A_B"] == (3, 1, (1, 1, 1)) and counts["turn"] == (2, 1, (1, 0))
    for i, role in enumerate(o.roles[1:]):
        turns = [s for s in role.steps if isinstance(s, TurnWait | TurnPass)]
        assert turns == [TurnWait(i), TurnPass(1 - i)]


@pytest.mark.parametrize(
    "name", ["pingpong", "deferred, ping-pong", "ping-pong over a ragged loop", "ping-pong filled once a tile"]
)
def test_a_dealt_role_waits_for_fills_only_while_it_has_the_turn_and_takes_it_once_a_tile(name: str):
    for role in outline(name).roles[1:]:
        kinds = [type(s) for s in all_steps(role.steps)]
        assert kinds.count(TurnWait) == kinds.count(TurnPass) == 1
        waits = [i for i, k in enumerate(kinds) if k is BarWait]
        assert kinds.index(TurnWait) < min(waits) and max(waits) < kinds.index(TurnPass)


def test_a_ring_turns_only_in_the_loops_of_works_that_read_its_value():
    program = matmul(40, 24, 32, epilogue=("bias",)).program()
    text = "k0/split(k,serial,16) k0/split(m,serial,8) k0/stage(A,pack,1)"
    (o,) = lower(replay(program, text, load_target("cpu")))
    loops = [s for s in o.roles[0].steps if isinstance(s, For)]
    assert [[s for s in all_steps(x.body) if isinstance(s, Copy)] for x in loops] == [[Copy("A", 0)], []]


def test_a_plan_whose_warpgroups_do_not_match_its_loops_is_not_complete():
    program = matmul(64, 64, 64, "f16", "nk").program()
    head = "k0/split(m,grid,32) k0/split(k,serial,16) k0/stage(A,tma,2)"
    for tail, reason in (
        ("k0/specialize(2,40,232)", "role consumer has 2 warpgroups, its nest divides work among 1"),
        ("k0/specialize(2,40,232) k0/persist(2) k0/pingpong() k0/split(m,warpgroup,16)", "a dealt role works alone"),
    ):
        unfinished = replay(program, f"{head} {tail}", load_target("h200"))
        assert reason in (complete(unfinished) or "")
        with pytest.raises(PlanError, match="cannot lower: k0: role consumer"):
            lower(unfinished)


def test_a_launch_that_does_not_wait_for_what_it_reads_is_not_complete():
    good = plan("splitk")
    hasty = replace(good, launches=(good.launches[0], replace(good.launches[1], depends_on=())))
    assert complete(hasty) == "k1: C needs what k0 leaves in memory, but k1 does not wait for k0"


def test_a_ring_that_no_role_fills_is_not_complete():
    good = plan("cooperative")
    la = good.launch("k0")
    alone = tuple(replace(c, src="all", dst=("all",)) for c in la.tile.channels)
    assert "A is filled by all, which is none of its 2 roles" in (
        complete(put(good, la, replace(la.tile, channels=alone))) or ""
    )


def test_blocks_that_fill_together_expect_the_whole_and_give_back_to_all():
    o = outline("multicast")
    assert o.barriers == (
        Barrier("full_A_B", 2, 1, 2 * (16 + 32) * 16, (0, 0), ("A", "B")),
        Barrier("empty_A_B", 2, 2, 0, (1, 1), ("A", "B"), blocks=2),
    )
    assert o.first == o.last == (ClusterSync(every=True),)
    assert not any(isinstance(s, ClusterSync) for r in o.roles for s in all_steps(r.steps))


def test_blocks_of_a_cluster_fill_for_themselves_what_they_do_not_read_alike_or_cannot_bring_in_whole_periods():
    for schedule, together in (
        ("k0/split(m,cluster,16) k0/split(k,serial,16) k0/stage(A,tma,2) k0/stage(B,tma,2)", {"A": 1, "B": 2}),
        ("k0/split(n,cluster,16) k0/split(k,serial,16) k0/stage(A,tma,2) k0/stage(B,tma,2)", {"A": 2, "B": 1}),
        ("k0/split(n,cluster,16) k0/split(k,serial,16) k0/stage(A,cp_async,2) k0/stage(B,tma,2)", {"A": 1, "B": 1}),
        ("k0/split(n,cluster,4) k0/split(k,serial,16) k0/stage(A,tma,2) k0/stage(B,tma,2)", {"A": 1, "B": 1}),
        ("k0/split(k,cluster,48) k0/split(k,serial,8) k0/stage(A,tma,2) k0/stage(B,tma,2)", {"A": 1, "B": 1}),
    ):
        p = replay(SMALL, f"k0/split(m,grid,32) k0/split(n,grid,32) {schedule}", load_target("h200"))
        tile = p.launch("k0").tile
        assert {c.value: receivers(p, tile, c) for c in tile.channels} == together, schedule


# ---------------------------------------------------------------- damage
Edit = Callable[[Step], list[Step]]


@dataclass(frozen=True)
class Damaged:
    """An outline with one derived fact broken."""

    plan: str
    what: str
    outline: Outline


def _edited(o: Outline, kind: type[Step], at: int, edit: Edit) -> Outline:
    """The outline with step number `at` of a kind replaced."""
    seen = -1

    def go(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        nonlocal seen
        out: list[Step] = []
        for s in steps:
            if isinstance(s, kind):
                seen += 1
                out += edit(s) if seen == at else [s]
            elif isinstance(s, NESTED):
                out.append(replace(s, body=go(s.body)))
            else:
                out.append(s)
        return tuple(out)

    return replace(
        o, roles=tuple(replace(r, steps=go(r.steps), after=go(r.after), before=go(r.before)) for r in o.roles)
    )


def each_step(kind: type[Step], edit: Edit) -> Iterator[Damaged]:
    """Every plan with one step of the kind edited, each in turn."""
    for name in PLANS:
        for o in lower(plan(name)):
            steps = [s for r in o.roles for s in all_steps((*r.steps, *r.after, *r.before)) if isinstance(s, kind)]
            for at, s in enumerate(steps):
                yield Damaged(name, f"{s} #{at}", _edited(o, kind, at, edit))


def each_barrier(starts: str, change: Callable[[Barrier], Barrier]) -> Iterator[Damaged]:
    """Every plan with one barrier of that name changed."""
    for name in PLANS:
        for o in lower(plan(name)):
            for i, b in enumerate(o.barriers):
                if b.name.startswith(starts):
                    barriers = (*o.barriers[:i], change(b), *o.barriers[i + 1 :])
                    yield Damaged(name, b.name, replace(o, barriers=barriers))


def no_turns() -> Iterator[Damaged]:
    for name in PLANS:
        for o in lower(plan(name)):
            if any(b.name == "turn" for b in o.barriers):
                yield Damaged(name, "turn", replace(o, barriers=tuple(b for b in o.barriers if b.name != "turn")))


def early_release() -> Iterator[Damaged]:
    """Consumers free a slot before they compute with it."""

    def go(steps: tuple[Step, ...]) -> tuple[Step, ...]:
        steps = tuple(replace(s, body=go(s.body)) if isinstance(s, For) else s for s in steps)
        frees = tuple(s for s in steps if isinstance(s, BarArrive) and s.barrier.startswith("empty"))
        works = [i for i, s in enumerate(steps) if any(isinstance(x, Compute) for x in all_steps((s,)))]
        if not frees or not works:
            return steps
        return (*steps[: works[0]], *frees, *(s for s in steps[works[0] :] if s not in frees))

    for name in ("pingpong", "cooperative", "attention", "ping-pong over a ragged loop"):
        o = outline(name)
        yield Damaged(name, "release first", replace(o, roles=tuple(replace(r, steps=go(r.steps)) for r in o.roles)))


def late_wait() -> Iterator[Damaged]:
    """A role of an early launch waits for the launches before behind the first step that needs it, not before."""
    touching = Copy | For | Compute | FoldParts | Store | StoreState
    for name in PLANS:
        for o in lower(plan(name)):
            for i, r in enumerate(o.roles):
                if LaunchWait() not in r.steps:
                    continue
                at = r.steps.index(LaunchWait())
                behind = next(j for j in range(at, len(r.steps)) if isinstance(r.steps[j], touching)) + 1
                steps = (*r.steps[:at], *r.steps[at + 1 : behind], LaunchWait(), *r.steps[behind:])
                roles = (*o.roles[:i], replace(r, steps=steps), *o.roles[i + 1 :])
                yield Damaged(name, f"{o.launch.name} {r.role.name}", replace(o, roles=roles))


def each_outline(change: Callable[[Outline], Outline]) -> Iterator[Damaged]:
    """Every outline that a change makes another one."""
    for name in PLANS:
        for o in lower(plan(name)):
            if change(o) != o:
                yield Damaged(name, o.launch.name, change(o))


def flipped(b: Barrier) -> Barrier:
    return replace(b, first_parity=tuple(1 - p for p in b.first_parity))


DAMAGE: dict[str, Callable[[], Iterator[Damaged]]] = {
    "no turn token": no_turns,
    "turn not waited for": lambda: each_step(TurnWait, lambda s: []),
    "turn not passed on": lambda: each_step(TurnPass, lambda s: []),
    "turn starts at the wrong role": lambda: each_barrier("turn", flipped),
    "full starts at the wrong parity": lambda: each_barrier("full", flipped),
    "empty starts at the wrong parity": lambda: each_barrier("empty", flipped),
    "full waits for one arrival more": lambda: each_barrier("full", lambda b: replace(b, count=b.count + 1)),
    "empty waits for one arrival more": lambda: each_barrier("empty", lambda b: replace(b, count=b.count + 1)),
    "empty counts one consumer": lambda: (d for d in each_barrier("empty", lambda b: replace(b, count=1)) if d.plan == "cooperative"),
    "full with a slot too few": lambda: (
        d for d in each_barrier("full", lambda b: replace(b, slots=b.slots - 1, first_parity=b.first_parity[1:]))
        if all(b.slots for b in d.outline.barriers)
    ),
    "a wait dropped": lambda: each_step(BarWait, lambda s: []),
    "an arrival dropped": lambda: each_step(BarArrive, lambda s: []),
    "an arrival doubled": lambda: each_step(BarArrive, lambda s: [s, s]),
    "a slot released before the work": early_release,
    "one more group pending": lambda: each_step(WaitGroup, lambda s: [WaitGroup(s.pending + 1)]),  # type: ignore[union-attr]
    "groups not waited for": lambda: each_step(WaitGroup, lambda s: []),
    "a group not committed": lambda: each_step(Commit, lambda s: []),
    "a block sync dropped": lambda: each_step(BlockSync, lambda s: []),
    "deferred works not waited for": lambda: each_step(Settle, lambda s: []),
    "one more deferred work pending": lambda: each_step(Settle, lambda s: [replace(s, pending=s.pending + 1)]),  # type: ignore[call-arg]
    "a slot given back with its reader under way": lambda: (
        d for d in each_step(BarArrive, lambda s: [replace(s, ahead=0)] if s.ahead < 0 else []) if "deferred" in d.plan  # type: ignore[union-attr,call-arg]
    ),
    "sums not shared": lambda: each_step(Share, lambda s: []),
    "sums not gathered": lambda: each_step(Gather, lambda s: []),
    "launches before not waited for": lambda: each_step(LaunchWait, lambda s: []),
    "launches before waited for too late": late_wait,
    "a fill made ahead made again": lambda: each_step(From, lambda s: [*s.body]),  # type: ignore[union-attr]
    "a role's sync dropped": lambda: each_step(RoleSync, lambda s: []),
    "a cluster sync dropped": lambda: each_step(ClusterSync, lambda s: []),
    "blocks of a cluster do not meet before their first tile": lambda: each_outline(lambda o: replace(o, first=())),
    "blocks of a cluster do not meet before they end": lambda: each_outline(lambda o: replace(o, last=())),
    "a slot is given back to the own block only": lambda: (
        d for d in each_barrier("empty", lambda b: replace(b, blocks=1)) if "multicast" in d.plan
    ),
    "a slot is filled when one block has given it back": lambda: (
        d for d in each_barrier("empty", lambda b: replace(b, count=b.count // b.blocks)) if "multicast" in d.plan
    ),
    "sums not left": lambda: each_step(LeaveSums, lambda s: []),
    "sums left not taken": lambda: each_step(TakeSums, lambda s: []),
    "sums taken twice": lambda: each_step(TakeSums, lambda s: [s, s]),
    "a flag not raised": lambda: each_step(RaiseFlag, lambda s: []),
    "a flag raised before the sums are left": lambda: each_step(Helping, lambda s: [replace(s, body=s.body[::-1])]),  # type: ignore[union-attr,call-arg]
    "a flag not waited for": lambda: each_step(AwaitFlag, lambda s: []),
    "a flag not lowered": lambda: each_step(LowerFlag, lambda s: []),
    "helpers not waited for": lambda: each_step(ForHelpers, lambda s: []),
    "every share finishes its tile": lambda: each_step(Owning, lambda s: [*s.body]),  # type: ignore[union-attr]
    "a part not counted": lambda: each_step(CountPart, lambda s: []),
    "a part counted twice": lambda: each_step(CountPart, lambda s: [s, s]),
    "a part that will be left not counted": lambda: each_step(CountBegun, lambda s: []),
    "a part that will be left counted twice": lambda: each_step(CountBegun, lambda s: [s, s]),
    "marked parts not taken": lambda: each_step(TakeParts, lambda s: []),
    "marked parts not waited for": lambda: each_step(TakeParts, lambda s: [FoldParts(s.stage)]),  # type: ignore[union-attr]
    "marked parts taken twice": lambda: each_step(TakeParts, lambda s: [s, s]),
    "marked parts not left": lambda: (d for d in each_step(StoreState, lambda s: []) if "begin" in d.plan),
    "every block takes itself for the last": lambda: each_step(IfLast, lambda s: [*s.body]),  # type: ignore[union-attr]
    "the last block goes on": lambda: each_step(IfLast, lambda s: []),
    "nobody sets sums to zero": lambda: each_step(Clear, lambda s: []),
    "sums are set to zero by all": lambda: each_step(CountFirst, lambda s: [*s.body]),  # type: ignore[union-attr]
    "sums are set to zero twice": lambda: each_step(CountFirst, lambda s: [s, s]),
    "zeros are told of too soon": lambda: each_step(CountFirst, lambda s: [replace(s, body=s.body[::-1])]),  # type: ignore[union-attr,call-arg]
    "zeros are not told of": lambda: each_step(RaiseCleared, lambda s: []),
    "zeros are not waited for": lambda: each_step(AwaitCleared, lambda s: []),
    "who knows of zeros is not counted": lambda: each_step(PassCleared, lambda s: []),
    "who knows of zeros counts twice": lambda: each_step(PassCleared, lambda s: [s, s]),
    "a part not added": lambda: (d for d in each_step(StoreState, lambda s: []) if "adds" in d.plan),
    "a count not reset": lambda: each_step(ResetCount, lambda s: []),
    "a residual is asked for before the launches before have ended": lambda: (
        d for d in each_step(LetNext, lambda s: [s, Prefetch("R")]) if "asks" in d.plan
    ),
    "lanes ask before the launches before have ended": lambda: (
        d for d in each_step(LetNext, lambda s: [s, Ask("R")]) if "lanes" in d.plan
    ),
    "lanes do not ask": lambda: each_step(Late, lambda s: []),
    "lanes ask at a step too few": lambda: each_step(Late, lambda s: [replace(s, turns=s.turns - 1)]),  # type: ignore[union-attr,call-arg]
    "lanes ask at a step too many": lambda: each_step(Late, lambda s: [replace(s, turns=s.turns + 1)]),  # type: ignore[union-attr,call-arg]
    "a copy dropped": lambda: each_step(Copy, lambda s: []),
    "a copy one fill too far ahead": lambda: each_step(Copy, lambda s: [replace(s, ahead=s.ahead + 1)]),  # type: ignore[call-arg]
}  # fmt: skip

# Damage that changes nothing, and why. Anything else must be noticed.
HARMLESS = {
    # The producer waits for empty_A first, and both rings are released together once both were read.
    ("a wait dropped", "ping-pong filled once a tile", "BarWait(barrier='empty_B', value='B', ahead=0) #1"),
    # B has 2 slots and A 3: when B's slot is free, A's of the same fill has been for an iteration.
    ("a wait dropped", "cooperative", "BarWait(barrier='empty_A', value='A', ahead=0) #0"),
    ("a wait dropped", "early producer", "BarWait(barrier='empty_A', value='A', ahead=0) #0"),
    # A cluster makes one tile: the first fill of a slot waits for nobody, and what is given back last is not filled again.
    ("a wait dropped", "clusters", "BarWait(barrier='empty_A_B', value='A', ahead=0) #0"),
    ("a wait dropped", "a pair, clusters", "BarWait(barrier='empty_A_G_U', value='A', ahead=0) #0"),
    ("a wait dropped", "the last block combines, clusters", "BarWait(barrier='empty_A_B', value='A', ahead=0) #0"),
    (
        "an arrival dropped",
        "clusters with a producer",
        "BarArrive(barrier='empty_A_B', value='A', count=1, ahead=-1) #2",
    ),
    (
        "an arrival doubled",
        "clusters with a producer",
        "BarArrive(barrier='empty_A_B', value='A', count=1, ahead=-1) #2",
    ),
    # The first logits are waited for again in the loop; before it only for the assembler's sake.
    ("deferred works not waited for", "attention, logits ahead", "Settle(stage='S', pending=0) #0"),
    ("one more deferred work pending", "attention, logits ahead", "Settle(stage='S', pending=0) #0"),
    # The loop waits for every group anyway, so a group that joins the next one is waited for as well.
    ("a group not committed", "norm_linear", "Commit() #0"),
    ("a group not committed", "cp_async beside ldg", "Commit() #0"),
    ("a group not committed", "cp_async beside ldg", "Commit() #1"),
    ("a group not committed", "ring in ring", "Commit() #0"),
}


@cache
def right_answer(name: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    x = random_inputs(PLANS[name][0])
    return x, interpret.run(PLANS[name][0], x)


def noticed(d: Damaged, seeds: range = range(8)) -> str | None:
    """How execution notices, in the first interleaving that does; None when no one does."""
    x, want = right_answer(d.plan)
    for seed in seeds:
        try:
            got = execute(plan(d.plan), x, seed=seed, damage=lambda o: d.outline if o.launch == d.outline.launch else o)
        except PlanError as e:
            return type(e).__name__
        with np.errstate(invalid="ignore"):
            if not all(np.allclose(got[v], want[v], atol=1e-9) for v in want):
                return "wrong answer"
    return None


@pytest.mark.parametrize("name", PLANS)
def test_undamaged_it_is_right_in_every_interleaving(name: str):
    x, want = right_answer(name)
    for seed in range(6 if any(len(o.roles) > 1 for o in lower(plan(name))) else 1):
        got = execute(plan(name), x, seed=seed)
        for v in want:
            np.testing.assert_allclose(got[v], want[v], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_noticed(what: str):
    caught, missed, harmless = Counter[str](), [], 0
    for d in DAMAGE[what]():
        how = noticed(d)
        if how:
            caught[how] += 1
        elif (what, d.plan, d.what) in HARMLESS:
            harmless += 1
        else:
            missed.append(f"{d.plan}: {d.what}")
    ways = ", ".join(f"{how} {n}" for how, n in sorted(caught.items()))
    print(f"{what:34} noticed {sum(caught.values()):3} ({ways})" + (f", harmless {harmless}" if harmless else ""))
    assert not missed, f"{what} goes unnoticed in {missed}"
    assert caught, f"{what} was never tried"
    assert harmless == sum(w == what for w, _, _ in HARMLESS), "damage once harmless is noticed now: shorten the list"
