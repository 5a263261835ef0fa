"""How far the runs of a command are, told from its events: who is under way, how many have ended, how long it still takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from emmy import api
from emmy.measure.fake import FakeMeasurer
from emmy.search.budget import parse_budget
from emmy.search.courses import Courses
from emmy.search.events import Event, Finished, Measured, Planned, Racing, Scored, Started, ignore
from emmy.search.tuner import INTERRUPTED, Stop

OPS = ("matmul:64x96x128:f32", "matmul:32x96x128:f32")


def started(op: str, budget: str = "60s", resumed: int = 0) -> Started:
    return Started(op, "h200", "random", parse_budget(budget), "", resumed, 0, "")


def scored(op: str, n: int, elapsed_s: float, eta_s: float | None) -> Scored:
    return Scored(op, "h200", "", n, 5.0, False, elapsed_s, eta_s)


def heard(*events: Event) -> Courses:
    courses = Courses()
    for event in events:
        courses.hear(event)
    return courses


def test_events_of_several_ops_mingle_and_each_course_hears_its_own() -> None:
    courses = heard(started("a"), started("b", resumed=3), scored("a", 1, 2.0, 58.0), scored("b", 3, 9.0, 51.0))
    assert courses.mingle and list(courses.under_way) == ["a", "b"]
    a, b = courses.under_way.values()
    assert (a.trials, a.eta_s, a.is_new) == (1, 58.0, True) and (b.trials, b.is_new) == (3, False)
    for n, elapsed_s in ((4, 10.0), (5, 12.0), (6, 14.0)):
        courses.hear(scored("b", n, elapsed_s, 60 - elapsed_s))
    assert b.per_s == 0.5 and a.per_s == 0.0
    assert courses.hear(Racing("a", 5, "h200")) is a and (a.phase, a.eta_s) == ("race", 0.0)
    assert courses.hear(Finished("a", "60 s", 9, 60.0, "h200")) is a and list(courses.under_way) == ["b"]
    courses.hear(started("a"))
    assert courses.under_way["a"].trials == 0, "a run that begins again, such as of a process that was lost"


def test_those_to_come_begin_when_one_of_those_before_them_has_ended() -> None:
    courses = heard(Planned("h200", 5, 0, 2), started("a"), started("b"))
    assert courses.eta_s == 180.0, "three rounds of 60 s, two at a time"
    courses.hear(scored("a", 1, 20.0, 40.0))
    courses.hear(scored("b", 1, 50.0, 10.0))
    assert courses.eta_s == 10.0 + 60 + 60, "b's place is free first and takes two, a's one"
    courses.hear(Finished("b", "60 s", 9, 80.0, "h200"))
    assert courses.ended == 1 and courses.eta_s == 0.0 + 80 + 80, "with its race the first one took 80 s"
    assert heard(Planned("h200", 5, 3, 1), started("a")).eta_s == 120.0, "three had ended before"
    assert heard(Planned("h200", 9), started("a"), Finished("a", INTERRUPTED, 3, 9.0, "h200")).ended == 0


def test_without_a_limit_in_time_nothing_is_known_before_the_first_has_ended() -> None:
    courses = heard(Planned("h200", 4, 0, 2), started("a", "patience=9"), started("b", "patience=9"))
    courses.hear(scored("a", 1, 10.0, None))
    assert courses.eta_s is None
    courses.hear(Finished("b", "9 trials without a better one", 20, 30.0, "h200"))
    assert courses.eta_s == 50.0, "a, as long as b so far, and one after it; the other in b's place"


@pytest.mark.parametrize("searches", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_tune_says_how_many_runs_it_has_and_how_many_had_ended_before_an_interruption(
    tmp_path: Path, searches: int
) -> None:
    stop, told = Stop(), list[Event]()

    def interrupt(event: Event) -> None:
        stop.asked = stop.asked or isinstance(event, Finished)

    for listener, asked in ((interrupt, stop), (told.append, Stop())):
        api.tune(
            OPS, budget="3", strategy="random", home=tmp_path, measurer=FakeMeasurer(), on_event=listener or ignore,
            stop=asked, searches=searches,
        )  # fmt: skip
    (planned,) = (e for e in told if isinstance(e, Planned))
    courses = heard(*told)
    assert planned.runs == 2 == courses.ended and planned.abreast == searches and planned.ended >= searches % 2
    assert planned.ended + sum(isinstance(e, Finished) for e in told) == 2
    assert {e.op for e in told if isinstance(e, Measured)} <= set(OPS) and not courses.under_way
