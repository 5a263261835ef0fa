"""A GPU's circumstances, as its management library tells them: clocks, temperature, power, throttling, other processes.

Everything is optional: where the library or a reading is missing, nothing is known and nothing is claimed.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache

# nvml.h
_SM, _MEMORY = 1, 2  # nvmlClockType_t
_GPU_SENSOR = 0
_SLOWDOWN = 0x8 | 0x20 | 0x40 | 0x80  # hardware, software thermal, hardware thermal, hardware power brake
_MOST_PROCESSES = 64
_COMPUTE_MODES = ("default", "exclusive_thread", "prohibited", "exclusive_process")  # nvmlComputeMode_t


@dataclass(frozen=True, slots=True)
class Settings:
    """How a GPU is set, and how many processes other than the asking one compute on it; None: not known."""

    compute_mode: str | None
    persistence: bool | None
    others: int | None


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


@cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        return library if library.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None


def driver_version() -> str:
    """The driver's version, such as "580.159.04"; "" when it is not known."""
    library, text = _library(), ctypes.create_string_buffer(80)
    if library is None or library.nvmlSystemGetDriverVersion(text, len(text)) != 0:
        return ""
    return text.value.decode()


class Meter:
    """Reads one GPU. `uuid` as in `emmy.runtime.cuda_driver.Gpu`; `own` are the processes that are not others."""

    def __init__(self, uuid: str, own: tuple[int, ...] = ()) -> None:
        self._library, self._own = _library(), {os.getpid(), *own}
        self._device = ctypes.c_void_p()
        if self._library is not None:
            found = self._library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(self._device))
            self._library = self._library if found == 0 else None

    def read(self) -> dict[str, float]:
        """sm_mhz, memory_mhz, temperature_c, power_w, slowdown (1: too hot, or braked by the hardware), others (other
        processes that compute on the GPU); what is not to be had is left out. A call takes a millisecond or so.
        """
        facts: dict[str, float] = {}

        def note(name: str, value: int | None, scale: float = 1.0) -> None:
            if value is not None:
                facts[name] = value * scale

        note("sm_mhz", self._number("nvmlDeviceGetClockInfo", _SM))
        note("memory_mhz", self._number("nvmlDeviceGetClockInfo", _MEMORY))
        note("temperature_c", self._number("nvmlDeviceGetTemperature", _GPU_SENSOR))
        note("power_w", self._number("nvmlDeviceGetPowerUsage"), 1e-3)
        reasons = self._number("nvmlDeviceGetCurrentClocksThrottleReasons")
        note("slowdown", None if reasons is None else int(bool(reasons & _SLOWDOWN)))
        note("others", self._others())
        return facts

    def settings(self) -> Settings:
        """What an administrator sets, and who is there. Unlike `read` for processes that have no work on the GPU."""
        mode, persistence = self._number("nvmlDeviceGetComputeMode"), self._number("nvmlDeviceGetPersistenceMode")
        pids = self._pids()
        return Settings(
            _COMPUTE_MODES[mode] if mode is not None and mode < len(_COMPUTE_MODES) else None,
            None if persistence is None else bool(persistence),
            None if pids is None else len(pids - self._own),
        )

    def _number(self, name: str, *args: int) -> int | None:
        if self._library is None:
            return None
        out = ctypes.c_ulonglong()  # wide enough for every reading used here
        try:
            status = getattr(self._library, name)(self._device, *args, ctypes.byref(out))
        except AttributeError:  # an older library
            return None
        return out.value if status == 0 else None

    def _others(self) -> int | None:
        """Other processes that compute on the GPU; None when the list does not show this process either.

        A container may see the numbers of another namespace, or nobody's: then nothing can be told apart.
        """
        pids = self._pids()
        return len(pids - self._own) if pids is not None and pids & self._own else None

    def _pids(self) -> set[int] | None:
        """The processes that compute on the GPU, by the numbers that this process is shown; None when not told."""
        if self._library is None:
            return None
        count, listed = ctypes.c_uint(_MOST_PROCESSES), (_Process * _MOST_PROCESSES)()
        try:
            status = self._library.nvmlDeviceGetComputeRunningProcesses_v3(self._device, ctypes.byref(count), listed)
        except AttributeError:
            return None
        return {p.pid for p in listed[: count.value]} if status == 0 else None
