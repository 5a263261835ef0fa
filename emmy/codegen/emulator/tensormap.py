"""A tensor map: which boxes of an array a bulk copy moves, and how they lie in shared memory. Knows no driver.

The rules are those of cuTensorMapEncodeTiled (CUDA Driver API), without interleaving and with zeros outside the tensor.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from emmy.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class TensorMap:
    """Boxes of `array`, innermost dimension first in `box`, `dims` and `strides_bytes` (of dimensions 1 and up).

    dims and strides are the array's own unless given. `swizzle_bytes` is 0, 32, 64 or 128, and then a box's rows are at most
    that wide. Raises UsageError when the hardware does not take it.
    """

    array: NDArray[np.generic]
    box: tuple[int, ...]
    swizzle_bytes: int = 0
    dims: tuple[int, ...] | None = None
    strides_bytes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        dims, strides = self.shape, self.strides
        row = self.box[0] * self.array.itemsize
        if not len(self.box) == len(dims) == len(strides) + 1 <= 5:
            raise UsageError(f"tensor map: box {self.box}, dims {dims} and strides {strides} do not go together")
        if self.swizzle_bytes not in (0, 32, 64, 128):
            raise UsageError(f"tensor map: swizzle of {self.swizzle_bytes} bytes, allowed are 0, 32, 64 and 128")
        if self.swizzle_bytes and row > self.swizzle_bytes:
            raise UsageError(f"tensor map: rows of {row} bytes under a swizzle of {self.swizzle_bytes}")
        if row % 16 or any(s % 16 for s in strides):
            raise UsageError(f"tensor map: rows of {row} bytes and strides {strides}, both must be multiples of 16")
        if any(not 0 < b <= 256 for b in self.box):
            raise UsageError(f"tensor map: box {self.box}, each side is 1 to 256")
        extent = self.array.itemsize * dims[0] + sum(s * (d - 1) for s, d in zip(strides, dims[1:], strict=True))
        if extent > self.array.nbytes:
            raise UsageError(f"tensor map: covers {extent} bytes of an array of {self.array.nbytes}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes, innermost first."""
        return self.dims if self.dims is not None else tuple(reversed(self.array.shape))

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes between neighbours along dimensions 1 and up."""
        return self.strides_bytes if self.strides_bytes is not None else tuple(reversed(self.array.strides[:-1]))

    def emulated(self) -> bytes:
        """The 128 bytes as the emulator reads them (`Map` in copies.cpp); the base address is filled in at launch."""
        rank = len(self.box)
        pad = (1,) * (5 - rank)
        strides = (*self.strides, *(0,) * (5 - rank))
        packed = struct.pack(
            "<QIII5I5I4x4Q",
            0,
            self.array.itemsize,
            rank,
            self.swizzle_bytes,
            *self.shape,
            *pad,
            *self.box,
            *pad,
            *strides,
        )
        return packed.ljust(128, b"\0")
