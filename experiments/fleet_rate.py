"""Candidates a minute with one, two, ... GPUs of this machine, or with simulated ones that take a fixed time for each.

    python experiments/fleet_rate.py --trials 32 --searches 16 OP OP ...       # one and two GPUs of the first product here
    python experiments/fleet_rate.py --fake 0.5 --trials 16 --searches 4 OP OP OP OP

Each line is one tune of all ops from nothing, with the real search, in a process and a home of its own, until each op has had
its trials; races are not held, so that nothing but candidates is counted. `cold`: with a cache of its own, so that
every candidate is compiled anew, which shares the machine's cores with the searches; `built`: the same candidates once more,
their binaries being there, so that what is left is what the devices do. A minute is counted from the first row to the last.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from functools import partial

from emmy import config
from emmy.fleet.tuning import floor_us, tune_on
from emmy.ir.ops import parse_op
from emmy.measure.device_pool import DevicePool
from emmy.measure.factory import gpu_pool, gpus_here
from emmy.measure.fake import FakeMeasurer
from emmy.measure.measurer import Heat
from emmy.measure.member import LocalMember
from emmy.search.budget import Budget
from emmy.search.events import Event, Measured
from emmy.tuning import Terms


class Times:
    """When rows came."""

    def __init__(self) -> None:
        self.at_s: list[float] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Measured):
            self.at_s.append(time.monotonic())

    @property
    def per_minute(self) -> float:
        return 60 * (len(self.at_s) - 1) / (self.at_s[-1] - self.at_s[0])


class WithoutRaces(DevicePool):
    """Devices that hold no races."""

    def heat(self, op: str, schedules: object, rivals: object = (), rounds: int = 7) -> Heat:
        return Heat((), ())


def pool(n: int, target: str, fake_s: float) -> tuple[str, DevicePool]:
    if fake_s:
        fakes = [FakeMeasurer(target, delay_s=fake_s, name=f"card {i}") for i in range(n)]
        return target, WithoutRaces(fakes[0].device, [LocalMember(f) for f in fakes])
    name, found = next(iter(gpus_here().items()))
    held = gpu_pool(name, found[:n], partial(floor_us, name))
    return name, WithoutRaces(held.device, held.members, prepare=held.prepare, on_close=held.close)


def rate(n: int, args: argparse.Namespace) -> str:
    """Rows, and rows a minute."""
    times = Times()
    name, devices = pool(n, args.target, args.fake)
    terms = Terms(
        Budget(trials=args.trials), args.strategy, 0, 1, fresh=True, by_range=True, ahead=0, model=None,
        searches=args.searches,
    )  # fmt: skip
    with devices:
        tune_on({name: devices}, [parse_op(op) for op in args.ops], terms, config.home(), times)
    return f"{len(times.at_s)} rows in {times.at_s[-1] - times.at_s[0]:.1f} s: {times.per_minute:.0f} a minute"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="+")
    parser.add_argument("--gpus", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--trials", type=int, default=32, help="of each op")
    parser.add_argument("--searches", type=int, default=12, help="ops that are searched at a time")
    parser.add_argument("--strategy", default="random", help="random: every line has the same candidates")
    parser.add_argument("--fake", type=float, default=0.0, metavar="S", help="simulate devices that take so long each")
    parser.add_argument("--target", default="h200", help="of the simulated devices")
    parser.add_argument("--one", type=int, metavar="GPUS", help="one line alone, in this process")
    args = parser.parse_args()
    if args.one:
        sys.stdout.write(f"{args.one} GPUs: {rate(args.one, args)}\n")
        return 0
    for n in args.gpus:
        with tempfile.TemporaryDirectory() as cache:
            for what in ("cold", "built"):
                with tempfile.TemporaryDirectory() as home:
                    env = config.child_env(EMMY_HOME=home, EMMY_CACHE=cache)
                    sys.stdout.write(f"{what}, ")
                    sys.stdout.flush()
                    subprocess.run([sys.executable, *sys.argv, "--one", str(n)], env=env, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
