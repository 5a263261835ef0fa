"""O = softmax(scale Q K^T + mask) V: attention with grouped heads, causal masks and windows. Must not know schedules or devices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import ClassVar

import numpy as np

from emmy.errors import UsageError
from emmy.ir.dtype import DTYPES, DType, decode, epsilon, size_bytes
from emmy.ir.expr import Apply, Array, Axis, Const, Expr, Read, parse
from emmy.ir.ops.op import PARSERS, Accumulate, InputKind, Op, Storage, Work, drawn
from emmy.ir.ops.sizes import part_of
from emmy.ir.program import MAX, SUM, Dim, Program, Reduce, Stage, Sym, Value, upper

MASKED, NOTHING = -1e30, -3e38  # logits that add nothing: beside one that is not masked, beside any
_MOST = 1 << 20
_NUMBER = r"[0-9]{1,18}"
_LENGTH = rf"{_NUMBER}|m\({_NUMBER}\.\.{_NUMBER}\)"
_SHAPE = re.compile(rf"(?P<h>{_NUMBER})x(?P<s>{_LENGTH})x(?P<t>{_LENGTH})x(?P<d>{_NUMBER})")


@dataclass(frozen=True, slots=True)
class Attention(Op):
    """O[h,s,:] = sum over t of softmax_t(scale * Q[h,s,:] . K[h,t,:]) V[h,t,:], row-major; softmax and sums in f32, all else in `dtype`.

    kv_heads: of K and V, a divisor of `heads`: heads [g,r] of Q and O share head g of K and V
    causal:   queries are the last `queries` of `keys` positions, and see no later key
    window:   with causal: of those, the last so many only, its own position included; 0 = all
    scale:    of the logits; 0 = 1 / sqrt(dim)
    shared:   K is V too

    A query that sees no key gets zeros. Q and O have axes h,s and the head's own; g,r,s where heads share keys, g,r for one query.
    """

    heads: int
    queries: Dim
    keys: Dim
    dim: int
    dtype: DType = "f16"
    causal: bool = False
    window: int = 0
    kv_heads: int = 0
    shared: bool = False
    scale: float = 0.0
    kind: ClassVar[str] = "attention"

    def __post_init__(self) -> None:
        sizes = (("heads", self.heads), ("queries", self.queries), ("keys", self.keys), ("dim", self.dim))
        for name, size in sizes:
            if not 1 <= upper(size) <= _MOST or (isinstance(size, Sym) and not 1 <= size.lo <= size.hi):
                raise UsageError(f"attention: {name} is {size}, allowed 1..{_MOST}")
        if self.dtype not in DTYPES:
            raise UsageError(f"attention: dtype {self.dtype}; allowed are {', '.join(DTYPES)}")
        if self.kv_heads < 0 or self.heads % self.groups:
            raise UsageError(f"attention: {self.kv_heads} heads of K and V do not divide the {self.heads} of Q")
        if self.window < 0 or (self.window and not self.causal):
            raise UsageError(f"attention: a window of {self.window} positions needs causal")
        if isinstance(self.queries, Sym) != isinstance(self.keys, Sym) or (
            isinstance(self.queries, Sym) and self.queries != self.keys
        ):
            raise UsageError(
                f"attention: {self.queries} queries of {self.keys} keys: both are open and equal, or neither"
            )
        if self.scale:
            check_scale("attention", self.scale)

    @property
    def groups(self) -> int:
        """Heads of K and V."""
        return self.kv_heads or self.heads

    @property
    def key(self) -> str:
        words = ["causal"] if self.causal else []
        words += [f"window{self.window}"] if self.window else []
        words += [f"kv{self.groups}"] if self.groups != self.heads else []
        words += ["k_is_v"] if self.shared else []
        words += [f"scale{self.scale!r}"] if self.scale else []
        shape = f"{self.heads}x{self.queries}x{self.keys}x{self.dim}"
        return f"attention:{shape}:{self.dtype}" + (f":{','.join(words)}" if words else "")

    @property
    def _sizes(self) -> tuple[tuple[str, Dim], ...]:
        """The heads' axes, those of K and V first, then the others."""
        grouped = self.groups != self.heads or self._one
        heads = (("g", self.groups), ("r", self.heads // self.groups)) if grouped else (("h", self.heads),)
        rows = () if self._one else (("s", self.queries),)
        return (*heads, *rows, ("t", self.keys), ("d", self.dim), ("e", self.dim))

    @property
    def _one(self) -> bool:
        """Whether there is one query: then the heads that share keys are the rows of a matrix, and there is no axis s."""
        return self.queries == 1

    @property
    def _later(self) -> int:
        """Keys before the first query."""
        return 0 if isinstance(self.keys, Sym) or isinstance(self.queries, Sym) else self.keys - self.queries

    @property
    def _scale(self) -> float:
        return self.scale or 1 / sqrt(self.dim)

    @property
    def _blind(self) -> bool:
        """Whether there are queries that see no key."""
        return self.causal and self._later < 0

    def program(self) -> Program:
        dims = self._sizes
        kv, q = dims[0][0], tuple(a for a, _ in dims if a in "ghr")
        row = q if self._one else (*q, "s")
        logit, out = (*row, "t"), (*row, "e")
        values = Read("K", (kv, "t", Axis("e"))) if self.shared else Read("V", (kv, "t", "e"))
        scores = Apply("mul", (Read("Q", (*row, "d")), Read("K", (kv, "t", "d"))))
        body: Expr = Apply("mul", (Read("S", logit), Const(self._scale)))
        nothing = Const(NOTHING if self._blind else MASKED)
        if self.causal and not self._one:  # one query is at the last position
            seen = parse(f"t + {-self._later} <= s" if self._blind else _moved("t <= s", self._later))
            body = Apply("where", (seen, body, nothing))
        if self.window and self._one:
            body = Apply("where", (parse(f"{self._later - self.window} < t"), body, nothing))
        elif self.window:
            here = (
                f"s < t + {self.window - self._later}"
                if self.window > self._later
                else f"{_moved('s', self._later - self.window)} < t"
            )
            body = Apply("where", (parse(here), body, nothing))
        stages = (
            Stage("S", logit, scores, (Reduce("d", SUM),)),
            Stage("A", logit, body),
            *softmax_stages(row, "t", out, values, self.dtype, blind=self._blind),
        )
        inputs: tuple[Value, ...] = (Value("Q", (*row, "d"), self.dtype), Value("K", (kv, "t", "d"), self.dtype))
        if not self.shared:
            inputs += (Value("V", (kv, "t", "e"), self.dtype),)
        return Program(dims, inputs, stages, ("O",))

    def within(self, symbol: str, lo: int, hi: int) -> Attention:
        part = part_of(self.key, self.queries, symbol, lo, hi)
        return replace(self, queries=part, keys=part)

    def inputs(self, kind: InputKind, seed: int, sizes: Mapping[str, int] | None = None) -> dict[str, Storage]:
        return drawn(self.program(), kind, seed, sizes, {})

    def reference(self, inputs: Mapping[str, Storage]) -> dict[str, Array]:
        q, k, v = (decode(inputs[x], self.dtype) for x in ("Q", "K", "K" if self.shared else "V"))
        if self.groups != self.heads or self._one:
            k, v = k[:, None], v[:, None]
        if self._one:
            q = q[..., None, :]
        logits = np.matmul(q, np.swapaxes(k, -1, -2)) * self._scale
        s, t = (np.arange(n) for n in logits.shape[-2:])
        at = s[:, None] + (len(t) - len(s))
        seen = np.ones(logits.shape[-2:], bool) if not self.causal else t[None] <= at
        if self.window:
            seen &= at < t[None] + self.window
        logits = np.where(seen, logits, -np.inf)
        top = np.max(logits, axis=-1, keepdims=True)
        weights = np.where(seen, np.exp(logits - np.where(np.isfinite(top), top, 0.0)), 0.0)
        total = np.sum(weights, axis=-1, keepdims=True)
        out = np.matmul(weights, v) / np.where(total > 0, total, 1.0)
        return {"O": out[..., 0, :] if self._one else out}

    def seen(self, sizes: Mapping[str, int] | None = None) -> int:
        """Pairs of a query and a key that it sees, of one head."""
        n = self.program().sizes(sizes or self.typical_sizes())
        if not self.causal:
            return n.get("s", 1) * n["t"]
        last = np.arange(n.get("s", 1)) + n["t"] - n.get("s", 1) + 1  # keys up to each query
        return int(np.clip(last, 0, self.window or n["t"]).sum())

    def work(self, sizes: Mapping[str, int] | None = None) -> Work:
        n = self.program().sizes(sizes or self.typical_sizes())
        moved = 2 * self.heads * n.get("s", 1) + (1 if self.shared else 2) * self.groups * n["t"]
        return Work(4.0 * self.heads * self.seen(sizes) * self.dim, float(moved * self.dim * size_bytes(self.dtype)))

    def is_exact(self, kind: InputKind, output: str | None = None) -> bool:
        return False  # no exponential is

    def tolerance(self, accumulate: Accumulate = "f32", output: str | None = None) -> tuple[float, float]:
        """Absolute: a mean of V's elements, which are of unit variance and at most about 5, with weights that are each off by a
        factor. Weights are rounded to `dtype` before the product, at random: a query that sees few keys is off by one rounding
        of 2 to 5, others by less. Logits are sums of `dim` products in f32, whose roundings an exponential hands on as they
        are: those of whole numbers reach 4 sqrt(dim) deviations. Sums in f16 are off as a matmul's are (see Matmul).
        Relative: one rounding of the output.
        """
        return softmax_error(self.dim, self._scale, self.dtype, accumulate)


def softmax_stages(
    row: tuple[str, ...], t: str, out: tuple[str, ...], values: Read, dtype: DType, *, blind: bool
) -> tuple[Stage, ...]:
    """O, the sum over t of softmax_t(A[row,t]) times values, with every stage spelled out. blind: rows may see nothing, and get zeros."""
    logit = (*row, t)
    a, weight = Read("A", logit), Read("P", logit)
    top: Expr = Apply("maximum", (a, Const(MASKED))) if blind else a
    total: Expr = Apply("maximum", (Read("L", row), Const(1e-30))) if blind else Read("L", row)
    return (
        Stage("M", row, top, (Reduce(t, MAX),)),
        Stage("P", logit, Apply("exp", (Apply("sub", (a, Read("M", row))),))),
        Stage("L", row, weight, (Reduce(t, SUM),)),
        Stage("N", out, Apply("mul", (weight, values)), (Reduce(t, SUM),)),
        Stage("O", out, Apply("div", (Read("N", out), total)), (), dtype),
    )


def softmax_error(dim: int, scale: float, dtype: DType, accumulate: Accumulate) -> tuple[float, float]:
    """(absolute, relative) error that attention may have: see `Attention.tolerance`."""
    logits = 8 * 2.0**-24 * sqrt(dim) * max(1.0, scale * sqrt(dim)) + 16 * 2.0**-22
    sums = {"f32": 0.0, "hybrid": 2.0**-8, "f16": 2.0**-7}[accumulate]
    return 5 * (epsilon(dtype) + logits) + sums, epsilon(dtype)


def _moved(text: str, by: int) -> str:
    return f"{text} + {by}" if by else text


def _length(text: str) -> Dim:
    if not text.startswith("m("):
        return int(text)
    lo, hi = text[2:-1].split("..")
    return Sym("m", int(lo), int(hi))


def _parse(rest: str) -> Attention:
    shape, _, tail = rest.partition(":")
    dtype, colon, said = tail.partition(":")
    where = f"op 'attention:{rest if len(rest) <= 100 else rest[:100] + '...'}'"
    hit = _SHAPE.fullmatch(shape)
    if not hit:
        raise UsageError(f"{where}: the shape is not HEADSxQUERIESxKEYSxDIM, such as 16x512x512x256")
    found = next((d for d in DTYPES if d == dtype), None)
    if found is None:
        raise UsageError(f"{where}: the dtype is not one of {', '.join(DTYPES)}")
    words = said.split(",") if colon else []
    options = dict(_option(where, w) for w in words)
    if len(options) != len(words):
        raise UsageError(f"{where}: each option may stand once")
    return Attention(
        int(hit["h"]), _length(hit["s"]), _length(hit["t"]), int(hit["d"]), found,
        "causal" in options, int(options.get("window", 0)), int(options.get("kv", 0)), "k_is_v" in options,
        options.get("scale", 0.0),
    )  # fmt: skip


def _option(where: str, word: str) -> tuple[str, float]:
    hit = re.fullmatch(
        r"(causal|k_is_v)|(window|kv)([1-9][0-9]{0,8})|(scale)([0-9]+(?:\.[0-9]+)?(?:e-?[0-9]{1,2})?)", word
    )
    if not hit:
        raise UsageError(
            f"{where}: the options are causal, window<N>, kv<N>, k_is_v and scale<X>; got {word!r}, N is 1 or more"
        )
    return read_option(where, hit)


def check_scale(where: str, scale: float) -> None:
    """Raises UsageError for a scale of logits that is not above 0, is no number, or makes more of them than f32 holds."""
    if not 1e-9 <= scale <= 1e9:
        raise UsageError(f"{where}: scale is {scale:g}, allowed 1e-09..1e+09; without one it is 1 / sqrt(dim)")


def read_option(where: str, hit: re.Match[str]) -> tuple[str, float]:
    """A word without a number, with a whole one, or `scale` with any: the groups of `hit` in that order. Raises UsageError."""
    if hit[4]:
        check_scale(where, float(hit[5]))  # a text that says 0 does not mean the default
    return (hit[1], 1.0) if hit[1] else (hit[2] or hit[4], float(hit[3] or hit[5]))


PARSERS["attention"] = _parse
