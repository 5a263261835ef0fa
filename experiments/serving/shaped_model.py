"""Writes the folder of a model that has a shape and a tokenizer but no weights, to serve with `--load-format emmy_random`.

    python experiments/serving/shaped_model.py gemma-4-12b /tmp/gemma-4-12b

The tokenizer has one word an id ("w17"), so that a prompt of n random words is one of n tokens. Gemma-4-12B's figures are the published
ones of its text model; RoPE's bases and the soft cap of the logits do not touch its speed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")
_GEMMA4: Mapping[str, object] = {
    "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
    "final_logit_softcapping": 30.0, "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    },
}  # fmt: skip


def gemma4(
    hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, head_dim: int, global_head_dim: int, window: int, vocabulary: int,
    *, every: int = 6, dtype: str = "bfloat16", context: int = 262144,
) -> dict[str, object]:  # fmt: skip
    """The config.json of a text model of Gemma 4's kind, whose every n-th layer attends to all that went before."""
    kinds = ["full_attention" if i % every == every - 1 else "sliding_attention" for i in range(layers)]
    return {
        **_GEMMA4, "dtype": dtype, "vocab_size": vocabulary, "vocab_size_per_layer_input": vocabulary, "hidden_size": hidden,
        "intermediate_size": ffn, "num_hidden_layers": layers, "layer_types": kinds, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "global_head_dim": global_head_dim, "sliding_window": window,
        "max_position_embeddings": context,
    }  # fmt: skip


SHAPES = {
    "gemma-4-12b": gemma4(3840, 15360, 48, 16, 8, 256, 512, 1024, 262144),
    "gemma-4-12b-six": gemma4(3840, 15360, 6, 16, 8, 256, 512, 1024, 262144),
    "gemma-4-tiny": gemma4(256, 512, 4, 4, 2, 64, 128, 64, 1024, every=4, context=2048),
}


def write_model(folder: Path, config: Mapping[str, object]) -> Path:
    """The folder, with config.json and, where the configuration has a vocabulary, a tokenizer of it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    if isinstance(n := config.get("vocab_size"), int):
        words = {word: i for i, word in enumerate([*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), n))])}
        (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(words)))
        named = {f"{s[1:4]}_token": s for s in SPECIAL}
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **named})
        )
    return folder


def _tokenizer(words: Mapping[str, int]) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": words[s], "content": s, **flags, "special": True} for s in SPECIAL]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    write_model(args.folder, SHAPES[args.shape])
    return 0


if __name__ == "__main__":
    sys.exit(main())
