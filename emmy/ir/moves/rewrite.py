"""What loop-level moves share: replace stages of the program inside a plan, works follow."""

from __future__ import annotations

from dataclasses import replace

from emmy.ir.moves.base import Move, put
from emmy.ir.plan import Plan, Work
from emmy.ir.program import Stage


def refuse_nest(move: Move, plan: Plan) -> str | None:
    """Why the program can no longer change: loops or other launches already refer to its stages."""
    if len(plan.launches) > 1:
        return f"the plan has {len(plan.launches)} launches: {move.name} comes before cut and splitk"
    t = plan.launch(move.launch).tile
    if not t.is_plain:
        return f"{move.launch} has {len(t.nest)} loops and {len(t.channels)} channels: {move.name} comes before tile-level moves"
    return None


def refuse_name(plan: Plan, name: str) -> str | None:
    """Why a new stage cannot have that name."""
    taken = plan.program.has_stage(name) or any(v.name == name for v in plan.program.inputs)
    return f"the program has a value named {name} already" if taken else None


def replace_stages(plan: Plan, launch: str, gone: tuple[str, ...], new: tuple[Stage, ...]) -> Plan:
    """The plan with stages `gone` replaced by `new`; the launch's works are the program's stages again."""
    program = plan.program.with_stages(gone, new)
    la = plan.launch(launch)
    works = tuple(Work(s.out) for s in program.stages)
    return replace(put(plan, la, replace(la.tile, works=works)), program=program)
