"""Tuning spaces measured in full by others, to replay a search against: `load("gemm.rtx3090")`, or a file of one's own
(`files.py`). Knows no strategy.

Where the tables come from and under which licence: README.md and LICENSE beside this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from emmy.errors import UsageError, meant
from emmy.workloads.recorded.files import is_path, read_recording

_SUFFIX = ".parquet"


@dataclass(frozen=True, slots=True, eq=False)
class RecordedTable:
    """One kernel's whole space on one GPU: row i has `values[i]` for `parameters` and took `time_ms[i]`."""

    name: str
    parameters: tuple[str, ...]
    values: NDArray[np.int64]  # [n, len(parameters)]
    time_ms: NDArray[np.float64]  # [n]; NaN where the configuration failed
    status: tuple[str, ...]  # "ok", or the kind of failure as its tuner named it

    @property
    def best_ms(self) -> float:
        """The fastest configuration's time: what a search can reach at most."""
        return float(np.nanmin(self.time_ms))


@cache
def names() -> tuple[str, ...]:
    """The recorded spaces there are, sorted: `kernel.gpu`."""
    files = resources.files(__name__).iterdir()
    return tuple(sorted(f.name.removesuffix(_SUFFIX) for f in files if f.name.endswith(_SUFFIX)))


@cache
def load(name: str) -> RecordedTable:
    """The table of that name, or in the file of that path, in the order it was recorded.

    Raises UsageError for an unknown name or a file that is not there, DataError for a file of another kind.
    """
    if is_path(name):
        found = read_recording(Path(name))
        return _table(name, found.parameters, found.values, found.time_ms, found.status)
    if name not in names():
        raise UsageError(f"no recorded space is named {name!r}.{meant(name, names())} Recorded: {', '.join(names())}")
    import duckdb  # only the tuner needs it

    with resources.as_file(resources.files(__name__) / f"{name}{_SUFFIX}") as path, duckdb.connect() as db:
        columns: dict[str, NDArray[np.generic]] = db.execute("select * from read_parquet(?)", [str(path)]).fetchnumpy()
    time_ms = np.ma.filled(columns.pop("time_ms").astype(np.float64), np.nan)
    status = tuple(str(s) for s in columns.pop("status"))
    values = np.stack([np.asarray(column, dtype=np.int64) for column in columns.values()], axis=1)
    return _table(name, tuple(columns), values, time_ms, status)


def _table(
    name: str,
    parameters: tuple[str, ...],
    values: NDArray[np.int64],
    time_ms: NDArray[np.float64],
    status: tuple[str, ...],
) -> RecordedTable:
    for array in (values, time_ms):
        array.setflags(write=False)  # the table is cached and shared
    return RecordedTable(name, parameters, values, time_ms, status)
