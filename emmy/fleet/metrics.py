"""A fleet's status as Prometheus reads it: text over HTTP, made when it is asked for. Needs prometheus-client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from emmy.errors import UsageError
from emmy.fleet.status import KindStatus, Status

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
    ("emmy_trials", "Trials of the op that is tuned", lambda k: k.trials),
    ("emmy_best_seconds", "Best time of the op that is tuned", lambda k: k.best_us and k.best_us / 1e6),
    ("emmy_eta_seconds", "Until the budgets of all ops are spent", lambda k: k.eta_all_s),
)


class _Collector(Collector):
    """Metrics of a status, by target."""

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
        for name, text, of in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=("target",))
            for k in kinds:
                counter.add_metric((k.target,), of(k) or 0)
            yield counter
        for name, text, of in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=("target", "op"))
            for k in kinds:
                if (x := of(k)) is not None:
                    gauge.add_metric((k.target, k.op), x)
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
