"""What every move promises, as tests that a move's test class inherits. Must not know any particular move.

    class TestSplit(MoveContract):
        move = Split

Plans to try a move on are the prefixes of a few schedules (`CASES`) of programs that run in milliseconds. A new move
needs a case that has it, if no site of it comes up in those there are.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import islice, product
from typing import ClassVar

import numpy as np
import pytest

from emmy.codegen.execute import execute
from emmy.codegen.lower import complete
from emmy.errors import IllegalMove
from emmy.ir import interpret
from emmy.ir.expr import Array, parse
from emmy.ir.moves import Move, Site
from emmy.ir.ops import parse_op
from emmy.ir.plan import Plan
from emmy.ir.program import SUM, Program, Reduce, Stage, Value
from emmy.ir.schedule import parse_schedule, replay
from emmy.ir.target import Target, load_target
from emmy.testing.five_plans import attention, norm_linear

_EXECUTED = 16  # plans that one test runs
_SPOILED = 40  # legal moves that are spoiled, in several ways each
_FILLS = 6  # choices of knobs tried at one site


def two_outputs(m: int, n: int, k: int) -> Program:
    """A scaled operand that leaves the program beside what a row sum makes of the product."""
    return Program(
        (("m", m), ("n", n), ("k", k)),
        (Value("A", ("m", "k")), Value("B", ("n", "k")), Value("g", ("k",))),
        (
            Stage("Xs", ("m", "k"), parse("A[m,k] * g[k]")),
            Stage("C", ("m", "n"), parse("Xs[m,k] * B[n,k] * g[k]"), (Reduce("k", SUM),)),
            Stage("t", ("m",), parse("C[m,n]"), (Reduce("n", SUM),)),
            Stage("D", ("m", "n"), parse("C[m,n] + t[m]")),
        ),
        ("Xs", "D"),
    )


# (program, target, schedule whose prefixes are tried)
CASES: tuple[tuple[Program, str, str], ...] = (
    (
        parse_op("matmul:19x25x34:f32").program(),
        "cpu-portable",
        "k0/split(n,core,24) k0/split(k,serial,16) k0/split(m,serial,16) k0/stage(A,pack,1) k0/stage(B,pack,1) "
        "k0.C/atom(fma,4,8,1,4) k0.C/unroll(4)",
    ),
    (
        parse_op("matmul:m(1..21)x18x20:bf16:nk,bias,gelu_tanh").program(),
        "cpu-portable",
        "k0/splitk(C,3) k0/split(m,core,16) k0/split(k,serial,4) k0.C/atom(dot,1,1,4,4) k1/cut(Y) k2/split(m,core,5)",
    ),
    (
        parse_op("matmul:70x33x56:f16:nk").program(),
        "h200",
        "k0/split(m,grid,32) k0/split(n,grid,32) k0/split(k,serial,16) k0/stage(A,tma,3) k0/stage(B,tma,2) "
        "k0/specialize(2,40,232) k0/persist(2) k0/pingpong()",
    ),
    (
        parse_op("bmm:3x70x33x56:f16:nk").program(),
        "h200",
        "k0/split(b,grid,1) k0/split(m,grid,64) k0/split(n,grid,32) k0/split(k,serial,16) k0/split(m,warpgroup,64) "
        "k0/stage(A,tma,3) k0/stage(B,tma,2) k0/specialize(1,0,0) k0/persist(2) k0.C/atom(wgmma,64,32,16)",
    ),
    (
        parse_op("bmm:2xm(1..20)x40x24:f32").program(),
        "cpu-portable",
        "k0/split(b,core,1) k0/split(n,core,16) k0/split(k,serial,16) k0/stage(B,pack,1) k0.C/atom(fma,4,8,1,4)",
    ),
    (
        parse_op("matmul:64x1200x32:f16:nk").program(),  # more tiles than multiprocessors
        "h200",
        "k0/split(m,grid,64) k0/split(n,grid,8) k0/split(k,serial,16) k0/stage(A,tma,2) k0/stage(B,tma,2) "
        "k0/specialize(2,40,232) k0/persist(132) k0/pingpong() k0.C/atom(wgmma,64,8,16)",
    ),
    (
        parse_op("matmul:m(1..130)x40x56:bf16:bias").program(),
        "h200",
        "k0/split(m,grid,64) k0/split(n,grid,32) k0/split(k,serial,32) k0/split(m,warpgroup,64) k0/split(n,warpgroup,16) "
        "k0/stage(A,tma,2) k0/stage(B,tma,2) k0/specialize(2,40,232) k0/persist(2) k0.C/atom(wgmma,64,16,16)",
    ),
    (
        parse_op("matmul:m(1..200)x72x104:f16:nk,bias").program(),
        "h200",
        "k0/split(m,grid,128) k0/split(n,grid,16) k0/split(k,serial,16) k0/split(m,warpgroup,64) k0/stage(A,tma,2) "
        "k0/stage(B,tma,2) k0/specialize(2,40,232) k0/streamk(7) k0.C/atom(wgmma,64,16,16)",
    ),
    (
        parse_op("matmul:128x1080x96:f16:nk").program(),  # 135 tiles for 132 multiprocessors
        "h200",
        "k0/split(m,grid,128) k0/split(n,grid,8) k0/split(k,serial,32) k0/split(m,warpgroup,64) k0/stage(A,tma,2) "
        "k0/stage(B,tma,2) k0/specialize(2,40,232) k0/streamk(132)",
    ),
    (
        parse_op("matmul:40x24x88:f16:nk,bias,residual").program(),
        "h200",
        "k0/split(m,grid,64) k0/split(n,grid,16) k0/split(k,cluster,32) k0/split(k,serial,16) k0/split(m,warpgroup,64) "
        "k0/split(n,warpgroup,16) k0/stage(A,tma,2) k0/stage(B,tma,2) k0/specialize(1,0,0) k0.C/atom(wgmma,64,16,16)",
    ),
    (
        parse_op("matmul:m(1..150)x24x40:f16:nk,bias").program(),
        "h200",
        "k0/split(m,grid,128) k0/split(n,grid,16) k0/split(m,cluster,64) k0/split(k,serial,16) k0/split(m,warpgroup,64) "
        "k0/split(n,warpgroup,16) k0/raster(2) k0/stage(A,tma,2) k0/stage(B,tma,2) k0/specialize(1,0,0) k0/persist(2) "
        "k0.C/atom(wgmma,64,16,16)",
    ),
    (
        parse_op("matmul:40x72x88:bf16:bias").program(),
        "h200",
        "k0/swap(C) k0/split(m,grid,16) k0/split(n,grid,64) k0/split(k,serial,32) k0/split(n,warpgroup,64) "
        "k0/stage(A,tma,2) k0/stage(B,tma,2) k0/specialize(1,0,0) k0/persist(2) k0.C/atom(wgmma,64,16,16)",
    ),
    (
        parse_op("geglu:40x72x88:bf16:nk").program(),
        "h200",
        "k0/swap(gate) k0/split(m,grid,16) k0/split(n,grid,64) k0/split(k,serial,32) k0/split(n,warpgroup,64) "
        "k0/stage(A,tma,2) k0/stage(G,tma,2) k0/stage(U,tma,2) k0/specialize(1,0,0) k0/persist(2) k0.gate/atom(wgmma,64,16,16)",
    ),
    (
        parse_op("geglu:m(1..40)x24x64:f16").program(),
        "rtx5090",
        "k0/split(m,grid,16) k0/split(n,grid,16) k0/split(k,serial,32) k0/split(m,warp,16) k0/split(n,warp,8) "
        "k0/stage(A,tma,2) k0/stage(G,tma,2) k0/stage(U,tma,2) k0.gate/atom(mma,16,8,16) k0.gate/pipeline() k0/store(Y,tma)",
    ),
    (
        parse_op("matmul:m(1..100)x64x36:bf16:bias").program(),  # rows of A that the copy engine does not bring
        "h200",
        "k0/split(m,grid,64) k0/split(n,grid,32) k0/split(k,serial,16) k0/split(m,warpgroup,64) k0/split(n,warpgroup,32) "
        "k0/stage(A,cp_async,3) k0/stage(B,tma,2) k0.C/atom(wgmma_rs,64,32,16)",
    ),
    (
        parse_op("matmul:40x32x192:f16:nk").program(),
        "h200",
        "k0/split(m,grid,64) k0/split(n,grid,16) k0/split(k,serial,96) k0/split(m,warpgroup,64) k0/split(n,warpgroup,16) "
        "k0/stage(A,tma,2,panels) k0/stage(B,tma,2,panels) k0/specialize(1,0,0) k0.C/atom(wgmma_rs,64,16,16)",
    ),
    (
        parse_op("matmul:64x32x48:f16:nk").program(),
        "rtx4090",
        "k0/split(m,grid,32) k0/split(k,serial,16) k0/stage(A,cp_async,3) k0/stage(B,ldg,1) k0/split(m,warp,16) "
        "k0.C/atom(mma,16,8,16) k0/persist(1)",
    ),
    (
        parse_op("matmul:m(1..40)x24x40:f16").program(),
        "rtx4090",
        "k0/split(m,grid,16) k0/split(n,grid,16) k0/split(k,serial,32) k0/split(m,warp,16) k0/split(n,warp,8) "
        "k0/raster(2) k0/stage(A,cp_async,2) k0/stage(B,cp_async,2) k0.C/atom(mma,16,8,16) k0.C/pipeline()",
    ),
    (
        parse_op("matmul:m(1..40)x64x32:bf16:nk,bias,residual").program(),
        "h200",
        "k0/split(m,grid,16) k0/split(n,grid,64) k0/split(k,serial,16) k0/split(n,warp,32) k0/stage(A,tma,2) k0/stage(B,tma,2) "
        "k0.C/atom(mma,16,8,16) k0/store(Y,tma)",
    ),
    (
        parse_op("matmul:m(1..7)x40x200:bf16:nk,bias").program(),
        "h200",
        "k0/split(m,grid,8) k0/split(n,grid,16) k0/split(k,warp,64) k0.C/atom(direct,8,16,32) k0.C/unroll(2)",
    ),
    (norm_linear(21, 19, 18), "rtx4090", "k0/fuse(Xn,Y) k0/commute(Y) k0/operand(Y_acc,g,W) k0/split(m,grid,16)"),
    (
        parse_op("norm_linear:m(1..7)x40x200:f16:nk").program(),
        "h200",
        "k0/fuse(Xn,Y) k0/commute(Y) k0/operand(Y_acc,g,X) k0/split(m,grid,8) k0/split(n,grid,16) k0/split(k,warp,64) "
        "k0.Y_acc/atom(direct,8,16,32) k0.Y_acc/unroll(2)",
    ),
    (
        parse_op("norm_linear:m(1..20)x40x72:bf16:nk").program(),
        "h200",
        "k0/swap(Y) k0/cut(Y) k0/split(m,grid,2) k0/split(k,warp,40) k1/split(m,grid,8) k1/split(n,grid,64) k1/split(k,serial,32) "
        "k1/split(n,warpgroup,64) k1/stage(W,tma,2) k1/stage(Xn,tma,2) k1.Y/atom(wgmma,64,8,16)",
    ),
    (attention(2, 17, 24, 16), "h200", "k0/online(O) k0/pdl() k0/splitk(O,2) k0/split(h,grid,1) k0/split(k,serial,4)"),
    (
        parse_op("matmul:m(1..70)x72x40:f16:nk,residual,sum_squares").program(),
        "h200",
        "k0/splitk(S,2) k0/split(m,grid,32) k0/split(k,serial,16) k0/split(m,warp,16) k0/split(n,warp,24) k1/split(m,grid,64) "
        "k0/stage(A,tma,2) k0/stage(B,tma,2) k0.C/atom(mma,16,8,16) k0/store(Y,tma)",
    ),
    (
        parse_op("matmul:m(1..70)x72x72:f16:nk,residual,sum_squares").program(),
        "h200",
        "k0/splitk(S,2) k0/finish(S) k0/split(m,grid,64) k0/split(k,serial,16) k0/split(m,warpgroup,64) k0/stage(A,tma,2) "
        "k0/stage(B,tma,2) k0/specialize(1,0,0) k0/persist(2) k0.C/atom(wgmma,64,48,16) k0/prefetch(R,3)",
    ),
    (
        parse_op("matmul:m(1..70)x72x72:f16:nk,residual,sum_squares").program(),
        "h200",
        "k0/splitk(S,2) k0/finish(S,begun) k0/split(m,grid,32) k0/split(k,serial,16) k0/split(m,warp,16) k0/stage(A,tma,2) "
        "k0/stage(B,tma,2) k0.C/atom(mma,16,8,16)",
    ),
    (
        parse_op("matmul:m(1..70)x72x72:f16:nk,residual,sum_squares").program(),
        "h200",
        "k0/splitk(S,2) k0/finish(S,added) k0/split(m,grid,64) k0/split(k,serial,16) k0/split(m,warpgroup,64) k0/stage(A,tma,2) "
        "k0/stage(B,tma,2) k0/specialize(1,0,0) k0/persist(2) k0.C/atom(wgmma,64,48,16)",
    ),
    (
        parse_op("matmul:70x64x88:f16:nk,bias,residual").program(),
        "h200",
        "k0/split(m,grid,64) k0/split(n,grid,32) k0/split(k,serial,16) k0/split(m,warpgroup,64) k0/stage(A,tma,2) "
        "k0/stage(B,tma,2) k0/specialize(1,0,0) k0/persist(2) k0.C/atom(wgmma,64,32,16) k0/preload(R,1) k0/preload(bias,1)",
    ),
    (two_outputs(18, 17, 20), "cpu-portable", "k0/cut(D) k0/cut(t) k0/split(m,core,16) k1/split(n,serial,5)"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A plan with the program it must keep computing."""

    program: Program
    target: Target
    moves: tuple[Move, ...]
    plan: Plan
    following: Move | None  # what the schedule does next

    def __str__(self) -> str:
        return f"[{' '.join(map(str, self.moves))}] on {self.target.name}"


@cache
def cases() -> tuple[Case, ...]:
    """Every prefix of the schedules in CASES."""
    out = []
    for program, name, text in CASES:
        target, moves = load_target(name), parse_schedule(text)
        for n in range(len(moves) + 1):
            plan = replay(program, moves[:n], target)
            out.append(Case(program, target, moves[:n], plan, moves[n] if n < len(moves) else None))
    return tuple(out)


class MoveContract:
    """Tests of one class of moves, over all cases. A subclass sets `move`."""

    move: ClassVar[type[Move]]

    def listed(self) -> Iterator[tuple[Case, Site]]:
        """Every site the move lists on every case."""
        for case in cases():
            for site in self.move.sites(case.plan, case.target):
                yield case, site

    def filled(self) -> Iterator[tuple[Case, Move]]:
        """Legal moves at the listed sites, with the ends of the domains and some between, and those of the schedules."""
        for case, site in self.listed():
            for move in _fills(site, case):
                yield case, move
        for case in cases():
            if isinstance(case.following, self.move):
                yield case, case.following

    def test_some_case_has_it(self) -> None:
        assert any(True for _ in self.filled()), f"no case lists or makes the move {self.move.name}"

    def test_its_docstring_shows_before_and_after(self) -> None:
        assert "before:" in (self.move.__doc__ or "") and "after:" in (self.move.__doc__ or "")

    def test_a_listed_site_is_not_refused_and_names_just_its_open_knobs(self) -> None:
        for case, site in self.listed():
            assert site.move.refuse(case.plan, case.target) is None, f"{site.move} {case}"
            assert site.move.knobs == tuple(n for n, _ in site.domains), f"{site.move} {case}"
            assert all(len(set(d)) == len(d) > 0 for _, d in site.domains), f"{site.move} {case}"

    def test_each_value_of_a_domain_is_part_of_a_legal_move(self) -> None:
        for case, site in self.listed():
            legal = [move for move in _all_fills(site) if move.refuse(case.plan, case.target) is None]
            for knob, domain in site.domains:
                missing = set(domain) - {dict(move.arguments)[knob] for move in legal}
                assert not missing, f"{site.move} {case}: {knob} in {missing} is never legal"

    def test_its_text_parses_back_open_and_filled(self) -> None:
        for case, site in self.listed():
            for move in (site.move, *_fills(site, case)):
                assert parse_schedule(str(move)) == (move,)

    def test_replay_refuses_it_while_a_knob_is_open(self) -> None:
        for case, site in self.listed():
            if site.move.knobs:
                with pytest.raises(IllegalMove, match=f"knob {site.move.knobs[0]} is open") as e:
                    replay(case.program, (*case.moves, site.move), case.target)
                assert e.value.index == len(case.moves)

    def test_a_rewrite_leaves_the_old_plan_as_it_was_and_changes_the_new_one(self) -> None:
        for case, move in self.filled():
            before = repr(case.plan)
            after = move.rewrite(case.plan, case.target)
            assert repr(case.plan) == before
            assert after != case.plan, f"{move} {case} changes nothing"
            assert after == move.rewrite(case.plan, case.target)
            assert str(after)

    def test_the_plan_still_computes_the_program(self) -> None:
        assert self.check_meanings(list(self.filled())), "no plan with this move could be executed"

    def test_refusals_are_one_sentence_that_names_or_counts_something(self) -> None:
        found, accepted, refused = _shuffled(list(self.filled())), [], 0
        for case, bad in ((case, bad) for case, move in found[:_SPOILED] for bad in _spoiled(move)):
            reason = bad.refuse(case.plan, case.target)
            if reason is None:
                accepted.append((case, bad))
                continue
            refused += 1
            assert "\n" not in reason and 10 < len(reason) < 250 and not reason.endswith("."), f"{bad} {case}: {reason}"
            assert any(c.isdigit() for c in reason) or any(n in reason for n in _names(bad, case)), f"{bad}: {reason}"
            with pytest.raises(IllegalMove) as e:
                replay(case.program, (*case.moves, bad), case.target)
            assert (e.value.index, e.value.reason) == (len(case.moves), reason)
        assert refused
        self.check_meanings(accepted)  # no site lists them, but they are legal

    def check_meanings(self, found: list[tuple[Case, Move]]) -> int:
        """How many plans after one of the moves were executed, each giving the right answer."""
        plans = ((move.rewrite(case.plan, case.target), case, move) for case, move in _shuffled(found))
        chosen = list(islice((x for x in plans if complete(x[0]) is None), _EXECUTED))
        for plan, case, move in chosen:
            check_meaning(plan, case.program, f"{move} {case}")
        return len(chosen)


def check_meaning(plan: Plan, program: Program, what: str) -> None:
    """Raises AssertionError unless the plan's steps give the program's outputs, at the ends of each symbol's range."""
    for sizes in _sizes(program):
        x = random_inputs(program, sizes)
        want, got = _meaning(program, tuple(sizes.items())), execute(plan, x, sizes, seed=len(what))
        for name in program.outputs:
            np.testing.assert_allclose(
                got[name], want[name], rtol=1e-9, atol=1e-9, err_msg=f"{name} of {what} at {sizes}"
            )


def random_inputs(program: Program, sizes: Mapping[str, int] | None = None, seed: int = 0) -> dict[str, Array]:
    """Standard normal float64 arrays, one an input."""
    rng, size = np.random.default_rng(seed), program.sizes(sizes)
    return {v.name: rng.standard_normal([size[a] for a in v.axes]) for v in program.inputs}


@cache
def _meaning(program: Program, sizes: tuple[tuple[str, int], ...]) -> dict[str, Array]:
    return interpret.run(program, random_inputs(program, dict(sizes)), dict(sizes))


def _sizes(program: Program) -> list[dict[str, int]]:
    syms = program.syms
    picks = [sorted({s.lo, (s.lo + s.hi) // 2, s.hi}) for s in syms]
    return [dict(zip((s.name for s in syms), p, strict=True)) for p in product(*picks)]


def _shuffled(found: list[tuple[Case, Move]]) -> list[tuple[Case, Move]]:
    return random.Random(0).sample(found, len(found))


def _all_fills(site: Site) -> list[Move]:
    names = [n for n, _ in site.domains]
    return [site.move.fill(dict(zip(names, values, strict=True))) for values in product(*(d for _, d in site.domains))]


def _fills(site: Site, case: Case) -> list[Move]:
    legal = [move for move in _all_fills(site) if move.refuse(case.plan, case.target) is None]
    between = random.Random(str(site.move)).sample(legal, min(_FILLS - 2, len(legal)))
    return list(dict.fromkeys((*legal[:1], *legal[-1:], *between)))


def _spoiled(move: Move) -> Iterator[Move]:
    """The move with one thing changed to what is likely wrong."""
    yield replace(move, launch="k9")
    yield replace(move, work="nowhere")
    for f in fields(move)[2:]:
        for value in (0, 3, 7, 10**9) if f.type == "Knob" else ("nothing", "A", "k", "C"):
            yield replace(move, **{f.name: value})  # type: ignore[arg-type]


def _names(move: Move, case: Case) -> list[str]:
    values = [*(s.out for s in case.plan.program.stages), *(v.name for v in case.plan.program.inputs)]
    return [*values, *(a for a, _ in case.plan.program.dims), case.target.name, move.launch, move.name]
