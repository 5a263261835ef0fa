"""How near a tune from nothing, and picks that were never measured, come to the best schedules known.

    EMMY_SHIPPED=0 emmy tune @gemma4-12b --gpu h200 --budget 24 --model models/h200.txt.xz --home FRESH     # on the card
    EMMY_SHIPPED=0 emmy tune @gemma4-12b --gpu h200 --budget 32 --model models/h200.txt.xz --home PICKS     # where no card is
    python experiments/share_of_best.py given --gpu h200 --fresh FRESH --picks PICKS > given.jsonl
    python experiments/race_given.py given.jsonl --gpu h200 --out RACED
    python experiments/share_of_best.py table RACED/races.jsonl

`given` writes what `race_given.py` races, in turns on one card: of each op of fixed sizes the best schedule in the shipped dataset,
and where there are any the winner of the fresh tune and the pick. `table`: best known time over theirs, 1 being as fast.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import geometric_mean, quantiles

from emmy import api, config
from emmy.costmodel.dataset import Dataset
from emmy.ir.target import load_target
from emmy.records import Measurement
from emmy.search.predictions import find_prediction
from emmy.search.ranges import symbol_of
from emmy.winner import find_winner

KNOWN, FRESH, PICK, BOTH = "best known", "tuned from nothing", "never measured", " and "


def given(args: argparse.Namespace) -> int:
    target = load_target(args.gpu)
    checkout = config.checkout()
    homes = {KNOWN: Dataset(config.home(), (checkout / "datasets",) if checkout else ())}
    if args.fresh:
        homes[FRESH] = Dataset(Path(args.fresh))
    rows: dict[str, dict[str, list[Measurement]]] = {note: defaultdict(list) for note in homes}
    for note, dataset in homes.items():
        dataset.ingest()
        for row in dataset.rows(target=args.gpu):
            rows[note][row.op].append(row)
    for op in api.expand([args.set]):
        if symbol_of(op) is not None or not rows[KNOWN][op.key]:
            continue
        lines = {}
        for note in homes:
            if found := find_winner(rows[note][op.key], target.product):
                lines[note] = found.schedule
        for home in args.picks:
            if pick := find_prediction(Path(home), op, target):
                lines[PICK] = pick.schedule
        if len(lines) > 1:
            for schedule in dict.fromkeys(lines.values()):  # each once, whoever found it
                note = BOTH.join(n for n, s in lines.items() if s == schedule)
                sys.stdout.write(json.dumps({"op": op.key, "schedule": schedule, "note": note}) + "\n")
    return 0


def table(args: argparse.Namespace) -> int:
    times: dict[str, dict[str, float]] = defaultdict(dict)
    for line in Path(args.races).read_text().splitlines():
        race = json.loads(line)
        if race["time_us"] is not None:
            times[race["op"]] |= dict.fromkeys(race["note"].split(BOTH), race["time_us"])
    sys.stdout.write(
        "| | ops | geometric mean | median | tenth | worst | at 97 % and more |\n|---|---|---|---|---|---|---|\n"
    )
    for note in (FRESH, PICK):
        shares = sorted(t[KNOWN] / t[note] for t in times.values() if KNOWN in t and note in t)
        if len(shares) > 1:
            tenth, *_, middle = quantiles(shares, n=10)[0], quantiles(shares, n=2)[0]
            sys.stdout.write(
                f"| {note} | {len(shares)} | {geometric_mean(shares):.3f} | {middle:.3f} | {tenth:.3f} | {shares[0]:.3f} "
                f"| {sum(s >= 0.97 for s in shares)} |\n"
            )
    kinds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for op, t in times.items():
        for note in (FRESH, PICK):
            if KNOWN in t and note in t:
                kinds[op.split(":")[0]][note].append(t[KNOWN] / t[note])
    sys.stdout.write(f"\n| kind | {FRESH} | {PICK} |\n|---|---|---|\n")
    for kind, by_note in sorted(kinds.items()):
        cells = [f"{geometric_mean(x):.3f} ({len(x)})" if (x := by_note[note]) else "-" for note in (FRESH, PICK)]
        sys.stdout.write(f"| {kind} | {' | '.join(cells)} |\n")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    writes = verbs.add_parser("given")
    writes.add_argument("--gpu", default="h200")
    writes.add_argument("--set", default="@gemma4-12b")
    writes.add_argument("--fresh", default="", help="home of a tune from nothing")
    writes.add_argument("--picks", nargs="*", default=[], help="homes of predictions")
    writes.set_defaults(run=given)
    shows = verbs.add_parser("table")
    shows.add_argument("races", help="races.jsonl of race_given.py")
    shows.set_defaults(run=table)
    args = parser.parse_args()
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
