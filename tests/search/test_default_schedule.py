"""The default schedule is one that every card runs: NVRTC keeps all its numbers in registers."""

from __future__ import annotations

import pytest

from emmy.codegen.build import source
from emmy.codegen.nvrtc import compile_cubin
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
