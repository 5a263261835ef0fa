"""Layouts of blocks in shared memory: every element has a place of its own, and rows meet different banks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emmy.codegen.cuda_layout import LAYOUTS, PERIOD, Slot, slot
from emmy.codegen.kernel import Int

rows, columns = st.sampled_from((8, 16, 24, 64, 128)), st.sampled_from((16, 32, 48, 64, 80, 96, 128))
slots = st.builds(slot, rows, columns, st.sampled_from((2, 4)), columns, st.sampled_from(LAYOUTS))


def place(s: Slot, row: int, column: int) -> int:
    at = s.at(Int(row), Int(column))
    assert isinstance(at, Int)
    return at.value


@settings(deadline=None, max_examples=40)
@given(slots)
def test_every_element_has_a_place_of_its_own_inside_the_slot(s: Slot):
    taken = {place(s, r, c) for r in range(s.rows) for c in range(s.columns)}
    assert len(taken) == s.rows * s.columns
    assert min(taken) >= 0 and max(taken) <= s.bytes - s.item


@settings(deadline=None, max_examples=40)
@given(slots)
def test_sixteen_bytes_that_are_together_in_memory_stay_together(s: Slot):
    wide = 16 // s.item
    for r in range(s.rows):
        for c in range(0, s.columns, wide):
            first = place(s, r, c)
            assert first % 16 == 0
            assert [place(s, r, c + i) - first for i in range(wide)] == [i * s.item for i in range(wide)]


@settings(deadline=None, max_examples=40)
@given(slots, st.data())
def test_a_place_further_on_is_known_without_working_it_out_again(s: Slot, data: st.DataObject):
    """What loops rely on: a lane's place is worked out once, and constants lead on from there."""
    two_chunks = 32 // s.item
    row, column = data.draw(st.integers(0, PERIOD - 1)), data.draw(st.integers(0, min(two_chunks, s.panel) - 1))
    down = data.draw(st.integers(0, s.rows // PERIOD - 1)) * PERIOD
    along = data.draw(st.integers(0, (s.columns - 1 - column) // two_chunks)) * two_chunks
    led_on = s.beyond(s.at(Int(row), Int(column)), Int(down), Int(along))
    assert led_on == Int(place(s, row + down, column + along))


@pytest.mark.parametrize(
    "s", [slot(64, c, 2, c, layout) for c in (16, 32, 64, 128) for layout in ("swizzle128", "pad")]
)
def test_eight_rows_of_a_column_are_in_different_banks(s: Slot):
    for c in range(0, s.columns, 8):
        for r in range(0, s.rows, 8):
            assert len({place(s, r + i, c) // 16 % 8 for i in range(8)}) == 8


def test_a_panel_never_crosses_the_border_of_a_warps_columns():
    for together in (16, 24, 40, 48, 80, 96, 120):
        s = slot(16, 240 if 240 % together == 0 else 2 * together, 2, together, "swizzle128")
        assert together % s.panel == 0
