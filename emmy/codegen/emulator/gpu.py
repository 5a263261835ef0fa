"""Launches a cubin on the first GPU of this machine, for comparing the emulator with hardware. Not for timing.

Only the driver library is needed, by ctypes: no CUDA toolkit and no other package.
"""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING

import numpy as np

from emmy.codegen.emulator.tensormap import TensorMap
from emmy.errors import EmuError, NoSuchDevice

if TYPE_CHECKING:
    from emmy.codegen.emulator.probe import Argument

_MAX_DYNAMIC_SMEM = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_ELEMENT = {1: 0, 2: 1, 4: 2}  # bytes -> CU_TENSOR_MAP_DATA_TYPE_UINT8, 16, 32
_SWIZZLE = {0: 0, 32: 1, 64: 2, 128: 3}  # bytes -> CU_TENSOR_MAP_SWIZZLE_*


class Gpu:
    """The first GPU and a context of its own. Raises NoSuchDevice when there is none."""

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as e:
            raise NoSuchDevice(f"no NVIDIA driver on this machine: {e}") from None
        self._call("cuInit", 0)
        device, major, minor, driver = (ctypes.c_int() for _ in range(4))
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        name = ctypes.create_string_buffer(100)
        self._call("cuDeviceGetName", name, 100, device)
        self._call("cuDeviceGetAttribute", ctypes.byref(major), _MAJOR, device)
        self._call("cuDeviceGetAttribute", ctypes.byref(minor), _MINOR, device)
        self._call("cuDriverGetVersion", ctypes.byref(driver))
        self.product, self.driver = name.value.decode(), driver.value
        self.capability = 10 * major.value + minor.value
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def launch(
        self,
        cubin: bytes,
        kernel: str,
        grid: int,
        block: int,
        smem_bytes: int,
        args: list[Argument],
        timeout_s: float = 10.0,
    ) -> None:
        """Runs the kernel; arrays it may write are read back. Raises EmuError for a fault, or when it does not end."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), cubin)
        self._call("cuModuleGetFunction", ctypes.byref(function), module, kernel.encode())
        self._call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SMEM, smem_bytes)
        memory: dict[int, ctypes.c_uint64] = {}
        values = [self._argument(a, memory) for a in args]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        self._call("cuLaunchKernel", function, grid, 1, 1, block, 1, 1, smem_bytes, None, pointers, None)
        self._wait(timeout_s)
        for a in args:
            array = a.array if isinstance(a, TensorMap) else a
            if isinstance(array, np.ndarray) and array.flags.writeable:
                self._call(
                    "cuMemcpyDtoH_v2",
                    array.ctypes.data_as(ctypes.c_void_p),
                    memory[id(array)],
                    ctypes.c_size_t(array.nbytes),
                )
        for address in memory.values():
            self._call("cuMemFree_v2", address)
        self._call("cuModuleUnload", module)

    def _argument(
        self, a: Argument, memory: dict[int, ctypes.c_uint64]
    ) -> ctypes._SimpleCData[object] | ctypes.Array[ctypes.c_char]:
        if isinstance(a, int):
            return ctypes.c_int64(a)  # type: ignore[return-value] # a simple value too
        if isinstance(a, float):
            return ctypes.c_float(a)  # type: ignore[return-value]
        array = a.array if isinstance(a, TensorMap) else a
        if id(array) not in memory:
            address = ctypes.c_uint64()
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(array.nbytes, 1)))
            self._call("cuMemcpyHtoD_v2", address, array.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(array.nbytes))
            memory[id(array)] = address
        return self._encode(a, memory[id(array)]) if isinstance(a, TensorMap) else memory[id(array)]  # type: ignore[return-value]

    def _encode(self, m: TensorMap, address: ctypes.c_uint64) -> ctypes.Array[ctypes.c_char]:
        """The driver's 128 bytes, aligned to 64."""
        rank = len(m.box)
        room = ctypes.create_string_buffer(192)
        out = (ctypes.c_char * 128).from_buffer(room, -ctypes.addressof(room) % 64)
        self._call(
            "cuTensorMapEncodeTiled", out, _ELEMENT[m.array.itemsize], rank, ctypes.c_void_p(address.value),
            (ctypes.c_uint64 * rank)(*m.shape), (ctypes.c_uint64 * (rank - 1))(*m.strides), (ctypes.c_uint32 * rank)(*m.box),
            (ctypes.c_uint32 * rank)(*(1,) * rank), 0, _SWIZZLE[m.swizzle_bytes], 0, 0,
        )  # fmt: skip
        return out

    def _wait(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while (status := self._cuda.cuStreamQuery(None)) == _NOT_READY:
            if time.monotonic() > end:
                raise EmuError(
                    "deadlock", f"the GPU does not finish within {timeout_s:g} s; this process cannot use it again"
                )
            time.sleep(1e-4)
        self._check(status, "the kernel")

    def _call(self, name: str, *args: object) -> None:
        self._check(getattr(self._cuda, name)(*args), name)

    def _check(self, status: int, what: str) -> None:
        if status:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(status, ctypes.byref(text))
            raise EmuError("gpu", f"{what}: CUDA error {status}, {(text.value or b'unknown').decode()}")
