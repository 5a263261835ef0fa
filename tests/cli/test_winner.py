"""Which stored schedule is trusted."""

from __future__ import annotations

from emmy.records import Device, Measurement
from emmy.winner import best_first, find_winner

HERE = Device("cpu", "this CPU", "0" * 8, "6.1", "gcc 12")
ELSEWHERE = Device("cpu", "another CPU", "1" * 8, "6.1", "gcc 12")


def _row(
    schedule: str, us: float, *, raced: bool = True, contended: bool = False, device: Device = HERE
) -> Measurement:
    static = {"speedup": 1.0} if raced else {}
    return Measurement("op", schedule, "d", device, "ok", (us,), static=static, contended=contended)


def test_a_disturbed_row_that_is_faster_wins_since_disturbances_only_slow_down() -> None:
    found = find_winner([_row("slow", 640.0), _row("fast", 300.0, contended=True)], HERE.product)
    assert found is not None and found.schedule == "fast" and found.time_us == 300.0


def test_a_schedule_is_timed_by_its_undisturbed_rows() -> None:
    found = find_winner([_row("s", 100.0), _row("s", 180.0, contended=True), _row("t", 120.0)], HERE.product)
    assert found is not None and (found.schedule, found.time_us, found.n_rows) == ("s", 100.0, 2)


def test_a_raced_schedule_is_believed_before_a_faster_screening_and_this_product_before_another() -> None:
    rows = [_row("raced", 100.0), _row("screened", 90.0, raced=False), _row("far", 50.0, device=ELSEWHERE)]
    assert find_winner(rows, HERE.product).schedule == "raced"  # type: ignore[union-attr]
    assert find_winner(rows[1:], HERE.product).schedule == "screened"  # type: ignore[union-attr]
    assert find_winner([_row("bad", 1.0)][:0], HERE.product) is None


def test_what_is_chosen_comes_first_of_what_is_verified_although_a_screening_was_faster() -> None:
    rows = [_row("quick", 90.0, raced=False), _row("raced", 100.0), _row("quickest", 80.0, raced=False)]
    threads = rows[0].protocol.threads
    assert best_first(rows, HERE.product, threads) == ("raced", "quickest", "quick")
    assert best_first(rows, HERE.product, threads + 1) == ("quickest", "quick", "raced")
