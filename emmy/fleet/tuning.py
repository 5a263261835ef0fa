"""`emmy tune --gpu all` and `--fleet`: ops tuned on every kind of device that is there, each kind by a search of its own.

A thread a kind, with that kind's model, journals and order of ops; it searches itself, or has several processes that do. What one
kind finds changes nothing for another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from emmy import config
from emmy.abreast import run_all
from emmy.errors import EmmyError, NoSuchDevice, UsageError
from emmy.fleet.cluster import PATIENCE_S, Cluster
from emmy.fleet.status import Board, Status
from emmy.ir.ops import Op, parse_op
from emmy.ir.roofline import roofline_us
from emmy.ir.target import load_target
from emmy.measure.device_pool import DevicePool
from emmy.measure.factory import gpu_pool, gpus_here
from emmy.search.events import Event, Listener, Note, ignore
from emmy.search.registry import check_strategy
from emmy.search.tuner import Stop, TuneResult
from emmy.tuning import Terms, Tuning

T = TypeVar("T")
Pools = Mapping[str, DevicePool]


@dataclass(frozen=True, slots=True)
class FleetResult:
    """A result an op and kind, those of a kind together; and why a kind was not tuned to the end, by target."""

    results: tuple[TuneResult, ...]
    failed: Mapping[str, EmmyError] = field(default_factory=dict)


def tune_fleet(
    ops: Sequence[Op],
    terms: Terms,
    *,
    address: str | None = None,
    targets: Sequence[str] = (),
    on_event: Listener = ignore,
    wait: bool = False,
    home: Path | None = None,
    stop: Stop | None = None,
    metrics_port: int = 0,
    patience_s: float = PATIENCE_S,
) -> FleetResult:
    """The fastest schedules of the ops for each kind of device: of a Ray cluster, or without an address of this machine's GPUs.

    targets:      only these kinds; () = all that are there now. What joins later of another kind is not tuned for
    on_event:     is called by one thread at a time
    wait:         queue behind whoever measures on a device of this machine
    metrics_port: where Prometheus may read; 0 = nowhere
    patience_s:   until a device of a cluster that does not answer is given up

    Raises UsageError, DeviceBusy, NoSuchDevice or StaleModel before anything is measured; later such an error of one kind
    stops that kind alone.
    """
    check_strategy(terms.strategy)
    home, stop, turns = home or config.home(), stop or Stop(), threading.Lock()

    def tell(event: Event) -> None:
        with turns:
            on_event(event)

    def say(text: str) -> None:
        tell(Note(text))

    with ExitStack() as held:
        if address is None:
            pools = held.enter_context(local_pools(targets, terms.threads, wait, say))
        else:
            cluster = Cluster(address, threads=terms.threads, patience_s=patience_s, say=say)
            pools = cluster_pools(held.enter_context(cluster), targets)
        return tune_on(pools, ops, terms, home, tell, stop, metrics_port)


@contextmanager
def local_pools(targets: Sequence[str], threads: int, wait: bool, say: Callable[[str], None]) -> Iterator[Pools]:
    """This machine's GPUs by target, held until the end of the block. Raises NoSuchDevice, DeviceBusy or UsageError."""
    if threads != 1:
        raise UsageError(f"threads is {threads}: a GPU is driven by one; --threads counts cores of a CPU")
    found = _chosen(gpus_here(), targets, "this machine")
    with ExitStack() as held:
        yield {
            name: held.enter_context(gpu_pool(name, gpus, partial(floor_us, name), wait=wait, say=say))
            for name, gpus in found.items()
        }


def cluster_pools(cluster: Cluster, targets: Sequence[str]) -> Pools:
    """The cluster's devices by target. Raises NoSuchDevice where there is none, or of those that were named."""
    there = cluster.devices()
    if not there:
        raise NoSuchDevice(
            "the cluster names no devices. `emmy fleet node --head ADDRESS`, on a machine that has some, joins them."
        )
    return {name: cluster.pool(name) for name in _chosen(there, targets, "the cluster")}


def _chosen(there: Mapping[str, T], targets: Sequence[str], where: str) -> Mapping[str, T]:
    absent = [t for t in targets if load_target(t) and t not in there]
    if absent:
        raise NoSuchDevice(f"{', '.join(absent)}: not there; {where} has {', '.join(there)}")
    return {name: x for name, x in there.items() if not targets or name in targets}


def floor_us(target: str, op: str) -> float:
    """The least time the target can take, in microseconds."""
    known = parse_op(op)
    return roofline_us(known.work(), load_target(target), known.program().dtype).time_us


def tune_on(
    pools: Pools,
    ops: Sequence[Op],
    terms: Terms,
    home: Path,
    tell: Listener = ignore,
    stop: Stop | None = None,
    metrics_port: int = 0,
) -> FleetResult:
    """The ops tuned on each of the pools, which stay open; `tell` is called from several threads."""
    stop, listeners = stop or Stop(), [tell]

    def both(event: Event) -> None:
        for listener in listeners:
            listener(event)

    kinds = [(Tuning(load_target(name), ops, terms, home, both, stop), pool) for name, pool in pools.items()]
    board = Board(home, pools)
    listeners.insert(0, board)
    with board, _metrics(metrics_port, board.status):
        threads = [_Searching(tuning, pool) for tuning, pool in kinds]
        try:
            run_all(threads)
        except BaseException:  # nothing goes on behind the back of who called
            stop.asked = True
            raise
    for thread in threads:
        if thread.error is not None and not isinstance(thread.error, EmmyError):
            raise thread.error
    failed = {t.tuning.target.name: t.error for t in threads if isinstance(t.error, EmmyError)}
    if len(failed) == len(threads):
        raise next(iter(failed.values()))
    return FleetResult(tuple(r for t in threads for r in t.results), failed)


def _metrics(port: int, status: Callable[[], Status]) -> AbstractContextManager[None]:
    if not port:
        return nullcontext()
    try:
        from emmy.fleet.metrics import served
    except ModuleNotFoundError:
        raise UsageError("--metrics-port needs the package prometheus-client: pip install 'emmy[fleet]'") from None
    return served(port, status)


class _Searching(threading.Thread):
    """The search for one kind. `results` and `error` once it has ended."""

    def __init__(self, tuning: Tuning, pool: DevicePool) -> None:
        super().__init__(name=f"emmy-{tuning.target.name}", daemon=True)
        self.tuning, self.pool = tuning, pool
        self.results: list[TuneResult] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.results = self.tuning.on(self.pool)
        except BaseException as e:  # noqa: BLE001  # raised, or told, by the thread that waits
            self.error = e
            if isinstance(e, EmmyError):
                self.tuning.on_event(
                    Note(f"{self.tuning.target.name}: stopped, the rest goes on by the same command: {e}")
                )
