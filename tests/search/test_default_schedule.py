"""The default schedule is one that every card runs: NVRTC keeps all its numbers in registers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from emmy.codegen.build import source
from emmy.codegen.nvrtc import compile_cubin
from emmy.errors import PlanError
from emmy.ir.ops import parse_op
from emmy.ir.target import load_target
from emmy.search.schedule_space import ScheduleSpace

# One card of each architecture; `l40s` is the rtx4090's, `h100` the h200's, and their defaults are the same.
CARDS = ("rtx3090", "rtx4090", "rtx5090", "a100", "h200")
# Forms that catalogue shapes take, and what spilled with warps of 64 x 64: epilogues that load, an open M, f32 throughout.
OPS = (
    "matmul:512x1024x1024:bf16:nk,bias,gelu_tanh",
    "matmul:m(1..4096)x3840x15360:f32:residual",
    "matmul:2048x15360x3840:f32",
    "matmul:64x15360x3840:f32",
    "bmm:16x512x512x256:f16:nk",
)


@pytest.mark.slow
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("op", OPS)
def test_a_default_schedule_compiles_without_spills(op: str, card: str) -> None:
    target = load_target(card)
    schedule = ScheduleSpace(parse_op(op), target).default().key
    assert compile_cubin(source(parse_op(op), schedule, target).text, target.arch).refusal is None, schedule


PACKED = "split(n,core,256) split(k,serial,256) stage(B,pack,1)"


@pytest.mark.parametrize(
    ("op", "isa", "moves"),
    [
        # inner products where B lies along k: at fewer rows with few registers, or where elements are widened
        ("matmul:1x4096x3840:f32:nk", "avx512", "split(n,core,256) C/atom(dot,1,6,16,16)"),
        ("geglu:64x4096x384:f32:nk", "avx512", "split(n,core,256) gate/atom(dot,4,6,16,16) up/atom(dot,4,6,16,16)"),
        ("matmul:8x4096x512:bf16:nk", "avx512", "split(n,core,256) C/atom(dot,4,6,16,16)"),
        # else B is packed and A is not, with as many sums as registers hold
        ("matmul:256x4096x512:f32:nk", "avx512", f"{PACKED} C/atom(fma,8,32,1,16)"),
        ("matmul:16x4096x512:f16:nk", "avx512", f"{PACKED} C/atom(fma,8,32,1,16)"),
        ("matmul:64x4096x512:f32:nk", "avx2", f"{PACKED} C/atom(fma,6,16,1,8)"),
        # rows are divided where they are many, or the columns too few for all threads
        ("matmul:512x4096x512:f32", "avx2", f"split(m,core,256) {PACKED} C/atom(fma,6,16,1,8)"),
        ("matmul:64x512x512:f32", "avx2", f"split(m,core,32) {PACKED} C/atom(fma,6,16,1,8)"),
    ],
)
def test_a_cpus_default_packs_what_pays_and_divides_what_it_must(op: str, isa: str, moves: str) -> None:
    here = load_target("cpu-portable")
    target = replace(
        here, capabilities=here.capabilities | {"fma", "avx2", isa}, vector_bits=512 if isa == "avx512" else 256
    )
    assert ScheduleSpace(parse_op(op), target, 2).default().key.replace("k0/", "").replace("k0.", "") == moves


def test_walks_end_only_where_each_contraction_has_its_atom() -> None:
    """k0/split(m,grid,128) ... k0/split(k,cluster,480) k0/split(m,warp,32) k0/split(n,warp,128): no atom fits behind these numbers."""
    space = ScheduleSpace(parse_op("matmul:512x4096x3840:f16:nk,bias,gelu_tanh"), load_target("rtx5090"))
    assert all("atom(" in space.sample(random.Random(seed)).key for seed in (0, 3, 5, 6))


def test_an_op_that_a_gpu_has_no_atom_for_is_refused_before_anything_is_generated() -> None:
    with pytest.raises(PlanError, match="none of 500 plain schedules is legal"):
        ScheduleSpace(parse_op("attention:4x64x64x12:f32"), load_target("rtx4090")).default()


def test_a_node_reached_by_wished_numbers_is_not_what_a_plain_walk_comes_to() -> None:
    """Walks share the nodes of the upper tree: those behind others' numbers are none of them."""
    space = ScheduleSpace(parse_op("matmul:64x96x128:f32"), load_target("cpu-portable"))
    site = next(s for s in space.sites(space.root()) if dict(s.domains).get("step", ()) and len(s.domains[0][1]) > 1)
    value, steps = str(site.move), dict(site.domains)["step"]
    first = {space.child(space.root(), value, {"step": step}).filled for step in steps}
    plain = space.child(space.root(), value)
    assert len(first) == len(steps)
    assert space.child(space.root(), value) is plain
    assert all(space.child(space.root(), value, {"step": step}) is not plain for step in steps)
