"""The only file that imports vLLM's internals, and the only one to look at when a new release comes. Tested range: configs.py."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, wraps

import torch
import vllm.envs
from torch import fx
from vllm.config import CUDAGraphMode, VllmConfig, get_current_vllm_config_or_none
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
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import AttentionBackend, AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from emmy_vllm.settings import Settings, read_settings

__all__ = [
    "DummyModelLoader",
    "FlexibleArgumentParser",
    "ParallelLMHead",
    "PluggableLayer",
    "UnquantizedEmbeddingMethod",
    "UnquantizedLinearMethod",
    "VllmConfig",
    "add_pass",
    "after_loading",
    "attention_device",
    "current_settings",
    "is_batch_invariant",
    "is_on_gpu",
    "is_replaced",
    "most_logits",
    "most_requests",
    "most_rows",
    "register_load_format",
    "replace_backend",
    "share_logging",
    "stock_backend",
    "why_no_attention",
]  # fmt: skip

DECODER = AttentionType.DECODER
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


def is_on_gpu() -> bool:
    """Whether vLLM runs on a GPU here."""
    return bool(current_platform.is_cuda_alike())


def is_batch_invariant() -> bool:
    """Whether vLLM's own kernels give a request the same bits in any batch: a mode of its, on GPUs."""
    return bool(vllm.envs.VLLM_BATCH_INVARIANT) and is_on_gpu()


def after_loading(then: Callable[[VllmConfig], None]) -> None:
    """Calls `then` whenever a model has been loaded and its weights processed."""
    load: Callable[..., torch.nn.Module] = BaseModelLoader.load_model

    @wraps(load)
    def loaded(self: BaseModelLoader, vllm_config: VllmConfig, *args: object, **named: object) -> torch.nn.Module:
        model = load(self, vllm_config, *args, **named)
        then(vllm_config)
        return model

    BaseModelLoader.load_model = loaded


def share_logging() -> None:
    """What Emmy says goes where vLLM's own log goes."""
    logging.getLogger("emmy").parent = logging.getLogger("vllm")


def most_requests(config: VllmConfig) -> int:
    """The most requests of one step."""
    return int(config.scheduler_config.max_num_seqs)


def attention_device(name: str) -> torch.device:
    """Where an attention backend's tensors are."""
    return torch.device("cpu") if name == "CPU_ATTN" else torch.device("cuda", torch.cuda.current_device())


def stock_backend(name: str) -> type[AttentionBackend]:
    """vLLM's own class of an attention backend, whatever stands for it."""
    found: type[AttentionBackend] = resolve_obj_by_qualname(AttentionBackendEnum[name].value)
    return found


def replace_backend(name: str, path: str) -> bool:
    """Lets the class at `path` stand for an attention backend; False where another plugin's does already."""
    backend = AttentionBackendEnum[name]
    if backend.is_overridden():
        return bool(backend.get_path() == path)
    register_backend(backend, path)
    return True


def why_no_attention(config: VllmConfig) -> str:
    """Why no attention kernel may be chosen for a step by what the host knows of it; "" when one may."""
    if config.compilation_config.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL:
        return "CUDA graphs hold steps of any mixture of requests: cudagraph_mode FULL_AND_PIECEWISE does not"
    if config.parallel_config.decode_context_parallel_size > 1:
        return "a sequence's keys lie on several devices"
    if vllm.envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT: a request's sums must not depend on its batch"
    return ""


@cache
def add_pass(of: Callable[[VllmConfig], tuple[Callable[[fx.Graph, int, int], None], str] | None]) -> None:
    """From now on what `of` gives for a configuration runs over each graph that is compiled, behind vLLM's own passes and before
    its norms are lowered: a function of the graph and the least and most rows it serves, and the key of what that does.
    """
    # imported where a model is built: it asks which platform this is
    from vllm.compilation.passes.inductor_pass import CallableInductorPass, get_pass_context
    from vllm.compilation.passes.pass_manager import PostGradPassManager

    configure: Callable[[PostGradPassManager, VllmConfig], None] = PostGradPassManager.configure

    @wraps(configure)
    def configured(self: PostGradPassManager, config: VllmConfig) -> None:
        configure(self, config)
        if found := of(config):
            run, key = found

            def over(graph: fx.Graph) -> None:
                compiled = get_pass_context().compile_range
                run(graph, int(compiled.start), int(compiled.end))

            self.add(CallableInductorPass(over, f"emmy {key}"))

    PostGradPassManager.configure = configured


def register_load_format(name: str, loader: type[DummyModelLoader]) -> None:
    """Makes `--load-format NAME` load with that class. Without vLLM's line about it, which every user of vLLM would read."""
    log = logging.getLogger(register_model_loader.__module__)
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        register_model_loader(name)(loader)
    finally:
        log.setLevel(level)
