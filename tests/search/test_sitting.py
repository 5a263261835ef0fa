"""Several runs in one command: the model is renewed between them, and leads from then on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from emmy import api
from emmy.costmodel.features import ROOF, feature_set
from emmy.costmodel.fit import Samples
from emmy.costmodel.model import CostModel
from emmy.costmodel.registry import ModelStore
from emmy.costmodel.retrain import TrainReport
from emmy.costmodel.train import Verdict, train
from emmy.costmodel.upkeep import Upkeep
from emmy.measure.fake import FakeMeasurer
from emmy.search.events import Event, Note, Started

OPS = ("matmul:64x96x128:f32", "matmul:32x96x128:f32", "matmul:16x96x128:f32")


def _model(target: str) -> CostModel:
    rng, names = np.random.default_rng(0), feature_set().names
    n = 60
    x = rng.random((n, len(names)))
    of = np.arange(n) // 30
    ids = tuple(map(str, range(n)))
    samples = Samples(x, 1.0 + x[:, 0], of, ("a", "b"), of, ("a", "b"), ids, ids, feature_set(), ROOF)
    return train(samples, target, seeds=(0,)).model


@pytest.mark.slow
def test_a_model_that_is_deployed_between_two_ops_leads_the_next_and_the_last_op_trains_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model("cpu")
    rows: list[int] = []

    def after(self: Upkeep, usable_rows: int, is_stopped: object) -> TrainReport | str:
        rows.append(usable_rows)
        if len(rows) > 1:
            return "not yet"
        path = ModelStore(tmp_path / "models").deploy(model)
        return TrainReport("cpu", 60, 60, 0, {}, None, Verdict(True, "it is better"), path, 1.5)

    monkeypatch.setattr(Upkeep, "after", after)
    heard: list[Event] = []
    results = api.tune(
        OPS, budget="4", strategy="random", home=tmp_path, measurer=FakeMeasurer(), on_event=heard.append
    )
    assert [e.model for e in heard if isinstance(e, Started)] == ["", model.digest, model.digest]
    assert rows == [r.counts["ok"] for r in results[:2]]
    said = [e.text for e in heard if isinstance(e, Note)]
    assert "the model of cpu was trained anew in 1.5 s, deployed: it is better" in said


def test_a_model_that_was_named_is_never_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def after(self: Upkeep, usable_rows: int, is_stopped: object) -> str:
        raise AssertionError("it was")

    monkeypatch.setattr(Upkeep, "after", after)
    measurer = FakeMeasurer()
    results = api.tune(OPS, budget="2", strategy="random", home=tmp_path, measurer=measurer, model="roofline")
    assert len(results) == 3
    assert api.tune(OPS[0], budget="2", strategy="random", home=tmp_path, measurer=measurer, fresh=True).trials == 2
