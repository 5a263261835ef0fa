"""Plans: sizes inside loops, what leaves a launch, and the printed form."""

from __future__ import annotations

import pytest

from emmy.errors import PlanError
from emmy.ir.moves import MOVES
from emmy.ir.ops import parse_op
from emmy.ir.plan import loop_works, naive, refuse_loops
from emmy.ir.schedule import replay
from emmy.ir.target import load_target
from emmy.testing.five_plans import attention, norm_linear
from emmy.testing.move_contract import cases

CPU, H200 = load_target("cpu"), load_target("h200")
BIASED = parse_op("matmul:m(1..100)x70x33:f32:bias").program()


def test_the_naive_plan_is_one_block_that_computes_each_stage_whole():
    plan = naive(BIASED)
    assert str(plan) == "\n".join(
        [
            "plan m=m(1..100) n=70 k=33",
            "  k0: grid  # 1 block",
            "    C[m,n] sum= A[m,k] * B[k,n]  over k",
            "    Y[m,n] = C[m,n] + bias[n]",
        ]
    )


def test_what_is_left_of_an_axis_is_the_last_step_and_counts_round_up():
    plan = replay(BIASED, "k0/split(m,core,32) k0/split(k,serial,16) k0/split(m,serial,10)", CPU)
    nest = plan.launch("k0").tile.nest
    assert [plan.extent(nest, a) for a in "mnk"] == [10, 70, 16]
    assert [plan.count(nest, i) for i in range(3)] == [4, 3, 4]
    assert plan.extent((), "m") == 100 and plan.size((), "m") == BIASED.dim("m")


def test_a_slot_holds_the_largest_block_at_the_loop_that_refills_it():
    plan = replay(
        BIASED,
        "k0/split(m,core,32) k0/split(k,serial,16) k0/split(m,serial,10) k0/stage(B,pack,1) k0/stage(A,pack,1)",
        CPU,
    )
    tile = plan.launch("k0").tile
    assert {c.value: (c.at, plan.slot_bytes(tile, c)) for c in tile.channels} == {
        "B": (1, 4 * 16 * 70),
        "A": (2, 4 * 10 * 16),
    }


def test_works_fall_into_those_before_inside_and_after_a_loop():
    plan = replay(norm_linear(8, 8, 8), "k0/fuse(Xn,Y) k0/commute(Y)", CPU)
    works = plan.launch("k0").tile.works
    names = [[w.stage for w in part] for part in loop_works(plan.program, works, "k")]
    assert names == [[], ["Y_acc", "ss"], ["r", "Y"]]
    assert [[w.stage for w in part] for part in loop_works(plan.program, works, "z")] == [
        ["Y_acc", "ss", "r", "Y"],
        [],
        [],
    ]


def test_a_value_leaves_a_launch_when_it_is_an_output_or_another_launch_reads_it():
    plan = replay(BIASED, "k0/cut(Y)", CPU)
    k0, k1 = plan.launches
    assert plan.stored(BIASED.stage("C"), k0) and plan.stored(BIASED.stage("Y"), k1)
    assert not naive(BIASED).stored(BIASED.stage("C"), naive(BIASED).launches[0])


def test_a_launch_that_takes_over_works_stands_behind_its_origin_and_is_waited_for():
    plan = replay(attention(1, 3, 8, 4), "k0/cut(O) k0/cut(P)", CPU)
    assert [(x.name, x.depends_on) for x in plan.launches] == [("k0", ()), ("k2", ("k0",)), ("k1", ("k0", "k2"))]


def test_an_unknown_launch_is_named_with_those_there_are():
    with pytest.raises(PlanError, match="launch k5 does not exist; the plan has k0"):
        naive(BIASED).launch("k5")


def test_every_plan_prints_all_of_its_loops_rings_roles_and_works():
    for case in cases():
        text = str(case.plan)
        for la in case.plan.launches:
            assert f"  {la.name}: " in text
            assert all(f"role {r.name} " in text for r in la.tile.roles)
            assert all(f"<- {c.value}[" in text for c in la.tile.channels)
            assert all(f" {x.axis}:" in text for w in la.tile.works for x in (*la.tile.nest, *w.nest))
            assert all(f"{w.stage}[" in text for w in la.tile.works)
            assert refuse_loops(case.plan, la) is None


def test_plans_with_equal_keys_are_equal():
    seen = {}
    for case in cases():
        assert seen.setdefault((case.plan.key, case.program), case.plan) == case.plan
    for case in cases():
        for cls in MOVES.values():
            for site in list(cls.sites(case.plan, case.target))[:2]:
                if not site.domains:
                    assert site.move.rewrite(case.plan, case.target).key != case.plan.key


def test_a_ring_is_printed_only_in_the_loops_of_works_that_read_its_value():
    program = parse_op("matmul:40x24x32:f32:bias").program()
    plan = replay(program, "k0/split(k,serial,16) k0/split(m,serial,8) k0/stage(A,pack,1)", CPU)
    assert str(plan).splitlines()[2:] == [
        "    serial k:2  # pieces of 16",
        "      serial m:5  # pieces of 8",
        "        A.pack <- A[8,16]  pack depth 1 panel  # 0.5 KiB",
        "        C[m,n] sum= A[m,k] * B[k,n]  over k",
        "    serial m:5  # pieces of 8",
        "      Y[m,n] = C[m,n] + bias[n]",
    ]
