"""Small kernels that schedules make for one H200 each, and a fault planted in such a text. Knows no fault by name."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

from emmy.codegen.build import SourceUnit, source
from emmy.codegen.emulated import emulate_plan
from emmy.codegen.emulator import SCHEDULES
from emmy.errors import EmuError
from emmy.ir.gpu import accumulation
from emmy.ir.ops import parse_op
from emmy.ir.target import load_target

_RING = "k0/split(k,serial,64) k0/split(m,warpgroup,64) k0/stage(A,tma,2) k0/stage(B,tma,2)"
_WALK = (
    f"k0/split(m,grid,128) k0/split(n,grid,32) {_RING} k0/specialize(2,40,232) k0/persist(2) k0.C/atom(wgmma,64,32,16)"
)
_WARPS = "k0/stage(A,tma,2) k0/stage(B,tma,2) k0.C/atom(mma,16,8,16)"

# name -> (op, schedule). Two blocks walk three tiles, of "turns" seven. A tile of "roles" and "turns" is three steps in a ring of
# two, so that no phase begins anew by itself; one of "walked store" is two steps, else the ring's barriers order a tile's boxes
# after those before. Of "shares", two tiles of five steps are made by four blocks, twice: the first by two, the second by three.
GENERATED: dict[str, tuple[str, str]] = {
    "wgmma": ("matmul:64x128x192:f16", f"k0/split(m,grid,64) k0/split(n,grid,128) {_RING} k0.C/atom(wgmma,64,128,16)"),
    "loaded": (  # twice as many steps of k as sets of registers
        "matmul:64x256x288:f16",
        "k0/split(m,grid,64) k0/split(n,grid,128) k0/split(k,serial,96) k0/split(m,warpgroup,64) k0/stage(A,tma,2) "
        "k0/stage(B,tma,2,panels) k0/specialize(1,0,0) k0.C/atom(wgmma_rs,64,128,16)",
    ),
    "roles": ("matmul:384x32x192:f16:nk", _WALK),
    "turns": (
        "matmul:448x32x192:f16:nk",
        "k0/split(m,grid,64) k0/split(n,grid,32) k0/split(k,serial,64) k0/stage(A,tma,2) k0/stage(B,tma,2) "
        "k0/specialize(2,40,232) k0/persist(2) k0/pingpong() k0.C/atom(wgmma,64,32,16) k0/store(C,tma)",
    ),
    "walked store": ("matmul:128x96x128:bf16:nk", f"{_WALK} k0/store(C,tma)"),
    "cluster": (
        "matmul:32x32x256:f16:nk",
        "k0/split(m,grid,32) k0/split(n,grid,32) k0/split(k,cluster,128) k0/split(k,serial,32) k0/split(m,warp,16) "
        f"k0/split(n,warp,32) {_WARPS}",
    ),
    "multicast": (
        "matmul:64x128x192:f16:nk",
        "k0/split(m,grid,64) k0/split(n,grid,64) k0/split(n,cluster,32) k0/split(k,serial,64) k0/split(m,warpgroup,64) "
        "k0/stage(A,tma,2) k0/stage(B,tma,2) k0/specialize(1,0,0) k0/persist(2) k0.C/atom(wgmma,64,32,16)",
    ),
    "swapped": (
        "matmul:16x192x192:f16",
        "k0/swap(C) k0/split(m,grid,16) k0/split(n,grid,64) k0/split(k,serial,64) k0/split(n,warpgroup,64) k0/stage(A,tma,2) "
        "k0/stage(B,tma,2) k0/specialize(1,0,0) k0/persist(2) k0.C/atom(wgmma,64,16,16)",
    ),
    "pair": (
        "geglu:192x32x192:f16:nk",
        "k0/split(m,grid,64) k0/split(n,grid,32) k0/split(k,serial,64) k0/split(m,warpgroup,64) k0/stage(A,tma,2) "
        "k0/stage(G,tma,2) k0/stage(U,tma,2) k0/specialize(1,0,0) k0/persist(2) k0.gate/atom(wgmma,64,32,16)",
    ),
    "pair swapped": (
        "geglu:16x192x192:f16:nk",
        "k0/swap(gate) k0/split(m,grid,16) k0/split(n,grid,64) k0/split(k,serial,64) k0/split(n,warpgroup,64) "
        "k0/stage(A,tma,2) k0/stage(G,tma,2) k0/stage(U,tma,2) k0/specialize(1,0,0) k0/persist(2) "
        "k0.gate/atom(wgmma,64,16,16)",
    ),
    "pair by cp.async": (
        "geglu:48x40x104:f16:nk",
        "k0/split(m,grid,32) k0/split(n,grid,32) k0/split(k,serial,32) k0/split(m,warp,16) k0/stage(A,cp_async,3) "
        "k0/stage(G,cp_async,3) k0/stage(U,cp_async,3) k0.gate/atom(mma,16,8,16)",
    ),
    "shares": (
        "matmul:64x64x320:f16:nk",
        "k0/split(m,grid,64) k0/split(n,grid,32) k0/split(k,serial,64) k0/split(m,warpgroup,64) k0/stage(A,tma,2) "
        "k0/stage(B,tma,2) k0/specialize(1,0,0) k0/streamk(4) k0.C/atom(wgmma,64,32,16)",
    ),
    "statistic": (
        "matmul:20x72x64:f16:nk,residual,sum_squares",
        "k0/splitk(S,2) k0/split(m,grid,16) k0/split(k,serial,32) k0/split(m,warp,16) k0/split(n,warp,24) k1/split(m,grid,64) "
        "k0/stage(A,cp_async,2) k0/stage(B,cp_async,2) k0.C/atom(mma,16,8,16)",
    ),
    "walked statistic": (
        "matmul:250x64x128:f16:nk,residual,sum_squares",
        "k0/splitk(S,2) k0/split(m,grid,64) k0/split(k,serial,64) k0/split(m,warpgroup,64) k0/split(n,warpgroup,16) "
        "k1/split(m,grid,64) k0/stage(A,tma,2) k0/stage(B,tma,2) k0/specialize(2,40,232) k0/persist(2) k0.C/atom(wgmma,64,16,16)",
    ),
    "counted statistic": (  # of four tiles, two of each row, one block makes two of different rows
        "matmul:100x64x128:f16:nk,residual,sum_squares",
        "k0/splitk(S,2) k0/finish(S) k0/split(m,grid,64) k0/split(k,serial,64) k0/split(m,warpgroup,64) k0/stage(A,tma,2) "
        "k0/stage(B,tma,2) k0/specialize(1,0,0) k0/persist(3) k0.C/atom(wgmma,64,32,16) k0/prefetch(R,1) k0/pdl()",
    ),
    "begun statistic": (  # of four tiles, two of each row, one block makes two of different rows
        "matmul:100x64x128:f16:nk,residual,sum_squares",
        "k0/splitk(S,2) k0/finish(S,begun) k0/split(m,grid,64) k0/split(k,serial,64) k0/split(m,warpgroup,64) k0/stage(A,tma,2) "
        "k0/stage(B,tma,2) k0/specialize(1,0,0) k0/persist(3) k0.C/atom(wgmma,64,32,16) k0/pdl()",
    ),
    "added statistic": (  # of four tiles, two of each row, one block makes two of different rows
        "matmul:100x64x128:f16:nk,residual,sum_squares",
        "k0/splitk(S,2) k0/finish(S,added) k0/split(m,grid,64) k0/split(k,serial,64) k0/split(m,warpgroup,64) k0/stage(A,tma,2) "
        "k0/stage(B,tma,2) k0/specialize(1,0,0) k0/persist(3) k0.C/atom(wgmma,64,32,16) k0/pdl()",
    ),
    "asked ahead": (
        "matmul:100x64x200:f16:nk,bias,residual",
        "k0/split(m,grid,64) k0/split(n,grid,64) k0/split(k,serial,64) k0/split(m,warpgroup,64) k0/stage(A,tma,2) k0/stage(B,tma,2) "
        "k0/specialize(1,0,0) k0/persist(1) k0.C/atom(wgmma,64,64,16) k0/preload(R,3) k0/preload(bias,2) k0/pdl()",
    ),
    "asked at steps": (
        "matmul:100x64x600:f16:nk,residual",
        "k0/split(m,grid,64) k0/split(n,grid,64) k0/split(k,serial,64) k0/split(m,warpgroup,64) k0/stage(A,tma,2) k0/stage(B,tma,2) "
        "k0/specialize(1,0,0) k0/persist(1) k0.C/atom(wgmma,64,64,16) k0/preload(R,4,8,1)",
    ),
    "rows": ("softmax:5x70:f16", "k0/split(m,grid,2) k0/split(n,warp,40) k0/pdl()"),
    "tma store": (
        "matmul:16x64x64:f16:nk",
        "k0/split(m,grid,16) k0/split(n,grid,64) k0/split(k,serial,32) k0/split(m,warp,16) k0/split(n,warp,32) "
        f"{_WARPS} k0/store(C,tma)",
    ),
    "batched": (
        "bmm:3x72x64x160:f16",
        "k0/split(b,grid,1) k0/split(m,grid,64) k0/split(n,grid,64) k0/split(k,serial,64) k0/split(m,warpgroup,64) "
        "k0/stage(A,tma,2) k0/stage(B,tma,2) k0/specialize(1,0,0) k0/persist(2) k0.C/atom(wgmma,64,64,16) k0/store(C,tma)",
    ),
    "batched panels": (
        "bmm:3x64x128x256:f16:nk",
        "k0/split(b,grid,1) k0/split(m,grid,64) k0/split(n,grid,64) k0/split(k,serial,128) k0/split(m,warpgroup,64) "
        "k0/stage(A,tma,2,panels) k0/stage(B,tma,2,panels) k0.C/atom(wgmma,64,64,16)",
    ),
    "batched by cp.async": (
        "bmm:3x24x40x72:bf16:nk",
        "k0/split(b,grid,1) k0/split(m,grid,16) k0/split(n,grid,32) k0/split(k,serial,32) k0/split(m,warp,16) "
        "k0/stage(A,cp_async,2) k0/stage(B,cp_async,2) k0.C/atom(mma,16,8,16)",
    ),
    "attention": (  # logits far from 0, so that maxima grow; a slot for each of K and V, given back behind its last reader
        "attention:1x192x192x64:f16:causal,scale1.0",
        "k0/online(O) k0/split(h,grid,1) k0/split(s,grid,128) k0/split(t,serial,32) k0/split(s,warpgroup,64) k0/stage(K,tma,1) "
        "k0/stage(Q,tma,1) k0/stage(V,tma,1) k0/specialize(2,40,232) k0.O/atom(wgmma,64,64,16,1,o) k0.S/atom(wgmma,64,32,16)",
    ),
    "attention ahead": (
        "attention:1x192x192x64:f16:causal,scale1.0",
        "k0/online(O) k0/split(h,grid,1) k0/split(s,grid,128) k0/split(t,serial,32) k0/split(s,warpgroup,64) k0/stage(K,tma,2) "
        "k0/stage(Q,tma,1) k0/stage(V,tma,2) k0/specialize(2,40,232) k0.O/atom(wgmma,64,64,16,1,o) k0.S/atom(wgmma,64,32,16) "
        "k0.S/pipeline()",
    ),
    "attention by warps": (
        "attention:1x96x90x32:f16:causal,scale1.0",
        "k0/online(O) k0/split(h,grid,1) k0/split(s,grid,32) k0/split(t,serial,16) k0/split(s,warp,16) k0/stage(K,cp_async,2) "
        "k0/stage(Q,cp_async,1) k0/stage(V,cp_async,2) k0.O/atom(mma,16,8,16,1,o) k0.S/atom(mma,16,8,16)",
    ),
    "keys in parts": (
        "attention:2x1x96x32:f16:kv1,scale1.0",
        "k0/online(O) k0/splitk(O,3) k0/split(g,grid,1) k0/split(r,grid,16) k0/split(t,serial,16) k0/split(r,warp,16) "
        "k0/stage(K,tma,2) k0/stage(Q,tma,1) k0/stage(V,tma,2) k0.O/atom(mma,16,8,16,1,o) k0.S/atom(mma,16,8,16) "
        "k1/split(g,grid,1) k1/split(r,grid,2) k1/split(e,grid,64)",
    ),
    **{
        name: (
            "paged_attention:2x2x1x96x32:f16:causal,kv1,page16,scale1.0",
            f"k0/online(O) k0/split(b,grid,1) k0/split(g,grid,1) k0/split(q,grid,16) k0/split(t,serial,32) k0/split(q,warp,16) "
            f"k0/stage(K,{how},2) k0/stage(Q,{how},1) k0/stage(V,{how},2) k0.O/atom(mma,16,8,16,1,o) k0.S/atom(mma,16,8,16)",
        )
        for name, how in (("pages", "tma"), ("pages by threads", "cp_async"))
    },
    "rows on the way": (
        "norm_linear:5x32x136:f16:nk",
        "k0/fuse(Xn,Y) k0/commute(Y) k0/operand(Y_acc,g,X) k0/split(m,grid,8) k0/split(n,grid,16) k0/split(k,warp,64) "
        "k0.Y_acc/atom(direct,8,16,32) k0.Y_acc/unroll(2)",
    ),
    "a made ring": (
        "norm_linear:40x32x128:f16:nk",
        "k0/cut(Y) k0/split(m,grid,4) k0/split(k,warp,64) k1/split(m,grid,64) k1/split(n,grid,16) k1/split(k,serial,64) "
        "k1/split(m,warpgroup,64) k1/stage(W,tma,2) k1/stage(Xn,tma,2) k1/specialize(1,0,0) k1.Y/atom(wgmma,64,16,16) "
        "k0/pdl() k1/pdl()",
    ),
    "direct": (
        "matmul:8x32x128:f16:nk",
        "k0/split(m,grid,8) k0/split(n,grid,32) k0/split(k,warp,64) k0.C/atom(direct,8,16,32) k0.C/unroll(2)",
    ),
}

# Launched twice, on the flags and counts that the first leaves.
AGAIN = ("shares", "counted statistic", "begun statistic", "added statistic")


@cache
def unharmed(kernel: str) -> SourceUnit:
    """A kernel's source as it is generated."""
    op, schedule = GENERATED[kernel]
    return source(parse_op(op), schedule, load_target("h200"))


def run(kernel: str, unit: SourceUnit, seed: int, eager: bool) -> tuple[float, int]:
    """(largest error in units of what is allowed, bytes stored to global memory). Raises EmuError."""
    op = parse_op(GENERATED[kernel][0])
    inputs = op.inputs("normal", 1)
    out, launches = emulate_plan(unit, inputs, seed=seed, eager=eager, times=1 + (kernel in AGAIN))
    stored = sum(stats.global_store_bytes + stats.tma_store_bytes for stats in launches)
    return op.error_norm(out, inputs, "normal", accumulation(unit.plan)), stored


def emulated_as(op: str, unit: SourceUnit, text: str) -> None:
    """The op's source with another text runs once. Raises EmuError."""
    emulate_plan(replace(unit, text=text), parse_op(op).inputs("normal", 1))


@cache
def stored_bytes(kernel: str) -> int:
    """What the unharmed kernel stores."""
    return run(kernel, unharmed(kernel), *SCHEDULES[0])[1]


@dataclass(frozen=True)
class GeneratedBug:
    """A fault of one kernel, and how the emulator may notice it.

    edits: (expression, replacement); each must be found in the text behind the prelude
    kinds: of errors that count as noticing; "wrong" is a wrong result, "twice" a right one of which more was stored than needed
    most:  how many places are edited, the first ones; 0 for all
    """

    kernel: str
    what: str
    edits: tuple[tuple[str, str], ...]
    kinds: tuple[str, ...]
    most: int = 0

    def plant(self) -> SourceUnit:
        """The source with the fault. Raises AssertionError when an expression is not found."""
        unit = unharmed(self.kernel)
        at = unit.text.rindex("#endif")
        text = unit.text[at:]
        for old, new in self.edits:
            text, found = re.subn(old, new, text, count=self.most, flags=re.MULTILINE)
            assert found, f"the text of {self.kernel} has changed: {old!r} is not there"
        return replace(unit, text=unit.text[:at] + text)

    def notice(self) -> str:
        """How the first schedule that notices the fault does; nothing when none does."""
        unit = self.plant()
        for seed, eager in SCHEDULES:
            try:
                error, stored = run(self.kernel, unit, seed, eager)
            except EmuError as e:
                return e.kind
            if not error <= 1:
                return "wrong"
            if stored > stored_bytes(self.kernel):
                return "twice"
        return ""
