"""`emmy show`: every level of an op and of the worked plans."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

import emmy as package
from emmy.levels import HEADINGS, LEVELS
from emmy.testing.five_plans import FIVE_PLANS
from tests.cli.conftest import OP, Emmy
from tests.workloads.decoders import LLAMA3_8B

SCHEDULE = "k0/split(k,serial,32) k0/stage(B,pack,1) k0.C/atom(fma,4,8,1,4)"


def test_all_shows_every_level_under_a_heading_that_says_what_it_is(emmy: Emmy) -> None:
    said = emmy("show", OP, SCHEDULE, "--gpu", "cpu-portable")
    assert said.code == 0
    at = [said.out.index(f"== {name} == {HEADINGS[name]}") for name in LEVELS]
    assert at == sorted(at)
    for mark in (
        "MFLOP",
        "out C[m,n] sum= A[m,k] * B[k,n]",
        "B.pack <- B",
        "copy B",
        "kernel k0",
        "emmy_plan",
        "fused multiply-adds",
    ):
        assert mark in said.out
    assert SCHEDULE in said.out


def test_one_level_is_its_text_alone_so_that_it_can_be_piped(emmy: Emmy) -> None:
    said = emmy("show", OP, SCHEDULE, "--gpu", "cpu-portable", "--ir", "source")
    assert said.out.startswith("/*") and said.err == ""


def test_the_assembly_shown_is_the_loop_that_multiplies(emmy: Emmy) -> None:
    said = emmy("show", OP, SCHEDULE, "--gpu", "cpu-portable", "--ir", "asm")
    assert "instructions an iteration" in said.out
    assert any(word in said.out for word in ("mulps", "fmla", "fmadd"))


def test_the_default_schedule_is_shown_when_nothing_is_stored_and_the_winner_otherwise(emmy: Emmy, tuned: Path) -> None:
    assert "the default: nothing is stored" in emmy("show", "matmul:32x32x32:f32", "--ir", "op,loop").out
    best = package.api.winner(OP)  # type: ignore[attr-defined]
    said = emmy("show", OP, "--ir", "loop,tile")
    assert "the stored winner" in said.out and best.schedule in said.out


def test_a_schedule_without_moves_is_said_to_be_one(emmy: Emmy) -> None:
    op = "matmul:8x8x8:f32"
    assert "schedule: (no moves: the naive program)" in emmy("show", op, "", "--ir", "tile,loop").out
    assert "schedule  (no moves)" in emmy("explain", op, "--schedule", "").out


@pytest.mark.parametrize("name", [e.name for e in FIVE_PLANS])
def test_a_worked_plan_is_shown_as_far_down_as_its_target_goes(emmy: Emmy, name: str) -> None:
    said = emmy("show", f"plan:{name}")
    plan = next(e for e in FIVE_PLANS if e.name == name)
    assert said.code == 0 and plan.title in said.out and f"schedule: {plan.schedule}" in said.out
    assert ("not available" in said.out) == (plan.target != "cpu")


def test_all_worked_plans_at_once(emmy: Emmy) -> None:
    said = emmy("show", "plan:all", "--ir", "loop,tile", "--json")
    assert [o["subject"] for o in said.of("level")] == [f"plan:{e.name}" for e in FIVE_PLANS for _ in range(2)]
    assert all(o["text"] and not o["missing"] for o in said.objects)


def test_a_gpu_that_is_not_here_shows_its_plan(emmy: Emmy) -> None:
    said = emmy("show", "matmul:256x256x256:f16", "--gpu", "rtx4090")
    assert said.code == 0 and "grid" in said.out and "== asm ==" in said.out and "does not print them" in said.out


def test_a_gpu_s_binary_is_described_where_there_is_no_gpu(emmy: Emmy, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    said = emmy("show", "matmul:128x128x128:f16", "--gpu", "rtx4090", "--ir", "static")
    assert said.code == 0 and "sm_89" in said.out and "registers a thread" in said.out
    assert "sass_" not in said.out and "loop_" not in said.out
    emmy("show", "matmul:128x128x128:f16", "--gpu", "rtx4090", "--ir", "source", "--dump", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["06-source.cu"]


def test_the_roofline_shown_is_that_of_the_cores_in_use(emmy: Emmy) -> None:
    said = emmy("show", OP, "--gpu", "cpu-portable", "--ir", "op")
    assert "1 of its " in said.out and "e+" not in said.out.split("roofline")[1].splitlines()[0]


def test_dump_writes_numbered_files(emmy: Emmy, tmp_path: Path) -> None:
    said = emmy("show", OP, SCHEDULE, "--gpu", "cpu-portable", "--dump", tmp_path / "levels")
    assert said.code == 0 and said.out == ""
    names = sorted(p.name for p in (tmp_path / "levels").iterdir())
    assert names == [
        "01-op.txt", "02-loop.txt", "03-tile.txt", "04-steps.txt", "05-kernel.txt", "06-source.c", "07-static.txt", "08-asm.s",
    ]  # fmt: skip
    emmy("show", "plan:all", "--ir", "tile", "--dump", tmp_path / "plans")
    assert sorted(p.name for p in (tmp_path / "plans").iterdir()) == sorted(e.name for e in FIVE_PLANS)


def test_a_set_lists_its_cases(emmy: Emmy, tmp_path: Path) -> None:
    said = emmy("show", "@gemma4-12b", "--json")
    assert len(said.of("case")) == 258
    assert len(emmy("show", "@projections", "--json").of("case")) == 5
    assert "has no op text" not in emmy("show", "@gemma4-12b").err
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA3_8B))
    said = emmy("show", f"@config:{config}:widths=1..8:context=9", "--json")
    assert {(c["part"], c["op"]) for c in said.of("case") if c["op"] is None} == {("attention", None)}
    assert next(c["count"] for c in said.of("case") if c["part"] == "o_proj") == 32
    assert ", 1 of them (-) of a kind that has no op text yet" in said.err


def test_a_symbolic_op_says_at_which_size_its_figures_are(emmy: Emmy) -> None:
    assert "at m = 64" in emmy("show", "matmul:m(1..64)x96x128:f32", "--ir", "op").out


def test_the_call_explain_is_not_hidden_by_a_module_of_its_name() -> None:
    for name in package.__all__:
        assert importlib.util.find_spec(f"emmy.{name}") is None


def test_the_python_call_returns_the_same_levels() -> None:
    levels = package.show(OP, SCHEDULE, gpu="cpu-portable", levels=("loop", "tile"))
    assert [level.name for level in levels] == ["loop", "tile"]
    assert SCHEDULE in levels[1].text


def test_one_level_that_cannot_be_made_is_a_failure_and_no_text(emmy: Emmy) -> None:
    said = emmy("show", "matmul:256x256x256:f16", "", "--gpu", "rtx4090", "--ir", "source")
    assert said.code == 1 and not said.out and "C has no atom" in said.err


def test_a_schedule_may_be_named_as_an_option(emmy: Emmy) -> None:
    way = ("--gpu", "cpu-portable", "--ir", "tile")
    assert emmy("show", OP, *way, "--schedule", SCHEDULE).out == emmy("show", OP, SCHEDULE, *way).out
    twice = emmy("show", OP, SCHEDULE, *way, "--schedule", SCHEDULE)
    assert twice.code == 2 and "two schedules are named" in twice.err
