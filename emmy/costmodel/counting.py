"""Waves of shared memory and sectors of global memory that accesses of a warp take, from the bytes its lanes access.

A wave is one pass over the 32 banks of shared memory, a sector 32 bytes of global memory; `ideal` is what neighbouring
addresses would take. Knows no plan.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from emmy.codegen.cuda_layout import Slot
from emmy.codegen.kernel import Int, IntLoad, IntOp, IntVar, Whole
from emmy.ir.gpu import WARP

Integers = NDArray[np.int64]

WAVE_BYTES = 128
SECTOR_BYTES = 32
LANES = np.arange(WARP)
_OPS: Mapping[str, Callable[[Integers, Integers], Integers]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
    "%": operator.mod,
    "&": operator.and_,
    "^": operator.xor,
    ">>": operator.rshift,
}


@dataclass(frozen=True, slots=True)
class Count:
    """Waves or sectors that accesses take, and those they would take at best."""

    taken: float
    ideal: float

    @property
    def conflict(self) -> float:
        """taken / ideal; 1 where nothing is accessed."""
        return self.taken / self.ideal if self.ideal else 1.0

    def __add__(self, other: Count) -> Count:
        return Count(self.taken + other.taken, self.ideal + other.ideal)

    def times(self, n: float) -> Count:
        return Count(self.taken * n, self.ideal * n)


NONE = Count(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Traffic:
    """A launch, over all its blocks, each counted as a whole one. `reads`: of slots and shared sums; `fills`: of both, by threads."""

    reads: Count
    fills: Count
    stores: Count  # sectors, of the sums or what becomes of them
    asked_bytes: float  # of operands that are asked for, also beyond a block or an edge
    fetched_bytes: float  # of them, those that exist
    exchanged_bytes: float  # of sums, from the shared memory of other blocks
    in_flight_bytes: float  # of a block, on their way from memory while it computes
    load_bytes: int  # of the second operand that one request brings: a lane's load or copy, a line of the copy engine's
    blocks: int
    turns: int  # fills of a block's rings, or steps of a warp's loads, one after another
    depth: int  # so many of them are under way at once


def starts(down: int, across: int, first: int, n: int, step: int) -> tuple[tuple[int, int], ...]:
    """(bytes into a sector, how often) where `n` stores begin, `step` bytes apart, in rows and tiles beside each other."""
    at = (i * down + j * across + first + x * step for i in range(2) for j in range(4) for x in range(n))
    return tuple(sorted(Counter(x % SECTOR_BYTES for x in at).items()))


@lru_cache(4096)
def sectors(lanes: tuple[int, ...], size: int, begin: tuple[tuple[int, int], ...]) -> Count:
    """Sectors that a store of a warp touches, on average over where it begins."""
    at = np.array(lanes)
    touched = sum(often * len(np.unique((at + x) // SECTOR_BYTES)) for x, often in begin)
    taken = touched / max(1, sum(often for _, often in begin))
    return Count(taken, min(taken, -(-WARP * size // SECTOR_BYTES)))


def bytes_at(slot: Slot, rows: Integers, columns: Integers) -> Integers:
    """Bytes in a slot, by the formula that code is generated from."""
    place = {"row": rows, "column": columns}
    return np.broadcast_to(_value(slot.at(IntVar("row"), IntVar("column")), place), rows.shape)


def _value(x: Whole, names: Mapping[str, Integers]) -> Integers:
    match x:
        case Int(v):
            return np.array(v)
        case IntVar(name):
            return names[name]
        case IntOp(fn, a, b):
            return _OPS[fn](_value(a, names), _value(b, names))
        case IntLoad(view):
            raise AssertionError(f"a place in shared memory does not depend on {view}")
        case _:
            assert_never(x)


def waves(at: Integers, size: int) -> Count:
    """Waves of instructions [i, lane] that access `size` bytes each at these bytes; -1: the lane does not.

    Accesses of 16 bytes go by quarters of a warp, of 8 by halves; a word that several lanes read is served once.
    """
    return _waves(np.asarray(at, dtype=np.int64).tobytes(), at.shape[0], size)


@lru_cache(8192)  # candidates of a search differ in few ways
def _waves(places: bytes, n: int, size: int) -> Count:
    at = np.frombuffer(places, dtype=np.int64).reshape(n, -1)
    together = {16: 8, 8: 16}.get(size, WARP)
    group = (np.arange(at.shape[0])[:, None] * (WARP // together) + LANES[None] // together)[..., None]
    words = at[..., None] // 4 + np.arange(-(-size // 4))
    there = np.broadcast_to(at[..., None] >= 0, words.shape)
    span = int(words.max()) + 1
    keys = np.unique((group * span + words)[there])
    of_group, word = keys // span, keys % span
    load = np.bincount(of_group * 32 + word % 32, minlength=32 * int(group.max() + 1)).reshape(-1, 32)
    return Count(float(load.max(axis=1).sum()), float((-(-load.sum(axis=1) // 32)).sum()))
