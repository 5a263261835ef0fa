"""The second stage of a prediction: what a model says of candidates once they are compiled, and which need not be timed.

A plan's features do not say what the compiler made of it. With registers, spills and the mix of the main loop's instructions known,
a candidate that is far behind the best one is told to the search at its prediction, and the device is spared. On 18,723 rows of an
H200 in the order they were measured, by models that had not seen their ops: at 1.5 times the best time 23 % are passed over,
which saves 19 % of the device's time, and the best of a run becomes 0.01 % slower.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log2

import numpy as np

from emmy.costmodel.built import built_features
from emmy.costmodel.model import CostModel
from emmy.measure.measurer import Look
from emmy.records import Measurement
from emmy.search.schedule_space import ScheduleSpace
from emmy.search.space import Point

log = logging.getLogger("emmy.search.second_look")

BEHIND = 1.5  # times the best: what is predicted to take longer is not timed
_LEAST = 4  # rows of the op that a prediction is corrected by, before it passes anything over
_PRIOR = 2.0  # rows that a correction of 0 counts for


@dataclass(slots=True)
class SecondLook:
    """A model's look at the compiled candidates of one op. It learns by how much the model is off for this op."""

    space: ScheduleSpace
    model: CostModel
    _errors: list[float] = field(default_factory=list)  # log2(measured / predicted)

    @classmethod
    def of(cls, space: ScheduleSpace, model: CostModel | None) -> SecondLook | None:
        """None when the model knows nothing of binaries, or no problem it had not seen has judged it."""
        if model is None or not model.card.built_names or not model.is_calibrated:
            return None
        return cls(space, model)

    def as_of(self, best_us: float | None) -> Look | None:
        """The look as it is now, whatever is learnt later: what a batch is looked at with is fixed when it is asked for.
        None while it passes nothing over.
        """
        if best_us is None or len(self._errors) < _LEAST:
            return None
        limit, correction = log2(BEHIND * best_us), sum(self._errors) / (len(self._errors) + _PRIOR)

        def look(schedule: str, static: Mapping[str, float], known_us: float | None) -> float | None:
            """The predicted time in microseconds of a candidate that need not be timed; None for one that is worth it."""
            log2_us = self._predict(schedule, static) + correction
            return float(2.0**log2_us) if log2_us > limit else None

        return look

    def learn(self, row: Measurement) -> None:
        """Takes in a row of the op that was timed."""
        if row.time_us is not None and "registers" in row.static:
            self._errors.append(log2(row.time_us) - self._predict(row.schedule, row.static))

    def _predict(self, schedule: str, static: Mapping[str, float]) -> float:
        x = self.space.features([Point(schedule, ())])
        built = built_features(static, self.space.target)[np.newaxis]
        return float(self.model.predict_built(x, built)[0])
