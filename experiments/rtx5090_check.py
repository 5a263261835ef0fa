"""Predicted best times of the charted Gemma-4-12B cases on an RTX 5090 against the published ones. A check of a prediction.

    python experiments/rtx5090_check.py --out OUT [--trials 150] [--processes N] [--most-cases N]

No RTX 5090 is measured here: each case is searched by what a model of another card and the 5090's roofline predict, the pick
is compiled by NVRTC and not run. Published are the catalogue's figures (`emmy/workloads/gemma4_12b.json`, which says what
they are not): f32acc_us, or hybrid_us for schedules whose sums are kept so. Cases of a size open until run time are taken at
512, as there. OUT gets predictions.jsonl, resumed by the same command, and summary.md: Spearman and median error by kind.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import numpy as np

from emmy import __version__, config
from emmy.costmodel.evaluate import spearman
from emmy.errors import EmmyError
from emmy.ir.ops import Op, parse_op
from emmy.ir.schedule import replay
from emmy.ir.target import Target, load_target
from emmy.measure.build_main import accumulation
from emmy.search.budget import parse_budget
from emmy.search.emulator_check import Check
from emmy.search.predict import Predicting, prior_model
from emmy.search.session import Request
from emmy.workloads.gemma4_12b import Case, cases

TARGET = "rtx5090"
HINT = 512  # of an open size, as the published times have it


def fixed(case: Case) -> str:
    """The case's op; an open size at the hint, a row for each head of a token where there are heads."""
    op = parse_op(case.op_text())
    for s in op.program().syms:
        rows = HINT * case.dims.get("heads", 1) if case.kind in ("rms_norm", "reduce", "pointwise") else HINT
        op = op.within(s.name, rows, rows)
    return op.key


def unchecked(op: Op, schedule: str, target: Target) -> Check:
    """No emulation: what is looked at is a time."""
    return Check(op.key)


def predict(op_text: str, trials: int, out: Path) -> dict[str, object]:
    """The pick's predicted time, and how its sums are kept."""
    op, target = parse_op(op_text), load_target(TARGET)
    request = Request(op, target, "evolve", 0, parse_budget(f"{trials}"), 1, fresh=True)
    try:
        found = Predicting(
            request, prior_model(target, config.home()), out / "home", __version__, checker=unchecked
        ).go()
    except EmmyError as e:
        return {"op": op_text, "error": str(e)[:200]}
    if (p := found.predicted) is None:
        return {"op": op_text, "error": found.rejected[-1].reason[:200] if found.rejected else "nothing was predicted"}
    sums = accumulation(replay(op.program(), p.schedule, target))
    return {
        "op": op_text, "predicted_us": p.predicted_us, "low_us": p.low_us, "high_us": p.high_us, "roof_us": p.roof_us,
        "sums": sums, "schedule": p.schedule, "model": p.model,
    }  # fmt: skip


def summary(found: dict[str, dict[str, object]], listed: Sequence[Case]) -> str:
    """The comparison, kind by kind."""
    rows: dict[str, list[tuple[float, float, float, float]]] = {}
    missing: list[str] = []
    for case in listed:
        record = found.get(fixed(case), {})
        published = case.published[TARGET]
        lane = "hybrid_us" if record.get("sums") in ("hybrid", "f16") and "hybrid_us" in published else "f32acc_us"
        if "predicted_us" not in record or lane not in published:
            missing.append(f"{case.id} ({record.get('error', 'no such figure was published')})")
            continue
        us = [float(str(record[name])) for name in ("predicted_us", "low_us", "high_us")]
        rows.setdefault(case.kind, []).append((us[0], published[lane], us[1], us[2]))
    lines = [
        "A check of a prediction: nothing here was measured on an RTX 5090, and the published times are not Emmy's.", "",
        "| kind | cases | Spearman | median error | median predicted / published | published within the 80 % interval |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    groups = {**rows, "all": [r for kind in rows.values() for r in kind]}
    for kind, of in groups.items():
        p, q = np.array([r[0] for r in of]), np.array([r[1] for r in of])
        if not len(p):
            continue
        error = [max(a / b, b / a) - 1 for a, b in zip(p, q, strict=True)]
        held = sum(low <= b <= high for _, b, low, high in of) / len(of)
        rho = f"{spearman(p, q):.3f}" if len(p) > 2 else "-"
        ratio = 2 ** median(math.log2(a / b) for a, b in zip(p, q, strict=True))
        lines.append(f"| {kind} | {len(of)} | {rho} | {100 * median(error):.0f} % | {ratio:.2f} | {100 * held:.0f} % |")
    if missing:
        lines += ["", f"Without a figure, {len(missing)} cases: " + "; ".join(missing[:12])]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--trials", type=int, default=150, help="schedules scored, of each op")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--most-cases", type=int, default=1000, help="evenly from the list")
    args = parser.parse_args()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    listed = [c for c in cases() if c.charted]
    listed = listed[:: max(1, -(-len(listed) // args.most_cases))]
    path = out / "predictions.jsonl"
    kept = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    found: dict[str, dict[str, object]] = {r["op"]: r for r in kept}
    todo = [op for op in dict.fromkeys(map(fixed, listed)) if op not in found]
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool, path.open("a") as f:
        for future in as_completed([pool.submit(partial(predict, op, args.trials, out)) for op in todo]):
            record = future.result()
            found[str(record["op"])] = record
            f.write(json.dumps(record) + "\n")
            f.flush()
            sys.stderr.write(f"{len(found)}: {record['op']} {record.get('predicted_us', record.get('error'))}\n")
    text = summary(found, listed)
    (out / "summary.md").write_text(text)
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
