"""Ops whose program says all there is to say: inputs, reference, work and tolerance are derived from it. Must not know schedules.

A `Formula` is any chain of elementwise stages and reductions, and its key is its program (see `formula_text`). Ops with a
short key of their own, such as `rms_norm:512x3840:f16`, are the same thing under a name.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import inf, prod, sqrt
from typing import ClassVar

import numpy as np

from emmy.errors import UsageError
from emmy.ir.dtype import Floats, decode, encode, epsilon, size_bytes
from emmy.ir.expr import FUNCTIONS, Apply, Array, Axis, Const, Expr, Read, axes_of, reads, walk
from emmy.ir.ops.formula_text import MONOIDS, program_text, read_program
from emmy.ir.ops.op import PARSERS, Accumulate, InputKind, Op, Storage, Work
from emmy.ir.program import Program, Stage, upper

_DRAWN = (1 << 24) + 43  # numbers that are drawn; a larger array repeats them, at no period a tile could have
_SAMPLE = 8  # rows on which errors are followed, with folded axes whole
_FOLDS: Mapping[str, Callable[[Array, tuple[int, ...]], Array]] = {
    "sum": lambda x, at: np.asarray(np.sum(x, axis=at)),
    "max": lambda x, at: np.asarray(np.max(x, axis=at)),
}
# Functions that whole numbers stay whole numbers under, with a bound of the result where the arguments have bounds.
_WHOLE: Mapping[str, Callable[..., float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "neg": lambda a: a,
    "le": lambda a, b: 1.0,
    "lt": lambda a, b: 1.0,
    "where": lambda c, a, b: max(a, b),
    "maximum": max,
    "minimum": max,
}


class FormulaOp(Op):
    """An op that is its program. Subclasses give the program, and a name."""

    @abstractmethod
    def program(self) -> Program: ...

    def inputs(self, kind: InputKind, seed: int, sizes: Mapping[str, int] | None = None) -> dict[str, Storage]:
        """Standard normal numbers, or whole ones of -2..2; positions are any that what they index has."""
        p, rng, out = self.program(), np.random.default_rng(seed), dict[str, Storage]()
        size = p.sizes(sizes)
        for v in p.inputs:
            shape = [size[a] for a in v.axes]
            count = min(prod(shape), _DRAWN)
            x: Floats
            if v.dtype == "i32":
                x = rng.integers(0, positions(p, v.name, size), count).astype(np.float64)
            elif kind == "integer":
                x = rng.integers(-2, 3, count).astype(np.float32)
            else:
                x = rng.standard_normal(count, dtype=np.float32)
            out[v.name] = np.resize(encode(x, v.dtype), shape)
        return out

    def reference(self, inputs: Mapping[str, Storage]) -> dict[str, Array]:
        p = self.program()
        known = _Numpy(p, inputs)
        for s in p.stages:
            known.values[s.out] = known.stage(s)
        return {o: known.values[o] for o in p.outputs}

    def work(self, sizes: Mapping[str, int] | None = None) -> Work:
        """A flop is one function of one element; of an input that is gathered from, what is read at most."""
        p = self.program()
        size = p.sizes(sizes or self.typical_sizes())
        flops, moved = 0.0, 0.0
        for s in p.stages:
            each = sum(isinstance(x, Apply) for x in _computing(s.body)) + len(s.folded)
            flops += max(each, s.out in p.outputs) * prod(size[a] for a in s.every)  # a copy is counted as one
        for v in p.inputs:
            found = [r for s in p.stages for r in walk(s.body) if isinstance(r, Read) and r.value == v.name]
            places = {r.index: prod(size[a] for a in axes_of(r)) for r in found}
            moved += min(prod(size[a] for a in v.axes), sum(places.values())) * size_bytes(v.dtype)
        for o in p.outputs:
            moved += prod(size[a] for a in p.value(o).axes) * size_bytes(p.value(o).dtype)
        return Work(flops, float(moved))

    def is_exact(self, kind: InputKind, output: str | None = None) -> bool:
        return kind == "integer" and output_bound(self.program(), output or self.program().outputs[0]) < 2**24

    def tolerance(self, accumulate: Accumulate = "f32", output: str | None = None) -> tuple[float, float]:
        """Relative: one rounding of the output, or a few of f32. Absolute: 4 times what roundings of f32 (and of outputs that
        other stages read) come to, beyond that, in the worst element of a few rows of normal inputs. See `Errors`.
        """
        return _tolerance(self.program(), output or self.program().outputs[0])


@dataclass(frozen=True)
class Formula(FormulaOp):
    """A program as an op: `formula:m=4,n=64;X[m,n]:f16;Y[m,n]:f16=silu(X[m,n])`."""

    given: Program
    kind: ClassVar[str] = "formula"

    def __post_init__(self) -> None:
        odd = [s.out for s in self.given.stages if s.monoid and MONOIDS.get(s.monoid.name) != s.monoid]
        if odd or not self.given.outputs:
            known = ", ".join(MONOIDS)
            raise UsageError(f"formula: {odd[0] if odd else 'no stage'} is an output or folds by one of {known}")

    @property
    def key(self) -> str:
        return f"formula:{program_text(self.given)}"

    def program(self) -> Program:
        return self.given

    def within(self, symbol: str, lo: int, hi: int) -> Formula:
        if symbol not in {s.name for s in self.given.syms}:
            raise UsageError(f"{self.key}: no size is named {symbol} and open until run time")
        return Formula(self.given.within(symbol, lo, hi))


PARSERS["formula"] = lambda rest: Formula(read_program(rest))


def formula(text: str) -> Formula:
    """The op of a program's text; see `formula_text`. Raises UsageError or PlanError."""
    return Formula(read_program(text))


# ---------------------------------------------------------------- meaning, by numpy on whole arrays
class _Numpy:
    """Values of a program as whole float64 arrays; of what is gathered from, only what is read is decoded."""

    def __init__(self, program: Program, inputs: Mapping[str, Storage]) -> None:
        self.program, self.inputs, self.values = program, inputs, dict[str, Array]()
        self.size: dict[str, int] = {}
        for v in program.inputs:
            self.size.update(zip(v.axes, inputs[v.name].shape, strict=True))
        self.size.update({a: d for a, d in program.dims if isinstance(d, int)})

    def stage(self, s: Stage) -> Array:
        x = self.of(s.body, s.every)
        x = np.broadcast_to(x, [self.size[a] for a in s.every])
        folded = tuple(range(len(s.axes), len(s.every)))
        return _FOLDS[s.monoid.name](x, folded) if s.monoid else np.array(x)

    def of(self, e: Expr, axes: tuple[str, ...]) -> Array:
        """An expression, with a dimension for each axis."""
        match e:
            case Const(v):
                return np.asarray(v)
            case Axis(name):
                return np.arange(self.size[name], dtype=np.float64).reshape([-1 if a == name else 1 for a in axes])
            case Apply(fn, args):
                with np.errstate(
                    invalid="ignore", divide="ignore"
                ):  # what has no answer is no number, here as in a kernel
                    return np.asarray(FUNCTIONS[fn][1](*(self.of(a, axes) for a in args)), dtype=np.float64)
            case Read(value, index):
                positions = (Axis(x) if isinstance(x, str) else x for x in index)
                at = tuple(self.of(x, axes).astype(np.intp) for x in positions)
                return self._element(value, at if e.computed else None, axes)

    def _element(self, value: str, at: tuple[NDIntp, ...] | None, axes: tuple[str, ...]) -> Array:
        v = self.program.value(value)
        if at is not None:
            return decode(self.inputs[value][at], v.dtype)
        if value not in self.values:
            self.values[value] = decode(self.inputs[value], v.dtype)
        moved = np.transpose(self.values[value], sorted(range(len(v.axes)), key=lambda i: axes.index(v.axes[i])))
        return moved.reshape([self.size[a] if a in v.axes else 1 for a in axes])


NDIntp = np.ndarray[tuple[int, ...], np.dtype[np.intp]]


def positions(p: Program, value: str, size: Mapping[str, int]) -> int:
    """How many positions an i32 input may name: the shortest axis that it stands for."""
    found = [inf]
    for r in (r for s in p.stages for r in walk(s.body) if isinstance(r, Read)):
        for x, axis in zip(r.index, p.value(r.value).axes, strict=True):
            if isinstance(x, Read) and x.value == value:
                found.append(size[axis])
    least = min(found)
    return 1 if least == inf else int(least)


def _computing(e: Expr) -> list[Expr]:
    """`e` and what it computes with, positions left out."""
    inner = [x for a in e.args for x in _computing(a)] if isinstance(e, Apply) else []
    return [e, *inner]


# ---------------------------------------------------------------- how exact
def output_bound(p: Program, output: str) -> float:
    """What whole numbers of -2..2 make of a value at most; inf where it may be no whole number or one is rounded on the way."""
    bounds = {v.name: 2.0 for v in p.inputs}
    for s in p.stages:
        for v in reads(s.body):
            if not p.is_input(v) and v in p.outputs and bounds[v] * epsilon(p.value(v).dtype) > 1:
                bounds[v] = inf  # another stage may read it as it was stored
        bounds[s.out] = _bound(s.body, bounds)
        if s.monoid and s.monoid.name == "sum":
            bounds[s.out] *= prod(upper(p.dim(a)) for a in s.folded)
    return bounds[output]


def _bound(e: Expr, bounds: Mapping[str, float]) -> float:
    match e:
        case Const(v):
            return abs(v) if v.is_integer() else inf
        case Axis():
            return inf
        case Read(value):
            return bounds[value]
        case Apply(fn, args):
            return _WHOLE[fn](*(_bound(a, bounds) for a in args)) if fn in _WHOLE else inf


@lru_cache(maxsize=64)
def _tolerance(p: Program, output: str) -> tuple[float, float]:
    whole = {a for s in p.stages for a in s.folded}
    for r in (r for s in p.stages for r in walk(s.body) if isinstance(r, Read)):
        places = zip(r.index, p.value(r.value).axes, strict=True)
        whole |= {a for x, a in places if not isinstance(x, str | Read)}  # positions that the formula itself names
    small = tuple((a, min(upper(d), 1 << 16 if a in whole else _SAMPLE)) for a, d in p.dims)
    sample = Formula(Program(small, p.inputs, p.stages, p.outputs))
    value, error = Errors(sample, sample.inputs("normal", 0)).of[output]
    relative = max(epsilon(p.value(output).dtype), 8 * epsilon("f32"))
    beyond = float(
        np.fmax.reduce(error - relative / 4 * np.abs(value), axis=None, initial=0.0)
    )  # where there is an answer
    return min(0.1, 4 * beyond + 1e-7), relative


class Errors:
    """Every value of a program on some inputs with a bound of its error: f32 arithmetic, outputs read as they are stored.

    Each function adds two roundings (hardware approximates some) and what it makes of its arguments' errors, by trying both
    ends. A sum of n adds 8 roundings of their squares' root, for errors are to both sides.
    """

    def __init__(self, op: FormulaOp, inputs: Mapping[str, Storage]) -> None:
        p, self.of = op.program(), dict[str, tuple[Array, Array]]()
        self._numpy, self._errors = _Numpy(p, inputs), _Numpy(p, inputs)  # values, and in their place errors
        for s in p.stages:
            value, error = self._expr(s.body, s.every)
            value, error = (np.broadcast_to(x, [self._numpy.size[a] for a in s.every]) for x in (value, error))
            if s.monoid:
                at = tuple(range(len(s.axes), len(s.every)))
                n = prod(value.shape[i] for i in at)
                folded = _FOLDS[s.monoid.name](value, at)
                length = np.sqrt(np.sum(np.square(value), axis=at))
                if s.monoid.name == "sum":
                    spread = np.sqrt(np.sum(np.square(error), axis=at))
                    bias = np.abs(np.sum(error, axis=at)) / max(1.0, sqrt(n))
                    error = 4 * (spread + bias) + 8 * epsilon("f32") * (length + np.abs(folded))
                else:
                    error = np.max(error, axis=at)
                value = folded
            self._numpy.values[s.out] = np.asarray(value)
            stored = epsilon(s.dtype) * np.abs(value) if s.out in p.outputs and s.dtype != "f32" else 0.0
            self.of[s.out] = np.asarray(value), np.asarray(error) + stored / 2
            self._errors.values[s.out] = self.of[s.out][1]

    def _expr(self, e: Expr, axes: tuple[str, ...]) -> tuple[Array, Array]:
        match e:
            case Read(made) if made in self.of:
                return self._numpy.of(e, axes), self._errors.of(e, axes)
            case Apply(fn, args):
                of = FUNCTIONS[fn][1]
                found = [self._expr(a, axes) for a in args]
                plain = [x for x, _ in found]
                with np.errstate(invalid="ignore", divide="ignore"):
                    value = np.asarray(of(*plain), dtype=np.float64)
                error = 2 * epsilon("f32") * np.abs(value)
                if fn in ("exp", "tanh", "silu", "gelu_tanh"):  # by powers of two: the argument is rounded once more
                    error = error * (1 + np.abs(plain[0])) + 2 * epsilon("f32") * (fn == "tanh")
                with np.errstate(all="ignore"):
                    for i, (x, d) in enumerate(found):
                        ends = (of(*plain[:i], x + sign * d, *plain[i + 1 :]) for sign in (-1.0, 1.0))
                        moved = [np.nan_to_num(np.abs(np.asarray(end, dtype=np.float64) - value)) for end in ends]
                        error = error + np.maximum(*moved)
                return value, error
            case _:
                x = self._numpy.of(e, axes)
                return x, np.zeros_like(x)
