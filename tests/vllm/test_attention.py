"""Attention of a real engine on this CPU: a Gemma-4-shaped model answers through a pack's kernels as it does without them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.plugin.attention_packs import attention_pack
from tests.vllm import engine

pytestmark = pytest.mark.vllm
PAGE = 128  # of vLLM on a CPU
WINDOWED, WHOLE = "32:f32:kv2,window64", "64:f32:kv1"
BATCHES = (engine.PROMPTS[:1], [engine.PROMPTS[3] * 2], engine.PROMPTS)  # alone; in two chunks, and long; four at once
CHUNKS = {"max_num_batched_tokens": 128}


def ops(page: int) -> list[str]:
    lies = f"page{page},scale1.0,pgcdj,pgcjd"
    return [
        f"served_attention:m(1..8)x4x1x256x{WINDOWED},{lies}", f"served_attention:1x4xm(2..64)x256x{WINDOWED},{lies}",
        f"served_attention:m(1..8)x4x1x256x{WHOLE},{lies}", f"served_attention:1x4xm(2..64)x256x{WHOLE},{lies}",
    ]  # fmt: skip


def config(folder: Path, page: int, *parts: str) -> dict[str, object]:
    path, digest = attention_pack(folder, *ops(page))
    return {"emmy": {"pack": str(path), "digest": digest, "parts": list(parts)}}


def answers(e: Any) -> list[engine.Answer]:
    return [a for batch in BATCHES for a in engine.answers(e, batch, tokens=20)]


@pytest.fixture(scope="module")
def stock(folder: Path) -> list[engine.Answer]:
    """What the model says without Emmy."""
    from emmy_vllm import compat

    with engine.started("gemma4", folder, **CHUNKS) as e:
        assert type(impl(e)) is compat.stock_backend("CPU_ATTN").get_impl_cls()
        found = answers(e)
    assert len({t for tokens, _ in found for t in tokens}) > 10, "weights that say one thing tell nothing"
    return found


def test_a_model_answers_the_same_through_a_pack_s_attention(
    folder: Path, tmp_path: Path, stock: list[engine.Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    from emmy_vllm import attention, attention_steps

    monkeypatch.setattr(attention_steps, "LONG", 2)
    with engine.started("gemma4", folder, config(tmp_path, PAGE, "attention"), **CHUNKS) as e:
        assert isinstance(impl(e), attention._impl("CPU_ATTN"))
        assert engine.close(answers(e), stock)
        counts = counted()
    assert all(counts[op] > (20 if "m(1..8)" in op else 2) for op in ops(PAGE)), counts
    assert counts["stock: no kernel of such a prompt"] > 0  # chunks of more than 64 tokens


def test_a_cache_of_other_pages_is_stock_s(folder: Path, tmp_path: Path, stock: list[engine.Answer]) -> None:
    with engine.started("gemma4", folder, config(tmp_path, 64, "attention"), **CHUNKS) as e:
        assert engine.close(answers(e), stock)
        counts = counted()
    assert counts and all(x.startswith("stock: ") for x in counts)


def test_a_part_that_is_not_asked_for_is_vllm_s_own(folder: Path, tmp_path: Path) -> None:
    from emmy_vllm import compat

    with engine.started("gemma4", folder, config(tmp_path, PAGE, "linear")) as e:
        assert type(impl(e)) is compat.stock_backend("CPU_ATTN").get_impl_cls()


def impl(e: Any) -> Any:
    """What computes attention in the first layer that does."""
    (found,) = e.apply_model(lambda model: [m.impl for m in model.modules() if type(m).__name__ == "Attention"][:1])
    return found[0]


def counted() -> Mapping[str, int]:
    """Of the latest engine: runs by op, and steps that were stock's by why."""
    from emmy_vllm import kernels

    every = Counter[str]()
    for a in kernels.every()[-1].attended.values():
        every.update({f"stock: {why}": n for why, n in a.why.items()})
        every.update({k.case.op: sum(k.counts.values()) for k in a.kernels})
    return +every
