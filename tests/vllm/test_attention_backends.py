"""Attention in the layouts of vLLM's GPU backends, which this machine cannot run: their classes, caches and metadata, our kernels."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch

from emmy_vllm import attention, attention_steps, compat, kernels
from emmy_vllm.attention_selftest import answer
from emmy_vllm.attention_steps import Told
from emmy_vllm.settings import Settings
from tests.plugin.attention_packs import attention_pack

pytestmark = pytest.mark.vllm
METADATA = {"TRITON_ATTN": "TritonAttentionMetadata", "FLASH_ATTN": "FlashAttentionMetadata"}
HEADS, GROUPS, DIM, PAGE, PAGES, WINDOW = 4, 2, 32, 16, 9, 24


@dataclass
class Made:
    """A layer of a backend, made as vLLM makes one. `left`: what came to vLLM's own forward."""

    impl: Any
    name: str
    order: str
    left: list[Any]

    def cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(as the layer gets it, the same memory in the op's order)."""
        extent = {"p": PAGES, "c": 2, "j": PAGE, "g": GROUPS, "d": DIM}
        lying = torch.randn([extent[a] for a in self.order], generator=torch.Generator().manual_seed(1))
        return lying if self.order == "pcjgd" else lying.flatten(-2).transpose(1, 2), lying

    def step(self, *requests: tuple[int, int], **said: Any) -> Any:
        """vLLM's metadata of requests of (keys, queries)."""
        kind = getattr(sys.modules[compat.stock_backend(self.name).__module__], METADATA[self.name])
        lengths, queries = (torch.tensor(x, dtype=torch.int32) for x in zip(*requests, strict=True))
        known = {
            "num_actual_tokens": int(queries.sum()), "max_query_len": int(queries.max()), "max_seq_len": int(lengths.max()),
            "seq_lens": lengths, "causal": True, "use_cascade": False, "max_dcp_context_kv_len": 0,
            "block_table": torch.randint(0, PAGES, (len(requests), 6), generator=torch.Generator().manual_seed(2)).int(),
        }  # fmt: skip
        given = {f.name: None for f in fields(kind) if f.default is MISSING} | known | said
        return kind(**{f.name: given[f.name] for f in fields(kind) if f.name in given})

    def forward(self, metadata: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(queries, what the layer made of them)."""
        n = metadata.num_actual_tokens
        q = torch.randn(n + 2, HEADS, DIM, generator=torch.Generator().manual_seed(n))  # graphs have rows to spare
        out = torch.full_like(q, 7.0)
        self.impl.forward(
            None, q, q, q, self.cache()[0], metadata, output=out, output_scale=None, output_block_scale=None
        )
        return q[:n], out


@pytest.fixture(params=METADATA)
def made(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    name: str = request.param
    stock = compat.stock_backend(name)
    order = "pcjgd" if "get_kv_cache_shape" in vars(stock) else "pjgcd"
    words = f"{DIM}:f32:kv{GROUPS},window{WINDOW},page{PAGE},{order}"
    ops = (f"served_attention:m(1..4)x{HEADS}x1x48x{words}", f"served_attention:1x{HEADS}xm(2..40)x96x{words}")
    path, digest = attention_pack(tmp_path, *ops, rivals={f"vllm:{name}": 1.2})
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.float32), instance_id="test",
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=4),
    )  # fmt: skip
    monkeypatch.setattr(compat, "current_settings", lambda: (Settings(path, digest), config))
    monkeypatch.setattr(compat, "why_no_attention", lambda config: "")
    monkeypatch.setattr(compat, "attention_device", lambda name: torch.device("cpu"))
    monkeypatch.setattr(attention_steps, "LONG", 8)
    monkeypatch.setattr(kernels, "_all", {})
    left: list[Any] = []
    monkeypatch.setattr(stock.get_impl_cls(), "forward", lambda self, *args, **named: left.append(args))
    kind = attention.backend(name).get_impl_cls()
    yield Made(kind(HEADS, DIM, DIM**-0.5, GROUPS, None, WINDOW, "auto"), name, order, left)


@pytest.mark.parametrize("requests", [((5, 1), (90, 1), (24, 1)), ((60, 33),)], ids=["decoding", "a prompt"])
def test_steps_are_served_from_the_backend_s_own_cache(made: Made, requests: tuple[tuple[int, int], ...]) -> None:
    metadata = made.step(*requests)
    q, out = made.forward(metadata)
    n, queries = len(q), requests[0][1]
    assert not made.left and (out[n:] == 7).all()
    decoding, prompt = (k.op for k in made.impl.emmy.kernels.kernels)
    before = metadata.seq_lens - (0 if queries == 1 else queries)
    want = answer(decoding if queries == 1 else prompt, q, made.cache()[1], Told(None, metadata.block_table, before))
    torch.testing.assert_close(out[:n].double(), want, atol=1e-5, rtol=1e-5)


def test_vllm_s_own_forward_has_what_no_kernel_serves(made: Made) -> None:
    for metadata in (
        made.step((5, 1), (60, 33)),  # a builder that is not ours told nothing of starts
        made.step((5, 1), causal=False),
        made.step((5, 1), causal=torch.ones(1, dtype=torch.bool)),
        made.step((5, 1), mm_prefix_range_tensor=torch.zeros(1), mm_prefix_query_range_tensor=torch.zeros(1)),
        made.step((90, 50)),
    ):
        seen = len(made.left)
        _, out = made.forward(metadata)
        assert len(made.left) == seen + 1 and (out == 7).all()
    assert made.left[0][4].shape == made.cache()[0].shape


def test_our_builder_says_where_requests_begin(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = made.step((5, 1), (60, 33), (7, 1))
    builder = attention.backend(made.name).get_builder_cls()
    monkeypatch.setattr(builder.__mro__[1], "build", lambda self, *args, **named: metadata)
    common = SimpleNamespace(max_query_len=33, num_reqs=3, query_start_loc_cpu=torch.tensor([0, 1, 34, 35]))
    q, out = made.forward(builder.build(builder.__new__(builder), 0, common))
    assert not made.left
    decoding, prompt = (k.op for k in made.impl.emmy.kernels.kernels)
    for i, (begin, end) in enumerate(((0, 1), (1, 34), (34, 35))):
        table, lengths = metadata.block_table[i : i + 1], metadata.seq_lens[i : i + 1]
        one, told = (decoding, lengths) if end - begin == 1 else (prompt, lengths - 33)
        want = answer(one, q[begin:end], made.cache()[1], Told(None, table, told))
        torch.testing.assert_close(out[begin:end].double(), want, atol=1e-5, rtol=1e-5)
