"""What a Hugging Face config.json says of a dense decoder, checked: one type for five families. Knows no op and no width."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from emmy.errors import UsageError
from emmy.ir.dtype import DType

Scalar = str | int | float | bool | None
Config = Mapping[str, object]
Kind = Literal["local", "global"]  # of a layer: attends to a window, or to everything
_DTYPES: dict[str, DType] = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
_LAYER_TYPES: dict[str, Kind] = {"sliding_attention": "local", "full_attention": "global"}


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers of one kind. `k_is_v`: values are the keys, so that no projection of them exists. `window`: None = everything."""

    kind: Kind
    count: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    k_is_v: bool = False

    @property
    def shapes(self) -> tuple[int, int, int, bool]:
        """What decides the sizes of its projections."""
        return self.heads, self.kv_heads, self.head_dim, self.k_is_v


@dataclass(frozen=True, slots=True)
class Decoder:
    """A dense decoder's sizes. `norms`: RMSNorms over the hidden size in one layer; `qk_norm`: of queries and keys by head."""

    family: str
    hidden: int
    intermediate: int
    vocab: int
    layers: tuple[Layers, ...]
    gate: Literal["gelu_tanh", "silu"]
    norms: int
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    dtype: DType | None  # None: the config does not say

    @property
    def n_layers(self) -> int:
        return sum(g.count for g in self.layers)


@dataclass(frozen=True, slots=True)
class _Family:
    """What a model_type means. `defaults`: fields that public checkpoints leave out, as their model class fills them in."""

    norms: int
    qk_norm: bool
    activation: str  # the field that names it
    defaults: Mapping[str, Scalar] = field(default_factory=lambda: MappingProxyType({}))


# Facts of the model classes in Hugging Face transformers.
_GEMMA3 = _Family(
    4, True, "hidden_activation",
    {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "hidden_activation": "gelu_pytorch_tanh"},
)  # fmt: skip
_GEMMA4 = _Family(4, True, "hidden_activation")
FAMILIES: dict[str, _Family] = {
    "gemma3_text": _GEMMA3,
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "llama": _Family(2, False, "hidden_act"),
    "mistral": _Family(2, False, "hidden_act"),
    "qwen3": _Family(2, True, "hidden_act"),
}
_GATES: dict[str, Literal["gelu_tanh", "silu"]] = {"gelu_pytorch_tanh": "gelu_tanh", "silu": "silu", "swish": "silu"}
# A field that is set makes the model something else than a dense decoder of plain weights.
_REFUSED = {
    "num_experts": "experts", "num_local_experts": "experts", "enable_moe_block": "experts",
    "hidden_size_per_layer_input": "inputs for each layer", "num_kv_shared_layers": "layers that share keys and values",
    "quantization_config": "quantized weights",
}  # fmt: skip


class _Reader:
    """Fields of a config by name, each error saying where."""

    def __init__(self, config: Config, where: str, defaults: Mapping[str, Scalar]) -> None:
        self.config, self.where, self._defaults = config, where, defaults

    def fail(self, what: str) -> UsageError:
        return UsageError(f"{self.where}: {what}")

    def get(self, name: str) -> object:
        """The field; its default where it is absent or null, None without one."""
        found = self.config.get(name)
        return self._defaults.get(name) if found is None else found

    def size(self, name: str, otherwise: int | None = None) -> int:
        found = self.get(name)
        if found is None and otherwise is not None:
            return otherwise
        if found is None:
            raise self.fail(
                f"the field {name} is missing; a whole number of at least 1 is needed. Add it to the config"
            )
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise self.fail(f"{name} is {found!r}; a whole number of at least 1 is needed")
        return found

    def flag(self, name: str) -> bool:
        found = self.get(name)
        if found not in (None, False, True):
            raise self.fail(f"{name} is {found!r}; true or false is needed")
        return bool(found)


def read_decoder(config: Config | Path | str) -> Decoder:
    """The decoder that a config describes: a mapping, a config.json, or the folder of one.

    Raises UsageError for an unknown architecture, and for fields that are missing, mistyped or contradict each other.
    """
    raw, where = _load(config)
    text = raw.get("text_config")
    if text is not None and not isinstance(text, Mapping):
        raise UsageError(f"{where}: text_config is {str(text)[:60]!r}; an object with a model's fields is needed")
    if text is not None:  # of a model that sees, too: its language model
        raw, where = {**{k: raw[k] for k in ("dtype", "torch_dtype") if k in raw}, **text}, f"{where}, text_config"
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UsageError(
            f"{where}: model_type is {kind!r}; dense decoders of {', '.join(FAMILIES)} are known. "
            "A model with the same layers as one of them can be read under that name."
        )
    family = FAMILIES[kind]
    r = _Reader(raw, where, family.defaults)
    for name, what in _REFUSED.items():
        if raw.get(name):
            raise r.fail(
                f"{name} is {str(raw[name])[:60]}: {what}; only dense decoders with plain weights have shapes here"
            )
    act = r.get(family.activation)
    if act not in _GATES:
        raise r.fail(f"{family.activation} is {act!r}; {', '.join(_GATES)} are known")
    return Decoder(
        kind,
        r.size("hidden_size"),
        r.size("intermediate_size"),
        r.size("vocab_size"),
        _layers(r, kind),
        _GATES[str(act)],
        family.norms,
        family.qk_norm,
        r.flag("attention_bias"),
        r.flag("attention_bias"),
        r.flag("mlp_bias"),
        _dtype(r),
    )


def _load(config: Config | Path | str) -> tuple[Config, str]:
    if isinstance(config, Mapping):
        return config, "the config"
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UsageError(f"{path}: {e.strerror}. Name a model's config.json, or the folder that holds one") from None
    except (ValueError, RecursionError) as e:
        raise UsageError(f"{path} is no JSON: {e}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path} holds a {type(found).__name__}; an object with a model's fields is needed")
    return found, str(path)


def _dtype(r: _Reader) -> DType | None:
    said = [r.config[name] for name in ("dtype", "torch_dtype") if r.config.get(name) is not None]
    if not said:
        return None
    if any(d != said[0] for d in said) or str(said[0]) not in _DTYPES:
        raise r.fail(f"dtype is {' and '.join(map(str, said))}; one of {', '.join(_DTYPES)} is needed")
    return _DTYPES[str(said[0])]


def _layers(r: _Reader, kind: str) -> tuple[Layers, ...]:
    """The kinds of layers, local ones first."""
    heads, hidden = r.size("num_attention_heads"), r.size("hidden_size")
    if r.get("head_dim") is None and hidden % heads:
        raise r.fail(f"head_dim is missing, and hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    head_dim = r.size("head_dim", hidden // heads)
    # Llama's class takes as many as there are heads; the others' have numbers of their own.
    kv_heads = r.size("num_key_value_heads", heads if kind == "llama" else None)
    wide = kind.startswith("gemma4")
    out = []
    for layer, every in groupby(sorted(_kinds(r, kind), reverse=True)):
        count = len(tuple(every))
        own = layer == "global" and wide
        kv, dim = (_global(r, kv_heads)) if own else (kv_heads, head_dim)
        if heads % kv:
            raise r.fail(f"{heads} query heads are not a multiple of {kv} key and value heads in {layer} layers")
        window = r.size("sliding_window") if layer == "local" else None
        out.append(Layers(layer, count, heads, kv, dim, window, own and r.flag("attention_k_eq_v")))
    return tuple(out)


def _global(r: _Reader, kv_heads: int) -> tuple[int, int]:
    """Key and value heads, and their size, of a Gemma 4 layer that attends to everything."""
    if r.get("global_head_dim") is None:
        raise r.fail(
            "the field global_head_dim is missing, which Gemma 4's full_attention layers need (transformers from 5.15 on "
            "writes per_layer_config instead). Add global_head_dim and num_global_key_value_heads"
        )
    return r.size("num_global_key_value_heads", kv_heads), r.size("global_head_dim")


def _kinds(r: _Reader, kind: str) -> list[Kind]:
    """The kind of each layer."""
    n = r.size("num_hidden_layers")
    listed = r.get("layer_types")
    every = r.get("sliding_window_pattern")
    if listed is not None:
        if not isinstance(listed, list | tuple) or any(t not in _LAYER_TYPES for t in listed):
            raise r.fail(f"layer_types is {str(listed)[:80]}; a list of {' and '.join(_LAYER_TYPES)} is needed")
        if len(listed) != n:
            raise r.fail(f"layer_types lists {len(listed)} layers, num_hidden_layers is {n}: make them agree")
        return [_LAYER_TYPES[t] for t in listed]
    if kind.startswith("gemma"):
        period = r.size("sliding_window_pattern") if every is not None else 6  # five local layers, then a global one
        return ["global" if (i + 1) % period == 0 else "local" for i in range(n)]
    local = r.get("sliding_window") is not None and kind == "mistral"
    return ["local" if local else "global"] * n
