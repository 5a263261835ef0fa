"""Kernels written for the tests, each with a launch small enough to emulate and a check of its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from emmy.codegen.emulator import EmuStats, TensorMap, emulate
from emmy.codegen.ptx import ARCHS, prelude, used

KERNELS = Path(__file__).parent / "kernels"
HOPPER = ("sm_90a",)
Prepared = tuple[list[object], list[NDArray[np.generic]], Callable[[], float]]
SINCE_HOPPER = ("sm_90a", "sm_120a")


@dataclass(frozen=True)
class Case:
    """`prepare()` gives the arguments, those that an earlier grid writes, and a function giving the largest error."""

    name: str
    archs: tuple[str, ...]
    grid: tuple[int, ...]
    block: int
    smem_bytes: int
    prepare: Callable[[], Prepared]
    cluster: tuple[int, ...] = (1, 1, 1)
    tolerance: float = 1e-3
    shares: tuple[str, ...] = ()  # files of device functions

    @property
    def kernel(self) -> str:
        """The kernel's text, without a prelude."""
        text = (KERNELS / f"{self.name}.cu").read_text()
        shared = [(KERNELS / f"{name}.cuh").read_text() for name in self.shares]
        return "".join((*shared, text))

    def source(self, kernel: str | None = None, arch: str | None = None) -> str:
        kernel = self.kernel if kernel is None else kernel
        return prelude(used(kernel), arch or self.archs[0]) + kernel

    def run(self, kernel: str | None = None, *, seed: int = 0, eager: bool = False) -> EmuStats:
        """Emulates, and raises AssertionError when the result is off."""
        args, late, error = self.prepare()
        result = emulate(
            self.source(kernel), self.name, self.grid, (self.block,), self.smem_bytes, args,
            cluster=self.cluster, seed=seed, eager=eager, late=late, budget=2_000_000,
        )  # fmt: skip
        assert error() <= self.tolerance, f"error {error():.3g} against {self.tolerance:.3g}"
        return result.stats


def _random(*shape: int, dtype: type = np.float16, seed: int = 0) -> NDArray[np.generic]:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def _error(got: NDArray[np.generic], want: NDArray[np.float64]) -> Callable[[], float]:
    def error() -> float:
        worst = np.abs(got.astype(np.float64) - want).max() / np.abs(want).max()
        return float(worst) if np.isfinite(worst) else float("inf")

    return error


def _matmul(
    m: int, n: int, k: int, arguments: Callable[..., list[object]], *, nk: bool = True, out: type = np.float32
) -> Callable[[], Prepared]:
    def prepare() -> Prepared:
        a, b = _random(m, k, seed=1), _random(*((n, k) if nk else (k, n)), seed=2)
        a.flags.writeable = b.flags.writeable = False
        c = np.full((m, n), np.nan, out)
        want = a.astype(np.float64) @ (b.T if nk else b).astype(np.float64)
        return arguments(a, b, c), [], _error(c, want)

    return prepare


def _parts() -> Prepared:
    parts, sums = _random(8, 512, dtype=np.float32), np.full((8, 512), np.nan, np.float32)
    want = parts.astype(np.float64).reshape(2, 4, 512).sum(1, keepdims=True).repeat(4, 1).reshape(8, 512)
    return [parts, sums], [], _error(sums, want)


def bf16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The nearest bf16, as bits."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _rows() -> Prepared:
    x, w = bf16(_random(3, 1024, dtype=np.float32)), bf16(_random(1024, dtype=np.float32, seed=3))
    y = np.zeros((3, 1024), np.uint16)
    wide = [(v.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for v in (x, w)]
    want = wide[0] / np.sqrt((wide[0] ** 2).mean(1, keepdims=True) + 1e-6) * wide[1]

    def error() -> float:
        return _error((y.astype(np.uint32) << 16).view(np.float32), want)()

    return [x, w, y, 1e-6], [x], error


CASES: dict[str, Case] = {
    c.name: c
    for c in (
        Case("ring", ARCHS, (2, 2), 128, 3 * 6144,
             _matmul(100, 64, 160, lambda a, b, c: [a, b, c, 100, 64, 160])),
        Case("tma_ring", SINCE_HOPPER, (2, 2), 160, 3 * 12288 + 8192 + 48,
             _matmul(128, 64, 320, lambda a, b, c: [TensorMap(a, (64, 64), 128), TensorMap(b, (64, 32), 128),
                                                    TensorMap(c, (32, 64), 128), 320]), shares=("swizzle", "tile")),
        Case("wgmma_ring", HOPPER, (1, 1), 384, 3 * 24576 + 16384 + 48,
             _matmul(128, 64, 320, lambda a, b, c: [TensorMap(a, (64, 128), 128), TensorMap(b, (64, 64), 128),
                                                    TensorMap(c, (64, 64), 128), 320], nk=False, out=np.float16), shares=("swizzle",)),
        Case("wgmma_staged", HOPPER, (1,), 128, 4096 + 1024,
             _matmul(64, 16, 32, lambda a, b, c: [a, b, c])),
        Case("multicast", SINCE_HOPPER, (2, 1), 160, 3 * 12288 + 48,
             _matmul(64, 64, 320, lambda a, b, c: [TensorMap(a, (64, 32), 128), TensorMap(b, (64, 32), 128), c, 64, 320]),
             cluster=(2, 1, 1), shares=("swizzle", "tile")),
        Case("pingpong", SINCE_HOPPER, (1,), 288, 3 * 12288 + 64,
             _matmul(128, 96, 256, lambda a, b, c: [TensorMap(a, (64, 64), 128), TensorMap(b, (64, 32), 128), c, 2, 3, 256]),
             shares=("swizzle", "tile")),
        Case("dsmem", SINCE_HOPPER, (8,), 128, 4 * 2048 + 8, _parts, cluster=(4, 1, 1)),
        Case("rms_norm", SINCE_HOPPER, (3,), 128, 16, _rows, tolerance=8e-3),
    )
}  # fmt: skip
