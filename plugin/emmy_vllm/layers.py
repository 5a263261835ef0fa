"""Classes that stand for vLLM's linear layers and lm_head: the same, but for the method of a product that the pack serves."""

from __future__ import annotations

import logging
from functools import cache

import torch

from emmy_vllm import compat, coverage, fusion
from emmy_vllm.compat import (
    ParallelLMHead,
    PluggableLayer,
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
    VllmConfig,
)
from emmy_vllm.kernels import kernels_of
from emmy_vllm.linear import EmmyHeadMethod, EmmyLinearMethod
from emmy_vllm.settings import read_settings

log = logging.getLogger("emmy.vllm")


@cache
def install() -> None:
    """Registers a class for each of vLLM's. One that another plugin has taken stays with it."""
    for base in (*compat.LINEARS, ParallelLMHead):
        if compat.is_replaced(base):
            log.warning("%s: another plugin replaces it; Emmy leaves it alone", base.__name__)
            continue
        base.register_oot(_ours(base))
    compat.after_loading(report)


def report(config: VllmConfig) -> None:
    """Says what is Emmy's in the model that was loaded. Raises PackError when that is less than was asked for."""
    settings = read_settings(config.additional_config)
    if settings is None:
        return
    kernels = kernels_of(settings, config.instance_id)
    compat.add_pass(_fusion)
    fusion.load(kernels, compat.most_rows(config))
    log.info("%s", "\n".join(coverage.lines(kernels)))
    coverage.refuse_gaps(kernels, compat.is_batch_invariant())


def _fusion(config: VllmConfig) -> tuple[fusion.Fusion, str] | None:
    """The pass over an engine's graphs and its key."""
    settings = read_settings(config.additional_config)
    if settings is None or not settings.uses("fusion"):
        return None
    found = fusion.Fusion(kernels_of(settings, config.instance_id))
    return found, found.uuid


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
    kernels = kernels_of(settings, config.instance_id)
    is_head = isinstance(layer, ParallelLMHead)
    name = getattr(layer, "prefix", "") or ("lm_head" if is_head else type(layer).__name__)
    if type(layer.quant_method) is not (UnquantizedEmbeddingMethod if is_head else UnquantizedLinearMethod):
        kernels.leave(f"its method is {type(layer.quant_method).__name__}", name)
        return
    if not is_head:
        kernels.note(layer.weight, name)
    if not settings.uses("lm_head" if is_head else "linear"):
        kernels.leave("parts leaves it out", name)
    elif table := kernels.linear(layer.weight.shape[0], layer.weight.shape[1], layer.weight.dtype, name):
        method, rows = (EmmyHeadMethod, compat.most_logits) if is_head else (EmmyLinearMethod, compat.most_rows)
        layer.quant_method = method(kernels, table, rows(config))
