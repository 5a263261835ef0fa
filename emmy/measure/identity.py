"""Which device this is, as rows record it. Tells machines apart without naming them."""

from __future__ import annotations

import hashlib
import platform
import subprocess
import uuid
from pathlib import Path

from emmy import config
from emmy.errors import NoSuchDevice
from emmy.ir.target import Target
from emmy.records import Device


def cpu_device(target: Target) -> Device:
    """This machine's processor under the target's name. Raises NoSuchDevice when there is no C compiler."""
    return Device(
        target=target.name,
        product=target.product,
        uuid_hash=hashlib.sha256(f"{_machine()}\n{target.product}".encode()).hexdigest()[:16],
        driver=f"{platform.system()} {platform.release()}",
        toolkit=_compiler(config.c_compiler()),
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


def _compiler(command: str) -> str:
    """Its name and version, "gcc 12.2.0"."""
    try:
        done = subprocess.run(
            [command, "-dumpfullversion"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as e:
        raise NoSuchDevice(f"the C compiler {command!r} does not run: {e}. Install gcc or name one in EMMY_CC.") from e
    return f"{Path(command).name} {done.stdout.strip()}"
