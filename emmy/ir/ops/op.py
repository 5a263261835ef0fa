"""What every op offers: a program, a float64 reference, inputs, work and tolerance. Must not know schedules or devices.

An op's key is its text: `matmul:512x4096x3840:f16:nk,bias`. It names the computation wherever one is stored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from emmy.errors import UsageError, meant
from emmy.ir.dtype import Floats, decode, encode, epsilon
from emmy.ir.expr import Array
from emmy.ir.program import Program

Storage = NDArray[np.generic]
InputKind = Literal["normal", "integer"]
Accumulate = Literal["f32", "hybrid", "f16"]


@dataclass(frozen=True, slots=True)
class Work:
    """The least a device must do: arithmetic of the formula and each array moved once."""

    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """flops per byte."""
        return self.flops / self.bytes


def drawn(
    program: Program,
    kind: InputKind,
    seed: int,
    sizes: Mapping[str, int] | None,
    deviation: Mapping[str, float],
    filled: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, Storage]:
    """Inputs of a program in storage form: standard normal numbers, or whole ones of -2..2.

    deviation: of the inputs whose normal numbers have another than 1
    filled:    of those that whole numbers do not fill, the share of elements that may differ from zero
    """
    size, rng, out = program.sizes(sizes), np.random.default_rng(seed), {}
    for v in program.inputs:
        shape = [size[a] for a in v.axes]
        if kind == "integer":
            x: Floats = rng.integers(-2, 3, shape).astype(np.float64)
            if v.name in filled:
                x *= rng.random(shape) < filled[v.name]
        else:
            x = rng.standard_normal(shape, dtype=np.float32) * deviation.get(v.name, 1.0)
        out[v.name] = encode(np.asarray(x), v.dtype)
    return out


class Op(ABC):
    """A computation with its shapes. Subclasses are frozen dataclasses, compared by value."""

    kind: ClassVar[str]

    @property
    @abstractmethod
    def key(self) -> str:
        """Text that `parse_op` reads back to an equal op."""

    @abstractmethod
    def program(self) -> Program: ...

    @abstractmethod
    def inputs(self, kind: InputKind, seed: int, sizes: Mapping[str, int] | None = None) -> dict[str, Storage]:
        """Arrays in storage form (`emmy.ir.dtype.encode`), one an input value; same seed, same arrays.

        "integer": small whole numbers for which sums are exact in f32. "normal": random, scaled so that outputs are near 1.
        """

    @abstractmethod
    def reference(self, inputs: Mapping[str, Storage]) -> dict[str, Array]:
        """float64 outputs computed by numpy, independent of the IR."""

    @abstractmethod
    def work(self, sizes: Mapping[str, int] | None = None) -> Work: ...

    @abstractmethod
    def is_exact(self, kind: InputKind, output: str | None = None) -> bool:
        """True when f32 arithmetic in any order gives the reference's numbers exactly (before the output is rounded).

        `output` names one of several outputs; without it the first is meant.
        """

    @abstractmethod
    def tolerance(self, accumulate: Accumulate = "f32", output: str | None = None) -> tuple[float, float]:
        """(absolute, relative) error allowed on "normal" inputs, of the first output or of the one that is named."""

    def within(self, symbol: str, lo: int, hi: int) -> Op:
        """The op for the sizes lo..hi of one of its symbols; a fixed size where they are one. Raises UsageError."""
        raise UsageError(f"{self.key}: no size is open until run time")

    def typical_sizes(self) -> dict[str, int]:
        """A size for each symbol, used where one must be picked: the upper end of its range."""
        return {s.name: s.hi for s in self.program().syms}

    def error_norm(
        self, got: Mapping[str, Storage], inputs: Mapping[str, Storage], kind: InputKind, accumulate: Accumulate = "f32"
    ) -> float:
        """Largest error over all outputs in units of what is allowed: <= 1 is right. inf for a missing output, and for a NaN or
        an infinity that is not wanted."""
        program, want, worst = self.program(), self.reference(inputs), 0.0
        for name, ref in want.items():
            dtype = program.value(name).dtype
            if name not in got or got[name].shape != ref.shape:
                return float("inf")
            x = decode(got[name], dtype)
            absolute, relative = self.tolerance(accumulate, name)
            if self.is_exact(kind, name):
                absolute, relative = 1e-30, epsilon(dtype) / 2  # nothing but the final rounding
            error = errors(x, ref, absolute, relative)
            worst = max(worst, float(np.max(np.where(np.isnan(error), np.inf, error), initial=0.0)))
        return worst

    def __str__(self) -> str:
        return self.key


def errors(x: Array, want: Array, absolute: float, relative: float) -> Array:
    """Each element's error in units of what is allowed: 0 where both are the same infinity or NaN, NaN where one alone is."""
    with np.errstate(invalid="ignore"):
        error = np.abs(x - want) / (absolute + relative * np.abs(want))
    return np.where((x == want) | (np.isnan(x) & np.isnan(want)), 0.0, error)


Parser = Callable[[str], Op]
PARSERS: dict[str, Parser] = {}


def parse_op(text: str) -> Op:
    """The op `text` names. Raises UsageError that says what was expected where."""
    kind, _, rest = text.strip().partition(":")
    if kind not in PARSERS:
        shown = text if len(text) <= 100 else text[:100] + "..."
        raise UsageError(
            f"op {shown!r}: the kind before the colon is not one of {', '.join(sorted(PARSERS))}.{meant(kind, PARSERS)} "
            f"An example is matmul:512x4096x3840:f32"
        )
    return PARSERS[kind](rest)
