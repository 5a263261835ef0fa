"""What is claimed of a card without rows: a learned ratio carried over to that card's rates, with an honest interval."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log2

import numpy as np
import pytest
from numpy.typing import NDArray

from emmy.costmodel.features import NAMES, ROOF
from emmy.ir.ops import parse_op
from emmy.ir.schedule import replay
from emmy.ir.target import load_target
from emmy.search.forecast import EMPTY_US, Forecast, RatedSpace, Span, launches_us
from emmy.search.space import Point

OP = parse_op("matmul:2048x4096x3840:f16")
F32 = (
    "k0/split(m,grid,128) k0/split(n,grid,128) k0/split(k,serial,32) k0/split(m,warp,32) k0/split(n,warp,64) "
    "k0/stage(A,cp_async,3) k0/stage(B,cp_async,3) k0.C/atom(mma,16,8,16)"
)
TINY = "k0/split(m,grid,16) k0/split(n,grid,16) k0/split(k,serial,16)"
HYBRID = F32.replace("mma", "hybrid")
SMALL = F32.replace("grid,128", "grid,64").replace("n,warp,64", "n,warp,32")

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class _Card:
    target: str = "h200"
    residual_log2: float | None = 0.3
    pick_error_log2: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class _Twice:
    """A model that takes every schedule for twice the roofline."""

    card: _Card = _Card()
    is_calibrated: bool = True
    digest: str = "twice"

    def predict(self, x: Floats) -> tuple[Floats, Floats]:
        assert x.shape[1] == len(NAMES), "the model sees its own features, and no column more"
        return x[:, NAMES.index(ROOF)] + 1.0, np.full(len(x), 0.3)


def _forecast(gpu: str, model: _Twice | None) -> Forecast:
    prior = load_target(model.card.target) if model else None
    return Forecast(OP, load_target(gpu), model, prior)  # type: ignore[arg-type]  # a stand-in


def _us(gpu: str, schedule: str, model: _Twice | None) -> float:
    forecast = _forecast(gpu, model)
    return float(2.0 ** forecast.predict(RatedSpace(forecast).features([Point(schedule, ())]))[0][0])


def _span(gpu: str, model: _Twice | None, schedule: str = F32) -> Span:
    forecast = _forecast(gpu, model)
    log2_us, spread = forecast.predict(RatedSpace(forecast).features([Point(schedule, ())]))
    return forecast.span(float(log2_us[0]), float(spread[0]), replay(OP.program(), schedule, forecast.target))


def test_a_model_of_the_card_itself_is_taken_at_its_word() -> None:
    roof_us = OP.work().flops / (989.4 * 1e6)
    assert _us("h200", F32, _Twice()) == pytest.approx(2 * roof_us)
    assert _forecast("h200", _Twice()).is_calibrated and not _forecast("h100", _Twice()).is_calibrated


@pytest.mark.parametrize("gpu", ["rtx4090", "rtx5090"])
def test_f32_sums_cost_twice_as_much_where_their_rate_is_half(gpu: str) -> None:
    assert _us(gpu, F32, _Twice()) == pytest.approx(2 * _us(gpu, HYBRID, _Twice()), rel=1e-3)
    assert _us("a100", F32, _Twice()) == pytest.approx(_us("a100", HYBRID, _Twice()))
    assert 1.3 < _us(gpu, F32, None) / _us(gpu, HYBRID, None) < 2.0  # loads cost the same


def test_hopper_s_slower_mma_is_not_carried_over_to_cards_that_have_nothing_faster() -> None:
    a100_roof_us = OP.work().flops / (load_target("a100").peak_tflops["f16->f32"] * 1e6)
    assert _us("a100", F32, _Twice()) == pytest.approx(2 * 0.62 * a100_roof_us)
    h100 = _us("h100", F32, _Twice())
    assert h100 == pytest.approx(2 * OP.work().flops / (load_target("h100").peak_tflops["f16->f32"] * 1e6))


def test_without_a_model_a_schedule_that_loads_more_is_ranked_below() -> None:
    assert _us("rtx4090", F32, None) < _us("rtx4090", SMALL, None)


def test_an_unseen_card_widens_the_interval_and_says_so() -> None:
    own, other = _span("h200", _Twice()), _span("h100", _Twice())
    assert own.low_us < own.predicted_us < own.high_us
    assert own.high_us / own.predicted_us == pytest.approx(2 ** (1.2816 * 0.3), rel=1e-3)
    assert other.high_us / other.predicted_us > own.high_us / own.predicted_us
    assert "no row is of h100" in other.basis and "no row" not in own.basis and "within a problem" in own.basis


def test_held_out_picks_correct_the_prediction_and_give_its_interval() -> None:
    judged = _Twice(_Card(pick_error_log2=(-0.5, 0.1, 1.0)))
    plain, span = _span("h200", _Twice()), _span("h200", judged)
    assert span.predicted_us == pytest.approx(plain.predicted_us * 2**0.1)
    assert span.high_us == pytest.approx(plain.predicted_us * 2.0) and "picks" in span.basis


def test_no_time_is_claimed_below_what_the_instructions_can_do() -> None:
    wild = _Twice(_Card(pick_error_log2=(-9.0, -8.0, 0.0)))
    span = _span("h200", wild)
    ceiling_us = OP.work().flops / (0.62 * 989.4 * 1e6)
    assert span.low_us == span.predicted_us == pytest.approx(ceiling_us) and span.high_us > ceiling_us


@pytest.mark.parametrize(("schedule", "n"), [(TINY, 1), (f"k0/splitk(C,2) {TINY}", 2)])
def test_no_time_is_claimed_below_what_empty_launches_take(schedule: str, n: int) -> None:
    op, target = parse_op("matmul:16x16x32:f16"), load_target("h200")
    plan = replay(op.program(), schedule, target)
    forecast = Forecast(op, target, _Twice(), target)  # type: ignore[arg-type]
    span = forecast.span(log2(0.015), 0.1, plan)
    assert len(plan.launches) == n and launches_us(plan, target) == n * EMPTY_US
    assert span.low_us == span.predicted_us == n * EMPTY_US < 2 * n < span.high_us < 2.1 * n
    assert span.is_launch and "the model predicts 0.015 us, less than" in span.basis
    assert not _span("h200", _Twice()).is_launch and launches_us(plan, load_target("cpu")) == 0


def test_a_model_that_was_never_judged_says_so() -> None:
    unjudged = replace(_Twice(_Card(residual_log2=None)), is_calibrated=False)
    assert "no held-out problem has judged" in _span("h200", unjudged).basis
    assert not _forecast("h200", unjudged).is_calibrated
