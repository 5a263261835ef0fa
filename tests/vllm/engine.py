"""vLLM's engine in this process, with seeded weights: what it answers, and what the plugin counted meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.vllm import models, packs

if TYPE_CHECKING:
    from vllm import LLM

PROMPTS = tuple(tuple((7 * i + 3 * n) % 1000 + 5 for i in range(n)) for n in (3, 17, 40, 90))
Answer = tuple[
    tuple[int, ...], tuple[tuple[tuple[int, float], ...], ...]
]  # tokens; of each the likeliest with their logprobs


@cache
def register_classes() -> None:
    """Gives vLLM the models' classes, for which it would start a process each to look into; loads plugins, as it would."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.gemma3 import Gemma3ForCausalLM
    from vllm.model_executor.models.gemma4 import Gemma4ForCausalLM
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    for found in (Gemma3ForCausalLM, Gemma4ForCausalLM, LlamaForCausalLM, Qwen3ForCausalLM):
        ModelRegistry.register_model(found.__name__, found)
    register_seeded_weights()


@cache
def register_seeded_weights() -> None:
    """`load_format="seeded"`: every weight normal, from its name's own generator, so that layouts do not change it."""
    import torch
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader("seeded")
    class Seeded(DummyModelLoader):  # type: ignore[misc]
        def load_weights(self, model: Any, model_config: Any) -> None:
            for i, (name, p) in enumerate(sorted(model.named_parameters())):
                generator = torch.Generator().manual_seed(i)
                drawn = torch.randn(p.shape, generator=generator, dtype=torch.float32) * (
                    0.1 if p.dim() == 1 else 0.03 if "embed" in name else 0.2
                )
                p.data.copy_(drawn if p.dim() > 1 or "norm" not in name else drawn + 1)


@contextmanager
def started(
    model: str, folder: Path, additional_config: Mapping[str, object] | None = None, **options: Any
) -> Iterator[LLM]:
    """An engine, which is gone after. `options` are vLLM's own."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    settings: dict[str, Any] = {
        "load_format": "seeded", "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": packs.ROWS, "max_num_seqs": 8,
        "max_num_batched_tokens": packs.ROWS, "gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 64 << 20, "enforce_eager": True,
        "enable_prefix_caching": False, "seed": 0,
    }  # fmt: skip
    engine = LLM(
        str(models.written(model, folder)), additional_config=dict(additional_config or {}), **settings | options
    )
    try:
        yield engine
    finally:
        engine.llm_engine.engine_core.shutdown()
        del engine
        cleanup_dist_env_and_memory()
        gc.collect()


def answers(engine: LLM, prompts: Sequence[Sequence[int]] = PROMPTS, tokens: int = 6, **options: Any) -> list[Answer]:
    """Greedy tokens of prompts that are one batch."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True, logprobs=5)
    done = engine.generate([{"prompt_token_ids": list(p)} for p in prompts], greedy, use_tqdm=False, **options)
    return [_answer(d.outputs[0]) for d in done]


def _answer(output: Any) -> Answer:
    likely = tuple(tuple((token, p.logprob) for token, p in step.items()) for step in output.logprobs)
    return tuple(output.token_ids), likely


def alone(engine: LLM, prompts: Sequence[Sequence[int]] = PROMPTS, tokens: int = 6) -> list[Answer]:
    """The same, each prompt a batch of its own."""
    return [answers(engine, [p], tokens)[0] for p in prompts]


def close(ours: Sequence[Answer], stock: Sequence[Answer]) -> bool:
    """Whether tokens are the same and logprobs within rounding."""
    return all(
        a[0] == b[0] and all(abs(dict(x)[t] - p) < 1e-3 for x, y in zip(a[1], b[1], strict=True) for t, p in y[:3])
        for a, b in zip(ours, stock, strict=True)
    )


@dataclass(frozen=True)
class Calls:
    """Of a table: calls left to stock, and those of each range."""

    left: int
    served: tuple[int, ...]


def calls() -> dict[str, Calls]:
    """What tables counted since they were loaded, by op, whatever the pack."""
    from emmy_vllm import kernels

    found: dict[str, Calls] = {}
    for op, values in ((op, t.counts.values()) for k in kernels.every() for op, t in k.tables.items()):
        before = found.get(op, Calls(0, (0,) * (len(values) - 1)))
        served = tuple(a + b for a, b in zip_longest(before.served, values[1:], fillvalue=0))
        found[op] = Calls(before.left + values[0], served)
    return found


def calls_since(before: Mapping[str, Calls]) -> dict[tuple[str, int], int]:
    """Calls that kernels served since, by op and number of its range."""
    then = {(op, i): n for op, c in before.items() for i, n in enumerate(c.served)}
    return {(op, i): n - then.get((op, i), 0) for op, c in calls().items() for i, n in enumerate(c.served)}


def modules(worker: object) -> list[str]:
    """What a worker's process has imported."""
    import sys

    return list(sys.modules)
