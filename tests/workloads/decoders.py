"""Small dictionaries with the fields of public models' config.json: shapes as facts, written for these tests."""

from __future__ import annotations

from emmy.workloads.gemma4_12b import CONFIG

LLAMA3_8B: dict[str, object] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "hidden_act": "silu", "torch_dtype": "bfloat16", "attention_bias": False,
}  # fmt: skip
MISTRAL_7B: dict[str, object] = {
    "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "hidden_act": "silu", "sliding_window": 4096,
    "head_dim": None, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_4B: dict[str, object] = {
    "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "hidden_act": "silu", "torch_dtype": "bfloat16",
    "sliding_window": None, "attention_bias": False,
}  # fmt: skip
GEMMA3_4B: dict[str, object] = {  # what its published file leaves out is left out here
    "model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152},
    "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
                    "sliding_window": 1024},
}  # fmt: skip
GEMMA4_12B: dict[str, object] = {
    **CONFIG,
    "dtype": "bfloat16",
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
}
