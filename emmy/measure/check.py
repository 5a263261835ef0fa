"""Whether a loaded plan computes its op: run before it is timed, in the same process, on the same binary.

Each case runs into outputs poisoned with NaN, between red zones, on inputs that are compared afterwards. All cases of a
size share one set of buffers, so a plan that remembers an answer, or a packed operand, by its address is found out.
Knows devices by their seam only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from emmy.ir.dtype import DType, decode, epsilon
from emmy.ir.expr import Array
from emmy.ir.ops.op import InputKind, Op, Storage
from emmy.ir.program import Sym
from emmy.measure.device import Buffer, Device, Runnable
from emmy.measure.guarded import POISON
from emmy.measure.references import Case, References

Announce = Callable[[str, bool], None]  # what happens next, and whether it runs the candidate's code


@dataclass(frozen=True, slots=True)
class Verdict:
    """`wrong` says in a sentence what is, or is None. `error_norm` is in units of what is allowed; None for NaN."""

    wrong: str | None
    error_norm: float | None
    run_ns: int = 0  # of the last case, whose sizes are the largest


def cases(op: Op) -> tuple[Case, ...]:
    """The cases to check, cheapest first: exact integers and two normal seeds; a symbol at both ends and at an odd size."""
    syms = op.program().syms
    sizes = [{s.name: pick(s) for s in syms} for pick in (lambda s: s.lo, _odd, lambda s: s.hi)] if syms else [{}]
    distinct = list({tuple(x.items()): x for x in sizes}.values())
    plan: list[tuple[InputKind, int]] = [("integer", 0), ("normal", 1)]
    return (*(Case(kind, seed, x) for x in distinct for kind, seed in plan), Case("normal", 2, distinct[-1]))


def _odd(s: Sym) -> int:
    """A size inside the range that no tile divides: an odd multiple of what it must be a multiple of."""
    first, last = -(-s.lo // s.multiple), s.hi // s.multiple
    middle = (first + last) // 2
    return s.multiple * (middle if middle % 2 else min(middle + 1, last))


@dataclass(slots=True)
class Checker:
    """Checks plans of one op, keeping its operands and inputs between candidates."""

    device: Device
    references: References
    op: Op
    _inputs: dict[str, dict[str, Storage]] = field(default_factory=dict)  # by case
    _answers: dict[str, dict[str, Array]] = field(default_factory=dict)  # by case
    _buffers: dict[str, dict[str, Buffer]] = field(default_factory=dict)  # by sizes

    def check(self, plan: Runnable, announce: Announce) -> Verdict:
        """The first thing wrong with the plan's answers, or the largest error of all cases."""
        worst, run_ns = 0.0, 0
        for case in cases(self.op):
            announce(f"preparing {case}", False)
            self.answers(case)
            buffers = self.buffers(case)
            call = plan.bind(buffers, case.sizes)
            announce(f"checking {case}", True)
            run_ns = self.device.time_ns([call])
            announce(f"comparing {case}", False)
            verdict = self._judge(case, buffers)
            if verdict.wrong:
                self._buffers.clear()  # what else the plan damaged is not known
                return Verdict(f"{case}: {verdict.wrong}", verdict.error_norm)
            worst = max(worst, verdict.error_norm or 0.0)
        return Verdict(None, worst, run_ns)

    def inputs(self, case: Case) -> dict[str, Storage]:
        """The case's inputs as they must be; never handed to a plan themselves."""
        key = str(case)
        if key not in self._inputs:
            self._make_room(self._inputs, sum(b.nbytes for i in self._inputs.values() for b in i.values()))
            self._inputs[key] = self.op.inputs(case.kind, case.seed, case.sizes)
        return self._inputs[key]

    def answers(self, case: Case) -> dict[str, Array]:
        """The outputs that are right for the case."""
        key = str(case)
        if key not in self._answers:
            self._answers[key] = self.references.get(self.op, case, self.inputs(case))
        return self._answers[key]

    def buffers(self, case: Case) -> dict[str, Buffer]:
        """The case's operands, ready for a run: inputs written, outputs poisoned."""
        key = repr(sorted(case.sizes.items()))
        program = self.op.program()
        if key not in self._buffers:
            self._make_room(self._buffers, sum(b.read().nbytes for s in self._buffers.values() for b in s.values()))
            self._buffers[key] = {
                name: self.device.guarded(*form) for name, form in operands(self.op, case.sizes).items()
            }
        buffers = self._buffers[key]
        for name, data in self.inputs(case).items():
            buffers[name].write(data)
        for name in program.outputs:
            buffers[name].poison()
        return buffers

    def compare(self, case: Case, buffers: Mapping[str, Buffer]) -> Verdict:
        """Whether the outputs among `buffers` are the case's answers."""
        want = self.answers(case)
        return compare(self.op, case.kind, {name: buffers[name].read() for name in want}, want)

    def _judge(self, case: Case, buffers: Mapping[str, Buffer]) -> Verdict:
        for name, buffer in buffers.items():
            if damage := buffer.damage():
                return Verdict(f"out of bounds of {name}: {damage}", None)
        for name, data in self.inputs(case).items():
            if change := _first_change(buffers[name].read(), data):
                return Verdict(f"input {name} was modified: {change}", None)
        return self.compare(case, buffers)

    def _make_room(self, store: dict[str, dict[str, Storage]] | dict[str, dict[str, Buffer]], used: int) -> None:
        """Inputs and buffers may each take a quarter of the device's share; the other half is the timing's."""
        if used > self.device.memory_bytes // 4:
            store.clear()


def operands(op: Op, sizes: Mapping[str, int]) -> dict[str, tuple[tuple[int, ...], DType]]:
    """Shape and dtype of each input and output of the op, in the program's order."""
    program = op.program()
    extent = program.sizes(sizes)
    values = [program.value(name) for name in (*(v.name for v in program.inputs), *program.outputs)]
    return {v.name: (tuple(extent[a] for a in v.axes), v.dtype) for v in values}


def compare(op: Op, kind: InputKind, got: Mapping[str, Storage], want: Mapping[str, Array]) -> Verdict:
    """The largest error in units of what `op` allows, as `Op.error_norm` defines it, from answers already known."""
    program, worst = op.program(), 0.0
    for name, reference in want.items():
        dtype = program.value(name).dtype
        absolute, relative = (1e-30, epsilon(dtype) / 2) if op.is_exact(kind) else op.tolerance()
        x = decode(got[name], dtype)
        with np.errstate(invalid="ignore"):
            error = np.abs(x - reference) / (absolute + relative * np.abs(reference))
        wrong = ~(error <= 1)  # NaN is wrong too
        if wrong.any():
            first = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
            largest = float(np.max(error))
            at = f"{name}[{','.join(str(int(i)) for i in first)}]"
            share = f"{int(wrong.sum())} of {wrong.size} elements are wrong"
            if _is_poison(got[name][first]):
                return Verdict(f"{at} was never written (or computed from what lies outside an operand); {share}", None)
            return Verdict(
                f"{at} is {float(x[first]):.9g}, want {float(reference[first]):.9g}, "
                f"{float(error[first]):.3g} times the error allowed; {share}",
                largest if np.isfinite(largest) else None,
            )
        worst = max(worst, float(np.max(error, initial=0.0)))
    return Verdict(None, worst)


def _is_poison(element: Storage) -> bool:
    return bytes(np.asarray(element).tobytes()) == bytes([POISON]) * element.itemsize


def _first_change(now: Storage, was: Storage) -> str | None:
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
