"""What is refused before anything is loaded: a wrong key, another pack, a damaged one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from emmy.errors import EmmyError, PackError, UsageError
from tests.vllm import models

pytestmark = pytest.mark.vllm


def configured(folder: Path, emmy: object) -> Any:
    """The configuration that vLLM makes, as the command line would."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    model = str(models.written("llama", folder))
    asked = {} if emmy is None else {"emmy": emmy}
    return EngineArgs(model, skip_tokenizer_init=True, dtype="float32", additional_config=asked).create_engine_config()


def test_a_key_that_is_not_understood_is_refused(folder: Path, served: Mapping[str, Any]) -> None:
    assert configured(folder, served["emmy"]).additional_config["emmy"] == served["emmy"]
    with pytest.raises(UsageError, match="has 'pakc'"):
        configured(folder, {**served["emmy"], "pakc": "x"})
    with pytest.raises(UsageError, match="parts is"):
        configured(folder, {**served["emmy"], "parts": ["linears"]})


def test_another_pack_than_the_digest_names_is_refused(folder: Path, served: Mapping[str, Any]) -> None:
    with pytest.raises(PackError, match="another pack, or was built again"):
        configured(folder, {**served["emmy"], "digest": "0" * 64})


def test_a_damaged_pack_is_refused(folder: Path, served: Mapping[str, Any]) -> None:
    damaged = folder / "damaged.emmypack"
    damaged.write_bytes(Path(served["emmy"]["pack"]).read_bytes()[:-100])
    with pytest.raises(PackError, match="damaged"):
        configured(folder, {**served["emmy"], "pack": str(damaged)})


def test_two_batches_at_once_are_refused(folder: Path, served: Mapping[str, Any]) -> None:
    from emmy_vllm import configs

    config = configured(folder, served["emmy"])
    configs.refuse_overlap(config)
    config.parallel_config.enable_dbo = True
    with pytest.raises(UsageError, match="overlap two batches"):
        configs.refuse_overlap(config)


def test_on_a_gpu_the_deterministic_lane_and_vllms_batch_invariance_go_together(
    folder: Path, served: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from emmy_vllm import compat

    steady = {**served["emmy"], "deterministic": True}
    configured(folder, steady)
    monkeypatch.setattr(compat, "is_on_gpu", lambda: True)
    configured(folder, served["emmy"])
    with pytest.raises(UsageError, match="VLLM_BATCH_INVARIANT=1 alone: set it too"):
        configured(folder, steady)
    monkeypatch.setattr(compat, "is_batch_invariant", lambda: True)
    configured(folder, steady)
    with pytest.raises(UsageError, match='say "deterministic": true'):
        configured(folder, served["emmy"])


def test_an_unknown_vllm_is_refused_where_emmy_is_asked_for(
    folder: Path, served: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import VllmConfig

    from emmy_vllm import configs

    monkeypatch.setattr(
        VllmConfig, "__post_init__", VllmConfig.__post_init__
    )  # what follows wraps it, until the test ends
    configs.check_configurations.__wrapped__(configs.refuse_version("0.99.0"))
    configured(folder, None)
    with pytest.raises(EmmyError, match=r"vLLM 0\.99\.0: Emmy's plugin knows 0\.25 to 0\.33"):
        configured(folder, served["emmy"])


def test_graphs_are_keyed_by_pack_and_plugin(
    folder: Path, served: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from emmy_vllm import configs

    def key(emmy: object) -> str:
        return str(configured(folder, emmy).compute_hash())

    assert key(served["emmy"]) == key(served["emmy"])
    assert len({key(None), key(served["emmy"]), key({**served["emmy"], "deterministic": True})}) == 3
    mine = key(served["emmy"])
    monkeypatch.setattr(configs, "sources_digest", lambda: "of another Emmy")
    assert key(served["emmy"]) != mine
    assert len(mine) > len(key(None))  # without the plugin the same configuration has another key
