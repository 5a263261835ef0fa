"""Collecting: what each share brings, that it is said and stored, how a budget is dealt, and that a killed one goes on."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import emmy
from emmy import api
from emmy.collection import Collection, requests
from emmy.costmodel.dataset import Dataset
from emmy.errors import UsageError
from emmy.ir.ops import parse_op
from emmy.ir.target import load_target
from emmy.measure.fake import FakeMeasurer
from emmy.measure.journal import journal_path, open_journals, read_journal
from emmy.search.budget import parse_budget
from emmy.search.collect import MARK, SHARES, CollectStrategy, reasons
from emmy.search.events import Event, Measured
from emmy.search.random_strategy import RandomStrategy
from emmy.search.space import Point, Trial
from emmy.search.tuner import Stop
from emmy.testing.strategy_contract import ToySpace

OP, GATED = "matmul:64x96x128:f32", "geglu:64x96x128:f32"


class _Doubter:
    """Says 1 us of everything, and doubts points with a large last number."""

    def predict(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros(len(x)), x[:, 2]


def _points(strategy: CollectStrategy, n: int) -> dict[str, list[Point]]:
    """n points by reason, asked in batches and told their times."""
    out: dict[str, list[Point]] = {name: [] for name in SHARES}
    asked = 0
    while asked < n:
        points = strategy.ask(8)
        for p in points:
            (mark,) = strategy.marks(p.key)
            out[mark.removeprefix(MARK)].append(p)
        strategy.tell([Trial(p, 10.0 + len(p.key)) for p in points])
        asked += len(points)
    return out


def _apart(a: Point, b: Point) -> int:
    return sum(a.as_dict().get(k) != b.as_dict().get(k) for k in a.as_dict().keys() | b.as_dict().keys())


def test_proposals_are_dealt_by_the_shares_and_each_reason_brings_what_it_says() -> None:
    space = ToySpace(sizes=tuple(2**i for i in range(10)), limit=2**18, listed=False)
    rng = random.Random(1)
    winner, far = space.sample(rng), space.sample(rng)
    known = [Trial(winner, 1.0)]
    found = _points(CollectStrategy(space, model=_Doubter(), known=known, elsewhere=[far]), 40)
    for name, share in SHARES.items():
        assert abs(len(found[name]) - 40 * share) <= 1
    assert far in found["elsewhere"]
    assert _apart(found["near"][0], winner) <= 3
    doubt = {name: np.mean([space.features([p])[0, 2] for p in ps]) for name, ps in found.items() if ps}
    assert doubt["spread"] > doubt["random"] + 1


def test_a_reason_without_a_source_leaves_its_share_to_the_others() -> None:
    found = _points(CollectStrategy(ToySpace()), 48)
    assert not found["elsewhere"] and not found["spread"]
    assert len(found["near"]) > 20 and len(found["random"]) > 10


def test_random_points_are_taken_from_each_form_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emmy.search.collect.SHARES", {"random": 1.0})
    space = ToySpace(sizes=tuple(range(1, 30)), limit=10**6, listed=False)

    def forms(points: list[Point]) -> list[int]:
        found = Counter(tuple(sorted(str(v) for v in p.as_dict().values() if isinstance(v, str))) for p in points)
        return sorted(found.values())

    assert forms(CollectStrategy(space).ask(48)) == [12, 12, 12, 12]
    drawn = forms(RandomStrategy(space).ask(48))
    assert drawn[-1] - drawn[0] > 3


def test_a_budget_is_of_all_ops_and_every_kind_gets_as_much() -> None:
    ops = [parse_op(o) for o in (OP, "matmul:32x96x128:f32", "matmul:16x96x128:f32", GATED)]
    asked = requests(ops, parse_budget("60,120s"), load_target("cpu-portable"), 0, 1, False)
    assert {(r.op.kind, r.budget.trials, r.budget.seconds) for r in asked} == {
        ("matmul", 10, 20.0),
        ("geglu", 30, 60.0),
    }
    with pytest.raises(UsageError, match="at least 6 are needed"):
        requests(ops, parse_budget("5"), load_target("cpu-portable"), 0, 1, False)


def _collect(home: Path, budget: str = "40", stop: Stop | None = None, **options: object) -> Collection:
    return api.collect([OP, GATED], budget=budget, home=home, measurer=FakeMeasurer(), stop=stop, **options)  # type: ignore[arg-type]


def test_reasons_are_counted_and_stored_with_the_rows_and_nothing_is_raced(tmp_path: Path) -> None:
    done = _collect(tmp_path)
    assert [c.rows for c in done.ops] == [20, 20] and done.kinds == {"matmul": 20, "geglu": 20} and not done.interrupted
    rows = Dataset.of(tmp_path).rows()
    assert Counter(reasons(r.static) for r in rows) == done.dealt and done.dealt["opening"] == 3
    assert set(done.dealt) == {"near", "random", "opening"} and done.planned == SHARES
    assert not any("speedup" in r.static for r in rows)
    (ingested,) = (p for p in (tmp_path / "journal" / "ingested").glob("*.jsonl") if read_journal(p).header.op == OP)
    assert '"shares":{"near":0.35' in read_journal(ingested).header.start


@pytest.mark.slow
def test_other_cards_winners_are_tried_first_of_their_share(tmp_path: Path) -> None:
    other = FakeMeasurer(product="another processor")
    tuned = emmy.tune(OP, budget="30", strategy="random", home=tmp_path, measurer=other)
    assert tuned.best is not None
    done = _collect(tmp_path)
    assert done.dealt["elsewhere"] > 4
    mine = [r for r in Dataset.of(tmp_path).rows(op=OP) if r.device.product == "fake"]
    assert tuned.best.schedule in [r.schedule for r in mine]


@pytest.mark.slow
def test_an_interrupted_collection_goes_on_with_the_same_course(tmp_path: Path) -> None:
    whole = _collect(tmp_path / "whole")
    stop = Stop()

    def after_seven(event: Event) -> None:
        stop.asked = isinstance(event, Measured) and event.n == 7

    first = _collect(tmp_path / "cut", stop=stop, on_event=after_seven)
    assert first.interrupted and first.ops[0].rows == 7
    second = _collect(tmp_path / "cut")
    assert second.ops[0].resumed == 7 and second.dealt == whole.dealt
    schedules = [[(r.op, r.schedule) for r in Dataset.of(tmp_path / h).rows()] for h in ("whole", "cut")]
    assert sorted(schedules[0]) == sorted(schedules[1]) and not open_journals(tmp_path / "cut")


@pytest.mark.slow
def test_a_second_collection_measures_other_points(tmp_path: Path) -> None:
    _collect(tmp_path)
    _collect(tmp_path)
    rows = Dataset.of(tmp_path).rows(op=OP)
    opened = {r.schedule for r in rows if reasons(r.static) == "opening"}
    again = {s for s, n in Counter(r.schedule for r in rows).items() if n > 1}
    assert len(rows) == 40 and len(again) == 1 and again <= opened
    assert not journal_path(tmp_path, "x").exists()
