"""Several runs in one command: the model is renewed between them, and leads from then on."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import duckdb
import numpy as np
import pytest

from emmy import api
from emmy.costmodel.dataset import DATABASE, WAIT_S, Dataset
from emmy.costmodel.features import ROOF, feature_set
from emmy.costmodel.fit import Samples
from emmy.costmodel.model import CostModel
from emmy.costmodel.registry import ModelStore
from emmy.costmodel.retrain import TrainReport
from emmy.costmodel.train import Verdict, train
from emmy.costmodel.upkeep import Upkeep
from emmy.measure.fake import FakeMeasurer
from emmy.measure.journal import Journal, RunHeader, journal_path, read_journal
from emmy.ranged import SETTLED
from emmy.records import Candidate, new_id, now_utc
from emmy.search import session, sitting
from emmy.search.events import Event, Finished, Listener, Measured, Note, Started
from emmy.search.tuner import INTERRUPTED, Stop, TuneResult

OPS = ("matmul:64x96x128:f32", "matmul:32x96x128:f32", "matmul:16x96x128:f32")


def _model(target: str, seed: int = 0) -> CostModel:
    rng, names = np.random.default_rng(seed), feature_set().names
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


def killed_in_a_race(home: Path, op: str) -> str:
    """The id of a row in the journal that a command leaves which is killed in races between ranges."""
    (row,) = FakeMeasurer().race([Candidate(OPS[0], "")])
    journal = Journal.create(journal_path(home, "dead"), RunHeader("dead", op, "cpu", "ranges", 0, ""))
    journal.append(replace(row, id=new_id(), time_utc=now_utc()), 1.0)
    journal.leave()
    return read_journal(journal.path).rows[0].id


@pytest.mark.parametrize("searches", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_races_between_ranges_that_were_interrupted_are_held_when_the_command_goes_on(
    tmp_path: Path, searches: int
) -> None:
    """Behind the last range's search, and nothing is searched again for it."""
    ops, stop, first, second = ("matmul:m(1..16)x96x128:f32", OPS[0]), Stop(), list[Event](), list[Event]()

    def interrupt(event: Event) -> None:
        first.append(event)
        stop.asked = stop.asked or (isinstance(event, Note) and "neighbour" in event.text)

    def tune(heard: Listener, stop: Stop | None = None) -> tuple[TuneResult, ...]:
        return api.tune(
            ops, budget="12", strategy="random", home=tmp_path, measurer=FakeMeasurer(), on_event=heard, stop=stop,
            searches=searches,
        )  # fmt: skip

    tune(interrupt, stop)
    assert stop.asked
    raced = killed_in_a_race(tmp_path, ops[0])
    results = tune(second.append)
    assert raced in {r.id for r in Dataset(tmp_path).rows()}, "what a kill cut short counts, too"
    again = [e.op for e in second if isinstance(e, Started)]
    searched = [e.op for e in first if isinstance(e, Finished) and e.why != INTERRUPTED]
    assert not set(again) & set(searched) and sum("racing" in e.text for e in second if isinstance(e, Note))
    table = next(r for r in results if r.op == ops[0])
    assert table.best is not None and (table.trials, table.why) == (0, SETTLED)
    assert not list((tmp_path / "sittings").iterdir()), "it has ended"


@pytest.mark.slow
def test_a_search_waits_for_who_uses_the_database_longer_than_a_command_does_to_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that has begun would end for it, and its other ops with it."""
    for module in (session, sitting):
        monkeypatch.setattr(module, "try_ingest", lambda home: "")
    Dataset(tmp_path).ingest()

    def look(event: Event) -> None:
        if isinstance(event, Finished) and event.op == OPS[0]:
            user = duckdb.connect(str(tmp_path / DATABASE))
            threading.Timer(WAIT_S + 1, user.close).start()

    results = api.tune(OPS, budget="3", strategy="random", home=tmp_path, measurer=FakeMeasurer(), on_event=look)
    assert [r.trials for r in results] == [3, 3, 3]


@pytest.mark.slow
def test_an_op_goes_on_with_the_model_that_led_it_when_another_one_was_deployed_since(tmp_path: Path) -> None:
    """As when one of several searches trains it anew while others go on, and then all are interrupted."""
    store, models = ModelStore(tmp_path / "models"), [_model("cpu", seed) for seed in (0, 1)]
    told: list[list[Started]] = []

    def tune(interrupted: str) -> None:
        stop = Stop()
        told.append([])

        def listen(event: Event) -> None:
            if isinstance(event, Started):
                told[-1].append(event)
            stop.asked = stop.asked or (isinstance(event, Measured) and (event.op, event.n) == (interrupted, 3))

        api.tune(OPS, budget="6", strategy="random", home=tmp_path, measurer=FakeMeasurer(), on_event=listen, stop=stop)

    tune(OPS[0])
    store.deploy(models[0])
    tune(OPS[1])
    store.deploy(models[1])
    tune("")
    assert [[(e.op, e.resumed, e.model) for e in events] for events in told] == [
        [(OPS[0], 0, "")],
        [(OPS[0], 3, ""), (OPS[1], 0, models[0].digest)],
        [(OPS[1], 3, models[0].digest), (OPS[2], 0, models[1].digest)],
    ]
