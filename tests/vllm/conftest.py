"""What the tests with a real vLLM share: an environment that downloads nothing, one process for many engines, and a pack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.vllm import engine, models, packs

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def vllm_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's own switches, for the whole session: it reads them at import."""
    with pytest.MonkeyPatch.context() as m:
        for name, value in ENVIRONMENT.items():
            m.setenv(name, value)
        m.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("vllm")))
        engine.register_classes()
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def served(folder: Path) -> Mapping[str, object]:
    """additional_config with a pack of every product of the tiny models."""
    return packs.built(folder / "all.emmypack", models.SHAPES.values())
