"""Where a program reads at positions that inputs tell: what is to be checked before a kernel, which trusts them. Launches nothing."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from emmy.ir.expr import Apply, Axis, Const, Expr, Read, axes_of, reads
from emmy.ir.program import Program

T = TypeVar("T")  # an array of numpy's, or a tensor of torch's, of int64
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "neg": operator.neg,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gather:
    """`table` is read along `axis` at positions that an expression of i32 inputs and axes gives."""

    table: str
    axis: str
    at: Expr

    @property
    def told_by(self) -> tuple[str, ...]:
        """The inputs that tell the positions."""
        return reads(self.at)

    def positions(self, given: Mapping[str, T], counted: Callable[[str], T]) -> T:
        """Every position. `counted`: an axis -> 0, 1, ... below its size."""
        if isinstance(self.at, Read) and not self.at.computed:
            return given[self.at.value]
        axes = axes_of(self.at)

        def along(axis: str) -> Any:
            x: Any = counted(axis)
            return x.reshape([-1 if a == axis else 1 for a in axes])

        def of(e: Expr) -> Any:
            match e:
                case Const(value):
                    return int(value)
                case Axis(name):
                    return along(name)
                case Apply(fn, args):
                    return _FUNCTIONS[fn](*map(of, args))
                case Read(name, index):
                    held: Any = given[name]
                    return held[tuple(along(i) if isinstance(i, str) else of(i) for i in index)]

        found: T = of(self.at)
        return found

    def refuse(self, lowest: int, highest: int, size: int) -> str | None:
        """Why these are no positions of the table, whose axis has that size; None when they are."""
        if lowest >= 0 and highest < size:
            return None
        found = lowest if lowest < 0 else highest
        told = " and ".join(self.told_by)
        return f"{told}: position {found} of {self.table} along {self.axis}, which has positions 0..{size - 1}"


def gathers(p: Program) -> tuple[Gather, ...]:
    """Each once; those by which the positions of others are read come first."""
    found = (g for s in p.stages for g in _within(s.body, p))
    return tuple(dict.fromkeys(found))


def _within(e: Expr, p: Program) -> Iterator[Gather]:
    if isinstance(e, Apply):
        for a in e.args:
            yield from _within(a, p)
    if isinstance(e, Read):
        for at, axis in zip(e.index, p.value(e.value).axes, strict=True):
            if isinstance(at, str):
                continue
            yield from _within(at, p)
            if reads(at):  # else of numbers and axes alone, which the program was checked for
                yield Gather(e.value, axis, at)
