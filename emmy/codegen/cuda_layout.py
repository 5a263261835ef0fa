"""Where the elements of a staged block lie in shared memory. Knows no plan and no statements, only positions.

Rows are cut into panels of at most 128 bytes; a panel holds its piece of all rows. The 16-byte chunks of a row are XORed
with bits of the row's number, in the way the copy engine does it (PTX ISA: tensor swizzling modes 32B, 64B, 128B), so that
eight rows of one column fall into different banks, whoever wrote them.
"""

from __future__ import annotations

from dataclasses import dataclass

from emmy.codegen.kernel import Int, Whole, over, plus, rest, times
from emmy.codegen.kernel_gpu import bits, flipped, shifted
from emmy.ir.gpu import swizzled_bytes

_CHUNK = 16  # bytes that are moved together
_SWIZZLE = {16: 0, 32: 1, 64: 2, 128: 3}  # bytes of a panel's row -> bits of the row that are XORed in
LAYOUTS = ("swizzle128", "pad", "row", "panels")
PERIOD = 8  # rows after which the swizzle repeats


@dataclass(frozen=True, slots=True)
class Slot:
    """The layout of a block of rows x columns elements of `item` bytes; columns are contiguous in the source.

    panel: columns that stay together; pitch: bytes from one row of a panel to the next; swizzle: bits XORed in.
    """

    rows: int
    columns: int
    item: int
    panel: int
    pitch: int
    swizzle: int

    @property
    def panel_bytes(self) -> int:
        return self.rows * self.pitch

    @property
    def bytes(self) -> int:
        return self.panel_bytes * (self.columns // self.panel)

    @property
    def align(self) -> int:
        """Bytes at which a slot must begin, so that bits of its addresses are bits of its rows."""
        return max(_CHUNK, PERIOD * self.pitch) if self.swizzle else 128

    def at(self, row: Whole, column: Whole) -> Whole:
        """Byte of an element inside the slot."""
        inside = rest(column, Int(self.panel)) if self.panel < self.columns else column
        panel = times(over(column, Int(self.panel)), Int(self.panel_bytes)) if self.panel < self.columns else Int(0)
        along = times(inside, Int(self.item))
        if self.swizzle:  # which 128 bytes of the panel a row lies in
            phase = bits(shifted(row, (128 // self.pitch).bit_length() - 1), (1 << self.swizzle) - 1)
            along = flipped(along, times(phase, Int(_CHUNK)))
        return plus(panel, times(row, Int(self.pitch)), along)

    def beyond(self, at: Whole, rows: Whole, columns: Whole) -> Whole:
        """Byte of the element `rows` and `columns` beyond the one at `at`, where the caller has made sure of this much:

        rows are a multiple of PERIOD; columns are a multiple of two chunks, and the element at `at` is in the first two
        chunks of its panel. Then the swizzle is a XOR of separate bits, and most of the sum is known to the compiler.
        """
        inside = rest(columns, Int(self.panel)) if self.panel < self.columns else columns
        panel = times(over(columns, Int(self.panel)), Int(self.panel_bytes)) if self.panel < self.columns else Int(0)
        along = times(inside, Int(self.item))
        down = times(rows, Int(self.pitch))
        if not self.swizzle:
            return plus(at, along, down, panel)
        return plus(flipped(at, along), down, panel)


def slot(rows: int, columns: int, item: int, together: int, layout: str) -> Slot:
    """The layout of a block. `together`: columns that one warp reads, or all; a panel never crosses their border."""
    if layout == "pad":
        return Slot(rows, columns, item, columns, -(-columns * item // _CHUNK) * _CHUNK + _CHUNK, 0)
    if layout == "row":
        return Slot(rows, columns, item, columns, columns * item, 0)
    width = swizzled_bytes(rows, columns, item, together)
    if not width:
        return Slot(rows, columns, item, columns, columns * item, 0)
    return Slot(rows, columns, item, width // item, width, _SWIZZLE[width])
