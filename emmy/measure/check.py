"""Whether a loaded plan computes its op: run before it is timed, in the same process, on the same binary.

Each case runs into outputs poisoned with NaN, between red zones, on inputs that are compared afterwards. All cases of a
size share one set of buffers, so a plan that remembers an answer, or a packed operand, by its address is found out.
Knows devices by their seam only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from emmy.ir.dtype import DType
from emmy.ir.ops.op import Accumulate, InputKind, Op
from emmy.ir.program import Sym
from emmy.measure.answers import Answers, Verdict
from emmy.measure.device import Buffer, Device, Runnable
from emmy.measure.references import Case

Announce = Callable[[str, bool], None]  # what happens next, and whether it runs the candidate's code


class TooSlow(Exception):
    """A run took so much longer than the best known that the candidate is not looked at any further."""

    def __init__(self, run_s: float) -> None:
        self.run_s = run_s


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
    """Checks plans of one op, keeping its operands between candidates."""

    device: Device
    answers: Answers
    op: Op
    _buffers: dict[str, dict[str, Buffer]] = field(default_factory=dict)  # by sizes

    def check(
        self, plan: Runnable, announce: Announce, accumulate: Accumulate = "f32", patience_s: float | None = None
    ) -> Verdict:
        """The first thing wrong with the plan's answers, or the largest error of all cases.

        Raises TooSlow when a right answer took longer than `patience_s`.
        """
        worst, run_ns = 0.0, 0
        for case in cases(self.op):
            announce(f"preparing {case}", False)
            self.answers.prepare(case)
            buffers = self.buffers(case)
            call = plan.bind(buffers, case.sizes)
            announce(f"checking {case}", True)
            run_ns = self.device.time_ns([call])
            announce(f"comparing {case}", False)
            verdict = self._judge(case, buffers, accumulate)
            if verdict.wrong:
                self._buffers.clear()  # what else the plan damaged is not known
                return Verdict(f"{case}: {verdict.wrong}", verdict.error_norm)
            if patience_s is not None and run_ns > patience_s * 1e9:
                raise TooSlow(run_ns / 1e9)
            worst = max(worst, verdict.error_norm or 0.0)
        return Verdict(None, worst, run_ns)

    def buffers(self, case: Case) -> dict[str, Buffer]:
        """The case's operands, ready for a run: inputs written, outputs poisoned."""
        key = repr(sorted(case.sizes.items()))
        if key not in self._buffers:
            # Operands of checks may take a quarter of the device's share, as inputs may; the other half is the timing's.
            if sum(b.n_bytes for s in self._buffers.values() for b in s.values()) > self.device.memory_bytes // 4:
                self._buffers.clear()
            self._buffers[key] = {
                name: self.device.guarded(*form) for name, form in operands(self.op, case.sizes).items()
            }
        buffers = self._buffers[key]
        self.answers.write(case, buffers)
        for name in self.op.program().outputs:
            buffers[name].poison()
        return buffers

    def compare(self, case: Case, buffers: Mapping[str, Buffer], accumulate: Accumulate = "f32") -> Verdict:
        """Whether the outputs among `buffers` are the case's answers."""
        return self.answers.compare(case, buffers, accumulate)

    def _judge(self, case: Case, buffers: Mapping[str, Buffer], accumulate: Accumulate) -> Verdict:
        for name, buffer in buffers.items():
            if damage := buffer.damage():
                return Verdict(f"out of bounds of {name}: {damage}", None)
        if change := self.answers.change(case, buffers):
            return Verdict(change, None)
        return self.compare(case, buffers, accumulate)


def operands(op: Op, sizes: Mapping[str, int]) -> dict[str, tuple[tuple[int, ...], DType]]:
    """Shape and dtype of each input and output of the op, in the program's order."""
    program = op.program()
    extent = program.sizes(sizes)
    values = [program.value(name) for name in (*(v.name for v in program.inputs), *program.outputs)]
    return {v.name: (tuple(extent[a] for a in v.axes), v.dtype) for v in values}
