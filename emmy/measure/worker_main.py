"""The worker process: `python -m emmy.measure.worker_main`, started by `emmy.measure.worker` only.

It owns the device, runs candidates' code and may die of it at any moment. Requests and answers go through pipes of
their own; standard output and error belong to whatever the kernels print.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from emmy.ir.target import load_target
from emmy.measure.device import Device
from emmy.measure.job import DeviceFault, Jobs
from emmy.measure.protocol import LOST, Job, Progress, Ready
from emmy.measure.references import References

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Arguments:
    """How a worker is started, as words of its command line."""

    request_fd: int
    answer_fd: int
    progress_fd: int
    parent: int
    threads: int
    target: str
    references: str

    def to_words(self) -> list[str]:
        return [str(getattr(self, name)) for name in self.__slots__]

    @classmethod
    def from_words(cls, words: list[str]) -> Arguments:
        numbers, texts = words[:5], words[5:]
        return cls(*(int(n) for n in numbers), *texts)  # type: ignore[arg-type]  # five numbers, then texts


def main(words: list[str]) -> int:
    """Serves jobs until the parent closes its end."""
    args = Arguments.from_words(words)
    if not die_with_parent(args.parent):
        return 0
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle

    def announce(phase: str, index: int, limit_s: float) -> None:
        os.pwrite(args.progress_fd, Progress(phase, index, time.monotonic() + limit_s).to_bytes(), 0)

    jobs = Jobs(_device(args), announce)
    _send(args.answer_fd, Ready(os.getpid()).to_json())
    gc.freeze()
    gc.disable()  # a collection in a sample would be measured
    with os.fdopen(args.request_fd, encoding="utf-8") as requests:
        for line in requests:
            try:
                report = jobs.run(Job.from_json(line))
            except DeviceFault as e:
                os.write(sys.stderr.fileno(), f"{e}\n".encode())
                return e.exit_code
            except MemoryError as e:  # Python's own memory: operands and answers of the op, which no kernel decides
                os.write(sys.stderr.fileno(), f"out of memory: {e}\n".encode())
                return LOST
            _send(args.answer_fd, report.to_json())
            gc.collect()
    return 0


def _device(args: Arguments) -> Device:
    """The device of the target; of several GPUs the only one that the environment lets this process see."""
    target, references = load_target(args.target), References(Path(args.references))
    if target.is_cpu:
        from emmy.measure.cpu_device import CpuDevice

        return CpuDevice(target, args.threads, references)
    from emmy.measure.cuda_device import CudaDevice  # may import torch

    return CudaDevice(references, args.parent)


def die_with_parent(parent: int) -> bool:
    """Has the system kill this process when the thread that started it ends; False when the parent is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    return os.getppid() == parent


def _send(fd: int, line: str) -> None:
    data = line.encode()
    while data:
        data = data[os.write(fd, data) :]


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # Not sys.exit: threads and destructors that a kernel left behind are not to be run.
    os._exit(code)
