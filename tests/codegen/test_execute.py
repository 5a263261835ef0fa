"""Any legal plan computes its program: random rings, random schedules of any moves, and walks of the search space."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emmy.codegen.execute import execute
from emmy.codegen.lower import complete, lower
from emmy.errors import IllegalMove, PlanError
from emmy.ir import interpret
from emmy.ir.moves import MOVES, Move
from emmy.ir.ops import matmul, parse_op
from emmy.ir.plan import Plan, naive
from emmy.ir.program import Program
from emmy.ir.schedule import apply_move, parse_schedule, replay
from emmy.ir.target import Target, load_target
from emmy.search.schedule_space import ScheduleSpace
from emmy.testing.five_plans import attention, norm_linear
from emmy.testing.move_contract import random_inputs, two_outputs

ANY_SIZE = (1, 2, 3, 5, 7, 13, 16, 17, 31, 32, 48, 67, 96, 97, 130)  # odd, prime, one, and what tiles divide


def check(plan: Plan, program: Program, what: str, seed: int = 0, sizes: dict[str, int] | None = None) -> None:
    x = random_inputs(program, sizes, seed)
    got, want = execute(plan, x, sizes, seed=seed), interpret.run(program, x, sizes)
    for v in want:
        np.testing.assert_allclose(
            got[v], want[v], rtol=1e-9, atol=1e-9, err_msg=f"{v} of {what} at {sizes}, seed {seed}"
        )


# ---------------------------------------------------------------- rings
DEPTH = st.integers(1, 5)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    tile=st.tuples(st.integers(2, 5), st.integers(2, 9), st.sampled_from([2, 4, 6, 8])),
    inner=st.integers(1, 3),
    more=st.tuples(*[st.integers(0, 17)] * 3),
    deep=st.tuples(DEPTH, DEPTH),
    transport=st.sampled_from(["cp_async", "ldg", "tma", "producer", "cooperative", "dealt"]),
    workers=st.integers(1, 4),
    consumers=st.integers(2, 3),
    seed=st.integers(0, 5),
)
def test_any_ring_is_right(tile, inner, more, deep, transport, workers, consumers, seed):
    m, n, k = tile[0] * consumers, tile[1], tile[2] * inner
    program = matmul(m + more[0], n + more[1], -(-(k + more[2]) // 8) * 8, "f16", "nk").program()
    fill = transport if transport in ("cp_async", "ldg") else "tma"
    words = [f"k0/split(m,grid,{m})", f"k0/split(n,grid,{n})", f"k0/split(k,serial,{k})"]
    words += [f"k0/split(k,serial,{tile[2]})"] if inner > 1 else []
    most = 2 if fill == "ldg" else 5
    words += [f"k0/stage(A,{fill},{min(deep[0], most)})", f"k0/stage(B,{fill},{min(deep[1], most)})"]
    words += [f"k0/split(m,warpgroup,{tile[0]})"] if transport == "cooperative" else []
    if transport in ("producer", "cooperative", "dealt"):
        words.append(f"k0/specialize({1 if transport == 'producer' else consumers},24,{152 if consumers > 2 else 232})")
    words.append(f"k0/persist({workers})")
    words += ["k0/pingpong()"] if transport == "dealt" else []
    schedule = " ".join(words)
    check(replay(program, schedule, load_target("h200")), program, schedule, seed)


def test_dealt_roles_skip_tiles_whose_loops_are_ragged_inside_one_another():
    program = matmul(20, 8, 56, "f16", "nk").program()
    schedule = (
        "k0/split(m,grid,4) k0/split(n,grid,4) k0/split(k,serial,24) k0/split(k,serial,8) k0/split(k,serial,4) "
        "k0/stage(A,tma,3) k0/stage(B,tma,2) k0/specialize(2,40,232) k0/persist(2) k0/pingpong()"
    )
    for seed in range(8):
        check(replay(program, schedule, load_target("h200")), program, schedule, seed)


# ---------------------------------------------------------------- random schedules
def some_program(rng: random.Random) -> Program:
    def size() -> int:
        return rng.choice((1, 2, 3, 5, 8, 13, 16, 32))

    m = str(size()) if rng.random() < 0.6 else f"m(1..{size()})"
    options = rng.choice(("", ":nk", ":bias,silu", ":nk,residual"))
    return rng.choice(
        (
            lambda: parse_op(f"matmul:{m}x{size()}x{size()}:{rng.choice(('f32', 'f16'))}{options}").program(),
            lambda: attention(rng.choice((1, 2)), rng.choice((1, 3, 8, 16)), 16, rng.choice((4, 16))),
            lambda: norm_linear(size(), size(), size()),
            lambda: two_outputs(7, 5, 6),
        )
    )()


def some_move(rng: random.Random, plan: Plan, target: Target) -> Move | None:
    """A listed site, filled, or a guess with plausible words and numbers, which is often refused."""
    cls = rng.choice((*MOVES.values(), *[MOVES["split"]] * 6, *[MOVES["stage"]] * 3))
    if rng.random() < 0.4:
        sites = list(cls.sites(plan, target))
        site = rng.choice(sites) if sites else None
        return site.move.fill({k: rng.choice(d) for k, d in site.domains}) if site else None
    launch, program = rng.choice(plan.launches), plan.program
    names = [*(s.out for s in program.stages), *(v.name for v in program.inputs)]
    words = {
        "axis": [a for a, _ in program.dims],
        "level": target.loop_levels,
        "transport": ("pack", "ldg", "cp_async", "tma"),
        "atom": ("fma", "dot", "mma", "wgmma"),
    }
    values: dict[str, object] = {}
    for f in fields(cls)[2:]:
        if f.type == "Knob":
            values[f.name] = rng.choice((1, 1, 2, 3, 4, 5, 8, 16, 16, 32, 40, 112))
        elif f.type == "str":
            values[f.name] = rng.choice(words.get(f.name, names))
    work = rng.choice((None, None, rng.choice(launch.tile.works).stage))
    return cls(launch.name, work, **values)


def random_schedule_is_right(seed: int) -> None:
    rng = random.Random(seed)
    program, target = some_program(rng), load_target(rng.choice(("cpu", "rtx4090", "h200")))
    plan, moves = naive(program), []
    for _ in range(rng.randint(1, 30)):
        move = some_move(rng, plan, target)
        if move is None or move.refuse(plan, target) is not None:
            continue
        before = repr(plan)
        after = apply_move(plan, move, target)
        assert repr(plan) == before
        assert parse_schedule(str(move)) == (move,)
        plan = after
        moves.append(move)
    schedule = " ".join(map(str, moves))
    assert replay(program, schedule, target) == plan
    if complete(plan) is not None:
        return
    assert all(str(o) for o in lower(plan))
    sizes = {s.name: rng.randint(s.lo, s.hi) for s in program.syms}
    check(plan, program, f"{schedule} on {target.name}", seed, sizes)


@pytest.mark.parametrize("block", range(10))
def test_a_random_schedule_of_any_moves_is_refused_or_right(block: int):
    for seed in range(60 * block, 60 * block + 60):
        random_schedule_is_right(seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_many_random_schedules_of_any_moves_are_refused_or_right(block: int):
    for seed in range(10**6 + 250 * block, 10**6 + 250 * block + 250):
        random_schedule_is_right(seed)


# ---------------------------------------------------------------- the search space
def walk_is_right(target: str, seed: int) -> None:
    rng = random.Random(f"{target} {seed}")
    m, n, k = (rng.choice(ANY_SIZE) for _ in range(3))
    options = rng.choice(("", ":nk", ":bias", ":nk,bias,gelu_tanh", ":scale,residual", ":silu"))
    symbolic = rng.random() < 0.2
    dtype = rng.choice(("f32", "f16", "bf16"))
    op = parse_op(f"matmul:{f'm(1..{m})' if symbolic else m}x{n}x{k}:{dtype}{options}")
    space = ScheduleSpace(op, load_target(target))
    for point in (space.sample(rng), space.default()):
        plan = replay(op.program(), point.key, load_target(target))
        assert complete(plan) is None, f"{point.key}: {complete(plan)}"
        check(plan, op.program(), f"{op} {point.key} on {target}", seed, {"m": rng.randint(1, m)} if symbolic else None)


@pytest.mark.parametrize("target", ["cpu", "cpu-avx2", "rtx4090", "h200"])
def test_a_walk_of_the_search_space_ends_in_a_complete_plan_that_is_right(target: str):
    for seed in range(12):
        walk_is_right(target, seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
@pytest.mark.parametrize("target", ["cpu", "rtx4090", "h200", "rtx5090"])
def test_many_walks_of_the_search_space_are_right(target: str, block: int):
    for seed in range(12 + 20 * block, 32 + 20 * block):
        walk_is_right(target, seed)


# ---------------------------------------------------------------- what execution checks besides
def test_a_block_larger_than_its_slot_is_refused():
    program = matmul(8, 8, 32).program()
    plan = replay(program, "k0/split(k,serial,8) k0/stage(A,pack,1)", load_target("cpu"))
    la = plan.launch("k0")
    small = tuple(replace(c, at=0) for c in la.tile.channels)
    nest = (replace(la.tile.nest[0], step=16),)
    (o,) = lower(replace(plan, launches=(replace(la, tile=replace(la.tile, nest=nest, channels=small)),)))
    with pytest.raises(PlanError, match=r"A\[8,16\] does not fit its slot of 256 bytes"):
        execute(plan, random_inputs(program), damage=lambda _: replace(o, plan=plan, launch=la))


def test_a_value_read_before_it_is_computed_is_refused():
    program = matmul(4, 4, 4, epilogue=("bias",)).program()
    plan = naive(program)
    with pytest.raises(PlanError, match="all reads C before it is computed"):
        execute(
            plan,
            random_inputs(program),
            damage=lambda o: replace(o, roles=(replace(o.roles[0], steps=o.roles[0].steps[-2:]),)),
        )


def test_an_element_stored_twice_is_refused():
    program = matmul(4, 4, 4).program()
    plan = naive(program)
    with pytest.raises(PlanError, match=r"C is stored twice at m 0\.\.4,n 0\.\.4"):
        execute(
            plan,
            random_inputs(program),
            damage=lambda o: replace(o, roles=(replace(o.roles[0], steps=o.roles[0].steps * 2),)),
        )


def test_missing_inputs_and_sizes_are_named():
    program = parse_op("matmul:m(2..9)x4x4:f32").program()
    plan = replay(program, "k0/split(m,core,4)", load_target("cpu"))
    with pytest.raises(PlanError, match=r"size of m: got None, allowed 2..9"):
        execute(plan, random_inputs(program, {"m": 3}))
    with pytest.raises(PlanError, match="input B: got nothing"):
        execute(plan, {"A": np.zeros((3, 4))}, {"m": 3})


def test_the_same_seed_interleaves_alike():
    program = matmul(20, 8, 56, "f16", "nk").program()
    text = (
        "k0/split(m,grid,4) k0/split(k,serial,8) k0/stage(A,tma,2) k0/specialize(2,40,232) k0/persist(1) k0/pingpong()"
    )
    plan = replay(program, text, load_target("h200"))

    def outcome(seed: int) -> str:
        def no_turn(o):
            return replace(o, barriers=tuple(b for b in o.barriers if b.name != "turn"))

        try:
            execute(plan, random_inputs(program), seed=seed, damage=no_turn)
        except PlanError as e:
            return str(e)
        return "passed"

    outcomes = [outcome(s) for s in range(10)]
    assert outcomes == [outcome(s) for s in range(10)] and len(set(outcomes)) > 1


def test_illegal_shapes_are_refused_by_the_atom_and_not_by_execution():
    program = matmul(7, 5, 3, "f16", "nk").program()
    with pytest.raises(IllegalMove, match="mma computes 16 of m at once, the tile has 7: a multiple is needed"):
        replay(program, "k0.C/atom(mma,16,8,16)", load_target("rtx4090"))
