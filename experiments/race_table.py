"""The stored races of a target as a Markdown table: the best schedule of each op against the stock kernel it was raced with.

    python experiments/race_table.py --gpu h200 --ops @gemma4-12b

Ratios are the stock kernel's time over Emmy's, both timed in turns in one process; above 1 Emmy is faster. Cold: operands come
from memory. Of several races of an op the one with the best ratio counts, and only schedules whose sums are kept in f32 unless
--any-sums. Warm ratios are shown for ops too short for a sustained time: in rows up to version 0.1.0 that one came first and
heated the card. "Roof" is the share of the roofline that Emmy reaches; measurements and seconds are those of all stored rows of the op.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from emmy import api, config
from emmy.costmodel.dataset import Dataset
from emmy.ir.ops import Op
from emmy.records import Measurement

BASELINE = "torch"  # eager, not a rival that was named
LOSSY = ("/atom(hybrid", ".C/atom(f16", "atom(hybrid")  # atoms whose sums are not f32 throughout


@dataclass(frozen=True, slots=True)
class Line:
    """One op's race, and what finding it took."""

    op: Op
    race: Measurement
    roof: float
    measurements: int
    seconds: float

    @property
    def ratio(self) -> float:
        return float(self.race.static["speedup"])

    def other(self, state: str) -> float | None:
        """The ratio with warm caches, or at sustained clocks; None when it was not measured, or not fairly."""
        stock, own = self.race.static.get(f"baseline_{state}_us"), self.race.static.get(f"{state}_us")
        if state == "warm" and "sustained_us" in self.race.static:
            return None
        return stock / own if stock and own else None

    @property
    def rows(self) -> str:
        """What the op's M is."""
        found = re.match(r"matmul:([^x]*)x", self.op.key)
        return found[1] if found else self.op.key


def lines(gpu: str, ops: Sequence[Op], any_sums: bool) -> list[Line]:
    dataset = Dataset.of(config.home())
    with dataset.snapshot() as snapshot:
        rows = snapshot.rows(target=gpu)
    of: dict[str, list[Measurement]] = defaultdict(list)
    for row in rows:
        of[row.op].append(row)
    out = []
    for op in ops:
        here = of[op.key]
        races = [r for r in here if r.status == "ok" and r.baseline == BASELINE and "speedup" in r.static]
        kept = [r for r in races if any_sums or not any(x in r.schedule for x in LOSSY)]
        if kept:
            race = max(kept, key=lambda r: r.static["speedup"])
            assert race.time_us is not None
            roof = api.roof_us(op, gpu, 1) / race.time_us
            out.append(Line(op, race, roof, len(here), sum(r.wall_s or 0.0 for r in here)))
    return out


def table(found: Sequence[Line]) -> str:
    out = [
        "| op | stock us | Emmy us | ratio, cold (range) | warm | sustained | roof | measurements | seconds | schedule |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for x in found:
        s, warm, sustained = x.race.static, x.other("warm"), x.other("sustained")
        out.append(
            f"| {x.op} | {x.race.baseline_us:.2f} | {x.race.time_us:.2f} | {x.ratio:.3f} "
            f"({s['speedup_low']:.3f}..{s['speedup_high']:.3f}) | {number(warm)} | {number(sustained)} | {x.roof:.0%} "
            f"| {x.measurements} | {x.seconds:.0f} | `{x.race.schedule.replace('k0/', '').replace('k0.', '')}` |"
        )
    return "\n".join(out)


def tiers(found: Sequence[Line]) -> str:
    groups: dict[str, list[Line]] = defaultdict(list)
    for x in found:
        groups[x.rows].append(x)
    out = ["| M | ops | cold, geometric mean | worst | warm | sustained |", "|---|---|---|---|---|---|"]
    for name, group in (
        *sorted(groups.items(), key=lambda g: (not g[0].isdigit(), g[0].zfill(9))),
        ("all", list(found)),
    ):
        cold = [x.ratio for x in group]
        means = [mean([r for x in group if (r := x.other(state))]) for state in ("warm", "sustained")]
        out.append(f"| {name} | {len(group)} | {mean(cold)} | {min(cold):.3f} | {means[0]} | {means[1]} |")
    return "\n".join(out)


def mean(ratios: Sequence[float]) -> str:
    return f"{geometric_mean(ratios):.3f}" if ratios else "-"


def number(x: float | None) -> str:
    return f"{x:.3f}" if x else "-"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--ops", nargs="*", default=["@gemma4-12b"], help="ops or @SETs")
    parser.add_argument("--any-sums", action="store_true", help="also schedules that sum in f16 and promote")
    args = parser.parse_args()
    ops = list(api.expand(args.ops))
    found = lines(args.gpu, ops, args.any_sums)
    sys.stdout.write(f"{tiers(found)}\n\n{table(found)}\n")
    missing = [op.key for op in ops if op.key not in {x.op.key for x in found}]
    if missing:
        sys.stdout.write(f"\nNot raced: {', '.join(missing)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
