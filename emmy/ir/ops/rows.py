"""Norms, statistics and softmax of rows, and what is made of each element: formulas under short names. Must not know schedules.

    rms_norm:MxK:f16[:residual]   norm_add_norm:MxK:f16[:scale]   rstd:MxK:f16   row_sum:MxK:f16   softmax:MxK:f16
    scale:MxN:f16   norm_scale:MxN:f16   geglu_mul:MxN:f16   swiglu_mul:MxN:f16   cast:MxN:f32:f16   copy:MxN:f16

M may be open, `m(1..4096)`. Norms of heads are norms of rows of head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np

from emmy.errors import UsageError
from emmy.ir.dtype import DType, decode
from emmy.ir.expr import FUNCTIONS, Array, parse
from emmy.ir.ops.formula import FormulaOp
from emmy.ir.ops.op import PARSERS, Storage
from emmy.ir.ops.sizes import parse_dtype, parse_shape, part_of
from emmy.ir.program import MAX, SUM, Dim, Program, Reduce, Stage, Value

EPS = 1e-6  # of every norm


@dataclass(frozen=True)
class RowOp(FormulaOp):
    """Rows [m,n] of `dtype`, row-major; arithmetic and statistics in f32."""

    m: Dim
    n: int
    dtype: DType = "f32"

    @property
    def options(self) -> tuple[str, ...]:
        """Words behind the dtype."""
        return ()

    @property
    def key(self) -> str:
        return ":".join((self.kind, f"{self.m}x{self.n}", self.dtype, *self.options))

    def within(self, symbol: str, lo: int, hi: int) -> RowOp:
        return replace(self, m=part_of(self.key, self.m, symbol, lo, hi))

    def _program(self, inputs: tuple[Value, ...], stages: tuple[Stage, ...], outputs: tuple[str, ...]) -> Program:
        return Program((("m", self.m), ("n", self.n)), inputs, stages, outputs)

    def _matrix(self, name: str) -> Value:
        return Value(name, ("m", "n"), self.dtype)

    def _made(self, body: str, dtype: DType | None = None) -> Stage:
        return Stage("Y", ("m", "n"), parse(body), (), dtype or self.dtype)

    def _decoded(self, inputs: Mapping[str, Storage]) -> list[Array]:
        return [decode(inputs[v.name], v.dtype) for v in self.program().inputs]


def _fold(out: str, body: str, dtype: DType = "f32", monoid: str = "sum") -> Stage:
    return Stage(out, ("m",), parse(body), (Reduce("n", {"sum": SUM, "max": MAX}[monoid]),), dtype)


@dataclass(frozen=True)
class RmsNorm(RowOp):
    """Y = X / sqrt(mean(X^2) + 1e-6) * w over rows; with a residual, H = X + R is an output too, and Y the norm of H.

    H is normed as it is in f32 or as it was stored; the tolerance has room for the difference.
    """

    residual: bool = False
    kind: ClassVar[str] = "rms_norm"

    @property
    def options(self) -> tuple[str, ...]:
        return ("residual",) if self.residual else ()

    def program(self) -> Program:
        x, w = "H" if self.residual else "X", Value("w", ("n",), self.dtype, constant=True)
        norm = (
            _fold("S", f"{x}[m,n] * {x}[m,n]"),
            self._made(f"{x}[m,n] * rsqrt(S[m] * {1 / self.n!r} + {EPS}) * w[n]"),
        )
        if not self.residual:
            return self._program((self._matrix("X"), w), norm, ("Y",))
        added = Stage("H", ("m", "n"), parse("X[m,n] + R[m,n]"), (), self.dtype)
        return self._program((self._matrix("X"), self._matrix("R"), w), (added, *norm), ("H", "Y"))

    def reference(self, inputs: Mapping[str, Storage]) -> dict[str, Array]:
        x, *other, w = self._decoded(inputs)
        h = x + other[0] if self.residual else x
        y = h / np.sqrt(np.mean(np.square(h), axis=1, keepdims=True) + EPS) * w
        return {"H": h, "Y": y} if self.residual else {"Y": y}


@dataclass(frozen=True)
class NormAddNorm(RowOp):
    """H = norm(X) * v + R, what leaves a block whose end is normed, and Y = norm(H) * w, what opens the next; each norm divides by
    sqrt(mean(..^2) + 1e-6). With a scale, one number of `dtype`, H is its product with that.
    """

    scale: bool = False
    kind: ClassVar[str] = "norm_add_norm"

    @property
    def options(self) -> tuple[str, ...]:
        return ("scale",) if self.scale else ()

    def program(self) -> Program:
        v, w = (Value(name, ("n",), self.dtype, constant=True) for name in "vw")
        factor = (Value("s", (), self.dtype, constant=True),) * self.scale
        per_row = f"{1 / self.n!r} + {EPS}"
        left = f"X[m,n] * rsqrt(T[m] * {per_row}) * v[n] + R[m,n]"
        stages = (
            _fold("T", "X[m,n] * X[m,n]"),
            Stage("H", ("m", "n"), parse(f"({left}) * s[()]" if self.scale else left), (), self.dtype),
            _fold("S", "H[m,n] * H[m,n]"),
            self._made(f"H[m,n] * rsqrt(S[m] * {per_row}) * w[n]"),
        )
        return self._program((self._matrix("X"), self._matrix("R"), v, w, *factor), stages, ("H", "Y"))

    def reference(self, inputs: Mapping[str, Storage]) -> dict[str, Array]:
        x, r, v, w, *factor = self._decoded(inputs)
        h = (_normed(x) * v + r) * (factor[0] if factor else 1.0)
        return {"H": h, "Y": _normed(h) * w}


def _normed(x: Array) -> Array:
    return np.asarray(x / np.sqrt(np.mean(np.square(x), axis=1, keepdims=True) + EPS))


@dataclass(frozen=True)
class Rstd(RowOp):
    """r[m] = 1 / sqrt(mean over n of X^2 + 1e-6), in f32: the statistic of an RMSNorm."""

    kind: ClassVar[str] = "rstd"

    def program(self) -> Program:
        finished = Stage("r", ("m",), parse(f"rsqrt(S[m] * {1 / self.n!r} + {EPS})"))
        return self._program((self._matrix("X"),), (_fold("S", "X[m,n] * X[m,n]"), finished), ("r",))

    def reference(self, inputs: Mapping[str, Storage]) -> dict[str, Array]:
        (x,) = self._decoded(inputs)
        return {"r": 1 / np.sqrt(np.mean(np.square(x), axis=1) + EPS)}


@dataclass(frozen=True)
class RowSum(RowOp):
    """s[m] = sum over n of X, in `dtype`."""

    kind: ClassVar[str] = "row_sum"

    def program(self) -> Program:
        return self._program((self._matrix("X"),), (_fold("s", "X[m,n]", self.dtype),), ("s",))

    def reference(self, inputs: Mapping[str, Storage]) -> dict[str, Array]:
        (x,) = self._decoded(inputs)
        return {"s": np.sum(x, axis=1)}


@dataclass(frozen=True)
class Softmax(RowOp):
    """Y = exp(X - max) / sum over n of exp(X - max)."""

    kind: ClassVar[str] = "softmax"

    def program(self) -> Program:
        stages = (
            _fold("M", "X[m,n]", monoid="max"),
            _fold("S", "exp(X[m,n] - M[m])"),
            Stage("r", ("m",), parse("1 / S[m]")),
            self._made("exp(X[m,n] - M[m]) * r[m]"),
        )
        return self._program((self._matrix("X"),), stages, ("Y",))

    def reference(self, inputs: Mapping[str, Storage]) -> dict[str, Array]:
        (x,) = self._decoded(inputs)
        e = np.exp(x - np.max(x, axis=1, keepdims=True))
        return {"Y": e / np.sum(e, axis=1, keepdims=True)}


# ---------------------------------------------------------------- element by element
@dataclass(frozen=True)
class Scale(RowOp):
    """Y = X * s, s being one number in f32."""

    kind: ClassVar[str] = "scale"

    def program(self) -> Program:
        return self._program((self._matrix("X"), Value("s", ())), (self._made("X[m,n] * s[()]"),), ("Y",))

    def reference(self, inputs: Mapping[str, Storage]) -> dict[str, Array]:
        x, s = self._decoded(inputs)
        return {"Y": x * s}


@dataclass(frozen=True)
class NormScale(RowOp):
    """Y = X * r[m] * w[n]: the second half of an RMSNorm, r being what `rstd` made, in f32."""

    kind: ClassVar[str] = "norm_scale"

    def program(self) -> Program:
        inputs = (self._matrix("X"), Value("r", ("m",)), Value("w", ("n",), self.dtype, constant=True))
        return self._program(inputs, (self._made("X[m,n] * r[m] * w[n]"),), ("Y",))

    def reference(self, inputs: Mapping[str, Storage]) -> dict[str, Array]:
        x, r, w = self._decoded(inputs)
        return {"Y": x * r[:, None] * w}


@dataclass(frozen=True)
class GatedProduct(RowOp):
    """Y = activation(G) * U: what is left of a gated pair of linears once both are there."""

    activation: ClassVar[str]

    def program(self) -> Program:
        return self._program(
            (self._matrix("G"), self._matrix("U")), (self._made(f"{self.activation}(G[m,n]) * U[m,n]"),), ("Y",)
        )

    def reference(self, inputs: Mapping[str, Storage]) -> dict[str, Array]:
        gate, up = self._decoded(inputs)
        return {"Y": FUNCTIONS[self.activation][1](gate) * up}


@dataclass(frozen=True)
class GegluProduct(GatedProduct):
    """Gated by gelu, in its tanh form."""

    kind: ClassVar[str] = "geglu_mul"
    activation: ClassVar[str] = "gelu_tanh"


@dataclass(frozen=True)
class SwigluProduct(GatedProduct):
    """Gated by silu."""

    kind: ClassVar[str] = "swiglu_mul"
    activation: ClassVar[str] = "silu"


@dataclass(frozen=True)
class Copy(RowOp):
    """Y = X."""

    kind: ClassVar[str] = "copy"

    def program(self) -> Program:
        return self._program((self._matrix("X"),), (self._made("X[m,n]"),), ("Y",))

    def reference(self, inputs: Mapping[str, Storage]) -> dict[str, Array]:
        return {"Y": self._decoded(inputs)[0]}


@dataclass(frozen=True)
class Cast(RowOp):
    """Y = X in another dtype."""

    to: DType = "f16"
    kind: ClassVar[str] = "cast"

    @property
    def options(self) -> tuple[str, ...]:
        return (self.to,)

    def program(self) -> Program:
        return self._program((self._matrix("X"),), (self._made("X[m,n]", self.to),), ("Y",))

    def reference(self, inputs: Mapping[str, Storage]) -> dict[str, Array]:
        return {"Y": self._decoded(inputs)[0]}


# ---------------------------------------------------------------- text
def _parse(op: Callable[[Dim, int, DType, list[str]], RowOp], kind: str, words: int, rest: str) -> RowOp:
    (m, n), (*said,) = parse_shape(kind, rest, ("M", "N"))
    if not 1 <= len(said) <= 1 + words or not isinstance(n, int):
        raise UsageError(f"op '{kind}:{rest[:100]}': expected {kind}:MxN:dtype" + ", and one word more" * words)
    return op(m, n, parse_dtype(kind, said[0]), said[1:])


def _norm(m: Dim, n: int, dtype: DType, words: list[str]) -> RowOp:
    if words not in ([], ["residual"]):
        raise UsageError(f"rms_norm: the option {words[0]!r} is not residual")
    return RmsNorm(m, n, dtype, bool(words))


def _norms(m: Dim, n: int, dtype: DType, words: list[str]) -> RowOp:
    if words not in ([], ["scale"]):
        raise UsageError(f"norm_add_norm: the option {words[0]!r} is not scale")
    return NormAddNorm(m, n, dtype, bool(words))


def _cast(m: Dim, n: int, dtype: DType, words: list[str]) -> RowOp:
    return Cast(m, n, dtype, parse_dtype("cast", words[0] if words else "none"))


def _plain(op: type[RowOp], m: Dim, n: int, dtype: DType, words: list[str]) -> RowOp:
    return op(m, n, dtype)


PARSERS["rms_norm"] = partial(_parse, _norm, "rms_norm", 1)
PARSERS["norm_add_norm"] = partial(_parse, _norms, "norm_add_norm", 1)
PARSERS["cast"] = partial(_parse, _cast, "cast", 1)
for _op in (Rstd, RowSum, Softmax, Scale, NormScale, GegluProduct, SwigluProduct, Copy):
    PARSERS[_op.kind] = partial(_parse, partial(_plain, _op), _op.kind, 0)
