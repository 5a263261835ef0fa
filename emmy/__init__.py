"""Emmy: name a computation and a device; it searches for a fast kernel, measures it, and keeps the winner.

    import emmy
    result = emmy.tune("matmul:512x1024x3840:f32", gpu="cpu", budget="60s")
    print(result.best.schedule, result.best.time_us, result.speedup)

Names are loaded when they are first used, so that importing Emmy costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emmy import api as api
    from emmy.api import bench, expand, explain, export, load, show, tune, verify
    from emmy.dynamo import compile, torch_op  # both need torch
    from emmy.errors import EmmyError
    from emmy.ir.ops import matmul, parse_op
    from emmy.ir.target import load_target

__version__ = "0.1.0"

__all__ = [
    "EmmyError", "bench", "compile", "expand", "explain", "export", "load", "load_target", "matmul", "parse_op", "show",
    "torch_op", "tune", "verify",
]  # fmt: skip

_ROOM = {
    "EmmyError": "emmy.errors",
    "compile": "emmy.dynamo",
    "load_target": "emmy.ir.target",
    "matmul": "emmy.ir.ops",
    "parse_op": "emmy.ir.ops",
    "torch_op": "emmy.dynamo",
} | dict.fromkeys(("bench", "expand", "explain", "export", "load", "show", "tune", "verify"), "emmy.api")


def __getattr__(name: str) -> object:
    if name == "api":  # what the verbs call that has no name here
        return import_module("emmy.api")
    if name not in _ROOM:
        raise AttributeError(f"module 'emmy' has no attribute {name!r}")
    return getattr(import_module(_ROOM[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
