"""The kernel shapes of one step of a dense decoder, for each width and tensor-parallel split. Knows no device.

A weight is split as vLLM and Megatron do: qkv, gate_up and lm_head by output columns, o and down by the summed axis, norms not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from emmy.errors import UsageError
from emmy.ir.dtype import DTYPES, DType
from emmy.ir.ops import parse_op
from emmy.ir.ops.op import PARSERS
from emmy.workloads.decoder import Config, Decoder, Layers, read_decoder

Width = int | tuple[int, int]  # rows of a step: a number, or a range lo..hi that is open until run time
Form = Literal["", "merged", "separate", "normed", "twice"]
WIDTHS: tuple[Width, ...] = (1, 8, 64, 512, 2048)
_WIDEST = 1 << 20


@dataclass(frozen=True, slots=True)
class DecoderCase:
    """One kernel shape of a step, launched `count` times in it. `part` says what it computes: several forms of a part are
    alternatives, of which a step runs one ("merged" weights, "separate" ones, "normed": merged behind their RMSNorm,
    or "twice": merged, and a weight of keys that are the values too stored twice, as vLLM does).
    """

    id: str
    part: str
    kind: Literal[
        "matmul", "geglu", "swiglu", "norm_linear", "rms_norm", "norm_add_norm", "attention", "served_attention"
    ]  # fmt: skip
    count: int
    text: str  # the op's, whether or not this Emmy has an op of the kind; a size that no op can have is ?
    form: Form = ""

    @property
    def is_served(self) -> bool:
        """Whether it is a product as a server runs it: weights merged, its norm and attention apart."""
        return self.kind in ("matmul", "geglu", "swiglu") and self.form in ("merged", "twice", "")

    def op_text(self) -> str | None:
        """The op this case is, or None while no op expresses its kind."""
        if self.kind not in PARSERS or "?" in self.text:
            return None
        return parse_op(self.text).key


def from_config(
    config: Config | Path | str,
    widths: Sequence[Width] = WIDTHS,
    tensor_parallel: int = 1,
    dtype: DType | None = None,
    context: int = 0,
) -> tuple[DecoderCase, ...]:
    """The cases of the decoder that `config` describes, on one of `tensor_parallel` devices.

    config: a mapping with the fields of a Hugging Face config.json, the file, or its folder
    widths: rows that a step computes (tokens): numbers, or ranges (lo, hi) for ops whose size is open until run time
    dtype:  of weights and activations; None = what the config says
    context: tokens of the one sequence before the step, whose keys and values attention reads

    Raises UsageError: see `read_decoder`; for widths below 1; for a split that does not divide heads, MLP or vocabulary.
    """
    model = read_decoder(config)
    _check_widths(widths)
    _check_split(model, tensor_parallel)
    number = dtype or model.dtype
    if number not in DTYPES:
        raise UsageError(
            f"the config names no dtype and {dtype!r} was asked for; name one of {', '.join(DTYPES)} (`:dtype=f16` in a set)"
        )
    if context < 0:
        raise UsageError(f"{context} tokens before the step; 0 or more is needed")
    step = tuple(case for w in widths for case in _Step(model, w, tensor_parallel, number, context).cases())
    return tuple({case.id: case for case in step}.values())


def _check_widths(widths: Sequence[Width]) -> None:
    if not widths:
        raise UsageError("no width is named; at least one number of rows is needed, such as 1,8,512 or 1..4096")
    for w in widths:
        lo, hi = w if isinstance(w, tuple) else (w, w)
        if not 1 <= lo <= hi <= _WIDEST:
            raise UsageError(
                f"a width is {lo if lo == hi else f'{lo}..{hi}'}; 1..{_WIDEST} is allowed, a range going upwards"
            )


def _check_split(model: Decoder, tp: int) -> None:
    """Key and value heads may be fewer than the devices: then each is held by several, as vLLM does."""
    if tp < 1:
        raise UsageError(f"a tensor-parallel split over {tp} devices; at least 1 is needed")
    sizes = {"intermediate_size": model.intermediate, "vocab_size": model.vocab}
    for g in model.layers:
        sizes[f"num_attention_heads ({g.kind} layers)"] = g.heads
        if g.kv_heads % tp and tp % g.kv_heads:
            raise UsageError(
                f"{g.kv_heads} key and value heads ({g.kind} layers) are neither shared evenly among {tp} devices nor "
                f"repeated evenly on them: tp must divide them, or be a multiple of them"
            )
    for name, size in sizes.items():
        if size % tp:
            allowed = ", ".join(str(d) for d in (1, 2, 3, 4, 5, 6, 8, 16) if all(s % d == 0 for s in sizes.values()))
            raise UsageError(f"{name} {size} is not a multiple of tp={tp}; this model can be split over {allowed}")


@dataclass(frozen=True, slots=True)
class _Step:
    model: Decoder
    width: Width
    tp: int
    dtype: DType
    context: int

    def cases(self) -> Iterator[DecoderCase]:
        m = self.model
        # Kinds of layers whose projections have the same sizes are one.
        merged: dict[tuple[int, int, int, bool], Layers] = {}
        for g in m.layers:
            known = merged.get(g.shapes)
            merged[g.shapes] = replace(known, count=known.count + g.count) if known else g
        for g in merged.values():
            yield from self._projections(g, f".{g.kind}" if len(merged) > 1 else "")
        for g in m.layers:
            yield self._attention(g, f".{g.kind}" if len(m.layers) > 1 else "")
        yield from self._mlp()
        yield self._linear("lm_head", m.vocab // self.tp, m.hidden, 1)
        yield self._norm("rms_norm", m.hidden, 1, m.norms * m.n_layers + 1)

    def _projections(self, g: Layers, suffix: str) -> Iterator[DecoderCase]:
        m = self.model
        heads, kv_heads = g.heads // self.tp, max(1, g.kv_heads // self.tp)
        q, kv = heads * g.head_dim, kv_heads * g.head_dim
        hidden, bias = m.hidden, m.qkv_bias
        all_columns = q + kv * (1 if g.k_is_v else 2)
        yield self._linear(f"qkv_proj{suffix}", all_columns, hidden, g.count, bias, part=f"qkv{suffix}", form="merged")
        if g.k_is_v:
            yield self._linear(
                f"twice_qkv_proj{suffix}", q + 2 * kv, hidden, g.count, bias, part=f"qkv{suffix}", form="twice"
            )
        yield self._linear(f"q_proj{suffix}", q, hidden, g.count, bias, part=f"qkv{suffix}", form="separate")
        n_kv = g.count * (1 if g.k_is_v else 2)  # one shape: keys and values
        name = "k_proj" if g.k_is_v else "kv_proj"
        yield self._linear(f"{name}{suffix}", kv, hidden, n_kv, bias, part=f"qkv{suffix}", form="separate")
        if not bias:
            yield self._normed(f"norm_qkv{suffix}", all_columns, hidden, g.count, f"qkv{suffix}")
        yield self._linear(f"o_proj{suffix}", hidden, q, g.count, m.o_bias)
        if m.qk_norm:
            yield self._norm(f"q_norm{suffix}", g.head_dim, heads, g.count)
            yield self._norm(f"k_norm{suffix}", g.head_dim, kv_heads, g.count)

    def _mlp(self) -> Iterator[DecoderCase]:
        m = self.model
        inner, count = m.intermediate // self.tp, m.n_layers
        yield self._linear("gate_up_proj", 2 * inner, m.hidden, count, m.mlp_bias, part="gate_up", form="merged")
        yield self._linear("gate_or_up_proj", inner, m.hidden, 2 * count, m.mlp_bias, part="gate_up", form="separate")
        if not m.mlp_bias:
            kind: Literal["geglu", "swiglu"] = "geglu" if m.gate == "gelu_tanh" else "swiglu"
            text = f"{kind}:{self._m}x{inner}x{m.hidden}:{self.dtype}:nk"
            yield DecoderCase(self._id(kind), "gate_up", kind, count, text, "merged")
            yield self._normed("norm_gate_up", 2 * inner, m.hidden, count, "gate_up")
        yield self._linear("down_proj", m.hidden, inner, count, m.mlp_bias)

    @property
    def _m(self) -> str:
        return self._rows(1)

    def _rows(self, times: int) -> str:
        """So many rows for each token, as an op says it."""
        if isinstance(self.width, tuple):
            lo, hi = (times * w for w in self.width)
            return f"m({lo}..{hi})"
        return str(self.width * times)

    def _id(self, name: str) -> str:
        w = self.width
        rows = f"{w[0]}..{w[1]}" if isinstance(w, tuple) else str(w)
        return f"{name}.m{rows}" + (f".tp{self.tp}" if self.tp > 1 else "")

    def _linear(
        self, name: str, n: int, k: int, count: int, bias: bool = False, *, part: str = "", form: Form = ""
    ) -> DecoderCase:
        text = f"matmul:{self._m}x{n}x{k}:{self.dtype}:nk{',bias' if bias else ''}"
        return DecoderCase(self._id(name), part or name, "matmul", count, text, form)

    def _normed(self, name: str, n: int, k: int, count: int, part: str) -> DecoderCase:
        text = f"norm_linear:{self._m}x{n}x{k}:{self.dtype}:nk"
        return DecoderCase(self._id(name), part, "norm_linear", count, text, "normed")

    def _norm(self, name: str, k: int, rows: int, count: int) -> DecoderCase:
        return DecoderCase(self._id(name), name, "rms_norm", count, f"rms_norm:{self._rows(rows)}x{k}:{self.dtype}")

    def _attention(self, g: Layers, suffix: str) -> DecoderCase:
        """The queries of a step against what is kept of the tokens before it, as far as the window reaches, and its own."""
        name, heads, kv_heads = f"attention{suffix}", g.heads // self.tp, max(1, g.kv_heads // self.tp)
        before = self.context if g.window is None else min(self.context, g.window - 1)
        if isinstance(self.width, tuple):  # the op has one open size for queries and keys
            keys = self._m if not before else "?"
        else:
            keys = str(self.width + before)
        words = "causal" + (f",window{g.window}" if g.window else "") + (f",kv{kv_heads}" if kv_heads != heads else "")
        text = f"attention:{heads}x{self._m}x{keys}x{g.head_dim}:{self.dtype}:{words}"
        return DecoderCase(self._id(name), name, "attention", g.count, text)
