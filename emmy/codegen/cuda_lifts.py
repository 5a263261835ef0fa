"""Which instructions fold by a monoid with a lift, beside mma.sync: a warpgroup's, and single lanes in f32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from emmy.codegen.cuda_atoms import Simt, fragments, tiles_of_lanes
from emmy.codegen.cuda_lift import Lifted
from emmy.codegen.cuda_scope import Walk
from emmy.codegen.cuda_values import Spread
from emmy.codegen.cuda_vector import load
from emmy.codegen.cuda_wgmma import check_described, descriptor, further
from emmy.codegen.kernel import Call, Int, IntVar, Load, Store, Whole, over, plus, rest, times
from emmy.codegen.kernel_gpu import (
    ROLLED,
    SMEM,
    THREAD,
    Do,
    For,
    Further,
    Ref,
    Regs,
    Stmt,
    bits,
    counter,
    shifted,
    unrolled,
)
from emmy.codegen.ptx.wgmma import wgmma_name
from emmy.ir.expr import Read, factors
from emmy.ir.gpu import GROUP
from emmy.ir.moves.atom import mnk_axes
from emmy.ir.moves.lifted_tiles import product_below
from emmy.ir.plan import AGENTS, Work
from emmy.ir.program import MAX, SUM
from emmy.ir.relative import relative


@dataclass(slots=True)
class LiftedWgmma(Lifted):
    """The contraction by a warpgroup: weights in registers, V from shared memory (PTX ISA: wgmma.mma_async, A in registers)."""

    def _contracted(self, weights: str) -> tuple[Stmt, ...]:
        check_described(self.w, self.b)
        out = list(self._packed(weights))
        word, n = descriptor(self.w, self.b, self.n, self.k, out), self.atom.n
        name = "emmy_" + wgmma_name(n, self.dtype, "reg", b_mn=self.b.columns == self.n)
        each = n // 2
        out.append(Do("emmy_wgmma_fence"))
        for kk in range(self.kt):
            for i in range(self.mt):
                for j in range(8 * self.nt // n):
                    sums = Ref(self._sums, Int((i * (8 * self.nt // n) + j) * each))
                    a = Ref(self._operand, Int(4 * (kk * self.mt + i)))
                    out.append(Do(name, (sums, a, Further(word, further(self.b, self.k, j * n, 16 * kk)), Int(1))))
        words = 4 * self.mt * self.kt
        pinned = (Do("emmy_pin_b32x4", (Ref(self._operand, Int(at)),)) for at in range(0, words, 4))
        return (*out, Do("emmy_wgmma_commit"), Do("emmy_wgmma_wait<0>"), *pinned)

    def spread(self) -> tuple[Spread, Mapping[str, Ref]]:
        own = times(bits(shifted(THREAD, 5), GROUP - 1), Int(16))
        return fragments(self, own, self.atom.m, self.nt)


@dataclass(slots=True)
class LiftedSimt(Lifted):
    """The contraction by single lanes, 4 along m by 8 along n, in f32: a lane's weights go to the others of its rows one by one.

    wide: columns of an atom of what the weights are made of that a lane has; kt: how many such atoms there are
    """

    wide: int = 1

    @property
    def _tm(self) -> int:
        return self.atom.m // Simt.LANES_M

    @property
    def _tn(self) -> int:
        return self.atom.n // Simt.LANES_N

    @property
    def _row(self) -> Whole:
        return plus(times(counter("i", self.mt), Int(self._tm)), counter("h", self._tm))

    @property
    def _row_count(self) -> int:
        return self.mt * self._tm

    @property
    def _sum_count(self) -> int:
        return self._row_count * self.nt * self._tn

    @property
    def _mates(self) -> tuple[int, ...]:
        return 1, 2, 4

    def _each_row(self, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        return unrolled("i", self.mt, unrolled("h", self._tm, body))

    def _along(self, count: int, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        return unrolled("j", count, unrolled("e", self._tn, body))

    def _at(self, count: int) -> Whole:
        column = plus(times(counter("j", count), Int(self._tn)), counter("e", self._tn))
        return plus(times(self._row, Int(count * self._tn)), column)

    def _along_weights(self, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        return unrolled("j", self.kt, unrolled("e", self.wide, body))

    @property
    def _weight_at(self) -> Whole:
        column = plus(times(counter("j", self.kt), Int(self.wide)), counter("e", self.wide))
        return plus(times(self._row, Int(self.kt * self.wide)), column)

    def _contracted(self, weights: str) -> tuple[Stmt, ...]:
        """For each lane of a row in turn: its weights, of as many rows of V, times this lane's columns of those."""
        lane, mate, layout, tn = self.w.lane(), IntVar("mate_at"), self.b.layout, self._tn
        columns = self.nt * tn
        row, x = self._of(f"{self.b.value}_frag"), self._of("weight")
        own = times(bits(lane, Simt.LANES_N - 1), Int(tn))
        wide = min(tn, 16 // layout.item)
        i, parts = counter("c", columns // wide), tn // wide
        k = plus(
            times(counter("j", self.kt), Int(Simt.LANES_N * self.wide)),
            times(mate, Int(self.wide)),
            counter("e", self.wide),
        )
        n = plus(
            self.w.warp_offset(self.n),
            times(over(i, Int(parts)), Int(self.atom.n)),
            own,
            times(rest(i, Int(parts)), Int(wide)),
        )
        to = Ref(row, times(i, Int(wide)))
        if self.b.columns == self.n:
            read = load(self.w, to, self.dtype, wide, Ref(SMEM, plus(layout.at(k, n), self.b.slot(0))), "lds")  # type: ignore[arg-type]
        else:
            raise self.w.cannot(f"simt reads {self.b.value} along {self.n} in a lift")
        fetch = (Regs(row, "f32", columns), *unrolled("c", columns // wide, read))
        theirs = Do("emmy_take_f32", (Ref(x, Int(0)), Ref(weights, self._weight_at), plus(bits(lane, 24), mate)))
        at = plus(times(self._row, Int(columns)), counter("c", columns))
        fma = Store(
            self._sums, at, Call("fma", (Load(x, Int(0)), Load(row, counter("c", columns)), Load(self._sums, at)))
        )
        each = (Regs(x, "f32", 1), theirs, *unrolled("c", columns, (fma,)))
        body = self._along_weights((*fetch, *self._each_row(each)))
        return (For(mate.name, Int(0), Int(Simt.LANES_N), 1, body, ROLLED),)

    def spread(self) -> tuple[Spread, Mapping[str, Ref]]:
        return tiles_of_lanes(self, self.nt, self._tm, self._tn, "h")


def lifted(w: Walk, work: Work, kept: Mapping[str, str]) -> Lifted:
    """The fold of a work whose monoid has a lift. Raises PlanError with the reason when no code is generated for it."""
    stage = w.plan.program.stage(work.stage)
    assert stage.monoid is not None
    how = relative(stage.monoid)
    inner = next((s for s in stage.monoid.lift if any(a.stage == s.out for a in work.atoms)), None)
    if how is None or inner is None:
        raise w.cannot(
            f"{stage.out} is folded by {stage.monoid.name}; a GPU needs an atom for a contraction of its lift"
        )
    base = next(s for s in stage.monoid.lift if s.out == how.base)
    sums = all(s.monoid == SUM for s in stage.monoid.lift if s.reduces and s is not base)
    if base.monoid != MAX or not sums:
        raise w.cannot(f"{stage.out}: the lift of {stage.monoid.name} has folds other than a maximum and sums")
    atom = next(a for a in work.atoms if a.stage == inner.out)
    kind = _KINDS.get(atom.name)
    if kind is None:
        raise w.cannot(f"{stage.out}: {atom.name} has no code in a lift; {', '.join(_KINDS)} have")
    m, n, k = mnk_axes(inner)
    second = factors(inner.body)[1]
    assert m is not None and isinstance(second, Read)
    ring = w.rings.get(second.value)
    if ring is not None:  # the same slots, told by the axes that move in them here
        own = dict(zip(w.plan.program.value(second.value).axes, map(str, second.along), strict=True))
        ring = replace(ring, rows=own[ring.rows], columns=own[ring.columns])
    if ring is None or {ring.rows, ring.columns} != {k, n}:
        raise w.cannot(f"{stage.out} reads {second.value}, which is not in shared memory as [{k},{n}]: stage it first")
    levels = ("grid", "cluster", "serial", *AGENTS)
    size = {a: w.plan.extent(tuple(x for x in w.nest if x.level in levels), a) for a in (m, n, k)}
    maker = product_below(w.plan, stage)
    made = next(iter(w.launch.tile.work(maker.out).atoms), None) if maker else None
    by_lanes = kind is LiftedSimt
    if by_lanes and (made is None or (made.name, made.m) != (atom.name, atom.m)):
        raise w.cannot(
            f"{atom.name} in a lift has the rows of {atom.m} of its weights, which {made or 'no atom'} makes"
        )
    step_k = made.n if by_lanes and made else 16
    for a, step in ((m, atom.m), (n, atom.n), (k, step_k)):
        if size[a] % step:
            raise w.cannot(f"{atom.name} takes {a} by {step}, a warp has {size[a]}")
    if by_lanes:
        counts = size[m] // atom.m, size[n] // atom.n, size[k] // step_k
        return LiftedSimt(w, stage, inner, atom, how, ring, m, n, k, *counts, kept, step_k // Simt.LANES_N)
    if size[k] % atom.k:
        raise w.cannot(f"{atom.name} promotes every {atom.k} of {k}, a piece has {size[k]}")
    return kind(w, stage, inner, atom, how, ring, m, n, k, size[m] // atom.m, size[n] // 8, size[k] // 16, kept)


_KINDS: dict[str, type[Lifted]] = {"mma": Lifted, "hybrid": Lifted, "wgmma": LiftedWgmma, "simt": LiftedSimt}
