"""A vLLM that only seems to be one, installed in a folder of its own; a pack; an experiment of two lanes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from emmy.serving import process
from tests.pack.packs import cpu_pack

FAKE = Path(__file__).with_name("fake_vllm.py")
EXPERIMENT = """\
name = "tiny"
model = "tiny-model"
waves = 2
flags = ["--max-model-len", "512"]

[[point]]
input = 32
output = 8
concurrency = 2

[[lane]]
name = "stock"

[[lane]]
name = "emmy"
against = "stock"
pack = "p.emmypack"
"""


@dataclass(slots=True)
class Fake:
    """The vLLM that seems to be there. `calls`: how it was called, in order."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch

    def installs(self, version: str = "0.32.0", plugin: bool = True) -> None:
        cli = self.folder / "site" / "vllm" / "entrypoints" / "cli"
        cli.mkdir(parents=True, exist_ok=True)
        shutil.copy(FAKE, cli / "main.py")
        (self.folder / "site" / "vllm" / "benchmarks").mkdir(exist_ok=True)
        (self.folder / "site" / "vllm" / "benchmarks" / "serve.py").write_text("print('INFO: imported')\n")
        plugin_there = self.folder / "site" / "emmy_vllm"
        plugin_there.mkdir(exist_ok=True)
        shutil.copy(FAKE.with_name("fake_engine.py"), plugin_there / "engine.py")
        for name, about in (("vllm", version), ("emmy", "0.1.0")):
            info = self.folder / "site" / f"{name}-{about}.dist-info"
            info.mkdir(exist_ok=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {about}\n")
        entry = "[vllm.general_plugins]\nemmy = emmy_vllm:register\n" if plugin else ""
        (self.folder / "site" / "emmy-0.1.0.dist-info" / "entry_points.txt").write_text(entry)
        self.monkeypatch.setenv("PYTHONPATH", str(self.folder / "site"))
        self.behaves()

    def behaves(self, **wrongly: object) -> None:
        self.monkeypatch.setenv("FAKE_VLLM", json.dumps({"log": str(self.folder / "calls"), **wrongly}))

    @property
    def calls(self) -> list[dict[str, object]]:
        path = self.folder / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def order(self) -> list[str]:
        """serve stock, bench, stopped, ... as it happened."""

        def what(call: dict[str, object]) -> str:
            argv = call["argv"]
            assert isinstance(argv, list)
            lane = "emmy" if "--additional-config" in argv else "stock"
            return "stopped" if call.get("stopped") else f"serve {lane}" if argv[0] == "serve" else "bench"

        return [what(c) for c in self.calls]


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.setattr(process, "POLL_S", 0.02)
    fake = Fake(tmp_path, monkeypatch)
    fake.installs()
    return fake


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    return cpu_pack(tmp_path).rename(tmp_path / "p.emmypack")


@pytest.fixture
def experiment(tmp_path: Path, pack: Path) -> Callable[[str], Path]:
    """Writes the experiment, with more in it."""

    def write(more: str = "") -> Path:
        path = tmp_path / "tiny.toml"
        path.write_text(EXPERIMENT + more)
        return path

    return write
