"""Tiny models of four families, as their config.json says them. Weights are seeded (engine.py); nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

_COMMON: Mapping[str, object] = {
    "dtype": "float32", "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
_GEMMA: Mapping[str, object] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
MODELS: Mapping[str, Mapping[str, object]] = {
    "gemma4": {
        **_COMMON, **_GEMMA, "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "global_head_dim": 64,
        "num_global_key_value_heads": 1, "attention_k_eq_v": True, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 1024, "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 30.0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        },
    },
    "gemma3": {
        **_COMMON, **_GEMMA, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "query_pre_attn_scalar": 32,
        "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
    },
    "llama": {
        **_COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "qwen3": {
        **_COMMON, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "rope_theta": 10000.0,
        "attention_bias": False,
    },
}  # fmt: skip
# (n, k) of each weight of those models, per layer class.
SHAPES = {
    "qkv_proj": (256, 128), "global qkv_proj": (384, 128), "o_proj": (128, 128), "global o_proj": (128, 256), "gate_up_proj": (512, 128),
    "down_proj": (128, 256), "lm_head": (1024, 128),
}  # fmt: skip


def written(name: str, folder: Path) -> Path:
    """The folder of a model."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(MODELS[name]))
    return path
