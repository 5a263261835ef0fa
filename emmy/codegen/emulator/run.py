"""Run a kernel's exact CUDA text on this machine, and be told of its faults. Knows neither plans nor GPUs.

One run is one schedule of the threads, chosen by `seed`. Conflicting accesses are found whatever the schedule; what depends on
it, such as a deadlock that only one order reaches, needs several seeds: see `SCHEDULES`.
"""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING

from emmy.codegen.emulator.build import core_path, kernel_library
from emmy.codegen.emulator.stats import EmuStats
from emmy.codegen.emulator.tensormap import TensorMap
from emmy.errors import EmuError, UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.generic]
    Argument = Array | TensorMap | int | float | np.generic


@dataclass(frozen=True, slots=True)
class EmuResult:
    """The run went through, and the arrays hold what the kernel wrote."""

    stats: EmuStats


# (seed, eager): copies as early and as late as may be; warps in order, by chance, and the same one first as long as it can
# move; lanes forwards, backwards and by chance.
SCHEDULES: tuple[tuple[int, bool], ...] = ((0, True), (0, False), (1, False), (2, False), (5, False), (6, False))
_BUDGET = 200_000_000
_one_at_a_time = threading.Lock()  # the core has one state


def emulate(
    source: str,
    kernel: str,
    grid: Sequence[int],
    block: Sequence[int],
    smem_bytes: int,
    args: Sequence[Argument],
    *,
    cluster: Sequence[int] = (1, 1, 1),
    seed: int = 0,
    eager: bool = False,
    together: bool = False,
    few: bool = False,
    late: Sequence[Array] = (),
    budget: int = _BUDGET,
) -> EmuResult:
    """Runs every block of the grid; arrays among the arguments are read and, where writeable, written in place.

    source:  CUDA text with its prelude (`emmy.codegen.ptx`)
    args:    in the kernel's order: arrays (pointers), tensor maps, ints, floats (f32) and numpy scalars
    eager:   asynchronous copies take effect at once, not at the last moment
    together: blocks wait for one another: all are there at once, and what they write in arrays must be ordered
    few:     of these, 1 + seed at a time, unless eager: the next begins where one has ended
    late:    arrays that a grid before this one writes: they may be read after griddepcontrol.wait only
    budget:  helper calls after which the run is given up

    Raises EmuError when the kernel is at fault, CompileError when its text does not compile, UsageError when the launch does
    not fit the kernel.
    """
    library = kernel_library(source, kernel)
    arity = ctypes.c_int.in_dll(library, "emmy_emu_arity").value
    if arity != len(args):
        raise UsageError(f"kernel {kernel} takes {arity} arguments, got {len(args)}")
    launch = _Launch(
        _three(grid),
        _three(block),
        _three(cluster),
        smem_bytes,
        seed,
        int(eager),
        int(together),
        int(few and not eager),
        budget=budget,
    )
    _check_shape(launch)
    arrays = _arrays(args)
    known = {id(a): i for i, a in enumerate(arrays)}
    launch.set_arrays(arrays, {id(a) for a in late})
    launch.set_arguments([_argument(a, known) for a in args])
    counts = (ctypes.c_uint64 * len(fields(EmuStats)))()
    with _one_at_a_time:
        message = _core()(library.emmy_emu_entry, ctypes.byref(launch), counts).decode()
    if message:
        kind, _, text = message.partition("\n")
        raise EmuError(kind, _with_source(text, source))
    return EmuResult(EmuStats(*counts))


def _arrays(args: Sequence[Argument]) -> list[Array]:
    """The distinct arrays behind the arguments. Raises UsageError for two that share memory without being the same."""
    import numpy as np

    out: list[Array] = []
    for a in args:
        array = a.array if isinstance(a, TensorMap) else a
        if not isinstance(array, np.ndarray) or any(array is b for b in out):
            continue
        if not array.flags.c_contiguous:
            raise UsageError("arrays must be contiguous; pass a copy, or a tensor map with strides")
        if any(np.may_share_memory(array, b) for b in out):
            raise UsageError("two arguments are views of the same memory; pass the same array object for both")
        out.append(array)
    return out


def _argument(a: Argument, known: dict[int, int]) -> _Argument:
    import numpy as np

    if isinstance(a, TensorMap):
        return _Argument(2, known[id(a.array)], 0, a.emulated())
    if isinstance(a, np.ndarray):
        return _Argument(1, known[id(a)], 0, b"")
    if isinstance(a, np.generic):
        return _Argument(0, 0, 0, a.tobytes())
    return _Argument(0, 0, 0, struct.pack("<f", a) if isinstance(a, float) else struct.pack("<q", a))


def _check_shape(x: _Launch) -> None:
    threads = x.block[0] * x.block[1] * x.block[2]
    if threads % 32 or not 0 < threads <= 1024:
        raise UsageError(f"blocks of {threads} threads; the emulator takes multiples of 32 up to 1024")
    if any(g % c for g, c in zip(x.grid, x.cluster, strict=True)):
        raise UsageError(f"grid {tuple(x.grid)} is not a multiple of cluster {tuple(x.cluster)}")
    if x.cluster[0] * x.cluster[1] * x.cluster[2] > 16:
        raise UsageError(f"cluster {tuple(x.cluster)} has more than 16 blocks")


def _with_source(text: str, source: str) -> str:
    """The message, and the lines of the source it names."""
    lines = source.splitlines()
    numbers = dict.fromkeys(int(n) for n in re.findall(r"line (\d+)", text))
    shown = [f"  {n:4d} | {lines[n - 1].strip()}" for n in numbers if 0 < n <= len(lines)]
    return "\n".join((text, *shown))


def _three(shape: Sequence[int]) -> ctypes.Array[ctypes.c_uint32]:
    return (ctypes.c_uint32 * 3)(*shape, *(1,) * (3 - len(shape)))


@cache
def _core() -> ctypes._NamedFuncPointer:
    """The core's entry point. Raises EmuError when its counters are not those of `EmuStats`."""
    core = ctypes.CDLL(str(core_path()))
    core.emmy_emu_stat_names.restype = ctypes.c_char_p
    names = core.emmy_emu_stat_names().decode().split()
    if names != [f.name for f in fields(EmuStats)]:
        raise EmuError("internal", f"the core counts {names}, EmuStats names {[f.name for f in fields(EmuStats)]}")
    core.emmy_emu_run.restype = ctypes.c_char_p
    return core.emmy_emu_run


class _ArrayRecord(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("writable", ctypes.c_int),
        ("late", ctypes.c_int),
    )


class _Argument(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int),
        ("array", ctypes.c_int),
        ("offset", ctypes.c_uint64),
        ("bytes", ctypes.c_char * 128),
    )

    def __init__(self, kind: int, array: int, offset: int, raw: bytes) -> None:
        super().__init__(kind, array, offset)
        ctypes.memmove(ctypes.addressof(self) + type(self).bytes.offset, raw, len(raw))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("smem_bytes", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("eager", ctypes.c_uint32),
        ("together", ctypes.c_uint32),
        ("few", ctypes.c_uint32),
        ("n_arrays", ctypes.c_uint32),
        ("n_arguments", ctypes.c_uint32),
        ("budget", ctypes.c_uint64),
        ("arrays", ctypes.POINTER(_ArrayRecord)),
        ("arguments", ctypes.POINTER(_Argument)),
    )

    def set_arrays(self, arrays: list[Array], late: set[int]) -> None:
        records = [_ArrayRecord(a.ctypes.data, a.nbytes, int(a.flags.writeable), int(id(a) in late)) for a in arrays]
        self.n_arrays = len(records)
        self.arrays = (_ArrayRecord * len(records))(*records)

    def set_arguments(self, arguments: list[_Argument]) -> None:
        self.n_arguments = len(arguments)
        self.arguments = (_Argument * len(arguments))(*arguments)
