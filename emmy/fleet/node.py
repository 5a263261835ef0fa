"""How a machine becomes part of a cluster: what it has to offer, and the command that starts Ray with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from emmy.errors import NoSuchDevice, UsageError
from emmy.fleet.cluster import RESOURCE
from emmy.measure.factory import gpus_here

PORT = 6379
# Ray hides GPUs from whoever asks it for none; a device is claimed by its lock, as by any other command on the machine.
VARIABLES = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


@dataclass(frozen=True, slots=True)
class Start:
    """A command that starts Ray here, with variables of its environment. `devices`: by target, how many it offers."""

    words: tuple[str, ...]
    devices: Mapping[str, int]
    variables: Mapping[str, str]


def start(
    head: str | None, *, cpu: bool = False, compile_only: bool = False, port: int = PORT, block: bool = True
) -> Start:
    """The command by which this machine joins the cluster at `head`, or with None becomes the head of a new one.

    cpu:          also offer the processor as a device
    compile_only: offer no devices, only cores for compilers

    Raises NoSuchDevice for a node that would offer nothing, UsageError without Ray.
    """
    devices = {} if compile_only else devices_here(cpu, needed=head is not None)
    where = ("--head", f"--port={port}") if head is None else (f"--address={head}",)
    named = json.dumps({RESOURCE + target: n for target, n in devices.items()}, separators=(",", ":"))
    rest = ("--num-gpus=0", f"--resources={named}", "--disable-usage-stats", *(("--block",) if block else ()))
    return Start((ray_command(), "start", *where, *rest), devices, VARIABLES)


def devices_here(cpu: bool, needed: bool) -> dict[str, int]:
    """What can be measured on here, by target. Raises NoSuchDevice when something is needed and there is nothing."""
    found = {"cpu": 1} if cpu else {}
    try:
        return found | {target: len(gpus) for target, gpus in gpus_here().items()}
    except NoSuchDevice as e:
        if needed and not found:
            raise NoSuchDevice(
                f"{e} Here: --cpu offers the processor, --compile-only its cores for compilers."
            ) from None
        return found


def ray_command() -> str:
    """The command `ray` of this Python. Raises UsageError where Ray is not installed."""
    beside = Path(sys.executable).with_name("ray")
    if not beside.exists():
        raise UsageError("a fleet of several machines needs the package ray. Install it: pip install 'emmy[fleet]'")
    return str(beside)


def shown(command: Start) -> str:
    """The command as one types it."""
    from shlex import join

    words: Sequence[str] = ("ray", *command.words[1:])
    return " ".join((*(f"{k}={v}" for k, v in command.variables.items()), join(words)))
