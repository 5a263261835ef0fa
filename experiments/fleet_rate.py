"""Candidates a minute with one, two, ... GPUs of this machine, or with simulated ones that take a fixed time for each.

    python experiments/fleet_rate.py --seconds 60 matmul:512x4096x3840:f16:nk ...        # one and two GPUs of the first product here
    python experiments/fleet_rate.py --fake 0.5 --seconds 20 matmul:512x4096x3840:f16:nk

Each line is one tune from nothing, with the real search, in a process, a home and a cache of its own, so that every candidate
is compiled anew. `search`: rows a minute while candidates are measured; `all`: of the whole tune, its races included. One GPU
is shown as it is by default, and asking as far ahead as several do.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from emmy import config
from emmy.fleet.tuning import floor_us, tune_on
from emmy.ir.ops import parse_op
from emmy.measure.device_pool import DevicePool
from emmy.measure.factory import gpu_pool, gpus_here
from emmy.measure.fake import FakeMeasurer
from emmy.measure.member import LocalMember
from emmy.search.budget import Budget
from emmy.search.events import Event, Measured
from emmy.tuning import Terms


class Times:
    """When rows came, by op."""

    def __init__(self) -> None:
        self.by_op: dict[str, list[float]] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, Measured):
            self.by_op.setdefault(event.row.op, []).append(time.monotonic())

    @property
    def per_minute(self) -> float:
        spans = [t for t in self.by_op.values() if len(t) > 1]
        return 60 * sum(len(t) - 1 for t in spans) / sum(t[-1] - t[0] for t in spans)


def pool(n: int, target: str, fake_s: float) -> tuple[str, DevicePool]:
    if fake_s:
        fakes = [FakeMeasurer(target, delay_s=fake_s, name=f"card {i}") for i in range(n)]
        return target, DevicePool(fakes[0].device, [LocalMember(f) for f in fakes])
    name, found = next(iter(gpus_here().items()))
    return name, gpu_pool(name, found[:n], partial(floor_us, name))


def rate(n: int, ahead: int, args: argparse.Namespace) -> str:
    """Rows a minute in the search and in all, and how many there were."""
    times = Times()
    name, devices = pool(n, args.target, args.fake)
    terms = Terms(Budget(seconds=args.seconds), args.strategy, 0, 1, True, True, ahead, None)
    with devices:
        began_s = time.monotonic()
        done = tune_on({name: devices}, [parse_op(op) for op in args.ops], terms, config.home(), times)
        wall_s = time.monotonic() - began_s
    rows = sum(len(r.rows) for r in done.results)
    return f"rows {rows}  search {times.per_minute:.1f}/min  all {60 * rows / wall_s:.1f}/min"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="+")
    parser.add_argument("--gpus", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=60.0, help="of each op")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--fake", type=float, default=0.0, metavar="S", help="simulate devices that take so long each")
    parser.add_argument("--target", default="h200", help="of the simulated devices")
    parser.add_argument("--one", type=int, nargs=2, metavar=("GPUS", "AHEAD"), help="one line alone, in this process")
    args = parser.parse_args()
    if args.one:
        sys.stdout.write(f"GPUs {args.one[0]}  ahead {args.one[1]}  {rate(*args.one, args)}\n")
        return 0
    most = 1 + -(-2 * max(args.gpus) // 8)
    for n, ahead in [(1, 1), *((n, most) for n in args.gpus)]:
        with tempfile.TemporaryDirectory() as scratch:
            env = config.child_env(EMMY_HOME=scratch, EMMY_CACHE=str(Path(scratch) / "cache"))
            subprocess.run([sys.executable, *sys.argv, "--one", str(n), str(ahead)], env=env, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
