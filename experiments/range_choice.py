"""What it costs to choose a plan by the range of M, and whether every range answers right at both its ends.

python experiments/range_choice.py 'matmul:m(1..4096)x4096x3840:f16:nk' --gpu h200       the stored table
python experiments/range_choice.py 'matmul:m(1..64)x48x32:f32' --table 'm 1..8: | m 9..64: k0.C/atom(fma,4,16,1,8)'

Prints a line for each end of each range, then nanoseconds of a choice in C++ and in Python, and microseconds of the host in a
launch through the table and of its plan alone, taken in turns. Ends with 1 for a wrong answer or a choice above 2 us.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

from emmy import api
from emmy.errors import EmmyError, UsageError
from emmy.ir.gpu import accumulation
from emmy.ir.ops import Accumulate, parse_op
from emmy.ir.schedule import replay
from emmy.ir.target import load_target
from emmy.loading import load_plan
from emmy.measure.check import Checker, operands
from emmy.measure.device import Device
from emmy.measure.references import Case, References
from emmy.runtime.launcher import Buffer, LoadedPlan
from emmy.runtime.table import LoadedTable

LIMIT_NS = 2000.0
_ROUNDS, _BATCH = 15, 200

Operands = Callable[[int], Mapping[str, Buffer]]  # the operands for a size


def open_device(gpu: str, references: Path) -> tuple[Device, int]:
    """The device, and the stream to launch on."""
    target = load_target(gpu)
    if target.is_cpu:
        from emmy.measure.cpu_device import CpuDevice

        return CpuDevice(target, 1, References(references)), 0
    from emmy.measure.cuda_device import CudaDevice

    device = CudaDevice(References(references), os.getpid())
    return device, device.context.stream


def wrong_at(
    size: int, sums: Accumulate, checker: Checker, launch: Callable[[Mapping[str, object]], Callable[[], None]]
) -> str:
    """What is wrong with the table's answers at the size, or nothing."""
    for case in (Case("integer", 0, {"m": size}), Case("normal", 1, {"m": size})):
        checker.answers.prepare(case)
        buffers = checker.buffers(case)
        checker.device.time_ns([launch(buffers)])
        damage = next((f"out of bounds of {name}: {d}" for name, b in buffers.items() if (d := b.damage())), None)
        if wrong := damage or checker.compare(case, buffers, sums).wrong:
            return f"{case}: {wrong}"
    return ""


def host_us(call: Callable[[], None], wait: Callable[[], object]) -> float:
    """Microseconds of the host in one call."""
    begin = time.perf_counter()
    for _ in range(_BATCH):
        call()
    spent = time.perf_counter() - begin
    wait()
    return spent / _BATCH * 1e6


def costs(
    table: LoadedTable, alone: LoadedPlan, size: int, given: Operands, stream: int, wait: Callable[[], object]
) -> bool:
    """Prints them; whether a choice is as cheap as it must be."""
    ends = [m for r in table.ranges for m in (r.lo, r.hi)]
    in_cpp = table.choice_ns(ends)
    begin = time.perf_counter()
    for _ in range(20_000):
        table.choose(size)
    in_python = (time.perf_counter() - begin) / 20_000 * 1e9
    syms = {"m": size}
    calls = [
        table.bind(given(size), syms, stream=stream),
        alone.bind(given(size), syms if alone.syms else {}, stream=stream),
    ]
    both = [[host_us(call, wait) for call in calls] for _ in range(_ROUNDS)][1:]
    through, direct = (median(us) for us in zip(*both, strict=True))
    more = median(t - d for t, d in both)
    sys.stdout.write(
        f"choice: {in_cpp:.1f} ns in C++ (mean over both ends of {len(table.ranges)} ranges), {in_python:.0f} ns a Python call\n"
        f"launch at m = {size}: {through:.2f} us of the host through the table, {direct:.2f} us its plan alone, "
        f"{1000 * more:+.0f} ns (median of {_ROUNDS - 1} turns of {_BATCH})\n"
    )
    return in_cpp < LIMIT_NS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op")
    parser.add_argument("--gpu", default="cpu")
    parser.add_argument("--table", help="instead of the stored one")
    parser.add_argument("--home", type=Path)
    args = parser.parse_args()
    op, target = parse_op(args.op), load_target(args.gpu)
    with tempfile.TemporaryDirectory() as folder:
        device, stream = open_device(args.gpu, Path(folder))
        table = api.load(op, args.table, gpu=args.gpu, home=args.home)
        if not isinstance(table, LoadedTable):
            raise UsageError(f"no table of several ranges is stored of {op} on {args.gpu}: tune it, or give one")
        winners = api.table(op, args.table, gpu=args.gpu, home=args.home)
        checker, failed = Checker(device, device.answers(op), op), 0

        def given(buffers: Mapping[str, object]) -> dict[str, Buffer]:
            return {name: b.read() if target.is_cpu else b.address for name, b in buffers.items()}  # type: ignore[attr-defined]

        for w in winners:
            sums = "f32" if target.is_cpu else accumulation(replay(parse_op(w.op).program(), w.range.schedule, target))
            for size in dict.fromkeys((w.range.lo, w.range.hi)):
                assert winners[table.choose(size)] == w
                bind = lambda buffers, size=size: table.bind(given(buffers), {"m": size}, stream=stream)  # noqa: E731
                wrong = wrong_at(size, sums, checker, bind)
                failed += bool(wrong)
                sys.stdout.write(f"{wrong or 'right':8} m = {size:5}  range {w.range.sizes}\n")
        first = winners[0]
        small = {n: device.plain(*form) for n, form in operands(op, {"m": first.range.lo}).items()}
        alone = load_plan(parse_op(first.op), first.range.schedule, target)
        cheap = costs(
            table, alone, first.range.lo, lambda size: given(small), stream, lambda: device.time_ns([lambda: None])
        )
    return int(bool(failed) or not cheap)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except EmmyError as e:
        sys.stderr.write(f"{type(e).__name__}: {e}\n")
        sys.exit(e.exit_code)
