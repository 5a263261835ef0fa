"""The launcher in Python: run a compiled plan on arrays. Must not know schedules, search or measurement.

The C++ beside this file does the work; it is compiled once and kept in the cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from importlib import resources
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import ClassVar, TypeVar

import numpy as np

from emmy import hostcc
from emmy.errors import EmmyError, UsageError
from emmy.runtime.arguments import Buffer, Contents, Form, refuse_memory, refuse_overlaps

T = TypeVar("T")
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-pthread", "-Wall", "-Wextra")
_MOST = (1 << 31) - 1  # of a size whose plan was made for none in particular
_CUDA = 1000  # launcher.h: EMMY_CUDA


class LaunchError(EmmyError):
    """A compiled plan cannot be opened or run. `cuda` is the driver's code when CUDA refused, else 0."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.cuda = max(0, code - _CUDA)


class _Info(ctypes.Structure):
    _fields_ = [
        ("n_arguments", ctypes.c_int32),
        ("n_syms", ctypes.c_int32),
        ("n_launches", ctypes.c_int32),
        ("arguments", ctypes.POINTER(ctypes.c_char_p)),
        ("syms", ctypes.POINTER(ctypes.c_char_p)),
    ]


@cache
def library() -> ctypes.CDLL:
    """The launcher's library, compiled on first use."""
    here = resources.files("emmy.runtime")
    text = "\n".join(
        here.joinpath(name).read_text(encoding="utf-8")
        for name in ("plan.h", "launcher.h", "backend.h", "cuda.cpp", "table.cpp", "launcher.cpp")
    )
    lines = (line for line in text.splitlines() if not line.startswith('#include "'))
    lib = ctypes.CDLL(str(hostcc.compile_library("\n".join(lines), "c++", _FLAGS).path))
    syms = ctypes.POINTER(ctypes.c_int64)
    pointers = ctypes.POINTER(ctypes.c_void_p)
    lib.emmy_open.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(_Info)]
    words, sizes = ctypes.POINTER(ctypes.c_char_p), syms
    lib.emmy_open_table.argtypes = [
        ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int32, words, sizes, sizes, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(_Info),
    ]  # fmt: skip
    lib.emmy_choose.argtypes = [ctypes.c_void_p, syms]
    lib.emmy_choice_ns.argtypes = [ctypes.c_void_p, sizes, ctypes.c_int32, ctypes.c_int32]
    lib.emmy_choice_ns.restype = ctypes.c_double
    lib.emmy_argument_bytes.argtypes = [ctypes.c_void_p, syms, ctypes.c_int32]
    lib.emmy_argument_bytes.restype = ctypes.c_int64
    lib.emmy_run.argtypes = [ctypes.c_void_p, pointers, syms, ctypes.c_int32, ctypes.c_void_p]
    lib.emmy_close.argtypes = [ctypes.c_void_p]
    lib.emmy_close.restype = None
    lib.emmy_message.restype = ctypes.c_char_p
    return lib


def build() -> None:
    """Compiles the launcher where it is not compiled yet. Raises CompileError or BrokenToolchain when it cannot be built.

    For whoever must not take that for a fault of the first plan it loads.
    """
    library()


def check(code: int, what: str) -> None:
    if code:
        raise LaunchError(f"{what}: {library().emmy_message(code).decode()}", code)


class BoundPlan:
    """A plan with its arguments: calling it runs every launch. Keeps arrays alive; addresses are the caller's to keep."""

    __slots__ = ("_arguments", "_check", "_handle", "_keep", "_run", "_stream", "_syms", "_threads", "_what")

    def __init__(
        self, plan: LoadedPlan, buffers: Sequence[Buffer], syms: Sequence[int], threads: int, stream: int
    ) -> None:
        self._what, self._keep, self._handle = plan.name, (plan, *buffers), plan._handle
        self._syms = (ctypes.c_int64 * max(1, len(syms)))(*syms)
        addresses = [b if isinstance(b, int) else b.ctypes.data for b in buffers]
        self._arguments = (ctypes.c_void_p * max(1, len(addresses)))(*addresses)
        self._threads, self._stream, self._run = threads, stream, library().emmy_run
        self._check = plan.contents and partial(plan.check_contents, buffers, syms)

    def __call__(self) -> None:
        if self._check:
            self._check()
        code = self._run(self._handle, self._arguments, self._syms, self._threads, self._stream)
        if code:
            check(code, self._what)


class LoadedPlan:
    """A compiled plan, ready to run. Use it from one thread at a time; closing it frees workspaces and ends its threads."""

    kind: ClassVar[str] = "the plan"

    def __init__(
        self,
        path: Path | str,
        device: str = "cpu",
        serves: Mapping[str, tuple[int, int]] = MappingProxyType({}),
        forms: Mapping[str, Form] = MappingProxyType({}),
        contents: Contents | None = None,
        name: str = "",
    ) -> None:
        """`serves`: the sizes lo..hi that the plan was made for, by symbol; `forms`: what its arguments are, by name.
        `name`: of the op, for what is said to whoever calls it; without one it is called by its file.

        What is not of them is refused when the plan is bound; without forms only the bytes of an array are known.
        Raises LaunchError when the library cannot be loaded, CompileError when the launcher cannot be built.
        """
        self.path, self.device, self.serves, self.forms = Path(path), device, serves, forms
        self.contents, self.name = contents, name or str(path)
        self._open("emmy_open", device.encode(), str(path).encode())

    def _open(self, call: str, *what: object) -> None:
        info, handle = _Info(), ctypes.c_void_p()
        self._handle: ctypes.c_void_p | None = None
        check(getattr(library(), call)(*what, ctypes.byref(handle), ctypes.byref(info)), str(self.path))
        self._handle = handle
        self.arguments = tuple(info.arguments[i].decode() for i in range(info.n_arguments))
        self.syms = tuple(info.syms[i].decode() for i in range(info.n_syms))
        self.n_launches: int = info.n_launches

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.device!r}, {', '.join((*self.arguments, *self.syms))})"

    @property
    def handle(self) -> int:
        """Address of the EmmyHandle, for C++ that runs the plan itself (launcher.h), while this object lives. Raises UsageError."""
        if self._handle is None or self._handle.value is None:
            raise UsageError(f"{self.name} is closed")
        return self._handle.value

    def argument_bytes(self, syms: Sequence[int] = ()) -> tuple[int, ...]:
        """Bytes of each argument for these sizes."""
        sizes = (ctypes.c_int64 * max(1, len(syms)))(*syms)
        return tuple(library().emmy_argument_bytes(self._handle, sizes, i) for i in range(len(self.arguments)))

    def bind(
        self,
        buffers: Sequence[Buffer] | Mapping[str, Buffer],
        syms: Sequence[int] | Mapping[str, int] = (),
        threads: int = 1,
        stream: int = 0,
    ) -> BoundPlan:
        """The plan with its arguments, by name or in the order of `arguments` and `syms`. Calling the result runs it.

        On a GPU arguments are addresses in its memory, and the call returns when all is launched on `stream`.
        Raises UsageError naming the first argument that is missing, or that is not as the plan needs it: in dtype, shape,
        C-contiguous and aligned, and of an output writeable and memory of its own. What an address holds is not checked;
        positions that an array holds are, whenever the result is called.
        """
        if self._handle is None:
            raise UsageError(f"{self.name} is closed")
        args = self._ordered(buffers, self.arguments, "argument")
        sizes = self._ordered(syms, self.syms, "size")
        self._serves(sizes)
        if threads < 1:
            raise UsageError(f"{self.name}: {threads} threads; at least 1 is needed")
        for name, why in self._refusals(args, sizes):
            raise UsageError(f"{self.name}: argument {name} {why}")
        return BoundPlan(self, args, sizes, threads, stream)

    def run(
        self,
        buffers: Sequence[Buffer] | Mapping[str, Buffer],
        syms: Sequence[int] | Mapping[str, int] = (),
        threads: int = 1,
        stream: int = 0,
    ) -> None:
        """Runs every launch; see `bind`. On a CPU it returns when all is done, and threads=1 uses the calling thread alone."""
        self.bind(buffers, syms, threads, stream)()

    def _refusals(self, args: Sequence[Buffer], sizes: Sequence[int]) -> Iterator[tuple[str, str]]:
        """(argument, why) of those that a kernel must not be given."""
        by_name = dict(zip(self.syms, sizes, strict=True))
        for name, x, n_bytes in zip(self.arguments, args, self.argument_bytes(sizes), strict=True):
            why = refuse_memory(x, n_bytes, on_gpu=self.device != "cpu")
            if self.device == "cpu" and isinstance(x, np.ndarray) and name in self.forms:
                why = self.forms[name].refuse(x, by_name) or why  # what is wrong with it before its bytes
            if why:
                yield name, why
        yield from refuse_overlaps(self.arguments, args, self.forms)

    def check_contents(self, args: Sequence[Buffer], sizes: Sequence[int]) -> None:
        """Raises UsageError for arguments that hold what a kernel would go astray by."""
        if self.contents is not None:
            given = dict(zip(self.arguments, args, strict=True))
            for why in self.contents(given, dict(zip(self.syms, sizes, strict=True))):
                raise UsageError(f"{self.name}: {why}")

    def _serves(self, sizes: Sequence[int]) -> None:
        """Raises UsageError for sizes that are not served: kernels trust theirs."""
        for name, size in zip(self.syms, sizes, strict=True):
            if not hasattr(size, "__index__"):
                raise UsageError(f"{self.name}: {name} is {size!r}, a whole number is needed")
            lo, hi = self.serves.get(name, (0, _MOST))
            if not lo <= size <= hi:
                raise UsageError(f"{self.name}: {name} is {size}, {self.kind} serves {lo}..{hi}")

    def _ordered(self, given: Sequence[T] | Mapping[str, T], names: tuple[str, ...], what: str) -> tuple[T, ...]:
        if isinstance(given, Mapping):
            missing = [n for n in names if n not in given]
            if missing:
                raise UsageError(
                    f"{self.name}: no {what} {missing[0]}; got {', '.join(given)}, the plan takes {', '.join(names)}"
                )
            return tuple(given[n] for n in names)
        if len(given) != len(names):
            raise UsageError(f"{self.name}: got {len(given)} {what}s; the plan takes {len(names)}: {', '.join(names)}")
        return tuple(given)

    def close(self) -> None:
        if self._handle is not None:
            library().emmy_close(self._handle)
            self._handle = None

    def __enter__(self) -> LoadedPlan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
