"""Rotary embeddings and rows taken from a table: ops that read at computed positions. Must not know schedules.

    rope:HxSxD:f16[:R]        embedding:TxDxV:f16

S and T may be open, `m(1..4096)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import ClassVar

import numpy as np

from emmy.errors import UsageError
from emmy.ir.dtype import DType, decode
from emmy.ir.expr import Array, parse
from emmy.ir.ops.formula import FormulaOp
from emmy.ir.ops.op import PARSERS, Storage
from emmy.ir.ops.sizes import parse_dtype, parse_shape, part_of
from emmy.ir.program import Dim, Program, Stage, Value


@dataclass(frozen=True)
class Rope(FormulaOp):
    """Rotary embedding of X[heads, tokens, head_dim]: element i and i + R/2 of each head are turned by the token's angle i.

    y_i = x_i cos_i - x_(i+R/2) sin_i,  y_(i+R/2) = x_(i+R/2) cos_i + x_i sin_i; what is beyond R stays. This is Hugging
    Face's rotate_half form, with tables of R/2 columns. In the program a head is `r` parts of R/2 elements.

    rotary: R, even; head_dim is a multiple of R/2
    """

    heads: int
    m: Dim
    head_dim: int
    dtype: DType = "f32"
    rotary: int = 0  # 0: all of head_dim
    kind: ClassVar[str] = "rope"

    def __post_init__(self) -> None:
        if self.turned % 2 or self.turned < 2 or self.turned > self.head_dim or self.head_dim % (self.turned // 2):
            raise UsageError(
                f"rope: {self.turned} of {self.head_dim} elements are turned: an even number, half of which divides {self.head_dim}"
            )

    @property
    def turned(self) -> int:
        """Elements of a head that are turned."""
        return self.rotary or self.head_dim

    @property
    def key(self) -> str:
        more = f":{self.rotary}" if self.rotary else ""
        return f"rope:{self.heads}x{self.m}x{self.head_dim}:{self.dtype}{more}"

    def program(self) -> Program:
        half = self.turned // 2
        parts = self.head_dim // half
        low = "X[h,m,0,i] * cos[m,i] - X[h,m,1,i] * sin[m,i]"
        high = "X[h,m,1,i] * cos[m,i] + X[h,m,0,i] * sin[m,i]"
        body = f"where(r <= 0, {low}, {high if parts == 2 else f'where(r <= 1, {high}, X[h,m,r,i])'})"
        axes = ("h", "m", "r", "i")
        tables = tuple(Value(t, ("m", "i"), self.dtype) for t in ("cos", "sin"))
        dims = (("h", self.heads), ("m", self.m), ("r", parts), ("i", half))
        stage = Stage("Y", axes, parse(body), (), self.dtype)
        return Program(dims, (Value("X", axes, self.dtype), *tables), (stage,), ("Y",))

    def within(self, symbol: str, lo: int, hi: int) -> Rope:
        return replace(self, m=part_of(self.key, self.m, symbol, lo, hi))

    def reference(self, inputs: Mapping[str, Storage]) -> dict[str, Array]:
        x, cos, sin = (decode(inputs[v.name], v.dtype) for v in self.program().inputs)
        y = x.copy()
        y[:, :, 0] = x[:, :, 0] * cos - x[:, :, 1] * sin
        y[:, :, 1] = x[:, :, 1] * cos + x[:, :, 0] * sin
        return {"Y": y}


@dataclass(frozen=True)
class Embedding(FormulaOp):
    """Y[m,n] = E[ids[m],n] * sqrt(hidden): rows of a table of `vocabulary`, by int32 positions in 0..vocabulary - 1."""

    m: Dim
    hidden: int
    vocabulary: int
    dtype: DType = "f32"
    kind: ClassVar[str] = "embedding"

    @property
    def key(self) -> str:
        return f"embedding:{self.m}x{self.hidden}x{self.vocabulary}:{self.dtype}"

    def program(self) -> Program:
        table = Value("E", ("v", "n"), self.dtype, constant=True)
        stage = Stage("Y", ("m", "n"), parse(f"E[ids[m],n] * {sqrt(self.hidden)!r}"), (), self.dtype)
        dims = (("m", self.m), ("n", self.hidden), ("v", self.vocabulary))
        return Program(dims, (Value("ids", ("m",), "i32"), table), (stage,), ("Y",))

    def within(self, symbol: str, lo: int, hi: int) -> Embedding:
        return replace(self, m=part_of(self.key, self.m, symbol, lo, hi))

    def reference(self, inputs: Mapping[str, Storage]) -> dict[str, Array]:
        return {"Y": decode(inputs["E"][inputs["ids"].astype(np.intp)], self.dtype) * sqrt(self.hidden)}


def _rope(rest: str) -> Rope:
    (heads, m, head_dim), words = parse_shape("rope", rest, ("heads", "tokens", "head_dim"))
    fixed = isinstance(heads, int) and isinstance(head_dim, int)
    if not fixed or not 1 <= len(words) <= 2 or (len(words) == 2 and not words[1].isdecimal()):
        raise UsageError(
            f"op 'rope:{rest[:100]}': expected rope:HxSxD:dtype, and perhaps :R, the elements that are turned"
        )
    rotary = int(words[1]) if len(words) == 2 else 0
    if len(words) == 2 and rotary == 0:
        raise UsageError(f"op 'rope:{rest[:100]}': 0 elements are turned")
    return Rope(int(str(heads)), m, int(str(head_dim)), parse_dtype("rope", words[0]), rotary)


def _embedding(rest: str) -> Embedding:
    (m, hidden, vocabulary), words = parse_shape("embedding", rest, ("tokens", "hidden", "vocabulary"))
    if not isinstance(hidden, int) or not isinstance(vocabulary, int) or len(words) != 1:
        raise UsageError(f"op 'embedding:{rest[:100]}': expected embedding:TxDxV:dtype")
    return Embedding(m, hidden, vocabulary, parse_dtype("embedding", words[0]))


PARSERS["rope"] = _rope
PARSERS["embedding"] = _embedding
