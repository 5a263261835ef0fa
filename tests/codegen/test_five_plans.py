"""Five plans that the IR must carry: replayed, printed, executed against numpy in many interleavings, and parsed back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from emmy.codegen.execute import execute
from emmy.codegen.lower import complete, lower
from emmy.ir.expr import Array
from emmy.ir.schedule import format_schedule, parse_schedule, replay
from emmy.ir.target import load_target
from emmy.testing.five_plans import FIVE_PLANS, Example
from emmy.testing.move_contract import random_inputs

PLANS = {e.name: e for e in FIVE_PLANS}
each_plan = pytest.mark.parametrize("example", FIVE_PLANS, ids=[e.name for e in FIVE_PLANS])


def _attention(x: dict[str, Array]) -> Array:
    s = np.einsum("hqd,hkd->hqk", x["Q"], x["K"]) * x["Q"].shape[2] ** -0.5
    past = s.shape[2] - s.shape[1]
    s = np.where(np.arange(s.shape[2])[None] <= np.arange(s.shape[1])[:, None] + past, s, -np.inf)
    p = np.exp(s - s.max(2, keepdims=True))
    return np.einsum("hqk,hke->hqe", p / p.sum(2, keepdims=True), x["V"])


def _norm_linear(x: dict[str, Array]) -> Array:
    r = np.sqrt((x["X"] ** 2).mean(1, keepdims=True) + 1e-6)
    return x["X"] / r * x["g"] @ x["W"].T


# Written with numpy alone: neither the IR's expressions nor its folds take part.
REFERENCES: dict[str, Callable[[dict[str, Array]], Array]] = {
    "pingpong": lambda x: x["A"] @ x["B"].T,
    "attention": _attention,
    "norm_linear": _norm_linear,
    "splitk": lambda x: x["A"] @ x["B"].T,
    "cpu_packed": lambda x: x["A"] @ x["B"],
}


@each_plan
def test_it_replays_to_a_complete_plan_and_its_text_parses_back(example: Example):
    target = load_target(example.target)
    plan = replay(example.program, example.schedule, target)
    assert complete(plan) is None
    text = format_schedule(parse_schedule(example.schedule))
    assert text == example.schedule and replay(example.program, text, target) == plan


@each_plan
def test_it_prints_as_plan_and_as_steps(example: Example, golden):
    plan = replay(example.program, example.schedule, load_target(example.target))
    shown = [f"# {example.title}", f"# {example.schedule}", str(example.program), str(plan), *map(str, lower(plan))]
    golden(f"plan_{example.name}.txt", "\n\n".join(shown))


@each_plan
@pytest.mark.parametrize("seed", range(5))
def test_it_computes_what_numpy_computes_however_its_roles_interleave(example: Example, seed: int):
    plan = replay(example.program, example.schedule, load_target(example.target))
    x = random_inputs(example.program, seed=seed)
    (got,) = execute(plan, x, seed=seed).values()
    np.testing.assert_allclose(got, REFERENCES[example.name](x), rtol=1e-10, atol=1e-10)


def test_they_show_what_they_are_for():
    shown = {e.name: str(replay(e.program, e.schedule, load_target(e.target))) for e in FIVE_PLANS}
    for name, feature in {
        "pingpong": ("takes tiles 1 mod 2", "tma depth 3", "atom   wgmma", "pingpong(2)"),
        "attention": (
            "online_softmax=",
            "workspace O over k: 2 parts of online_softmax state",
            "role producer",
            "on o",
        ),
        "norm_linear": ("Y_acc[m,n] * r[m]", "W_g[n,k] = g[k] * W[n,k]", "cp_async depth 3", "warp   m:2"),
        "splitk": ("finish(combine sum over parts)", "after k0", "k:2 m:4"),
        "cpu_packed": ("core n:2", "B.pack", "A.pack", "vector 4"),
    }.items():
        assert all(f in shown[name] for f in feature), name
