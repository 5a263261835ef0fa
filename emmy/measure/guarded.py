"""Memory on this machine for a kernel's operands: red zones around it, poison in it. Knows no ops and no kernels.

A guarded buffer lies between two stretches of address space that cannot be touched at all, so that an overrun stops the
process on the spot. What does not fit whole pages is red zone: bytes of a known pattern, looked at after the run.

    [ no access ][ red zone, one page | operand, 64-byte aligned | red zone, < 64 bytes ][ no access ]

The pattern is 0xFF everywhere, which is NaN in f32, f16 and bf16: a kernel that reads outside its operand and uses what
it reads answers NaN, and an output that is poisoned with it shows which elements were never written.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from emmy.ir.dtype import DType, storage
from emmy.ir.ops.op import Storage

POISON = 0xFF
ALIGN = 64  # of every operand: a cache line and the widest vector
GUARD_BYTES = 1 << 20  # address space only; as wide as a row of a big operand, which is how far an index is off by one
HUGE_BYTES = 4 << 20
_PROT_NONE = 0
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class HostBuffer:
    """One operand in this machine's memory."""

    array: Storage
    front: Bytes  # red zones; empty for a buffer without guards
    back: Bytes

    @property
    def n_bytes(self) -> int:
        return self.array.nbytes

    def write(self, data: Storage) -> None:
        np.copyto(self.array, data, casting="no")

    def read(self) -> Storage:
        """A view: what the kernel left, until something is written again."""
        return self.array

    def poison(self) -> None:
        self.array.reshape(-1).view(np.uint8)[:] = POISON

    def damage(self) -> str | None:
        """Where the red zones were written, or None."""
        return zone_damage(self.front, self.back)


def zone_damage(front: Bytes, back: Bytes) -> str | None:
    """Where two red zones around an operand were written, or None."""
    for zone, where, start in ((front, "before its start", len(front)), (back, "past its end", 0)):
        hits = np.flatnonzero(zone != POISON)
        if len(hits):
            near = start - int(hits[-1]) if start else int(hits[0]) + 1
            return f"{len(hits)} bytes {where} were written, the nearest {near} away"
    return None


def guarded(shape: tuple[int, ...], dtype: DType) -> HostBuffer:
    """A poisoned buffer that ends, up to its alignment, where access ends."""
    n_bytes = prod(shape) * storage(dtype).itemsize
    page = mmap.PAGESIZE
    body = -(-n_bytes // page) * page + page  # one page of red zone in front, at least
    guard = -(-GUARD_BYTES // page) * page
    region = mmap.mmap(-1, guard + body + guard, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if n_bytes >= HUGE_BYTES and sys.platform == "linux":
        region.madvise(mmap.MADV_HUGEPAGE)  # as numpy does; without, a check of a large operand is mostly page faults
    raw = np.frombuffer(region, np.uint8)  # keeps the mapping alive as long as a view of it lives
    base = raw.ctypes.data
    _forbid(base, guard)
    _forbid(base + guard + body, guard)
    padded = -(-n_bytes // ALIGN) * ALIGN
    start = guard + body - padded
    raw[guard : guard + body] = POISON
    operand = raw[start : start + n_bytes].view(storage(dtype)).reshape(shape)
    return HostBuffer(operand, raw[start - page : start], raw[start + n_bytes : guard + body])


def plain(shape: tuple[int, ...], dtype: DType) -> HostBuffer:
    """A poisoned buffer as an application would have it, for timing: aligned, in large pages where there are some."""
    n_bytes = prod(shape) * storage(dtype).itemsize
    raw = np.empty(n_bytes + ALIGN, np.uint8)
    start = -raw.ctypes.data % ALIGN
    none = raw[:0]
    buffer = HostBuffer(raw[start : start + n_bytes].view(storage(dtype)).reshape(shape), none, none)
    buffer.poison()  # touches every page now rather than in the first sample
    return buffer


def _forbid(address: int, n_bytes: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(n_bytes), _PROT_NONE) != 0:
        raise MemoryError(f"mprotect of {n_bytes} bytes failed with errno {ctypes.get_errno()} on {sys.platform}")
