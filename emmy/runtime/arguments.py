"""What a plan's arguments must be: checked before a kernel trusts an address. Must not know programs, schedules or devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Buffer = int | NDArray[np.generic]  # an address, or an array whose memory it is
# Arguments by name and sizes by symbol -> what the arguments hold that a kernel must not be given, a sentence each.
Contents = Callable[[Mapping[str, Buffer], Mapping[str, int]], Iterable[str]]


@dataclass(frozen=True, slots=True)
class Form:
    """An argument as its plan reads or writes it. `shape`: numbers, and symbols whose size each run gives.

    note: how its elements are stored, where the dtype does not say it
    """

    dtype: np.dtype[np.generic]
    shape: tuple[int | str, ...]
    is_output: bool = False
    note: str = ""

    def refuse(self, x: NDArray[np.generic], sizes: Mapping[str, int]) -> str | None:
        """Why the array cannot be the argument, got against needed; None when it can."""
        shape = tuple(sizes[d] if isinstance(d, str) else d for d in self.shape)
        if x.dtype != self.dtype:
            return f"is {x.dtype}; the plan needs {self.dtype}{self.note and f' ({self.note})'}"
        if x.shape != shape:
            given = ", ".join(f"{d} = {sizes[d]}" for d in self.shape if isinstance(d, str))
            return f"has shape {x.shape}; the plan needs {shape}{given and f' at {given}'}"
        if self.is_output and not x.flags.writeable:
            return "is read-only; the plan writes it: give it an array of its own, or a copy"
        return None


def refuse_memory(x: object, n_bytes: int, on_gpu: bool) -> str | None:
    """Why `x` is no memory of `n_bytes` that a kernel can be given; None when it is. An address is taken on trust."""
    if isinstance(x, int):
        return None if x > 0 else f"is the address {x}; an address of memory is needed"
    if not isinstance(x, np.ndarray):
        return f"is a {type(x).__name__}; {'an address' if on_gpu else 'an array or an address'} is needed"
    if on_gpu:
        return "is an array in this machine's memory; the plan runs on a GPU and needs an address in the GPU's"
    if x.nbytes != n_bytes or not x.flags.c_contiguous or not x.flags.aligned:
        form = "C-contiguous" if x.flags.c_contiguous else "not C-contiguous"
        form += "" if x.flags.aligned else f", not aligned to {x.dtype.itemsize} bytes"
        return f"has {x.nbytes} bytes, {form}; the plan needs {n_bytes}, C-contiguous and aligned"
    return None


def refuse_overlaps(
    names: Sequence[str], buffers: Sequence[Buffer], forms: Mapping[str, Form]
) -> Iterator[tuple[str, str]]:
    """(output, why) of each output whose memory another argument uses too: kernels write while they read."""
    for i, (name, x) in enumerate(zip(names, buffers, strict=True)):
        if isinstance(x, int) or name not in forms or not forms[name].is_output:
            continue
        for j, (other, y) in enumerate(zip(names, buffers, strict=True)):
            if i != j and not isinstance(y, int) and np.may_share_memory(x, y):
                yield name, f"shares memory with {other}; the plan writes it while it reads or writes {other}"
