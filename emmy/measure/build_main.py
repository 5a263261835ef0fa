"""A compiler process for GPU candidates: `python -m emmy.measure.build_main TARGET`, started by `remote_builder` only.

Lines of JSON in, lines of JSON out, in turn: {"op", "schedule"} -> what `Built` or `NotBuilt` holds. It has no device.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

from emmy.codegen import gpu_build
from emmy.codegen.build import source
from emmy.errors import CompileError, PlanError, UsageError
from emmy.ir.atoms import ATOMS
from emmy.ir.ops import parse_op
from emmy.ir.ops.op import Accumulate
from emmy.ir.plan import Plan
from emmy.ir.target import Target, load_target
from emmy.measure.compile_pool import NICENESS, Built
from emmy.measure.worker_main import die_with_parent
from emmy.records import Candidate

_FROM_GOOD_TO_BAD: tuple[Accumulate, ...] = ("f32", "hybrid", "f16")


def build(candidate: Candidate, target: Target) -> Built:
    """The candidate's plan file. Raises CompileError, or PlanError or UsageError for a refused schedule."""
    unit = source(parse_op(candidate.op), candidate.schedule, target)
    library = gpu_build.build(unit, target)
    return Built(library.path, unit.digest, library.static, accumulation(unit.plan))


def accumulation(plan: Plan) -> Accumulate:
    """How the plan keeps its sums: as the worst of its atoms does."""
    kinds = {ATOMS[a.name].accumulate for la in plan.launches for w in la.tile.works for a in w.atoms}
    return max(kinds, key=_FROM_GOOD_TO_BAD.index, default="f32")


def answer(line: str, target: Target) -> dict[str, object]:
    """What is said to one request."""
    raw = json.loads(line)
    try:
        built = build(Candidate(raw["op"], raw["schedule"]), target)
    except CompileError as e:
        return {"status": "compile", "message": str(e)}
    except (PlanError, UsageError) as e:
        return {"status": "constraints", "message": str(e)}
    return {
        "library": str(built.library),
        "digest": built.digest,
        "static": dict(built.static),
        "accumulate": built.accumulate,
    }


def read_answer(line: str) -> Built:
    """What the answer holds. Raises CompileError or PlanError for a candidate that could not be built."""
    raw = json.loads(line)
    match raw.get("status"):
        case "compile":
            raise CompileError(raw["message"])
        case "constraints":
            raise PlanError(raw["message"])
        case _:
            return Built(Path(raw["library"]), raw["digest"], raw["static"], raw["accumulate"])


def main(target_name: str, parent: int) -> int:
    """Serves requests until the parent closes its end."""
    if not die_with_parent(parent):
        return 0
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    target = load_target(target_name)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the compiler prints is no answer
    for line in sys.stdin:
        out.write(json.dumps(answer(line, target)) + "\n")
        out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
