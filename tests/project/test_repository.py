"""What the repository promises about itself: reasons for its dependencies, a wheel that works, explained modules."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
MOST_BYTES = 9 << 20
USE_WHEEL = """\
import sys
sys.path.insert(0, {site!r})
import emmy_vllm
from emmy import config
from emmy.ir.target import load_target, target_names
from emmy.workloads import load, recorded
assert config.checkout() is None
assert len([load_target(name) for name in target_names() if name != "cpu-avx2"]) > 8
assert len(load("@gemma4-12b")) == 258
assert recorded.load("gemm.rtx3090").best_ms < 6
"""


def tracked() -> list[Path]:
    """The files git knows; skips the test where there is no git."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [path for name in listed.decode().split("\0") if name and (path := ROOT / name).is_file()]


def test_every_dependency_is_justified() -> None:
    required = PROJECT["dependencies"] + [r for extra in PROJECT["optional-dependencies"].values() for r in extra]
    names = {re.split(r"[<>=\[; ]", requirement)[0] for requirement in required}
    page = (ROOT / "docs" / "dependencies.md").read_text()
    used, _, _ = page.partition("## Considered")
    rows = " ".join(line.split("|")[1] for line in used.splitlines() if line.startswith("|"))
    assert {name for name in names if not re.search(rf"(^|[ ,|]){re.escape(name)}([ ,|=]|$)", rows)} == set()


def test_every_dependency_has_an_upper_bound() -> None:
    required = PROJECT["dependencies"] + [r for extra in PROJECT["optional-dependencies"].values() for r in extra]
    assert [r for r in required if "<" not in r and "==" not in r and not r.startswith("setuptools")] == []


def test_make_installs_the_torch_that_the_tests_ran_on() -> None:
    (pinned,) = (r for r in PROJECT["optional-dependencies"]["dev"] if r.startswith("torch"))
    assert f"TORCH := {pinned}\n" in MAKEFILE


def test_every_make_command_of_the_pages_is_a_target() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    named = {target for page in pages for target in re.findall(r"(?:`|^    )make ([a-z]+)", page.read_text(), re.M)}
    assert {"tune", "test"} <= named
    assert {target for target in named if f"\n{target}:" not in MAKEFILE} == set()


def test_every_module_says_what_it_is_for() -> None:
    modules = [m for m in (*ROOT.glob("emmy/**/*.py"), *ROOT.glob("plugin/**/*.py")) if m.stat().st_size]
    silent = [m for m in modules if not ast.get_docstring(ast.parse(m.read_text(encoding="utf-8")))]
    assert [str(m.relative_to(ROOT)) for m in silent] == []


def test_the_checkout_stays_small() -> None:
    assert sum(path.stat().st_size for path in tracked()) < MOST_BYTES


@pytest.mark.slow
def test_a_wheel_carries_the_data_and_works_outside_the_checkout(tmp_path: Path) -> None:
    source, out, site = tmp_path / "source", tmp_path / "out", tmp_path / "site"
    for path in tracked():
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(out), str(source)]
    subprocess.run(pip, check=True, capture_output=True)
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    script = tmp_path / "use.py"
    script.write_text(USE_WHEEL.format(site=str(site)))
    done = subprocess.run([sys.executable, "-I", str(script)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shipped = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    assert {"emmy/py.typed", "emmy/workloads/recorded/LICENSE", "emmy/ir/targets/cpu.toml"} <= shipped
    native = {path.name for path in (ROOT / "emmy" / "runtime").iterdir() if path.suffix in (".cpp", ".h")}
    assert {f"emmy/runtime/{name}" for name in native} <= shipped
    assert not any(name.startswith("tests/") for name in shipped)
