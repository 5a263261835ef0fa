"""What loop-level moves share: replace stages of the program inside a plan, works follow."""

from __future__ import annotations

from dataclasses import replace

from emmy.ir.moves.base import Move, put
from emmy.ir.plan import Plan, Work
from emmy.ir.program import Stage


def refuse_nest(move: Move, plan: Plan) -> str | None:
    """Why the program can no longer change: loops or other launches already refer to its stages."""
    loops = len(plan.launch(move.launch).tile.nest)
    if loops or len(plan.launches) > 1:
        return f"{move.launch} has {loops} loops and the plan {len(plan.launches)} launches: {move.name} comes before splits and cuts"
    return None


def replace_stages(plan: Plan, launch: str, gone: tuple[str, ...], new: tuple[Stage, ...]) -> Plan:
    """The plan with stages `gone` replaced by `new`; the launch's works are the program's stages again."""
    program = plan.program.with_stages(gone, new)
    la = plan.launch(launch)
    works = tuple(Work(s.out) for s in program.stages)
    return replace(put(plan, la, replace(la.tile, works=works)), program=program)
