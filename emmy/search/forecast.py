"""The time of a schedule on a card that nobody has measured it on: a learned ratio times that card's own roofline.

A cost model's output is log2(time / roofline) over features that are mostly ratios, so one card's model is a prior for
another. What does not carry over is how fast the instructions of a schedule run: f16 sums at twice the rate of f32 sums on a
GeForce, mma.sync at a fraction of the peak on Hopper. So the ratio is taken to the ceiling of the schedule's instructions.
Searches nothing and compiles nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import hypot, log2, prod

import numpy as np
from numpy.typing import NDArray

from emmy.costmodel.features import NAMES
from emmy.costmodel.model import UNCALIBRATED_LOG2, CostModel
from emmy.costmodel.multiprocessor import LAUNCH_US
from emmy.ir.gpu import accumulation
from emmy.ir.ops import Op
from emmy.ir.ops.op import Accumulate
from emmy.ir.plan import Plan
from emmy.ir.roofline import peak_tflops, roofline_us
from emmy.ir.schedule import replay
from emmy.ir.target import Target
from emmy.search.schedule_space import ScheduleSpace
from emmy.search.space import Point

Floats = NDArray[np.float64]

CONFIDENCE = 0.8
_Z = 1.2816  # deviations of a normal distribution on either side that hold CONFIDENCE
# The share of the peak that mma.sync reaches: Hopper keeps the rest for wgmma. Measured on an H200: 0.56..0.66 of cuBLAS.
_MMA_SYNC_SHARE: Mapping[str, float] = {"sm_90a": 0.62}
_UNSEEN_LOG2 = 0.5  # spread that another card adds to a model's own: an assumption, until two cards have rows
# What a launch takes when its kernel is empty: 0.65..0.70 us on an H200, launched again and again by a graph. Another card's is
# taken to be the same. Below it a model has seen no row, and extrapolates.
EMPTY_US = 0.65
_PARTS = ("log2_shared_over_roof", "log2_l2_over_roof", "log2_stores_over_roof", "log2_chain_over_roof")
_UNHIDDEN = 0.2  # of what could overlap: an assumption that tells apart schedules with the same longest part
# Without a model: 10, 50 and 90 % of log2(time / estimate) over 1,500 of the H200's rows drawn at random.
_NO_MODEL_LOG2 = (-0.71, -0.19, 0.47)


@dataclass(frozen=True, slots=True)
class Span:
    """The predicted time and the interval that holds it with CONFIDENCE, in microseconds; `basis` says how it is known.

    is_launch: the model said less than the empty launches take, of which it knows nothing: the time is theirs
    """

    predicted_us: float
    low_us: float
    high_us: float
    basis: str
    is_launch: bool = False


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicts the times of schedules of one op on one target. A search's `Ranker` over the features of a `RatedSpace`."""

    op: Op
    target: Target
    model: CostModel | None
    prior: Target | None  # the card whose rows the model learned from; None without a model

    @property
    def is_calibrated(self) -> bool:
        """Whether problems of this very target, held out, have judged the model."""
        return self.model is not None and self.model.is_calibrated and self.prior == self.target

    @property
    def noise_log2(self) -> float:
        """The typical error of a predicted ratio between two schedules: nearer ones are not told apart."""
        known = self.model.card.residual_log2 if self.model else None
        return UNCALIBRATED_LOG2 if known is None else known

    def predict(self, x: Floats) -> tuple[Floats, Floats]:
        """(log2 of the time in microseconds, spread) for rows of features whose last column is `offset`."""
        if self.model is None:
            low, _, high = _NO_MODEL_LOG2
            return x[:, -1], np.full(len(x), (high - low) / (2 * _Z))
        log2_us, spread = self.model.predict(x[:, :-1])
        return log2_us + x[:, -1], spread

    def offset(self, plan: Plan, x: Floats) -> float:
        """What is added to the model's log2 of the time, 0 for a model of this target; without a model, all there is."""
        if self.prior == self.target:
            return 0.0
        if self.prior is None:
            return log2(self._estimate_us(plan, x))
        return log2(self.ceiling_us(plan, self.target) / self.ceiling_us(plan, self.prior))

    def ceiling_us(self, plan: Plan, rates: Target) -> float:
        """The op's roofline on this target if the plan's instructions ran at the share of the peak they have on `rates`."""
        dtype = self.op.program().dtype
        roof = roofline_us(self.op.work(), self.target, dtype)
        return max(roof.compute_us / _share(plan, rates), roof.dram_us)

    def _estimate_us(self, plan: Plan, x: Floats) -> float:
        """What the schedule, rather than the op, should take: the longest of its parts, and some of those that overlap it.

        Padding and idle multiprocessors lengthen the arithmetic; repeated loads take the memories' time.
        """
        at: dict[str, float] = dict(zip(NAMES, np.nan_to_num(x).tolist(), strict=True))
        roof = roofline_us(self.op.work(), self.target, self.op.program().dtype)
        padded = prod(1.0 + at[f"waste_{a}"] for a in "mnk")
        arithmetic_us = roof.compute_us / _share(plan, self.target) * padded / max(1.0 - at["tail_idle"], 1e-3)
        far_us = self.op.work().flops / 2.0 ** at["intensity_far"] / (self.target.dram_gbs * 1e3)
        parts = [arithmetic_us, roof.dram_us, far_us]
        parts += [roof.time_us * 2.0 ** at[name] for name in _PARTS]
        longest = max(parts)
        further_us = roof.time_us * at["launches_over_roof"]
        return float(longest + _UNHIDDEN * (sum(parts) - longest) + further_us)

    def span(self, log2_us: float, spread: float, plan: Plan) -> Span:
        """The claim for a schedule whose prediction is given. No time is claimed below the ceiling of its instructions, nor
        below what its launches take when they are empty; the interval of such a claim goes up to what launches add at most.
        """
        low, middle, high, basis = self._errors(spread)
        if self.model is not None and self.prior != self.target:
            low, high = (
                middle - hypot(middle - low, _Z * _UNSEEN_LOG2),
                middle + hypot(high - middle, _Z * _UNSEEN_LOG2),
            )
            basis += f", widened by an assumed factor of {2**_UNSEEN_LOG2:.2g}: no row is of {self.target.name}"
        ceiling_us, empty_us = self.ceiling_us(plan, self.target), launches_us(plan, self.target)
        least_us, given_us = max(ceiling_us, empty_us), float(2.0 ** (log2_us + middle))
        predicted_us = max(given_us, least_us)
        low_us, high_us = max(predicted_us * 2.0 ** (low - middle), least_us), predicted_us * 2.0 ** (high - middle)
        is_launch = given_us < empty_us == least_us
        if is_launch:
            high_us = max(high_us, given_us + LAUNCH_US * len(plan.launches))
            launches = (
                "an empty launch takes" if len(plan.launches) == 1 else f"{len(plan.launches)} empty launches take"
            )
            basis += f"; the model predicts {given_us:.2g} us, less than {launches}, to which the time is cut"
        elif given_us < least_us:
            basis += "; the model predicts less than the roofline of these instructions, to which the time is cut"
        return Span(predicted_us, low_us, high_us, basis, is_launch)

    def _errors(self, spread: float) -> tuple[float, float, float, str]:
        """log2(time / predicted): low, middle, high, and where they are from."""
        if self.model is None:
            return *_NO_MODEL_LOG2, "no model: an estimate from the schedule's parts, as far off as on the H200's rows"
        card = self.model.card
        if card.pick_error_log2 is not None:
            return *card.pick_error_log2, f"the {card.target} model's ten best picks on each held-out problem"
        if card.residual_log2 is None:
            why = f"the {card.target} model, which no held-out problem has judged: a factor of two is assumed"
        else:
            why = f"the {card.target} model's held-out error within a problem, without the error of a problem's level"
        return -_Z * spread, 0.0, _Z * spread, why


def launches_us(plan: Plan, target: Target) -> float:
    """The least time of a plan's launches, whatever they do; 0 on a CPU, where calling a function is no launch."""
    return 0.0 if target.is_cpu else EMPTY_US * len(plan.launches)


def _share(plan: Plan, target: Target) -> float:
    """The share of the target's highest rate that the instructions of a plan can run at."""
    dtype = plan.program.dtype
    atoms = {a.name for la in plan.launches for w in la.tile.works for a in w.atoms}
    if not atoms & {"mma", "hybrid", "f16"}:
        return 1.0
    sums = "f32" if accumulation(plan) == "f32" else "f16"
    best = peak_tflops(target, dtype)
    return target.peak_tflops.get(f"{dtype}->{sums}", best) / best * _MMA_SYNC_SHARE.get(target.arch, 1.0)


class RatedSpace(ScheduleSpace):
    """The schedules of a forecast's op. Features have one more column, its `offset`: it follows from the plan alone."""

    def __init__(self, forecast: Forecast, sums: Accumulate | None = None) -> None:
        super().__init__(forecast.op, forecast.target, 1, sums)
        self.forecast = forecast

    @property
    def feature_names(self) -> tuple[str, ...]:
        return (*super().feature_names, "offset")

    def features(self, points: Sequence[Point]) -> Floats:
        x = super().features(points)
        offsets = [
            self.forecast.offset(replay(self.program, p.key, self.target), row)
            for p, row in zip(points, x, strict=True)
        ]
        return np.column_stack([x, np.array(offsets, dtype=np.float64)]) if len(points) else x
