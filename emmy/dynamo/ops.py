"""An op under a schedule as an operator of torch: real on CPU and CUDA tensors, with shapes alone for Dynamo. Knows no graph.

The operator is opaque to Dynamo and Inductor, allocates its outputs through torch and launches on the current stream, so that
CUDA graphs capture it. It has no gradient, and says so.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import InitVar, dataclass, field
from functools import partial
from pathlib import Path

import torch

from emmy.errors import NoSuchDevice, UsageError
from emmy.ir.dtype import DType
from emmy.ir.gathers import Gather, gathers
from emmy.ir.gpu import accumulation
from emmy.ir.ops import Accumulate, Op
from emmy.ir.program import Dim, Program, Sym, Value
from emmy.ir.target import load_target
from emmy.levels import Subject
from emmy.lookup import as_op, load, near_subjects, subjects
from emmy.runtime.launcher import BoundPlan, LoadedPlan

DTYPES: dict[DType, torch.dtype] = {
    "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i32": torch.int32,
}  # fmt: skip
_ALIGN = 16  # bytes, of an address that a copy engine or a vector load reads
INFERENCE = (
    "Emmy is for inference: call it under torch.no_grad() or torch.inference_mode(), or with requires_grad_(False)"
)
_LIBRARY = torch.library.Library("emmy", "FRAGMENT")
_MOST_BOUND = 256
_made: dict[str, TorchOp] = {}


@dataclass(slots=True)
class _Loaded:
    """A plan on a device. `bound`: what was run lately, with its stream, sizes and addresses: torch's allocator repeats them."""

    plan: LoadedPlan
    symbols: tuple[str, ...]
    bound: dict[tuple[int, ...], BoundPlan] = field(default_factory=dict)
    byte: torch.Tensor | None = None  # on the device: what torch gathers from to see whether positions are right
    nothing: torch.Tensor | None = (
        None  # one byte on the device, which torch gathers from to see whether positions are right
    )


@dataclass(slots=True)
class TorchOp:
    """An op of Emmy's that is called with tensors. `overload` is torch's operator: for FX graphs, `opcheck`, and the like.

    schedules: what runs, ascending by size where a table serves the op; origin: where the schedules come from

    Calls of one op on one device share its workspaces: on several streams they must not overlap.
    """

    op: Op
    gpu: str
    threads: int
    schedules: tuple[str, ...]
    origin: str
    accumulate: Accumulate
    name: str
    program: Program
    inputs: tuple[str, ...]
    given: InitVar[str | None]
    home: InitVar[Path | None]
    overload: torch._ops.OpOverload = field(init=False)
    _load: Callable[[], LoadedPlan] = field(init=False)
    _gathers: tuple[Gather, ...] = field(init=False)
    _fixed: tuple[tuple[tuple[tuple[int, ...], torch.dtype], ...], dict[str, int]] | None = field(init=False)
    _plans: dict[int, _Loaded] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __repr__(self) -> str:
        where = f"gpu={self.gpu!r}, threads={self.threads}"
        return f"TorchOp({self.op.key!r}, {where}, origin={self.origin!r}, schedules={self.schedules!r})"

    def __post_init__(self, given: str | None, home: Path | None) -> None:
        self._load = partial(load, self.op, given, gpu=self.gpu, threads=self.threads, home=home)
        p = self.program
        self._gathers = gathers(p)
        sizes = {a: d for a, d in p.dims if isinstance(d, int)}
        forms = tuple((tuple(sizes.get(a, 0) for a in v.axes), DTYPES[v.dtype]) for v in p.inputs)
        self._fixed = (forms, sizes) if len(sizes) == len(p.dims) else None
        out = "Tensor" if len(p.outputs) == 1 else f"({', '.join('Tensor' for _ in p.outputs)})"
        arguments = ", ".join(f"Tensor {name}" for name in self.inputs)
        _LIBRARY.define(f"{self.name}({arguments}) -> {out}", tags=(torch.Tag.pt2_compliant_tag,))
        self.overload = getattr(torch.ops.emmy, self.name).default
        for device in ("CPU", "CUDA"):
            _LIBRARY.impl(self.name, self.run, device)
            _LIBRARY.impl(self.name, self._without_gradient, f"Autograd{device}")
        torch.library.register_fake(f"emmy::{self.name}", self.fake, lib=_LIBRARY)

    def __call__(self, *tensors: torch.Tensor, **named: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """The outputs, one or a tuple, in the op's order. Tensors in the order of the op's inputs, or by name.

        Raises UsageError for tensors of another number, name, dtype, shape or device, and where a gradient is asked for.
        """
        if named:
            left = self.inputs[len(tensors) :]
            if set(named) != set(left):
                raise UsageError(
                    f"{self.name}: got {', '.join(named)} by name; by name it takes {', '.join(left) or 'none'}"
                )
            tensors = (*tensors, *(named[n] for n in left))
        if len(tensors) != len(self.inputs):
            raise UsageError(
                f"{self.name}: got {len(tensors)} tensors; it takes {len(self.inputs)}: {', '.join(self.inputs)}"
            )
        out: torch.Tensor | tuple[torch.Tensor, ...] = self.overload(*tensors)
        return out

    def prepare(self, device: torch.device) -> None:
        """Compiles and loads the plan for the device, which the first call does otherwise: before a graph is captured.

        Raises NoSuchDevice when the op is for another device, CompileError, PlanError or LaunchError.
        """
        is_cpu = load_target(self.gpu).is_cpu
        if device.type != ("cpu" if is_cpu else "cuda"):
            raise NoSuchDevice(
                f"{self.op} was made for {self.gpu}; tensors are on {device}. Move them, or name another gpu"
            )
        number = (torch.cuda.current_device() if device.index is None else device.index) if not is_cpu else -1
        if number not in self._plans:
            with self._lock, torch.cuda.device(number) if number >= 0 else nullcontext():
                if number >= 0:
                    torch.cuda.current_stream().synchronize()  # makes the context that the plan is loaded into
                if number not in self._plans:
                    self._plans[number] = _Loaded(
                        self._load(), tuple(s.name for _, s in self.program.dims if isinstance(s, Sym))
                    )

    def run(self, *tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        device = tensors[0].device
        number = -1 if device.type == "cpu" else device.index
        if number not in self._plans:
            self.prepare(device)
        sizes = self._sizes(tensors)
        for g in self._gathers:
            self._check(g, dict(zip(self.inputs, tensors, strict=True)), sizes)
        inputs = [_placed(t) for t in tensors]
        outputs = self._outputs(tensors[0], sizes)
        stream = torch._C._cuda_getCurrentRawStream(number) if number >= 0 else 0
        symbols = tuple(sizes[a] for a, s in self.program.dims if isinstance(s, Sym))
        key = (stream, *symbols, *(t.data_ptr() for t in (*inputs, *outputs)))
        plan = self._plans[number]
        with self._lock:  # a plan belongs to one thread at a time
            call = plan.bound.get(key)
            if call is None:
                if len(plan.bound) >= _MOST_BOUND:
                    plan.bound.clear()
                named = dict(zip(plan.symbols, symbols, strict=True))
                call = plan.bound[key] = plan.plan.bind(key[1 + len(symbols) :], named, self.threads, stream)
            call()
        return outputs[0] if len(outputs) == 1 else outputs

    def _check(self, g: Gather, given: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> None:
        """Positions must be the table's: on the CPU UsageError is raised, on a GPU torch's own assertion fails there, as of
        its own gathers: nothing waits for it, and a graph captures it.
        """
        told, size = {name: given[name].long() for name in g.told_by}, sizes[g.axis]
        device = given[g.told_by[0]].device
        at = g.positions(told, lambda axis: torch.arange(sizes[axis], device=device))
        if device.type == "cpu":
            lowest, highest = map(int, torch.aminmax(at)) if at.numel() else (0, 0)
            if why := g.refuse(lowest, highest, size):
                raise UsageError(f"{self.op}: {why}")
            return
        plan = self._plans[device.index]
        plan.byte = torch.empty(1, dtype=torch.uint8, device=device) if plan.byte is None else plan.byte
        plan.byte.expand(size).index_select(0, at.flatten())

    def _without_gradient(self, *tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            raise UsageError(f"{self.op}: a tensor requires a gradient, and there is none. {INFERENCE}")
        with torch._C._AutoDispatchBelowAutograd():
            out: torch.Tensor | tuple[torch.Tensor, ...] = self.overload(*tensors)
            return out

    def fake(self, *tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Outputs without numbers, of sizes that may be symbolic."""
        outputs = self._outputs(tensors[0], self._sizes(tensors))
        return outputs[0] if len(outputs) == 1 else outputs

    def _outputs(self, like: torch.Tensor, sizes: dict[str, int]) -> tuple[torch.Tensor, ...]:
        p = self.program
        return tuple(
            like.new_empty([sizes[a] for a in p.value(o).axes], dtype=DTYPES[p.value(o).dtype]) for o in p.outputs
        )

    def _sizes(self, tensors: Sequence[torch.Tensor]) -> dict[str, int]:
        """The size of each axis. Raises UsageError for a tensor of another dtype, shape or device than the op takes."""
        if self._fixed is not None:
            device = tensors[0].device
            if all(
                t.shape == s and t.dtype == d and t.device == device
                for t, (s, d) in zip(tensors, self._fixed[0], strict=True)
            ):
                return self._fixed[1]
        p, sizes, symbols = self.program, dict[str, int](), dict[str, int]()
        for v, t in zip(p.inputs, tensors, strict=True):
            wanted = [sizes.get(a, p.dim(a)) for a in v.axes]
            if t.dtype != DTYPES[v.dtype] or t.dim() != len(wanted) or t.device != tensors[0].device:
                raise self._refused(v, wanted, t)
            for axis, want, size in zip(v.axes, wanted, t.shape, strict=True):
                fits = want.lo <= size <= want.hi if isinstance(want, Sym) else size == want
                if not fits or (isinstance(want, Sym) and symbols.setdefault(want.name, size) != size):
                    raise self._refused(v, wanted, t)
                sizes[axis] = size
        return sizes

    def _refused(self, v: Value, wanted: Sequence[Dim], t: torch.Tensor) -> UsageError:
        shape = ", ".join(map(str, wanted))
        return UsageError(
            f"{self.op}: {v.name} is {t.dtype}{list(t.shape)} on {t.device}; it takes {v.dtype}[{shape}], all on one device"
        )


def _placed(t: torch.Tensor) -> torch.Tensor:
    """The tensor row-major, at an address that vectors may be read from."""
    t = t.contiguous()
    return t if t.data_ptr() % _ALIGN == 0 else t.clone()


def _origin(s: Subject) -> str:
    return f"near, {s.note}" if s.origin == "near" else s.origin


def _least_exact(found: Sequence[Subject]) -> Accumulate:
    order: tuple[Accumulate, ...] = ("f16", "hybrid", "f32")
    kinds = {accumulation(s.plan) for s in found}
    return next(x for x in order if x in kinds)


def torch_op(
    op: Op | str,
    *,
    gpu: str = "cpu",
    schedule: str | None = None,
    threads: int | None = None,
    near: bool = True,
    home: Path | None = None,
) -> TorchOp:
    """The op for tensors of its sizes: `emmy.torch_op("matmul:8x512x256:f16:nk", gpu="h200")(a, b)`.

    schedule: moves, or a table's text; None: the stored winner, else a predicted schedule, else that of a near problem,
              else the default one
    near:     whether winners of near problems may be taken
    threads:  of a CPU; None: as many as torch uses

    Inference only. Raises UsageError, IllegalMove or NoSuchDevice; the plan is compiled by `prepare`, or the first call.
    """
    op = as_op(op)
    count = (threads or torch.get_num_threads()) if load_target(gpu).is_cpu else 1
    found = subjects(op, schedule, gpu=gpu, threads=count, home=home)
    if near and found[0].origin == "default":
        found = (*near_subjects(op, gpu=gpu, threads=count, home=home, most=1), *found)[:1]
    schedules = tuple(s.schedule for s in found)
    text = "\n".join((op.key, gpu, str(count), *schedules))
    name = f"{op.kind}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if name not in _made:
        given = schedule if schedule is not None or len(found) > 1 else schedules[0]
        p = op.program()
        names = tuple(v.name for v in p.inputs)
        _made[name] = TorchOp(
            op, gpu, count, schedules, _origin(found[0]), _least_exact(found), name, p, names, given, home
        )
    return _made[name]
