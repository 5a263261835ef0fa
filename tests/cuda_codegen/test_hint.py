"""What the last-level cache is told of a fetch: in the text, and offered only where it may help."""

from __future__ import annotations

import re

import pytest

from emmy.codegen.nvrtc import compile_cubin
from emmy.ir.moves.hint import Hint
from emmy.ir.ops import parse_op
from emmy.ir.schedule import replay
from emmy.ir.target import load_target
from tests.cuda_codegen.emulated import Run, unit

OP = "matmul:40x128x192:f16:nk"
HEAD = "k0/split(m,grid,64) k0/split(n,grid,64)"
BODY = "k0/split(k,serial,64) k0/split(m,warpgroup,64) k0/stage(A,tma,2) k0/stage(B,tma,2)"
ATOM = "k0.C/atom(wgmma,64,{},16)"
CASES = {
    "one weight": (f"{HEAD} {BODY} k0/hint(B,evict_first) {ATOM.format(64)}", {"B": "evict_first"}),
    "both operands, early, a producer": (
        f"{HEAD} {BODY} k0/hint(A,evict_last) k0/hint(B,evict_first) k0/specialize(1,0,0) {ATOM.format(64)} k0/pdl()",
        {"A": "evict_last", "B": "evict_first"},
    ),
    "activations of two blocks": (
        f"{HEAD} k0/split(n,cluster,32) {BODY} k0/hint(A,evict_last) k0/hint(B,evict_first) {ATOM.format(32)}",
        {"A": "evict_last", "B": "evict_first"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_fetch_of_a_value_carries_its_policy_and_nothing_else_changes(name: str):
    schedule, policies = CASES[name]
    error, _ = Run(OP, "h200", schedule).error_norm()
    plain = " ".join(w for w in schedule.split() if "/hint(" not in w)
    text, without = (unit(OP, s, "h200").text.rsplit("#endif")[-1] for s in (schedule, plain))
    for value in "AB":
        told = re.findall(rf"emmy_tma_load_2d\w*?(_hint)?\([^;]*&{value}_map[^;]*?(?:, {value}_policy)?\);", text)
        assert told and set(told) == ({"_hint"} if value in policies else {""})
    for value, policy in policies.items():
        assert f"const u64 {value}_policy = emmy_policy_{policy}();" in text
    unhinted = re.sub(r"^ +const u64 \w+_policy = .*\n", "", text, flags=re.MULTILINE)
    assert re.sub(r", [AB]_policy\)", ")", unhinted.replace("_hint(", "(")) == without
    assert error <= 1


def test_a_hinted_tile_compiles_without_spills():
    cubin = compile_cubin(unit(OP, CASES["activations of two blocks"][0], "h200").text, load_target("h200").arch)
    assert cubin.spill_bytes == 0 and not cubin.warnings


@pytest.mark.parametrize(("op", "offered"), [(OP, ["k0/hint(B,evict_first)"]), ("matmul:100x128x192:f16:nk", [])])
def test_it_is_offered_for_weights_that_no_two_tiles_fetch(op: str, offered: list[str]):
    plan = replay(parse_op(op).program(), f"{HEAD} {BODY}", load_target("h200"))
    assert [str(s.move) for s in Hint.sites(plan, load_target("h200"))] == offered
