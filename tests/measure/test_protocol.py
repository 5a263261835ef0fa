"""Messages between a measurer and its worker."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emmy.measure.protocol import Job, Outcome, Progress, Ready, Report, parse_answer

REPORT = Report(3, (Outcome("ok", "", 0.5, (1.0, 2.0), 0.9), Outcome("correctness", "C[0] is 1")), cpu_s=0.1)


def test_messages_survive_the_channel() -> None:
    job = Job(1, "matmul:5x7x64:f32", ("a.so", "b.so"), 2.0, best_us=3.5)
    assert Job.from_json(job.to_json()) == job
    assert parse_answer(REPORT.to_json().encode()) == REPORT
    assert parse_answer(Ready(77).to_json().encode()) == Ready(77)


@given(st.binary(max_size=200))
def test_garbage_is_no_answer(line: bytes) -> None:
    assert parse_answer(line) is None
    Progress.from_bytes(line)


@given(st.integers(0, len(REPORT.to_json()) - 3))
def test_a_torn_report_is_no_answer(length: int) -> None:
    assert parse_answer(REPORT.to_json().encode()[:length]) is None


@pytest.mark.parametrize("change", [("2.0", "-2.0"), ("2.0", "0.0"), ("2.0", '"x"'), ('"id":3', '"idd":3')])
def test_a_report_with_an_impossible_field_is_no_answer(change: tuple[str, str]) -> None:
    assert parse_answer(REPORT.to_json().replace(*change).encode()) is None


def test_progress_is_a_record_of_one_size() -> None:
    for phase in ("", "checking", "x" * 1000):
        record = Progress(phase, 2, 12.5).to_bytes()
        assert len(record) == Progress.SIZE
        assert Progress.from_bytes(record) == Progress(phase[:200], 2, 12.5)
