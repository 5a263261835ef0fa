"""A tuner process for tests to kill and interrupt: `emmy tune` with a measurer that needs no device.

python fake_tune.py DELAY_S EMMY-TUNE-ARGUMENTS...
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from emmy import api
from emmy.cli import main
from emmy.ir.target import Target
from emmy.measure.fake import FakeMeasurer
from emmy.measure.measurer import Measurer


def run(delay_s: float, arguments: list[str]) -> int:
    @contextmanager
    def fake_device(
        target: Target, threads: int, *, wait: bool = False, measurer: Measurer | None = None
    ) -> Iterator[Measurer]:
        yield FakeMeasurer(target.name, delay_s=delay_s, fault_share=0.1, threads=threads)

    api.device = fake_device
    return main(["tune", *arguments])


if __name__ == "__main__":
    sys.exit(run(float(sys.argv[1]), sys.argv[2:]))
