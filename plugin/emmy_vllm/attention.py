"""Backends that stand for vLLM's attention backends: the same, but for steps that a kernel of the pack serves.

Each is a subclass of the backend that vLLM chose, under its name, so that layout, metadata, writing the cache and everything not
served stay vLLM's. The classes are made when vLLM looks them up: `emmy_vllm.attention.TRITON_ATTN`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from emmy.ir.ops import ServedAttention
from emmy_vllm import compat
from emmy_vllm.attended import Attended, attended
from emmy_vllm.attention_steps import Cache, Shape, Step
from emmy_vllm.kernels import DTYPES, Kernels, every, kernels_of

log = logging.getLogger("emmy.vllm")
BACKENDS = ("TRITON_ATTN", "FLASH_ATTN", "CPU_ATTN")
_CPU_ORDERS = ("pgcdj", "pgcjd")  # of keys, which its kernel wants column by column, and of values
_UNUSUAL = (  # of a step's metadata, and what stock's kernels alone do then
    "use_cascade", "mm_prefix_range", "mm_prefix_range_tensor", "mm_prefix_query_range_tensor", "rswa_prefix_lens",
    "dynamic_causal", "encoder_cache", "max_dcp_context_kv_len",
)  # fmt: skip


def install() -> None:
    """Registers a class for each backend. One that another plugin has taken stays with it."""
    for name in BACKENDS:
        if not compat.replace_backend(name, f"{__name__}.{name}"):
            log.warning("%s: another plugin replaces it; Emmy leaves it alone", name)


def __getattr__(name: str) -> type:
    if name in BACKENDS:
        return backend(name)
    raise AttributeError(name)


@cache
def backend(name: str) -> type:
    """The class that stands for a backend of vLLM's."""
    stock: Any = compat.stock_backend(name)

    class Ours(stock):  # type: ignore[misc]
        @staticmethod
        def get_impl_cls() -> type:
            return _impl(name) if _wanted() else stock.get_impl_cls()

        @staticmethod
        def get_builder_cls() -> type:
            return (
                _builder(name)
                if any(a.kernels for k in every() for a in k.attended.values())
                else stock.get_builder_cls()
            )

    Ours.__qualname__ = Ours.__name__ = name
    Ours.__doc__ = stock.__doc__
    return Ours


def _wanted() -> bool:
    found = compat.current_settings()
    return found is not None and "attention" in found[0].parts


@cache
def _builder(name: str) -> type:
    stock: Any = compat.stock_backend(name).get_builder_cls()

    class Builder(stock):  # type: ignore[misc]
        """vLLM's, and where each request begins in a step of several prompts: the host knows that here alone."""

        def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **named: Any) -> Any:
            made = super().build(common_prefix_len, common_attn_metadata, *args, **named)
            if common_attn_metadata.max_query_len > 1 and common_attn_metadata.num_reqs > 1:
                made.emmy_starts = tuple(common_attn_metadata.query_start_loc_cpu.tolist())
            return made

    Builder.__qualname__ = Builder.__name__ = f"Emmy{stock.__name__}"
    return Builder


@cache
def _impl(name: str) -> type:
    stock: Any = compat.stock_backend(name).get_impl_cls()

    class Impl(stock):  # type: ignore[misc]
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            self.emmy = _serving(self, name)

        def forward(
            self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any, *scales: Any,
            **named: Any,
        ) -> Any:  # fmt: skip
            quantized = any(x is not None for x in (*scales, *named.values()))
            if self.emmy is None or attn_metadata is None or quantized:
                return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales, **named)
            step = self.emmy.step(attn_metadata)
            if step is not None and self.emmy.kernels.run(id(self), query, self.emmy.cache(kv_cache), step, output):
                return output
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales, **named)

    Impl.__qualname__ = Impl.__name__ = f"Emmy{stock.__name__}"
    Impl.__doc__ = stock.__doc__
    return Impl


@dataclass(frozen=True, slots=True)
class Serving:
    """What a layer needs to have its steps served."""

    kernels: Attended
    backend: str
    dim: int

    def cache(self, memory: torch.Tensor) -> Cache:
        """The layer's cache: [p,2,j,g,d] until vLLM 0.26; then [p,g,j,2*d], of which the CPU has its own order."""
        if memory.dim() == 5:
            return Cache(memory, "pcjgd")
        pages, heads, rows, _ = memory.shape
        if self.backend == "CPU_ATTN":
            return Cache(memory.view(pages, heads, 2, rows, self.dim), "pgcjd", _CPU_ORDERS)
        return Cache(memory.unflatten(-1, (2, self.dim)), "pgjcd")

    def step(self, metadata: Any) -> Step | None:
        """A step as metadata of any of the backends says it; None for one of an unusual kind."""
        said = vars(metadata)
        unusual = any(_is_said(said.get(name)) for name in _UNUSUAL)
        window = said.get("sliding_window")
        if (
            said["causal"] is not True
            or unusual
            or (window is not None and _window(window) != self.kernels.shape.window)
        ):
            return None
        return Step(
            metadata,
            said["num_actual_tokens"],
            said["max_query_len"],
            said["max_seq_len"],
            said["seq_lens"],
            said["block_table"],
            said.get("emmy_starts"),
        )


def _serving(impl: Any, name: str) -> Serving | None:
    """What serves a layer that has just been made; None where stock does, which the log says once for layers of a kind."""
    found = compat.current_settings()
    if found is None:
        return None
    settings, config = found
    window = _window(impl.sliding_window)
    if why := compat.why_no_attention(config) or _why_stock(impl, window, settings.deterministic):
        log.info("attention %dx%d, heads of %d: stock: %s", impl.num_heads, impl.num_kv_heads, impl.head_size, why)
        return None
    shape = Shape(
        impl.num_heads, impl.num_kv_heads, impl.head_size, DTYPES[config.model_config.dtype], window, float(impl.scale)
    )
    kernels = kernels_of(settings, config.instance_id)
    kept = kernels.attended.get((name, shape))
    if kept is None:
        kept = kernels.attended[name, shape] = _found(kernels, shape, name, config)
    kept.n_layers += 1
    return Serving(kept, name, impl.head_size) if kept.kernels else None


def _found(kernels: Kernels, shape: Shape, name: str, config: Any) -> Attended:
    rows, requests = compat.most_rows(config), compat.most_requests(config)
    device = compat.attention_device(name)

    def most(op: ServedAttention) -> int:
        return requests if op.decodes else rows

    return attended(kernels.pack, shape, name, device, kernels.instance, most)


def _is_said(x: Any) -> bool:
    """Whether metadata says something there: builders leave None, False, 0 or {} where they have nothing to say."""
    return x is not None and (not isinstance(x, (bool, int, dict)) or bool(x))


def _window(said: Any) -> int:
    """Keys that a query sees: backends say (window - 1, 0), a number, or -1 for all."""
    left = said[0] + 1 if isinstance(said, (tuple, list)) else said
    return max(0, int(left or 0))


def _why_stock(impl: Any, window: int, deterministic: bool) -> str:
    """Why no kernel may serve layers like this one; "" when one may."""
    said = vars(impl)
    if deterministic:
        return "a request's sums must not depend on its batch"
    if impl.attn_type != compat.DECODER:
        return f"it is {impl.attn_type}"
    if said.get("kv_cache_dtype") not in ("auto", "bfloat16", "float16", "float32"):
        return f"its cache is {said.get('kv_cache_dtype')}"
    if impl.logits_soft_cap:
        return "its logits are capped"
    odd = next((n for n in ("alibi_slopes", "sinks") if said.get(n) is not None), "")
    if odd or said.get("chunk_lookback", -1) != -1 or said.get("dcp_world_size", 1) > 1:
        return f"it has {odd or 'keys elsewhere, or in chunks'}"
    return ""
