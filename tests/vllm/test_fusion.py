"""Fused kernels in vLLM's compiled graphs, on this CPU: the same answers, in the ranges that the pack serves, from cached graphs too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.tiers import in_every_run
from tests.vllm import engine, models, packs
from tests.vllm.test_graphs import COMPILED, compiles_as_on_a_gpu

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures(compiles_as_on_a_gpu.__name__)]
R = f"m(1..{packs.ROWS})"
GEGLU, SWIGLU = f"geglu:{R}x256x128:f32:nk", f"swiglu:{R}x256x128:f32:nk"
SUM_NORM, NORMS = f"rms_norm:{R}x128:f32:residual", f"norm_add_norm:{R}x128:f32"
OPS = (GEGLU, SWIGLU, f"rms_norm:{R}x128:f32", SUM_NORM, NORMS, f"{NORMS}:scale")
# Gemma-3's norms multiply with 1 + w, which the compiler makes on the way.
CHAINS = {
    "gemma4": {GEGLU, NORMS, f"{NORMS}:scale"}, "gemma3": {GEGLU}, "llama": {SWIGLU, SUM_NORM}, "qwen3": {SWIGLU, SUM_NORM},
}  # fmt: skip
Config = Mapping[str, object]


@pytest.fixture(scope="session")
def fused(folder: Path) -> Config:
    """additional_config with a pack of every product and every chain; both leave rows 33..64 to stock."""
    return packs.built(folder / "fused.emmypack", models.SHAPES.values(), fused=OPS)


def with_parts(config: Config, *parts: str) -> Config:
    return {"emmy": {**config["emmy"], "parts": list(parts)}}  # type: ignore[dict-item]


def answered(
    model: str, folder: Path, config: Config
) -> tuple[list[engine.Answer], dict[str, tuple[int, ...]], list[int]]:
    """Of a compiled engine: what it answers, what its tables counted, where its ranges end."""
    before = counted()
    with engine.started(model, folder, config, **COMPILED) as e:
        found = engine.answers(e)
        ends = e.llm_engine.vllm_config.compilation_config.compile_ranges_endpoints
    calls = {op: tuple(x - y for x, y in zip(c, before.get(op, (0,) * 4), strict=True)) for op, c in counted().items()}
    return found, {op: c for op, c in calls.items() if any(c)}, list(ends)


def counted() -> dict[str, tuple[int, ...]]:
    """Calls left to stock, then those of each range, of the chains' tables of all packs."""
    from emmy_vllm import kernels

    found: dict[str, tuple[int, ...]] = {}
    for op, table in ((op, t) for k in kernels.every() for op, t in k.tables.items() if op in OPS):
        found[op] = tuple(map(sum, zip(found.get(op, (0,) * 4), table.counts.values(), strict=True)))
    return found


@pytest.mark.parametrize(
    "model", [pytest.param(m, marks=in_every_run(m in ("gemma4", "qwen3"))) for m in models.MODELS]
)
def test_a_compiled_model_answers_as_stock_does_with_its_chains_by_the_pack(
    model: str, folder: Path, fused: Config
) -> None:
    with engine.started(model, folder) as e:
        stock = engine.answers(e)
    found, calls, ends = answered(model, folder, fused)
    assert engine.close(found, stock)
    assert ends == [32, 64, packs.ROWS]
    assert set(calls) == CHAINS[model]
    for op, (left, few, lost, many) in calls.items():
        assert few > 0 and many > 0, f"{op}: not in every range that the pack serves"
        assert lost == left == 0, f"{op}: stock inside a fused call, which is slower than the compiler's"
    from emmy_vllm import kernels

    said = kernels.every()[-1].graphs
    kind = "swiglu" if SWIGLU in CHAINS[model] else "geglu"
    for rows, what in (
        ("1..32", "fused"),
        ("33..64", "left to the compiler: the pack serves 1..32, 65..256"),
        ("65..256", "fused"),
    ):
        assert any(line.startswith(f"{kind} 256x128 f32, rows {rows}: {what}") for line in said), said


@pytest.mark.slow
def test_a_cached_graph_never_serves_other_settings(folder: Path, fused: Config) -> None:
    """On, off, with another pack, and on again, with one cache of compiled graphs."""
    on, calls, _ = answered("llama", folder, fused)
    assert set(calls) == CHAINS["llama"]
    off, calls, ends = answered("llama", folder, with_parts(fused, "linear", "lm_head"))
    assert not calls and ends == [packs.ROWS] and engine.close(off, on)
    other = packs.built(folder / "pairs.emmypack", models.SHAPES.values(), fused=[SWIGLU])
    pairs, calls, _ = answered("llama", folder, other)
    assert set(calls) == {SWIGLU} and engine.close(pairs, on)
    from emmy_vllm import kernels

    compiled = [sum(k.graphs.values()) for k in kernels.every()]
    again, calls, _ = answered("llama", folder, fused)
    assert [sum(k.graphs.values()) for k in kernels.every()] == compiled, "the graphs were to come from the cache"
    assert again == on and set(calls) == CHAINS["llama"]


def test_a_shape_that_the_pack_lacks_and_the_deterministic_lane_are_left_alone(folder: Path, fused: Config) -> None:
    other = packs.built(folder / "odd.emmypack", models.SHAPES.values(), fused=[f"swiglu:{R}x128x128:f32:nk"])
    _, calls, _ = answered("qwen3", folder, other)
    assert not calls
    steady = packs.built(
        folder / "steady.emmypack", models.SHAPES.values(), {(1, packs.ROWS): "k0/split(m,core,8)"}, OPS
    )
    _, calls, ends = answered("qwen3", folder, {"emmy": {**steady["emmy"], "deterministic": True}})  # type: ignore[dict-item]
    assert not calls and ends == [packs.ROWS]
