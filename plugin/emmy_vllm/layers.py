"""Classes that stand for vLLM's linear layers and lm_head: the same, but for the method of a product that the pack serves."""

from __future__ import annotations

import logging
from functools import cache

import torch

from emmy_vllm import compat
from emmy_vllm.compat import ParallelLMHead, PluggableLayer, UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from emmy_vllm.kernels import kernels_of
from emmy_vllm.linear import EmmyHeadMethod, EmmyLinearMethod

log = logging.getLogger("emmy.vllm")


@cache
def install() -> None:
    """Registers a class for each of vLLM's. One that another plugin has taken stays with it."""
    for base in (*compat.LINEARS, ParallelLMHead):
        if compat.is_replaced(base):
            log.warning("%s: another plugin replaces it; Emmy leaves it alone", base.__name__)
            continue
        base.register_oot(_ours(base))


def _ours(base: type[PluggableLayer]) -> type[PluggableLayer]:
    class Ours(base):  # type: ignore[misc]
        def __init__(self, *args: object, **named: object) -> None:
            super().__init__(*args, **named)
            adopt(self)

    Ours.__name__ = Ours.__qualname__ = f"Emmy{base.__name__}"
    Ours.__doc__ = base.__doc__
    return Ours


def adopt(layer: torch.nn.Module) -> None:
    """Gives a layer Emmy's method where its own is vLLM's plain one and the pack has its product; per rank, as its weight is."""
    found = compat.current_settings()
    if found is None:
        return
    settings, config = found
    kind = type(layer.quant_method)
    is_head = kind is UnquantizedEmbeddingMethod
    if kind is not UnquantizedLinearMethod and not is_head:
        return
    if ("lm_head" if is_head else "linear") not in settings.parts or layer.weight.dim() != 2:
        return
    n, k = layer.weight.shape
    kernels = kernels_of(settings)
    name = getattr(layer, "prefix", "") or ("lm_head" if is_head else type(layer).__name__)
    table = kernels.linear(n, k, layer.weight.dtype, name)
    if table is None:
        return
    if is_head:
        layer.quant_method = EmmyHeadMethod(kernels, table, compat.most_logits(config))
    else:
        layer.quant_method = EmmyLinearMethod(kernels, table, compat.most_rows(config))
