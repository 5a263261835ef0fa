"""What the benchmark runs of a set: its cases as ops of the size that they are timed at. Knows no device and no rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from emmy import workloads
from emmy.errors import UsageError
from emmy.ir.ops import Op, parse_op
from emmy.ir.program import upper
from emmy.ir.roofline import roofline_us
from emmy.ir.target import Target
from emmy.workloads import Case
from emmy.workloads.decoder_cases import DecoderCase
from emmy.workloads.sets import OPS


@dataclass(frozen=True, slots=True)
class BenchCase:
    """A case of the chart. `op`: as the set names it; `hint`: the size at which one that is open until run time is timed,
    None for a fixed op."""

    id: str
    kind: str
    tier: str
    op: Op
    hint: int | None = None

    def at(self, lo: int | None = None) -> Op:
        """The op to time: of an open size the op of `lo` up to the hint, which is timed at its upper end. Default: from its least."""
        if self.hint is None:
            return self.op
        (sym,) = self.op.program().syms
        return self.op.within(sym.name, sym.lo if lo is None else lo, self.hint)


def bench_cases(names: Sequence[str]) -> tuple[BenchCase, ...]:
    """The cases that ops and sets name, in their order, each name once. Raises UsageError."""
    found = [case for name in names for case in _of(name)]
    if twice := [name for name, n in Counter(c.id for c in found).items() if n > 1]:
        raise UsageError(f"{twice[0]} is named twice: name it once")
    return tuple(found)


def _of(name: str) -> list[BenchCase]:
    if not name.startswith("@"):
        return [_alone(parse_op(name))]
    if name in OPS:
        return [_alone(parse_op(text)) for text in OPS[name]]
    out = []
    for case in workloads.load(name):
        match case:
            case Case():
                op = parse_op(case.op_text())
                out.append(BenchCase(case.id, case.kind, case.tier, op, _hint(case) if case.dynamic_m else None))
            case DecoderCase():
                if (text := case.op_text()) is not None:
                    alone = _alone(parse_op(text))
                    out.append(BenchCase(case.id, case.kind, alone.tier, alone.op, alone.hint))
            case _:
                assert_never(case)
    return out


def _hint(case: Case) -> int:
    """Rows at the hint of the catalogue: norms of heads have a row for each head."""
    d = case.dims
    return d["seq"] if "seq" in d else d["M"] * d.get("heads", 1)


def _alone(op: Op) -> BenchCase:
    """An op that no catalogue describes; of an open size it is timed at its upper end."""
    program = op.program()
    rows = upper(dict(program.dims)[program.value(program.outputs[0]).axes[0]])
    hint = program.syms[0].hi if len(program.syms) == 1 else None
    return BenchCase(op.key, op.kind, f"m{rows}", op, hint)


def by_value(cases: Sequence[BenchCase], target: Target, threads: int, known: frozenset[str]) -> tuple[BenchCase, ...]:
    """The most valuable first, so that a sitting that is cut short says the most.

    First those whose winner is known (`known`: ids), whose numbers mean something; among them one of each kind and tier in
    turn, so that every group is heard, and of a group the one whose roofline is the longest.
    """
    longest = sorted(cases, key=lambda c: -least_us(c.at(), target, threads))
    heard: Counter[tuple[str, str]] = Counter()
    place = {}
    for case in longest:
        place[case.id] = heard[case.kind, case.tier]
        heard[case.kind, case.tier] += 1
    return tuple(sorted(longest, key=lambda c: (c.id not in known, place[c.id])))


def least_us(op: Op, target: Target, threads: int) -> float:
    """The least time the op can take there, in microseconds."""
    return roofline_us(op.work(), target, op.program().dtype, threads).time_us
