"""Number formats: names, sizes, rounding. Must not know expressions or devices."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

DType = Literal["f32", "f16", "bf16", "i32"]
DTYPES: tuple[DType, ...] = ("f32", "f16", "bf16")  # of numbers; an i32 is a position, and nothing is computed in it
Floats = NDArray[np.floating]


def size_bytes(dtype: DType) -> int:
    """Bytes of one element."""
    return 4 if dtype in ("f32", "i32") else 2


def epsilon(dtype: DType) -> float:
    """Spacing of numbers at 1.0 (f32 2^-23, f16 2^-10, bf16 2^-7)."""
    return {"f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}[dtype]


def encode(x: Floats, dtype: DType) -> NDArray[np.generic]:
    """`x` rounded to nearest even in its storage form: float32, float16, or uint16 bits for bf16 (numpy has none).

    bf16 goes by way of float32, as on a device: a float64 just beyond half way may end on the other side of it.
    """
    if dtype in ("f32", "i32"):
        return x.astype(storage(dtype))
    if dtype == "f16":
        return x.astype(np.float16)
    single = x.astype(np.float32)
    bits = single.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    nan = np.isnan(single)
    return np.where(nan, (bits >> 16) | 0x40, rounded).astype(np.uint16)


def decode(x: NDArray[np.generic], dtype: DType) -> NDArray[np.float64]:
    """The numbers that the storage form holds, as float64."""
    if dtype == "bf16":
        return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return x.astype(np.float64)


def storage(dtype: DType) -> np.dtype[np.generic]:
    """numpy dtype of the storage form."""
    return np.dtype({"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "i32": np.int32}[dtype])
