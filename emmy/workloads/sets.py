"""Named sets of cases: `@gemma4-12b` is all of them, `@gemma4-12b/q_proj*` those whose id matches; `@config:PATH` those of
any dense decoder that a Hugging Face config.json describes. Knows no device.

    @config:PATH[:widths=1,8,64][:tp=2][:dtype=f16][:context=4096][:form=server][:only=qkv*,o_*]

A width may be a range: widths=1..4096. `form=server`: the products alone, as vLLM runs them, with merged weights (keys that
  are the values too are there once and twice, as vLLM has them).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from emmy.errors import UsageError, meant
from emmy.ir.dtype import DTYPES, DType
from emmy.ir.ops import parse_op
from emmy.workloads import gemma4_12b
from emmy.workloads.decoder_cases import WIDTHS, DecoderCase, Width, from_config
from emmy.workloads.gemma4_12b import Case

AnyCase = Case | DecoderCase
SETS: dict[str, Callable[[], tuple[AnyCase, ...]]] = {
    "@gemma4-12b": gemma4_12b.cases,
    "@gemma4-12b-server": gemma4_12b.server_cases,
}
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
CONFIG = "@config:"
_OPTIONS = ("widths", "tp", "dtype", "context", "form", "only")
_FORM = f"{CONFIG}PATH[:widths=1,8,1..4096][:tp=2][:dtype=f16][:context=4096][:form=server][:only=qkv*,o_*]"
_OPTION = re.compile(rf":(?={'|'.join(f'{o}=' for o in _OPTIONS)})")
_WIDTH = re.compile(r"([0-9]{1,9})(?:\.\.([0-9]{1,9}))?")


def load(name: str) -> tuple[AnyCase, ...]:
    """The cases of a set, in its order. Raises UsageError for an unknown set or a pattern that matches no case."""
    if name.startswith(CONFIG):
        return _of_config(name)
    base, _, pattern = name.partition("/")
    if base not in SETS:
        known = ", ".join((*SETS, *OPS, f"{CONFIG}PATH"))
        raise UsageError(f"no workload is named {base!r}.{meant(base, SETS)} Workloads: {known}")
    return _matching(name, base, SETS[base](), pattern)


def _matching(name: str, base: str, every: Sequence[AnyCase], pattern: str) -> tuple[AnyCase, ...]:
    patterns = (pattern or "*").split(",")
    found = tuple(case for case in every if any(fnmatchcase(case.id, p) for p in patterns))
    if not found:
        close = difflib.get_close_matches(pattern, [case.id for case in every], n=3)
        hint = f" Close: {', '.join(close)}." if close else ""
        raise UsageError(f"{name!r}: none of the {len(every)} cases of {base} matches {pattern!r}.{hint}")
    return found


def _of_config(name: str) -> tuple[AnyCase, ...]:
    """The cases that `@config:PATH` and its options name. Raises UsageError, for an option that cannot be read too."""
    path, *said = _OPTION.split(name.removeprefix(CONFIG))
    options = dict(word.split("=", 1) for word in said)
    if not path or len(options) != len(said):
        raise UsageError(f"{name!r} has not the form {_FORM}")
    widths = tuple(_width(name, w) for w in options["widths"].split(",")) if "widths" in options else WIDTHS
    tp, context = (_count(name, options, o, default) for o, default in (("tp", "1"), ("context", "0")))
    if options.get("form", "server") != "server":
        raise UsageError(f"{name!r}: form is {options['form']!r}; allowed is server, or nothing for every form")
    if ":" in path and not Path(path).exists():
        raise UsageError(f"there is no file or folder {path!r}. If its end was meant as options, they are {_FORM}")
    every = from_config(path, widths, tp, _dtype(name, options.get("dtype")), context)
    if "form" in options:
        every = tuple(case for case in every if case.is_served)
    return _matching(name, f"{CONFIG}{path}", every, options.get("only", ""))


def _count(name: str, options: dict[str, str], option: str, default: str) -> int:
    text = options.get(option, default)
    if not text.isdecimal() or len(text) > 9:
        raise UsageError(f"{name!r}: {option} is {text!r}; a number is needed")
    return int(text)


def _width(name: str, text: str) -> Width:
    hit = _WIDTH.fullmatch(text.strip())
    if not hit:
        raise UsageError(f"{name!r}: the width {text!r} is neither a number nor a range such as 1..4096")
    lo = int(hit[1])
    return lo if hit[2] is None else (lo, int(hit[2]))


def _dtype(name: str, text: str | None) -> DType | None:
    found = next((d for d in DTYPES if d == text), None)
    if text is not None and found is None:
        raise UsageError(f"{name!r}: dtype is {text!r}; allowed are {', '.join(DTYPES)}")
    return found


@dataclass(frozen=True, slots=True)
class NamedOp:
    """A case that has an op text; of an op that is named by its text alone `name` is that text."""

    name: str
    kind: str
    op: str  # its key


def named_ops(names: Sequence[str]) -> tuple[NamedOp, ...]:
    """The cases that texts of ops and names of sets stand for, in order. Raises UsageError as `load` and `parse_op` do."""
    out: list[NamedOp] = []
    for name in names:
        if name.startswith("@") and name not in OPS:
            listed = ((c.id, c.kind, text) for c in load(name) if (text := c.op_text()) is not None)
            out += [NamedOp(case, kind, parse_op(text).key) for case, kind, text in listed]
        else:
            ops = map(parse_op, OPS.get(name, (name,)))
            out += [NamedOp(op.key, op.kind, op.key) for op in ops]
    return tuple(dict.fromkeys(out))


def op_texts(name: str) -> tuple[str, ...]:
    """The distinct ops of a set, in its order; cases that no op expresses yet are left out. Raises as `load` does."""
    if name in OPS:
        return OPS[name]
    texts = (case.op_text() for case in load(name))
    return tuple(dict.fromkeys(text for text in texts if text is not None))
