"""Races schedules that a file names, op by op, in turns with the stock kernel, and writes the rows as a shard.

    python experiments/race_given.py given.jsonl --gpu h200 --out OUT --seconds 300

With --against the races are run once for each rival (`emmy bench --help` has their names). Each line of the file is {"op":
..., "schedule": ..., "note": ...}; the note is only shown. Schedules of one op are raced in one process on the same buffers,
each checked before it is timed. What does not build, or answers wrongly, becomes a row too. OUT gets races.jsonl (a line a
schedule: times, ratio to the stock kernel, status) and rows.tar.gz, a shard folder for `emmy data import --own`. Ops are
begun in the file's order until the time is up. Exit code 4 when an answer was wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
import time
from pathlib import Path

from emmy import __version__, api
from emmy.costmodel.dataset import Dataset
from emmy.costmodel.exchange import export_shard
from emmy.costmodel.recording import recording
from emmy.ir.target import load_target
from emmy.records import Candidate, Measurement

WRONG = 4  # exit code


def as_line(row: Measurement, note: str) -> dict[str, object]:
    return {
        "op": row.op,
        "note": note,
        "schedule": row.schedule,
        "status": row.status,
        "message": row.message[:300],
        "time_us": row.time_us,
        "baseline": row.baseline,
        "baseline_us": row.baseline_us,
        "error_norm": row.error_norm,
        **{k: v for k, v in row.static.items() if k.startswith(("speedup", "stock"))},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("given", type=Path, nargs="+", help="files of lines")
    parser.add_argument("--gpu", default="h200", help="target (default: h200)")
    parser.add_argument("--out", type=Path, required=True, help="folder for what is written")
    parser.add_argument("--work", type=Path, default=Path("/tmp/emmy-races"), help="folder for the dataset")
    parser.add_argument(
        "--against", nargs="+", default=[""], metavar="NAME", help="rivals to race against, one after another"
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="no op is begun later than that")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    target, begun_s, wrong = load_target(args.gpu), time.monotonic(), False
    groups: dict[str, dict[str, str]] = {}
    for path in args.given:
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            groups.setdefault(line["op"], {}).setdefault(line["schedule"], line.get("note", ""))
    home = args.work / "home"
    with (args.out / "races.jsonl").open("w") as out, api.device(target, 1) as here:
        for op, schedules in groups.items():
            if time.monotonic() - begun_s > args.seconds:
                sys.stdout.write(f"time is up before {op}\n")
                break
            with recording(home, "race", op, args.gpu, __version__) as keep:
                for row in (
                    keep(r) for x in args.against for r in here.race([Candidate(op, s) for s in schedules], against=x)
                ):
                    line = as_line(row, schedules[row.schedule])
                    out.write(json.dumps(line) + "\n")
                    out.flush()
                    wrong = wrong or row.status == "correctness"
                    shown = {k: v for k, v in line.items() if k not in ("schedule", "message") or not row.time_us}
                    sys.stdout.write(json.dumps(shown) + "\n")
                    sys.stdout.flush()
    dataset = Dataset(home)
    dataset.ingest()
    export_shard(dataset, args.gpu, args.work / "shards", provenance=f"experiments/{Path(__file__).name}")
    with tarfile.open(args.out / "rows.tar.gz", "w:gz") as tar:
        for file in sorted((args.work / "shards").rglob("*")):
            if file.is_file():
                tar.add(file, file.relative_to(args.work / "shards"))
    return WRONG if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
