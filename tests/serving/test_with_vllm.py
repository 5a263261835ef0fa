"""The commands with a real vLLM on this CPU: a tiny Gemma 4 of seeded random weights, a pack of its products, servers, engines, drafts."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from emmy.cli import main
from emmy.ir.ops import parse_op
from emmy.ir.target import load_target
from emmy.pack import Offer, Pack
from tests.pack.packs import won

pytestmark = pytest.mark.vllm
ROOT = Path(__file__).resolve().parents[2]
# (n, k) of the tiny model's merged weights: qkv, that of the global layer, o, that of the global layer and down, gate_up, lm_head.
PRODUCTS = ((512, 256), (768, 256), (256, 256), (256, 512), (1024, 256))
FLAGS = [
    "--load-format", "emmy_random", "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "8", "--enforce-eager",
    "--gpu-memory-utilization", "0.2", "--no-enable-prefix-caching",
]  # fmt: skip
Out = pytest.CaptureFixture[str]


def shaped() -> ModuleType:
    spec = importlib.util.spec_from_file_location("shaped_model", ROOT / "experiments" / "serving" / "shaped_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", autouse=True)
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Children find Emmy and its entry point as if it were installed; vLLM downloads nothing and keeps its caches here."""
    site = tmp_path_factory.mktemp("site")
    info = site / "emmy-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: emmy\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nemmy = emmy_vllm:register\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(
            "VLLM_ENABLE_V1_MULTIPROCESSING", raising=False
        )  # engines in tests of the plugin run in pytest's process
        patch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'plugin'}:{site}")
        for name, value in {
            "EMMY_CACHE": str(tmp_path_factory.getbasetemp() / "emmy"), "VLLM_CACHE_ROOT": str(tmp_path_factory.getbasetemp() / "vllm"),
            "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
        }.items():  # fmt: skip
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = shaped()
    folder: Path = made.write_model(tmp_path_factory.mktemp("model"), made.SHAPES["gemma-4-tiny"])
    return folder


@pytest.fixture(scope="module")
def drafter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that drafts tokens from the tiny one's last hidden states, Gemma 4's way: Q projections alone, keys of the other model."""
    made = shaped()
    text = {
        **made.SHAPES["gemma-4-tiny"],
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    text = {**text, "vocab_size_per_layer_input": 0}
    del text["architectures"]
    config = {
        "model_type": "gemma4_assistant", "architectures": ["Gemma4AssistantForCausalLM"], "text_config": text,
        "backbone_hidden_size": text["hidden_size"], "tie_word_embeddings": True, "dtype": "float32",
    }  # fmt: skip
    folder: Path = made.write_model(tmp_path_factory.mktemp("drafter"), config)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((model / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def served(environment: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack that has every product of the model, for any number of rows."""
    path = tmp_path_factory.mktemp("pack") / "tiny.emmypack"
    ops = [f"matmul:m(1..512)x{n}x{k}:f32:nk" for n, k in PRODUCTS]
    Pack.build(
        [Offer(parse_op(op), "m", (won(op, "k0/split(n,core,64)", "cpu", 1, 512),)) for op in ops],
        path,
        load_target("cpu"),
    )
    return path


def said(out: Out) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.readouterr().out.splitlines()]


def agreement(model: Path, out: Out, *more: str) -> list[dict[str, Any]]:
    words = [
        "bench",
        "quality",
        str(model),
        "--lengths",
        "3,70",
        "--batches",
        "1,4",
        "--context",
        "20",
        "--steps",
        "6",
        "--json",
    ]
    assert main([*words, *more, *FLAGS[2:], "--load-format", "emmy_random"]) == 0
    return said(out)


@pytest.mark.slow
def test_stock_agrees_with_itself_bit_by_bit(model: Path, capsys: Out) -> None:
    found = agreement(model, capsys)
    assert [a["case"] for a in found] == ["prefill 3", "prefill 70", "decode 1", "decode 4"]
    assert all((a["max_abs"], a["kl_max"], a["top1"]) == (0.0, 0.0, 1.0) for a in found)


def test_a_pack_says_the_same_within_rounding(model: Path, served: Path, capsys: Out, tmp_path: Path) -> None:
    found = agreement(model, capsys, "--pack", str(served), "--out", str(tmp_path))
    assert all(a["max_abs"] < 1e-3 and a["top1"] == 1.0 for a in found)
    assert [a["same_tokens"] for a in found] == ["", "", "1 of 1", "4 of 4"]
    assert any(a["max_abs"] > 0 for a in found), "the pack's kernels were not used"


@pytest.mark.slow
def test_lanes_in_process_take_turns_on_one_machine(model: Path, served: Path, capsys: Out, tmp_path: Path) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text(
        f'name = "tiny"\nmodel = "{model}"\n[[lane]]\nname = "stock"\ndtype = "float32"\n'
        f'[[lane]]\nname = "emmy"\ndtype = "float32"\nagainst = "stock"\npack = "{served}"\n'
        "[offline]\nprefill = [32]\ndecode = [2]\ncontext = 8\nsteps = 4\nrounds = 3\nmemory = 0.3\n"
    )
    words = ["bench", "serving", str(path), "--offline", "--out", str(tmp_path / "out"), "--json"]
    assert main([*words, *FLAGS]) == 0
    found = {(r["point"], r["lane"]): r for r in said(capsys)}
    assert (
        len(found) == 4 and found["decode 2", "emmy"]["figures"]["ms"] > 0 and found["decode 2", "emmy"]["ratios"]["ms"]
    )


def test_an_experiment_runs_through_real_servers(model: Path, served: Path, capsys: Out, tmp_path: Path) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text(
        f'name = "tiny"\nmodel = "{model}"\n[[point]]\ninput = 16\noutput = 64\nconcurrency = 2\n'
        f'[[lane]]\nname = "stock"\ndtype = "float32"\n[[lane]]\nname = "emmy"\ndtype = "float32"\nagainst = "stock"\npack = "{served}"\n'
    )
    words = ["bench", "serving", str(path), "--out", str(tmp_path / "out"), "--most-output", "8", "--json"]
    assert main([*words, *FLAGS]) == 0
    stock, emmy = said(capsys)
    assert (stock["point"], stock["note"], emmy["lane"]) == ("16/64@2", "output 8 instead of 64", "emmy")
    assert emmy["figures"]["tpot_p50_ms"] > 0 and emmy["ratios"]["ttft_p50_ms"]


@pytest.mark.slow
def test_tokens_that_a_drafter_proposes_are_served_with_the_plugin_on(
    model: Path, drafter: Path, served: Path, capsys: Out
) -> None:
    """Multi-token prediction: the lm_head gets several rows a request, and the drafter's layers are the plugin's too."""
    drafts = json.dumps({"method": "mtp", "model": str(drafter), "num_speculative_tokens": 2})
    words = [
        "serve",
        str(model),
        "--pack",
        str(served),
        "--bench",
        "16/8@2x4",
        "--json",
        "--speculative-config",
        drafts,
    ]
    assert main([*words, *FLAGS]) == 0
    command, point = said(capsys)
    assert command["digest"] == Pack.open(served).digest and point["output_tokens_per_s"] > 0


def test_an_engine_in_process_understands_flags_as_the_server_does(tmp_path: Path) -> None:
    from emmy_vllm.engine import engine_args

    flags = ["--port", "1", "-O1", "--max_model_len", "64", "-cc.cudagraph_mode=PIECEWISE", "--max-num-seqs=3"]
    made = engine_args(str(tmp_path), flags)
    assert (made.model, made.skip_tokenizer_init) == (str(tmp_path), True)
    assert (made.max_model_len, made.max_num_seqs, int(made.optimization_level)) == (64, 3, 1)
    assert made.compilation_config.cudagraph_mode.name == "PIECEWISE"
