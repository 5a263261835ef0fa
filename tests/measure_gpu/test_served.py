"""A measurer at the other end of a pipe is a measurer."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from emmy.errors import DataError
from emmy.measure.fake import FakeMeasurer
from emmy.measure.measurer import Measurer
from emmy.measure.served import ServedMeasurer, serve
from emmy.records import Candidate
from tests.measure.contract import MeasurerContract

OP = "matmul:64x64x64:f32"


class Ends:
    """Both ends of a pair of pipes, the far one served by a thread."""

    def __init__(self, measurer: Measurer) -> None:
        request_r, request_w = os.pipe()
        answer_r, answer_w = os.pipe()
        self.far = os.fdopen(request_r, "rb"), os.fdopen(answer_w, "wb")
        self.near = os.fdopen(answer_r, "rb"), os.fdopen(request_w, "wb")
        self.thread = threading.Thread(target=self._serve, args=(measurer,))
        self.thread.start()
        self.client = ServedMeasurer(*self.near)

    def _serve(self, measurer: Measurer) -> None:
        with self.far[0], self.far[1]:
            serve(measurer, *self.far)

    def close(self) -> None:
        for end in self.near:
            end.close()
        self.thread.join()


class TestServedMeasurer(MeasurerContract):
    good, bad = Candidate(OP, "k0/split(m,core,8)"), Candidate(OP, "k0/split(m,core,9)")

    @pytest.fixture
    def measurer(self) -> Iterator[ServedMeasurer]:
        ends = Ends(FakeMeasurer(faults={self.bad.schedule: "runtime"}))
        yield ends.client
        ends.close()


def test_rows_that_are_not_taken_are_not_measured() -> None:
    fake = FakeMeasurer()
    ends = Ends(fake)
    rows = ends.client.stream([TestServedMeasurer.good] * 10)
    next(rows), next(rows)
    rows.close()  # type: ignore[attr-defined]  # a generator's
    assert len(ends.client.measure([TestServedMeasurer.good])) == 1
    ends.close()
    assert fake.n_measured == 3


def test_a_server_that_is_gone_is_an_error_with_a_sentence() -> None:
    ends = Ends(FakeMeasurer())
    ends.close()
    with (
        open(os.devnull, "rb") as nothing,
        open(os.devnull, "wb") as nowhere,
        pytest.raises(DataError, match="is gone"),
    ):
        ServedMeasurer(nothing, nowhere)
