"""The vLLM plugin where there is no vLLM: found by its entry point, cheap to import, and without effect."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import emmy_vllm
from emmy.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "vllm", "numpy", "duckdb", "lightgbm", "optuna", "emmy.search", "emmy.costmodel", "emmy.measure")


def test_the_declared_entry_point_is_a_function_without_arguments() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["emmy"].partition(":")
    assert getattr(import_module(module), name)() is None


def test_registering_imports_neither_torch_nor_the_tuner() -> None:
    program = f"import sys, emmy_vllm; emmy_vllm.register(); print([m for m in {HEAVY} if m in sys.modules])"
    path = f"{ROOT}:{ROOT / 'plugin'}"
    done = subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_without_vllm_it_says_so_and_may_be_called_again(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", logger="emmy.vllm"):
        emmy_vllm.register()
        emmy_vllm.register()
    assert [r.getMessage().endswith("nothing is changed") for r in caplog.records] == [True, True]


def test_emmy_disable_silences_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("EMMY_DISABLE", "1")
    with caplog.at_level("DEBUG", logger="emmy.vllm"):
        emmy_vllm.register()
    assert not caplog.records


def test_a_misspelt_switch_is_not_taken_for_consent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMMY_DISABLE", "ture")
    with pytest.raises(UsageError):
        emmy_vllm.register()
