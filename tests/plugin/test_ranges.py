"""Where compiled ranges end, and which of them are fused: never one that the pack serves in part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emmy.ir.ops import Op, parse_op
from emmy.ir.target import load_target
from emmy.measure.rivals import COMPILED
from emmy.pack import Choice, Offer, Pack
from emmy_vllm.fusion import range_ends, why_left
from emmy_vllm.ranges import COMPILER, MOST_RANGES, Span, covers, cuts, spans
from emmy_vllm.settings import Settings
from tests.pack import packs

PAIR, PRODUCT = "geglu:m(1..64)x16x32:f32:nk", "matmul:m(1..64)x32x32:f32:nk"
SUM_NORM = "rms_norm:m(1..64)x32:f32:residual"


def offer(text: str, *ranges: tuple[int, int, dict[str, Any] | None]) -> Offer:
    """Ranges lo..hi of an op, each with what is odd in its evidence; None: lost."""
    op, choices = parse_op(text), []
    for lo, hi, changes in ranges:
        part = op.within("m", lo, hi)
        if changes is None:
            choices.append(Choice(lo, hi, part, "", "no win: 0.9 times"))
        else:
            choices.append(packs.won(part.key, "k0/split(m,core,8)", "cpu", lo, hi, **changes))
    return Offer(op, "m", tuple(choices))


def settings(path: Path, *offers: Offer, **changes: Any) -> Settings:
    digest = Pack.build(offers, path, load_target("cpu")).digest
    return Settings(path, digest, **changes)


def fused(s: Settings, text: str, most: int = 64) -> tuple[Span, ...]:
    pack, op = s.open(), parse_op(text)
    assert isinstance(op, Op)
    case = pack.case(op)
    assert case is not None
    return spans(case, most, lambda r: why_left(s, pack, case, r))


WON = {"rivals": {COMPILED: 1.2}}


# ---------------------------------------------------------------- which sizes
def test_only_a_win_over_the_compiler_counts_inside_a_graph(tmp_path: Path) -> None:
    s = settings(
        tmp_path / "p",
        offer(PAIR, (1, 8, WON), (9, 16, {}), (17, 24, {"rivals": {COMPILED: 1.0}}), (25, 32, None), (33, 64, WON)),
    )
    assert COMPILER == COMPILED
    assert fused(s, PAIR) == ((1, 8), (33, 64))
    assert fused(s, PAIR, most=40) == ((1, 8), (33, 40))
    assert fused(replace(s, unmeasured=True), PAIR) == ((1, 24), (33, 64))


@pytest.mark.parametrize(("product_us", "served"), [(8.0, True), (6.1, True), (5.9, False)])
def test_a_pair_is_left_where_the_plain_product_and_the_compilers_kernel_are_faster(
    tmp_path: Path, product_us: float, served: bool
) -> None:
    """torch.compile takes 12 us for the pair, of which torch's product is 8: 4 are the kernel behind it."""
    pair = offer(PAIR, (1, 64, {"rivals": {COMPILED: 1.2}, "time_us": 10.0}))
    s = settings(tmp_path / "p", pair, offer(PRODUCT, (1, 64, {"time_us": product_us, "stock_us": 8.0})))
    assert fused(s, PAIR) == (((1, 64),) if served else ())


@pytest.mark.parametrize(
    ("changes", "served"),
    [
        ({"time_us": 10.5, "stock_us": 10.1}, True),
        ({"time_us": 10.5, "stock_us": 9.9}, False),  # torch.compile may be faster than the pair
        ({"time_us": 9.9, "stock_us": 10.1}, False),  # and what stands behind the product may take no time
        ({"time_us": 10.5, "stock_us": 10.1, "stock": "openblas"}, False),
    ],
)
def test_a_pair_that_was_never_raced_with_the_compiler_must_beat_torchs_product_alone(
    tmp_path: Path, changes: dict[str, Any], served: bool
) -> None:
    s = settings(tmp_path / "p", offer(PAIR, (1, 64, {"time_us": 10.0})), offer(PRODUCT, (1, 64, changes)))
    assert fused(s, PAIR) == (((1, 64),) if served else ())


# ---------------------------------------------------------------- where ranges end
def test_ranges_end_where_what_is_served_does(tmp_path: Path) -> None:
    s = settings(
        tmp_path / "p",
        offer(PAIR, (1, 8, WON), (9, 32, None), (33, 64, WON)),
        offer(SUM_NORM, (1, 32, WON), (33, 64, None)),
    )
    import torch

    assert range_ends(s, 32, torch.float32, 64, (64,)) == (8, 32)
    assert range_ends(s, 32, torch.float32, 20, (20,)) == (8,)
    assert range_ends(s, 32, torch.float32, 64, (8, 64)) == (32,)
    assert range_ends(s, 48, torch.float32, 64, (64,)) == ()  # of another width than the model's
    assert range_ends(s, 32, torch.bfloat16, 64, (64,)) == ()
    assert range_ends(replace(s, parts=frozenset({"linear"})), 32, torch.float32, 64, (64,)) == ()
    assert range_ends(replace(s, deterministic=True), 32, torch.float32, 64, (64,)) == ()


def test_an_end_that_gains_nothing_is_not_made() -> None:
    assert cuts([((1, 64),)], 64) == ()
    assert cuts([], 64) == ()
    assert cuts([((1, 8),), ((1, 8),)], 64) == (8,)


def test_of_too_many_ends_those_stay_that_keep_the_widest_ranges() -> None:
    case = ((1, 32), (40, 41), (50, 51), (64, 1024), (2048, 8192))
    assert cuts([case], 8192) == (32, 63, 1024) and len(cuts([case], 8192)) == MOST_RANGES - 1


@st.composite
def cases(draw: st.DrawFn) -> list[Sequence[Span]]:
    out = []
    for _ in range(draw(st.integers(0, 3))):
        ends = sorted(draw(st.sets(st.integers(1, 99), max_size=12)))
        out.append(tuple((a, b) for a, b in zip(ends[::2], ends[1::2], strict=False)))
    return out


@given(cases(), st.integers(1, 120), st.sets(st.integers(1, 120), max_size=3))
def test_ends_are_few_inside_and_beside_those_that_were_there(
    every: list[Sequence[Span]], most: int, given_ends: set[int]
) -> None:
    ends = cuts([tuple((lo, min(hi, most)) for lo, hi in case if lo <= most) for case in every], most, given_ends)
    inner = {e for e in given_ends if e < most}
    assert list(ends) == sorted(set(ends)) and not set(ends) & inner and all(0 < e < most for e in ends)
    assert len(ends) + len(inner) < max(MOST_RANGES, len(inner) + 1)


def test_a_range_is_covered_by_one_span_or_not_at_all() -> None:
    served = ((1, 8), (10, 64))
    assert covers(served, 1, 8) and covers(served, 12, 64)
    assert not covers(served, 8, 10) and not covers(served, 9, 9) and not covers(served, 60, 65)
