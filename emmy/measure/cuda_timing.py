"""How long a run takes on a GPU: CUDA graphs of about a millisecond, replayed from rest. Knows graphs, no kernels.

A launch by itself costs microseconds of the host's time, so runs are captured into a graph, on rotating sets of operands,
and the graph is timed by events. A card under load lowers its clocks within milliseconds: it rests before each sample, and
one replay warms it up. Measured on an H200: ratios taken so repeat to 0.5 %, to 2 % below 10 us; back to back to 29 %.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import ceil
from statistics import median

from emmy.measure.device import Call
from emmy.measure.timing import HOPELESS, Participant, Timing
from emmy.runtime.cuda_driver import Context, Graph

GRAPH_US, REST_S, REPLAYS = 1000.0, 0.015, 3  # of a sample in a race, which is the median of the replays
SCREEN_GRAPH_US, SCREEN_REST_S = 400.0, 0.004  # while screening; each replay is a sample
MOST_RUNS = 2000  # in a graph
MOST_GRAPH_US = 10_000.0
HOST_US = 10.0  # a run timed alone may take so much longer than in a graph
SUSTAINED_LEAST_US, HEAT_S, SUSTAINED_US, SUSTAINED_ROUNDS = 50.0, 0.3, 20_000.0, 5


class GraphTiming(Timing):
    """Participants rotate over their sets of operands, of which a graph touches all, as long as that is not too long."""

    def __init__(self, context: Context, participants: Sequence[Participant], *, thorough: bool) -> None:
        self._context, self._participants, self._thorough = context, tuple(participants), thorough
        self._graphs: dict[int, Graph] = {}  # by id of the participant
        self._graph_us = GRAPH_US if thorough else SCREEN_GRAPH_US

    def cold(self, rounds: int, best_us: float | None) -> None:
        for p in self._participants:
            p.announce(0.0)
            self._prepare(p)
        if self._thorough:
            for _ in range(rounds):
                for p in self._participants:
                    p.samples_us.append(median(self._rested(p, self._graphs[id(p)], REPLAYS)))
            return
        for p in self._participants:
            if best_us is not None and p.estimate_ns / 1e3 > HOPELESS * best_us + HOST_US:
                p.samples_us.append(self._replay(p, self._graphs[id(p)]))
            else:
                p.samples_us += self._rested(p, self._graphs[id(p)], rounds)

    def warm(self, p: Participant) -> None:
        graph = self._capture([p.calls[0]] * p.repeats)
        p.warm_us = median(self._rested(p, graph, REPLAYS if self._thorough else 1))

    def sustained(self, participants: Sequence[Participant]) -> None:
        if min(median(p.samples_us) for p in participants) < SUSTAINED_LEAST_US:
            return
        times: dict[int, list[float]] = {id(p): [] for p in participants}
        end_s = time.monotonic() + HEAT_S
        while time.monotonic() < end_s:
            self._sustain(participants[0])
        for _ in range(SUSTAINED_ROUNDS):
            for p in participants:
                times[id(p)].append(self._sustain(p))
        for p in participants:
            p.sustained_us = median(times[id(p)])

    def _prepare(self, p: Participant) -> None:
        """The participant's graph. A run alone looks longer than it is: in a race the graph is made anew if it is short."""
        p.repeats = self._runs(p)
        self._graphs[id(p)] = self._capture(_rotating(p.calls, p.repeats))
        if self._thorough:
            self._context.time_ms(self._graphs[id(p)].launch)
            p.estimate_ns = max(1, round(self._context.time_ms(self._graphs[id(p)].launch) * 1e6 / p.repeats))
            if 1.5 * (runs := self._runs(p)) < p.repeats or runs > 1.5 * p.repeats:
                p.repeats = runs
                self._graphs[id(p)] = self._capture(_rotating(p.calls, p.repeats))

    def _runs(self, p: Participant) -> int:
        """Runs in a graph: as long as a sample is to be, and enough sets for the first to be cold when its turn comes again."""
        estimate_us = max(0.5, p.estimate_ns / 1e3)
        wanted = max(self._graph_us / estimate_us, min(len(p.calls), MOST_GRAPH_US / estimate_us))
        n = max(1, min(MOST_RUNS, ceil(wanted)))
        return -(-n // len(p.calls)) * len(p.calls) if n > len(p.calls) else n

    def _rested(self, p: Participant, graph: Graph, replays: int) -> list[float]:
        """Microseconds of a run in each replay, after a rest and one replay that does not count."""
        p.announce(p.estimate_ns * p.repeats * (replays + 1) / 1e9)
        time.sleep(REST_S if self._thorough else SCREEN_REST_S)
        graph.launch()
        return [self._context.time_ms(graph.launch) * 1e3 / p.repeats for _ in range(replays)]

    def _replay(self, p: Participant, graph: Graph) -> float:
        p.announce(p.estimate_ns * p.repeats / 1e9)
        return self._context.time_ms(graph.launch) * 1e3 / p.repeats

    def _sustain(self, p: Participant) -> float:
        """Microseconds of a run, over replays without a pause."""
        graph, replays = self._graphs[id(p)], max(1, ceil(SUSTAINED_US / (median(p.samples_us) * p.repeats)))
        p.announce(replays * p.repeats * p.estimate_ns / 1e9)

        def launches() -> None:
            for _ in range(replays):
                graph.launch()

        return self._context.time_ms(launches) * 1e3 / (replays * p.repeats)

    def _capture(self, calls: Sequence[Call]) -> Graph:
        def launches() -> None:
            for call in calls:
                call()

        return self._context.capture(launches)


def _rotating(calls: tuple[Call, ...], n: int) -> list[Call]:
    return [calls[i % len(calls)] for i in range(n)]
