"""Several devices as one: order, losses, hangs, late answers. With devices that answer when a test says so."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from itertools import count

import pytest

from emmy.errors import DataError, NoSuchDevice
from emmy.measure.device_pool import DevicePool
from emmy.measure.fake import FakeMeasurer
from emmy.measure.measurer import Heat, Look
from emmy.measure.member import LocalMember, Member, MemberLost
from emmy.records import Candidate, Device, Measurement
from tests.measure.contract import MeasurerContract

OP = "matmul:512x1024x3840:f32"
GOOD, BAD = (Candidate(OP, f"k0/split(m,core,{n}) k0/stage(B,pack,1)") for n in (64, 7))


def candidates(n: int) -> list[Candidate]:
    return [Candidate(OP, f"k0/split(m,core,{i + 1})") for i in range(n)]


class ByHand(Member):
    """Answers when it is told to. `at`: what it was asked, in order."""

    def __init__(self, name: str) -> None:
        self._fake, self._name = FakeMeasurer("h200"), name
        self.at: list[Candidate] = []
        self.futures: list[Future[Measurement]] = []
        self.closed = False

    @property
    def device(self) -> Device:
        return Device("h200", "fake", self._name, "fake", "fake")

    def measure(self, candidate: Candidate, best_us: float | None, look: Look | None) -> Future[Measurement]:
        self.at.append(candidate)
        self.futures.append(Future())
        return self.futures[-1]

    def heat(self, op: str, schedules: Sequence[str], rivals: Sequence[str], rounds: int) -> Future[Heat]:
        self.at += [Candidate(op, s) for s in schedules]
        done: Future[Heat] = Future()
        done.set_result(self._fake.heat(op, schedules, rivals, rounds))
        return done

    def answer(self, place: int = -1) -> None:
        (row,) = self._fake.measure([self.at[place]])
        self.futures[place].set_result(row)

    def die(self) -> None:
        self.futures[-1].set_exception(MemberLost("its node went away"))

    def close(self) -> None:
        self.closed = True


def pool(*members: Member, **options: object) -> DevicePool:
    return DevicePool(Device("h200", "fake", "several", "fake", "fake"), members, **options)  # type: ignore[arg-type]


def kept(row: Measurement) -> Measurement:
    return row


class TestDevicePool(MeasurerContract):
    good, bad = GOOD, BAD

    @pytest.fixture
    def measurer(self) -> Iterator[DevicePool]:
        fakes = [FakeMeasurer(faults={BAD.schedule: "runtime"}) for _ in range(3)]
        with DevicePool(fakes[0].device, [LocalMember(f) for f in fakes]) as m:
            yield m


def test_rows_are_taken_in_order_and_kept_as_they_come() -> None:
    one, two, stored = ByHand("one"), ByHand("two"), []
    with pool(one, two) as devices:
        rows = devices.begin(candidates(3), None, None, lambda row: stored.append(row) or row)
        two.answer()
        assert [r.candidate for r in stored] == [two.at[0]] == candidates(3)[1:2]
        two.answer()
        one.answer()
        assert [r.candidate for r in rows] == candidates(3)
        assert [r.candidate for r in stored] == [candidates(3)[i] for i in (1, 2, 0)]


def test_what_a_lost_device_was_at_is_measured_once_more_elsewhere() -> None:
    one, two, said = ByHand("one"), ByHand("two"), []
    with pool(one, two, say=said.append) as devices:
        rows = devices.begin(candidates(2), None, None, kept)
        one.die()
        two.answer()
        two.answer()
        assert [r.status for r in rows] == ["ok", "ok"]
        assert two.at == [candidates(2)[1], candidates(2)[0]] and one.closed and len(said) == 1
        census = devices.census()
    assert (census.lost, census.again, census.left, len(census.seats)) == (1, 1, 1, 1)


def test_what_is_lost_twice_is_recorded_as_lost() -> None:
    one, two, three = ByHand("one"), ByHand("two"), ByHand("three")
    with pool(one, two, three) as devices:
        (candidate,) = candidates(1)
        rows = devices.begin([candidate], None, None, kept)
        one.die()
        two.die()
        (row,) = rows
        assert row.status == "device_lost" and row.device == two.device and "node went away" in row.message
        assert row.id and not three.at


def test_a_device_that_hangs_is_given_up_and_its_late_answer_is_dropped() -> None:
    one, two, stored = ByHand("one"), ByHand("two"), []
    with pool(one, patience_s=0.0) as devices:
        rows = devices.begin(candidates(1), None, None, lambda row: stored.append(row) or row)
        devices.join(two)
        threading.Timer(0.5, two.answer).start()
        devices._desk.patience_s = 60.0
        (row,) = rows
        one.answer()
        assert row.status == "ok" and stored == [row] and one.closed
        assert devices.members == (two,)


def test_a_row_of_a_worker_that_was_killed_is_tried_again_only_where_there_is_another_device() -> None:
    dies = FakeMeasurer(faults={GOOD.schedule: "device_lost"})
    with DevicePool(dies.device, [LocalMember(dies)]) as devices:
        assert devices.measure([GOOD])[0].status == "device_lost" and dies.n_measured == 1
    dies = FakeMeasurer(faults={GOOD.schedule: "device_lost"})
    with DevicePool(dies.device, [LocalMember(dies), LocalMember(FakeMeasurer())]) as devices:
        assert {devices.measure([GOOD])[0].status for _ in range(3)} == {"ok"}


def test_without_any_device_work_waits_for_one_to_join_and_then_fails() -> None:
    one, two = ByHand("one"), ByHand("two")
    with pool(one, wait_s=60.0) as devices:
        rows = devices.begin(candidates(1), None, None, kept)
        one.die()
        threading.Timer(0.1, lambda: (devices.join(two), two.answer())).start()
        assert [r.status for r in rows] == ["ok"]
    with pool(ByHand("one"), wait_s=0.0) as devices:
        rows = devices.begin(candidates(1), None, None, kept)
        devices.leave(devices.members[0], "its node went away")
        with pytest.raises(NoSuchDevice, match="its node went away"):
            next(iter(rows))


def test_a_batch_that_is_given_up_measures_what_was_begun_and_nothing_else() -> None:
    one, stored = ByHand("one"), []
    with pool(one) as devices:
        rows = devices.begin(candidates(5), None, None, lambda row: stored.append(row) or row)
        threading.Timer(0.05, one.answer).start()
        rows.close()
        assert [r.candidate for r in stored] == one.at == candidates(1)
        assert devices.census().waiting == 0


def test_what_waits_for_another_device_is_given_up_at_once() -> None:
    one = ByHand("one")
    with pool(one, wait_s=600.0) as devices:
        rows = devices.begin(candidates(1), None, None, kept)
        one.die()
        rows.close()
        assert devices.census().waiting == 0


def test_a_device_that_cannot_even_be_asked_says_so_to_whoever_takes_the_row() -> None:
    class Refuses(ByHand):
        def measure(self, candidate: Candidate, best_us: float | None, look: Look | None) -> Future[Measurement]:
            raise DataError("the model cannot say")

    with pool(Refuses("one")) as devices:
        for row in (1, 2):
            with pytest.raises(DataError, match="cannot say"):
                next(devices.begin(candidates(row)[-1:], None, None, kept))


def test_who_still_waits_when_a_pool_is_closed_is_told() -> None:
    devices = pool(ByHand("one"))
    rows = devices.begin(candidates(2), None, None, kept)
    devices.close()
    for _ in range(2):
        with pytest.raises(CancelledError):
            next(rows)


def test_candidates_are_dealt_as_they_get_ready() -> None:
    one, begun = ByHand("one"), []
    with pool(one, prepare=lambda listed, ready: begun.append(ready)) as devices:
        rows = devices.begin(candidates(2), None, None, kept)
        assert not one.at
        for candidate in reversed(candidates(2)):
            begun[0](candidate)
            one.answer()
        assert [r.candidate for r in rows] == candidates(2) and one.at == candidates(2)[::-1]


def test_what_cannot_be_stored_is_told_to_whoever_takes_the_rows() -> None:
    def full(row: Measurement) -> Measurement:
        raise DataError("no space left")

    with DevicePool(FakeMeasurer().device, [LocalMember(FakeMeasurer())]) as devices, pytest.raises(DataError):
        next(devices.begin(candidates(1), None, None, full))


def test_enough_batches_are_out_for_each_device_to_have_two_candidates() -> None:
    assert [pool(*[ByHand(str(i)) for i in range(n)]).ahead for n in (1, 2, 8, 64)] == [1, 2, 3, 16]


def test_all_devices_of_a_pool_work_at_once() -> None:
    at_once, most, lock = count(), [0], threading.Lock()
    together = threading.Barrier(3, timeout=10)

    class Meets(FakeMeasurer):
        def stream(
            self, candidates: Sequence[Candidate], best_us: float | None = None, look: Look | None = None
        ) -> Iterator[Measurement]:
            together.wait()  # breaks unless all three are here
            with lock:
                most[0] = next(at_once)
            yield from super().stream(candidates, best_us)

    with DevicePool(FakeMeasurer().device, [LocalMember(Meets()) for _ in range(3)]) as devices:
        assert all(r.status == "ok" for r in devices.measure(candidates(6)))
    assert most[0] == 5
