"""Scalar expressions over named axes, and their meaning on blocks. Must not know stages, plans or devices.

`A[m,k] * B[n,k]` is Apply("mul", (Read("A", ("m", "k")), Read("B", ("n", "k")))): a value is read at its own axes, so what
a block of an expression needs from each value is just the block of its axes. In place of an axis an input may be read at a
computed position, `X[h,m,0,i]` or `E[ids[m],n]`: along that axis a block needs all of it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from emmy.errors import PlanError

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Const:
    value: float

    def __str__(self) -> str:
        return f"{self.value:g}" if float(f"{self.value:g}") == self.value else repr(self.value)


@dataclass(frozen=True, slots=True)
class Axis:
    """The position along an axis, as a number (for masks)."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Read:
    """An element of a value: at each of its axes, or in place of one at a whole number that an expression gives."""

    value: str
    index: tuple[str | Expr, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes at which the value is read where the block stands."""
        return tuple(x for x in self.index if isinstance(x, str))

    @property
    def computed(self) -> tuple[Expr, ...]:
        """Positions that stand in place of axes."""
        return tuple(x for x in self.index if not isinstance(x, str))

    @property
    def along(self) -> tuple[str | Expr, ...]:
        """At each position the axis that moves it, be it the value's own or another one; else what computes it."""
        return tuple(x.name if isinstance(x, Axis) else x for x in self.index)

    def __str__(self) -> str:
        return f"{self.value}[{','.join(map(str, self.index))}]" if self.index else f"{self.value}[()]"


@dataclass(frozen=True, slots=True)
class Apply:
    fn: str
    args: tuple[Expr, ...]

    def __str__(self) -> str:
        return _show(self, 0)


Expr = Const | Axis | Read | Apply


def _gelu_tanh(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))


def _silu(x: Array) -> Array:
    with np.errstate(over="ignore"):  # far below zero the exponential is inf, and the quotient 0, as it should be
        return np.asarray(x / (1 + np.exp(-x)))


# Name -> (arity, meaning in float64). A code generator must know every name here.
FUNCTIONS: dict[str, tuple[int, Callable[..., Array]]] = {
    "add": (2, np.add),
    "sub": (2, np.subtract),
    "mul": (2, np.multiply),
    "div": (2, np.divide),
    "floordiv": (2, np.floor_divide),  # of whole numbers, as in positions
    "mod": (2, np.mod),
    "neg": (1, np.negative),
    "le": (2, np.less_equal),
    "lt": (2, np.less),
    "where": (3, np.where),
    "maximum": (2, np.maximum),
    "minimum": (2, np.minimum),
    "exp": (1, np.exp),
    "tanh": (1, np.tanh),
    "sqrt": (1, np.sqrt),
    "rsqrt": (1, lambda x: 1 / np.sqrt(x)),
    "gelu_tanh": (1, _gelu_tanh),
    "silu": (1, _silu),
}
_INFIX: dict[str, tuple[str, int]] = {
    "le": ("<=", 1),
    "lt": ("<", 1),
    "add": ("+", 2),
    "sub": ("-", 2),
    "mul": ("*", 3),
    "div": ("/", 3),
    "floordiv": ("//", 3),
    "mod": ("%", 3),
}
_BINARY: dict[type, str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.LtE: "le",
    ast.Lt: "lt",
}


def _show(e: Expr, outer: int, signs: Mapping[str, tuple[str, int]] = _INFIX) -> str:
    if not isinstance(e, Apply):
        return str(e)
    if e.fn in signs:
        sign, rank = signs[e.fn]
        # Equal signs group to the left; comparisons chain in Python, so both their sides need brackets.
        left, right = _show(e.args[0], rank + (e.fn in ("le", "lt")), signs), _show(e.args[1], rank + 1, signs)
        text = f"{left} {sign} {right}"
        return f"({text})" if rank < outer else text
    if e.fn == "neg":
        return f"-{_show(e.args[0], 4, signs)}"
    return f"{e.fn}({', '.join(_show(a, 0, signs) for a in e.args)})"


def compact(e: Expr) -> str:
    """The expression without blanks or slashes, as part of an op's text: a quotient is `div(a,b)`."""
    return _show(e, 0, {fn: s for fn, s in _INFIX.items() if fn not in ("div", "floordiv", "mod")}).replace(" ", "")


@lru_cache(maxsize=4096)
def parse(text: str) -> Expr:
    """The expression `text` names, in Python's syntax: `where(k <= q + 96, S[h,q,k] * 0.25, -1e30)`. Raises PlanError."""
    shown = repr(text) if len(text) <= 200 else repr(text[:200]) + "..."
    try:
        return _from_ast(ast.parse(text, mode="eval").body, shown)
    except SyntaxError as e:
        raise PlanError(f"expression {shown}: {e.msg} at character {e.offset}") from None
    except ValueError as e:  # a null character
        raise PlanError(f"expression {shown}: {e}") from None
    except (RecursionError, MemoryError):
        raise PlanError(
            f"expression {shown}: {len(text)} characters nest too deep; write it as several stages"
        ) from None


def _number(value: int | float, shown: str) -> Const:
    """A finite constant; `True` and numbers beyond float64 are refused."""
    try:
        number = float(value)
    except OverflowError:
        number = float("inf")
    if isinstance(value, bool) or not isfinite(number):
        raise PlanError(f"expression {shown}: {value if isinstance(value, bool) else number} is not a finite number")
    return Const(number)


def _from_ast(node: ast.expr, text: str) -> Expr:
    match node:
        case ast.Constant(value=int() | float() as v):
            return _number(v, text)
        case ast.Name(id=name):
            return Axis(name)
        case ast.Subscript(value=ast.Name(id=name), slice=index):
            parts = index.elts if isinstance(index, ast.Tuple) else [index]
            return Read(name, tuple(p.id if isinstance(p, ast.Name) else _from_ast(p, text) for p in parts))
        case ast.BinOp(left=a, op=op, right=b) if type(op) in _BINARY:
            return Apply(_BINARY[type(op)], (_from_ast(a, text), _from_ast(b, text)))
        case ast.Compare(left=a, ops=[op], comparators=[b]) if type(op) in _BINARY:
            return Apply(_BINARY[type(op)], (_from_ast(a, text), _from_ast(b, text)))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as v)):
            return Const(-_number(v, text).value)
        case ast.UnaryOp(op=ast.USub(), operand=a):
            return Apply("neg", (_from_ast(a, text),))
        case ast.Call(func=ast.Name(id=fn), args=args, keywords=[]) if fn in FUNCTIONS and FUNCTIONS[fn][0] == len(
            args
        ):
            return Apply(fn, tuple(_from_ast(a, text) for a in args))
    raise PlanError(f"expression {text}: cannot read {ast.unparse(node)!r}; known functions are {', '.join(FUNCTIONS)}")


def walk(e: Expr) -> Iterator[Expr]:
    """`e` and everything below it, parents first."""
    yield e
    for a in e.args if isinstance(e, Apply) else e.computed if isinstance(e, Read) else ():
        yield from walk(a)


def outermost(e: Expr) -> Iterator[Read]:
    """What an expression computes with, as often as it is read; without what only tells where something is read."""
    if isinstance(e, Read):
        yield e
    elif isinstance(e, Apply):
        for a in e.args:
            yield from outermost(a)


def reads(e: Expr) -> tuple[str, ...]:
    """Values read, each once, in order of appearance."""
    return tuple(dict.fromkeys(x.value for x in walk(e) if isinstance(x, Read)))


def axes_of(e: Expr) -> tuple[str, ...]:
    """Axes the expression depends on, each once, in order of appearance."""
    found: list[str] = []
    for x in walk(e):
        if isinstance(x, Axis):
            found.append(x.name)
        elif isinstance(x, Read):
            found.extend(x.axes)
    return tuple(dict.fromkeys(found))


def substitute(e: Expr, change: Callable[[Read], Expr]) -> Expr:
    """`e` with every read replaced by `change(read)`."""
    match e:
        case Read():
            return change(e)
        case Apply(fn, args):
            return Apply(fn, tuple(substitute(a, change) for a in args))
        case _:
            return e


def at_positions(e: Expr, places: Mapping[str, Expr]) -> Expr:
    """`e` at other positions: what stands for each axis that is named there."""
    match e:
        case Axis(name):
            return places.get(name, e)
        case Read(value, index):
            moved = (places.get(x, x) if isinstance(x, str) else at_positions(x, places) for x in index)
            return Read(value, tuple(moved))
        case Apply(fn, args):
            return Apply(fn, tuple(at_positions(a, places) for a in args))
        case _:
            return e


def factors(e: Expr) -> tuple[Expr, ...]:
    """The factors of a product, left to right; one factor when `e` is no product."""
    if isinstance(e, Apply) and e.fn == "mul":
        return factors(e.args[0]) + factors(e.args[1])
    return (e,)


def product(parts: tuple[Expr, ...]) -> Expr:
    """The product of `parts`, at least one."""
    out = parts[0]
    for p in parts[1:]:
        out = Apply("mul", (out, p))
    return out


# ---------------------------------------------------------------- meaning on blocks
Range = tuple[int, int]  # [lo, hi) along an axis
Env = Mapping[str, Range]


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a value: data[axes], its first element at `lo`. Reading outside it is an error: a placement was wrong."""

    name: str
    axes: tuple[str, ...]
    lo: tuple[int, ...]
    data: Array = field(compare=False)

    def window(self, env: Env) -> tuple[slice, ...]:
        """Slices of `data` that hold the part of the value in `env`."""
        out = tuple(slice(env[a][0] - lo, env[a][1] - lo) for a, lo in zip(self.axes, self.lo, strict=True))
        if any(s.start < 0 or s.stop > n for s, n in zip(out, self.data.shape, strict=True)):
            asked = ",".join(f"{a} {env[a][0]}..{env[a][1]}" for a in self.axes)
            held = ",".join(f"{a} {lo}..{lo + n}" for a, lo, n in zip(self.axes, self.lo, self.data.shape, strict=True))
            raise PlanError(f"{self.name}[{asked}] is outside the block held, [{held}]")
        return out


@dataclass(frozen=True, slots=True)
class Named:
    """An array whose dimensions have names; operations align by name."""

    axes: tuple[str, ...]
    data: Array = field(compare=False)

    def to(self, axes: tuple[str, ...]) -> Array:
        """The data with dimensions in the order of `axes`; size 1 where it does not depend on an axis."""
        if axes == self.axes:
            return self.data
        own = [self.axes.index(a) for a in axes if a in self.axes]
        shape = [self.data.shape[self.axes.index(a)] if a in self.axes else 1 for a in axes]
        return self.data.transpose(own).reshape(shape)


def apply_named(fn: str, args: tuple[Named, ...]) -> Named:
    """`fn` of arrays aligned by axis name."""
    axes = args[0].axes if args else ()
    if any(x.axes != axes for x in args):
        axes = tuple(dict.fromkeys(a for x in args for a in x.axes))
    return Named(axes, np.asarray(FUNCTIONS[fn][1](*[x.to(axes) for x in args]), dtype=np.float64))


def evaluate(e: Expr, env: Env, load: Callable[[str], Block], names: Mapping[str, Named] | None = None) -> Named:
    """The block of `e` over the axes in `env`; float64. `names` gives bare names a value (a monoid's states)."""
    match e:
        case Const(v):
            return Named((), np.asarray(v, dtype=np.float64))
        case Axis(name):
            if names is not None and name in names:
                return names[name]
            if name not in env:
                raise PlanError(f"{name} is neither an axis of this block nor a known name")
            return Named((name,), np.arange(*env[name], dtype=np.float64))
        case Read(value, index):
            block = load(value)
            if e.computed:
                return _gathered(e, block, env, lambda x: evaluate(x, env, load, names))
            if set(index) != set(block.axes):
                raise PlanError(f"{e} reads {value}, which has axes {','.join(block.axes)}")
            return Named(block.axes, block.data[block.window(env)])
        case Apply(fn, args):
            return apply_named(fn, tuple(evaluate(a, env, load, names) for a in args))


def _gathered(r: Read, block: Block, env: Env, position: Callable[[Expr], Named]) -> Named:
    """A value read at computed positions. Raises PlanError for those outside of the block held."""
    at = [position(Axis(x) if isinstance(x, str) else x) for x in r.index]
    axes = tuple(dict.fromkeys(a for x in at for a in x.axes))
    index = []
    for x, axis, lo, n in zip(at, block.axes, block.lo, block.data.shape, strict=True):
        i = x.to(axes).astype(np.int64) - lo
        if i.size and not 0 <= i.min() <= i.max() < n:
            where = f"{i.min() + lo}..{i.max() + lo}"
            raise PlanError(f"{r} reads {axis} at {where}, outside the block held, {lo}..{lo + n - 1}")
        index.append(i)
    return Named(axes, block.data[tuple(index)])
