"""Random matmuls and random legal schedules, by seed: odd shapes, every dtype and layout, every move a CPU has."""

from __future__ import annotations

import random

from emmy.ir.moves import MOVES
from emmy.ir.ops import Op, parse_op
from emmy.ir.plan import Plan, naive
from emmy.ir.schedule import apply_move, format_schedule
from emmy.ir.target import Target

EPILOGUES = ("bias", "gelu_tanh", "silu", "residual", "scale")


def random_op(rng: random.Random, largest: tuple[int, int, int] = (37, 50, 40)) -> Op:
    m = str(rng.randint(1, largest[0])) if rng.random() < 0.8 else f"m(1..{rng.randint(2, largest[0])})"
    options = ["nk"] * (rng.random() < 0.5) + [e for e in EPILOGUES if rng.random() < 0.25]
    dtype = rng.choice(["f32", "f16", "bf16"])
    tail = ":" + ",".join(options) if options else ""
    return parse_op(f"matmul:{m}x{rng.randint(1, largest[1])}x{rng.randint(1, largest[2])}:{dtype}{tail}")


def random_plan(rng: random.Random, op: Op, target: Target, most: int = 8) -> tuple[Plan, str]:
    """A plan and its schedule: legal moves in ascending phase, splits often by steps that divide nothing."""
    plan, moves, phase = naive(op.program()), [], 0
    for _ in range(rng.randint(0, most)):
        sites = [s for move in MOVES.values() for s in move.sites(plan, target) if s.move.phase >= phase]
        if not sites:
            break
        site = rng.choice(sites)
        move = site.move.fill({knob: rng.choice(values) for knob, values in site.domains})
        if move.name == "split" and rng.random() < 0.6:
            move = move.fill({"step": rng.randint(1, int(dict(move.arguments)["step"]))})
        if move.refuse(plan, target) is None:
            plan, phase = apply_move(plan, move, target), move.phase
            moves.append(move)
    return plan, format_schedule(tuple(moves))
