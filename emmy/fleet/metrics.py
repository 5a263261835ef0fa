"""A fleet's status as Prometheus reads it: text over HTTP, made when it is asked for. Needs prometheus-client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from emmy.errors import UsageError
from emmy.fleet.status import KindStatus, SearchStatus, Status

_Of = Callable[[KindStatus], float | None]
_COUNTERS: tuple[tuple[str, str, _Of], ...] = (
    ("emmy_lost_measurements", "Times that a device was lost with a measurement", lambda k: k.lost),
    ("emmy_repeated_measurements", "Of them tried on another device", lambda k: k.again),
    ("emmy_departed_devices", "Devices that left", lambda k: k.left),
    ("emmy_finished_searches", "Searches that have ended", lambda k: k.ops_done),
)
_GAUGES: tuple[tuple[str, str, _Of], ...] = (
    ("emmy_waiting", "Candidates that find no free device", lambda k: k.waiting),
    ("emmy_rows_per_minute", "Rows of the last minute", lambda k: k.per_minute),
    ("emmy_planned_searches", "Searches that are asked for", lambda k: k.ops),
    ("emmy_searches", "Searches that are under way", lambda k: len(k.searches)),
    ("emmy_eta_seconds", "Until all searches have ended", lambda k: k.eta_all_s),
)
_GAUGES_OF_SEARCHES: tuple[tuple[str, str, Callable[[SearchStatus], float | None]], ...] = (
    ("emmy_trials", "Trials of an op that is searched now", lambda s: s.trials),
    ("emmy_best_seconds", "Best time of an op that is searched now", lambda s: s.best_us and s.best_us / 1e6),
)


class _Collector(Collector):
    """Metrics of a status, by target; of what is searched now by op, too."""

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        kinds = self._status().kinds
        rows = CounterMetricFamily("emmy_measurements", "Rows, by what became of them", labels=("target", "status"))
        devices = GaugeMetricFamily("emmy_devices", "Devices that are there", labels=("target", "state"))
        for k in kinds:
            for status, n in k.statuses.items():
                rows.add_metric((k.target, status), n)
            for state in ("busy", "idle"):
                devices.add_metric((k.target, state), sum(d.state == state for d in k.devices))
        yield rows
        yield devices
        yield from _of_kinds(kinds)
        yield from _of_searches(kinds)


def _of_kinds(kinds: Sequence[KindStatus]) -> Iterator[Metric]:
    for name, text, of in _COUNTERS:
        counter = CounterMetricFamily(name, text, labels=("target",))
        for k in kinds:
            counter.add_metric((k.target,), of(k) or 0)
        yield counter
    for name, text, of in _GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=("target",))
        for k in kinds:
            if (x := of(k)) is not None:
                gauge.add_metric((k.target,), x)
        yield gauge


def _of_searches(kinds: Sequence[KindStatus]) -> Iterator[Metric]:
    """Of those that are under way: what is told of an op goes when its search ends."""
    searches = [(k.target, s) for k in kinds for s in k.searches]
    for name, text, of in _GAUGES_OF_SEARCHES:
        gauge = GaugeMetricFamily(name, text, labels=("target", "op"))
        for target, s in searches:
            if (x := of(s)) is not None:
                gauge.add_metric((target, s.op), x)
        yield gauge


@contextmanager
def served(port: int, status: Callable[[], Status]) -> Iterator[None]:
    """Within: the status at http://HOST:port/metrics. Raises UsageError for a port that is taken."""
    registry = CollectorRegistry()
    registry.register(_Collector(status))
    try:
        server, thread = start_http_server(port, registry=registry)
    except OSError as e:
        raise UsageError(f"--metrics-port {port}: {e.strerror}. Name another port.") from e
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
