"""Kernel IR -> C text, statement by statement, with the helpers it calls and the table the launcher reads.

Decides nothing: what a kernel does is all in its IR. Must not know plans, schedules or compilers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import assert_never

import numpy as np

from emmy.codegen import c_prelude
from emmy.codegen.kernel import (
    Buffer,
    Call,
    For,
    Given,
    If,
    Int,
    Kernel,
    LaneMax,
    LaneSum,
    Let,
    LetInt,
    Load,
    Num,
    Number,
    Ramp,
    Set,
    Splat,
    Stmt,
    Store,
    Transpose,
    Var,
    View,
    Whole,
    over,
    plus,
    show_int,
    times,
)
from emmy.ir.dtype import DType, size_bytes

_C_TYPE: dict[DType, str] = {"f32": "float", "f16": "uint16_t", "bf16": "uint16_t", "i32": "int32_t"}
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}


def emit(kernels: tuple[Kernel, ...]) -> str:
    """One self-contained C file: every launch of a plan, and `emmy_plan`, which lists them."""
    return "\n".join([functions(kernels), _table(kernels)])


def emit_several(plans: Sequence[tuple[Kernel, ...]], names: Sequence[str]) -> str:
    """One C file of several plans, kernels bearing different names, and a table NAME of each, seen in this file alone."""
    tables = [
        _table(kernels, f"_{name}", f"static const EmmyPlan {name}") for kernels, name in zip(plans, names, strict=True)
    ]
    return "\n".join([functions(tuple(k for kernels in plans for k in kernels)), *tables])


def functions(kernels: tuple[Kernel, ...]) -> str:
    """A C function for each kernel, behind the helpers that they call and the types of `emmy/runtime/plan.h`."""
    printers = [_Printer(k) for k in kernels]
    bodies = [p.function() for p in printers]
    lanes = sorted({n for p in printers for n in p.lanes})
    squares = sorted({s for p in printers for s in p.squares})
    parts = [
        c_prelude.SCALARS,
        *(c_prelude.vectors(n) for n in lanes),
        *(c_prelude.transpose(n, d) for n, d in squares),
        *(c_prelude.largest(n) for n in sorted({n for p in printers for n in p.largest})),
    ]
    header = (resources.files("emmy") / "runtime" / "plan.h").read_text(encoding="utf-8")
    return "\n".join([header, *parts, *bodies])


def _type(lanes: int) -> str:
    return "float" if lanes == 1 else f"f32x{lanes}"


@dataclass(slots=True)
class _Printer:
    k: Kernel
    dtypes: dict[str, DType] = field(default_factory=dict)
    lanes: set[int] = field(default_factory=set)
    squares: set[tuple[int, DType]] = field(default_factory=set)
    largest: set[int] = field(default_factory=set)  # lanes of vectors of which the largest is taken

    def function(self) -> str:
        k = self.k
        used = _views(k.body)
        lines = [f"static void {k.name}(const EmmyArgs *args, int64_t block) {{"]
        for i, b in enumerate(k.buffers):
            self.dtypes[b.name] = b.dtype
            if b.name in used:
                const = "const " if b.role == "input" else ""
                lines.append(f"  {const}{_C_TYPE[b.dtype]} *restrict {b.name} = args->buffers[{i}];")
        lines += [f"  const int64_t len_{s} = args->syms[{i}];" for i, s in enumerate(k.syms)]
        at: Whole = Int(0)
        for s in k.scratch:
            self.dtypes[s.name] = "f32"
            lines.append(f"  float *restrict {s.name} = (float *)args->scratch + {show_int(at, 4)};")
            at = plus(at, lines_of(s.elements))
        lines += [line for x in k.body for line in self.stmt(x, "  ")]
        return "\n".join([*lines, "}", "", *self._facts(at)])

    def _facts(self, scratch: Whole) -> list[str]:
        out = []
        for name, value in (
            (f"{self.k.name}_blocks", self.k.blocks),
            (f"{self.k.name}_scratch_bytes", times(scratch, Int(4))),
        ):
            out += [
                f"static int64_t {name}(const int64_t *syms) {{",
                *_sizes(self.k.syms),
                f"  return {show_int(value)};",
                "}",
            ]
        return out

    def stmt(self, s: Stmt, pad: str) -> list[str]:
        match s:
            case LetInt(name, whole):
                return [f"{pad}const int64_t {name} = {show_int(whole)};"]
            case Let(name, x):
                self._use(x.lanes)
                return [f"{pad}{_type(x.lanes)} {name} = {self.number(x)};"]
            case Set(name, x):
                return [f"{pad}{name} = {self.number(x)};"]
            case View(name, of, at):
                self.dtypes[name] = self.dtypes[of]
                const = "const " if self._constant(of) else ""
                return [f"{pad}{const}{_C_TYPE[self.dtypes[of]]} *{name} = {self._address(of, at)};"]
            case Store(view, at, x, count):
                return [f"{pad}{self._store(view, at, x, count)}"]
            case Transpose(to, to_at, to_pitch, of, of_at, of_pitch, lanes):
                dtype = self.dtypes[of]
                self._use(lanes)
                self.squares.add((lanes, dtype))
                target, origin = self._address(to, to_at), self._address(of, of_at)
                return [
                    f"{pad}transpose_{dtype}x{lanes}({target}, {show_int(to_pitch)}, {origin}, {show_int(of_pitch)});"
                ]
            case For(var, lo, hi, step, body):
                by = f"++{var}" if step == 1 else f"{var} += {step}"
                inner = [line for b in body for line in self.stmt(b, pad + "  ")]
                return [
                    f"{pad}for (int64_t {var} = {show_int(lo)}; {var} < {show_int(hi, 4)}; {by}) {{",
                    *inner,
                    f"{pad}}}",
                ]
            case If(cond, then, other):
                out = [f"{pad}if ({show_int(cond)}) {{", *(line for b in then for line in self.stmt(b, pad + "  "))]
                if other:
                    out += [f"{pad}}} else {{", *(line for b in other for line in self.stmt(b, pad + "  "))]
                return [*out, f"{pad}}}"]
            case _:
                assert_never(s)

    def number(self, x: Number, outer: int = 0) -> str:  # noqa: C901  one case a number
        match x:
            case Num(v, lanes):
                self._use(lanes)
                text = _literal(v)
                return text if lanes == 1 else f"splat_f32x{lanes}({text})"
            case Var(name):
                return name
            case Load():
                return self._load(x)
            case Splat(a, lanes):
                self._use(lanes)
                return f"splat_f32x{lanes}({self.number(a)})"
            case Ramp(start, lanes):
                self._use(lanes)
                return f"ramp_{_suffix(lanes)}({show_int(start)})"
            case Call("fma", (a, b, c)):
                text = f"{self.number(a, 2)} * {self.number(b, 2)} + {self.number(c, 1)}"
                return f"({text})" if outer else text
            case Call("neg", (a,)):
                return f"-{self.number(a, 3)}"
            case Call(fn, args) if fn in _INFIX:
                rank = 2 if fn in ("mul", "div") else 1
                text = f"{self.number(args[0], rank)} {_INFIX[fn]} {self.number(args[1], rank + 1)}"
                return f"({text})" if rank < outer else text
            case Call(fn, args):
                self._use(x.lanes)
                return f"{fn}_{_suffix(x.lanes)}({', '.join(self.number(a) for a in args)})"
            case LaneSum(a):
                return f"lane_sum_f32x{a.lanes}({self.number(a)})"
            case LaneMax(a):
                self.largest.add(a.lanes)
                return f"lane_max_f32x{a.lanes}({self.number(a)})"
            case Given(cond, a, b, _):
                return f"({show_int(cond)} ? {self.number(a)} : {self.number(b)})"
            case _:
                assert_never(x)

    def _load(self, x: Load) -> str:
        dtype = self.dtypes[x.view]
        if x.lanes == 1:
            element = f"{x.view}[{show_int(x.at)}]"
            return element if dtype == "f32" else f"{dtype}_to_f32({element})"
        self._use(x.lanes)
        where, kind = self._address(x.view, x.at), f"{dtype}x{x.lanes}"
        if x.stride != Int(1):
            count = Int(x.lanes) if x.count is None else x.count
            return f"gather_{kind}({where}, {show_int(x.stride)}, {show_int(count)})"
        return f"load_{kind}({where})" if x.count is None else f"load_some_{kind}({where}, {show_int(x.count)})"

    def _store(self, view: str, at: Whole, x: Number, count: Whole | None) -> str:
        dtype = self.dtypes[view]
        if x.lanes == 1:
            value = self.number(x)
            return f"{view}[{show_int(at)}] = {value if dtype == 'f32' else f'f32_to_{dtype}({value})'};"
        self._use(x.lanes)
        where, kind = self._address(view, at), f"{dtype}x{x.lanes}"
        if count is None:
            return f"store_{kind}({where}, {self.number(x)});"
        return f"store_some_{kind}({where}, {self.number(x)}, {show_int(count)});"

    def _address(self, view: str, at: Whole) -> str:
        return view if at == Int(0) else f"{view} + {show_int(at, 4)}"

    def _constant(self, view: str) -> bool:
        return any(b.name == view and b.role == "input" for b in self.k.buffers)

    def _use(self, lanes: int) -> None:
        if lanes > 1:
            self.lanes.add(lanes)


def lines_of(elements: Whole) -> Whole:
    """Elements of scratch rounded up to whole cache lines."""
    return times(over(plus(elements, Int(15)), Int(16)), Int(16))


def _suffix(lanes: int) -> str:
    return "f32" if lanes == 1 else f"f32x{lanes}"


def _literal(v: float) -> str:
    """The f32 nearest to v, so that C reads the same bits back."""
    x = np.float32(v)
    if np.isinf(x) or np.isnan(x):
        return {"inf": "INFINITY", "-inf": "-INFINITY"}.get(str(x), "NAN")
    return f"{x!s}f" if "." in str(x) or "e" in str(x) else f"{x!s}.0f"


def _sizes(syms: tuple[str, ...]) -> list[str]:
    return [f"  const int64_t len_{s} = syms[{i}];" for i, s in enumerate(syms)] or ["  (void)syms;"]


def _views(body: tuple[Stmt, ...]) -> set[str]:
    """Names of memory that the statements use."""
    return set(re.findall(r"(?:view|of|to)='(\w+)'", repr(body)))


def _table(kernels: tuple[Kernel, ...], suffix: str = "", declared: str = "const EmmyPlan emmy_plan") -> str:
    first = kernels[0]
    arguments = sum(b.is_argument for b in first.buffers)
    out = [
        f"static int64_t buffer_bytes{suffix}(const int64_t *syms, int32_t buffer) {{",
        *_sizes(first.syms),
        "  switch (buffer) {",
    ]
    out += [f"    case {i}: return {show_int(_bytes(b))};" for i, b in enumerate(first.buffers)]
    out += ["  }", "  return 0;", "}", "", f"static const EmmyLaunch launches{suffix}[{len(kernels)}] = {{"]
    out += [f'  {{"{k.name}", {k.name}, {k.name}_blocks, {k.name}_scratch_bytes}},' for k in kernels]
    out += ["};", "", _names(f"arguments{suffix}", tuple(b.name for b in first.buffers[:arguments]))]
    out += [_names(f"syms{suffix}", first.syms)]
    counts = f"{arguments}, {len(first.buffers)}, {len(first.syms)}, {len(kernels)}"
    held = ", ".join(f"{what}{suffix}" for what in ("arguments", "syms", "buffer_bytes", "launches"))
    out += [f"{declared} = {{EMMY_PLAN_VERSION, {counts}, {held}}};", ""]
    return "\n".join(out)


def _names(table: str, names: tuple[str, ...]) -> str:
    quoted = ", ".join([*(f'"{n}"' for n in names), "0"])
    return f"static const char *const {table}[] = {{{quoted}}};"


def _bytes(b: Buffer) -> Whole:
    return times(b.elements, Int(size_bytes(b.dtype)))
