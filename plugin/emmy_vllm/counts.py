"""How often kernels served and how often stock did, counted in memory that another process can read, and shown in vLLM's metrics.

The worker's C++ counts; the process that answers /metrics reads. Both know the id of the engine (VllmConfig.instance_id), which
names the folder they meet in. Knows neither vLLM nor torch.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import mmap
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Metric

_HEAD = struct.Struct("<q")  # bytes of the description that follows, which JSON pads to whole numbers of eight
NAME = "vllm:emmy_calls"


class Counts:
    """Numbers of calls left to stock, then of each range, of one table in this process."""

    def __init__(self, instance: str, op: str, ranges: Sequence[str]) -> None:
        """`ranges`: the rows of each, "" where it is not counted. Raises OSError when there is no room for the file."""
        text = json.dumps({"op": op, "ranges": list(ranges)}).encode()
        text += b" " * (-len(text) % 8)
        where = folder(instance)
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(".counts", f"{os.getpid()}-", where)
        self._path, self._n = Path(name), len(ranges) + 1
        with os.fdopen(descriptor, "r+b") as file:
            file.write(_HEAD.pack(len(text)) + text + bytes(8 * self._n))
            file.flush()
            self._memory = mmap.mmap(file.fileno(), 0)
        self.array = (ctypes.c_int64 * self._n).from_buffer(self._memory, _HEAD.size + len(text))
        atexit.register(self._path.unlink, missing_ok=True)

    def values(self) -> tuple[int, ...]:
        return tuple(self.array)

    def clear(self) -> None:
        ctypes.memset(self.array, 0, 8 * self._n)


def folder(instance: str) -> Path:
    """Where processes of one engine meet; it may not exist."""
    return Path(tempfile.gettempdir()) / f"emmy-vllm-{os.getuid()}-{instance}"


def read(instance: str) -> Iterator[tuple[str, str, int]]:
    """(op, rows, calls) of every range of every table of an engine's processes; rows "" are those left to stock."""
    for path in sorted(folder(instance).glob("*.counts")):
        with suppress(OSError, ValueError, struct.error):  # a process that ends takes its file along
            data = path.read_bytes()
            (size,) = _HEAD.unpack_from(data)
            said = json.loads(data[_HEAD.size : _HEAD.size + size])
            left, *served = struct.unpack_from(f"<{1 + len(said['ranges'])}q", data, _HEAD.size + size)
            yield said["op"], "", left
            yield from ((said["op"], rows, n) for rows, n in zip(said["ranges"], served, strict=True) if rows)


@cache
def export(instance: str) -> None:
    """Shows the counts of an engine in prometheus_client's registry, which vLLM answers /metrics from, as vllm:emmy_calls."""
    _collector().instances.append(instance)
    atexit.register(shutil.rmtree, folder(instance), ignore_errors=True)


@cache
def _collector() -> _Collector:
    from prometheus_client import REGISTRY

    found = _Collector()
    REGISTRY.register(found)
    return found


class _Collector:
    def __init__(self) -> None:
        self.instances: list[str] = []

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily

        found: dict[tuple[str, str], int] = {}
        for instance in self.instances:
            for op, rows, calls in read(instance):
                found[op, rows] = found.get((op, rows), 0) + calls
        family = CounterMetricFamily(
            NAME,
            "Calls of products that Emmy's plugin took over, by who served them; replays of CUDA graphs are no calls",
            labels=("served_by", "op", "rows"),
        )
        for (op, rows), calls in found.items():
            family.add_metric(("emmy" if rows else "stock", op, rows), calls)
        yield family
