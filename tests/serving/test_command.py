"""`vllm serve`'s command: flags verbatim, Emmy's key merged into the user's own, the pack's digest; the vLLM that is found."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from emmy.errors import PackError, ServingError, UsageError
from emmy.pack import Pack
from emmy.serving import installed
from emmy.serving.command import serve_words, using, value_of
from emmy.serving.installed import BELOW, OLDEST, RANGE, Vllm, find_vllm
from tests.serving.conftest import Fake

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ["--max-model-len", "4096", "-tp", "2", "--no-enable-prefix-caching", "--rope-scaling={}", "-O3"]


def test_stock_gets_the_flags_as_they_are_even_an_emmy_key() -> None:
    flags = [*FLAGS, "--additional-config", '{"emmy": 1}']
    assert serve_words("m", flags, None) == ["serve", "m", *flags]


def test_a_pack_adds_its_path_and_digest_after_the_flags(pack: Path) -> None:
    words = serve_words("m", FLAGS, using(pack))
    assert words[:-2] == ["serve", "m", *FLAGS]
    assert words[-2] == "--additional-config"
    assert json.loads(words[-1]) == {"emmy": {"pack": str(pack), "digest": Pack.open(pack).digest}}


@pytest.mark.parametrize("given", [["--additional-config", '{"a": 1}'], ['--additional_config={"a": 1}']])
def test_a_users_own_additional_config_is_merged(pack: Path, given: list[str]) -> None:
    words = serve_words("m", ["--a", *given, "--b"], using(pack, deterministic=True, parts=["linear"]))
    assert words[:4] == ["serve", "m", "--a", "--b"] and len(words) == 6
    merged = json.loads(words[-1])
    assert merged["a"] == 1 and merged["emmy"]["deterministic"] is True and merged["emmy"]["parts"] == ["linear"]


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--additional-config", '{"emmy": {}}'], "has the key"),
        (["--additional-config", "{"], "no JSON"),
        (["--additional-config", "[" * 99999], "no JSON"),
        (["--additional-config", "[1]"], "object is needed"),
        (["--additional-config.a", "1"], "as one JSON object"),
    ],
)
def test_what_cannot_be_merged_is_refused(pack: Path, flags: list[str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        serve_words("m", flags, using(pack))


def test_additional_config_in_a_config_file_would_be_lost_and_is_refused(pack: Path, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("port: 1\nadditional-config: '{}'\n")
    with pytest.raises(UsageError, match="Move it to"):
        serve_words("m", ["--config", str(file)], using(pack))


def test_a_missing_or_damaged_pack_is_refused_before_anything_starts(pack: Path, tmp_path: Path) -> None:
    with pytest.raises(PackError, match="emmy pack build"):
        using(tmp_path / "none.emmypack")
    pack.write_bytes(pack.read_bytes()[:-50])
    with pytest.raises(PackError):
        using(pack)


def test_the_last_value_of_a_flag_counts_in_either_spelling() -> None:
    assert value_of(["--port", "1", "--port=2"], "--port") == "2"
    assert value_of(["--served_model_name", "x"], "--served-model-name") == "x"
    assert value_of(["--port"], "--port") == "" and value_of([], "--port") is None


def test_a_vllm_is_found_without_importing_it(vllm: Fake) -> None:
    found = find_vllm(plugin=True)
    assert (found.python, found.version, found.has_plugin) == (sys.executable, "0.32.0", True)
    assert "vllm" not in sys.modules


@pytest.mark.parametrize("version", ["0.24.0", "0.34.0", "1.0.0", "nightly"])
def test_a_version_outside_the_tested_range_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(installed, "_ask", lambda python: Vllm(python, version, "2.11.0", "", True))
    with pytest.raises(ServingError, match=f"vLLM {version}.*0.25,<0.34"):
        find_vllm(plugin=False)


def test_a_vllm_without_the_plugin_serves_stock_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "_ask", lambda python: Vllm(python, "0.25.1", "2.11.0", "", False))
    assert not find_vllm(plugin=False).has_plugin
    with pytest.raises(ServingError, match=r"does not have Emmy's plugin.*-m pip install /"):
        find_vllm(plugin=True)


def test_the_vllm_on_path_serves_where_emmys_own_python_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("vllm", "python"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    there = str(tmp_path / "python")
    monkeypatch.setattr(installed, "_ask", lambda p: Vllm(p, "0.25.1" if p == there else "", "", "", True))
    assert find_vllm(plugin=True).command("serve")[:3] == [there, "-P", "-m"]


def test_no_vllm_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(installed, "_ask", lambda python: Vllm(python, "", "", "", False))
    with pytest.raises(ServingError, match=r"pip install 'emmy\[vllm\]'"):
        find_vllm(plugin=False)


def test_the_range_is_that_of_the_extra_and_of_the_plugin() -> None:
    said = re.search(
        r"OLDEST, NEWEST = \((\d+), (\d+)\), \((\d+), (\d+)\)", (ROOT / "plugin/emmy_vllm/configs.py").read_text()
    )
    assert said is not None
    oldest, newest = (int(said[1]), int(said[2])), (int(said[3]), int(said[4]))
    assert f'vllm = ["vllm{RANGE}"]' in (ROOT / "pyproject.toml").read_text()
    assert oldest == OLDEST and (newest[0], newest[1] + 1) == BELOW
