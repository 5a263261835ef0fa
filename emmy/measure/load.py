"""Under which circumstances a time was taken: other processes, the hypervisor, clock, temperature. Judges, never waits.

Everything is read from /proc and /sys; where they do not exist (macOS) nothing is known and nothing is claimed.
"""

from __future__ import annotations

import os
import re
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

# When a row is marked as contended. docs/measuring.md explains the choice.
MOST_STEAL = 0.05  # share of the window in which the hypervisor ran somebody else on our cores
MOST_DISPLACED = 0.5  # one thread: share of the timed wall time for which it was kept from running
LEAST_FREE_CORES = -0.2  # several threads: cores that others left, minus the threads
LEAST_CLOCK = 0.9  # clock after over clock before
MOST_SPREAD = {"thread_cpu": 0.05, "wall": 0.10, "event": 0.10}  # between the quartiles, over the median

LEAST_WINDOW_S = 0.2  # /proc/stat counts in ticks of 10 ms


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Totals since boot (all processes) and since start (Emmy: this process and its children that ended)."""

    wall_s: float
    busy_s: float
    steal_s: float
    emmy_s: float
    clock_mhz: float | None


@dataclass(frozen=True, slots=True)
class Load:
    """What went on in a window of time beside Emmy."""

    others_cores: float  # cores that other processes kept busy
    steal: float  # share of all cores' time
    clock_ratio: float | None  # after / before


def snapshot() -> Snapshot | None:
    """The totals now; None where the system does not tell."""
    fields = re.match(r"cpu +(.+)", _read("/proc/stat"))
    if not fields:
        return None
    # user nice system idle iowait irq softirq steal guest guest_nice; guest time is counted in user time already
    ticks = [int(x) / os.sysconf("SC_CLK_TCK") for x in fields[1].split()]
    user, nice, system, _, _, irq, softirq, steal = ticks[:8]
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return Snapshot(
        time.monotonic(),
        user + nice + system + irq + softirq,
        steal,
        sum(u.ru_utime + u.ru_stime for u in own),
        clock_mhz(),
    )


class LoadMeter:
    """Watches the machine during measurements. A window too short for the system's ticks goes on into the next."""

    def __init__(self) -> None:
        self._begin = snapshot()
        self._worker_s = 0.0

    def start(self) -> None:
        """A measurement begins."""
        now = snapshot()
        if now is None or self._begin is None or now.wall_s - self._begin.wall_s >= LEAST_WINDOW_S:
            self._begin, self._worker_s = now, 0.0

    def stop(self, worker_cpu_s: float) -> Load | None:
        """The load of the window; the worker used `worker_cpu_s` since `start`. None when it is not known yet."""
        self._worker_s += worker_cpu_s
        now = snapshot()
        if self._begin is None or now is None:
            return None
        return between(self._begin, now, self._worker_s)


def between(begin: Snapshot, end: Snapshot, worker_cpu_s: float) -> Load | None:
    """The load between two snapshots; None when they are too close to tell."""
    wall_s = end.wall_s - begin.wall_s
    if wall_s < LEAST_WINDOW_S:
        return None
    ours = end.emmy_s - begin.emmy_s + worker_cpu_s
    ratio = end.clock_mhz / begin.clock_mhz if end.clock_mhz and begin.clock_mhz else None
    return Load(
        others_cores=max(0.0, (end.busy_s - begin.busy_s - ours) / wall_s),
        steal=(end.steal_s - begin.steal_s) / wall_s / (os.cpu_count() or 1),
        clock_ratio=ratio,
    )


def is_contended(
    load: Load | None, samples_us: Sequence[float], *, clock: str, threads: int, cores: int, displaced: float
) -> bool:
    """Whether the times may be off because the device was busy or throttled."""
    if len(samples_us) >= 3 and spread(samples_us) > MOST_SPREAD[clock]:
        return True
    if clock == "thread_cpu" and displaced > MOST_DISPLACED:
        return True
    if load is None:
        return False
    if load.steal > MOST_STEAL or (load.clock_ratio is not None and load.clock_ratio < LEAST_CLOCK):
        return True
    free = cores - load.others_cores - threads
    return clock == "wall" and free < LEAST_FREE_CORES


def spread(samples_us: Sequence[float]) -> float:
    """Distance between the quartiles over the median."""
    low, _, high = quantiles(samples_us, n=4, method="inclusive")
    return (high - low) / median(samples_us)


def clock_mhz() -> float | None:
    """The clock of core 0 now, or what a virtual machine shows instead."""
    if khz := _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq").strip():
        return float(khz) / 1e3
    shown = re.search(r"^cpu MHz\s*: ([\d.]+)", _read("/proc/cpuinfo"), re.MULTILINE)
    return float(shown[1]) if shown else None


def temperature_c() -> float | None:
    """The hottest sensor of the processor, when there is one."""
    sensors = [
        *Path("/sys/class/thermal").glob("thermal_zone*/temp"),
        *Path("/sys/class/hwmon").glob("hwmon*/temp*_input"),
    ]
    of_cpu = ("x86_pkg_temp", "cpu", "coretemp", "k10temp")
    texts = [
        _read(str(path)).strip()
        for path in sensors
        if any(
            word in (_read(str(path.with_name("type"))) + _read(str(path.with_name("name")))).lower() for word in of_cpu
        )
    ]
    return max((int(t) / 1e3 for t in texts if t.lstrip("-").isdigit()), default=None)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
