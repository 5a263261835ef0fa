"""Tiles of rows: launches whose works make rows element by element, fold them, and finish them in one go.

Each thread holds vectors of the block's rows in registers from the first fold to the last element, however many folds there
are; lanes of a row join their states by shuffles, warps that have other columns of it in shared memory. The loops say who
has what: `split(m,grid,4)` rows a block, `split(n,warp,1024)` columns a warp, `split(m,warp,2)` rows a warp, and
`split(m,lane,1)` rows of a group of lanes, of which there are then several in a warp. Knows no code.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd, prod

from emmy.ir.dtype import size_bytes
from emmy.ir.expr import Read, axes_of, outermost
from emmy.ir.gpu import WARP, registers_at_launch, tile_warps, transfer_bytes
from emmy.ir.plan import AGENTS, Launch, Plan
from emmy.ir.program import Program, Stage
from emmy.ir.target import Target

_MOST_ELEMENTS = 16  # bytes of the widest element's vector
# By the estimate below: of 3,840 columns in four warps, 8 rows a thread, 230, ptxas spills 16 bytes for sm_90a and sm_120a.
_MOST = 224
_BESIDE = 38  # registers of a thread beside what it keeps: addresses, states, what a function of a vector takes


@dataclass(frozen=True)
class RowTile:
    """A launch as rows: `axes`, of which the last is that of the columns, of stages folded, elementwise, and one a row."""

    plan: Plan
    launch: Launch
    axes: tuple[str, ...]

    @property
    def last(self) -> str:
        return self.axes[-1]

    @property
    def outer(self) -> tuple[str, ...]:
        return self.axes[:-1]

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Stages that the launch computes; those that it only combines are none."""
        p = self.plan.program
        return tuple(p.stage(w.stage) for w in self.launch.tile.works if not w.combine)

    @cached_property
    def elementwise(self) -> tuple[Stage, ...]:
        return tuple(s for s in self.stages if not s.reduces and s.axes == self.axes)

    @cached_property
    def made(self) -> frozenset[str]:
        return frozenset(w.stage for w in self.launch.tile.works)

    @cached_property
    def loaded(self) -> tuple[Read, ...]:
        """What is read of memory for each element, each once: those along the last axis."""
        found = (r for s in self.stages for r in outermost(s.body) if r.value not in self.made)
        return tuple(dict.fromkeys(r for r in found if self.last in axes_of(r)))

    @cached_property
    def kept(self) -> tuple[Stage, ...]:
        """Elementwise stages that are read beyond a fold of them: their numbers stay in registers."""
        out = []
        for i, w in enumerate(self.launch.tile.works):
            s = self.plan.program.stage(w.stage)
            later = [self.plan.program.stage(x.stage) for x in self.launch.tile.works[i + 1 :]]
            folds = next((j for j, x in enumerate(later) if x.reduces), len(later))
            if s in self.elementwise and any(s.out in x.reads for x in later[folds + 1 :]):
                out.append(s)
        return tuple(out)

    # ------------------------------------------------------------ who has what
    @property
    def groups(self) -> int:
        """Groups of lanes of a warp, each with rows of its own."""
        nest = self.launch.tile.nest
        return prod(self.plan.count(nest, i) for i, x in enumerate(nest) if x.level == "lane")

    @property
    def lanes(self) -> int:
        """Lanes that share a row."""
        return WARP // self.groups

    @property
    def rows(self) -> int:
        """Rows of a thread."""
        return prod(self.plan.extent(self.launch.tile.nest, a) for a in self.outer)

    @property
    def columns(self) -> int:
        """Columns of a warp."""
        return self.plan.extent(self.launch.tile.nest, self.last)

    @cached_property
    def width(self) -> int:
        """Elements of a vector: 16 bytes of the widest dtype at most, what every array allows and a warp's columns are made of."""
        p, nest = self.plan.program, self.launch.tile.nest
        stored = (s for s in self.elementwise if self.plan.stored(s, self.launch))
        touched = [(r.value, r.index) for r in self.loaded] + [(s.out, s.axes) for s in stored]
        if not touched:
            return 1
        if any(index[-1] != self.last or self._elsewhere(index) for _, index in touched):
            return 1
        out = gcd(self.columns, _MOST_ELEMENTS // min(size_bytes(p.value(v).dtype) for v, _ in touched))
        for v, _ in touched:
            out = gcd(out, transfer_bytes(self.plan, nest, v) // size_bytes(p.value(v).dtype))
        return out

    def _elsewhere(self, index: tuple[object, ...]) -> bool:
        """Whether a position is computed from the column."""
        return any(not isinstance(x, str) and self.last in axes_of(x) for x in index)  # type: ignore[arg-type]

    @property
    def vectors(self) -> int:
        """Vectors of a row that a thread has, at most."""
        return -(-(self.columns // self.width) // self.lanes)

    # ------------------------------------------------------------ registers
    def words(self, r: Read) -> int:
        """Registers of a thread for what it loads of a value."""
        each = max(1, self.width * size_bytes(self.plan.program.value(r.value).dtype) // 4)
        rows = 1 if set(axes_of(r)) <= {self.last} else self.rows
        return rows * self.vectors * each

    @cached_property
    def registers(self) -> int:
        """Registers of a thread: an estimate, mostly from above."""
        vectors = self.rows * self.vectors
        held = sum(map(self.words, self.loaded)) + vectors * self.width * len(self.kept)
        return held + vectors + 3 * self.width + self.rows + _BESIDE

    def fits(self, target: Target) -> bool:
        """Whether a thread's registers hold its elements."""
        return self.registers <= registers_at_launch(self.plan, self.launch, target)

    def fits_well(self, target: Target) -> bool:
        """Whether they do with some to spare, for the estimate may be short."""
        return self.fits(target) and self.registers <= _MOST


def row_tile(plan: Plan, launch: Launch) -> RowTile | None:
    """The launch as rows; None where it is no such thing, or a warp makes each row by itself and nothing reads what it folds."""
    t, p = launch.tile, plan.program
    if t.channels or t.roles or t.order.kind != "static" or any(w.atoms or w.nest for w in t.works):
        return None
    axes = row_axes(p, tuple(w.stage for w in t.works), tuple(w.stage for w in t.works if w.combine))
    if axes is None or any(x.level not in ("grid", *AGENTS[:1], "lane") for x in t.nest):
        return None
    if any(x.level == "lane" and x.axis == axes[-1] for x in t.nest):
        return None
    divided = any(x.level in (*AGENTS, "lane") for x in t.nest)
    folds = {w.stage for w in t.works if p.stage(w.stage).reduces}
    reads = any(folds & set(p.stage(w.stage).reads) for w in t.works if not w.combine and p.stage(w.stage).axes == axes)
    again = any(folds & set(p.stage(w.stage).reads) for w in t.works if p.stage(w.stage).reduces and not w.combine)
    return RowTile(plan, launch, axes) if divided or reads or again else None


@lru_cache(maxsize=4096)
def row_axes(p: Program, stages: tuple[str, ...], combined: tuple[str, ...] = ()) -> tuple[str, ...] | None:
    """The axes of rows that all of these stages make, fold, or have one number of for each row; None where they have not."""
    found = [p.stage(s) for s in stages]
    axes = max((s.axes if s.out in combined else s.every for s in found), key=len)
    if not axes:
        return None
    for s in found:
        m = s.monoid
        folds = m is not None and s.out not in combined
        if folds and (s.every != axes or len(s.folded) != 1 or not s.axes or not _of_elements(s)):
            return None
        if folds and not any(set(axes_of(r)) == set(axes) for r in outermost(s.body)):
            return None  # a product, which has something else to read again
        if m is not None and (len(m.state) != 1 or m.lift):
            return None
        if not folds and s.axes not in (axes, axes[:-1]):
            return None
        if m is not None and s.out in combined and s.axes != axes[:-1]:
            return None
    return axes


def _of_elements(s: Stage) -> bool:
    """Whether a stage folds elements, each read once; a contraction reads what it multiplies again and again."""
    return any(set(axes_of(r)) == set(s.every) for r in outermost(s.body))


def row_warps(tile: RowTile) -> int:
    """Warps of a block."""
    return tile_warps(tile.plan, tile.launch.tile)
