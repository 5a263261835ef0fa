"""GPU Kernel IR -> CUDA C++ text, statement by statement. Decides nothing: what a kernel does is all in its IR.

The text includes no header and holds no inline assembly: whatever is not arithmetic is a call of a helper `emmy_...`,
whose definitions are printed before the kernels by the caller.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import assert_never

from emmy.codegen.kernel import (
    Call,
    Given,
    Int,
    IntLoad,
    IntOp,
    IntVar,
    Let,
    LetInt,
    Load,
    Num,
    Number,
    Ramp,
    Set,
    Store,
    Var,
    View,
    Whole,
    show_int,
)
from emmy.codegen.kernel_gpu import (
    BLOCK,
    ELECTED,
    ROLLED,
    SMEM,
    THREAD,
    UNROLL,
    WARP_INDEX,
    Arg,
    Do,
    For,
    Further,
    GpuKernel,
    If,
    LetAny,
    LetFrom,
    LetUniform,
    LetWide,
    MapRef,
    Ref,
    Regs,
    SetInt,
    Stmt,
    walk,
)
from emmy.errors import PlanError
from emmy.ir.dtype import DType

_WORD_OF = re.compile(r"\b[a-z]+\b")
_AGENTS = {WARP_INDEX: "emmy_warp_index", ELECTED: "emmy_elect"}
_TYPE: dict[DType, str] = {"f32": "float", "f16": "u16", "bf16": "u16", "i32": "int"}
_WORD = {"f32": "float", "b32": "u32", "b16": "u16"}
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_COMPARE = {"lt": "<", "le": "<="}
_BUILT_IN = {
    "fma": "fmaf", "maximum": "fmaxf", "minimum": "fminf", "sqrt": "sqrtf", "as_f32": "__uint_as_float", "as_b32": "__float_as_uint",
}  # fmt: skip


def emit(kernels: tuple[GpuKernel, ...]) -> str:
    """The kernels as text, without the helpers they call."""
    return "\n\n".join(_Printer(k).function() for k in kernels) + "\n"


@dataclass(slots=True)
class _Printer:
    k: GpuKernel
    types: dict[str, str] = field(default_factory=dict)  # view -> type of the pointer

    def function(self) -> str:
        k = self.k
        params = [f"EMMY_TENSORMAP({m.name})" for m in k.maps]
        for b in k.buffers:
            self.types[b.name] = f"{'const ' if b.role == 'input' else ''}{_TYPE[b.dtype]}*"
            params.append(f"{self.types[b.name]} __restrict__ {b.name}")
        params += [f"int {s}" for s in k.syms]
        head = f"EMMY_KERNEL({k.threads}, {k.min_blocks}) {k.name}({', '.join(params)}) {{"
        smem = [f"  EMMY_SMEM({SMEM});"] if k.smem_bytes else []
        agents = [f"  const int {THREAD.name} = threadIdx.x, {BLOCK.name} = blockIdx.x;"]
        body = self._body(k.body, "  ")
        named = {word for line in body for word in _WORD_OF.findall(line)}
        agents += [f"  const int {x.name} = {helper}();" for x, helper in _AGENTS.items() if x.name in named]
        return "\n".join([head, *smem, *agents, *body, "}"])

    def _body(self, body: tuple[Stmt, ...], pad: str) -> list[str]:
        return [line for s in body for line in self._stmt(s, pad)]

    def _stmt(self, s: Stmt, pad: str) -> list[str]:  # noqa: C901  one case a statement
        match s:
            case LetInt(name, x):
                const = "" if name in self._changed else "const "
                return [f"{pad}{const}int {name} = {_whole(x)};"]
            case LetUniform(name, x):
                return [f"{pad}const int {name} = emmy_uniform({_whole(x)});"]
            case LetFrom(name, helper, args):
                return [f"{pad}const int {name} = {helper}({', '.join(_arg(a) for a in args)});"]
            case LetAny(name, number):
                return [f"{pad}const int {name} = emmy_any({_number(number)});"]
            case LetWide(name, helper, args):
                return [f"{pad}const u64 {name} = {helper}({', '.join(_arg(a) for a in args)});"]
            case SetInt(name, x):
                return [f"{pad}{name} = {_whole(x)};"]
            case Let(name, number):
                return [f"{pad}float {name} = {_number(number)};"]
            case Set(name, number):
                return [f"{pad}{name} = {_number(number)};"]
            case View(name, of, at):
                self.types[name] = self.types[of]
                return [f"{pad}{self.types[of]} const {name} = {of} + {_whole(at, 4)};"]
            case Store(view, at, number):
                return [f"{pad}{view}[{_whole(at)}] = {_number(number)};"]
            case Regs(name, kind, count):
                return [f"{pad}{_WORD[kind]} {name}[{count}];"]
            case Do(helper, args):
                return [f"{pad}{helper}({', '.join(_arg(a) for a in args)});"]
            case For(var, lo, hi, step, inner, unroll):
                times = {UNROLL: "", ROLLED: " 1"}.get(unroll, f" {unroll}")
                how = [] if unroll == 1 else [f"{pad}#pragma unroll{times}"]
                move = f"++{var}" if step == 1 else f"{var} += {step}"
                loop = f"{pad}for (int {var} = {_whole(lo)}; {var} < {_whole(hi, 4)}; {move})"
                return [*how, *self._braced(loop, inner, pad)]
            case If(cond, then):
                return self._braced(f"{pad}if ({_whole(cond)})", then, pad)
            case _:
                assert_never(s)

    def _braced(self, head: str, body: tuple[Stmt, ...], pad: str) -> list[str]:
        lines = self._body(body, pad + "  ")
        return [f"{head} {lines[0].strip()}"] if len(lines) == 1 else [f"{head} {{", *lines, f"{pad}}}"]

    @property
    def _changed(self) -> set[str]:
        return {s.name for s in walk(self.k.body) if isinstance(s, SetInt)}


def _whole(x: Whole, outer: int = 0) -> str:
    return show_int(x, outer).replace("imin(", "min(").replace("imax(", "max(")  # CUDA has both for int


def _arg(x: Arg) -> str:
    match x:
        case Ref(view, at):
            return view if at == Int(0) else f"{view} + {_whole(at, 4)}"
        case MapRef(name):
            return f"&{name}"
        case Further(word, by):
            return word if by == Int(0) else f"emmy_desc_step({word}, {_whole(by)})"
        case Int() | IntVar() | IntOp() | IntLoad():
            return _whole(x)
        case _:
            return _number(x)


def _number(x: Number) -> str:  # noqa: C901  one case a number
    match x:
        case Num(v):
            return _constant(v)
        case Var(name):
            return name
        case Load(view, at):
            return f"{view}[{_whole(at)}]"
        case Ramp(start):
            return f"float({_whole(start)})"
        case Given(cond, a, b, _):
            return f"({_whole(cond)} ? {_number(a)} : {_number(b)})"
        case Call(fn, (a, b)) if fn in _INFIX:
            return f"({_number(a)} {_INFIX[fn]} {_number(b)})"
        case Call(fn, (a, b)) if fn in _COMPARE:
            return f"({_number(a)} {_COMPARE[fn]} {_number(b)} ? 1.0f : 0.0f)"
        case Call("where", (cond, a, b)):
            return f"({_number(cond)} != 0.0f ? {_number(a)} : {_number(b)})"
        case Call("join16", (a, b)):
            return f"({_number(a)} | (u32){_number(b)} << 16)"
        case Call("low_halves" | "high_halves" as fn, (a, b)):
            return f"__byte_perm({_number(a)}, {_number(b)}, {'0x5410' if fn == 'low_halves' else '0x7632'})"
        case Call("from_i32", (a,)):
            return f"float(int({_number(a)}))"
        case Call("neg", (a,)):
            return f"(-{_number(a)})"
        case Call(fn, args):
            return f"{_BUILT_IN.get(fn, f'emmy_{fn}')}({', '.join(_number(a) for a in args)})"
        case _:
            raise PlanError(f"a GPU thread has no vectors of numbers: {x}")


def _constant(v: float) -> str:
    text = repr(float(v))
    return f"{text}f" if v >= 0 else f"({text}f)"
