"""Rows of others: honest ones are calibrated by whatever is known nearest, each kind of tampering is named, and nothing held trains."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from emmy.costmodel.calibrate import LIMITS, Evidence, Finding, Predictor, Verdict, calibrate
from emmy.costmodel.dataset import Dataset
from emmy.costmodel.exchange import append_part
from emmy.costmodel.place import Folder
from emmy.costmodel.pull import pull
from emmy.costmodel.quarantine import Quarantine
from emmy.costmodel.registry import ModelStore
from emmy.costmodel.replayed import SourceDigest
from emmy.costmodel.retrain import train_costmodel, usable_rows
from emmy.costmodel.review import Reviewed, judge_arrival, review
from emmy.costmodel.shards import Manifest
from emmy.costmodel.upkeep import Watch, train_after
from emmy.errors import DataError, PlanError, UsageError
from emmy.ir.ops import parse_op
from emmy.ir.roofline import roofline_us
from emmy.ir.schedule import replay
from emmy.ir.target import load_target
from emmy.records import Device, Measurement, Protocol
from emmy.search.schedule_space import ScheduleSpace

Rows = list[Measurement]
Tamper = Callable[[Rows], Rows]

ROOF = {"new": 10.0, "same": 10.0, "old": 20.0}  # microseconds, of every op
SLOWNESS = {"new": 1.1, "same": 1.0, "old": 1.0}  # against the rooflines


def _rows(card: str, *, ops: int = 3, each: int = 30, noise: float = 0.02, who: str = "") -> Rows:
    """`each` kernels of each op: kernel i takes 2 + i / 4 rooflines, and a little more or less."""
    rng = random.Random(f"{card} {who}")
    return [
        Measurement(
            op=f"op{o}",
            schedule=f"s{i}",
            source_digest=f"d{i}",
            device=Device(card, "PRODUCT" if card != "old" else "ANOTHER", f"{who or card:0>16}", "driver", "toolkit"),
            status="ok",
            samples_us=(ROOF[card] * SLOWNESS[card] * (2 + i / 4) * (1 + rng.uniform(-noise, noise)),) * 3,
            protocol=Protocol(clock="event"),
            error_norm=0.1,
            clock_mhz=1500.0,
            emmy_version="0.1.0",
            id=f"{card} {who} {o} {i}",
            time_utc="2026-01-01",
        )
        for o in range(ops)
        for i in range(each)
    ]


def _evidence(known: Sequence[Measurement], *models: Predictor) -> Evidence:
    return Evidence(
        known,
        lambda r: ROOF[r.device.target],
        lambda r: (np.array([float(r.schedule[1:])]), f"d{r.schedule[1:]}") if r.schedule[0] == "s" else None,
        models,
    )


def _model(card: str, target: str = "new") -> Predictor:
    return Predictor(card, lambda x: np.log2(ROOF[target] * (2 + x[:, 0] / 4)))


BY: dict[str, Evidence] = {
    "same kernels": _evidence(_rows("same", who="other")),
    "a model of the card": _evidence([], _model("new")),
    "kernels of another card": _evidence(_rows("old")),
    "a model of another card": _evidence([], _model("old")),
}


@pytest.mark.parametrize("relation", BY)
def test_honest_rows_are_calibrated_by_each_relation_alone(relation: str) -> None:
    verdict = calibrate(_rows("new"), BY[relation])
    assert verdict.passed and verdict.why == "", verdict
    assert f"90 rows of 3 problems by {relation}" in next(f.detail for f in verdict.findings if f.check == "level")


def _scaled(factor: float) -> Tamper:
    return lambda rows: [replace(r, samples_us=tuple(t * factor for t in r.samples_us)) for r in rows]


def _shuffled(rows: Rows) -> Rows:
    order = random.Random(0).sample(range(len(rows)), len(rows))
    return [replace(r, samples_us=rows[j].samples_us) for r, j in zip(rows, order, strict=True)]


def _planted(us: float) -> Tamper:
    return lambda rows: [*rows[:-1], replace(rows[-1], samples_us=(us,) * 3)]


def _with(**fields: object) -> Tamper:
    return lambda rows: [replace(r, **fields) for r in rows]  # type: ignore[arg-type]


def _device(**fields: str) -> Tamper:
    return lambda rows: [replace(r, device=replace(r.device, **fields)) for r in rows]


@pytest.mark.parametrize("relation", BY)
@pytest.mark.parametrize(
    ("tamper", "expected"),
    [
        (_scaled(0.3), "roofline: 12 rows are faster than it allows"),
        (_scaled(4.0), "level: .*the level may be off by a factor of"),
        (_shuffled, "one row may be|the spread may be|rank correlation"),
        (_planted(8.0), "roofline: 1 rows are faster than it allows; row new  2 29: 8 us, it is 10 us"),
        (_with(source_digest="changed"), "sources: of 90 schedules 0 give the source that was measured, 90 another, 0 none; at least 20"),
        (_with(schedule="refused"), "sources: of 90 schedules 0 give .* 0 another, 90 none"),
        (_with(clock_mhz=None), "circumstances: 90 of 90 timed rows lack some; row new  0 0 does not say at which clock"),
        (_with(error_norm=None), "does not say how far its answer was off"),
        (_with(emmy_version=""), "has no Emmy version"),
        (_device(driver=""), "has no driver"),
        (_device(product=""), "has no product"),
        (_with(status="timeout", samples_us=()), "0 rows are new and have an undisturbed time, at least 20"),
        (_with(contended=True), "0 rows are new and have an undisturbed time"),
        (lambda rows: rows[:19], "19 rows are new"),
    ],
)  # fmt: skip
def test_each_kind_of_tampering_is_held_and_named(relation: str, tamper: Tamper, expected: str) -> None:
    verdict = calibrate(tamper(_rows("new")), BY[relation])
    assert not verdict.passed and re.search(expected, verdict.why), verdict.why


def test_the_nearer_the_relation_the_less_may_times_be_off() -> None:
    levels = [limits.level for limits in LIMITS.values()]
    assert levels == sorted(levels)
    for relation, factor in (("same kernels", 1.25), ("a model of the card", 1.4)):
        assert not calibrate(_scaled(factor)(_rows("new")), BY[relation]).passed
        assert calibrate(_scaled(factor)(_rows("new")), BY["kernels of another card"]).passed


def test_one_row_that_is_too_fast_for_its_problem_is_found_though_the_roofline_allows_it() -> None:
    verdict = calibrate(_planted(11.0)(_rows("new", each=60)), BY["a model of another card"])
    assert "one row may be 8 times faster" in verdict.why and "roofline" not in verdict.why


def test_kernels_known_here_do_not_vouch_for_the_rows_beside_them() -> None:
    known = _rows("same", who="other")[:30]  # one op of three
    honest = _rows("new")
    tampered = [*honest[:30], *_scaled(3.0)(honest[30:])]
    assert calibrate(honest, _evidence(known, _model("new"))).passed
    assert "by a model of the card" in calibrate(tampered, _evidence(known, _model("new"))).why
    alone = calibrate(honest, _evidence(known))
    assert "too few of 90 rows can be held against what is known here: 30 by same kernels" in alone.why


def test_rows_that_are_known_already_vouch_for_none() -> None:
    known = _rows("same", who="other")
    copies = [replace(r, device=replace(r.device, target="new")) for r in known]
    verdict = calibrate([*known, *_rows("new")[:5]], _evidence(copies))
    assert "5 rows are new" in verdict.why


def test_an_id_that_stands_for_another_row_here_is_found() -> None:
    known = _rows("same", who="other")
    rows = [replace(r, id=known[0].id) if i == 0 else r for i, r in enumerate(_rows("new"))]
    assert "ids: 1 rows have ids of other rows" in calibrate(rows, _evidence(known)).why


def test_where_nothing_is_known_nothing_comes_in() -> None:
    verdict = calibrate(_rows("new"), _evidence([]))
    assert "no row of its product, no card or model like it" in verdict.why
    no_roof = replace(_evidence(_rows("old")), roof_us=lambda r: None)
    assert "no row's roofline is known" in calibrate(_rows("new"), no_roof).why


# ---------------------------------------------------------------- the place where they wait
@pytest.fixture
def arrived(tmp_path: Path) -> Dataset:
    """A home with one set in quarantine, of a card that Emmy does not know."""
    append_part(tmp_path / "theirs" / "new", _rows("new"), Manifest("new", "MIT", "others"))
    dataset = Dataset(tmp_path / "home")
    pull(dataset, Folder(tmp_path / "theirs"))
    return dataset


def test_rows_in_quarantine_are_no_rows_of_the_dataset(arrived: Dataset) -> None:
    (arrival,) = Quarantine(arrived).arrivals("held")
    assert arrival.n_rows == 90 == len(arrival.rows()) and arrival.name.startswith("new-")
    assert arrived.rows() == () and usable_rows(arrived) == {}
    with pytest.raises(UsageError, match="has no measurements"):
        train_costmodel(arrived.home, "new")


def test_what_was_dropped_or_released_is_not_brought_again(arrived: Dataset, tmp_path: Path) -> None:
    quarantine = Quarantine(arrived)
    dropped = quarantine.drop(quarantine.find("new"), "not wanted")
    assert dropped.rows() == () and not list(dropped.folder.glob("*.parquet"))
    assert pull(arrived, Folder(tmp_path / "theirs")).already == 1 and arrived.rows() == ()
    with pytest.raises(UsageError, match="no set of rows in quarantine begins with 'new'"):
        quarantine.find("new")


def test_a_release_that_was_cut_short_is_done_again_and_doubles_nothing(
    arrived: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    quarantine = Quarantine(arrived)
    arrival = quarantine.find("new")
    with monkeypatch.context() as m:
        m.setattr(Quarantine, "_settle", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            quarantine.release(arrival, "by hand")
    again = quarantine.release(quarantine.find("new"), "by hand")
    assert (again.new, again.known) == (0, 90) and len(arrived.rows()) == 90
    assert {r.origin for r in arrived.rows()} == {"imported"}


def test_what_another_process_decided_while_a_set_was_judged_stays(arrived: Dataset) -> None:
    quarantine = Quarantine(arrived)
    (judged,) = quarantine.arrivals()
    quarantine.drop(quarantine.find(judged.name), "by hand")
    assert quarantine.hold(judged, "too fast").standing.state == "dropped"
    assert quarantine.release(judged, "calibrated").new == 0 and not arrived.rows()
    assert [(a.standing.state, a.standing.why) for a in quarantine.arrivals()] == [("dropped", "by hand")]


def test_a_damaged_record_is_named(arrived: Dataset) -> None:
    (arrival,) = Quarantine(arrived).arrivals()
    (arrival.folder / "standing.json").write_text('{"source": "x", "state": "fine"}')
    with pytest.raises(DataError, match=r"state 'fine' is none of .*Move .* away"):
        Quarantine(arrived).arrivals()


def test_a_card_that_emmy_does_not_know_and_another_processor_wait(arrived: Dataset, tmp_path: Path) -> None:
    (reviewed,) = review(arrived)
    assert "target: no target is named 'new'" in reviewed.verdict.why == reviewed.arrival.standing.why
    cpu = [replace(r, device=replace(r.device, target="cpu-portable")) for r in _rows("new")]
    append_part(tmp_path / "more" / "cpu-portable", cpu, Manifest("cpu-portable", "MIT", "others"))
    (arrival,) = pull(arrived, Folder(tmp_path / "more")).arrivals
    assert "target: rows of PRODUCT; this processor is" in judge_arrival(arrived, arrival).why


# ---------------------------------------------------------------- from a push to a deployed model
OPS = ("matmul:512x512x512:f16", "matmul:256x512x1024:f16", "matmul:1024x1024x512:f16", "matmul:128x2048x512:f16")


def _gpu_rows(card: str, digest: SourceDigest, each: int, who: str = "") -> Rows:
    """Times by a law of the schedule, on top of the card's roofline: the same schedules are good on every card."""
    target, rng, rows = load_target(card), random.Random("schedules"), []
    for text in OPS:
        op = parse_op(text)
        space = ScheduleSpace(op, load_target("h200"))
        for schedule in sorted({space.sample(rng).key for _ in range(each)}):
            try:
                replay(op.program(), schedule, target)
            except PlanError:
                continue
            law = 1.5 + (len(schedule) % 40) / 10
            us = roofline_us(op.work(), target, "f16").time_us * law * (1 + 0.01 * rng.random()) + 2.0
            device = Device(card, target.product, f"{who or card:0>16}", "580", "nvrtc 13.0")
            rows.append(
                Measurement(
                    text, schedule, digest(op, schedule, target), device, "ok", (us,) * 3, Protocol(clock="event"),
                    error_norm=0.1, clock_mhz=1500.0, emmy_version="0.1.0", id=f"{who}{card}{len(rows)}", time_utc="2026-01-01",
                )
            )  # fmt: skip
    return rows


@pytest.mark.slow
def test_a_card_never_seen_comes_in_is_trained_on_and_a_tampered_set_of_it_waits(
    tmp_path: Path, plan_digest: SourceDigest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMMY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("EMMY_SHIPPED", "0")
    home = Dataset(tmp_path / "home")
    append_part(home.home / "h200", _gpu_rows("h200", plan_digest, 60), Manifest("h200", "", "here"))
    train_costmodel(home.home, "h200", source_digest=plan_digest)
    before = ModelStore(home.home / "models").deployed("h200")
    honest = _gpu_rows("h100", plan_digest, 60)
    tampered = [replace(r, id=f"x{r.id}") for r in _shuffled(honest)]
    for name, rows in (("honest", honest), ("tampered", tampered)):
        append_part(tmp_path / name / "h100", rows, Manifest("h100", "", name))
    pull(home, Folder(tmp_path / "tampered"))
    (held,) = review(home, source_digest=plan_digest)
    assert held.release is None and "kernels of another card (h200)" in held.verdict.why
    assert list(train_after(home.home, [held], source_digest=plan_digest)) == []
    (arrival,) = pull(home, Folder(tmp_path / "honest")).arrivals
    (released,) = review(home, [arrival], source_digest=plan_digest)
    assert released.release is not None and released.release.new == len(honest), released.verdict.why
    (report,) = train_after(home.home, [released], source_digest=plan_digest)
    assert report.target == "h100" and report.verdict.deploy, report.verdict
    assert report.trained is not None and [d.target for d in report.trained.model.card.donors] == ["h200"]
    after = ModelStore(home.home / "models").deployed("h200")
    assert before is not None and after is not None and before.digest == after.digest
    assert list(train_after(home.home, [released], source_digest=plan_digest)) == []  # nothing new since
    watched: list[Reviewed] = []
    watch = Watch(home.home, source_digest=plan_digest, on_reviewed=watched.append)
    assert list(watch.look()) == [] and [r.release for r in watched] == [None]
    watch._looked = None
    assert list(watch.look()) == [] and len(watched) == 1  # nothing new to judge it by
    # What came in is known now, by the same card's kernels, and still does not vouch for the tampered set.
    (again,) = review(home, source_digest=plan_digest)
    assert again.release is None and "by same kernels" in again.verdict.why


def test_a_verdict_of_no_findings_has_passed_nothing() -> None:
    assert not Verdict(()).passed and Verdict((Finding("ids", True, ""),)).passed
