"""What it costs a search to ask ahead: batches that are out while it chooses. On recorded spaces, so no device is needed.

    python experiments/ahead_cost.py [--ahead 1 2 3 9 17] [--seeds 10] [--budget 200] [--spaces gemm.rtx3090 ...]

As in a run, proposals are asked in batches of eight, so many batches are out, and the strategy is told of them in order. Said is the
share of the optimum's speed that the best point so far reaches, mean over seeds and spaces, after 50, 100 and 200 measurements.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque

import numpy as np

from emmy.measure.measurer import BATCH
from emmy.search.recorded_space import RecordedSpace, load_recorded
from emmy.search.registry import make_strategy

SPACES = ("gemm.rtx3090", "gemm.rtx2080ti", "convolution.a100", "dedispersion.a100")
COUNTS = (50, 100, 200)


def replayed(space: RecordedSpace, strategy_name: str, seed: int, budget: int, ahead: int) -> list[float]:
    """The share of the optimum's speed after 1, 2, ... measurements."""
    strategy, best, found = make_strategy(strategy_name, space, seed=seed), np.inf, []
    out: deque[list[object]] = deque()
    while len(found) < budget:
        while len(out) < ahead and (points := strategy.ask(BATCH)):
            out.append(points)  # type: ignore[arg-type]
        if not out:
            break
        trials = [space.trial(p) for p in out.popleft()]  # type: ignore[arg-type]
        for t in trials:
            best = min(best, np.inf if t.time_us is None else t.time_us)
            found.append(float(space.times_us.min() / best))
        strategy.tell(trials)
    return found + found[-1:] * (budget - len(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spaces", nargs="*", default=SPACES)
    parser.add_argument("--ahead", type=int, nargs="*", default=[1, 2, 3, 9, 17])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--budget", type=int, default=200)
    parser.add_argument("--strategy", default="auto")
    args = parser.parse_args()
    spaces = [load_recorded(name) for name in args.spaces]
    for ahead in args.ahead:
        runs = [
            replayed(s, args.strategy, seed, args.budget, ahead)[: args.budget]
            for s in spaces
            for seed in range(args.seeds)
        ]
        mean = np.mean(np.array(runs), axis=0)
        said = "  ".join(f"after {n}: {mean[n - 1]:.4f}" for n in COUNTS if n <= args.budget)
        sys.stdout.write(f"{args.strategy}  ahead {ahead}  {said}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
