"""The vLLM that is here, found without importing it: which Python has it, which version, whether that Python has the plugin."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from emmy import config
from emmy.errors import ServingError

OLDEST, BELOW = (0, 25), (0, 34)  # the range the plugin is tested on; `emmy_vllm` refuses others too
RANGE = ">={}.{},<{}.{}".format(*OLDEST, *BELOW)
_ASK = """\
import importlib.metadata as m, json
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return ""
plugin = any(e.name == "emmy" for e in m.entry_points(group="vllm.general_plugins"))
print(json.dumps([version("vllm"), version("torch"), version("lm_eval"), plugin]))
"""


@dataclass(frozen=True, slots=True)
class Vllm:
    """A vLLM: the Python that runs it, versions ("" for what is not there), and whether that Python has Emmy's plugin."""

    python: str
    version: str
    torch: str
    lm_eval: str
    has_plugin: bool

    def command(self, *words: str) -> list[str]:
        """`vllm WORDS`, by the module that the script of that name runs: a bare folder of packages has no script."""
        return self.module("vllm.entrypoints.cli.main", *words)

    def module(self, name: str, *words: str) -> list[str]:
        """A module run as a program; a folder of its name where one happens to be is not taken for it."""
        return [self.python, "-P", "-m", name, *words]


def find_vllm(*, plugin: bool) -> Vllm:
    """The vLLM of the Python that runs Emmy, else that of the `vllm` on PATH. `plugin`: the plugin must be there too.

    Raises ServingError when there is none, its version is outside the tested range, or it lacks the plugin.
    """
    found = next((v for p in _pythons() if (v := _ask(p)) and v.version), None)
    if found is None:
        raise ServingError(
            f"vLLM is not installed for {sys.executable}, and PATH has no `vllm`. Install it where it is to run: pip install 'emmy[vllm]'"
        )
    version = re.match(r"(\d+)\.(\d+)", found.version)
    if version is None or not OLDEST <= (int(version[1]), int(version[2])) < BELOW:
        raise ServingError(
            f"{found.python} has vLLM {found.version}, this Emmy serves with {RANGE}. Install one: pip install 'vllm{RANGE}'"
        )
    if plugin and not found.has_plugin:
        raise ServingError(
            f"the Python of vLLM, {found.python}, does not have Emmy's plugin, so vLLM would serve without the pack. Install Emmy there: "
            f"{found.python} -m pip install {config.checkout() or 'emmy'}; or leave the pack out: --stock"
        )
    return found


def _pythons() -> Iterator[str]:
    yield sys.executable
    if script := shutil.which("vllm"):
        beside = Path(script).parent / "python"
        if beside.exists():
            yield str(beside)


def _ask(python: str) -> Vllm | None:
    done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True)
    if done.returncode:
        return None
    version, torch, lm_eval, has_plugin = json.loads(done.stdout.splitlines()[-1])
    return Vllm(python, version, torch, lm_eval, has_plugin)
