"""C = epilogue(A @ B): the projection of every transformer layer. Must not know schedules or devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import ClassVar, Literal, get_args

import numpy as np

from emmy.errors import UsageError
from emmy.ir.dtype import DType, decode, epsilon, size_bytes
from emmy.ir.expr import FUNCTIONS, Apply, Array, Expr, Read, parse
from emmy.ir.ops.op import PARSERS, Accumulate, InputKind, Op, Storage, Work, drawn
from emmy.ir.ops.sizes import Layout, check_sizes, parse_sizes, part_of
from emmy.ir.program import SUM, Dim, Program, Reduce, Stage, Value

Epilogue = Literal["bias", "gelu_tanh", "silu", "residual", "scale", "sum_squares"]
EPILOGUES: tuple[Epilogue, ...] = get_args(Epilogue)
STATISTIC: Epilogue = "sum_squares"


@dataclass(frozen=True, slots=True)
class Matmul(Op):
    """C[m,n] = epilogue(sum over k of A[m,k] * B), row-major; A, B, C and epilogue inputs in `dtype`, sums in f32.

    B and bias are parameters; A, residual and scale may have been computed just before.

    layout:   "kn" = B stored [k,n]; "nk" = B stored [n,k] (the weight of torch's linear)
    epilogue: applied left to right: bias (+ bias[n]), scale (* scale, one number), residual (+ R[m,n]), gelu_tanh, silu

    sum_squares, the last word, adds a second output: S[m] f32 = sum over n of C[m,n]^2 (of Y when there are words before it),
    what an RMSNorm that follows needs of each row. It squares elements as they are, in f32, or as they were stored in
    `dtype`, where another launch reads them again; both are right, and `tolerance` has room for the difference.
    """

    m: Dim
    n: int
    k: int
    dtype: DType = "f32"
    layout: Layout = "kn"
    epilogue: tuple[Epilogue, ...] = ()
    kind: ClassVar[str] = "matmul"

    def __post_init__(self) -> None:
        check_sizes("matmul", self.m, self.n, self.k, self.dtype, self.layout)
        if not set(self.epilogue) <= set(EPILOGUES) or len(set(self.epilogue)) != len(self.epilogue):
            allowed = f"any of {', '.join(EPILOGUES)}, each once"
            raise UsageError(f"matmul: epilogue {','.join(self.epilogue)}; allowed are {allowed}")
        if STATISTIC in self.epilogue[:-1]:
            raise UsageError(
                f"matmul: epilogue {','.join(self.epilogue)}; {STATISTIC} squares results: allowed as the last word"
            )

    @property
    def elementwise(self) -> tuple[Epilogue, ...]:
        """The words that make each element of the first output."""
        return tuple(e for e in self.epilogue if e != STATISTIC)

    @property
    def output(self) -> str:
        """The first output: the product, or what the elementwise words make of it."""
        return "Y" if self.elementwise else "C"

    @property
    def key(self) -> str:
        options = ",".join((("nk",) if self.layout == "nk" else ()) + self.epilogue)
        return f"matmul:{self.m}x{self.n}x{self.k}:{self.dtype}" + (f":{options}" if options else "")

    def program(self) -> Program:
        b_axes = ("k", "n") if self.layout == "kn" else ("n", "k")
        inputs = [Value("A", ("m", "k"), self.dtype), Value("B", b_axes, self.dtype, constant=True)]
        extra = {
            "bias": Value("bias", ("n",), self.dtype, constant=True),
            "residual": Value("R", ("m", "n"), self.dtype),
            "scale": Value("scale", (), "f32"),
        }
        inputs += [extra[e] for e in self.epilogue if e in extra]
        acc = Stage(
            "C",
            ("m", "n"),
            parse(f"A[m,k] * B[{','.join(b_axes)}]"),
            (Reduce("k", SUM),),
            "f32" if self.elementwise else self.dtype,
        )
        stages: tuple[Stage, ...] = (acc,)
        if self.elementwise:
            body: Expr = Read("C", ("m", "n"))
            for e in self.elementwise:
                body = _step(e, body)
            stages += (Stage("Y", ("m", "n"), body, (), self.dtype),)
        outputs: tuple[str, ...] = (self.output,)
        if STATISTIC in self.epilogue:
            stages += (Stage("S", ("m",), parse(f"{self.output}[m,n] * {self.output}[m,n]"), (Reduce("n", SUM),)),)
            outputs += ("S",)
        dims = (("m", self.m), ("n", self.n), ("k", self.k))
        return Program(dims, tuple(inputs), stages, outputs)

    def within(self, symbol: str, lo: int, hi: int) -> Matmul:
        return replace(self, m=part_of(self.key, self.m, symbol, lo, hi))

    def inputs(self, kind: InputKind, seed: int, sizes: Mapping[str, int] | None = None) -> dict[str, Storage]:
        return drawn(self.program(), kind, seed, sizes, {"B": 1 / sqrt(self.k)})

    def reference(self, inputs: Mapping[str, Storage]) -> dict[str, Array]:
        x = {v.name: decode(inputs[v.name], v.dtype) for v in self.program().inputs}
        y = np.matmul(x["A"], x["B"] if self.layout == "kn" else x["B"].T)
        for e in self.elementwise:
            match e:
                case "bias":
                    y = y + x["bias"]
                case "scale":
                    y = y * x["scale"]
                case "residual":
                    y = y + x["R"]
                case "gelu_tanh" | "silu":
                    y = FUNCTIONS[e][1](y)
                case "sum_squares":
                    pass
        return {self.output: y, **({"S": np.square(y).sum(1)} if STATISTIC in self.epilogue else {})}

    def work(self, sizes: Mapping[str, int] | None = None) -> Work:
        m = self.program().sizes(sizes or self.typical_sizes())["m"]
        item = size_bytes(self.dtype)
        moved = m * self.k + self.k * self.n + m * self.n * (2 if "residual" in self.epilogue else 1)
        moved += self.n if "bias" in self.epilogue else 0
        statistic = 4 * m if STATISTIC in self.epilogue else 0
        return Work(2.0 * m * self.n * self.k, float(moved * item + statistic))

    def is_exact(self, kind: InputKind, output: str | None = None) -> bool:
        largest = 2 * (4 * self.k + 2) + 2  # sums of products of -2..2, then bias, scale and residual of -2..2
        if output == "S":
            largest = largest**2 * self.n
            rounds = epsilon(self.dtype) * sqrt(largest) > 1  # some whole numbers are not stored as they are
            if rounds:
                return False
        return kind == "integer" and not {"gelu_tanh", "silu"} & set(self.epilogue) and largest < 2**24

    def tolerance(self, accumulate: Accumulate = "f32", output: str | None = None) -> tuple[float, float]:
        """Absolute: K sums of unit variance, each rounded, end about 0.4 sqrt(K) roundings off, the worst of millions of
        elements 2 to 3 sqrt(K); a factor above that is allowed (tensor cores truncate). However short K, f16 sums that reach
        4 are off by a truncation of 2^-8 (measured on an H200: 2.3e-3 at K = 8). Relative: one output rounding.

        S adds N squares: of numbers a off, 2 a |y| <= a (1 + y^2) each, and all to the same side at worst; rounded or not,
        which is to both sides and 8 / sqrt(N) of one rounding in the worst of many rows; in sums of f32.
        """
        root, half = sqrt(self.k), 2.0**-8
        absolute = {"f32": 8 * 2.0**-24 * root, "hybrid": half, "f16": max(half, 2.0**-12 * root)}[accumulate]
        absolute += 2 * epsilon("f32")
        if output != "S":
            return absolute, epsilon(self.dtype)
        root = sqrt(self.n)
        rounding = epsilon(self.dtype) * min(2.0, 8 / root)
        return absolute * self.n, absolute + rounding + 4 * epsilon("f32") * root


def _step(e: Epilogue, y: Expr) -> Expr:
    match e:
        case "bias":
            return Apply("add", (y, Read("bias", ("n",))))
        case "scale":
            return Apply("mul", (y, Read("scale", ())))
        case "residual":
            return Apply("add", (y, Read("R", ("m", "n"))))
        case "gelu_tanh" | "silu":
            return Apply(e, (y,))
        case "sum_squares":
            raise AssertionError(f"{e} makes no element")


def _parse(rest: str) -> Matmul:
    x = parse_sizes("matmul", rest, EPILOGUES)
    epilogue = tuple(e for w in x.words for e in EPILOGUES if e == w)
    return Matmul(x.m, x.n, x.k, x.dtype, x.layout, epilogue)


PARSERS["matmul"] = _parse


def matmul(
    m: Dim, n: int, k: int, dtype: DType = "f32", layout: Layout = "kn", epilogue: tuple[Epilogue, ...] = ()
) -> Matmul:
    """The op C[m,n] = epilogue(A[m,k] @ B); see Matmul. Raises UsageError for sizes below 1 or unknown words."""
    return Matmul(m, n, k, dtype, layout, epilogue)
