"""LoRA over layers that run the pack's kernels: the base product is Emmy's, the adapter's vLLM's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import engine

pytestmark = pytest.mark.vllm


def adapter(folder: Path) -> Path:
    """A rank-8 adapter of two projections, large enough to change tokens."""
    import torch
    from safetensors.torch import save_file

    path = folder / "adapter"
    path.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for layer in range(2):
        for part, n, k in (("self_attn.q_proj", 128, 128), ("mlp.down_proj", 128, 256)):
            name = f"base_model.model.model.layers.{layer}.{part}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(8, k, generator=generator)
            tensors[f"{name}.lora_B.weight"] = torch.randn(n, 8, generator=generator)
    save_file(tensors, path / "adapter_model.safetensors")
    said = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "down_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (path / "adapter_config.json").write_text(json.dumps(said))
    return path


def test_an_adapter_answers_as_it_does_over_stock(folder: Path, served: Mapping[str, Any]) -> None:
    from vllm.lora.request import LoRARequest

    asked = LoRARequest("a", 1, str(adapter(folder)))
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    with engine.started("llama", folder, **options) as e:
        stock, plain = engine.answers(e, lora_request=asked), engine.answers(e)
    assert stock != plain
    before = engine.calls()
    with engine.started("llama", folder, served, **options) as e:
        assert engine.close(engine.answers(e, lora_request=asked), stock)
        assert engine.close(engine.answers(e), plain)
    assert sum(engine.calls_since(before).values()) > 0
