"""The models that ship rank schedules of the features that this Emmy computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from emmy.costmodel.model import CostModel

MODELS = Path(__file__).parents[2] / "models"


@pytest.mark.parametrize("card", sorted(MODELS.glob("*.json")), ids=lambda p: p.stem)
def test_a_model_that_ships_is_of_todays_features(card: Path) -> None:
    assert CostModel.load(card.with_suffix(".txt.xz")).card.target == card.stem


def test_a_model_of_the_h200_ships() -> None:
    assert (MODELS / "h200.txt.xz").is_file()
