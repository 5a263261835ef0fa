"""The only reader of the environment: where data and caches live, and the few switches. Knows not what is stored.

Every variable is listed in `VARIABLES`; a bad value raises UsageError rather than being ignored.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from emmy.errors import UsageError

VARIABLES: dict[str, str] = {
    "EMMY_HOME": "folder of measurements; default: the checkout's datasets/, else the user's data folder",
    "EMMY_CACHE": "folder of compiled kernels; default: the user's cache folder",
    "EMMY_CC": "C compiler for the CPU target; default: gcc",
    "EMMY_CXX": "C++ compiler for the launcher; default: g++",
    "EMMY_FAST_MATH": "1: sums of f16 products in f16, promoted to f32 (hybrid), where a schedule does so; default: in f32 alone",
    "EMMY_DISABLE": "1: the vLLM plugin does nothing",
    "NO_COLOR": "any text: no colour in terminal output",
}

# For processes beside each other that multiply small matrices: with a thread a core each, they hold each other up by minutes.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})


def home() -> Path:
    """The folder measurements live in; it may not exist yet. Raises UsageError when it is a file."""
    if (named := _folder("EMMY_HOME")) is not None:
        return named
    if (root := checkout()) is not None:
        return root / "datasets"
    import platformdirs  # only an installed Emmy needs it

    return Path(platformdirs.user_data_dir("emmy", appauthor=False))


def cache_dir() -> Path:
    """The folder compiled kernels are cached in; it may not exist yet. Raises UsageError when it is a file."""
    if (named := _folder("EMMY_CACHE")) is not None:
        return named
    import platformdirs

    return Path(platformdirs.user_cache_dir("emmy", appauthor=False))


def uses_shipped() -> bool:
    """False when EMMY_SHIPPED=0: rows and models that come with Emmy are left out, as if it came with none."""
    return os.environ.get("EMMY_SHIPPED", "1") != "0"


def checkout() -> Path | None:
    """The root of the source checkout this Emmy is imported from, or None when it is installed."""
    root = Path(__file__).resolve().parent.parent
    project = root / "pyproject.toml"
    # A folder of installed packages has no pyproject.toml; a project that vendors Emmy has one of another name.
    if project.is_file() and 'name = "emmy"' in project.read_text(encoding="utf-8"):
        return root
    return None


def c_compiler() -> str:
    """The command that compiles C for the CPU target."""
    return os.environ.get("EMMY_CC") or "gcc"


def cxx_compiler() -> str:
    """The command that compiles the C++ launcher."""
    return os.environ.get("EMMY_CXX") or "g++"


def disabled() -> bool:
    """Whether the vLLM plugin is told to do nothing. Raises UsageError when EMMY_DISABLE is not a yes or a no."""
    return _switch("EMMY_DISABLE", "leave the plugin enabled")


def fast_math() -> bool:
    """Whether sums are to be hybrid where they can be. Raises UsageError when EMMY_FAST_MATH is not a yes or a no."""
    return _switch("EMMY_FAST_MATH", "keep sums in f32")


def _switch(variable: str, without: str) -> bool:
    raw = os.environ.get(variable, "")
    text = raw.strip().lower()
    if text not in _TRUE | _FALSE:
        raise UsageError(f"{variable} is {raw!r}, allowed are 1 and 0. Unset it to {without}.")
    return text in _TRUE


def no_color() -> bool:
    """Whether terminal output is to be free of colour: NO_COLOR is set to anything but the empty text."""
    return bool(os.environ.get("NO_COLOR"))


def child_env(**changes: str) -> dict[str, str]:
    """This process's environment with `changes` laid over it, for a process about to be started."""
    return {**os.environ, **changes}


@contextmanager
def inherited(**changes: str) -> Iterator[None]:
    """`changes` laid over this process's environment meanwhile, for a pool of processes, which takes none of its own."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _folder(variable: str) -> Path | None:
    """The folder `variable` names, made absolute; None when it is unset or empty."""
    raw = os.environ.get(variable, "")
    if not raw:
        return None
    path = Path(raw).expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise UsageError(f"{variable} is {raw!r}, which is not a folder. Name a folder, or unset it for the default.")
    return path
