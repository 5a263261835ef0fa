"""Emmy's operators in torch: `torch.ops.emmy.linear`, `torch.ops.emmy.launch`, and the tables of kernels they call.

The C++ beside this file is compiled at first use and kept in the cache, as the launcher is. Knows torch, not vLLM.

    emmy::linear(x, w, table)                     x @ w^T by the kernel that the table has for x's rows, else by aten::linear
    emmy::launch(arguments, sizes, table)         one run of a table on all of its arguments, in its order; refuses stock's sizes
    emmy::fused(inputs, table)                    a table's outputs, new, of its inputs in its order; sizes that it leaves to stock by
    emmy::made_by_torch(inputs, table)            which is the same by torch's operators
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from math import prod
from pathlib import Path

import torch

from emmy import hostcc
from emmy.ir.dtype import DType
from emmy.ir.ops import parse_op
from emmy.pack import PackedPlan
from emmy.pack.schema import Argument
from emmy.runtime import launcher
from emmy_vllm.counts import Counts
from emmy_vllm.torch_made import made_by_torch

_ABI = "0x020b000000000000"  # torch 2.11: the oldest that the library runs on
_SCALAR: Mapping[DType, int] = {"f16": 5, "f32": 6, "bf16": 15, "i32": 3}  # c10/core/ScalarType.h
_TORCH: Mapping[DType, torch.dtype] = {"f16": torch.float16, "f32": torch.float32, "bf16": torch.bfloat16}
_SCHEMAS = {
    "linear": "linear(Tensor x, Tensor w, int table) -> Tensor",
    "launch": "launch(Tensor(a!)[] arguments, int[] sizes, int table) -> ()",
    "fused": "fused(Tensor[] inputs, int table) -> Tensor[]",
    "made_by_torch": "made_by_torch(Tensor[] inputs, int table) -> Tensor[]",
}
# What tables use, older ones too: a thread may be in one, and a CUDA graph that was captured goes on launching its kernels.
_kept: list[tuple[PackedPlan | None, Counts]] = []

_ops: dict[int, tuple[str, tuple[Argument, ...]]] = {}  # text and arguments of each table's op


class _Calls(ctypes.Structure):
    _fields_ = [(n, ctypes.c_void_p) for n in ("choose", "argument_bytes", "run", "message", "current_stream")]


class _Form(ctypes.Structure):
    _fields_ = [*((n, ctypes.c_int32) for n in ("dtype", "is_open", "is_output")), ("elements", ctypes.c_int64)]


@cache
def library() -> ctypes.CDLL:
    """The operators, compiled on first use, registered with torch and connected to the launcher. Raises CompileError."""
    space = torch.library.Library("emmy", "FRAGMENT")
    for schema in _SCHEMAS.values():
        space.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))
    lib = ctypes.CDLL(str(hostcc.compile_library(_source(), "c++", _flags()).path))
    numbers = ctypes.POINTER(ctypes.c_int64)
    lib.emmy_ops_add.argtypes = [
        ctypes.c_int64, ctypes.c_char_p, ctypes.c_void_p, ctypes.POINTER(_Form), ctypes.c_int32, numbers, numbers, ctypes.c_int32,
    ]  # fmt: skip
    lib.emmy_ops_add.restype = None
    lib.emmy_ops_connect.argtypes = [ctypes.POINTER(_Calls)]
    lib.emmy_ops_connect.restype = None
    run = launcher.library()
    calls = _Calls(
        *map(_address, (run.emmy_choose, run.emmy_argument_bytes, run.emmy_run, run.emmy_message)), _stream()
    )
    lib.emmy_ops_connect(ctypes.byref(calls))
    space._register_fake("linear", _linear_fake)
    space._register_fake("launch", lambda arguments, sizes, table: None)
    space._register_fake("fused", _fused_fake)
    space._register_fake("made_by_torch", _fused_fake)
    space.impl("made_by_torch", _made_by_torch, "CompositeExplicitAutograd")
    _spaces.append(space)
    return lib


_spaces: list[torch.library.Library] = []  # a library that is collected takes its operators along


def add_table(
    number: int,
    name: str,
    arguments: Sequence[Argument],
    plan: PackedPlan | None,
    counts: Counts,
    alike: Sequence[tuple[int, int]] = (),
) -> None:
    """Puts a plan under a number, in the place of an older one; without a plan stock serves all of it.

    number: graphs hold it: it must mean the same in every process that a graph comes to
    counts: gets the calls that were left to stock, then those of each range. Replays of a CUDA graph are no calls.
    alike:  ranges lo..hi, ascending, that alone are used, for any number of rows: a row's answer does not depend on those beside
    """
    by_name = {a.name: a for a in arguments}
    order = plan.loaded.arguments if plan else tuple(by_name)
    forms = (_Form * len(order))(*(_form(by_name[n]) for n in order))
    ends = [end for lo_hi in alike for end in lo_hi]
    handle = plan.loaded.handle if plan else None
    _kept.append((plan, counts))
    library().emmy_ops_add(
        number, name.encode(), handle, forms, len(order), counts.array, (ctypes.c_int64 * len(ends))(*ends), len(ends)
    )
    _ops[number] = (name, tuple(by_name[n] for n in order))


def _form(a: Argument) -> _Form:
    fixed = [d for d in a.shape if isinstance(d, int)]
    return _Form(_SCALAR[a.dtype], len(fixed) < len(a.shape), a.is_output, prod(fixed))


def _linear_fake(x: torch.Tensor, w: torch.Tensor, table: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[0]))


def _fused_fake(inputs: Sequence[torch.Tensor], table: int) -> list[torch.Tensor]:
    _, arguments = _ops[table]
    given = [_form(a) for a in arguments if not a.is_output]
    rows = next(x.numel() // f.elements for x, f in zip(inputs, given, strict=True) if f.is_open)
    return [inputs[0].new_empty((rows, _form(a).elements), dtype=_TORCH[a.dtype]) for a in arguments if a.is_output]


def _made_by_torch(inputs: Sequence[torch.Tensor], table: int) -> list[torch.Tensor]:
    text, arguments = _ops[table]
    names = [a.name for a in arguments if not a.is_output]
    made = made_by_torch(parse_op(text), dict(zip(names, inputs, strict=True)))
    return [made[a.name] for a in arguments if a.is_output]


def _source() -> str:
    here = resources.files("emmy_vllm").joinpath("op.cpp").read_text(encoding="utf-8")
    api = resources.files("emmy.runtime").joinpath("launcher.h").read_text(encoding="utf-8")
    return here.replace('#include "launcher.h"\n', api)


def _flags() -> tuple[str, ...]:
    root = Path(torch.__file__).parent
    return (
        "-std=c++17", "-O2", "-fPIC", "-Wall", "-Wextra", f"-DTORCH_TARGET_VERSION={_ABI}", f'-DBUILT_WITH="{torch.__version__}"',
        "-isystem", f"{root / 'include'}", f"-L{root / 'lib'}", "-Wl,--no-as-needed", "-ltorch_cpu",
    )  # fmt: skip


def _address(function: object) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]


def _stream() -> int | None:
    """Address of torch's call for the current stream; None where torch has no CUDA."""
    if torch.version.cuda is None:
        return None
    cuda = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))
    return _address(cuda.aoti_torch_get_current_cuda_stream)
