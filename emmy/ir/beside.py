"""Stages that a tile folds side by side: sums over the same axes, opened, folded and closed together. Knows no device.

A gated pair of linears reads one activation twice. Where its sums share all loops, a fill of the activation serves both, and
what is made of both is made while both are in registers. No plan says so: it follows from the stages.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from emmy.ir.expr import Read, factors
from emmy.ir.plan import Tile, Work
from emmy.ir.program import SUM, Program


def groups(program: Program, works: Iterable[Work]) -> tuple[tuple[Work, ...], ...]:
    """Works in order, those side by side together: neighbours that add up alike, and do not read one another."""
    out: list[list[Work]] = []
    for w in works:
        if out and all(_beside(program, x, w) for x in out[-1]):
            out[-1].append(w)
        else:
            out.append([w])
    return tuple(map(tuple, out))


def beside(program: Program, tile: Tile, stage: str) -> tuple[str, ...]:
    """The stages that the tile folds side by side with `stage`, itself among them; the first stands for all."""
    return next(group for group in _together(program, tile.bare) if stage in group)


@lru_cache(maxsize=4096)
def _together(program: Program, works: tuple[Work, ...]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(w.stage for w in group) for group in groups(program, works))


def leads(program: Program, tile: Tile, stage: str) -> bool:
    """Whether a stage is the first of those beside it: moves name that one."""
    return beside(program, tile, stage)[0] == stage


def side_by_side(program: Program, axis: str) -> int:
    """How many sums with that last axis a tile of the whole program would fold side by side; 1 where there are none."""
    found = groups(program, (Work(s.out) for s in program.stages))
    return max((len(g) for g in found if program.stage(g[0].stage).axes[-1:] == (axis,)), default=1)


def operands(program: Program, stages: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(first factors, second factors) of products side by side, each once."""
    return _operands(program, tuple(stages))


@lru_cache(maxsize=4096)
def _operands(program: Program, stages: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    reads = [[f.value for f in factors(program.stage(s).body) if isinstance(f, Read)] for s in stages]
    return tuple(dict.fromkeys(r[0] for r in reads if r)), tuple(dict.fromkeys(r[1] for r in reads if r[1:]))


def _beside(program: Program, a: Work, b: Work) -> bool:
    x, y = program.stage(a.stage), program.stage(b.stage)
    alike = x.monoid == y.monoid == SUM and (x.axes, x.folded, a.combine) == (y.axes, y.folded, b.combine)
    return alike and x.out not in y.reads
