"""The right answers of an op, and how far from them a plan may be. `HostAnswers` has them from numpy, in this machine's memory.

A device may bring `Answers` of its own that work where its operands lie. Must not know plans or timing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from emmy.ir.dtype import decode, epsilon
from emmy.ir.expr import Array
from emmy.ir.ops.op import Accumulate, InputKind, Op, Storage, errors
from emmy.measure.guarded import POISON
from emmy.measure.references import Case, References

if TYPE_CHECKING:
    from emmy.measure.device import Buffer

TINY = 1e-30  # stands for no absolute error at all


@dataclass(frozen=True, slots=True)
class Verdict:
    """`wrong` says in a sentence what is, or is None. `error_norm` is in units of what is allowed; None for NaN."""

    wrong: str | None
    error_norm: float | None
    run_ns: int = 0  # of the last case, whose sizes are the largest


class Answers(ABC):
    """Inputs and outputs of one op, by case, and comparisons with what buffers hold."""

    def __init__(self, op: Op) -> None:
        self.op = op

    @abstractmethod
    def prepare(self, case: Case) -> None:
        """Works out what the other methods need of the case, which may take long."""

    @abstractmethod
    def write(self, case: Case, buffers: Mapping[str, Buffer]) -> None:
        """Writes the case's inputs."""

    @abstractmethod
    def change(self, case: Case, buffers: Mapping[str, Buffer]) -> str | None:
        """Which input is no longer as it was written, and where; None when all are."""

    @abstractmethod
    def compare(self, case: Case, buffers: Mapping[str, Buffer], accumulate: Accumulate = "f32") -> Verdict:
        """Whether the outputs are the case's answers, for sums kept as `accumulate` says."""


class HostAnswers(Answers):
    """By the op's own reference, in numpy. `limit_bytes` is what the inputs may take."""

    def __init__(self, op: Op, references: References, limit_bytes: int) -> None:
        super().__init__(op)
        self._references, self._limit_bytes = references, limit_bytes
        self._inputs: dict[str, dict[str, Storage]] = {}  # by case
        self._outputs: dict[str, dict[str, Array]] = {}  # by case

    def prepare(self, case: Case) -> None:
        self._right(case)

    def write(self, case: Case, buffers: Mapping[str, Buffer]) -> None:
        for name, data in self._given(case).items():
            buffers[name].write(data)

    def change(self, case: Case, buffers: Mapping[str, Buffer]) -> str | None:
        for name, data in self._given(case).items():
            if where := first_change(buffers[name].read(), data):
                return f"input {name} was modified: {where}"
        return None

    def compare(self, case: Case, buffers: Mapping[str, Buffer], accumulate: Accumulate = "f32") -> Verdict:
        want = self._right(case)
        return compare(self.op, case.kind, {name: buffers[name].read() for name in want}, want, accumulate)

    def _given(self, case: Case) -> dict[str, Storage]:
        """The inputs as they must be; never handed to a plan themselves."""
        key = str(case)
        if key not in self._inputs:
            if sum(b.nbytes for i in self._inputs.values() for b in i.values()) > self._limit_bytes:
                self._inputs.clear()
            self._inputs[key] = self.op.inputs(case.kind, case.seed, case.sizes)
        return self._inputs[key]

    def _right(self, case: Case) -> dict[str, Array]:
        key = str(case)
        if key not in self._outputs:
            self._outputs[key] = self._references.get(self.op, case, self._given(case))
        return self._outputs[key]


def allowed(op: Op, kind: InputKind, output: str, accumulate: Accumulate, rms: float) -> tuple[float, float]:
    """(absolute, relative) error allowed in an output whose answers have that root mean square.

    Sums of small whole numbers are exact in f32, and in f16 as long as they are folded into f32 sums in time (hybrid). Kept
    in f16 to the end they are not, and err as normal inputs do, but in proportion to how large such sums are.
    """
    if op.is_exact(kind, output) and accumulate != "f16":
        return TINY, epsilon(op.program().value(output).dtype) / 2
    absolute, relative = op.tolerance(accumulate, output)
    return absolute * (max(1.0, rms) if kind == "integer" and accumulate == "f16" else 1.0), relative


def compare(
    op: Op,
    kind: InputKind,
    got: Mapping[str, Storage],
    want: Mapping[str, Array],
    accumulate: Accumulate = "f32",
) -> Verdict:
    """The largest error in units of what `op` allows, as `Op.error_norm` defines it, from answers already known."""
    program, worst = op.program(), 0.0
    for name, reference in want.items():
        dtype = program.value(name).dtype
        rms = float(np.sqrt(np.mean(np.square(reference)))) if accumulate == "f16" else 0.0
        absolute, relative = allowed(op, kind, name, accumulate, rms)
        x = decode(got[name], dtype)
        error = errors(x, reference, absolute, relative)
        error[np.isnan(reference) & _poisoned(got[name])] = np.nan  # not the NaN that is wanted, but never written
        wrong = ~(error <= 1)  # NaN is wrong too
        if wrong.any():
            first = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
            largest = float(np.max(error))
            at = f"{name}[{','.join(str(int(i)) for i in first)}]"
            share = f"{int(wrong.sum())} of {wrong.size} elements are wrong"
            if _poisoned(got[name])[first]:
                return Verdict(f"{at} was never written (or computed from what lies outside an operand); {share}", None)
            return Verdict(
                f"{at} is {float(x[first]):.9g}, want {float(reference[first]):.9g}, "
                f"{float(error[first]):.3g} times the error allowed; {share}",
                largest if np.isfinite(largest) else None,
            )
        worst = max(worst, float(np.max(error, initial=0.0)))
    return Verdict(None, worst)


def _poisoned(x: Storage) -> NDArray[np.bool_]:
    """Which elements are as a poisoned buffer holds them."""
    return np.asarray(x.view(f"u{x.itemsize}") == int.from_bytes(bytes([POISON]) * x.itemsize))


def first_change(now: Storage, was: Storage) -> str | None:
    """Where two arrays of one shape and dtype differ first, bit by bit; None when they do not."""
    if now.nbytes % 8 == 0 and now.ndim:
        a, b = now.reshape(-1).view(np.uint64), was.reshape(-1).view(np.uint64)
    else:
        a, b = now.reshape(-1).view(np.uint8), was.reshape(-1).view(np.uint8)
    if np.array_equal(a, b):
        return None
    different = now.reshape(-1).view(np.uint8) != was.reshape(-1).view(np.uint8)
    element = int(np.argmax(different)) // now.itemsize
    index = ",".join(str(int(i)) for i in np.unravel_index(element, now.shape)) if now.ndim else ""
    return f"the first change is at [{index}], {int(different.sum())} bytes in all"
