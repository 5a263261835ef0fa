"""What a plain schedule of a CPU prefers: the first that a search measures, and what runs where nothing was tuned.

Measured in time on one core of a Zen 4 with AVX-512, of 4096 columns of 3840 in f32, torch's in brackets. At 64 rows 34 ms with
both operands packed and 6 x 24 sums in vectors of 8; 28 with 8 x 32 in vectors of 16; 27 without packing A; 23 with all rows in
one block, so that B is packed once (31). Where B lies along k, inner products need no packing: 5.6 against 6.8 at 8 rows (10.3), 24
against 23 at 64, and err by an eighth of what sums in a row do; but 90 against 82 at 256 (100), and of 3840 columns of 15360 there
700 against 300 (380). With 16 registers they are slower from fewer rows on (14.6 against 13.0 at 64, 2048 columns), and where each
element is widened first, from few (15.0 against 11.6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from emmy.ir.program import Program, Stage
from emmy.ir.target import Target

FEW_ROWS, FEW_ROWS_16_REGISTERS, FEW_ROWS_16_BITS = 64, 32, 8
WHOLE_ROWS = 256  # of a block: its slivers of A stay in the nearest caches
COLUMNS = 256  # of a block


@dataclass(frozen=True, slots=True)
class PlainCpu:
    """Preferences among moves and knobs, by their text. They are of products; elsewhere there is none."""

    rows: str
    columns: str
    n_rows: int
    n_columns: int
    dot_rows: int  # so many rows at most are inner products, where B lies along k
    unpacked: frozenset[str]  # operands that are read once for many columns
    lanes: int
    registers: int
    threads: int

    @classmethod
    def of(cls, program: Program, target: Target, threads: int) -> PlainCpu | None:
        """Of a program whose first product has rows and columns, on a CPU; else None."""
        product = next(
            (s for s in program.stages if s.folded and len(s.axes) >= 2 and len(_operands(program, s)) > 1), None
        )
        if not target.is_cpu or product is None:
            return None
        rows, columns = product.axes[-2:]
        size = program.sizes({s.name: s.hi for s in program.syms})
        return cls(
            rows, columns, size[rows], size[columns],
            FEW_ROWS_16_BITS if program.dtype != "f32" else FEW_ROWS if target.vector_registers >= 32
            else FEW_ROWS_16_REGISTERS,
            frozenset(v for v in _operands(program, product) if columns not in program.value(v).axes),
            target.vector_bits // 32, target.vector_registers, threads,
        )  # fmt: skip

    def first(self, moves: Sequence[str]) -> str | None:
        """The move to be made before any but blocks of columns; None = no such wish."""
        dots = (m for m in moves if "/atom(dot," in m)
        blocks = any(f"/split({self.columns},core," in m for m in moves)
        return next(dots, None) if self.n_rows <= self.dot_rows and not blocks else None

    def is_unwanted(self, move: str) -> bool:
        """Whether a plain schedule does without the move."""
        enough = self.n_columns >= 2 * self.threads * COLUMNS
        divides_rows = f"/split({self.rows},core," in move and self.n_rows <= WHOLE_ROWS and enough
        return divides_rows or any(f"/stage({v},pack" in move for v in self.unpacked)

    def near(self, knob: str) -> int | None:
        """About what the knob should be; None = no such wish."""
        many = self.registers >= 32
        sums = {"m": 8 if many else 6, "n": 2 * self.lanes, "width": self.lanes}
        products = {"m": 4, "n": 6 if many else 3}
        found = sums if "/atom(fma," in knob else products if "/atom(dot," in knob else {}
        return found.get(knob.rpartition(" ")[2])


def _operands(program: Program, stage: Stage) -> tuple[str, ...]:
    """Inputs that a stage folds, without scalars and vectors."""
    return tuple(v for v in stage.reads if program.is_input(v) and len(program.value(v).axes) >= 2)
