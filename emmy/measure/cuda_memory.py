"""A GPU's memory for a kernel's operands: red zones around it, poison in it. Knows no ops and no kernels.

    [ red zone, 64 KiB | operand, 256-byte aligned | red zone, 64 KiB and what alignment leaves ]

The pattern is that of `guarded`: NaN in every dtype. A GPU has no pages that cannot be touched at will, so a write beyond
the zones is seen only where it meets another operand's zone, or memory that is nobody's.
"""

from __future__ import annotations

from math import prod

import numpy as np

from emmy.ir.dtype import DType, size_bytes, storage
from emmy.ir.ops.op import Storage
from emmy.measure.guarded import POISON, zone_damage
from emmy.runtime.cuda_driver import Context, CudaError

ZONE_BYTES = 64 << 10
_ALIGN = 256


class CudaBuffer:
    """One operand in the GPU's memory, poisoned. `zone_bytes` is 0 for a buffer without guards."""

    def __init__(self, context: Context, shape: tuple[int, ...], dtype: DType, zone_bytes: int) -> None:
        """Raises CudaError when memory does not suffice."""
        self.shape, self.dtype, self.n_bytes = shape, dtype, prod(shape) * size_bytes(dtype)
        self._context, self._zone, self._region = context, zone_bytes, 0
        self._region_bytes = zone_bytes + -(-self.n_bytes // _ALIGN) * _ALIGN + zone_bytes
        self._region = context.allocate(self._region_bytes)
        self.address = self._region + zone_bytes
        context.fill(self._region, POISON, self._region_bytes)

    def write(self, data: Storage) -> None:
        assert data.shape == self.shape and data.dtype == storage(self.dtype)
        self._context.write(self.address, np.ascontiguousarray(data))

    def read(self) -> Storage:
        out = np.empty(self.shape, storage(self.dtype))
        self._context.read(self.address, out)
        return out

    def poison(self) -> None:
        self._context.fill(self.address, POISON, self.n_bytes)

    def damage(self) -> str | None:
        """Where the red zones were written, or None."""
        front = np.empty(self._zone, np.uint8)
        back = np.empty(self._region_bytes - self._zone - self.n_bytes if self._zone else 0, np.uint8)
        for zone, at in ((front, self._region), (back, self.address + self.n_bytes)):
            if len(zone):
                self._context.read(at, zone)
        return zone_damage(front, back)

    def __del__(self) -> None:
        if self._region:
            try:
                self._context.free(self._region)
            except CudaError:  # after a fault nothing can be given back
                return
