"""Which device this is, as rows record it. Tells machines apart without naming them."""

from __future__ import annotations

import hashlib
import platform
import re
import uuid
from functools import cache
from pathlib import Path

from emmy import config, hostcc
from emmy.errors import CompileError, NoSuchDevice
from emmy.ir.target import Target
from emmy.measure import nvml
from emmy.records import Device, Measurement
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


_HASH = re.compile(r"[0-9a-f]{16}")
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.IGNORECASE)


def gives_away(row: Measurement) -> str:
    """What in a row would name a machine or its user to whoever gets it; "" when nothing does."""
    if not _HASH.fullmatch(row.device.uuid_hash):
        return f"its device is {row.device.uuid_hash!r}, which is no hash"
    return names_machine("\n".join((row.to_json(), row.message)))  # JSON escapes what a path may hold


def names_machine(text: str) -> str:
    """What in a text names this machine, its user, or a device; "" when nothing does."""
    if found := _UUID.search(text):
        return f"it holds the uuid {found[0][:4]}..."
    return next((f"it holds {what}" for what, pattern in _own_names() if pattern.search(text)), "")


@cache
def _own_names() -> tuple[tuple[str, re.Pattern[str]], ...]:
    names = {
        "this machine's name": platform.node(),
        "the user's folder": str(Path.home()),
        "this machine's id": _machine(),
    }
    told = {what: name for what, name in names.items() if len(name) > 3 and name not in ("localhost", "/root")}
    return tuple((what, re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")) for what, name in told.items())
