"""The kernel shapes of Gemma-4-12B as cases to tune: 258, of which 254 are on a published chart. Knows no device.

The shapes and the published times come from `gemma4_12b.json`, which says what they are and what they are not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Literal, get_args

from emmy.errors import DataError
from emmy.ir.dtype import DType
from emmy.workloads.decoder_cases import DecoderCase, from_config

Kind = Literal[
    "matmul",
    "norm_linear",
    "linear_norm",
    "mlp_geglu",
    "attention",
    "rms_norm",
    "reduce",
    "pointwise",
    "rope",
    "embedding",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
_DTYPES: dict[str, Literal["f16", "f32"]] = {"fp16": "f16", "fp32": "f32"}
# What cut forms and reductions are; `reduce` is a plain sum.
_CUTS = {"cut_cone_stat": "rstd", "cut_cone_scale": "norm_scale", "cut_combine": "geglu_mul", "reduce": "row_sum"}
# The chart names only the hint, 512, of a symbolic M; 4096 is the largest M that a fixed case has.
SYMBOLIC_M = "m(1..4096)"


@dataclass(frozen=True, slots=True)
class Case:
    """One named shape. `dims` are the formula's sizes, M standing at its hint when it is symbolic."""

    id: str
    kind: Kind
    dims: Mapping[str, int] = field(hash=False)
    dtype: Literal["f16", "f32"]
    weight_layout: Literal["kn", "nk"] | None  # None: the kind has no weight
    dynamic_m: bool
    tier: str
    form: Literal["fused", "cut"]
    flags: tuple[str, ...]
    charted: bool
    published: Mapping[str, Mapping[str, float]] = field(hash=False)  # card -> lane -> microseconds, by its publisher

    def op_text(self) -> str:
        """The op this case is. Fused and cut forms are schedules of one op."""
        words: tuple[str, ...] = ()
        match self.kind:
            case "matmul":
                op, n, k = "matmul", "N", "K"
            case "attention":
                return self._attention()
            case "mlp_geglu":
                op, n, k = "geglu", "N_inter", "K_hidden"
            case "norm_linear":  # one kind has two formulas, told apart by its names
                op, n, k = "geglu_linear" if self.id.startswith("mlp_down_fused") else "norm_linear", "N", "K"
            case "linear_norm":
                op, n, k, words = "matmul", "N", "K", (*self.flags, "sum_squares")
            case "rms_norm" | "reduce" | "pointwise":
                return self._row_op()
            case "rope":
                return f"rope:{self.dims['heads']}x{self.dims['seq']}x{self.dims['head_dim']}:{self.dtype}"
            case "embedding":
                return f"embedding:{self.dims['tokens']}x{self.dims['hidden']}x{self.dims['vocab']}:{self.dtype}"
        m = SYMBOLIC_M if self.dynamic_m else str(self.dims["M"])
        options = ",".join((*(("nk",) if self.weight_layout == "nk" else ()), *words))
        return f"{op}:{m}x{self.dims[n]}x{self.dims[k]}:{self.dtype}" + (f":{options}" if options else "")

    def _attention(self) -> str:
        d, seq = self.dims, SYMBOLIC_M if self.dynamic_m else str(self.dims["seq"])
        words = ["causal"] * bool(d["causal"]) + [f"kv{d['kv_heads']}"] * (d["kv_heads"] != d["q_heads"])
        text = f"attention:{d['q_heads']}x{seq}x{seq}x{d['head_dim']}:{self.dtype}"
        return f"{text}:{','.join(words)}" if words else text

    def _row_op(self) -> str:
        """The op of rows. Norms of heads have a row for each head of a token.

        What an elementwise case without a name computes is not said: `scale` reads, multiplies and writes once, as all of them do.
        """
        op = "rms_norm" if self.kind == "rms_norm" else _CUTS.get(self.id.partition(".")[0], "scale")
        heads = self.dims.get("heads", 1)
        m = f"m(1..{4096 * heads})" if self.dynamic_m else str(self.dims["M"] * heads)
        return f"{op}:{m}x{self.dims['N' if self.kind == 'pointwise' else 'K']}:{self.dtype}"


N_LAYERS = 48
# What vLLM runs of it: the text model's sizes, as its config.json says them.
CONFIG: Mapping[str, object] = {
    "model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": N_LAYERS,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "sliding_window": 1024,
    "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
SERVER_ROWS = (1, 8192)  # tokens of a step
# (name, launches a step, shape, options) of its attention: pages as vLLM makes them of layers with different heads, of its two
# caches in one array as of 0.25 and 0.26. A windowed layer that decodes is given a window and what a page more rounds it to.
SERVER_ATTENTION = (
    ("decode", 40, "m(1..64)x16x1x1152x256", "kv8,window1024,page16"),
    ("decode.global", 8, "m(1..64)x16x1x16384x512", "kv1,page64,pool4096,len4096"),
    ("prompt", 40, "1x16xm(2..8192)x16384x256", "kv8,window1024,page16"),
    ("prompt.global", 8, "1x16xm(2..8192)x16384x512", "kv1,page64"),
)


@cache
def server_cases() -> tuple[DecoderCase, ...]:
    """The products of a server's step, weights merged and (N, K), any number of rows, its attention, in f16 and bf16, and the norms
    between its blocks.

    Of global layers the merged weight is there twice: with keys that serve as values, and with them stored twice, as vLLM does.
    Norms are as torch.compile fuses them: the one that closes a block, the sum, and the one that opens the next; behind an MLP
    with the layer's scale.
    """
    out = []
    dtypes: tuple[DType, ...] = ("f16", "bf16")
    for dtype in dtypes:
        own = from_config(CONFIG, [SERVER_ROWS], dtype=dtype)
        out += [replace(c, id=f"{c.id}.{dtype}") for c in own if c.is_served]
        out += [_attention(*a, dtype) for a in SERVER_ATTENTION]
        out += [_between_blocks(dtype, place) for place in ("attention", "mlp")]
    return tuple(out)


def _attention(name: str, count: int, shape: str, words: str, dtype: str) -> DecoderCase:
    text = f"served_attention:{shape}:{dtype}:{words},scale1.0,pcjgd"
    return DecoderCase(f"attention.{name}.{dtype}", f"attention.{name}", "served_attention", count, text)


def _between_blocks(dtype: DType, behind: Literal["attention", "mlp"]) -> DecoderCase:
    rows = f"{SERVER_ROWS[0]}..{SERVER_ROWS[1]}"
    text = f"norm_add_norm:m({rows})x{CONFIG['hidden_size']}:{dtype}" + ":scale" * (behind == "mlp")
    name = f"norms_behind_{behind}"
    return DecoderCase(f"{name}.m{rows}.{dtype}", name, "norm_add_norm", N_LAYERS, text)


@cache
def cases() -> tuple[Case, ...]:
    """Every case in the catalogue's order. Raises DataError when the file is not of the expected form."""
    raw = json.loads((resources.files("emmy.workloads") / "gemma4_12b.json").read_text(encoding="utf-8"))
    found = tuple(_case(row) for row in raw["cases"])
    if len({case.id for case in found}) != raw["count"]["listed"]:
        raise DataError(f"gemma4_12b.json lists {len(found)} cases, some twice or missing; expected {raw['count']}")
    return found


def _case(row: dict[str, object]) -> Case:
    match row:
        case {
            "id": str(name),
            "kind": kind,
            "dims": dict(dims),
            "dtype": ("fp16" | "fp32") as dtype,
            "weight_layout": ("kn" | "nk" | None) as layout,
            "dynamic_m": bool(dynamic_m),
            "tier": str(tier),
            "form": ("fused" | "cut") as form,
            "flags": list(flags),
            "charted": bool(charted),
            "published": dict(published),
        } if kind in KINDS and all(isinstance(size, int) for size in dims.values()):
            return Case(
                name, kind, dims, _DTYPES[dtype], layout, dynamic_m, tier, form, tuple(flags), charted, published
            )
    raise DataError(f"gemma4_12b.json: case {row.get('id', row)!r} lacks or mistypes a field")
