"""The command line in this process, and a home that a search without a device has filled."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from emmy import api, config
from emmy.cli import main
from emmy.ir.target import Target
from emmy.measure.fake import FakeMeasurer
from emmy.measure.measurer import Measurer
from emmy.records import Status

OP = "matmul:64x96x128:f32"


@dataclass(frozen=True, slots=True)
class Said:
    """What a command answered."""

    code: int
    out: str
    err: str

    @property
    def objects(self) -> list[dict[str, object]]:
        """stdout as the objects it must be with --json."""
        found = [json.loads(line) for line in self.out.splitlines()]
        assert all(o["v"] == 1 and isinstance(o["record"], str) for o in found)
        return found

    def of(self, record: str) -> list[dict[str, object]]:
        return [o for o in self.objects if o["record"] == record]


Emmy = Callable[..., Said]
FakeDevice = Callable[..., None]


@pytest.fixture(autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in config.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("EMMY_HOME", str(tmp_path_factory.mktemp("home")))
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # these homes need not survive a power cut


@pytest.fixture
def emmy(capsys: pytest.CaptureFixture[str]) -> Emmy:
    def run(*argv: str) -> Said:
        capsys.readouterr()
        code = main([str(a) for a in argv])
        return Said(code, *capsys.readouterr())

    return run


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Call it to have commands measure by formula; `faults` gives schedules another status."""

    def use(**faults: Status) -> None:
        @contextmanager
        def device(
            target: Target, threads: int, *, wait: bool = False, measurer: Measurer | None = None
        ) -> Iterator[Measurer]:
            yield FakeMeasurer(target.name, threads=threads, faults=faults)

        monkeypatch.setattr(api, "device", device)

    return use


@pytest.fixture(scope="session")
def tuned_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of one op, for tests that only read; take a copy to write."""
    home = tmp_path_factory.mktemp("tuned")
    api.tune(OP, budget="40", strategy="random", home=home, measurer=FakeMeasurer())
    return home


@pytest.fixture
def tuned(tuned_home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The home that commands use, with the rows of one op in it."""
    home = tmp_path / "home"
    shutil.copytree(tuned_home, home)
    monkeypatch.setenv("EMMY_HOME", str(home))
    return home
