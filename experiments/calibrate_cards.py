"""How well calibration tells honest rows from tampered ones: each card whose rows are stored, as if they came from elsewhere.

    python experiments/calibrate_cards.py [--gpu h200]

A card's rows are held against those of all other cards of its kind, and the deployed model. That model has learned from the
card's rows too, so what it says of them is better than of rows it has not seen; what other cards' same kernels say is not.
Reads the stored rows, measures nothing.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from emmy import config
from emmy.costmodel.calibrate import Evidence, Predictor, Verdict, calibrate
from emmy.costmodel.dataset import Dataset
from emmy.costmodel.doctor import roof_us
from emmy.costmodel.registry import find, model_roots
from emmy.costmodel.replayed import Outcome, Replays, generated_digest, outcome_of
from emmy.ir.target import load_target
from emmy.records import Measurement
from emmy.report import table

Rows = Sequence[Measurement]


def scaled(factor: float, share: float = 1.0) -> Callable[[Rows], Rows]:
    """`share` of the rows, each as many times as long."""

    def tamper(rows: Rows) -> Rows:
        rng = random.Random(0)
        return [
            replace(r, samples_us=tuple(t * factor for t in r.samples_us)) if rng.random() < share else r for r in rows
        ]

    return tamper


def shuffled(rows: Rows) -> Rows:
    """The times of each op's rows dealt anew among them."""
    rng, out = random.Random(0), []
    for op in sorted({r.op for r in rows}):
        of = [r for r in rows if r.op == op and r.time_us is not None]
        order = rng.sample(range(len(of)), len(of))
        out += [replace(r, samples_us=of[j].samples_us) for r, j in zip(of, order, strict=True)]
    return out


def one_too_fast(rows: Rows) -> Rows:
    """The slowest row of the op with the most rows takes 0.6 of the time of the fastest one."""
    op, _ = Counter(r.op for r in rows if r.time_us is not None).most_common(1)[0]
    of = sorted((r for r in rows if r.op == op and r.time_us is not None), key=lambda r: r.time_us or 0.0)
    return [replace(r, samples_us=(0.6 * (of[0].time_us or 0.0),)) if r.id == of[-1].id else r for r in rows]


TAMPERED: dict[str, Callable[[Rows], Rows]] = {
    "as measured": lambda rows: rows,
    "times x 0.75": scaled(0.75),
    "times x 1.3": scaled(1.3),
    "half of them x 2": scaled(2.0, 0.5),
    "times shuffled": shuffled,
    "one too fast": one_too_fast,
    "digests changed": lambda rows: [replace(r, source_digest=f"0{r.source_digest[1:]}x") for r in rows],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h200")
    args = parser.parse_args()
    target, dataset = load_target(args.gpu), Dataset.of(config.home())
    rows = dataset.rows(target=args.gpu)
    replays, model = Replays.of(target, generated_digest), find(args.gpu, model_roots(dataset.home))
    models = [Predictor(args.gpu, lambda x: model.predict(x)[0])] if model else []

    def outcome(r: Measurement) -> Outcome:
        make = partial(outcome_of, r.op, r.schedule, target, r.protocol.threads, generated_digest)
        return replays.get(r.op, r.schedule, r.protocol.threads, make)

    found: list[tuple[str, dict[str, Verdict]]] = []
    for card in dict.fromkeys(r.device.uuid_hash for r in rows):
        own = [r for r in rows if r.device.uuid_hash == card]
        evidence = Evidence([r for r in rows if r.device.uuid_hash != card], roof_us, outcome, models)
        found.append((card, {what: calibrate(tamper(own), evidence) for what, tamper in TAMPERED.items()}))
        sys.stdout.write(f"{card} {len(own)} rows\n")
        for f in found[-1][1]["as measured"].findings:
            sys.stdout.write(f"    {'' if f.passed else 'NOT '}{f.check}: {f.detail}\n")
    replays.save()
    passed = [card for card, of in found if of["as measured"].passed]
    sys.stdout.write(f"\n{len(passed)} of {len(found)} cards' rows are calibrated; of these\n")
    lines = []
    for what in TAMPERED:
        held = [of[what] for card, of in found if card in passed and not of[what].passed]
        by = Counter(f.check for v in held for f in v.findings if not f.passed)
        lines.append((what, len(held), ", ".join(f"{check} {n}" for check, n in by.most_common())))
    sys.stdout.write(table(("set", "held", "by"), lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
