"""Plans by ranges of a size, loaded as one: each launch takes the plan whose range holds the size. The choice is C++."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from emmy.errors import UsageError
from emmy.runtime.arguments import Contents, Form
from emmy.runtime.launcher import LoadedPlan, library


@dataclass(frozen=True, slots=True)
class PlanRange:
    """A compiled plan and the sizes lo..hi that it serves; without a `path` they are left to the caller."""

    lo: int
    hi: int
    path: Path | None


class LoadedTable(LoadedPlan):
    """Plans by ranges of `symbol`, ready to run like one plan: `bind` and `run` take any size of any range.

    `n_launches` is that of the plan with the most. Plans keep workspaces of their own.
    """

    kind: ClassVar[str] = "this table"

    def __init__(
        self,
        symbol: str,
        ranges: Sequence[PlanRange],
        device: str = "cpu",
        forms: Mapping[str, Form] = MappingProxyType({}),
        contents: Contents | None = None,
        name: str = "",
    ) -> None:
        """Ranges in order, without gaps. Raises LaunchError when a plan cannot be loaded or they make no table."""
        self.path = next((r.path for r in ranges if r.path), Path("empty table"))  # names it where it cannot be loaded
        self.name = name or str(self.path)
        self.device, self.forms, self.ranges, self.contents = device, forms, tuple(ranges), contents
        self.serves = {symbol: (ranges[0].lo, ranges[-1].hi)} if ranges else {}
        n = len(ranges)
        paths = (ctypes.c_char_p * max(1, n))(*(str(r.path).encode() if r.path else None for r in ranges))
        lo, hi = ((ctypes.c_int64 * max(1, n))(*ends) for ends in ([r.lo for r in ranges], [r.hi for r in ranges]))
        self._size, self._choose = (ctypes.c_int64 * 1)(), library().emmy_choose
        self._open("emmy_open_table", device.encode(), symbol.encode(), n, paths, lo, hi)

    def choose(self, size: int) -> int:
        """Number of the range that serves the size. Raises UsageError when none does, or its caller."""
        self._serves((size,))
        self._size[0] = size
        return int(self._choose(self._handle, self._size))

    def choice_ns(self, sizes: Sequence[int], rounds: int = 100_000) -> float:
        """Nanoseconds of one choice in C++: the mean over `rounds` of choosing for each of the sizes. A benchmark's call."""
        for size in sizes:
            self._serves((size,))
        given = (ctypes.c_int64 * len(sizes))(*sizes)
        return float(library().emmy_choice_ns(self._handle, given, len(sizes), rounds))

    def _serves(self, sizes: Sequence[int]) -> None:
        if self._handle is None:
            raise UsageError(f"{self.name} is closed")
        super()._serves(sizes)
        for r in self.ranges:
            if r.path is None and r.lo <= sizes[0] <= r.hi:
                raise UsageError(
                    f"{self.name}: {self.syms[0]} is {sizes[0]}; this table leaves {r.lo}..{r.hi} to its caller"
                )
