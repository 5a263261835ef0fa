"""A device that is asked through a pipe, by clients that may end at any moment."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from typing import IO

import pytest

from emmy.errors import DataError
from emmy.measure.device_pool import DevicePool
from emmy.measure.fake import FakeMeasurer
from emmy.measure.measurer import Heat, Measurer, Withdrawn
from emmy.measure.member import LocalMember
from emmy.measure.served import Served, ServedMeasurer, Turns
from emmy.records import Measurement
from tests.measure.contract import MeasurerContract
from tests.measure.test_device_pool import BAD, GOOD, OP, ByHand, candidates, kept, pool


def pipe() -> tuple[IO[bytes], IO[bytes]]:
    there, here = os.pipe()
    return os.fdopen(there, "rb"), os.fdopen(here, "wb")


class Client:
    """A client, and a thread that serves it. `ended`: it serves no more."""

    def __init__(self, measurer: Measurer, turns: Turns | None = None) -> None:
        asked, self._requests = pipe()
        answers, said = pipe()
        served = Served(measurer, asked, said, turns or Turns(lambda: False))
        self.ended = threading.Thread(target=served.serve, daemon=True)
        self.ended.start()
        self._answers = answers
        self.measurer = ServedMeasurer(answers, self._requests)

    def die(self) -> None:
        self._requests.close()
        self._answers.close()


class TestServedMeasurer(MeasurerContract):
    good, bad = GOOD, BAD

    @pytest.fixture
    def measurer(self) -> Iterator[Measurer]:
        client = Client(FakeMeasurer(faults={BAD.schedule: "runtime"}))
        yield client.measurer
        client.die()
        client.ended.join(9)
        assert not client.ended.is_alive()


class TestServedDevicePool(MeasurerContract):
    good, bad = GOOD, BAD

    @pytest.fixture
    def measurer(self) -> Iterator[Measurer]:
        fakes = [FakeMeasurer(faults={BAD.schedule: "runtime"}) for _ in range(3)]
        with DevicePool(fakes[0].device, [LocalMember(f) for f in fakes]) as devices:
            yield Client(devices).measurer


def test_a_row_is_kept_when_it_comes_and_not_in_its_turn() -> None:
    one, two, stored = ByHand("one"), ByHand("two"), list[Measurement]()
    came = threading.Event()

    def keep(row: Measurement) -> Measurement:
        stored.append(row)
        came.set()
        return row

    with pool(one, two) as devices:
        rows = Client(devices).measurer.begin(candidates(2), None, None, keep)
        taken = list[Measurement]()
        taking = threading.Thread(target=lambda: taken.extend(rows))
        taking.start()
        while not two.futures:
            pass
        two.answer()
        assert came.wait(9) and [r.candidate for r in stored] == candidates(2)[1:]
        one.answer()
        taking.join(9)
        assert [r.candidate for r in taken] == candidates(2)


def test_what_was_begun_when_a_client_wants_no_more_is_still_kept_and_nothing_else_is_measured() -> None:
    one, stored = ByHand("one"), list[Measurement]()
    with pool(one) as devices:
        rows = Client(devices).measurer.begin(candidates(5), None, None, lambda row: stored.append(row) or row)
        threading.Timer(0.05, one.answer).start()
        next(rows)
        threading.Timer(0.05, one.answer).start()
        rows.close()
        assert [r.candidate for r in stored] == one.at == candidates(2) and devices.census().waiting == 0


def test_a_client_that_dies_leaves_nothing_waiting() -> None:
    one = ByHand("one")
    with pool(one) as devices:
        client = Client(devices)
        client.measurer._say({"rows": [[c.op, c.schedule] for c in candidates(8)], "best_us": None})
        client.measurer._say("next")
        while not one.at:
            pass
        client.die()
        one.answer()
        while client.ended.is_alive():
            if len(one.at) > len([f for f in one.futures if f.done()]):
                one.answer()
        assert len(one.at) <= 2 and devices.census().waiting == 0
        assert Client(devices).measurer.device == devices.device


def test_an_error_of_keeping_a_row_is_the_one_that_is_raised() -> None:
    def full(row: Measurement) -> Measurement:
        raise DataError("the disk is full")

    client = Client(FakeMeasurer())
    with pytest.raises(DataError, match="the disk is full"):
        list(client.measurer.begin(candidates(3), None, None, full))
    assert len(list(client.measurer.begin(candidates(3), None, None, kept))) == 3, "and the client may go on"


class Races(FakeMeasurer):
    """Holds a heat until it is told to end it."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()

    def heat(self, op: str, schedules: Sequence[str], rivals: Sequence[str] = ("",), rounds: int = 7) -> Heat:
        self.begun.set()
        assert self.go_on.wait(9)
        return super().heat(op, schedules, rivals, rounds)


def test_races_that_have_not_begun_are_withdrawn_and_the_one_that_has_is_ended() -> None:
    device, over, raced, withdrawn = Races(), [False], list[Measurement](), list[Withdrawn]()
    turns = Turns(lambda: over[0])

    def race(measurer: Measurer) -> None:
        try:
            raced.extend(measurer.race([GOOD]))
        except Withdrawn as e:
            withdrawn.append(e)

    clients = [Client(device, turns) for _ in range(3)]
    racing = [threading.Thread(target=race, args=(c.measurer,)) for c in clients]
    racing[0].start()
    assert device.begun.wait(9)
    for thread in racing[1:]:
        thread.start()
    over[0] = True
    for thread in racing[1:]:
        thread.join(9)
    assert len(withdrawn) == 2 and not raced and OP in str(withdrawn[0])
    device.go_on.set()
    racing[0].join(9)
    assert [r.candidate for r in raced] == [GOOD]
    assert clients[1].measurer.measure([GOOD])[0].status == "ok", "a client may go on"


def test_a_server_that_is_gone_is_an_error_with_a_sentence() -> None:
    with (
        open(os.devnull, "rb") as nothing,
        open(os.devnull, "wb") as nowhere,
        pytest.raises(DataError, match="is gone"),
    ):
        ServedMeasurer(nothing, nowhere)
