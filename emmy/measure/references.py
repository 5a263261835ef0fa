"""The right answers, computed once an op and kept on disk, so that a worker that died leaves them to the next.

An answer is a file of float64 that is mapped, not read: it takes no memory of the worker, a kernel cannot write to it,
and the system drops it when memory is short. Knows nothing of kernels; it is the op's own reference, by numpy.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

import emmy.ir
from emmy.ir.expr import Array
from emmy.ir.ops.op import InputKind, Op, Storage

LIMIT_BYTES = 2 << 30  # of the folder; the least recently used go first


@dataclass(frozen=True, slots=True)
class Case:
    """One set of inputs to check on. `sizes` gives a value to each symbol of the op."""

    kind: InputKind
    seed: int
    sizes: Mapping[str, int]

    def __str__(self) -> str:
        at = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        return f"{self.kind} inputs, seed {self.seed}" + (f", {at}" if at else "")


class References:
    """Answers kept under `folder`."""

    def __init__(self, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes

    def get(self, op: Op, case: Case, inputs: Mapping[str, Storage]) -> dict[str, Array]:
        """The float64 outputs for `inputs`, which are those of `case`."""
        paths = {name: self.folder / f"{_digest(op, case, name, inputs)}.npy" for name in op.program().outputs}
        found = {name: _open(path) for name, path in paths.items()}
        if all(array is not None for array in found.values()):
            return {name: array for name, array in found.items() if array is not None}
        answers = op.reference(inputs)
        with contextlib.suppress(OSError):  # a full or read-only disk costs time and memory, not correctness
            self._keep({paths[name]: array for name, array in answers.items()})
        return {name: kept if (kept := _open(paths[name])) is not None else array for name, array in answers.items()}

    def _keep(self, answers: Mapping[Path, Array]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._make_room(sum(array.nbytes for array in answers.values()))
        for path, array in answers.items():
            temporary = path.with_suffix(f".{os.getpid()}.tmp")
            try:
                with temporary.open("wb") as file:
                    np.save(file, array)
                temporary.rename(path)
            finally:
                temporary.unlink(missing_ok=True)

    def _make_room(self, n_bytes: int) -> None:
        kept = sorted((p.stat().st_mtime, p.stat().st_size, p) for p in self.folder.glob("*.npy"))
        total = n_bytes + sum(size for _, size, _ in kept)
        for _, size, path in kept:
            if total <= self.limit_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size


def _open(path: Path) -> Array | None:
    try:
        os.utime(path)
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError):
        return None
    return array


def _digest(op: Op, case: Case, output: str, inputs: Mapping[str, Storage]) -> str:
    """Names the answer by the op, the code that defines it and the very bytes of its inputs: an old file is never met."""
    h = hashlib.sha256(f"{_meaning()}\n{op.key}\n{case}\n{output}\n".encode())
    for name in sorted(inputs):
        h.update(np.ascontiguousarray(inputs[name]).reshape(-1).view(np.uint8).data)
    return h.hexdigest()[:40]


@cache
def _meaning() -> str:
    """A digest of everything that gives ops their meaning."""
    h = hashlib.sha256()
    for path in sorted(Path(emmy.ir.__file__).parent.rglob("*.py")):
        h.update(path.read_bytes())
    return h.hexdigest()
