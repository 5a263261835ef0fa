"""A GPU as a device to measure on. With torch, stock kernels run beside and answers are compared in the GPU's memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from emmy.errors import EmmyError
from emmy.ir.dtype import DType
from emmy.ir.ops import Attention, FormulaOp, Op, PagedAttention, Products, ServedAttention
from emmy.measure.answers import Answers, HostAnswers
from emmy.measure.cuda_memory import ZONE_BYTES, CudaBuffer
from emmy.measure.cuda_timing import GraphTiming
from emmy.measure.device import Buffer, Call, Device, Runnable, State
from emmy.measure.nvml import Meter
from emmy.measure.references import References
from emmy.measure.stock import torch_stock
from emmy.measure.timing import Participant, Timing
from emmy.measure.torch_answers import TorchAnswers
from emmy.runtime import launcher
from emmy.runtime.cuda_driver import Context, CudaError
from emmy.runtime.launcher import LaunchError, LoadedPlan

if TYPE_CHECKING:
    import torch

_COLD = 5  # times the L2 cache: so much must be touched in between
_OPERANDS, _ANSWERS = 0.5, 0.3  # shares of the free memory, for all ops that are kept
_OP_BYTES, _MOST_OPS = 12 << 30, 8  # an op is kept for each so much memory
_OUT_OF_MEMORY = 2
_LOST = frozenset({46, 214, 220, 226})  # unavailable, ECC, NVLink, contained: no kernel does this


class CudaDevice(Device):
    """The first GPU that this process sees. `parent` is the measuring process, which may hold a context of its own."""

    def __init__(self, references: References, parent: int) -> None:
        """Raises NoSuchDevice when there is none, CompileError or BrokenToolchain when the launcher cannot be built."""
        launcher.build()
        self.clock, self.references = "event", references
        self.context = Context()
        free = self.context.free_bytes()
        self.kept_ops = max(1, min(_MOST_OPS, free // _OP_BYTES))
        self.memory_bytes, self._answer_bytes = (int(x * free) // self.kept_ops for x in (_OPERANDS, _ANSWERS))
        self.cold_bytes = _COLD * self.context.gpu.l2_bytes
        self._meter = Meter(self.context.gpu.uuid, (parent,))
        self._has_torch = _prepare_torch(self.context.stream)

    def load(self, library: str) -> Runnable:
        return _CudaPlan(LoadedPlan(library, "cuda"), self.context.stream)

    def stock(self, op: Op, against: str = "") -> tuple[str, Runnable] | None:
        return torch_stock(op, tensor, against) if self._has_torch else None

    def answers(self, op: Op) -> Answers:
        if self._has_torch and isinstance(op, Products | FormulaOp | Attention | PagedAttention | ServedAttention):
            return TorchAnswers(op, "cuda", tensor, self._answer_bytes)
        return HostAnswers(op, self.references, self.memory_bytes // 4)

    def guarded(self, shape: tuple[int, ...], dtype: DType) -> Buffer:
        return self._buffer(shape, dtype, ZONE_BYTES)

    def plain(self, shape: tuple[int, ...], dtype: DType) -> Buffer:
        return self._buffer(shape, dtype, 0)

    def time_ns(self, calls: Sequence[Call]) -> int:
        def launches() -> None:
            for call in calls:
                call()

        return max(1, round(self.context.time_ms(launches) * 1e6))

    def timing(self, participants: Sequence[Participant], *, thorough: bool) -> Timing:
        return GraphTiming(self.context, participants, thorough=thorough)

    def circumstances(self) -> Mapping[str, float]:
        return self._meter.read()

    def after(self, error: EmmyError) -> State:
        code = error.code if isinstance(error, CudaError) else error.cuda if isinstance(error, LaunchError) else 0
        if code in _LOST:
            return "lost"
        return "usable" if not code or self.context.is_usable() else "faulted"

    def _buffer(self, shape: tuple[int, ...], dtype: DType, zone_bytes: int) -> CudaBuffer:
        try:
            return CudaBuffer(self.context, shape, dtype, zone_bytes)
        except CudaError as e:
            if e.code != _OUT_OF_MEMORY or not self._has_torch:
                raise
        import torch

        torch.cuda.empty_cache()  # torch keeps what it freed
        return CudaBuffer(self.context, shape, dtype, zone_bytes)


@dataclass(frozen=True, slots=True)
class _CudaPlan:
    """A plan loaded by the launcher, run on this device's stream."""

    plan: LoadedPlan
    stream: int

    def bind(self, buffers: Mapping[str, Buffer], sizes: Mapping[str, int]) -> Call:
        addresses = {name: b.address for name, b in buffers.items() if isinstance(b, CudaBuffer)}
        return self.plan.bind(addresses, sizes, stream=self.stream)


class _Interface:
    """A buffer as other libraries take it over (CUDA Array Interface, version 3). Keeps the buffer alive."""

    def __init__(self, buffer: CudaBuffer) -> None:
        kind = {"f32": "<f4", "f16": "<f2", "bf16": "<i2", "i32": "<i4"}[buffer.dtype]
        self.buffer = buffer
        self.__cuda_array_interface__ = {
            "shape": buffer.shape,
            "typestr": kind,
            "data": (buffer.address, False),
            "version": 3,
        }


def tensor(buffer: Buffer) -> torch.Tensor:
    """The buffer's memory as a tensor of torch."""
    import torch

    assert isinstance(buffer, CudaBuffer)
    shared = torch.as_tensor(_Interface(buffer), device="cuda")
    return shared.view(torch.bfloat16) if buffer.dtype == "bf16" else shared


def _prepare_torch(stream: int) -> bool:
    """Has torch work on our stream; False when it is not installed or has no CUDA."""
    if not importlib.util.find_spec("torch"):
        return False
    import torch

    if not torch.cuda.is_available():
        return False
    torch.set_grad_enabled(False)
    torch.cuda.set_stream(torch.cuda.ExternalStream(stream))
    return True
