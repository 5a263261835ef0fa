"""Devices for trying out a fleet without any: a node says that it has them, and they answer by formula.

with Cluster(address, make=fake_here) as cluster: ...
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from emmy.fleet.actors import Sent, measure_here
from emmy.ir.target import load_target
from emmy.measure.compile_pool import Builder, CompilePool, NotBuilt
from emmy.measure.fake import FakeMeasurer
from emmy.measure.measurer import Look, Measurer
from emmy.measure.remote_builder import RemoteBuilder
from emmy.records import Candidate, Measurement


def fake_here(target: str, threads: int, sent: Callable[[Builder], Sent], delay_s: float = 0.01) -> Measurer:
    """A card that answers by formula, after `delay_s`, as any other of its target does; a CPU measures for real."""
    if load_target(target).is_cpu:
        return measure_here(target, threads, sent)
    name = f"process {os.getpid()}"
    return FakeMeasurer(target, delay_s=delay_s, fault_share=0.05, product=f"fake {target}", name=name)


def fake_that_loads(target: str, threads: int, sent: Callable[[Builder], Sent]) -> Measurer:
    """The same, of candidates that were compiled: a row has the digest and the facts of the binary that reached the device."""
    remote = RemoteBuilder(load_target(target), 1)
    return _Loads(target, CompilePool(sent(remote), 1, remote.close))


class _Loads(FakeMeasurer):
    def __init__(self, target: str, pool: CompilePool) -> None:
        super().__init__(target, product=f"fake {target}", name=f"process {os.getpid()}")
        self._pool = pool

    def stream(
        self, candidates: Sequence[Candidate], best_us: float | None = None, look: Look | None = None
    ) -> Iterator[Measurement]:
        for done, row in zip(self._pool.compile(candidates), super().stream(candidates, best_us), strict=True):
            made = done.result
            if isinstance(made, NotBuilt):
                yield replace(row, status=made.status, samples_us=(), message=made.message)
            else:
                size = {"plan_bytes": float(made.library.stat().st_size)}
                yield replace(row, source_digest=made.digest, static={**made.static, **size}, compile_s=done.compile_s)

    def close(self) -> None:
        self._pool.close()
