"""Kernel IR: explicit statements over named memory, one Kernel a launch. Knows no plan, no schedule and no target.

Integers are 64-bit and index elements; numbers are f32, alone or in vectors of `lanes`. A view is memory from some element
on; loads widen the view's dtype to f32 and stores round to it. `emmy.codegen.c` prints a kernel as C, statement by
statement, and `emmy.codegen.kernel_run` executes it on tiny shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from emmy.ir.dtype import DType


# ---------------------------------------------------------------- whole numbers
@dataclass(frozen=True, slots=True)
class Int:
    value: int


@dataclass(frozen=True, slots=True)
class IntVar:
    name: str


IntFn = Literal["+", "-", "*", "/", "%", "min", "max", "<", "==", "!=", "&&", "||", "&", "^", ">>"]


@dataclass(frozen=True, slots=True)
class IntOp:
    """Division and remainder are of numbers that are not negative; comparisons give 0 or 1."""

    fn: IntFn
    a: Whole
    b: Whole


@dataclass(frozen=True, slots=True)
class IntLoad:
    """An element of a view of whole numbers."""

    view: str
    at: Whole


Whole = Int | IntVar | IntOp | IntLoad


# ---------------------------------------------------------------- f32 numbers
@dataclass(frozen=True, slots=True)
class Num:
    """A constant in every lane."""

    value: float
    lanes: int = 1


@dataclass(frozen=True, slots=True)
class Var:
    name: str
    lanes: int = 1


@dataclass(frozen=True, slots=True)
class Load:
    """`lanes` elements of a view, `stride` apart; with `count`, lanes from that one on are 0 and not read."""

    view: str
    at: Whole
    lanes: int = 1
    count: Whole | None = None
    stride: Whole = Int(1)


@dataclass(frozen=True, slots=True)
class Splat:
    """One number in every lane."""

    x: Number
    lanes: int


@dataclass(frozen=True, slots=True)
class Ramp:
    """start, start + 1, ... as numbers."""

    start: Whole
    lanes: int = 1


@dataclass(frozen=True, slots=True)
class Call:
    """A function of `emmy.ir.expr.FUNCTIONS`, lane by lane, or fma(a, b, c) = a * b + c."""

    fn: str
    args: tuple[Number, ...]

    @property
    def lanes(self) -> int:
        return self.args[0].lanes


@dataclass(frozen=True, slots=True)
class LaneSum:
    """The sum over the lanes of a vector."""

    x: Number
    lanes: int = 1


@dataclass(frozen=True, slots=True)
class LaneMax:
    """The largest of the lanes of a vector."""

    x: Number
    lanes: int = 1


@dataclass(frozen=True, slots=True)
class Given:
    """a where a whole number is not 0, else b."""

    cond: Whole
    a: Number
    b: Number
    lanes: int = 1


Number = Num | Var | Load | Splat | Ramp | Call | LaneSum | LaneMax | Given


# ---------------------------------------------------------------- statements
@dataclass(frozen=True, slots=True)
class LetInt:
    name: str
    value: Whole


@dataclass(frozen=True, slots=True)
class Let:
    """A new variable, with the lanes of its value; `Set` may change it."""

    name: str
    value: Number


@dataclass(frozen=True, slots=True)
class Set:
    name: str
    value: Number


@dataclass(frozen=True, slots=True)
class View:
    """A new view: `of` from element `at` on."""

    name: str
    of: str
    at: Whole


@dataclass(frozen=True, slots=True)
class Store:
    """All lanes of a value to consecutive elements; with `count`, only the first ones."""

    view: str
    at: Whole
    value: Number
    count: Whole | None = None


@dataclass(frozen=True, slots=True)
class Transpose:
    """to[j * to_pitch + i] = of[i * of_pitch + j] for i and j below `lanes`."""

    to: str
    to_at: Whole
    to_pitch: Whole
    of: str
    of_at: Whole
    of_pitch: Whole
    lanes: int


@dataclass(frozen=True, slots=True)
class For:
    """Walk var from lo while it is below hi, `step` at a time."""

    var: str
    lo: Whole
    hi: Whole
    step: int
    body: tuple[Stmt, ...]


@dataclass(frozen=True, slots=True)
class If:
    cond: Whole
    then: tuple[Stmt, ...]
    other: tuple[Stmt, ...] = ()


Stmt = LetInt | Let | Set | View | Store | Transpose | For | If


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that outlives the launch: an input, an output, what one launch leaves for another, or blocks for one another.

    flags: words that are 0 before the first launch and after each
    """

    name: str
    dtype: DType
    role: Literal["input", "output", "workspace", "flags"]
    elements: Whole

    @property
    def is_argument(self) -> bool:
        """Whether the caller brings it."""
        return self.role in ("input", "output")


@dataclass(frozen=True, slots=True)
class Scratch:
    """f32 memory of one thread, holding nothing when a block starts."""

    name: str
    elements: Whole


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch: `body` runs once for each value of `block` below `blocks`. Sizes of symbols are variables `syms`.

    `buffers` are all those of the plan, in the order in which the kernel's caller passes them.
    """

    name: str
    syms: tuple[str, ...]
    buffers: tuple[Buffer, ...]
    scratch: tuple[Scratch, ...]
    blocks: Whole
    body: tuple[Stmt, ...]

    def __str__(self) -> str:
        return show(self)


# ---------------------------------------------------------------- arithmetic that folds constants
def plus(*xs: Whole) -> Whole:
    """The sum; constants are gathered at the end."""
    terms: list[Whole] = []
    constant = 0
    for x in xs:
        while isinstance(x, IntOp) and x.fn == "+" and isinstance(x.b, Int):
            constant, x = constant + x.b.value, x.a
        if isinstance(x, Int):
            constant += x.value
        else:
            terms.append(x)
    if constant or not terms:
        terms.append(Int(constant))
    out = terms[0]
    for t in terms[1:]:
        out = IntOp("+", out, t)
    return out


def minus(a: Whole, b: Whole) -> Whole:
    if isinstance(b, Int):
        return plus(a, Int(-b.value))
    if isinstance(a, IntOp) and a.fn == "+" and a.a == b:
        return a.b
    return Int(0) if a == b else IntOp("-", a, b)


def times(a: Whole, b: Whole) -> Whole:
    if isinstance(a, Int):
        a, b = b, a
    if isinstance(b, Int):
        if isinstance(a, Int):
            return Int(a.value * b.value)
        if isinstance(a, IntOp) and isinstance(a.b, Int):
            if a.fn == "*":
                return times(a.a, Int(a.b.value * b.value))
            if a.fn == "+" and b.value:
                return plus(times(a.a, b), Int(a.b.value * b.value))
        if b.value in (0, 1):
            return a if b.value else Int(0)
    return IntOp("*", a, b)


def over(a: Whole, b: Whole) -> Whole:
    """a / b rounded down."""
    if isinstance(a, Int) and isinstance(b, Int):
        return Int(a.value // b.value)
    return a if b == Int(1) else IntOp("/", a, b)


def rest(a: Whole, b: Whole) -> Whole:
    """a modulo b."""
    if isinstance(a, Int) and isinstance(b, Int):
        return Int(a.value % b.value)
    return Int(0) if b == Int(1) else IntOp("%", a, b)


WHOLE: Mapping[str, Callable[[Whole, Whole], Whole]] = {  # of positions, which are not negative
    "add": plus,
    "sub": minus,
    "mul": times,
    "floordiv": over,
    "mod": rest,
}


def pieces(a: Whole, step: int) -> Whole:
    """How many pieces of `step` cover a: a / step rounded up."""
    return over(plus(a, Int(step - 1)), Int(step))


def least(a: Whole, b: Whole) -> Whole:
    if isinstance(a, Int) and isinstance(b, Int):
        return Int(min(a.value, b.value))
    return a if a == b else IntOp("min", a, b)


def most(a: Whole, b: Whole) -> Whole:
    if isinstance(a, Int) and isinstance(b, Int):
        return Int(max(a.value, b.value))
    return a if a == b else IntOp("max", a, b)


def clamp(a: Whole, high: int) -> Whole:
    """a, but at least 0 and at most `high`."""
    return least(IntOp("max", a, Int(0)), Int(high))


def product(xs: tuple[Whole, ...]) -> Whole:
    out: Whole = Int(1)
    for x in xs:
        out = times(out, x)
    return out


def below(a: Whole, b: Whole) -> Whole:
    return Int(int(a.value < b.value)) if isinstance(a, Int) and isinstance(b, Int) else IntOp("<", a, b)


def same(a: Whole, b: Whole) -> Whole:
    if isinstance(a, Int) and isinstance(b, Int):
        return Int(int(a.value == b.value))
    return Int(1) if a == b else IntOp("==", a, b)


def differ(a: Whole, b: Whole) -> Whole:
    if isinstance(a, Int) and isinstance(b, Int):
        return Int(int(a.value != b.value))
    return Int(0) if a == b else IntOp("!=", a, b)


def either(a: Whole, b: Whole) -> Whole:
    if a == Int(0) or b == Int(1):
        return b
    return a if b == Int(0) or a == Int(1) else IntOp("||", a, b)


def both(a: Whole, b: Whole) -> Whole:
    if a == Int(1) or b == Int(0):
        return b
    return a if b == Int(1) or a == Int(0) else IntOp("&&", a, b)


def when(cond: Whole, then: tuple[Stmt, ...], other: tuple[Stmt, ...] = ()) -> tuple[Stmt, ...]:
    """If, unless the condition is known."""
    if isinstance(cond, Int):
        return then if cond.value else other
    return (If(cond, then, other),) if then or other else ()


# ---------------------------------------------------------------- value
_INT: dict[str, Callable[[int, int], int]] = {
    "+": int.__add__,
    "-": int.__sub__,
    "*": int.__mul__,
    "/": int.__floordiv__,
    "%": int.__mod__,
    "min": min,
    "max": max,
    "<": lambda a, b: int(a < b),
    "==": lambda a, b: int(a == b),
    "!=": lambda a, b: int(a != b),
    "&&": lambda a, b: int(bool(a) and bool(b)),
    "||": lambda a, b: int(bool(a) or bool(b)),
}


def evaluated(x: Whole, names: Mapping[str, int], load: Callable[[str, int], int] | None = None) -> int:
    """The number that an expression is, given a number for each of its names, and what memory holds where it reads."""
    match x:
        case Int(v):
            return v
        case IntVar(name):
            return names[name]
        case IntOp(fn, a, b):
            return _INT[fn](evaluated(a, names, load), evaluated(b, names, load))
        case IntLoad(view, at):
            assert load is not None, f"the size of something depends on {view}"
            return load(view, evaluated(at, names, load))


_FOLDING: dict[str, Callable[[Whole, Whole], Whole]] = {
    "+": plus,
    "-": minus,
    "*": times,
    "/": over,
    "%": rest,
    "min": least,
}


def replaced(x: Whole, names: Mapping[str, Whole]) -> Whole:
    """The expression with other ones in the place of names, constants folded."""
    match x:
        case IntVar(name):
            return names.get(name, x)
        case IntOp(fn, a, b):
            a, b = replaced(a, names), replaced(b, names)
            return _FOLDING[fn](a, b) if fn in _FOLDING else IntOp(fn, a, b)
        case _:
            return x


# ---------------------------------------------------------------- printer
_RANK = {"&": 0, "^": 0, ">>": 0, "||": 1, "&&": 2, "<": 3, "==": 3, "!=": 3, "+": 4, "-": 4, "*": 5, "/": 5, "%": 5}


def show_int(x: Whole, outer: int = 0) -> str:
    """The expression as text that is also C, but for min and max, which C spells imin and imax."""
    match x:
        case Int(v):
            return str(v) if v >= 0 else f"({v})"
        case IntVar(name):
            return name
        case IntLoad(view, at):
            return f"{view}[{show_int(at)}]"
        case IntOp("min" | "max" as fn, a, b):
            return f"i{fn}({show_int(a)}, {show_int(b)})"
        case IntOp(fn, a, b):
            rank = _RANK[fn]
            if not rank:  # few remember how tightly C binds these
                text = f"{show_int(a, 9)} {fn} {show_int(b, 9)}"
            elif fn == "+" and isinstance(b, Int) and b.value < 0:
                text = f"{show_int(a, rank)} - {-b.value}"
            else:
                text = f"{show_int(a, rank)} {fn} {show_int(b, rank + (fn in '-/%'))}"
            return f"({text})" if rank < outer else text


def _show_number(x: Number) -> str:
    match x:
        case Num(v, lanes):
            return f"{v:g}" if lanes == 1 else f"{{{v:g}}}"
        case Var(name):
            return name
        case Load(view, at, lanes, count, stride):
            parts = [show_int(at)] if lanes == 1 else [f"{show_int(at)} : {lanes}"]
            parts += [f"stride {show_int(stride)}"] if stride != Int(1) else []
            parts += [f"count {show_int(count)}"] if count is not None else []
            return f"{view}[{', '.join(parts)}]"
        case Splat(a):
            return f"{{{_show_number(a)}}}"
        case Ramp(start, lanes):
            return f"ramp({show_int(start)}, {lanes})"
        case Call(fn, args):
            return f"{fn}({', '.join(_show_number(a) for a in args)})"
        case LaneSum(a):
            return f"lane_sum({_show_number(a)})"
        case LaneMax(a):
            return f"lane_max({_show_number(a)})"
        case Given(cond, a, b, _):
            return f"({show_int(cond)} ? {_show_number(a)} : {_show_number(b)})"


def _show_stmt(s: Stmt, pad: str) -> list[str]:
    match s:
        case LetInt(name, whole):
            return [f"{pad}int {name} = {show_int(whole)}"]
        case Let(name, x):
            return [f"{pad}f32{f'x{x.lanes}' if x.lanes > 1 else ''} {name} = {_show_number(x)}"]
        case Set(name, x):
            return [f"{pad}{name} = {_show_number(x)}"]
        case View(name, of, at):
            return [f"{pad}view {name} = {of} + {show_int(at)}"]
        case Store(view, at, x, count):
            lanes = f" : {x.lanes}" if x.lanes > 1 else ""
            some = f", count {show_int(count)}" if count is not None else ""
            return [f"{pad}{view}[{show_int(at)}{lanes}{some}] = {_show_number(x)}"]
        case Transpose(to, to_at, to_pitch, of, of_at, of_pitch, lanes):
            left = f"{to}[{show_int(to_at)}, pitch {show_int(to_pitch)}]"
            return [f"{pad}{left} = transpose {lanes}x{lanes} {of}[{show_int(of_at)}, pitch {show_int(of_pitch)}]"]
        case For(var, lo, hi, step, body):
            by = f" step {step}" if step != 1 else ""
            inner = [line for b in body for line in _show_stmt(b, pad + "  ")]
            return [f"{pad}for {var} = {show_int(lo)} .. {show_int(hi)}{by}:", *inner]
        case If(cond, then, other):
            out = [f"{pad}if {show_int(cond)}:", *(line for b in then for line in _show_stmt(b, pad + "  "))]
            if other:
                out += [f"{pad}else:", *(line for b in other for line in _show_stmt(b, pad + "  "))]
            return out


def show(k: Kernel) -> str:
    """The kernel as indented text, one statement a line."""
    out = [f"kernel {k.name}({', '.join(b.name for b in k.buffers)})  # {show_int(k.blocks)} blocks"]
    out += [f"  {b.role} {b.name} {b.dtype}[{show_int(b.elements)}]" for b in k.buffers]
    out += [f"  scratch {s.name} f32[{show_int(s.elements)}]" for s in k.scratch]
    return "\n".join([*out, *(line for s in k.body for line in _show_stmt(s, "  "))])
