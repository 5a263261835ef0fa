"""What one tuner can feed: rows a second with many simulated devices, and where it saturates. Measures no kernel.

    python experiments/fleet_scale.py [--devices 1 2 8 64 512] [--rate 100] [--seconds 20] [--strategies given random auto]

Each device answers by formula after 1 / rate seconds, without a thread of its own: one clock answers for all, as Ray's events
do. The rest is real: the run, its journal with an fsync a row, the dispatcher, the strategy and the space of schedules. `given`
is a strategy that proposes made-up texts from a list, which shows what all but the proposals costs. Rows are those of the
search alone, without a race. A busy machine slows `per_s`, not `per_core_s`: docs/fleet.md has the figures.
"""

from __future__ import annotations

import argparse
import heapq
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

from emmy import __version__
from emmy.ir.ops import parse_op
from emmy.ir.target import load_target
from emmy.measure.device_pool import DevicePool
from emmy.measure.fake import FakeMeasurer
from emmy.measure.measurer import Heat, Look
from emmy.measure.member import Member
from emmy.records import Candidate, Device, Measurement
from emmy.search.budget import parse_budget
from emmy.search.registry import STRATEGIES
from emmy.search.schedule_space import ScheduleSpace
from emmy.search.session import Request, open_run
from emmy.search.space import Point, Trial
from emmy.search.strategy import Strategy

ANSWERING = 4
_given: list[Point] = []


class GivenStrategy(Strategy):
    """Proposes what was made up beforehand."""

    name: ClassVar[str] = "given"

    def propose(self, n: int) -> Iterable[Point]:
        return [p for p in _given[len(self.seen) :][: 2 * n] if p.key not in self.seen]

    def learn(self, trials: Sequence[Trial]) -> None:
        pass


class Clock(threading.Thread):
    """Answers when it is time to, in one of as many threads as take answers from a cluster."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._due: list[tuple[float, int, Future[Measurement], Measurement]] = []
        self._n, self._more, self._threads = 0, threading.Condition(), ThreadPoolExecutor(ANSWERING)

    def after(self, delay_s: float, row: Measurement) -> Future[Measurement]:
        future: Future[Measurement] = Future()
        with self._more:
            self._n += 1
            heapq.heappush(self._due, (time.monotonic() + delay_s, self._n, future, row))
            self._more.notify()
        return future

    def run(self) -> None:
        while True:
            with self._more:
                while not self._due:
                    self._more.wait()
                wait_s = self._due[0][0] - time.monotonic()
                if wait_s > 0:
                    self._more.wait(wait_s)
                    continue
                _, _, future, row = heapq.heappop(self._due)
            self._threads.submit(future.set_result, row)


class Simulated(Member):
    def __init__(self, fake: FakeMeasurer, clock: Clock, delay_s: float) -> None:
        self._fake, self._clock, self._delay_s = fake, clock, delay_s

    @property
    def device(self) -> Device:
        return self._fake.device

    def measure(self, candidate: Candidate, best_us: float | None, look: Look | None) -> Future[Measurement]:
        (row,) = self._fake.measure([candidate])
        return self._clock.after(self._delay_s, row)

    def heat(self, op: str, schedules: Sequence[str], rivals: Sequence[str], rounds: int) -> Future[Heat]:
        raise NotImplementedError("nothing is raced here")

    def close(self) -> None:
        pass


def make_up(space: ScheduleSpace, n: int) -> None:
    """So many different texts as long as schedules are, which nothing here replays."""
    text = space.default().key
    _given.extend(Point(f"{text} k0/made_up({i})", ()) for i in range(n))


def simulated(devices: int, rate: float, seconds: float, strategy: str, op: str, target: str) -> dict[str, float]:
    clock = Clock()
    clock.start()
    fake = FakeMeasurer(target)
    pool = DevicePool(fake.device, [Simulated(fake, clock, 1 / rate) for _ in range(devices)])
    budget = f"{seconds:g}s" if strategy != "given" else f"{len(_given) - 8},{seconds:g}s"
    request = Request(parse_op(op), load_target(target), strategy, 0, parse_budget(budget), 1)
    with tempfile.TemporaryDirectory() as home, pool:
        run = open_run(request, pool, Path(home), __version__)
        run.races = False
        cpu_s, began_s = time.process_time(), time.monotonic()
        result = run.go()
        wall_s, used_s = time.monotonic() - began_s, time.process_time() - cpu_s
    n = len(result.rows)
    return {
        "devices": devices,
        "ahead": run.plan.start.ahead,
        "offered": devices * rate,
        "rows": n,
        "per_s": n / wall_s,
        "cpu_ms_a_row": 1e3 * used_s / max(1, n),
        "per_core_s": n / used_s,  # what a core of its own would take: Python's lock makes the threads one core
        "mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", default="matmul:512x4096x3840:f16:nk")
    parser.add_argument("--target", default="h200")
    parser.add_argument("--devices", type=int, nargs="*", default=[1, 2, 8, 64, 512])
    parser.add_argument("--rate", type=float, default=100.0, help="measurements a second of each device")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--strategies", nargs="*", default=["given", "random", "auto"])
    parser.add_argument("--given", type=int, default=100_000, help="texts that are made up for `given`")
    args = parser.parse_args()
    STRATEGIES["given"] = (__name__, "GivenStrategy")
    if "given" in args.strategies:
        make_up(ScheduleSpace(parse_op(args.op), load_target(args.target)), args.given)
    for strategy in args.strategies:
        for devices in args.devices:
            found = simulated(devices, args.rate, args.seconds, strategy, args.op, args.target)
            said = "  ".join(f"{name} {x:.4g}" for name, x in found.items())
            sys.stdout.write(f"{strategy}  {said}\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
