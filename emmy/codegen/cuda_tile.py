"""Steps -> Kernel IR for GPUs: one kernel a launch, one block of threads an iteration of its block loops.

This file walks the steps; layouts, copies, contractions and finished elements are in the other cuda_* files. Waits and
arrivals stand where the steps say and nowhere else. It must not know CUDA's spelling.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd, prod

from emmy.codegen.cpu import buffers
from emmy.codegen.cuda_atoms import Contraction, contraction
from emmy.codegen.cuda_copy import Copier, only
from emmy.codegen.cuda_scope import Piece, Ring, Turn, Walk, before
from emmy.codegen.cuda_values import Chain, Done, Spread, fold_parts
from emmy.codegen.kernel import Int, IntOp, IntVar, LetInt, View, Whole, below, both, over, plus, rest, same, times
from emmy.codegen.kernel_gpu import SMEM, THREAD, Do, For, GpuKernel, If, Ref, SetInt, Stmt, counter, flipped, walk
from emmy.codegen.steps import (
    Advance,
    BarArrive,
    Barrier,
    BarWait,
    BlockSync,
    Close,
    Commit,
    Compute,
    Copy,
    Fetch,
    Finish,
    FoldParts,
    Open,
    Outline,
    Step,
    Store,
    StoreState,
    WaitGroup,
)
from emmy.codegen.steps import For as ForStep
from emmy.ir.gpu import WARP, warps
from emmy.ir.plan import BLOCK_LEVELS
from emmy.ir.program import Stage
from emmy.ir.target import Target

_ELEMENTWISE_THREADS = 256
_WIDEST = 8  # elements of a vector that a thread makes at once
_BARRIER = 8  # bytes of an mbarrier
_MEET = Do("emmy_syncwarp")
_QUIET = (_MEET, Do("emmy_fence_async"))
_LEADER = same(THREAD, Int(0))  # the thread that speaks to the copy engine


def expand(outline: Outline, target: Target) -> GpuKernel:
    """The kernel of one launch. Raises PlanError, with the reason, for plans that no code is generated for."""
    w = Walk(outline.plan, outline.launch, target)
    if len(outline.roles) != 1 or outline.launch.tile.order.kind != "static":
        kind = outline.launch.tile.order.kind
        raise w.cannot(f"{len(outline.roles)} roles of a {kind} launch; code is generated for one role, static")
    e = _Expand(w, outline)
    blocks = w.begin()
    w.threads = e.threads()
    if w.threads > target.max_threads_block:
        raise w.cannot(f"{w.threads} threads, a block of {target.name} has at most {target.max_threads_block}")
    w.place_rings()
    e.place_barriers()
    e.copiers = {v: Copier(w, r) for v, r in w.rings.items()}
    for c in e.copiers.values():
        c.begin()
    steps = e.steps(outline.roles[0].steps)
    if w.smem_bytes > target.smem_block_bytes:
        raise w.cannot(f"{w.smem_bytes} bytes of shared memory, a block of {target.name} has {target.smem_block_bytes}")
    body = (*w.head, *e.first(), *steps)
    used = _touched(body)
    return GpuKernel(
        outline.launch.name,
        tuple(c.map for c in e.copiers.values() if c.map is not None),
        tuple(b for b in buffers(outline.plan) if b.name in used),
        tuple(f"len_{s.name}" for s in outline.plan.program.syms),
        blocks,
        w.threads,
        1,
        w.smem_bytes,
        body,
    )


def _touched(body: tuple[Stmt, ...]) -> set[str]:
    """Names that statements address or cut views from."""
    out: set[str] = set()
    for s in walk(body):
        if isinstance(s, Do):
            out |= {a.view for a in s.args if isinstance(a, Ref)}
        elif isinstance(s, View):
            out.add(s.of)
    return out


@dataclass(slots=True)
class _Expand:
    w: Walk
    outline: Outline
    copiers: dict[str, Copier] = field(default_factory=dict)
    barriers: dict[str, int] = field(default_factory=dict)  # name -> first byte in shared memory
    sums: dict[str, Contraction] = field(default_factory=dict)  # stage -> its open fold
    loops: dict[int, tuple[Whole, Whole]] = field(default_factory=dict)  # loop entered -> (where it is, where it ends)
    loaded: dict[str, int] = field(default_factory=dict)  # ldg: value -> how far ahead the fill in registers is

    # ------------------------------------------------------------ what stands before the steps
    def threads(self) -> int:
        """Threads of a block: a warp for each piece of the loops over warps; without them, as many as elements keep busy."""
        t, p = self.w.launch.tile, self.w.plan.program
        if t.channels or any(x.level == "warp" for x in t.nest):
            return WARP * warps(self.w.plan, t.nest)
        most = max(prod(self.w.scope[a].size for a in p.stage(k.stage).axes) for k in t.works)
        return min(_ELEMENTWISE_THREADS, WARP * -(-most // (4 * WARP)))

    def place_barriers(self) -> None:
        for b in self.outline.barriers:
            self.barriers[b.name] = self.w.allocate(b.slots * _BARRIER, _BARRIER)

    def first(self) -> tuple[Stmt, ...]:
        """Counters of the rings, registers that copies pass through, barriers ready for their first arrival."""
        out: list[Stmt] = []
        for turn in self._turns(tuple(self.w.rings)):
            if turn.depth > 1:
                out.append(LetInt(turn.slot.name, Int(0)))
            if self._has_phase(turn):
                out.append(LetInt(turn.phase.name, Int(0)))
        for c in self.copiers.values():
            out += c.registers()
        begin: list[Stmt] = []
        for b in self.outline.barriers:
            for i in range(b.slots):
                begin.append(Do("emmy_mbar_init", (Ref(SMEM, Int(self.barriers[b.name] + i * _BARRIER)), Int(b.count))))
        if begin:
            out += [If(_LEADER, (*begin, Do("emmy_mbar_fence_init"))), Do("emmy_syncthreads")]
        return tuple(out)

    def _turns(self, values: tuple[str, ...]) -> tuple[Turn, ...]:
        return tuple(dict.fromkeys(self.w.rings[v].turn for v in values))

    def _has_phase(self, turn: Turn) -> bool:
        return any(r.turn == turn and r.channel.transport == "tma" for r in self.w.rings.values())

    # ------------------------------------------------------------ steps
    def steps(self, steps: tuple[Step, ...]) -> tuple[Stmt, ...]:
        out: list[Stmt] = []
        steps = _expect_first(_flat(steps))
        taken: set[int] = set()
        for i, s in enumerate(steps):
            if i in taken:
                continue
            if isinstance(s, Open | Close | StoreState) or (isinstance(s, Compute) and s.stage not in self.sums):
                stmts, used = self._elements(i, steps)
                taken |= used
                out += stmts
            else:
                out += self._step(s)
        return _merged(out)

    def _step(self, s: Step) -> tuple[Stmt, ...]:
        match s:
            case ForStep(at, _, body):
                return self._loop(at, body)
            case Copy(value, ahead):
                return self._copy(self.w.rings[value], ahead)
            case Commit():
                return (Do("emmy_cp_async_commit"),) if self._has("cp_async") else ()
            case WaitGroup(pending):
                return self._wait_group(pending)
            case BlockSync():
                return (Do("emmy_syncthreads"),)
            case BarWait(name, value, ahead):
                return self._wait(name, self.w.rings[value], ahead)
            case BarArrive(name, value, count, ahead):
                return self._arrive(name, self.w.rings[value], count, ahead)
            case Advance(values):
                return tuple(x for turn in self._turns(values) for x in self._advance(turn, values))
            case Compute(name):
                return self.sums[name].compute()
            case Fetch(name, ahead):
                return only(self._exists(self.sums[name].a, ahead), self.sums[name].fetch(ahead))
            case Finish(name):
                return self.sums[name].finish()
            case _:
                raise self.w.cannot(f"a GPU has no step {s}")

    def _loop(self, at: int, body: tuple[Step, ...]) -> tuple[Stmt, ...]:
        w, x = self.w, self.w.nest[at]
        outer = w.scope[x.axis]
        if any(x.axis in w.plan.program.stage(k.stage).axes for k in w.launch.tile.works):
            raise w.cannot(
                f"a loop in time over {x.axis}, which is not folded: a GPU block makes its whole piece at once"
            )
        var = IntVar(w.fresh(x.axis))
        self.loops[at] = (var, outer.hi)
        w.scope[x.axis] = w.inside(at, var)
        inner = self.steps(body)
        w.scope[x.axis] = outer
        del self.loops[at]
        return (For(var.name, outer.lo, outer.hi, x.step, inner),)

    def _has(self, transport: str) -> bool:
        return any(c.transport == transport for c in self.w.launch.tile.channels)

    # ------------------------------------------------------------ channels
    def _place(self, ring: Ring, ahead: int) -> tuple[Whole, Whole] | None:
        """(where the fill `ahead` begins along the ring's loop, where the loop ends); None when the tile is the loop."""
        at = ring.channel.at
        if at < 0 or self.w.nest[at].level in BLOCK_LEVELS:
            return None
        piece = self.w.scope[self.w.nest[at].axis]
        here, end = self.loops.get(at, (piece.lo, piece.hi))
        return plus(here, Int(ahead * self.w.nest[at].step)), end

    def _exists(self, ring: Ring, ahead: int) -> Whole:
        """Whether the ring's loop has the fill `ahead`."""
        place = self._place(ring, ahead)
        if place is None:
            return Int(int(ahead < 1))
        return Int(1) if ahead == 0 and ring.channel.at in self.loops else before(*place)

    def _filled(self, ring: Ring, ahead: int) -> dict[str, Piece]:
        """The scope of the fill `ahead`."""
        place, at = self._place(ring, ahead), ring.channel.at
        return self.w.scope if place is None else {**self.w.scope, self.w.nest[at].axis: self.w.inside(at, place[0])}

    def _copy(self, ring: Ring, ahead: int) -> tuple[Stmt, ...]:
        copier, scope, exists = self.copiers[ring.value], self._filled(ring, ahead), self._exists(ring, ahead)
        if ring.channel.transport == "tma":
            full = self.barriers[f"full_{ring.value}"]
            bar = plus(times(ring.turn.at(ahead), Int(_BARRIER)), Int(full))
            return only(both(exists, _LEADER), copier.engine_fill(ahead, scope, bar))
        if ring.channel.transport == "ldg":
            if ring.value in self.loaded:
                raise self.w.cannot(
                    f"{ring.value}: ldg keeps one fill in registers, depth {ring.channel.depth} needs more"
                )
            self.loaded[ring.value] = ahead
        return only(exists, copier.fill(ahead, scope)) if ring.channel.transport == "ldg" else copier.fill(ahead, scope, exists)

    def _wait_group(self, pending: int) -> tuple[Stmt, ...]:
        out: list[Stmt] = []
        if self._has("cp_async"):
            out.append(Do(f"emmy_cp_async_wait<{pending}>"))
        for value, ahead in self.loaded.items():
            if self.w.rings[value].channel.at in self.loops:  # after the loop nothing is left to land
                out += self.copiers[value].land(ahead)
        self.loaded.clear()
        return tuple(out)

    def _wait(self, name: str, ring: Ring, ahead: int) -> tuple[Stmt, ...]:
        """Everyone waits for a full slot; for an empty one only the thread that fills it."""
        b = self._spec(name)
        parity = flipped(ring.turn.phase, rest(plus(ring.turn.lap(ahead), Int(b.first_parity[0])), Int(2)))
        wait = Do("emmy_mbar_wait", (self._barrier(name, ring, ahead), parity))
        if b.tx_bytes:
            return only(self._exists(ring, ahead), (wait,))
        if not self.loops and ahead < ring.channel.depth:
            return ()  # the first fill of a slot, which passes at once
        return only(both(self._exists(ring, ahead), _LEADER), (wait,))

    def _arrive(self, name: str, ring: Ring, count: int, ahead: int) -> tuple[Stmt, ...]:
        bar, tx = self._barrier(name, ring, ahead), self._spec(name).tx_bytes
        if tx:
            return only(both(self._exists(ring, ahead), _LEADER), (Do("emmy_mbar_expect_tx", (bar, Int(tx))),))
        if count * WARP != self.w.threads:
            raise self.w.cannot(f"{count} arrivals at {name}, the block has {self.w.threads // WARP} warps")
        # One lane for a warp, when all its lanes have read, and what they read is in their registers: without the fence the
        # copy engine overtakes reads that are still on their way (measured on an H200: wrong sums in one launch of two).
        return Do("emmy_fence_async"), _MEET, If(same(self.w.lane(), Int(0)), (Do("emmy_mbar_arrive", (bar,)),))

    def _spec(self, barrier: str) -> Barrier:
        return next(b for b in self.outline.barriers if b.name == barrier)

    def _barrier(self, name: str, ring: Ring, ahead: int) -> Ref:
        return Ref(SMEM, plus(times(ring.turn.at(ahead), Int(_BARRIER)), Int(self.barriers[name])))

    def _advance(self, turn: Turn, values: tuple[str, ...]) -> tuple[Stmt, ...]:
        for v in values:
            if v in self.loaded and self.w.rings[v].turn == turn:
                self.loaded[v] -= 1
        flip = (SetInt(turn.phase.name, flipped(turn.phase, Int(1))),) if self._has_phase(turn) else ()
        if turn.depth == 1:
            return flip
        wrap = If(same(turn.slot, Int(turn.depth)), (SetInt(turn.slot.name, Int(0)), *flip))
        return SetInt(turn.slot.name, plus(turn.slot, Int(1))), wrap

    # ------------------------------------------------------------ elements
    def _elements(self, i: int, steps: tuple[Step, ...]) -> tuple[tuple[Stmt, ...], set[int]]:
        """Opening and closing of folds, and elementwise stages: statements, and the later steps they include."""
        w, s = self.w, steps[i]
        assert isinstance(s, Open | Close | StoreState | Compute)
        stage = w.plan.program.stage(s.stage)
        if isinstance(s, Open):
            if i + 1 < len(steps) and steps[i + 1] == FoldParts(s.stage):
                chain, used = self._chain(i + 2, steps)
                return self._dealt(chain, stage), {i + 1, i + 2, *used}
            self.sums[s.stage] = contraction(w, w.launch.tile.work(s.stage))
            return self.sums[s.stage].open(), set()
        chain, used = self._chain(i, steps)
        if isinstance(s, Compute):
            return self._dealt(chain, stage), used
        fold = self.sums.pop(s.stage)
        spread, sums = fold.spread()
        assert stage.monoid is not None
        return (*fold.close(), *chain.emit(spread, {stage.monoid.state[0][0]: sums})), used

    def _chain(self, i: int, steps: tuple[Step, ...]) -> tuple[Chain, set[int]]:
        """steps[i] and what can follow it on the same elements in registers."""
        p, first = self.w.plan.program, steps[i]
        assert isinstance(first, Close | StoreState | Compute)
        axes, made = p.stage(first.stage).axes, {first.stage}
        chain: list[Done] = [first]
        used: set[int] = set()
        for j in range(i + 1, len(steps)):
            s = steps[j]
            if isinstance(s, Compute) and self._follows(p.stage(s.stage), axes, made):
                made.add(s.stage)
            elif not (isinstance(s, Store) and s.stage in made):
                continue
            chain.append(s)
            used.add(j)
        return Chain(self.w, tuple(chain)), used

    def _follows(self, s: Stage, axes: tuple[str, ...], made: set[str]) -> bool:
        here = {k.stage for k in self.w.launch.tile.works}
        return not s.reduces and s.axes == axes and all(v in made or v not in here for v in s.reads)

    def _dealt(self, chain: Chain, stage: Stage) -> tuple[Stmt, ...]:
        """The block's elements dealt to all threads, vector by vector."""
        w = self.w
        if not stage.axes:
            raise w.cannot(f"{stage.out} is one number; a GPU deals elements along axes")
        sizes = [w.scope[a].size for a in stage.axes]
        width = chain.width(stage.axes, gcd(_WIDEST, sizes[-1]))
        counts = [*sizes[:-1], sizes[-1] // width]
        vectors = prod(counts)
        passes = -(-vectors // w.threads)
        it = counter("it", passes)
        number: Whole = plus(THREAD, times(it, Int(w.threads))) if passes > 1 else THREAD
        spot: dict[str, Whole] = {}
        left = number
        for a, n in reversed(list(zip(stage.axes, counts, strict=True))):
            outermost = a == stage.axes[0]
            inside = left if outermost else rest(left, Int(n))
            spot[a] = plus(w.scope[a].lo, times(inside, Int(width)) if a == stage.axes[-1] else inside)
            left = over(left, Int(n))
        exists = below(number, Int(vectors)) if vectors % w.threads else Int(1)
        spread = Spread(stage.axes, (), (("it", passes),), spot, width, exists)
        fold = None
        if isinstance(chain.steps[0], Close):
            space = w.plan.workspace(stage.out)
            assert space is not None
            fold = fold_parts(stage, space.parts)
        return chain.emit(spread, fold=fold)


def _flat(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps without loops over warps and lanes: those are agents, and every work knows its share."""
    out: list[Step] = []
    for s in steps:
        out += _flat(s.body) if isinstance(s, ForStep) and s.loop.level in ("warp", "lane") else (s,)
    return tuple(out)


def _expect_first(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """A barrier hears how many bytes to expect before the copies that bring them begin."""
    out = list(steps)
    for i in range(len(out) - 1):
        here, after = out[i], out[i + 1]
        if (
            isinstance(here, Copy)
            and isinstance(after, BarArrive)
            and (here.value, here.ahead) == (after.value, after.ahead)
        ):
            out[i], out[i + 1] = after, here
    return tuple(out)


def _merged(stmts: list[Stmt]) -> tuple[Stmt, ...]:
    """Neighbours under one condition become one, and the leader's warp meets after what the leader did alone.

    Instructions of whole warps need their lanes together (PTX ISA: .aligned), which only such a meeting promises.
    """
    joined: list[Stmt] = []
    for s in stmts:
        last = joined[-1] if joined else None
        if isinstance(s, If) and isinstance(last, If) and s.cond == last.cond:
            joined[-1] = If(s.cond, (*last.then, *s.then))
        elif s not in _QUIET or s not in joined[-3:-1]:  # a warp that has just met has read nothing since
            joined.append(s)
    out: list[Stmt] = []
    for s, after in zip(joined, [*joined[1:], None], strict=True):
        out.append(s)
        if isinstance(s, If) and _leads(s.cond) and after not in (_MEET, Do("emmy_syncthreads")):
            out.append(_MEET)
    return tuple(out)


def _leads(cond: Whole) -> bool:
    return cond == _LEADER or (isinstance(cond, IntOp) and cond.fn == "&&" and _leads(cond.b))
