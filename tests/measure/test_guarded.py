"""Operands between red zones."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emmy.ir.dtype import DType, decode, storage
from emmy.measure.guarded import ALIGN, guarded, plain

SHAPES = [(), (1,), (7, 5), (16, 64), (333, 17), (1024, 1025)]


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_fresh_operand_is_aligned_has_its_shape_and_holds_only_nan(shape: tuple[int, ...], dtype: DType) -> None:
    for make in (guarded, plain):
        buffer = make(shape, dtype)
        assert buffer.read().shape == shape
        assert buffer.read().dtype == storage(dtype)
        assert buffer.read().ctypes.data % ALIGN == 0
        assert np.isnan(decode(buffer.read(), dtype)).all()
        assert buffer.damage() is None


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3000), st.integers(-64, 64).filter(bool))
def test_every_byte_written_beside_an_operand_is_seen(n: int, offset: int) -> None:
    buffer = guarded((n,), "f16")
    address = buffer.read().ctypes.data + (2 * n + offset - 1 if offset > 0 else offset)
    if offset > len(buffer.back):
        return  # no red zone there: the next test
    ctypes.c_uint8.from_address(address).value = 0
    damage = buffer.damage()
    assert damage is not None
    assert f"the nearest {abs(offset)} away" in damage
    assert ("past its end" in damage) == (offset > 0)


@pytest.mark.parametrize("where", ["array.nbytes + 64", "-2 * 4096 - 64"])
def test_what_lies_beyond_the_red_zones_cannot_be_touched(where: str) -> None:
    code = (
        "import ctypes; from emmy.measure.guarded import guarded; array = guarded((33, 17), 'f32').read();"
        f"ctypes.c_uint8.from_address(array.ctypes.data + {where}).value = 0"
    )
    paths = [p for p in sys.path if p]
    done = subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {paths}; {code}"], check=False)
    assert done.returncode < 0  # by a signal


def test_writing_keeps_the_operand_in_place_and_poison_removes_it() -> None:
    buffer = guarded((3, 4), "f32")
    data = np.arange(12, dtype=np.float32).reshape(3, 4)
    address = buffer.read().ctypes.data
    buffer.write(data)
    assert (buffer.read() == data).all()
    assert buffer.read().ctypes.data == address
    buffer.poison()
    assert np.isnan(buffer.read()).all()
