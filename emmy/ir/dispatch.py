"""Which schedule serves which sizes: plans by ranges of one symbol, in order and without gaps. Knows no device and no times.

    m 1: <schedule> | m 2..64: <schedule> | m 65..4096: <schedule>

A range of an op is an op again (`Op.within`), so each range is tuned, measured and stored like any other op; the table says no
more than which of them belong together. Several plans by range are to a launcher what one plan is.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from emmy.errors import IllegalMove, UsageError
from emmy.ir.plan import Plan
from emmy.ir.program import Program, Sym
from emmy.ir.schedule import parse_schedule, replay
from emmy.ir.target import Target

_RANGE = re.compile(r"(?P<symbol>[A-Za-z_]\w*) +(?P<lo>[0-9]{1,18})(?:\.\.(?P<hi>[0-9]{1,18}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Range:
    """The sizes lo..hi and the schedule that serves them."""

    lo: int
    hi: int
    schedule: str

    @property
    def sizes(self) -> str:
        return str(self.lo) if self.lo == self.hi else f"{self.lo}..{self.hi}"


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Ranges of the sizes of `symbol`, each where the one before ends.

    Raises UsageError for none, for one that ends before it begins, for a gap and for an overlap.
    """

    symbol: str
    ranges: tuple[Range, ...]

    def __post_init__(self) -> None:
        if not self.ranges:
            raise UsageError(f"no range of {self.symbol} is given; at least one is needed")
        for r in self.ranges:
            if not 1 <= r.lo <= r.hi:
                raise UsageError(
                    f"{self.symbol} {r.lo}..{r.hi} is no range: it must begin at 1 or later, and not end before"
                )
        for before, after in pairwise(self.ranges):
            if after.lo != before.hi + 1:
                kind = "gap" if after.lo > before.hi + 1 else "overlap"
                wanted = f"the next range must begin at {before.hi + 1}, it begins at {after.lo}"
                raise UsageError(f"{kind} after {self.symbol} {before.sizes}: {wanted}")

    @property
    def lo(self) -> int:
        return self.ranges[0].lo

    @property
    def hi(self) -> int:
        return self.ranges[-1].hi

    def at(self, size: int) -> Range:
        """The range that holds the size. Raises UsageError when none does."""
        if not self.lo <= size <= self.hi:
            raise UsageError(f"{self.symbol} is {size}, this table serves {self.lo}..{self.hi}")
        return self.ranges[bisect_right(self.ranges, size, key=lambda r: r.lo) - 1]

    def check(self, program: Program) -> None:
        """Raises UsageError unless these are the very sizes that the program's symbol may have."""
        found = next((s for s in program.syms if s.name == self.symbol), None)
        wanted = found or Sym(self.symbol, 0, 0)
        if (self.lo, self.hi) != (wanted.lo, wanted.hi):
            allowed = ", ".join(map(str, program.syms)) or "none"
            raise UsageError(f"the table serves {self.symbol}({self.lo}..{self.hi}); open sizes of the op: {allowed}")

    def plans(self, program: Program, target: Target) -> Iterator[Plan]:
        """The plan of each range, its guard being the range. Raises UsageError (see `check`), or IllegalMove naming the range."""
        self.check(program)
        for r in self.ranges:
            try:
                yield replay(program.within(self.symbol, r.lo, r.hi), r.schedule, target)
            except IllegalMove as e:
                raise IllegalMove(e.index, e.move, e.reason, f"{self.symbol} {r.sizes}") from None

    def __str__(self) -> str:
        return " | ".join(f"{self.symbol} {r.sizes}: {r.schedule}".rstrip() for r in self.ranges)


def is_dispatch(text: str) -> bool:
    """Whether the text is meant as a table rather than as a schedule, in which no colon occurs."""
    return ":" in text


def parse_dispatch(text: str) -> Dispatch:
    """The table that `str` gave. Raises UsageError with the form, or naming the bad range or move."""
    ranges, symbols = [], dict[str, None]()
    for part in text.split("|"):
        head, colon, schedule = part.partition(":")
        hit = _RANGE.fullmatch(head.strip())
        if not hit or not colon:
            shown = part.strip() if len(part) <= 100 else part.strip()[:100] + "..."
            raise UsageError(f"range {shown!r} has not the form `m 9..64: schedule`; ranges are separated by |")
        try:
            parse_schedule(schedule)
        except UsageError as e:
            raise UsageError(f"{head.strip()}: {e}") from None
        symbols[hit["symbol"]] = None
        ranges.append(Range(int(hit["lo"]), int(hit["hi"] or hit["lo"]), " ".join(schedule.split())))
    if len(symbols) > 1:
        raise UsageError(f"the ranges are of {' and '.join(symbols)}; a table has one symbol")
    return Dispatch(next(iter(symbols)), tuple(ranges))
