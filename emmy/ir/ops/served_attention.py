"""Attention as a server calls it: rows as its layers keep them, keys and values in the server's own cache. Knows no schedules.

    served_attention:BxHxSxTxD:bf16:kv8,page16,pcjgd

B sequences of S queries each, H heads, at most T keys. Q and O are [tokens, heads, D], B * S tokens. The cache is one array, in
which both keys and values lie, in pages; letters say in which order its axes follow one another in memory: p page of the pool,
c keys (0) or values (1), j row of the page, g head, d column. Row u of a sequence's table says in which page its keys
u * page .. lie. It differs from `paged_attention` in where things lie, and in who says which keys there are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from emmy.errors import UsageError
from emmy.ir.dtype import DTYPES, DType, decode, size_bytes
from emmy.ir.expr import Apply, Array, Axis, Const, Expr, Read, parse
from emmy.ir.ops.attention import NOTHING, check_scale, softmax_error, softmax_stages
from emmy.ir.ops.op import PARSERS, Accumulate, InputKind, Op, Storage, Work, drawn
from emmy.ir.ops.sizes import parse_dtype, parse_shape, part_of
from emmy.ir.program import SUM, Dim, Program, Reduce, Stage, Sym, Value, upper

_MOST = 1 << 20
_AXES = "pcjgd"


@dataclass(frozen=True, slots=True)
class ServedAttention(Op):
    """O[b,s,h,:] = sum over t of softmax_t(scale * Q[b,s,h,:] . K[b,h,t,:]) V[b,h,t,:], causal; softmax and sums in f32.

    batch, queries: sequences, and queries of each; one of the two may be open
    keys:    of a sequence at most, for which its row of the table has numbers of pages
    kv_heads: of K and V, a divisor of `heads`
    window:  of the keys up to its own position a query sees the last so many only; 0 = all
    page:    rows of a page
    pool, length: pages, and keys of the longest sequence, that inputs have; by default as many as there can be, and of prompts
             no more keys than queries. No kernel depends on them
    order:   of the cache's axes; where values lie in another one than keys, `values` is theirs

    One query of each sequence (decoding) is told `lengths[b]`, the keys there are with its own; several are told `before[b]`,
    the keys there are before the first of them. Entries of the table behind a sequence's last key must be numbers of pages, and
    rows behind it hold finite numbers, as for `paged_attention`; a sequence of length 0 gets zeros.
    """

    batch: Dim
    heads: int
    queries: Dim
    keys: int
    dim: int
    dtype: DType = "bf16"
    kv_heads: int = 0
    window: int = 0
    page: int = 16
    pool: int = 0
    length: int = 0
    order: str = _AXES
    values: str = ""
    scale: float = 0.0
    kind: ClassVar[str] = "served_attention"

    def __post_init__(self) -> None:
        sizes = (
            ("batch", upper(self.batch)),
            ("heads", self.heads),
            ("queries", upper(self.queries)),
            ("keys", self.keys),
        )
        for name, size in (*sizes, ("dim", self.dim), ("page", self.page), ("pool", self.pages)):
            if not 1 <= size <= _MOST:
                raise UsageError(f"{self.kind}: {name} is {size}, allowed 1..{_MOST}")
        if max(upper(self.queries), self.length) > self.keys:
            longest = max(upper(self.queries), self.length)
            raise UsageError(f"{self.kind}: {longest} positions of {self.keys} keys: each query is at a key's")
        if isinstance(self.batch, Sym) and isinstance(self.queries, Sym):
            raise UsageError(
                f"{self.kind}: {self.batch} sequences of {self.queries} queries: one of the two may be open"
            )
        if isinstance(self.queries, Sym) and self.queries.lo < 2:
            raise UsageError(
                f"{self.kind}: {self.queries} queries: open numbers begin at 2, one query is an op of its own"
            )
        if self.dtype not in DTYPES:
            raise UsageError(f"{self.kind}: dtype {self.dtype}; allowed are {', '.join(DTYPES)}")
        if self.heads % self.groups:
            raise UsageError(f"{self.kind}: {self.groups} heads of K and V do not divide the {self.heads} of Q")
        for order in (self.order, self.values or self.order):
            if sorted(order) != sorted(_AXES) or order[0] != "p":
                raise UsageError(f"{self.kind}: {order} is no order of {_AXES} that begins with p")
        if self.values == self.order:
            raise UsageError(f"{self.kind}: values lie in {self.values} as keys do: say it once")
        if self.scale:
            check_scale(self.kind, self.scale)

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
    def decodes(self) -> bool:
        """Whether each sequence has one query."""
        return self.queries == 1

    @property
    def told(self) -> str:
        """The input that says how many keys a sequence has."""
        return "lengths" if self.decodes else "before"

    @property
    def caches(self) -> tuple[str, ...]:
        """Inputs that are the cache: one where keys and values lie in one order, else the same memory twice."""
        return ("cache",) if not self.values else ("K_cache", "V_cache")

    @property
    def _scale(self) -> float:
        return self.scale or 1 / sqrt(self.dim)

    @property
    def key(self) -> str:
        words = [f"kv{self.groups}"] if self.groups != self.heads else []
        words += [f"window{self.window}"] if self.window else []
        words += [f"page{self.page}"]
        words += [f"pool{self.pool}"] if self.pool else []
        words += [f"len{self.length}"] if self.length else []
        words += [f"scale{self.scale!r}"] if self.scale else []
        words += [self.order, *filter(None, [self.values])]
        shape = f"{self.batch}x{self.heads}x{self.queries}x{self.keys}x{self.dim}"
        return f"{self.kind}:{shape}:{self.dtype}:{','.join(words)}"

    def program(self) -> Program:
        several = () if self.decodes else (("s", self.queries),)
        dims: tuple[tuple[str, Dim], ...] = (
            ("b", self.batch), *several, ("g", self.groups), ("q", self.heads // self.groups), ("t", self.keys),
            ("d", self.dim), ("e", self.dim), ("p", self.pages), ("c", 2), ("j", self.page), ("u", self.columns),
        )  # fmt: skip
        row = ("b", "g", "q") if self.decodes else ("b", "g", "q", "s")
        tokens = ("b", "g", "q") if self.decodes else ("b", "s", "g", "q")
        logit = (*row, "t")
        views = tuple(
            Stage(out, ("b", "g", "t", column), self._where(side, column), (), self.dtype)
            for side, (out, column) in enumerate((("K", "d"), ("V", "e")))
        )
        body: Expr = Apply("mul", (Read("S", logit), Const(self._scale)))
        for seen in self._seen:
            body = Apply("where", (parse(seen), body, Const(NOTHING)))
        scores = Apply("mul", (Read("Q", (*tokens, "d")), Read("K", ("b", "g", "t", "d"))))
        softmax = softmax_stages(row, "t", (*row, "e"), Read("V", ("b", "g", "t", "e")), self.dtype, blind=self.decodes)
        out = replace(softmax[-1], axes=(*tokens, "e"))
        stages = (Stage("S", logit, scores, (Reduce("d", SUM),)), Stage("A", logit, body), *softmax[:-1], out)
        orders = (self.order,) if not self.values else (self.order, self.values.replace("d", "e"))
        cache = tuple(Value(n, tuple(o), self.dtype) for n, o in zip(self.caches, orders, strict=True))
        told = Value("table", ("b", "u"), "i32", constant=True), Value(self.told, ("b",), "i32", constant=True)
        return Program(dims, (Value("Q", (*tokens, "d"), self.dtype), *cache, *told), stages, ("O",), views)

    def _where(self, side: int, column: str) -> Read:
        """Where keys (0) or values (1) lie."""
        name, order = (self.caches[0], self.order) if not (side and self.values) else (self.caches[1], self.values)
        at: dict[str, str | Expr] = {
            "p": parse(f"table[b,t // {self.page}]"),
            "c": Const(float(side)),
            "j": parse(f"t % {self.page}"),
            "g": "g",
            "d": "d" if column == "d" else Axis("e") if not self.values else "e",
        }
        return Read(name, tuple(at[x] for x in order))

    @property
    def _seen(self) -> tuple[str, ...]:
        """What is true of a query and a key that it sees."""
        at = "lengths[b]" if self.decodes else "s + before[b]"
        until = f"t < {at}" if self.decodes else f"t <= {at}"
        near = f"{at} <= t + {self.window}" if self.decodes else f"{at} < t + {self.window}"
        return (until, near) if self.window else (until,)

    def within(self, symbol: str, lo: int, hi: int) -> ServedAttention:
        if isinstance(self.queries, Sym):
            return replace(self, queries=part_of(self.key, self.queries, symbol, lo, hi))
        return replace(self, batch=part_of(self.key, self.batch, symbol, lo, hi), pool=self.pages)

    def counts(self, batch: int, queries: int) -> NDArray[np.int32]:
        """`lengths` or `before` that inputs have: those of the first sequence, down to half as many."""
        most = (self.length or self.keys) if self.decodes else max(0, self.length - queries)
        return np.array([most - most * b // (2 * batch) for b in range(batch)], np.int32)

    def inputs(self, kind: InputKind, seed: int, sizes: Mapping[str, int] | None = None) -> dict[str, Storage]:
        """Pages in no order: each of the pool at most once, where there are enough."""
        p, rng = self.program(), np.random.default_rng(seed)
        out, n = drawn(p, kind, seed, sizes, {}), p.sizes(sizes)
        count = n["b"] * self.columns
        table = rng.permutation(self.pages)[:count] if count <= self.pages else rng.integers(0, self.pages, count)
        told = {
            "table": table.reshape(n["b"], self.columns).astype(np.int32),
            self.told: self.counts(n["b"], n.get("s", 1)),
        }
        return {v.name: told.get(v.name, out[v.name]) for v in p.inputs}

    def reference(self, inputs: Mapping[str, Storage]) -> dict[str, Array]:
        q = decode(inputs["Q"], self.dtype)
        if self.decodes:
            q = q[:, None]
        out = np.zeros(q.shape)
        before = inputs[self.told].astype(np.int64) - self.decodes
        t, rows = np.arange(self.keys), (np.arange(self.columns * self.page) % self.page)[: self.keys]
        kv = [self._side(inputs, side) for side in (0, 1)]
        for b, n in enumerate(before):
            pages = inputs["table"][b].repeat(self.page)[: self.keys]
            k, v = (np.moveaxis(x[pages, rows], 1, 0) for x in kv)  # [g,t,d]
            at = np.arange(q.shape[1]) + int(n)
            seen = t[None] <= at[:, None]
            if self.window:
                seen &= at[:, None] < t[None] + self.window
            logits = np.where(seen[:, None, None], np.einsum("sgqd,gtd->sgqt", q[b], k) * self._scale, -np.inf)
            top = np.max(logits, axis=-1, keepdims=True)
            weights = np.exp(logits - np.where(np.isfinite(top), top, 0.0))
            total = np.sum(weights, axis=-1, keepdims=True)
            out[b] = np.einsum("sgqt,gte->sgqe", weights / np.where(total > 0, total, 1.0), v)
        return {"O": out[:, 0] if self.decodes else out}

    def _side(self, inputs: Mapping[str, Storage], side: int) -> Array:
        """Keys (0) or values (1) of the cache as [p,j,g,d]."""
        order = self.values if side and self.values else self.order
        cache = decode(inputs[self.caches[side if self.values else 0]], self.dtype)
        return np.transpose(cache, [order.index(x) for x in _AXES])[:, side]

    def _reach(self, sizes: Mapping[str, int] | None) -> NDArray[np.int64]:
        """Keys up to each query of each sequence, for what inputs have: [b,s]."""
        n = self.program().sizes(sizes or self.typical_sizes())
        s = n.get("s", 1)
        return self.counts(n["b"], s)[:, None].astype(np.int64) + (0 if self.decodes else np.arange(s) + 1)

    def seen(self, sizes: Mapping[str, int] | None = None) -> int:
        """Pairs of a query and a key that it sees, of one head, for what inputs have."""
        return int(np.clip(self._reach(sizes), 0, self.window or self.keys).sum())

    def work(self, sizes: Mapping[str, int] | None = None) -> Work:
        reach = self._reach(sizes)
        batch, queries = reach.shape
        keys = int(np.minimum(reach[:, -1], (self.window + queries - 1) if self.window else self.keys).sum())
        moved = 2 * batch * self.heads * queries + 2 * self.groups * keys
        flops = 4.0 * self.heads * self.seen(sizes) * self.dim
        return Work(flops, float(moved * self.dim * size_bytes(self.dtype) + 4 * batch * (self.columns + 1)))

    def is_exact(self, kind: InputKind, output: str | None = None) -> bool:
        return False  # no exponential is

    def tolerance(self, accumulate: Accumulate = "f32", output: str | None = None) -> tuple[float, float]:
        """That of attention on whole arrays."""
        return softmax_error(self.dim, self._scale, self.dtype, accumulate)


def _parse(rest: str) -> ServedAttention:
    dims, (dtype, *said) = parse_shape("served_attention", rest, ("sequences", "heads", "queries", "keys", "dim"))
    where = f"op 'served_attention:{rest[:100]}'"
    batch, heads, queries, keys, dim = dims
    if len(said) > 1 or not (isinstance(heads, int) and isinstance(keys, int) and isinstance(dim, int)):
        raise UsageError(f"{where}: expected served_attention:BxHxSxTxD:dtype:options, of which B or S may be open")
    numbers, orders = dict[str, float](), list[str]()
    for word in said[0].split(",") if said else []:
        hit = re.fullmatch(rf"(kv|window|page|pool|len)([1-9][0-9]{{0,8}})|scale({_SCALE})|([{_AXES}]{{5}})", word)
        name = (hit[1] or ("scale" if hit[3] else "")) if hit else "?"
        if hit is None or name in numbers or (hit[4] and len(orders) == 2):
            known = f"kv<N>, window<N>, page<N>, pool<N>, len<N>, scale<X>, and the order of {_AXES} in memory"
            raise UsageError(f"{where}: the options, each once, are {known}; got {word!r}, N is 1 or more")
        if hit[4]:
            orders.append(word)
        else:
            numbers[name] = float(hit[2] or hit[3])
    if "scale" in numbers:
        check_scale(where, numbers["scale"])
    kv, window, page, pool, length = (
        int(numbers.get(x, 16 * (x == "page"))) for x in ("kv", "window", "page", "pool", "len")
    )
    order, values = (*orders, "", "")[:2]
    return ServedAttention(
        batch, heads, queries, keys, dim, parse_dtype("served_attention", dtype), kv, window, page, pool,
        length, order or _AXES, values, numbers.get("scale", 0.0),
    )  # fmt: skip


_SCALE = r"[0-9]+(?:\.[0-9]+)?(?:e-?[0-9]{1,2})?"
PARSERS["served_attention"] = _parse
