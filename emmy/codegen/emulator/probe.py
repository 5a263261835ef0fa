"""A small kernel that shows what helpers do: run on a GPU once, on the emulator in every test. Knows no helper by name.

Values are such that a wrong layout cannot hide: bytes differ from each other, and products are sums of small whole numbers,
which every order of summation gets exactly. `tolerance` is for functions that hardware approximates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from emmy.codegen.emulator.build import kernel_names
from emmy.codegen.emulator.tensormap import TensorMap
from emmy.codegen.ptx import ARCHS, helper, prelude, used

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.generic]
    Argument = Array | TensorMap | int | float


@dataclass(frozen=True, slots=True)
class Probe:
    """One kernel and its launch. `make` gives fresh arguments; those that are written are its results."""

    name: str
    kernel: str
    make: Callable[[], list[Argument]]
    block: int = 32
    grid: int = 1
    cluster: int = 1
    smem_bytes: int = 0
    tolerance: float = 0.0

    @property
    def archs(self) -> tuple[str, ...]:
        """Architectures that have every helper it calls."""
        helpers = [helper(name) for name in used(self.kernel)]
        return tuple(a for a in ARCHS if all(a in h.archs for h in helpers))

    @property
    def entry(self) -> str:
        return kernel_names(self.kernel)[0]

    def source(self, arch: str) -> str:
        return prelude(used(self.kernel), arch) + self.kernel

    def digest(self) -> str:
        """Of everything that determines its results on a GPU: kernel, helpers and launch."""
        parts = [self.source(self.archs[0]), str((self.block, self.grid, self.cluster, self.smem_bytes))]
        parts += [repr(a) if isinstance(a, int | float) else _arrays(a).tobytes().hex() for a in self.make()]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def results(args: list[Argument]) -> list[Array]:
    """The arrays a kernel may have written."""
    arrays = [_arrays(a) for a in args if not isinstance(a, int | float)]
    return [a for a in arrays if a.flags.writeable]


def _arrays(a: Argument) -> Array:
    return a.array if isinstance(a, TensorMap) else a  # type: ignore[return-value] # numbers were left out


# ---------------------------------------------------------------- inputs and outputs
def constant(a: Array) -> Array:
    """The array, read-only: the kernel's input, and no result."""
    a.flags.writeable = False
    return a


def words(n: int, seed: int = 0) -> Array:
    """Words whose bytes are all at chance."""
    return constant(np.random.default_rng(seed).integers(0, 1 << 32, n, dtype=np.uint32))


def bits16(x: Array, dtype: str) -> Array:
    """Floats as bits of f16, or of bf16, rounded towards zero."""
    wide = x.astype(np.float32)
    return constant(
        wide.astype(np.float16).view(np.uint16) if dtype == "f16" else (wide.view(np.uint32) >> 16).astype(np.uint16)
    )


def whole(n: int, dtype: str = "f16", seed: int = 0, most: int = 3) -> Array:
    """Small whole numbers as f16 or bf16 bits."""
    return bits16(np.random.default_rng(seed).integers(-most, most + 1, n), dtype)


def zeros(n: int, dtype: type = np.uint32) -> Array:
    return np.zeros(n, dtype)


def words_in_out(n_words: int, n_out: int, dtype: type = np.uint32) -> list[Argument]:
    """Arguments of a kernel that takes words at chance and writes `n_out` elements."""
    return [words(n_words), zeros(n_out, dtype)]
