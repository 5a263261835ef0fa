"""How many measurements a model spares: until one is within 97 % of the best known speed, in its order and at random.

    python experiments/pruning.py [--gpu h200] [--cases 20] [--oldest 8136]

The cases with the most candidates among the oldest rows, which were drawn before any model led. Each is held out of the
models that rank it, by op in five folds, among those oldest candidates only; newer rows of other ops are learnt from. At random
is exact: (n + 1) / (g + 1) draws of n candidates, g of which are good enough. Reads the stored rows, measures nothing.
"""

from __future__ import annotations

import argparse
import sys
from statistics import geometric_mean, median

import numpy as np

from emmy import config
from emmy.costmodel.dataset import Dataset
from emmy.costmodel.evaluate import random_score, score
from emmy.costmodel.fit import ensemble
from emmy.costmodel.heldout import folds, problems_of
from emmy.costmodel.replayed import Replays
from emmy.costmodel.samples import generated_digest, prepare
from emmy.ir.target import load_target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--oldest", type=int, default=8136, help="rows whose candidates are ranked")
    args = parser.parse_args()
    target, dataset = load_target(args.gpu), Dataset.of(config.home())
    dataset.ingest()
    rows = dataset.rows(target=args.gpu)
    replays = Replays.of(target, generated_digest)
    samples = prepare(rows, target, replays=replays).samples
    replays.save()
    oldest = {r.id for r in sorted(rows, key=lambda r: r.time_utc)[: args.oldest]}
    is_old = np.array([i in oldest for i in samples.ids])
    counts = np.bincount(samples.problem[is_old], minlength=len(samples.problems))
    cases = set(np.argsort(-counts, kind="stable")[: args.cases].tolist())
    found: list[tuple[str, int, float, float, float]] = []
    for known, unseen in folds(samples, 5):
        model = ensemble(samples.take(known))
        for p, here in problems_of(samples.take(unseen[is_old[unseen]])):
            if p in cases:
                led, picked = (score(here.time_us, r).to97 for r in (model.predict(here.x)[0], model.pick(here.x)))
                alone = random_score(here.time_us).to97
                found.append((samples.problems[p].split(" ")[0], len(here), led, picked, alone))
    for name, n, led, picked, alone in sorted(found):
        sys.stdout.write(
            f"{name}: {n} candidates, {led:.0f} by predicted times, {picked:.0f} by picks, {alone:.1f} at random\n"
        )
    at_random = [f[4] for f in found]
    for what, times in (("predicted times", [f[2] for f in found]), ("picks", [f[3] for f in found])):
        fewer = geometric_mean(at_random) / geometric_mean(times)
        sys.stdout.write(
            f"{len(found)} cases, by {what}: geometric mean {geometric_mean(times):.2f}, at random "
            f"{geometric_mean(at_random):.2f}, {fewer:.1f} times fewer; median {median(times):.0f} and {median(at_random):.1f}; "
            f"in all {sum(times):.0f} and {sum(at_random):.0f}\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
