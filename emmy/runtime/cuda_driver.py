"""NVIDIA's driver in Python: which GPUs there are, their memory, streams, events and graphs. Knows no plan and no kernel.

Everything goes through libcuda, which is there where a GPU can be used. The primary context is used, as by the CUDA
runtime, so that torch in the same process sees the same memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from emmy.errors import EmmyError, NoSuchDevice

# cuda.h: CUdevice_attribute, CUstreamCaptureMode, CUstream_flags
_N_SMS, _L2_BYTES, _MAJOR, _MINOR = 16, 38, 75, 76
_CAPTURE_RELAXED = 2
_NON_BLOCKING = 1
_INT, _PTR, _U64, _SIZE = ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t
# Argument types of the calls used. Handles and device addresses are 64 bits wide.
_CALLS: dict[str, tuple[type[object], ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDriverGetVersion": (_PTR,),
    "cuGetErrorString": (_INT, _PTR),
    "cuDeviceGetCount": (_PTR,),
    "cuDeviceGet": (_PTR, _INT),
    "cuDeviceGetName": (_PTR, _INT, _INT),
    "cuDeviceGetUuid": (_PTR, _INT),
    "cuDeviceTotalMem_v2": (_PTR, _INT),
    "cuDeviceGetAttribute": (_PTR, _INT, _INT),
    "cuDevicePrimaryCtxRetain": (_PTR, _INT),
    "cuCtxSetCurrent": (_PTR,),
    "cuCtxSynchronize": (),
    "cuMemGetInfo_v2": (_PTR, _PTR),
    "cuMemAlloc_v2": (_PTR, _SIZE),
    "cuMemFree_v2": (_U64,),
    "cuMemcpyHtoD_v2": (_U64, _PTR, _SIZE),
    "cuMemcpyDtoH_v2": (_PTR, _U64, _SIZE),
    "cuMemsetD8Async": (_U64, ctypes.c_ubyte, _SIZE, _PTR),
    "cuStreamCreate": (_PTR, ctypes.c_uint),
    "cuStreamSynchronize": (_PTR,),
    "cuStreamBeginCapture_v2": (_PTR, _INT),
    "cuStreamEndCapture": (_PTR, _PTR),
    "cuGraphInstantiateWithFlags": (_PTR, _PTR, _U64),
    "cuGraphLaunch": (_PTR, _PTR),
    "cuGraphExecDestroy": (_PTR,),
    "cuGraphDestroy": (_PTR,),
    "cuEventCreate": (_PTR, ctypes.c_uint),
    "cuEventRecord": (_PTR, _PTR),
    "cuEventElapsedTime": (_PTR, _PTR, _PTR),
}


class CudaError(EmmyError):
    """The driver refused or a kernel went wrong. `code` is CUDA's own."""

    def __init__(self, code: int, doing: str) -> None:
        self.code = code
        super().__init__(f"CUDA error {code}, {_words(code)}, while {doing}")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this machine. `uuid` as the driver spells it: GPU-8-4-4-4-12 hexadecimal digits."""

    index: int
    product: str
    uuid: str
    capability: tuple[int, int]
    memory_bytes: int
    l2_bytes: int
    n_sms: int
    cuda: str  # the newest CUDA that the driver runs: "13.0"


@cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    for name, types in _CALLS.items():
        getattr(library, name).argtypes = types
    return library


def _words(code: int) -> str:
    library, text = _library(), ctypes.c_char_p()
    if library is not None:
        library.cuGetErrorString(code, ctypes.byref(text))
    return text.value.decode() if text.value else "unknown to this driver"


def _do(name: str, *args: object, doing: str = "") -> None:
    library = _library()
    if library is None:
        raise NoSuchDevice("no NVIDIA driver on this machine: libcuda.so.1 is not found")
    code = getattr(library, name)(*args)
    if code:
        raise CudaError(code, doing or f"calling {name}")


def _int(name: str, *args: object) -> int:
    out = ctypes.c_int()
    _do(name, ctypes.byref(out), *args)
    return out.value


def _handle(name: str, *args: object, doing: str = "") -> int:
    """What a call makes, by its handle or address."""
    out = ctypes.c_uint64()
    _do(name, ctypes.byref(out), *args, doing=doing)
    return out.value


def gpus() -> tuple[Gpu, ...]:
    """The GPUs that the driver lets this process see (CUDA_VISIBLE_DEVICES counts); () without a driver or a GPU."""
    try:
        _do("cuInit", 0)
        return tuple(_gpu(i) for i in range(_int("cuDeviceGetCount")))
    except (NoSuchDevice, CudaError):
        return ()


def why_no_gpu() -> str:
    """Why `gpus` finds none, in words; "" when it finds some."""
    try:
        _do("cuInit", 0)
        n = _int("cuDeviceGetCount")
    except (NoSuchDevice, CudaError) as e:
        return str(e)
    return "" if n else "the NVIDIA driver shows this process no GPU; CUDA_VISIBLE_DEVICES may hide them"


def _gpu(index: int) -> Gpu:
    device = _int("cuDeviceGet", index)
    name, raw = ctypes.create_string_buffer(256), ctypes.create_string_buffer(16)
    _do("cuDeviceGetName", name, len(name), device)
    _do("cuDeviceGetUuid", raw, device)
    version = _int("cuDriverGetVersion")
    major, minor, n_sms, l2 = (_int("cuDeviceGetAttribute", a, device) for a in (_MAJOR, _MINOR, _N_SMS, _L2_BYTES))
    return Gpu(
        index,
        name.value.decode(),
        f"GPU-{UUID(bytes=raw.raw)}",
        (major, minor),
        _handle("cuDeviceTotalMem_v2", device),
        l2,
        n_sms,
        f"{version // 1000}.{version % 1000 // 10}",
    )


class Graph:
    """Launches that were captured, ready to be replayed together."""

    def __init__(self, context: Context, captured: int) -> None:
        self._context = context
        self._executable = 0
        try:
            self._executable = _handle("cuGraphInstantiateWithFlags", captured, 0, doing="making a graph")
        finally:
            _do("cuGraphDestroy", captured)

    def launch(self) -> None:
        _do("cuGraphLaunch", self._executable, self._context.stream, doing="replaying a graph")

    def __del__(self) -> None:
        if self._executable:
            with suppress(CudaError):  # after a fault nothing can be given back
                _do("cuGraphExecDestroy", self._executable)


class Context:
    """One GPU's memory and one stream, on which everything happens in turn. Belongs to the thread that made it."""

    def __init__(self, index: int = 0) -> None:
        """Raises NoSuchDevice when there is no GPU of that number."""
        found = gpus()
        if index >= len(found):
            raise NoSuchDevice(f"GPU {index} is not there; the driver shows {len(found)}")
        self.gpu = found[index]
        self._context = _handle("cuDevicePrimaryCtxRetain", _int("cuDeviceGet", index), doing="opening the GPU")
        _do("cuCtxSetCurrent", self._context)
        self.stream = _handle("cuStreamCreate", _NON_BLOCKING)
        self._begin, self._end = _handle("cuEventCreate", 0), _handle("cuEventCreate", 0)

    def free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        _do("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def synchronize(self) -> None:
        """Returns when all is done. Raises CudaError for whatever went wrong since the last time."""
        _do("cuStreamSynchronize", self.stream, doing="waiting for the GPU")

    def is_usable(self) -> bool:
        """False after a fault of a kernel: then every later call fails too, and only a new process helps."""
        library = _library()
        return library is not None and library.cuCtxSynchronize() == 0

    def allocate(self, n_bytes: int) -> int:
        return _handle("cuMemAlloc_v2", max(1, n_bytes), doing=f"allocating {n_bytes} bytes")

    def free(self, address: int) -> None:
        _do("cuMemFree_v2", address)

    def write(self, address: int, data: NDArray[np.generic]) -> None:
        """Copies a contiguous array to the GPU, after all that was launched."""
        assert data.flags.c_contiguous
        self.synchronize()
        _do("cuMemcpyHtoD_v2", address, data.ctypes.data, data.nbytes)

    def read(self, address: int, into: NDArray[np.generic]) -> None:
        """Copies from the GPU into a contiguous array, after all that was launched."""
        assert into.flags.c_contiguous
        self.synchronize()
        _do("cuMemcpyDtoH_v2", into.ctypes.data, address, into.nbytes)

    def fill(self, address: int, byte: int, n_bytes: int) -> None:
        _do("cuMemsetD8Async", address, byte, n_bytes, self.stream)

    def time_ms(self, launches: Callable[[], None]) -> float:
        """Milliseconds that the stream is at work with what the function launches; returns when it is done."""
        _do("cuEventRecord", self._begin, self.stream)
        launches()
        _do("cuEventRecord", self._end, self.stream)
        self.synchronize()
        out = ctypes.c_float()
        _do("cuEventElapsedTime", ctypes.byref(out), self._begin, self._end)
        return out.value

    def capture(self, launches: Callable[[], None]) -> Graph:
        """A graph of what the function launches on the stream, other libraries' launches included. Nothing runs yet."""
        _do("cuStreamBeginCapture_v2", self.stream, _CAPTURE_RELAXED)
        try:
            launches()
        except BaseException:
            with suppress(CudaError):
                _do("cuGraphDestroy", self._end_capture())
            raise
        return Graph(self, self._end_capture())

    def _end_capture(self) -> int:
        captured = ctypes.c_uint64()
        _do("cuStreamEndCapture", self.stream, ctypes.byref(captured), doing="capturing launches")
        return captured.value
