"""Five plans that the IR must carry, written as schedules: what a GPU needs, before any GPU code exists.

`emmy show plan:NAME` prints them; tests replay, print and execute them. Programs are small, so that a laptop runs them.
"""

from __future__ import annotations

from dataclasses import dataclass

from emmy.ir.expr import Const, parse
from emmy.ir.ops import matmul
from emmy.ir.program import MAX, SUM, Program, Reduce, Stage, Value


@dataclass(frozen=True, slots=True)
class Example:
    """A program with a schedule for a target and one sentence on what it shows."""

    name: str
    title: str
    program: Program
    target: str
    schedule: str


def _sum(axis: str) -> tuple[Reduce, ...]:
    return (Reduce(axis, SUM),)


def attention(h: int, q: int, k: int, d: int) -> Program:
    """Causal attention: queries are the last q of k positions; every stage of the softmax spelled out."""
    hq, hqk, hqe = ("h", "q"), ("h", "q", "k"), ("h", "q", "e")
    scale = Const(d**-0.5)
    return Program(
        (("h", h), ("q", q), ("k", k), ("d", d), ("e", d)),
        (Value("Q", ("h", "q", "d"), "f16"), Value("K", ("h", "k", "d"), "f16"), Value("V", ("h", "k", "e"), "f16")),
        (
            Stage("S", hqk, parse("Q[h,q,d] * K[h,k,d]"), _sum("d")),
            Stage("A", hqk, parse(f"where(k <= q + {k - q}, S[h,q,k] * {scale}, -1e30)")),
            Stage("M", hq, parse("A[h,q,k]"), (Reduce("k", MAX),)),
            Stage("P", hqk, parse("exp(A[h,q,k] - M[h,q])")),
            Stage("L", hq, parse("P[h,q,k]"), _sum("k")),
            Stage("N", hqe, parse("P[h,q,k] * V[h,k,e]"), _sum("k")),
            Stage("O", hqe, parse("N[h,q,e] / L[h,q]"), (), "f16"),
        ),
        ("O",),
    )


def norm_linear(m: int, n: int, k: int) -> Program:
    """RMSNorm over k with weight g, then a linear layer."""
    return Program(
        (("m", m), ("n", n), ("k", k)),
        (Value("X", ("m", "k"), "f16"), Value("g", ("k",), "f16", True), Value("W", ("n", "k"), "f16", True)),
        (
            Stage("ss", ("m",), parse("X[m,k] * X[m,k]"), _sum("k")),
            Stage("r", ("m",), parse(f"rsqrt(ss[m] / {k} + 0.000001)")),
            Stage("Xn", ("m", "k"), parse("X[m,k] * r[m] * g[k]")),
            Stage("Y", ("m", "n"), parse("Xn[m,k] * W[n,k]"), _sum("k"), "f16"),
        ),
        ("Y",),
    )


_TILES = "k0/split(m,grid,64) k0/split(n,grid,64)"
FIVE_PLANS: tuple[Example, ...] = (
    Example(
        "pingpong",
        "ping-pong wgmma matmul: a producer fills TMA rings, two consumers take tiles in turn",
        matmul(256, 64, 160, "f16", "nk").program(),
        "h200",
        f"{_TILES} k0/split(k,serial,32) k0/stage(A,tma,3) k0/stage(B,tma,3) "
        "k0/specialize(2,40,232) k0/persist(2) k0/pingpong() k0.C/atom(wgmma,64,64,16)",
    ),
    Example(
        "attention",
        "causal attention: softmax as one online recurrence, keys split over blocks, a second launch combines",
        attention(2, 32, 128, 16),
        "h200",
        "k0/online(O) k0/splitk(O,2) k0/split(h,grid,1) k0/split(q,grid,16) k0/split(k,serial,16) "
        "k0/stage(Q,tma,1) k0/stage(K,tma,2) k0/stage(V,tma,2) k0/specialize(1,40,232) "
        "k0.S/atom(mma,16,8,16) k0.O/atom(mma,16,8,16,1,o) k1/split(h,grid,1) k1/split(q,grid,8)",
    ),
    Example(
        "norm_linear",
        "RMSNorm into linear: the row scale commutes out of the contraction, the statistic is taken beside it",
        norm_linear(64, 64, 128),
        "rtx4090",
        "k0/fuse(Xn,Y) k0/commute(Y) k0/operand(Y_acc,g,W) k0/split(m,grid,32) k0/split(n,grid,32) k0/split(k,serial,32) "
        "k0/stage(X,cp_async,3) k0/stage(W,cp_async,2) k0/split(m,warp,16) k0.Y_acc/atom(mma,16,8,16)",
    ),
    Example(
        "splitk",
        "split-K: blocks share an output tile through a workspace, a second launch finishes in fixed order",
        matmul(256, 64, 160, "f16", "nk").program(),
        "rtx4090",
        f"k0/splitk(C,2) {_TILES} k0/split(k,serial,16) k0/stage(A,cp_async,4) k0/stage(B,cp_async,4) "
        "k0/split(m,warp,32) k0/split(n,warp,32) k0.C/atom(mma,16,8,16) k1/split(m,grid,32) k1/split(n,lane,64)",
    ),
    Example(
        "cpu_packed",
        "CPU matmul: cores take column blocks, panels of both operands are packed for the register tile",
        matmul(250, 70, 160).program(),
        "cpu",
        "k0/split(n,core,64) k0/split(k,serial,80) k0/split(m,serial,32) k0/stage(B,pack,1) k0/stage(A,pack,1) k0.C/atom(fma,4,8,1,4)",
    ),
)
