"""Compiled graphs, by vLLM's own piecewise backend as on a GPU, in one cache on disk: never another configuration's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import engine, models, packs

pytestmark = pytest.mark.vllm
COMPILED: Mapping[str, Any] = {"enforce_eager": False, "compilation_config": {"mode": 3}}


@pytest.fixture
def compiles_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's CPU platform traces once and leaves its piecewise backend out; here it is used."""
    import torch
    import vllm._custom_ops
    from vllm.config import CompilationMode
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config

    def check(vllm_config: Any) -> None:
        wanted = vllm_config.compilation_config.mode
        stock(vllm_config)
        c = vllm_config.compilation_config
        if wanted == CompilationMode.VLLM_COMPILE:
            c.mode, c.backend, c.ir_enable_torch_wrap, c.compile_sizes = wanted, "inductor", True, []

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(check))
    # Stock's products on a CPU write into an output that they are given, which a pass of that backend cannot take here.
    monkeypatch.setattr(vllm._custom_ops, "_supports_onednn", False)
    yield
    torch._dynamo.reset()


def test_switched_on_off_and_on_again_no_graph_is_stale(
    folder: Path, served: Mapping[str, Any], compiles_as_on_a_gpu: None
) -> None:
    other = packs.built(folder / "other.emmypack", [models.SHAPES["gate_up_proj"]])
    with engine.started("llama", folder) as e:
        stock = engine.answers(e)
    ops: list[set[str]] = []
    for asked in (served, None, served, other):
        before = engine.calls()
        with engine.started("llama", folder, asked, **COMPILED) as e:
            assert engine.close(engine.answers(e), stock)
        ops.append({f"{op} {i}" for (op, i), n in engine.calls_since(before).items() if n})
    first, off, again, fewer = ops
    assert first and first == again
    assert not off
    assert {op.split(":")[1] for op in fewer} == {f"m(1..{packs.ROWS})x512x128"}
