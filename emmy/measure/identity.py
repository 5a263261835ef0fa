"""Which device this is, as rows record it. Tells machines apart without naming them."""

from __future__ import annotations

import hashlib
import platform
import uuid
from pathlib import Path

from emmy import config, hostcc
from emmy.errors import CompileError, NoSuchDevice
from emmy.ir.target import Target
from emmy.measure import nvml
from emmy.records import Device
from emmy.runtime.cuda_driver import Gpu


def cpu_device(target: Target) -> Device:
    """This machine's processor under the target's name. Raises NoSuchDevice when there is no C compiler."""
    try:
        toolkit = hostcc.version(config.c_compiler())
    except CompileError as e:
        raise NoSuchDevice(str(e)) from None
    return Device(
        target=target.name,
        product=target.product,
        uuid_hash=hashlib.sha256(f"{_machine()}\n{target.product}".encode()).hexdigest()[:16],
        driver=f"{platform.system()} {platform.release()}",
        toolkit=toolkit,
    )


def gpu_device(gpu: Gpu, target: str, toolkit: str) -> Device:
    """A GPU under its target's name. The hash is of its uuid alone: the card is the same in another machine."""
    return Device(
        target=target,
        product=gpu.product,
        uuid_hash=hashlib.sha256(gpu.uuid.encode()).hexdigest()[:16],
        driver=f"{nvml.driver_version() or 'driver unknown'}, CUDA {gpu.cuda}",
        toolkit=toolkit,
    )


def _machine() -> str:
    """Something that stays the same on this machine and differs on others."""
    for path in (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id")):
        try:
            if text := path.read_text(encoding="ascii").strip():
                return text
        except (OSError, UnicodeDecodeError):
            continue
    return f"{uuid.getnode():x}"
