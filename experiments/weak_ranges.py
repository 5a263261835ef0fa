"""Ranges of open sizes that no stored schedule wins, one a line, to be tuned: those that were never raced first, then the worst.

    emmy tune $(python experiments/weak_ranges.py @gemma4-12b-server --gpu h200 --home HOME) --gpu h200 --budget 24 --home HOME

Tuned one by one, such a range begins with the winners of its neighbours and of fixed sizes. stderr has the best ratio to torch of each.
With EMMY_FAST_MATH=1 races of schedules with hybrid sums count, else of those in f32.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from emmy import api, config
from emmy.costmodel.dataset import Dataset
from emmy.ir.parts import symbol_of
from emmy.ir.schedule import sums_of
from emmy.search.ranges import starting_ranges
from emmy.winner import is_raced, sums_wanted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", nargs="+", help="ops and sets")
    parser.add_argument("--gpu", default="h200", help="target (default: h200)")
    parser.add_argument("--home", type=Path, default=config.home(), help="folder of measurements")
    parser.add_argument("--under", type=float, default=1.0, help="a best ratio below it is weak (default: 1.0)")
    args = parser.parse_args()
    dataset = Dataset.of(args.home)
    dataset.ingest()
    best: dict[str, float] = {}
    for row in dataset.rows(target=args.gpu):
        if row.status == "ok" and is_raced(row) and sums_of(row.schedule) == sums_wanted():
            best[row.op] = max(best.get(row.op, 0.0), row.static["speedup"])
    ranges = {r.key for op in api.expand(args.op) if symbol_of(op) is not None for r in starting_ranges(op)}
    for ratio, key in sorted((best.get(key, 0.0), key) for key in ranges):
        if ratio < args.under:
            sys.stderr.write(f"{ratio:.3f} {key}\n" if ratio else f"  -   {key}\n")
            sys.stdout.write(f"{key}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
