"""Attention of a real engine on this CPU: a Gemma-4-shaped model says the same through a pack's kernels as without them."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

vllm = pytest.importorskip("vllm")

import torch  # noqa: E402

import emmy_vllm  # noqa: E402
from emmy_vllm import attended, attention, compat, kernels  # noqa: E402
from tests.vllm.attention_packs import attention_pack  # noqa: E402

pytestmark = pytest.mark.vllm
CONFIG = {
    "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "dtype": "float32", "vocab_size": 512,
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"], "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "global_head_dim": 128, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 512, "sliding_window": 40,
    "max_position_embeddings": 1024, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
    "final_logit_softcapping": 30.0, "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    },
}  # fmt: skip
WINDOWED, WHOLE = "64:f32:kv2,window40", "128:f32:kv1"
PAGE = 128  # of vLLM on a CPU
PROMPTS = [[(7 * i + 13 * j) % 500 + 5 for j in range(n)] for i, n in enumerate((5, 90, 33, 60))]


def ops(page: int) -> list[str]:
    lies = f"page{page},scale1.0,pgcdj,pgcjd"
    return [
        f"served_attention:m(1..8)x4x1x256x{WINDOWED},{lies}", f"served_attention:1x4xm(2..64)x384x{WINDOWED},{lies}",
        f"served_attention:m(1..8)x4x1x384x{WHOLE},{lies}", f"served_attention:1x4xm(2..64)x384x{WHOLE},{lies}",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder, whose weights are drawn when it is loaded: the same each time."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader("emmy_seeded")
    class Seeded(DummyModelLoader):  # type: ignore[misc]
        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            random = torch.Generator().manual_seed(0)
            for name, weight in model.named_parameters():
                mean, deviation = (1.0, 0.1) if "norm" in name else (0.0, weight.shape[-1] ** -0.5)
                weight.data.copy_(torch.randn(weight.shape, generator=random) * deviation + mean)

    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Callable[..., Any]]:
    """Makes an engine with so much of an emmy key, in this process; one at a time."""

    def make(**emmy: object) -> Any:
        from vllm.distributed import cleanup_dist_env_and_memory

        gc.collect()
        cleanup_dist_env_and_memory()
        kernels._all.clear()
        return vllm.LLM(
            str(model), load_format="emmy_seeded", dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_model_len=384,
            max_num_seqs=8, max_num_batched_tokens=128, gpu_memory_utilization=0.3, enable_prefix_caching=False,
            additional_config={"emmy": emmy} if emmy else {},
        )  # fmt: skip

    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"), ("VLLM_CPU_KVCACHE_SPACE", "1"), ("HF_HUB_OFFLINE", "1"),
            ("VLLM_NO_USAGE_STATS", "1"),
        ):  # fmt: skip
            patch.setenv(name, value)
        patch.setattr(attended, "LONG", 4)
        emmy_vllm.register()
        yield make


@pytest.fixture(scope="module")
def stock(engine: Callable[..., Any]) -> list[Any]:
    """What the model says without Emmy."""
    plain = engine()
    assert type(_impl(plain)) is compat.stock_backend("CPU_ATTN").get_impl_cls()
    found = said(plain)
    assert len({t for tokens, _ in found for t in tokens}) > 10  # weights that say something
    return found


def said(engine: Any) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens and their logarithmic probabilities: one request, one with a prompt in two chunks, then four at once."""
    sampling = vllm.SamplingParams(max_tokens=20, temperature=0, detokenize=False, ignore_eos=True, logprobs=0)
    out = []
    for batch in ([PROMPTS[0]], [PROMPTS[1] * 2], PROMPTS):
        for done in engine.generate([{"prompt_token_ids": p} for p in batch], sampling, use_tqdm=False):
            found = done.outputs[0]
            out.append(
                (list(found.token_ids), [p[t].logprob for p, t in zip(found.logprobs, found.token_ids, strict=True)])
            )
    return out


def counted() -> Counter[str]:
    """Runs by op, and steps that were stock's by why."""
    (found,) = kernels.every()
    every = Counter[str]()
    for a in found.attended.values():
        every.update({f"stock: {why}": n for why, n in a.why.items()})
        every.update({k.case.op: sum(k.counts.values()) for k in a.kernels})
    return +every


def test_a_model_says_the_same_through_a_pack_s_kernels_as_without_them(
    engine: Callable[..., Any], tmp_path: Path, stock: list[Any]
) -> None:
    path, digest = attention_pack(tmp_path, *ops(PAGE))
    ours = engine(pack=str(path), digest=digest, parts=["attention"])
    assert isinstance(_impl(ours), attention._impl("CPU_ATTN"))
    _same(said(ours), stock)
    counts = counted()
    assert all(counts[op] > (20 if "m(1..8)" in op else 2) for op in ops(PAGE)), counts
    assert counts["stock: no kernel of such a prompt"] > 0  # chunks of more than 64 tokens


def test_a_cache_of_other_pages_and_a_part_that_is_not_asked_for_are_stock_s(
    engine: Callable[..., Any], tmp_path: Path, stock: list[Any]
) -> None:
    path, digest = attention_pack(tmp_path, *ops(64))
    ours = engine(pack=str(path), digest=digest)
    got, counts = said(ours), counted()
    _same(got, stock)
    assert counts and all(x.startswith("stock: ") for x in counts)
    del ours
    linear = engine(pack=str(path), digest=digest, parts=["linear"])
    assert type(_impl(linear)) is compat.stock_backend("CPU_ATTN").get_impl_cls()


def _impl(engine: Any) -> Any:
    (kind,) = engine.apply_model(lambda model: [m.impl for m in model.modules() if type(m).__name__ == "Attention"][:1])
    return kind[0]


def _same(got: list[Any], want: list[Any]) -> None:
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in want]
    for (_, ours), (_, theirs) in zip(got, want, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)
