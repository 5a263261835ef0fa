"""The plugin in vLLM itself, on this CPU: the same answers as stock's, whoever serves which rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.vllm import engine, models, packs

pytestmark = pytest.mark.vllm
CLASSES = {
    "gemma4": {"qkv_proj", "global qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"},
    "gemma3": {"qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"},
    "llama": {"qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"},
    "qwen3": {"qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"},
}


@pytest.mark.parametrize("model", models.MODELS)
def test_a_model_answers_as_stock_does_with_every_product_by_the_pack(
    model: str, folder: Path, served: Mapping[str, object]
) -> None:
    with engine.started(model, folder) as e:
        stock = engine.answers(e)
    before = engine.calls()
    with engine.started(model, folder, served) as e:
        assert engine.close(engine.answers(e), stock)
    assert len({tokens for tokens, _ in stock}) == len(stock), "prompts must not be answered alike"
    nothing = engine.Calls(0, (0, 0, 0))
    for name in CLASSES[model]:
        n, k = models.SHAPES[name]
        op = f"matmul:m(1..{packs.ROWS})x{n}x{k}:f32:nk"
        now, then = engine.calls()[op], before.get(op, nothing)
        few, stocks, many = (a - b for a, b in zip(now.served, then.served, strict=True))
        assert few > 0, f"{name}: no call of 1..32 rows was Emmy's"
        assert stocks == 0, f"{name}: rows that the pack leaves to stock were Emmy's"
        assert name == "lm_head" or many > 0, f"{name}: no call of 65..256 rows was Emmy's"


def test_rows_that_the_pack_leaves_and_products_that_it_lacks_are_stocks(folder: Path) -> None:
    """The pack has one product; a prompt of 40 rows falls into the range it lost."""
    only = packs.built(folder / "one.emmypack", [models.SHAPES["gate_up_proj"]])
    with engine.started("qwen3", folder) as e:
        stock = engine.answers(e, [engine.PROMPTS[2]])
    with engine.started("qwen3", folder, only) as e:
        assert engine.close(engine.answers(e, [engine.PROMPTS[2]]), stock)
    from emmy_vllm import coverage, kernels

    ours = kernels.every()[-1]
    (table,) = ours.tables.values()
    assert table.counts.values()[0] == 2  # two layers, one step of 40 rows
    text = "\n".join(coverage.lines(ours))
    assert "stock 33..64 rows: no win: 0.9 times" in text
    assert "the pack has no 256x128:f32" in text
    assert "UNMEASURED" in text


def test_weights_keep_their_layout_and_are_the_only_copy(folder: Path, served: Mapping[str, object]) -> None:
    def weights(model: object) -> list[tuple[str, str, tuple[int, ...]]]:
        return [(n, str(p.dtype), tuple(p.shape)) for n, p in model.named_parameters()]  # type: ignore[attr-defined]

    with engine.started("llama", folder, served) as e:
        found = {n: s for n, _, s in e.apply_model(weights)[0]}
    assert found["model.layers.0.mlp.gate_up_proj.weight"] == models.SHAPES["gate_up_proj"]
    assert found["model.layers.0.self_attn.qkv_proj.weight"] == models.SHAPES["qkv_proj"]


def test_predictions_serve_nothing_unless_they_are_asked_for(folder: Path, served: Mapping[str, object]) -> None:
    settings = {k: v for k, v in served["emmy"].items() if k != "unmeasured"}  # type: ignore[attr-defined]
    with engine.started("qwen3", folder, {"emmy": settings}) as e:
        engine.answers(e, tokens=1)
    from emmy_vllm import kernels

    assert not kernels.every()[-1].tables
    assert not kernels.every()[-1].settings.unmeasured


def test_deterministic_a_request_gets_the_same_bits_alone_and_in_a_batch(folder: Path) -> None:
    """The pack's two kernels add in different orders, so that without the lane bits depend on the number of rows."""
    mixed = packs.built(folder / "mixed.emmypack", models.SHAPES.values(), packs.IN_ANOTHER_ORDER)
    with engine.started("llama", folder, mixed) as e:
        assert engine.answers(e) != engine.alone(e)
    steady = {"emmy": {**mixed["emmy"], "deterministic": True}}  # type: ignore[dict-item]
    with engine.started("llama", folder, steady) as e:
        batch = engine.answers(e)
        assert batch == engine.alone(e)
        assert batch[1:3] == engine.answers(e, engine.PROMPTS[1:3])
    from emmy_vllm import kernels

    ours = kernels.every()[-1]
    assert all(t.alike == ((1, 8),) for t in ours.tables.values())
    assert all(t.counts.values()[0] == 0 for t in ours.tables.values())


def test_deterministic_is_refused_where_stock_would_serve_a_product(folder: Path) -> None:
    from emmy.errors import PackError

    some = packs.built(folder / "some.emmypack", [models.SHAPES["gate_up_proj"], models.SHAPES["lm_head"]])
    asked = {"emmy": {**some["emmy"], "deterministic": True}}  # type: ignore[dict-item]
    with (
        pytest.raises(PackError, match=r"the deterministic lane has no kernels for .*256x128"),
        engine.started("llama", folder, asked),
    ):
        pass
