"""Named sets of cases: `@gemma4-12b` is all of them, `@gemma4-12b/q_proj*` those whose id matches. Knows no device."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from fnmatch import fnmatchcase

from emmy.errors import UsageError
from emmy.workloads import gemma4_12b
from emmy.workloads.gemma4_12b import Case

SETS: dict[str, Callable[[], tuple[Case, ...]]] = {"@gemma4-12b": gemma4_12b.cases}
# Sets of ops alone. The projections are those of a Gemma-4-12B layer, of a size that a CPU measures in seconds.
OPS: dict[str, tuple[str, ...]] = {
    "@projections": (
        "matmul:256x4096x3840:f32",  # q_proj
        "matmul:256x2048x3840:f32",  # kv_proj
        "matmul:256x3840x4096:f32",  # o_proj
        "matmul:256x512x3840:f32",  # k_proj of a global layer
        "matmul:256x3840x15360:f32",  # mlp_down
    )
}


def load(name: str) -> tuple[Case, ...]:
    """The cases of a set, in its order. Raises UsageError for an unknown set or a pattern that matches no case."""
    base, _, pattern = name.partition("/")
    if base not in SETS:
        raise UsageError(f"no workload is named {base!r}. Workloads: {', '.join((*SETS, *OPS))}")
    every = SETS[base]()
    found = tuple(case for case in every if fnmatchcase(case.id, pattern or "*"))
    if not found:
        close = difflib.get_close_matches(pattern, [case.id for case in every], n=3)
        hint = f" Close: {', '.join(close)}." if close else ""
        raise UsageError(f"{name!r}: none of the {len(every)} cases of {base} matches {pattern!r}.{hint}")
    return found


def op_texts(name: str) -> tuple[str, ...]:
    """The distinct ops of a set, in its order; cases that no op expresses yet are left out. Raises as `load` does."""
    if name in OPS:
        return OPS[name]
    texts = (case.op_text() for case in load(name))
    return tuple(dict.fromkeys(text for text in texts if text is not None))
