"""Recorded spaces that lie in files: Kernel Tuner's caches and T4 results, as `RecordedTable`s. Knows no strategy.

Kernel Tuner's cache is JSON with a header and one entry a configuration; a failure is a text in the place of the time. While a
tuning goes on the file lacks its closing brackets. T4 is the results format of the FAIR auto-tuning schema (version 1.0.0,
shipped with Kernel Tuner 1.5.0). Either may be gzipped.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from emmy.errors import DataError, UsageError

SUFFIXES = (".json", ".json.gz")
_FACTORS = {
    "ms": 1.0,
    "milliseconds": 1.0,
    "s": 1e3,
    "seconds": 1e3,
    "us": 1e-3,
    "microseconds": 1e-3,
    "ns": 1e-6,
    "": 1.0,
}


@dataclass(frozen=True, slots=True)
class Recording:
    """What a file holds, row by row. `time_ms` is NaN where the configuration failed; `status` says how."""

    parameters: tuple[str, ...]
    values: NDArray[np.int64]  # [n, len(parameters)]
    time_ms: NDArray[np.float64]
    status: tuple[str, ...]


def is_path(name: str) -> bool:
    """Whether the name of a space is a file's."""
    return "/" in name or name.endswith(SUFFIXES)


def read_recording(path: Path) -> Recording:
    """The recording in a file of either format. Raises UsageError when there is no such file, DataError naming what is wrong.

    Settings that are no whole numbers are numbered by rank: values by size, texts by the alphabet.
    """
    try:
        raw = gzip.decompress(path.read_bytes()) if path.name.endswith(".gz") else path.read_bytes()
        data = _parsed(raw.decode())
    except FileNotFoundError:
        raise UsageError(
            f"{path}: no such file; name a recorded space, or a cache of Kernel Tuner, or T4 results"
        ) from None
    except (OSError, EOFError, UnicodeDecodeError, ValueError) as e:
        raise DataError(f"{path}: cannot be read as JSON: {e}") from None
    try:
        if isinstance(data, dict) and "cache" in data:
            rows = [_of_cache(row, data) for row in data["cache"].values()]
            names = tuple(map(str, data["tune_params_keys"]))
        elif isinstance(data, dict) and "results" in data:
            rows = [_of_t4(row) for row in data["results"]]
            names = tuple(map(str, data["results"][0]["configuration"])) if rows else ()
        else:
            raise DataError(f"{path}: neither a cache of Kernel Tuner (key 'cache') nor T4 results (key 'results')")
        columns = [_whole([settings[name] for settings, _, _ in rows]) for name in names]
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise DataError(f"{path}: an entry lacks or mistypes {e}") from None
    if not rows or not names:
        raise DataError(f"{path}: no configuration is recorded")
    time_ms = np.array([t for _, t, _ in rows], dtype=np.float64)
    return Recording(names, np.stack(columns, axis=1), time_ms, tuple(s for _, _, s in rows))


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:  # a cache that was left open
        return json.loads(text.rstrip().rstrip(",") + "}\n}")


def _of_cache(row: Mapping[str, object], header: Mapping[str, object]) -> tuple[Mapping[str, object], float, str]:
    objective = header.get("objective", "time")
    if objective not in ("time", ["time"]):
        raise ValueError(f"objective {objective!r}: only times can be replayed")
    failed = row.get("__error__", row.get("time"))
    if isinstance(failed, str):
        return row, np.nan, failed
    time = row["time"]
    return (row, float(time), "ok") if isinstance(time, int | float) and time > 0 else (row, np.nan, "no time")


def _of_t4(row: Mapping[str, object]) -> tuple[Mapping[str, object], float, str]:
    settings, validity, measured = row["configuration"], str(row["invalidity"]), row.get("measurements", ())
    assert isinstance(settings, dict) and isinstance(measured, list | tuple)
    if validity != "correct":
        return settings, np.nan, validity
    found = next((m for m in measured if m["name"] == "time"), None)
    if found is None or not isinstance(found["value"], int | float) or found["value"] <= 0:
        return settings, np.nan, "no time"
    return settings, float(found["value"]) * _FACTORS[str(found.get("unit", ""))], "ok"


def _whole(values: Sequence[object]) -> NDArray[np.int64]:
    """The settings as whole numbers, unchanged where they are some."""
    numbers = [float(v) for v in values if isinstance(v, int | float)]
    if len(numbers) < len(values):
        return np.unique([str(v) for v in values], return_inverse=True)[1].astype(np.int64)
    if all(x.is_integer() for x in numbers):
        return np.array(numbers, dtype=np.int64)
    return np.unique(numbers, return_inverse=True)[1].astype(np.int64)
