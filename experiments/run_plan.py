"""Launches plans once each and checks their answers: the small program that a memory checker watches. Needs no torch.

python experiments/run_plan.py --winners summary.jsonl --most 6        op and schedule of each line
python experiments/run_plan.py --op OP --schedule SCHEDULE
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from emmy.errors import EmmyError
from emmy.ir.ops import parse_op
from emmy.ir.target import load_target
from emmy.measure.answers import HostAnswers
from emmy.measure.build_main import build
from emmy.measure.check import operands
from emmy.measure.cuda_memory import ZONE_BYTES, CudaBuffer
from emmy.measure.references import Case, References
from emmy.records import Candidate
from emmy.runtime.cuda_driver import Context
from emmy.runtime.launcher import LoadedPlan


def verdict(context: Context, candidate: Candidate, target: str) -> str | None:
    """What is wrong with the candidate's answer after one launch, or None."""
    op = parse_op(candidate.op)
    built = build(candidate, load_target(target))
    case = Case("normal", 1, {s.name: min(s.hi, max(s.lo, 301)) for s in op.program().syms})
    with tempfile.TemporaryDirectory() as folder:
        answers = HostAnswers(op, References(Path(folder)), 1 << 33)
        held = {name: CudaBuffer(context, *form, ZONE_BYTES) for name, form in operands(op, case.sizes).items()}
        answers.write(case, held)
        with LoadedPlan(built.library, "cuda") as plan:
            plan.run({name: b.address for name, b in held.items()}, case.sizes, stream=context.stream)
            context.synchronize()
        damage = next((f"out of bounds of {name}: {d}" for name, b in held.items() if (d := b.damage())), None)
        return damage or answers.change(case, held) or answers.compare(case, held, built.accumulate).wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--winners", type=Path)
    parser.add_argument("--most", type=int, default=6)
    parser.add_argument("--op")
    parser.add_argument("--schedule", default="")
    parser.add_argument("--target", default="h200")
    args = parser.parse_args()
    if args.winners:
        lines = [json.loads(line) for line in args.winners.read_text().splitlines()]
        found = [Candidate(r["op"], r["schedule"]) for r in lines if r.get("schedule")]
        step = max(1, len(found) // args.most)
        candidates = found[::step][: args.most]
    else:
        candidates = [Candidate(args.op, args.schedule)]
    context, failed = Context(), 0
    for candidate in candidates:
        try:
            wrong = verdict(context, candidate, args.target)
        except EmmyError as e:
            wrong = str(e)
        failed += wrong is not None
        sys.stdout.write(f"{'right' if wrong is None else wrong}: {candidate.op} {candidate.schedule}\n")
    return 1 if failed or not candidates else 0


if __name__ == "__main__":
    sys.exit(main())
