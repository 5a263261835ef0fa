"""How long a run takes: samples, taken in turns, over rotating sets of operands. Knows calls and a clock, nothing else.

`Timing` is what a device offers; `HostTiming` is how it is done where a run is complete when its call returns.

A sample is one or more runs, enough to last a millisecond, each on the next set of operands. Participants (candidates
and the stock kernel) take turns, A B A B, so that what slows the machine down for a while slows all of them.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, gcd
from statistics import median

from emmy.measure.device import Call

Clock = Callable[[Sequence[Call]], int]  # Device.time_ns

SAMPLE_NS = 1_000_000  # a sample lasts at least this long
MAX_REPEATS = 10_000
MAX_SETS = 2048
WARM_SAMPLES = 3
FEW_SAMPLES = 3  # a slow candidate gets no more ...
SLOW_TOTAL_NS = 100_000_000  # ... once its samples have taken this long together
HOPELESS = 3.0  # times the best known: one sample says enough
LONG_NS = 20_000_000  # so long a run needs no warm-up: the checks ran the code, and nothing else stays warm


@dataclass(slots=True)
class Participant:
    """One kernel being timed. `calls[i]` runs it on operand set i; `announce` is told how long a sample may take."""

    calls: tuple[Call, ...]
    announce: Callable[[float], None]
    estimate_ns: int = 0  # of one run; from the checks at first
    repeats: int = 1
    samples_us: list[float] = field(default_factory=list)
    warm_us: float | None = None  # on operands just used
    sustained_us: float | None = None  # at the clocks that a device falls to under lasting load


class Timing(ABC):
    """One session of timing: what it learns is written into the participants."""

    @abstractmethod
    def cold(self, rounds: int, best_us: float | None) -> None:
        """Fills the samples: `rounds` of each participant, in turns, on operands that are in no cache.

        Unless thorough, slow or hopeless candidates (against `best_us`, the best time known) get fewer.
        """

    @abstractmethod
    def warm(self, p: Participant) -> None:
        """Fills the time on operands just used: set 0 again and again."""

    def sustained(self, participants: Sequence[Participant]) -> None:  # noqa: B027  # most devices have but one state
        """Fills sustained times of some, where clocks under lasting load are another state and the kernels are long."""


class HostTiming(Timing):
    """By a clock around the calls."""

    def __init__(self, participants: Sequence[Participant], clock: Clock, *, thorough: bool) -> None:
        self._participants, self._clock, self._thorough = participants, clock, thorough

    def cold(self, rounds: int, best_us: float | None) -> None:
        take(self._participants, self._clock, rounds, thorough=self._thorough, best_us=best_us)

    def warm(self, p: Participant) -> None:
        p.warm_us = take_warm(p, self._clock, thorough=self._thorough)


def set_count(cold_bytes: int, set_bytes: int, memory_bytes: int, participants: int) -> int:
    """How many sets to rotate over, so that a set is cold when its turn comes again.

    The sets other than the one in use exceed `cold_bytes` together, as far as memory and MAX_SETS allow. The count has
    no factor in common with the number of participants; otherwise each would meet the same sets in every round, and
    their places in memory would count.
    """
    affordable = max(1, min(MAX_SETS, memory_bytes // set_bytes))
    wanted = min(affordable, ceil(cold_bytes / set_bytes) + 1)
    coprime = [n for n in range(1, affordable + 1) if gcd(n, participants) == 1]
    return next((n for n in coprime if n >= wanted), coprime[-1])


def take(
    participants: Sequence[Participant], clock: Clock, rounds: int, *, thorough: bool, best_us: float | None = None
) -> None:
    """Fills the participants' samples: `rounds` each, in turns.

    Unless `thorough`, the first participant decides when enough is known: a candidate more than three times slower
    than the best known, or one whose runs are long, gets fewer samples.
    """
    turns = itertools.count()
    for p in participants:
        _warm_up(p, clock, turns)
    for _ in range(rounds):
        for p in participants:
            _sample(p, clock, [p.calls[next(turns) % len(p.calls)] for _ in range(p.repeats)], p.samples_us)
        if not thorough and (is_hopeless(participants[0], best_us) or _is_long(participants[0])):
            break


def take_warm(p: Participant, clock: Clock, *, thorough: bool) -> float:
    """Microseconds of a run on operands just used: set 0 again and again."""
    warm: list[float] = []
    for _ in range(WARM_SAMPLES if thorough else 1):
        _sample(p, clock, [p.calls[0]] * p.repeats, warm)
    return median(warm)


def is_hopeless(p: Participant, best_us: float | None) -> bool:
    """Whether the participant is so much slower than the best known that its exact time is of no use."""
    return best_us is not None and median(p.samples_us) > HOPELESS * best_us


def _is_long(p: Participant) -> bool:
    return len(p.samples_us) >= FEW_SAMPLES and sum(p.samples_us) * p.repeats * 1e3 > SLOW_TOTAL_NS


def _warm_up(p: Participant, clock: Clock, turns: itertools.count[int]) -> None:
    """One run that does not count, and from it how many runs make a sample; short runs are estimated again."""
    if p.estimate_ns >= LONG_NS:
        return
    p.announce(0.0)
    p.estimate_ns = max(1, clock([p.calls[next(turns) % len(p.calls)]]))
    if p.estimate_ns < SAMPLE_NS:
        n = min(MAX_REPEATS, ceil(SAMPLE_NS / 4 / p.estimate_ns))
        p.estimate_ns = max(1, clock([p.calls[next(turns) % len(p.calls)] for _ in range(n)]) // n)
    p.repeats = min(MAX_REPEATS, ceil(SAMPLE_NS / p.estimate_ns))


def _sample(p: Participant, clock: Clock, calls: list[Call], into: list[float]) -> None:
    p.announce(p.estimate_ns * len(calls) / 1e9)
    into.append(max(1, clock(calls)) / len(calls) / 1e3)
