"""The only file that imports vLLM's internals, and the only one to look at when a new release comes. Tested range: configs.py."""

from __future__ import annotations

from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from emmy_vllm.settings import Settings, read_settings

__all__ = [
    "ParallelLMHead", "PluggableLayer", "UnquantizedEmbeddingMethod", "UnquantizedLinearMethod", "VllmConfig",
    "current_settings", "is_replaced", "most_logits", "most_rows",
]  # fmt: skip

LINEARS = (QKVParallelLinear, MergedColumnParallelLinear, ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)


def is_replaced(layer: type[PluggableLayer]) -> bool:
    """Whether a plugin's class stands for vLLM's already: a name can be taken once."""
    return layer.__name__ in op_registry_oot


def current_settings() -> tuple[Settings, VllmConfig] | None:
    """What the configuration that a model is being built for asks of Emmy, None where that is nothing."""
    config = get_current_vllm_config_or_none()
    settings = read_settings(config.additional_config) if config is not None else None
    return None if config is None or settings is None else (settings, config)


def most_rows(config: VllmConfig) -> int:
    """The most tokens of one step."""
    return int(config.scheduler_config.max_num_batched_tokens)


def most_logits(config: VllmConfig) -> int:
    """The most rows that the lm_head gets in a step; prompt logprobs may have more, which stock serves."""
    speculative = config.speculative_config
    drafted = int(speculative.num_speculative_tokens) if speculative is not None else 0
    return int(config.scheduler_config.max_num_seqs) * (1 + drafted)
