"""The devices of a Ray cluster: pools of them by target, kept up to date as nodes join, leave and die. Knows no searches.

A node says what it has by resources, one a device: `emmy:h200`. For each there is one actor, which holds the device. Binaries
for GPUs are made by tasks on whichever node has a core to spare. The cluster is trusted: Ray runs what it is sent.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import ModuleType, TracebackType
from typing import Any, Self

from emmy import __version__
from emmy.errors import EmmyError, NoSuchDevice, UsageError
from emmy.fleet.actors import ActorMember, Joined, Make, Maker, RayCompiler, measure_here
from emmy.measure.device_pool import SEVERAL, DevicePool
from emmy.records import Device

RESOURCE = "emmy:"  # and a target's name: one of it for each device
NAMESPACE = "emmy"
PATIENCE_S = 300.0  # until a device that does not answer is given up
WAIT_S = 600.0  # that work waits where every device of a kind has gone
START_S = 180.0  # for the first device of a kind to be ready
_LISTENS_S = 10.0  # for a connection to the address of a cluster
_THREADS = 4  # that take answers
_LOOK_S = 1.0  # between two looks at who is there
_AGAIN_S = 30.0  # until a device that was refused, or did not start, is asked again


def ray() -> ModuleType:
    """Ray. Raises UsageError that says what to install."""
    try:
        return import_module("ray")
    except ModuleNotFoundError:
        raise UsageError(
            "a fleet of several machines needs the package ray. Install it: pip install 'emmy[fleet]'"
        ) from None


def connect(address: str) -> bool:
    """Connects this process to the cluster; whether it was not connected before. Raises NoSuchDevice without a cluster."""
    r = ray()
    if r.is_initialized():
        return False
    _refuse_silence(address)
    try:
        r.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError, ImportError) as e:
        said = (str(e).splitlines() or [type(e).__name__])[0].rstrip(".")
        if "ray[client]" in said:
            raise UsageError(f"{address}: {said}. Install it: pip install 'emmy[fleet]'") from None
        raise NoSuchDevice(
            f"no Ray cluster at {address}: {said}. `emmy fleet head` starts one, `emmy fleet node` joins it."
        ) from None
    return True


def _refuse_silence(address: str) -> None:
    """Raises NoSuchDevice where nobody listens at a HOST:PORT; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _LISTENS_S).close()
    except (OSError, OverflowError) as e:
        raise NoSuchDevice(
            f"no Ray cluster at {address}: {e}. `emmy fleet head` starts one, and prints the address that others join."
        ) from None


def connected_devices(address: str) -> dict[str, int]:
    """How many devices of which target the cluster at the address has now. Raises UsageError or NoSuchDevice."""
    own = connect(address)
    try:
        return devices_of(ray().cluster_resources())
    finally:
        if own:
            ray().shutdown()


def devices_of(resources: Mapping[str, float]) -> dict[str, int]:
    """How many devices of which target a cluster's or a node's resources name."""
    return {k.removeprefix(RESOURCE): int(n) for k, n in sorted(resources.items()) if k.startswith(RESOURCE)}


@dataclass(slots=True, eq=False)
class _Kind:
    """One target: its pool, and the actors that are still starting."""

    target: str
    first: Future[Device] = field(default_factory=Future)
    pool: DevicePool | None = None
    compiler: RayCompiler | None = None
    starting: dict[Any, Future[Joined]] = field(default_factory=dict)
    refusal: str = ""  # the last
    rest_until_s: float = 0.0  # after it


class Cluster:
    """A connection to a cluster whose devices are gathered into pools. Use it as a context manager.

    make:       makes the measurer of a device, on the device's node
    patience_s: until a device that does not answer is given up; ten times as long for a race
    wait_s:     how long work waits where no device of its kind is left
    say:        told of devices that join, leave and are refused, in sentences

    Raises UsageError without Ray, NoSuchDevice without a cluster.
    """

    def __init__(
        self,
        address: str,
        *,
        threads: int = 1,
        make: Make = measure_here,
        patience_s: float = PATIENCE_S,
        wait_s: float = WAIT_S,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._own = connect(address)
        self._maker = Maker(make, threads)
        self._patience_s, self._wait_s, self._say = patience_s, wait_s, say
        self._kinds: dict[str, _Kind] = {}
        self._lock = threading.RLock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="emmy-answers")
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._watched, name="emmy-fleet", daemon=True)
        self._watch.start()

    def devices(self) -> dict[str, int]:
        """How many devices of which target the cluster has now."""
        return devices_of(ray().cluster_resources())

    def pool(self, target: str) -> DevicePool:
        """The devices of a target, now and later; closed with the cluster. Raises NoSuchDevice when none gets ready."""
        with self._lock:
            kind = self._kinds.setdefault(target, _Kind(target))
        self._look()
        until_s = time.monotonic() + START_S
        while not kind.first.done() and time.monotonic() < until_s:
            time.sleep(0.1)
            self._look()
        if not kind.first.done():
            raise NoSuchDevice(
                f"{target}: none of the cluster's {self.devices().get(target, 0)} was ready after {START_S:.0f} s"
                f"{kind.refusal and f': {kind.refusal}'}. `emmy fleet node --head ADDRESS`, on a machine that has some, joins them."
            )
        assert kind.pool is not None
        return kind.pool

    def close(self) -> None:
        """Gives all devices back and leaves the cluster."""
        self._over.set()
        self._watch.join()
        for kind in self._kinds.values():
            if kind.pool is not None:
                kind.pool.close()
            for actor in kind.starting:
                ray().kill(actor)
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._own:
            ray().shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # ------------------------------------------------------------ who is there
    def _watched(self) -> None:
        while not self._over.wait(_LOOK_S):
            self._look()

    def _look(self) -> None:
        """Asks for devices that are new, lets those in that are ready, and out those whose node has gone."""
        with self._lock:
            try:
                alive = {n["NodeID"]: n["Resources"] for n in ray().nodes() if n["Alive"]}
            except (ConnectionError, RuntimeError, ray().exceptions.RayError) as e:
                self._say(f"the cluster does not answer: {e}")
                return
            for kind in self._kinds.values():
                there = sum(devices_of(r).get(kind.target, 0) for r in alive.values())
                self._let_out(kind, set(alive))
                self._let_in(kind)
                self._ask(kind, there)

    def _let_out(self, kind: _Kind, alive: set[str]) -> None:
        for member in kind.pool.members if kind.pool else ():
            if isinstance(member, ActorMember) and member.joined.node not in alive and kind.pool:
                kind.pool.leave(member, "its node has left the cluster")

    def _ask(self, kind: _Kind, there: int) -> None:
        asked = len(kind.starting) + (len(kind.pool.members) if kind.pool else 0)
        if time.monotonic() < kind.rest_until_s:
            return
        for _ in range(there - asked):
            actor, joined = self._maker.start(kind.target, {RESOURCE + kind.target: 1})
            kind.starting[actor] = joined
        for actor in list(kind.starting)[: max(0, asked - there)]:  # it waits for a node that has gone
            ray().kill(actor)
            del kind.starting[actor]

    def _let_in(self, kind: _Kind) -> None:
        for actor, future in list(kind.starting.items()):
            if not future.done():
                continue
            del kind.starting[actor]
            if (why := self._refused(kind, future)) is not None:
                kind.rest_until_s, kind.refusal = time.monotonic() + _AGAIN_S, why
                self._say(f"{kind.target}: a device does not join: {why}")
                ray().kill(actor)
                continue
            joined = future.result()
            if kind.pool is None:
                kind.compiler = RayCompiler(kind.target, self._threads) if joined.compiles else None
                kind.pool = self._new_pool(kind, joined)
            kind.pool.join(ActorMember(actor, joined, kind.compiler, self._threads))
            self._say(f"{kind.target} at {joined.place} joined")
            if not kind.first.done():
                kind.first.set_result(joined.device)

    def _new_pool(self, kind: _Kind, joined: Joined) -> DevicePool:
        return DevicePool(
            replace(joined.device, uuid_hash=SEVERAL),
            prepare=kind.compiler.begin if kind.compiler else None,
            patience_s=self._patience_s,
            wait_s=self._wait_s,
            say=self._say,
        )

    def _refused(self, kind: _Kind, future: Future[Joined]) -> str | None:
        """Why a device that has started cannot join; None when it can."""
        error = future.exception()
        if error is not None:
            cause = getattr(error, "cause", None) or error
            return str(cause) if isinstance(cause, EmmyError) else f"{type(cause).__name__}: {cause}"
        joined = future.result()
        if joined.version != __version__:
            return f"{joined.place} has Emmy {joined.version}, this is {__version__}: one schedule may be two kernels"
        if kind.pool is not None and joined.device.product != kind.pool.device.product:
            return f"{joined.place} has {joined.device.product}, the others {kind.pool.device.product}"
        return None
