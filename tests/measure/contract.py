"""What every measurer must do. A measurer's test inherits the class and says how one is made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import pytest

from emmy.measure.measurer import Measurer
from emmy.records import Candidate, Measurement


class MeasurerContract(ABC):
    """`good` and `bad` are candidates of one op that end as ok and as anything else."""

    good: Candidate
    bad: Candidate

    @pytest.fixture
    @abstractmethod
    def measurer(self) -> Iterator[Measurer]: ...

    def test_rows_come_in_the_order_of_the_candidates(self, measurer: Measurer) -> None:
        candidates = [self.good, self.bad, self.good]
        rows = measurer.measure(candidates)
        assert [r.candidate for r in rows] == candidates
        assert [r.status == "ok" for r in rows] == [True, False, True]

    def test_a_row_says_where_it_was_measured_and_survives_json(self, measurer: Measurer) -> None:
        for row in measurer.measure([self.good, self.bad]):
            assert row.device == measurer.device
            assert Measurement.from_json(row.to_json()) == row

    def test_only_an_ok_row_has_a_time_and_only_a_failed_one_a_reason(self, measurer: Measurer) -> None:
        good, bad = measurer.measure([self.good, self.bad])
        assert good.time_us is not None
        assert good.time_us > 0
        assert good.message == ""
        assert bad.time_us is None
        assert bad.message != ""

    def test_rows_that_are_not_taken_cost_nothing_later(self, measurer: Measurer) -> None:
        rows = measurer.stream([self.good] * 50)
        first = next(rows)
        assert first.status == "ok", first.message
        rows.close()  # type: ignore[attr-defined]  # a generator's
        assert measurer.measure([self.good])[0].status == "ok"

    def test_a_race_gives_each_ok_row_the_stock_time_and_the_ratio(self, measurer: Measurer) -> None:
        good, bad = measurer.race([self.good, self.bad])
        assert bad.status == self.bad_status(measurer)
        assert good.baseline_us is not None
        assert good.baseline != ""
        assert good.static["speedup_low"] <= good.static["speedup"] <= good.static["speedup_high"]

    def test_a_heat_keeps_the_raw_times_of_its_rivals_too(self, measurer: Measurer) -> None:
        found = measurer.heat(self.good.op, [self.good.schedule, self.bad.schedule], [""], 3)
        assert [r.candidate for r in found.rows] == [self.good, self.bad]
        (rival,) = found.rivals
        assert (rival.asked, rival.status) == ("", "ok") and rival.name == found.rows[0].baseline
        assert found.rows[0].baseline_us == sorted(rival.samples_us)[len(rival.samples_us) // 2]
        (alone,) = measurer.heat(self.good.op, [], [""], 3).rivals
        assert alone.samples_us and alone.name == rival.name

    def test_nothing_to_measure_gives_no_rows(self, measurer: Measurer) -> None:
        assert measurer.measure([]) == []
        assert measurer.race([]) == []

    def bad_status(self, measurer: Measurer) -> str:
        return measurer.measure([self.bad])[0].status
