"""Attention of a batch of sequences whose keys and values lie in pages of one pool, found by a table. Knows no schedules.

    paged_attention:BxHxSxTxD:f16:causal,kv8,page16

is what a server computes: B sequences of H heads, S queries each, against at most T keys. As vLLM keeps them, keys and values
are [pool, page, kv_heads, D] each; row u of a sequence's table says in which page its keys u * page .. lie, and `lengths` how
many it has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from emmy.errors import UsageError
from emmy.ir.dtype import DTYPES, DType, decode, size_bytes
from emmy.ir.expr import Apply, Array, Axis, Const, Expr, Read, parse
from emmy.ir.ops.attention import NOTHING, check_scale, read_option, softmax_error, softmax_stages
from emmy.ir.ops.op import PARSERS, Accumulate, InputKind, Op, Storage, Work, drawn
from emmy.ir.ops.sizes import parse_dtype, parse_shape, part_of
from emmy.ir.program import SUM, Dim, Program, Reduce, Stage, Value, upper

_MOST = 1 << 20


@dataclass(frozen=True, slots=True)
class PagedAttention(Op):
    """O[b,g,q,:] = sum over t of softmax_t(scale * Q[b,g,q,:] . K[b,g,t,:]) V[b,g,t,:]; softmax and sums in f32, all else in `dtype`.

    batch:    sequences; may be open, `m(1..64)`
    queries:  of each sequence, its last positions where `causal`
    keys:     of a sequence at most; `lengths[b]`, i32 in 0..keys, says how many it has
    kv_heads: of K and V, a divisor of `heads`; q = query * (heads / kv_heads) + head: for one query rows are vLLM's [tokens, heads, D]
    page:     keys in a page; pool: pages there are, by default as many as the sequences could need
    window:   with causal: of the keys up to its own position a query sees the last so many only; 0 = all
    shared:   K is V too

    A sequence's table has keys / page pages (rounded up); entries behind its length must be numbers of pages too, 0 will do: a CPU reads
    what they say and masks it, a GPU does not ask for it. Rows of a page behind the length must hold finite numbers. A query that sees
    no key, for a sequence is empty or shorter than its queries, gets zeros.
    """

    batch: Dim
    heads: int
    queries: int
    keys: int
    dim: int
    dtype: DType = "f16"
    causal: bool = False
    window: int = 0
    kv_heads: int = 0
    page: int = 16
    pool: int = 0
    shared: bool = False
    scale: float = 0.0
    kind: ClassVar[str] = "paged_attention"

    def __post_init__(self) -> None:
        sizes = (("batch", upper(self.batch)), ("heads", self.heads), ("queries", self.queries), ("keys", self.keys))
        for name, size in (*sizes, ("dim", self.dim), ("page", self.page), ("pool", self.pages)):
            if not 1 <= size <= _MOST:
                raise UsageError(f"paged_attention: {name} is {size}, allowed 1..{_MOST}")
        if self.dtype not in DTYPES:
            raise UsageError(f"paged_attention: dtype {self.dtype}; allowed are {', '.join(DTYPES)}")
        if self.heads % self.groups:
            raise UsageError(f"paged_attention: {self.groups} heads of K and V do not divide the {self.heads} of Q")
        if self.window and not self.causal:
            raise UsageError(f"paged_attention: a window of {self.window} positions needs causal")
        if self.scale:
            check_scale("paged_attention", self.scale)

    @property
    def groups(self) -> int:
        """Heads of K and V."""
        return self.kv_heads or self.heads

    @property
    def columns(self) -> int:
        """Of the table: pages of a sequence."""
        return -(-self.keys // self.page)

    @property
    def pages(self) -> int:
        """Of the pool."""
        return self.pool or upper(self.batch) * self.columns

    @property
    def _share(self) -> int:
        """Heads of Q that share one of K and V."""
        return self.heads // self.groups

    @property
    def _scale(self) -> float:
        return self.scale or 1 / sqrt(self.dim)

    @property
    def key(self) -> str:
        words = ["causal"] if self.causal else []
        words += [f"window{self.window}"] if self.window else []
        words += [f"kv{self.groups}"] if self.groups != self.heads else []
        words += [f"page{self.page}"]
        words += [f"pool{self.pool}"] if self.pool else []
        words += ["k_is_v"] if self.shared else []
        words += [f"scale{self.scale!r}"] if self.scale else []
        shape = f"{self.batch}x{self.heads}x{self.queries}x{self.keys}x{self.dim}"
        return f"{self.kind}:{shape}:{self.dtype}:{','.join(words)}"

    def program(self) -> Program:
        dims: tuple[tuple[str, Dim], ...] = (
            ("b", self.batch), ("g", self.groups), ("q", self.queries * self._share), ("t", self.keys), ("d", self.dim),
            ("e", self.dim), ("p", self.pages), ("j", self.page), ("u", self.columns),
        )  # fmt: skip
        row, logit, out = ("b", "g", "q"), ("b", "g", "q", "t"), ("b", "g", "q", "e")
        at = (parse(f"table[b,t // {self.page}]"), parse(f"t % {self.page}"), "g")
        pages = Value("K_pages", ("p", "j", "g", "d"), self.dtype), Value("V_pages", ("p", "j", "g", "e"), self.dtype)
        views: tuple[Stage, ...] = (Stage("K", ("b", "g", "t", "d"), Read("K_pages", (*at, "d")), (), self.dtype),)
        values = Read("K", ("b", "g", "t", Axis("e")))
        if not self.shared:
            views += (Stage("V", ("b", "g", "t", "e"), Read("V_pages", (*at, "e")), (), self.dtype),)
            values = Read("V", ("b", "g", "t", "e"))
        body: Expr = Apply("mul", (Read("S", logit), Const(self._scale)))
        for seen in self._seen:
            body = Apply("where", (parse(seen), body, Const(NOTHING)))
        stages = (
            Stage("S", logit, parse("Q[b,g,q,d] * K[b,g,t,d]"), (Reduce("d", SUM),)),
            Stage("A", logit, body),
            *softmax_stages(row, "t", out, values, self.dtype, blind=True),
        )
        told = Value("table", ("b", "u"), "i32", constant=True), Value("lengths", ("b",), "i32", constant=True)
        inputs = (Value("Q", (*row, "d"), self.dtype), *pages[: 1 if self.shared else 2], *told)
        return Program(dims, inputs, stages, ("O",), views)

    @property
    def _seen(self) -> tuple[str, ...]:
        """What is true of a query and a key that it sees. A query's own position is lengths[b] - queries + query."""
        if not self.causal:
            return ("t < lengths[b]",)
        query = f"q // {self._share} + " if self._share > 1 else "q + "
        position = f"{query if self.queries > 1 else ''}lengths[b]"
        near = (f"{position} + 1 <= t + {self.window + self.queries}",) if self.window else ()
        return (f"t + {self.queries} <= {position}", *near)

    def within(self, symbol: str, lo: int, hi: int) -> PagedAttention:
        pool = self.pool or self.pages
        return replace(self, batch=part_of(self.key, self.batch, symbol, lo, hi), pool=pool)

    def lengths(self, batch: int) -> NDArray[np.int32]:
        """Those that inputs have: from all keys for the first sequence to half as many."""
        return np.array([self.keys - self.keys * b // (2 * batch) for b in range(batch)], np.int32)

    def inputs(self, kind: InputKind, seed: int, sizes: Mapping[str, int] | None = None) -> dict[str, Storage]:
        """Pages in no order: each of the pool at most once, where there are enough."""
        p, rng = self.program(), np.random.default_rng(seed)
        out, batch = drawn(p, kind, seed, sizes, {}), p.sizes(sizes)["b"]
        count = batch * self.columns
        table = rng.permutation(self.pages)[:count] if count <= self.pages else rng.integers(0, self.pages, count)
        told = {"table": table.reshape(batch, self.columns).astype(np.int32), "lengths": self.lengths(batch)}
        return {v.name: told.get(v.name, out[v.name]) for v in p.inputs}

    def reference(self, inputs: Mapping[str, Storage]) -> dict[str, Array]:
        out = np.zeros(inputs["Q"].shape)
        t, query = np.arange(self.keys), np.arange(self.queries * self._share) // self._share
        for b, length in enumerate(inputs["lengths"]):
            rows = (
                inputs["table"][b].repeat(self.page)[: self.keys],
                np.tile(np.arange(self.page), self.columns)[: self.keys],
            )
            at = query[:, None] + int(length) - self.queries
            seen = t[None] <= at if self.causal else np.broadcast_to(t[None] < length, (len(query), len(t)))
            if self.window:
                seen = seen & (at < t[None] + self.window)
            for g in range(self.groups):
                k, v = (
                    decode(inputs[x][(*rows, g)], self.dtype)
                    for x in ("K_pages", "K_pages" if self.shared else "V_pages")
                )
                logits = np.where(seen, decode(inputs["Q"][b, g], self.dtype) @ k.T * self._scale, -np.inf)
                top = np.max(logits, axis=1, keepdims=True)
                weights = np.where(seen, np.exp(logits - np.where(np.isfinite(top), top, 0.0)), 0.0)
                total = np.sum(weights, axis=1, keepdims=True)
                out[b, g] = weights @ v / np.where(total > 0, total, 1.0)
        return {"O": out}

    def seen(self, sizes: Mapping[str, int] | None = None) -> int:
        """Pairs of a query and a key that it sees, of one head, for the lengths that inputs have."""
        batch = self.program().sizes(sizes or self.typical_sizes())["b"]
        last = self.lengths(batch)[:, None] - self.queries + np.arange(self.queries) + 1
        if not self.causal:
            return int(self.lengths(batch).sum()) * self.queries
        return int(np.clip(last, 0, self.window or self.keys).sum())

    def work(self, sizes: Mapping[str, int] | None = None) -> Work:
        batch = self.program().sizes(sizes or self.typical_sizes())["b"]
        keys = int(
            np.minimum(self.lengths(batch), (self.window + self.queries - 1) if self.window else self.keys).sum()
        )
        moved = 2 * batch * self.heads * self.queries + (1 if self.shared else 2) * self.groups * keys
        told = 4 * batch * (self.columns + 1)
        flops = 4.0 * self.heads * self.seen(sizes) * self.dim
        return Work(flops, float(moved * self.dim * size_bytes(self.dtype) + told))

    def is_exact(self, kind: InputKind, output: str | None = None) -> bool:
        return False  # no exponential is

    def tolerance(self, accumulate: Accumulate = "f32", output: str | None = None) -> tuple[float, float]:
        """That of attention on whole arrays."""
        return softmax_error(self.dim, self._scale, self.dtype, accumulate)


def _parse(rest: str) -> PagedAttention:
    (batch, *sizes), (dtype, *said) = parse_shape(
        "paged_attention", rest, ("sequences", "heads", "queries", "keys", "dim")
    )
    where = f"op 'paged_attention:{rest[:100]}'"
    if len(said) > 1 or not all(isinstance(x, int) for x in sizes):
        raise UsageError(f"{where}: expected paged_attention:BxHxSxTxD:dtype:options, of which B may be open")
    words = said[0].split(",") if said else []
    options = dict(map(partial(_option, where), words))
    if len(options) != len(words):
        raise UsageError(f"{where}: each option may stand once")
    heads, queries, keys, dim = (int(str(x)) for x in sizes)
    return PagedAttention(
        batch, heads, queries, keys, dim, parse_dtype("paged_attention", dtype), "causal" in options,
        int(options.get("window", 0)), int(options.get("kv", 0)), int(options.get("page", 16)), int(options.get("pool", 0)),
        "k_is_v" in options, options.get("scale", 0.0),
    )  # fmt: skip


def _option(where: str, word: str) -> tuple[str, float]:
    number = r"[0-9]+(?:\.[0-9]+)?(?:e-?[0-9]{1,2})?"
    hit = re.fullmatch(rf"(causal|k_is_v)|(window|kv|page|pool)([1-9][0-9]{{0,8}})|(scale)({number})", word)
    if not hit:
        known = "causal, window<N>, kv<N>, page<N>, pool<N>, k_is_v and scale<X>"
        raise UsageError(f"{where}: the options are {known}; got {word!r}, N is 1 or more")
    return read_option(where, hit)


PARSERS["paged_attention"] = _parse
