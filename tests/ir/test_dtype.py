"""Number formats: rounding to nearest even, and storage that reads back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emmy.ir.dtype import DTYPES, decode, encode, epsilon, size_bytes, storage

SINGLES = st.floats(width=32, allow_nan=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_storage_form_has_the_size_and_spacing_it_says(dtype):
    one = np.array([1.0])
    assert encode(one, dtype).dtype == storage(dtype) and storage(dtype).itemsize == size_bytes(dtype)
    assert decode(encode(one + epsilon(dtype), dtype), dtype)[0] == 1 + epsilon(dtype)
    assert decode(encode(one + epsilon(dtype) / 4, dtype), dtype)[0] == 1
    # half way: to the even neighbour, which is 1 below and 1 + 2 eps above
    assert decode(encode(one + epsilon(dtype) / 2, dtype), dtype)[0] == 1
    assert decode(encode(one + 1.5 * epsilon(dtype), dtype), dtype)[0] == 1 + 2 * epsilon(dtype)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(SINGLES)
def test_bf16_is_the_nearest_of_its_neighbours(x: float):
    got = decode(encode(np.array([x]), "bf16"), "bf16")[0]
    if np.isinf(got):
        assert abs(x) >= 3.3895313892515355e38  # half way beyond the largest bf16
        return
    bits = np.array([x], np.float32).view(np.uint32)[0] >> 16 << 16
    with np.errstate(over="ignore"):
        near = np.array([bits, bits + 0x10000], np.uint32).view(np.float32).astype(np.float64)
    assert abs(x - got) == np.min(np.abs(near[np.isfinite(near)] - x))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 0xFFFF))
def test_every_bf16_reads_back_as_itself(bits: int):
    x = np.array([bits], np.uint16)
    value = decode(x, "bf16")
    back = encode(value, "bf16")
    assert np.isnan(value[0]) == np.isnan(decode(back, "bf16")[0])
    assert np.isnan(value[0]) or back[0] == bits


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_nan_survive_and_shapes_are_kept(dtype):
    x = np.array([[np.inf, -np.inf, np.nan, -0.0]])
    got = decode(encode(x, dtype), dtype)
    assert got.shape == (1, 4) and got[0, 0] == np.inf and got[0, 1] == -np.inf
    assert np.isnan(got[0, 2]) and got[0, 3] == 0 and np.signbit(got[0, 3])
    assert encode(np.asarray(2.5), dtype).shape == ()
