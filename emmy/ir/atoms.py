"""Instructions as data: shapes, what they need, and which accumulators they keep. One entry an instruction.

The code text of an atom stands with its target's printer; the semantics of every atom is the same sum of products.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from emmy.ir.dtype import DTYPES, DType
from emmy.ir.target import Target


@dataclass(frozen=True, slots=True)
class AtomKind:
    """An instruction (or a fixed pattern of one) that computes a block of C[m,n] += A[m,k] * B.

    exact:       its tile must divide what is left (fragments); otherwise edges are computed by guarded code
    vector_axis: the axis its vectors run along ("n" or "k"); None for matrix instructions
    ms, ns, ks:  sizes worth trying; for vector atoms ns counts vectors, times the width
    dtypes:      of operands that come from memory
    accumulate:  how its sums are kept, which decides the error to be expected
    searched:    whether a code generator prints it, so that a search may choose it
    unit:        a GPU's agents that execute it together, so the level at which work is divided among them
    deferred:    whether it still reads its operands when the next instruction begins
    direct:      whether lanes read its operands from memory themselves: none of them is staged
    loaded:      whether lanes load its first operand from a slot to registers before it begins; deferred, it reads the other
    """

    name: str
    capability: str
    exact: bool
    vector_axis: str | None
    ms: tuple[int, ...]
    ns: tuple[int, ...]
    ks: tuple[int, ...]
    dtypes: tuple[DType, ...] = DTYPES
    accumulate: Literal["f32", "hybrid", "f16"] = "f32"
    searched: bool = True
    unit: Literal["warp", "warpgroup"] = "warp"
    deferred: bool = False
    direct: bool = False
    loaded: bool = False

    def domains(self, target: Target) -> Mapping[str, tuple[int, ...]]:
        """Values of m, n, k, width worth trying on the target."""
        if self.vector_axis is None:
            return {"m": self.ms, "n": self.ns, "k": self.ks, "width": (1,)}
        lanes = target.vector_bits // 32
        widths = tuple(w for w in (lanes // 2, lanes) if w >= 4)
        if self.vector_axis == "n":
            ns = tuple(sorted({v * w for v in self.ns for w in widths}))
            return {"width": widths, "m": self.ms, "n": ns, "k": self.ks}
        return {"width": (lanes,), "m": self.ms, "n": self.ns, "k": (lanes,)}

    def refuse(self, m: int, n: int, k: int, width: int, target: Target) -> str | None:
        """Why this shape is not to be had."""
        if min(m, n, k, width) < 1:
            return f"{self.name} {m}x{n}x{k} vector {width}: sizes must be at least 1"
        if self.vector_axis is None:
            allowed = m in self.ms and n in self.ns and k in self.ks and width == 1
            return (
                None
                if allowed
                else f"{self.name} has no shape {m}x{n}x{k}; m is one of {_listed(self.ms)}, n of {_listed(self.ns)}, "
                f"k of {_listed(self.ks)}"
            )
        lanes = target.vector_bits // 32
        if width > lanes or width & (width - 1):
            return f"vectors of {width} f32 against {lanes} on {target.name}; powers of two are allowed"
        along = n if self.vector_axis == "n" else k
        if along % width:
            return f"{self.name} has {along} elements along its vectors, not a multiple of {width}"
        if self.vector_axis == "n" and k != 1:
            return f"{self.name} takes k by 1, got {k}"
        vectors = m * n // width if self.vector_axis == "n" else m * n
        spare = n // width if self.vector_axis == "n" else n
        if vectors + spare + 1 > target.vector_registers:
            need = f"{vectors} vectors of sums and {spare + 1} of operands"
            return f"{self.name} {m}x{n} keeps {need}, {target.name} has {target.vector_registers} registers"
        return None


def _listed(values: tuple[int, ...]) -> str:
    """`8, 16 .. 256` of numbers in equal steps, `1, 2, 3, 4, 6` of others."""
    if len(values) > 3 and len({b - a for a, b in pairwise(values)}) == 1:
        return f"{values[0]}, {values[1]} .. {values[-1]}"
    return ", ".join(map(str, values))


_HALVES: tuple[DType, ...] = ("f16", "bf16")
_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14)
# Warpgroup matrix instruction, operands in shared memory (PTX ISA: wgmma.mma_async.m64nNk16, N a multiple of 8).
_WGMMA = AtomKind(
    "wgmma", "wgmma", True, None, (64,), tuple(range(8, 257, 8)), (16,), _HALVES, unit="warpgroup", deferred=True
)

ATOMS: dict[str, AtomKind] = {
    a.name: a
    for a in (
        # outer product: a broadcast element of A times vectors of B along n
        AtomKind("fma", "vector", False, "n", _ROWS, (1, 2, 3, 4, 6, 8), (1,)),
        # inner product: vectors of A and B along k, summed across lanes at the end; B must be contiguous along k
        AtomKind("dot", "vector", False, "k", (1, 2, 3, 4, 6), (1, 2, 3, 4, 6, 8), ()),
        # single lanes of a warp, 4 along m by 8 along n, a register tile each
        AtomKind("simt", "simt", True, None, (4, 8, 16, 32), (8, 16, 32, 64), (4,)),
        # warp matrix instruction, f32 sums (PTX ISA: mma.sync.m16n8k16)
        AtomKind("mma", "mma", True, None, (16,), (8,), (16,), _HALVES),
        # the same with f16 sums, which join f32 sums every k elements
        AtomKind("hybrid", "mma", True, None, (16,), (8,), (16, 32, 64, 128), ("f16",), "hybrid"),
        # the same with f16 sums to the end: fast on some cards, and too wrong for most uses; for studies of the error
        AtomKind("f16", "mma", True, None, (16,), (8,), (16,), ("f16",), "f16", searched=False),
        # mma.sync with its operands exchanged, for few rows of A: rows of the instruction are 16 columns n, its columns up to
        # 8 rows m; two steps of 16 along k, in an order that lets a lane read 16 bytes at once
        AtomKind("direct", "mma", True, None, (8,), (16, 32, 64), (32,), _HALVES, direct=True),
        _WGMMA,
        # the same with A in registers, whence it comes by ldmatrix: so any transport may bring A, rows of any length too
        replace(_WGMMA, name="wgmma_rs", loaded=True),
    )
}
