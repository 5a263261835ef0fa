"""Results that torch puts where it likes, timed as if they were given arrays. Knows no ops.

A function without an `out` leaves its result in memory that the allocator had just taken back: every run would write where the
last one wrote, into a warm cache, while a kernel with arrays of its own writes to each set of operands in turn. So a result is
held until the next run on the same operands: results then rotate through memory as operands do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from emmy.measure.device import Call

if TYPE_CHECKING:
    import torch

Results = Mapping[str, "torch.Tensor"]


@dataclass(slots=True)
class Allocated:
    """What calls of one rival have in common: only the first run's results are copied to the outputs, where they are checked."""

    checked: bool = False

    def call(self, make: Callable[[], Results], outputs: Results) -> Call:
        """A run of `make` on one set of operands; `outputs` are the arrays of that set, in which answers are looked for."""
        held: Results = {}

        def run() -> None:
            nonlocal held
            held = make()  # the last ones are let go only now
            if not self.checked:
                for name, result in held.items():
                    outputs[name].copy_(result.reshape(outputs[name].shape))
                self.checked = True

        return run
