"""The doctor finds each planted fault, and none in sound rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from emmy.costmodel.dataset import Dataset
from emmy.costmodel.doctor import Diagnosis, diagnose, roof_us, why_stale
from emmy.costmodel.shards import Manifest, write_manifest, write_part
from emmy.errors import IllegalMove
from emmy.ir.ops.op import Op
from emmy.ir.target import Target, load_target
from emmy.records import Device, Measurement, Protocol

ROOF_US = 50.0


@pytest.fixture
def check(tmp_path: Path, write_journal):
    def run(rows: list[Measurement], shard: list[Measurement] | None = None, **options: object) -> Diagnosis:
        dataset = Dataset(tmp_path)
        write_journal(tmp_path, "a", rows)
        dataset.ingest()
        if shard:
            write_manifest(tmp_path / "cpu", Manifest("cpu", "MIT", "x", (write_part(tmp_path / "cpu", shard),)))
        with dataset.snapshot() as snapshot:
            return diagnose(snapshot, **{"roof": lambda _: ROOF_US, **options})  # type: ignore[arg-type]

    return run


def _found(diagnosis: Diagnosis) -> list[tuple[str, tuple[str, ...]]]:
    return [(f.kind, f.ids) for f in diagnosis.faults]


def test_sound_rows_have_no_fault(check, make_row) -> None:
    diagnosis = check([make_row(i) for i in range(20)], stale=lambda _: None)
    assert diagnosis == Diagnosis(20, ())


def test_a_row_faster_than_its_roofline_allows_is_implausible(check, make_row) -> None:
    rows = [make_row(0, samples_us=(ROOF_US / 1.06,) * 3), make_row(1, samples_us=(ROOF_US / 1.04,) * 3)]
    assert _found(check(rows)) == [("implausible", (rows[0].id,))]


def test_contended_and_derived_rows_are_listed(check, make_row) -> None:
    rows = [make_row(0, contended=True), make_row(1, origin="derived"), make_row(2)]
    assert _found(check(rows)) == [("derived", (rows[1].id,)), ("contended", (rows[0].id,))]


def test_a_candidate_whose_times_lie_more_than_5_percent_apart_has_drifted(check, make_row) -> None:
    def again(number: int, us: float, source: str) -> Measurement:
        return make_row(number, samples_us=(us,) * 3, op="o", schedule="s", source_digest=source)

    rows = [
        again(0, 100.0, "a"),
        again(2, 106.0, "a"),
        again(10, 100.0, "b"),
        again(12, 104.0, "b"),
        again(6, 200.0, "c"),
    ]
    diagnosis = check(rows)
    assert _found(diagnosis) == [("drifted", (rows[0].id, rows[1].id))]
    assert "from 100 to 106 us (6%)" in diagnosis.faults[0].detail


def test_a_row_whose_schedule_no_longer_gives_its_source_is_stale(check, make_row) -> None:
    rows = [make_row(0), make_row(1)]
    diagnosis = check(rows, stale=lambda m: "replays to another source" if m.id == rows[1].id else None)
    assert _found(diagnosis) == [("stale", (rows[1].id,))]
    assert check([], stale=None).unchecked == ("stale",)


def test_an_id_that_stands_for_two_different_rows_is_a_conflict(check, make_row) -> None:
    rows = [make_row(0), make_row(1)]
    diagnosis = check(rows, shard=[make_row(0, schedule="other"), make_row(1, origin="imported")])
    assert _found(diagnosis) == [("conflict", (rows[0].id,))]


def test_the_diagnosis_of_one_target_says_nothing_of_others(check, make_row) -> None:
    rows = [make_row(0, contended=True), make_row(1, contended=True, target="h200")]
    assert _found(check(rows, target="h200")) == [("contended", (rows[1].id,))]


def test_the_roofline_of_a_row_follows_its_op_device_and_threads(make_row) -> None:
    target = load_target("cpu-portable")
    device = Device(target.name, target.product, "", "", "")
    row = make_row(0, op="matmul:512x512x512:f32", device=device, protocol=Protocol(cache="warm", threads=1))
    roof = roof_us(row)
    assert roof is not None and roof == pytest.approx(2 * 512**3 / (target.peak_tflops["f32"] / target.cores * 1e6))
    assert roof_us(make_row(0, device=Device(target.name, "another CPU", "", "", ""))) is None
    assert roof_us(make_row(0, op="no such op")) is None


def test_a_row_is_stale_when_its_schedule_is_refused_or_gives_another_source(make_row) -> None:
    target = load_target("cpu-portable")
    device = Device(target.name, target.product, "", "", "")
    row = make_row(0, op="matmul:64x64x64:f32", schedule="k0/split(m,core,16)", source_digest="abc", device=device)
    assert why_stale(row, lambda op, schedule, t: "abc") is None
    assert "was abc, now it is def" in str(why_stale(row, lambda op, schedule, t: "def"))

    def refused(op: Op, schedule: str, t: Target) -> str:
        raise IllegalMove(0, schedule, "k0 has no axis q")

    assert "does not replay: move 0" in str(why_stale(row, refused))
