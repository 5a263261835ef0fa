"""split: cut what is left of an axis into pieces walked at a level of the target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from emmy.ir.beside import beside
from emmy.ir.moves.base import (
    OPEN,
    Knob,
    Move,
    Site,
    full_nest,
    powers,
    put,
    put_work,
    refuse_late_loop,
    refuse_path,
    register,
)
from emmy.ir.moves.gpu_tiles import missing_loops
from emmy.ir.plan import BLOCK_LEVELS, Launch, Loop, Plan, Work, axes_walked, refuse_loops, refuse_own_loop
from emmy.ir.program import SUM, same_rows
from emmy.ir.target import Target

_LEAST_TILE = 64  # of a GPU: an axis may be shorter
_MOST_LOOPS = 32  # around one work: far beyond what helps, and short enough to walk recursively


@register
@dataclass(frozen=True)
class Split(Move):
    """split(m,core,64): the innermost piece of m is walked in pieces of 64 at `level`; the last piece may be shorter.

    before:  core n:2                 after:   core n:2 m:8
               C[m,n] sum= ...                   C[m,n] sum= ...

    With a work (k0.S/split(...)) the loop belongs to that work alone. Loops over blocks come first, and only over axes
    that no work of the launch folds (splitk does that). Those of a cluster share a folded axis and exchange their sums, or
    make neighbouring pieces of an own one: then what they read alike is brought to all of them by the copy engine.
    """

    axis: str
    level: str
    step: Knob
    name: ClassVar[str] = "split"
    phase: ClassVar[int] = 20

    @classmethod
    def sites(cls, plan: Plan, target: Target) -> Iterator[Site]:
        if not target.is_cpu:
            for missing in missing_loops(plan, target):
                move = cls(missing.launch, None, missing.axis, missing.level, OPEN)
                if move.refuse(plan, target) is not None:  # whatever the step
                    continue
                legal = tuple(x for x in missing.steps if replace(move, step=x)._refuse_step(plan, target) is None)
                if missing.fixed:
                    yield from (Site(move.fill({"step": x}), mandatory=True) for x in legal)
                elif legal:
                    yield Site(move, (("step", legal),), mandatory=True)
            return
        for la in plan.launches:
            if la.tile.channels or any(w.atoms for w in la.tile.works):
                continue  # a search splits first: a channel's block follows from the loops around it
            folds = any(plan.program.stage(w.stage).reduces and not w.combine for w in la.tile.works)
            for level in (
                (target.block_level, "serial") if folds else (target.block_level,)
            ):  # reuse pays for loops in time
                for axis, _ in plan.program.dims:
                    steps = _steps(plan, la, axis, level, target)
                    if steps:
                        yield Site(cls(la.name, None, axis, level, OPEN), (("step", steps),))

    def refuse(self, plan: Plan, target: Target) -> str | None:
        missing = refuse_path(self, plan, work="optional")
        return missing or self._refuse_place(plan, target) or self._refuse_step(plan, target)

    def _refuse_step(self, plan: Plan, target: Target) -> str | None:
        if not isinstance(self.step, int):
            return None
        nest = self._nest(plan)
        size = plan.extent(nest, self.axis)
        cut = any(x.axis == self.axis for x in nest)
        # The first piece of an axis may run over its end on a GPU, where tiles have the sizes that atoms take.
        most = size if target.is_cpu or cut else max(2 * size - 1, _LEAST_TILE)
        if not 1 <= self.step <= most:
            return f"{self.axis} has {size} left, the step is {self.step}: it must be 1..{most}"
        if cut and size % self.step and not target.is_cpu:
            return f"pieces of {self.step} do not fill the {size} of {self.axis} around them: {target.name} needs a divisor"
        width = next(x.width for x in target.levels if x.name == self.level)
        if not width or self.level in ("grid", "core"):
            return None
        agents = -(-size // self.step)
        for i, x in enumerate(nest):
            agents *= plan.count(nest, i) if x.level == self.level else 1
        if agents > width:
            return f"{agents} pieces side by side at level {self.level}, {target.name} has {width}"
        return None

    def _refuse_place(self, plan: Plan, target: Target) -> str | None:
        la = plan.launch(self.launch)
        if not self._has_axis(plan):
            axes = (a for a, _ in plan.program.dims if _walked(plan, la, a))
            return f"{self.path} has no axis {self.axis}; {self.launch} has {', '.join(axes)}"
        if len(self._nest(plan)) >= _MOST_LOOPS:
            return f"{self.path} has {len(self._nest(plan))} loops, {_MOST_LOOPS} are allowed"
        if self.level not in target.loop_levels:
            return f"{target.name} has no level {self.level}; it has {', '.join(target.loop_levels)}"
        if self.work:
            return self._refuse_own_loop(plan, la.tile.work(self.work))
        late = refuse_late_loop(self, la)
        if late:
            return late
        if self.level in BLOCK_LEVELS:
            if any(x.level not in BLOCK_LEVELS for x in la.tile.nest):
                return (
                    f"{self.level} loops come first, {self.launch} already has {len(la.tile.nest)} loops inside a block"
                )
            if la.tile.channels:
                return f"{self.level} loops come first, {self.launch} already has {len(la.tile.channels)} staged values"
            folding = [
                w.stage for w in la.tile.works if not w.combine and self.axis in plan.program.stage(w.stage).folded
            ]
            if self.level == "cluster" and (reason := self._refuse_cluster(plan, la, bool(folding))):
                return reason
            if folding and self.level != "cluster":
                return f"blocks cannot share {self.axis}, which {folding[0]} folds: splitk({folding[0]},parts) leaves partial states"
        loop = Loop(self.axis, self.level, 1)
        return refuse_loops(plan, replace(la, tile=replace(la.tile, nest=(*la.tile.nest, loop))))

    def _refuse_cluster(self, plan: Plan, la: Launch, folding: bool) -> str | None:
        """Why blocks of a cluster cannot share the axis.

        They fold it, and what follows is made of the sum, element by element; or they cut up the piece of a block.
        """
        p = plan.program
        already = next((x for x in la.tile.nest if x.level == "cluster"), None)
        if already:
            return f"blocks of {self.launch} form clusters over {already.axis} already: over one axis only"
        if not folding:
            around = any(x.axis == self.axis and x.level == "grid" for x in la.tile.nest)
            return (
                None
                if around
                else f"a cluster over {self.axis} cuts up the piece of a block: split({self.axis},grid,...) first"
            )
        first, alike = p.stage(la.tile.works[0].stage), beside(p, la.tile, la.tile.works[0].stage)
        others = (p.stage(w.stage) for w in la.tile.works if w.stage not in alike)
        if la.tile.works[0].combine or self.axis not in first.folded or len(first.axes) < 2:
            return f"blocks of a cluster share an axis that {first.out} folds into a matrix, {self.axis} is none"
        if any(x.axis == self.axis for x in la.tile.nest):
            return f"blocks share {self.axis} already: a cluster instead of splitk, not beside it"
        if first.monoid != SUM:
            return f"{first.out} is not a sum: blocks of a cluster add"
        odd = next((s.out for s in others if not same_rows(s.every if s.reduces else s.axes, first.axes)), None)
        return f"{odd} is not made of {first.out} element by element: cut it off" if odd else None

    def _refuse_own_loop(self, plan: Plan, w: Work) -> str | None:
        if self.level in BLOCK_LEVELS:
            return f"{self.level} loops are the whole launch's: write {self.launch}/split(...), without {self.work}"
        if w.atoms:
            return f"{w.stage} has the atom {w.atoms[0]} already: splits come before atoms"
        return refuse_own_loop(plan, w, self.axis)

    def rewrite(self, plan: Plan, target: Target) -> Plan:
        assert isinstance(self.step, int)
        la, loop = plan.launch(self.launch), Loop(self.axis, self.level, self.step)
        if self.work:
            w = la.tile.work(self.work)
            return put_work(plan, la, replace(w, nest=(*w.nest, loop)))
        return put(plan, la, replace(la.tile, nest=(*la.tile.nest, loop)))

    def _nest(self, plan: Plan) -> tuple[Loop, ...]:
        la = plan.launch(self.launch)
        return full_nest(plan, la, la.tile.work(self.work) if self.work else None)

    def _has_axis(self, plan: Plan) -> bool:
        la = plan.launch(self.launch)
        works = [w for w in la.tile.works if self.work in (None, w.stage)]
        return any(self.axis in axes_walked(plan.program, w) for w in works)


def _walked(plan: Plan, la: Launch, axis: str) -> bool:
    return any(axis in axes_walked(plan.program, w) for w in la.tile.works)


def _counts_matrices(plan: Plan, la: Launch, axis: str) -> bool:
    """Whether an axis tells the matrices apart that a launch makes by folding."""
    folds = (s for w in la.tile.works if not w.combine and (s := plan.program.stage(w.stage)).reduces)
    return any(axis in s.axes[:-2] for s in folds)


def _steps(plan: Plan, la: Launch, axis: str, level: str, target: Target) -> tuple[int, ...]:
    """Steps worth trying: powers of two, and even shares of the axis rounded up to 8; () where the loop makes no sense."""
    nest = la.tile.nest
    if not _walked(plan, la, axis) or any(x.axis == axis and x.level == level for x in nest):
        return ()
    if Split(la.name, None, axis, level, OPEN)._refuse_place(plan, target):
        return ()
    left = plan.extent(nest, axis)
    shares = {-(-left // n) for n in (2, 3, 4, 5, 6, 8)} if left > 64 else set()
    rounded = {-(-s // 8) * 8 for s in shares}
    least = 16 if level in BLOCK_LEVELS else 8  # a few steps of k at a time suit a single row of outputs
    if _counts_matrices(plan, la, axis):
        least = 1
    return tuple(sorted(s for s in {*powers(least, 4096), *rounded} if s < left and left // s <= 512))
