"""Kernel IR of GPUs: what one thread of a block does, in the whole numbers and f32 numbers of `kernel`.

A thread has arrays of registers (indexed by constants once loops are unrolled), pointers into buffers, and the block's
shared memory, addressed in bytes. Whatever is not arithmetic is `Do`: a helper by name, with its arguments.
`emmy.codegen.cuda` prints a kernel as CUDA C++, statement by statement. Knows no plan, no schedule and no target.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from emmy.codegen.kernel import (
    Buffer,
    Call,
    Given,
    Int,
    IntLoad,
    IntOp,
    IntVar,
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
    Store,
    Var,
    View,
    Whole,
    show_int,
)

SMEM = "smem"  # the block's shared memory; positions in it are bytes
THREAD = IntVar("thread")  # its number in the block
WARP_INDEX = IntVar("warp")  # its warp's number in the block, known to be one number for all lanes
ELECTED = IntVar("elected")  # 1 in one lane of each warp, known to be the only one; the same lane throughout
BLOCK = IntVar("block")  # its number in the launch
UNROLL = -1  # For.unroll: write out every iteration
ROLLED = 0  # For.unroll: write out one, whatever the compiler thinks


@dataclass(frozen=True, slots=True)
class Ref:
    """The address of element `at` of a view, of a register array, or of byte `at` of shared memory."""

    view: str
    at: Whole


@dataclass(frozen=True, slots=True)
class MapRef:
    """The address of a tensor map that the launch was given."""

    name: str


@dataclass(frozen=True, slots=True)
class Regs:
    """A new array of registers, holding nothing: f32 numbers, or raw words (of two 16-bit elements, or of one)."""

    name: str
    kind: Literal["f32", "b32", "b16"]
    count: int


@dataclass(frozen=True, slots=True)
class SetInt:
    name: str
    value: Whole


@dataclass(frozen=True, slots=True)
class LetUniform:
    """A new whole number that is the same in all lanes of a warp, which the compiler is told."""

    name: str
    value: Whole


@dataclass(frozen=True, slots=True)
class LetFrom:
    """A new whole number that a helper returns."""

    name: str
    helper: str
    args: tuple[Arg, ...]


@dataclass(frozen=True, slots=True)
class LetAny:
    """A new whole number that is the same in all lanes of a warp: whether a number is not 0 in any of them."""

    name: str
    value: Number


@dataclass(frozen=True, slots=True)
class LetWide:
    """A new 64-bit word that a helper makes, such as the descriptor of an operand in shared memory."""

    name: str
    helper: str
    args: tuple[Arg, ...]


@dataclass(frozen=True, slots=True)
class Further:
    """A descriptor, so many bytes further on."""

    word: str
    by: Whole


@dataclass(frozen=True, slots=True)
class Do:
    """A helper does something; constants that it needs at compile time stand in its name: `emmy_cp_async_wait<1>`."""

    helper: str
    args: tuple[Arg, ...] = ()


@dataclass(frozen=True, slots=True)
class For:
    """Walk var from lo while it is below hi; `unroll` iterations are written out, all of them when UNROLL.

    With 1 the compiler may write out more; with ROLLED it may not.
    """

    var: str
    lo: Whole
    hi: Whole
    step: int
    body: tuple[Stmt, ...]
    unroll: int = 1


@dataclass(frozen=True, slots=True)
class If:
    cond: Whole
    then: tuple[Stmt, ...]


Arg = Ref | MapRef | Further | Whole | Number
Stmt = LetInt | LetUniform | LetFrom | LetAny | LetWide | SetInt | Let | Set | View | Store | Regs | Do | For | If


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A parameter that tells the copy engine a matrix: rows of `value`, boxes of rows x columns, zeros outside.

    swizzle: how many bits of the row are XORed into the 16-byte chunk's number (0 none, 1 to 3: 32, 64, 128 bytes).
    panels:  0, or a box is so many of them, each box_columns of all its rows: a third dimension, by whole panels of the matrix.
    pitch:   elements from one row to the next, where rows do not follow one another.
    outer:   further dimensions, of which a box has one position: (positions, elements from one to the next).
    endless: positions of the last of them are told by a table: a launcher need not know how many there are.
    """

    name: str
    value: str
    rows: Whole
    columns: Whole
    box_rows: int
    box_columns: int
    swizzle: int
    panels: int = 0
    pitch: Whole | None = None
    outer: tuple[tuple[Whole, Whole], ...] = ()
    endless: bool = False

    @property
    def rank(self) -> int:
        return 2 + bool(self.panels) + len(self.outer)


@dataclass(frozen=True, slots=True)
class GpuKernel:
    """One launch of `blocks` x `threads`. Its parameters: tensor maps, then buffers, then sizes of symbols (32-bit).

    cluster: so many neighbouring blocks form a cluster
    together: blocks pass data to one another, at any time; resident: to blocks that have not begun, too
    early:   it may begin before the launch before it has ended, and waits by itself
    """

    name: str
    maps: tuple[TensorMap, ...]
    buffers: tuple[Buffer, ...]
    syms: tuple[str, ...]
    blocks: Whole
    threads: int
    min_blocks: int  # per multiprocessor, for the compiler's choice of registers
    smem_bytes: int
    body: tuple[Stmt, ...]
    cluster: int = 1
    together: bool = False
    resident: bool = False
    early: bool = False

    def __str__(self) -> str:
        return show(self)


def walk(body: tuple[Stmt, ...]) -> Iterator[Stmt]:
    """Every statement, outer before inner."""
    for s in body:
        yield s
        if isinstance(s, For):
            yield from walk(s.body)
        elif isinstance(s, If):
            yield from walk(s.then)


# ---------------------------------------------------------------- small makers
def bits(a: Whole, mask: int) -> Whole:
    """a & mask."""
    if mask == 0:
        return Int(0)
    return Int(a.value & mask) if isinstance(a, Int) else IntOp("&", a, Int(mask))


def shifted(a: Whole, by: int) -> Whole:
    """a >> by."""
    return Int(a.value >> by) if isinstance(a, Int) else a if by == 0 else IntOp(">>", a, Int(by))


def flipped(a: Whole, b: Whole) -> Whole:
    """a ^ b."""
    if isinstance(a, Int) and isinstance(b, Int):
        return Int(a.value ^ b.value)
    if b == Int(0):
        return a
    return b if a == Int(0) else IntOp("^", a, b)


def counter(var: str, count: int) -> Whole:
    """The variable of `unrolled(var, count, ...)` as its body sees it: 0 when there is but one iteration."""
    return IntVar(var) if count > 1 else Int(0)


def unrolled(var: str, count: int, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """`count` iterations written out by the compiler; the body alone when there is one."""
    if count <= 1:
        return body if count else ()
    return (For(var, Int(0), Int(count), 1, body, UNROLL),) if body else ()


# ---------------------------------------------------------------- printer
def show_number(x: Number) -> str:
    """The number as text."""
    match x:
        case Num(v):
            return f"{v:g}"
        case Var(name):
            return name
        case Load(view, at):
            return f"{view}[{show_int(at)}]"
        case Call(fn, args):
            return f"{fn}({', '.join(show_number(a) for a in args)})"
        case Ramp(start):
            return f"number({show_int(start)})"
        case Given(cond, a, b, _):
            return f"({show_int(cond)} ? {show_number(a)} : {show_number(b)})"
        case Splat() | LaneSum() | LaneMax():
            raise AssertionError("a GPU thread has no vectors of numbers")


def _show_arg(x: Arg) -> str:
    match x:
        case Ref(view, at):
            return f"&{view}[{show_int(at)}]"
        case MapRef(name):
            return f"&{name}"
        case Further(word, by):
            return f"{word} + {show_int(by)}"
        case Int() | IntVar() | IntOp() | IntLoad():
            return show_int(x)
        case _:
            return show_number(x)


def _show(body: tuple[Stmt, ...], pad: str) -> list[str]:  # noqa: C901  one case a statement
    out: list[str] = []
    for s in body:
        match s:
            case LetInt(name, whole):
                out.append(f"{pad}int {name} = {show_int(whole)}")
            case LetUniform(name, whole):
                out.append(f"{pad}uniform int {name} = {show_int(whole)}")
            case LetFrom(name, helper, args):
                out.append(f"{pad}int {name} = {helper}({', '.join(_show_arg(a) for a in args)})")
            case LetAny(name, x):
                out.append(f"{pad}int {name} = any({show_number(x)})")
            case LetWide(name, helper, args):
                out.append(f"{pad}word {name} = {helper}({', '.join(_show_arg(a) for a in args)})")
            case SetInt(name, whole):
                out.append(f"{pad}{name} = {show_int(whole)}")
            case Let(name, x):
                out.append(f"{pad}f32 {name} = {show_number(x)}")
            case Set(name, x):
                out.append(f"{pad}{name} = {show_number(x)}")
            case View(name, of, at):
                out.append(f"{pad}view {name} = {of} + {show_int(at)}")
            case Store(view, at, x):
                out.append(f"{pad}{view}[{show_int(at)}] = {show_number(x)}")
            case Regs(name, kind, count):
                out.append(f"{pad}registers {name} {kind}[{count}]")
            case Do(helper, args):
                out.append(f"{pad}{helper}({', '.join(_show_arg(a) for a in args)})")
            case For(var, lo, hi, step, inner, unroll):
                by = f" step {step}" if step != 1 else ""
                how = (
                    "  # stays a loop"
                    if unroll == ROLLED
                    else "  # unrolled"
                    if unroll == UNROLL
                    else f"  # unrolled by {unroll}"
                    if unroll > 1
                    else ""
                )
                out += [f"{pad}for {var} = {show_int(lo)} .. {show_int(hi)}{by}:{how}", *_show(inner, pad + "  ")]
            case If(cond, then):
                out += [f"{pad}if {show_int(cond)}:", *_show(then, pad + "  ")]
    return out


def show(k: GpuKernel) -> str:
    """The kernel as indented text, one statement a line."""
    params = [m.name for m in k.maps] + [b.name for b in k.buffers] + list(k.syms)
    shape = f"{show_int(k.blocks)} blocks of {k.threads} threads, {k.smem_bytes} bytes of shared memory"
    shape += f", clusters of {k.cluster}" if k.cluster > 1 else ""
    shape += ", all at once" if k.together else ""
    shape += ", early" if k.early else ""
    out = [f"kernel {k.name}({', '.join(params)})  # {shape}"]
    for m in k.maps:
        size = ",".join(show_int(x) for x in (*(n for n, _ in reversed(m.outer)), m.rows, m.columns))
        out.append(f"  map {m.name} of {m.value}[{size}], boxes [{m.box_rows},{m.box_columns}], swizzle {m.swizzle}")
    out += [f"  {b.role} {b.name} {b.dtype}[{show_int(b.elements)}]" for b in k.buffers]
    return "\n".join(out + _show(k.body, "  "))
