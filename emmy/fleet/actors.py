"""What runs on the nodes of a cluster: an actor that holds a device, a task that compiles; and the head's ends of both."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar

from emmy import __version__
from emmy.codegen.gpu_build import kept
from emmy.errors import CompileError, DeviceBusy, EmmyError, NoSuchDevice, PlanError
from emmy.hostcc import CompilerKilled
from emmy.ir.ops import parse_op
from emmy.ir.roofline import roofline_us
from emmy.ir.target import Target, load_target
from emmy.measure.compile_pool import Builder, Built, Compiled, CompilePool, NotBuilt, compiled
from emmy.measure.measurer import Heat, Look, Measurer, Ready
from emmy.measure.member import Member, MemberLost
from emmy.measure.remote_builder import RemoteBuilder
from emmy.records import Candidate, Device, Measurement, Status

T = TypeVar("T")


_RAISED: Mapping[Status, type[EmmyError]] = {
    "constraints": PlanError,
    "device_lost": CompilerKilled,
}  # what gives such a status


# ---------------------------------------------------------------- on the device's node
class Sent:
    """A builder that takes binaries made elsewhere, and makes the others by `build`."""

    def __init__(self, build: Builder) -> None:
        self._build = build
        self._sent: dict[Candidate, tuple[Built | NotBuilt, bytes]] = {}

    def put(self, candidate: Candidate, result: Built | NotBuilt, binary: bytes) -> None:
        self._sent[candidate] = result, binary

    def __call__(self, candidate: Candidate) -> Built:
        """Raises CompileError, CompilerKilled or PlanError as the compiler elsewhere did."""
        if candidate not in self._sent:
            return self._build(candidate)
        result, binary = self._sent.pop(candidate)
        if isinstance(result, NotBuilt):
            raise _RAISED.get(result.status, CompileError)(result.message)
        return replace(result, library=kept(binary, ".plan"))


# (target, threads, what makes binaries of it into what else takes those sent) -> the measurer of a device that is free
Make = Callable[[str, int, Callable[[Builder], Sent]], Measurer]


def measure_here(name: str, threads: int, sent: Callable[[Builder], Sent]) -> Measurer:
    """The measurer of a device of this machine that nobody holds. Raises NoSuchDevice or DeviceBusy."""
    target = load_target(name)

    def floor_us(op: str) -> float:
        known = parse_op(op)
        return roofline_us(known.work(), target, known.program().dtype, threads).time_us

    if target.is_cpu:
        from emmy.measure.cpu import CpuMeasurer

        return CpuMeasurer(target, threads=threads, floor_us=floor_us)
    return _free_gpu(target, floor_us, sent)


def _free_gpu(target: Target, floor_us: Callable[[str], float], sent: Callable[[Builder], Sent]) -> Measurer:
    from emmy.measure.cuda import CudaMeasurer
    from emmy.measure.factory import gpus_here

    found, busy = gpus_here().get(target.name, ()), ""
    remote = RemoteBuilder(target, 1)
    pool = CompilePool(sent(remote), 1, remote.close)
    for gpu in found:
        try:
            return CudaMeasurer(target, gpu=gpu, pool=pool, floor_us=floor_us)
        except DeviceBusy as e:
            busy = str(e)
    pool.close()
    if busy:
        raise DeviceBusy(busy)
    raise NoSuchDevice(f"{platform.node()} has no {target.name}, though it names one")


@dataclass(frozen=True, slots=True)
class Joined:
    """What an actor says of itself. `compiles`: whether it takes binaries that were made elsewhere."""

    device: Device
    place: str
    node: str
    version: str
    compiles: bool


class Holder:
    """Holds a device for as long as it lives: the body of an actor."""

    def __init__(self, make: Make, target: str, threads: int) -> None:
        self._make, self._target, self._threads = make, target, threads
        self._sent: Sent | None = None

    def _taking(self, build: Builder) -> Sent:
        self._sent = Sent(build)
        return self._sent

    def join(self) -> Joined:
        """Takes a device. Raises DeviceBusy or NoSuchDevice."""
        import ray

        self._measurer = self._make(self._target, self._threads, self._taking)
        node = ray.get_runtime_context().get_node_id()
        device = self._measurer.device
        place = f"{platform.node()} ({device.uuid_hash[:8]})"
        return Joined(device, place, node, __version__, self._sent is not None)

    def measure(
        self, candidate: Candidate, best_us: float | None, made: Compiled | None, binary: bytes, passed_us: float | None
    ) -> Measurement:
        """The row. `made`, `binary`: what came of compiling it elsewhere; `passed_us`: its prediction, when it is passed over."""
        if self._sent is not None and made is not None:
            self._sent.put(candidate, made.result, binary)
        look: tuple[Look, ...] = () if passed_us is None else (lambda schedule, static, known_us: passed_us,)
        (row,) = self._measurer.stream([candidate], best_us, *look)
        return replace(row, compile_s=made.compile_s) if made is not None else row

    def heat(self, op: str, schedules: Sequence[str], rivals: Sequence[str], rounds: int) -> Heat:
        return self._measurer.heat(op, schedules, rivals, rounds)


# ---------------------------------------------------------------- on any node
@cache
def _remote_builder(target: str) -> RemoteBuilder:
    """One a process of Ray's, which keeps it: a compiler that crashes or hangs costs one candidate."""
    return RemoteBuilder(load_target(target), 1)


def compile_candidate(target: str, candidate: Candidate) -> tuple[Compiled, bytes]:
    """What came of compiling it, and the plan file."""
    done = compiled(_remote_builder(target), candidate)
    return done, done.result.library.read_bytes() if isinstance(done.result, Built) else b""


# ---------------------------------------------------------------- on the head
@dataclass(frozen=True, slots=True)
class Maker:
    """Starts actors. `make` and `threads`: how each makes its measurer."""

    make: Make
    threads: int

    def start(self, target: str, resources: dict[str, float]) -> tuple[Any, Future[Joined]]:
        """An actor that waits for a node with these resources, and what it says once it holds its device."""
        import ray

        holder = ray.remote(num_cpus=0, max_restarts=0, resources=resources)(Holder)
        actor = holder.remote(self.make, target, self.threads)
        return actor, actor.join.remote().future()


class RayCompiler:
    """Compiles by tasks, wherever a core is free. Only what was made is told to the head; binaries go from node to node.

    threads: where what follows from an answer happens; in Ray's own, a call of Ray would wait for itself
    """

    def __init__(self, target: str, threads: Executor) -> None:
        import ray

        self._threads = threads

        self._task = ray.remote(num_cpus=1, num_returns=2, max_retries=1, scheduling_strategy="SPREAD")(
            compile_candidate
        )
        self._target = target
        self._made: dict[Candidate, tuple[Compiled, object]] = {}

    def begin(self, candidates: Sequence[Candidate], ready: Ready) -> None:
        """As `Measurer.prepare`."""
        for candidate in candidates:
            made, binary = self._task.remote(self._target, candidate)
            done = partial(self._done, candidate, binary, ready)
            made.future().add_done_callback(partial(self._threads.submit, done))

    def take(self, candidate: Candidate) -> tuple[Compiled | None, object]:
        """What came of compiling it, once, and a reference to the binary; None where it is to be made on the device's node."""
        return self._made.pop(candidate, (None, b""))

    def _done(self, candidate: Candidate, binary: object, ready: Ready, future: Future[Compiled]) -> None:
        error = future.exception()
        if error is None:
            self._made[candidate] = future.result(), binary
        ready(candidate)  # what was lost with a node is made where it is measured


class ActorMember(Member):
    """The head's end of an actor that holds a device. `threads`: see RayCompiler."""

    def __init__(self, actor: Any, joined: Joined, compiler: RayCompiler | None, threads: Executor) -> None:
        self._actor, self.joined, self._compiler, self._threads = actor, joined, compiler, threads

    @property
    def device(self) -> Device:
        return self.joined.device

    @property
    def place(self) -> str:
        return self.joined.place

    def measure(self, candidate: Candidate, best_us: float | None, look: Look | None) -> Future[Measurement]:
        made, binary = self._compiler.take(candidate) if self._compiler else (None, b"")
        passed_us = None
        if look is not None and made is not None and isinstance(made.result, Built):
            passed_us = look(candidate.schedule, made.result.static, best_us)
        again = partial(self._actor.measure.remote, candidate, best_us, None, b"", None)
        call = partial(self._actor.measure.remote, candidate, best_us, made, binary, passed_us)
        return _answer(self._threads, call, again)

    def heat(self, op: str, schedules: Sequence[str], rivals: Sequence[str], rounds: int) -> Future[Heat]:
        return _answer(self._threads, partial(self._actor.heat.remote, op, schedules, rivals, rounds))

    def close(self) -> None:
        import ray

        with suppress(ray.exceptions.RayError, RuntimeError, ConnectionError):
            ray.kill(self._actor)


def _answer(threads: Executor, call: Callable[[], Any], again: Callable[[], Any] | None = None) -> Future[Any]:
    """The call's answer, given in one of the threads; MemberLost when the actor, its node or its device has gone.

    again: called instead where what the call was to bring along was lost with another node
    """
    import ray

    mine: Future[Any] = Future()

    def lost(error: BaseException) -> None:
        mine.set_exception(MemberLost((str(error).splitlines() or [type(error).__name__])[0]))

    def done(theirs: Future[Any]) -> None:
        error = theirs.exception()
        if isinstance(error, ray.exceptions.ObjectLostError) and again is not None:
            _answer(threads, again).add_done_callback(partial(_pass_on, mine))
        elif isinstance(error, ray.exceptions.RayActorError | ray.exceptions.ObjectLostError | NoSuchDevice):
            lost(error)
        else:
            _pass_on(mine, theirs)

    try:
        call().future().add_done_callback(lambda theirs: threads.submit(done, theirs) and None)
    except (ray.exceptions.RayError, ConnectionError) as e:
        lost(e)
    return mine


def _pass_on(mine: Future[Any], theirs: Future[Any]) -> None:
    error = theirs.exception()
    if error is not None:
        mine.set_exception(error)
    else:
        mine.set_result(theirs.result())
