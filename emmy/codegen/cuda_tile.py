"""Steps -> Kernel IR for GPUs: one kernel a launch, one block of threads an iteration of its block loops.

This file walks the steps; layouts, copies, contractions and finished elements are in the other cuda_* files. Waits and
arrivals stand where the steps say and nowhere else. It must not know CUDA's spelling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import gcd, prod

from emmy.codegen.cpu import buffers
from emmy.codegen.cpu_scope import length_of
from emmy.codegen.cuda_atoms import Contraction, F16Sums, Fold, Hybrid, Mma, Simt, contraction
from emmy.codegen.cuda_copy import only
from emmy.codegen.cuda_count import Cleared, Count, count_of, each_tile
from emmy.codegen.cuda_dealt import by_rows, in_order
from emmy.codegen.cuda_direct import blocks_together, direct
from emmy.codegen.cuda_kept import keep
from emmy.codegen.cuda_late import Between, in_parts
from emmy.codegen.cuda_lift import Lifted
from emmy.codegen.cuda_lifts import lifted
from emmy.codegen.cuda_marked import lanes_of_a_row, take_parts
from emmy.codegen.cuda_prefetch import prefetch
from emmy.codegen.cuda_rings import Rings, expect_first, merged
from emmy.codegen.cuda_rows import Rows, rows
from emmy.codegen.cuda_scope import Ring, Walk
from emmy.codegen.cuda_statistic import statistic
from emmy.codegen.cuda_streamk import Shares
from emmy.codegen.cuda_values import FINISHED, Asked, Chain, Done, Folds, Spread, fold_parts
from emmy.codegen.cuda_wgmma import LoadedWgmma, Wgmma
from emmy.codegen.kernel import (
    Int,
    IntVar,
    View,
    Whole,
    below,
    both,
    evaluated,
    least,
    pieces,
    plus,
    same,
    times,
)
from emmy.codegen.kernel_gpu import (
    BLOCK,
    ELECTED,
    ROLLED,
    WARP_INDEX,
    Do,
    For,
    GpuKernel,
    If,
    LetFrom,
    Ref,
    Stmt,
    bits,
    walk,
)
from emmy.codegen.steps import (
    Advance,
    Ahead,
    Ask,
    At,
    AwaitCleared,
    AwaitFlag,
    BarArrive,
    BarWait,
    BlockSync,
    Clear,
    Close,
    ClusterSync,
    Commit,
    Compute,
    Copy,
    CountBegun,
    CountFirst,
    CountPart,
    EachTile,
    Fetch,
    Finish,
    FoldParts,
    ForHelpers,
    From,
    Gather,
    Helping,
    IfLast,
    Late,
    LaunchWait,
    LeaveSums,
    LetNext,
    LowerFlag,
    Open,
    Outline,
    Owning,
    PassCleared,
    Prefetch,
    Preload,
    RaiseCleared,
    RaiseFlag,
    ResetCount,
    RoleSteps,
    RoleSync,
    Settle,
    Share,
    Step,
    Store,
    StoreState,
    TakeParts,
    TakeSums,
    Together,
    TurnPass,
    TurnWait,
    WaitGroup,
)
from emmy.codegen.steps import For as ForStep
from emmy.ir.beside import beside
from emmy.ir.gpu import RESERVED_BYTES, WARP, parts_left, registers_at_launch, tile_warps, trips
from emmy.ir.gpu import threads as plan_threads
from emmy.ir.moves.stage import SELF
from emmy.ir.plan import AGENTS, Role
from emmy.ir.program import Stage, Sym, same_rows
from emmy.ir.row_tiles import row_tile, row_warps
from emmy.ir.target import Target

KINDS: dict[str, type[Contraction]] = {
    "mma": Mma,
    "hybrid": Hybrid,
    "f16": F16Sums,
    "simt": Simt,
    "wgmma": Wgmma,
    "wgmma_rs": LoadedWgmma,
}
_INDEX = 1 << 31  # elements that an index of 32 bits does not reach
_ELEMENTWISE_THREADS = 256
_COMPUTING = 1  # the named barrier of the threads that compute, those of the first team; 0 is that of all
_TOGETHER = (Open, Compute, Fetch, Preload, Finish, Settle, FoldParts, Share, Gather)  # of stages side by side
_WIDEST = 8  # elements of a vector that a thread makes at once


def expand(outline: Outline, target: Target) -> GpuKernel:
    """The kernel of one launch. Raises PlanError, with the reason, for plans that no code is generated for."""
    w, t = Walk(outline.plan, outline.launch, target), outline.launch.tile
    most = {f"len_{s.name}": s.hi for s in outline.plan.program.syms}
    wide = [b.name for b in buffers(outline.plan) if evaluated(b.elements, most) >= _INDEX]
    if wide:
        raise w.cannot(
            f"{', '.join(wide)} may have {_INDEX} elements or more, indices have 32 bits: split it into several ops"
        )
    if t.order.kind != "static":
        w.walk_tiles()
    w.rows = row_tile(outline.plan, outline.launch)
    tiles = w.begin()
    shares = Shares.of(w, tiles) if t.order.kind == "streamk" else None
    w.threads = _threads(w)
    threads = max(w.threads * w.teams, plan_threads(outline.plan, outline.launch))
    if threads > target.max_threads_block:
        raise w.cannot(f"{threads} threads, a block of {target.name} has at most {target.max_threads_block}")
    rings = Rings(w, outline.barriers)
    rings.begin()
    every = times(tiles, Int(shares.each)) if shares else tiles
    blocks = least(Int(t.order.workers), every) if t.order.kind != "static" else tiles
    roles = [
        r for r in outline.roles if not r.role.deal or r.role.deal[0] == 0
    ]  # in turn, they do the same on other tiles
    mine = rows(w, w.rows) if w.rows else None
    steps = [_Expand(w, replace(rings, leader=_leader(r.role, rings)), shares, mine).steps(r.steps) for r in roles]
    around = [
        (x.before(r.before, tiles), x.steps(r.after) if r.after else ()) for r in roles for x in (_Expand(w, rings),)
    ]
    if shares:
        bodies = [shares.walked(stmts) for stmts in steps]
    else:
        each = zip(roles, steps, around, strict=True)
        bodies = [
            (*(s for make in first for s in make()), *_walked(w, rings, r, tiles, stmts, last))
            for r, stmts, (first, last) in each
        ]
    played = [_played(w, r.role, body) for r, body in zip(roles, bodies, strict=True)]
    if w.smem_bytes > target.smem_block_bytes:
        raise w.cannot(f"{w.smem_bytes} bytes of shared memory, a block of {target.name} has {target.smem_block_bytes}")
    # Lanes beside the one that fills wait for it here, not in the cluster's barrier, at which whole warps arrive.
    last = (Do("emmy_syncwarp"), *_Expand(w, rings).steps(outline.last)) if outline.last else ()
    body = (
        *w.head,
        *rings.first(ClusterSync(every=True) in outline.first),
        *(s for stmts in played for s in stmts),
        *last,
    )
    used, early = _touched(body), outline.launch.early
    return GpuKernel(
        outline.launch.name,
        tuple(w.maps),
        tuple(b for b in buffers(outline.plan) if b.name in used),
        tuple(f"len_{s.name}" for s in outline.plan.program.syms),
        blocks,
        threads,
        blocks_together(w),
        max(w.smem_bytes, _even_share(blocks, target)) if early and t.channels else w.smem_bytes,
        body,
        cluster=w.cluster,
        together=shares is not None or bool(parts_left(outline.plan, t)),
        resident=shares is not None,
        early=early,
    )


def _even_share(blocks: Whole, target: Target) -> int:
    """Shared memory, in bytes, of which a multiprocessor has no more than each needs to hold its part of the blocks.

    Blocks of an early launch come while others still fill multiprocessors unevenly. If more of them fitted one, they would
    crowd where there is room, and the rest would idle (measured on an H200: 36.7 us instead of 28.5). Launches without
    rings read through the cache that this would take from them (12.2 us instead of 8.9).
    """
    if not isinstance(blocks, Int) or blocks.value > target.n_sms * target.max_blocks_sm:
        return 0
    each = target.smem_sm_bytes // -(-blocks.value // target.n_sms) - RESERVED_BYTES
    return min(each // 128 * 128, target.smem_block_bytes)


def _leader(role: Role, rings: Rings) -> Whole:
    """Whether a thread of the role speaks to the copy engine: the only one that runs a producer's steps does."""
    return rings.leader if role.works else Int(1)


def _walked(
    w: Walk, rings: Rings, r: RoleSteps, tiles: Whole, body: tuple[Stmt, ...], after: tuple[Stmt, ...]
) -> tuple[Stmt, ...]:
    """The steps of one tile, for each tile of a block that walks them, or for those that the role takes in turn; then those after."""
    if w.block == BLOCK:
        return (*body, *after)
    workers, body = w.launch.tile.order.workers, (*w.tile_head, *body)
    mine: Whole = BLOCK
    n, skipped = 1, tuple[Stmt, ...]()
    if r.role.deal is not None:
        fills, n = _fills(w, _flat(r.steps)), r.role.deal[1]
        mine = plus(BLOCK, times(w.team(), Int(workers)))
        body, skipped = (*body, *rings.skip(Int(n - 1), fills)), rings.skip(w.team(), fills)
    again = (For(w.block.name, mine, tiles, n * workers, (*w.tile_head, *after)),) if after else ()
    return (*skipped, For(w.block.name, mine, tiles, n * workers, body), *again)


def _fills(w: Walk, steps: tuple[Step, ...]) -> Counter[str]:
    """Fills of each ring in one tile. Raises PlanError where tiles differ in them."""
    out: Counter[str] = Counter()
    for s in steps:
        if isinstance(s, Advance):
            out.update(s.values)
        elif isinstance(s, ForStep) and (inner := _fills(w, s.body)):
            n = trips(w.plan, w.nest, s.at)
            if n is None:
                raise w.cannot(
                    f"fills over {s.loop.axis} differ from tile to tile: consumers cannot skip those of others"
                )
            out.update({v: n * k for v, k in inner.items()})
    return out


def _played(w: Walk, role: Role, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """What the threads of a role do: those that compute come first, one thread after them fills."""
    if role.name == SELF:
        return body
    first = Int(w.teams * w.threads // WARP)
    mine = below(WARP_INDEX, first)
    if not role.works:
        body = (If(both(same(WARP_INDEX, first), ELECTED), body),)
        mine = below(Int(first.value - 1), WARP_INDEX)
    most = max(r.registers for r in w.launch.tile.roles)
    if most > registers_at_launch(w.plan, w.launch, w.target):  # otherwise there is nothing to gain
        body = (Do(f"emmy_setmaxnreg_{'inc' if role.works else 'dec'}<{role.registers}>"), *body)
    return (If(mine, body),)


def _touched(body: tuple[Stmt, ...]) -> set[str]:
    """Names that statements address or cut views from."""
    out: set[str] = set()
    for s in walk(body):
        if isinstance(s, Do | LetFrom):
            out |= {a.view for a in s.args if isinstance(a, Ref)}
        elif isinstance(s, View):
            out.add(s.of)
    return out


def _threads(w: Walk) -> int:
    """Threads that make a tile together: a warp for each piece of the loops over warps; without them, as many as elements keep busy."""
    t, p = w.launch.tile, w.plan.program
    if w.rows:
        return WARP * row_warps(w.rows)
    if t.channels or any(k.atoms for k in t.works) or any(x.level in AGENTS for x in t.nest):
        return WARP * tile_warps(w.plan, t)
    rows = [prod(w.scope[a].size for a in s.axes) for k in t.works if (s := p.stage(k.stage)).reduces and not k.combine]
    if rows:
        return min(_ELEMENTWISE_THREADS, WARP * max(rows))  # a warp folds a row
    most = max(prod(w.scope[a].size for a in p.stage(k.stage).axes) for k in t.works)
    return min(_ELEMENTWISE_THREADS, WARP * -(-most // (4 * WARP)))


@dataclass(slots=True)
class _Expand:
    w: Walk
    rings: Rings
    shares: Shares | None = None  # where blocks share tiles
    rows: Rows | None = None  # where the launch is rows
    sums: dict[str, Fold] = field(default_factory=dict)  # stage -> its open fold
    counts: dict[str, Count] = field(default_factory=dict)  # stage -> the count of its parts
    begun: dict[str, Contraction] = field(default_factory=dict)  # contractions that are begun ahead of their turn
    kept: dict[str, str] = field(default_factory=dict)  # value that a lift reads -> registers that hold its block
    asked: Asked = field(default_factory=dict)  # what lanes have asked for
    closed: set[str] = field(default_factory=set)  # of these, those whose sums are f32 numbers in registers already

    # ------------------------------------------------------------ steps
    def steps(self, steps: tuple[Step, ...]) -> tuple[Stmt, ...]:
        if self.rows:
            return self._of_rows(_flat(steps), self.rows)
        out: list[Stmt] = []
        steps = expect_first(self._as_one(_flat(steps)))
        taken: set[int] = set()
        for i, s in enumerate(steps):
            if i in taken or (isinstance(s, Compute) and any(s.stage in fold.makes for fold in self.sums.values())):
                continue
            if isinstance(s, Open | Close | StoreState) or (isinstance(s, Compute) and s.stage not in self.sums):
                stmts, used = self._elements(i, steps)
                taken |= used
                out += stmts
            elif isinstance(s, ForStep):
                out += self._loop(s.at, s.body, steps[i + 1 :])
            else:
                out += self._step(s)
        return merged(out)

    def before(self, steps: tuple[Step, ...], tiles: Whole) -> tuple[Callable[[], tuple[Stmt, ...]], ...]:
        """What makes the statements ahead of a role's tiles, when what they need for each tile is known."""
        out: list[Callable[[], tuple[Stmt, ...]]] = []
        for s in steps:
            if isinstance(s, EachTile):
                out.append(partial(each_tile, self.w, tiles, self.steps(s.body)))
            else:
                out.append(partial(tuple, self._step(s)))
        return tuple(out)

    def _of_rows(self, steps: tuple[Step, ...], rows: Rows) -> tuple[Stmt, ...]:
        """The same where elements stay in registers from fold to fold."""
        out: list[Stmt] = []
        at = 0
        while at < len(steps):
            end = at
            while end < len(steps) and rows.makes_elements(steps[end]):
                end += 1
            if end > at:
                out += rows.elements(steps[at:end])
                at = end
                continue
            alone = rows.step(steps[at])
            out += self._step(steps[at]) if alone is None else alone
            at += 1
        return tuple(out)

    def _step(self, s: Step) -> tuple[Stmt, ...]:  # noqa: C901  one case a step
        match s:
            case ForStep(at, _, body):
                return self._loop(at, body)
            case Copy(value, ahead):
                return self.rings.copy(self.w.rings[value], ahead)
            case Commit():
                return self.rings.commit()
            case WaitGroup(pending):
                return self.rings.wait_group(pending)
            case BlockSync():
                return (Do("emmy_syncthreads"),)
            case RoleSync():
                return (Do("emmy_bar_sync", (plus(self.w.team(), Int(_COMPUTING)), Int(self.w.threads))),)
            case ClusterSync():
                return Do("emmy_cluster_arrive"), Do("emmy_cluster_wait")
            case BarWait(name, value, ahead):
                return self.rings.wait(name, self.w.rings[value], ahead)
            case BarArrive(name, value, count, ahead):
                return self.rings.arrive(name, self.w.rings[value], count, ahead)
            case Advance(values):
                return self.rings.advance(values)
            case TurnWait():
                return self.rings.turn_wait()
            case TurnPass():
                return self.rings.turn_pass()
            case LetNext():
                return (Do("emmy_pdl_launch"),)
            case LaunchWait():
                return (Do("emmy_pdl_wait"),)
            case Ahead(value, n, inner):
                return self._ahead(self.w.rings[value], n, inner)
            case From(value, fill, inner):
                return only(self.rings.has_come_to(self.w.rings[value], fill), self.steps(inner))
            case CountPart() | CountBegun() | IfLast() | ResetCount():
                return self._counted(s)
            case CountFirst() | Clear() | RaiseCleared() | AwaitCleared() | PassCleared():
                return self._cleared(s)
            case At(value, fill, inner):
                return only(both(self.rings.stands_at(self.w.rings[value], fill), self.rings.leader), self.steps(inner))
            case Prefetch(value):
                return prefetch(self.w, value)
            case (
                Helping() | Owning() | ForHelpers() | LeaveSums() | RaiseFlag() | AwaitFlag() | LowerFlag() | TakeSums()
            ):
                assert self.shares is not None
                return self._shared(s, self.shares)
            case Compute() | Fetch() | Preload() | Finish() | Settle() | Share() | Gather():
                return self._fold(s)
            case _:
                raise self.w.cannot(f"a GPU has no step {s}")

    def _fold(self, s: Compute | Fetch | Preload | Finish | Settle | Share | Gather) -> tuple[Stmt, ...]:
        fold = self.sums[s.stage]
        match s:
            case Compute():
                return fold.compute()
            case Fetch(_, ahead) if isinstance(fold, Contraction):
                return only(self.rings.exists(fold.a, ahead), fold.fetch(ahead))
            case Finish() if isinstance(fold, Contraction):
                return fold.finish()
            case Settle(_, pending) if isinstance(fold, Contraction):
                return fold.settle(pending)
            case Preload():
                return fold.preload()
            case Share():
                return fold.share()
            case Gather():
                return ()  # where the elements are finished
            case _:
                raise self.w.cannot(f"{s.stage} reads nothing ahead: its operands have no slots")

    def _ahead(self, ring: Ring, n: int, body: tuple[Step, ...]) -> tuple[Stmt, ...]:
        """A contraction that is begun before its turn. Its sums' registers are there throughout."""
        w, out = self.w, tuple[Stmt, ...]()
        stage = next(s.stage for s in body if isinstance(s, Open))
        if stage not in self.begun:
            fold = self.begun[stage] = contraction(w, (w.launch.tile.work(stage),), KINDS)
            out = fold.open()
            fold.anew = True
        self.sums[stage] = self.begun[stage]
        w.further[ring.channel.at] = n
        begin = self.steps(tuple(s for s in body if not isinstance(s, Open)))
        del w.further[ring.channel.at]
        return (*out, *only(self.rings.exists(ring, n), begin))

    def _shared(
        self,
        s: Helping | Owning | ForHelpers | LeaveSums | RaiseFlag | AwaitFlag | LowerFlag | TakeSums,
        shares: Shares,
    ) -> tuple[Stmt, ...]:
        match s:
            case Helping(body):
                first = tuple(x for name in self.sums for x in self._closed(name))
                return (*first, If(shares.helps, self.steps(body)))
            case Owning(body):
                return (If(shares.owns, self.steps(body)),)
            case ForHelpers(body):
                return shares.for_helpers(self.steps(body))
            case LeaveSums(stage):
                return shares.leave(stage, self.sums[stage])
            case RaiseFlag(stage):
                return shares.raise_flag(stage)
            case AwaitFlag(stage):
                return shares.await_flag(stage)
            case LowerFlag(stage):
                return shares.lower_flag(stage)
            case TakeSums(stage):
                return shares.take(stage, self.sums[stage])

    def _counted(self, s: CountPart | CountBegun | IfLast | ResetCount) -> tuple[Stmt, ...]:
        if s.stage not in self.counts:
            self.counts[s.stage] = count_of(self.w, s.stage)
        count = self.counts[s.stage]
        match s:
            case CountPart():
                return count.up()
            case CountBegun():
                return count.begun()
            case IfLast(_, body):
                return count.if_last(self.steps(body))
            case ResetCount():
                return count.reset()

    def _cleared(self, s: CountFirst | Clear | RaiseCleared | AwaitCleared | PassCleared) -> tuple[Stmt, ...]:
        count = count_of(self.w, s.stage)
        assert isinstance(count, Cleared)
        first = self.rings.leader if isinstance(self.rings.leader, Int) else same(self.w.thread(), Int(0))
        match s:
            case CountFirst(_, body):
                return count.if_first(self.steps(body))
            case Clear():
                return count.clear()
            case RaiseCleared():
                return count.raise_flag()
            case AwaitCleared():
                return only(first, count.await_flag())
            case PassCleared():
                return only(first, count.pass_on())

    def _closed(self, stage: str) -> tuple[Stmt, ...]:
        """What makes a stage's sums f32 numbers in registers, once."""
        out = () if stage in self.closed else self.sums[stage].close()
        self.closed.add(stage)
        return out

    def _loop(self, at: int, body: tuple[Step, ...], later: tuple[Step, ...] = ()) -> tuple[Stmt, ...]:
        """`later`: the steps behind it."""
        w, x = self.w, self.w.nest[at]
        outer = w.scope[x.axis]
        p, works = w.plan.program, w.launch.tile.works
        here = [s for s in (p.stage(k.stage) for k in works) if x.axis in s.axes]
        if any(w.plan.stored(s, w.launch) for s in here) or not any(x.axis in p.stage(k.stage).folded for k in works):
            raise w.cannot(
                f"a loop in time over {x.axis}, which is not folded: a GPU block makes its whole piece at once"
            )
        var, (begin, end) = IntVar(w.fresh(x.axis)), w.walked(x.axis)
        self.rings.loops[at] = (var, end, begin)
        w.scope[x.axis] = w.inside(at, var)
        late = [s for s in body if isinstance(s, Late)]
        inner = self.steps(tuple(s for s in body if s not in late))
        w.scope[x.axis] = outer
        del self.rings.loops[at]
        # A deferred work is still under way where the loop comes round: written out, its sums would be moved between registers.
        unroll = ROLLED if any(isinstance(f, Wgmma) for f in self.sums.values()) else 1

        def part(lo: Whole, hi: Whole) -> tuple[Stmt, ...]:
            return (For(var.name, lo, hi, x.step, inner, unroll),) if lo != hi else ()

        if not late:
            return part(begin, end)
        return in_parts(part, begin, end, x.step, [y for s in late for y in self._asked(s, later)])

    # ------------------------------------------------------------ elements
    def _elements(self, i: int, steps: tuple[Step, ...]) -> tuple[tuple[Stmt, ...], set[int]]:
        """Opening and closing of folds, and elementwise stages: statements, and the later steps they include."""
        w, s = self.w, steps[i]
        assert isinstance(s, Open | Close | StoreState | Compute)
        stage = w.plan.program.stage(s.stage)
        if isinstance(s, Open):
            if i + 1 < len(steps) and steps[i + 1] == FoldParts(s.stage):
                chain, used = self._chain(i + 2, steps)
                last = any(x.value == s.stage for x in parts_left(w.plan, w.launch.tile))
                widest = 1 if last else _WIDEST
                return self._dealt(chain, stage.axes, self._parts(chain), widest, alone=last), {i + 1, i + 2, *used}
            if i + 1 < len(steps) and steps[i + 1] == TakeParts(s.stage):
                return self._taken(stage, i + 2, steps)
            if i + 1 < len(steps) and steps[i + 1] == Compute(s.stage) and self._is_statistic(stage):
                return self._dealt(Chain(w, (Compute(s.stage),)), stage.every), {i + 1}
            if stage.monoid and stage.monoid.lift:
                self.sums[s.stage] = lifted(w, w.launch.tile.work(s.stage), self.kept)
                return self.sums[s.stage].open(), set()
            works = tuple(map(w.launch.tile.work, self._beside(s.stage)))
            ride = next((fold.rides[s.stage] for fold in self.sums.values() if s.stage in fold.rides), None)
            self.sums[s.stage] = ride or direct(w, works) or contraction(w, works, KINDS)
            return self.sums[s.stage].open(), set()
        chain, used = self._chain(i, steps)
        if isinstance(s, Compute):
            return self._dealt(chain, stage.axes), used
        close = () if self.sums[s.stage].shared else self._closed(s.stage)
        fold = self.sums.pop(s.stage)
        self.closed.discard(s.stage)
        if fold.shared:
            folds = dict(fold.gathered())
            for row in fold.rides:
                folds |= self.sums.pop(row).gathered()
            return self._dealt(chain, stage.axes, folds, fold.widest), used
        lift = self._lift_of(chain)
        if lift is not None and isinstance(fold, Contraction):
            stage, value = lift
            self.kept[value] = f"{value}_kept" if fold.anew else fold.registers[s.stage]
            return (*close, *keep(w, chain, fold, value, self.kept[value], stage.folded[0])), used
        spread, at = fold.spread()
        if isinstance(fold, Lifted):
            if isinstance(s, StoreState):
                return (*close, *fold.stored_rows(), *chain.emit(spread, {s.stage: fold.sums_of(at[s.stage])})), used
            return (*close, *fold.finish(), *chain.emit(spread, {s.stage: {FINISHED: at[s.stage]}})), used
        opened = self._statistics(chain, spread, whole=False)
        folded = {x: w.plan.program.stage(x).monoid for x in at}
        sums = {x: {c: at[x] for c, _ in m.state} for x, m in folded.items() if m}
        return (*opened, *close, *chain.emit(spread, sums)), used

    def _taken(self, stage: Stage, i: int, steps: tuple[Step, ...]) -> tuple[tuple[Stmt, ...], set[int]]:
        """Marked parts combined, and what is made of that from step i on."""
        w, (chain, used), lanes = self.w, self._chain(i, steps), lanes_of_a_row(self.w, stage)
        spread = in_order(w, stage.axes, 1, alone=True, lanes=lanes)
        taken, sums = take_parts(w, stage, spread, lanes, both(spread.exists, chain.exists(spread)[0]))
        first = same(bits(w.lane(), lanes - 1), Int(0)) if lanes > 1 else Int(1)
        alone = replace(spread, exists=both(spread.exists, first))
        return (*taken, *chain.emit(alone, {stage.out: sums})), {i - 1, i, *used}

    def _asked(self, late: Late, later: tuple[Step, ...]) -> tuple[Between, ...]:
        """First vectors come to registers, whence what closes the sums behind takes them."""
        at, closing = next((i, s) for i, s in enumerate(later) if isinstance(s, Close))
        chain, _ = self._chain(at, later)
        spread, _ = self.sums[closing.stage].spread()
        names = {s.value for s in late.body if isinstance(s, Ask)}
        mine = {x.value: x for x in self.w.launch.tile.preloads if x.value in names}
        return tuple(chain.ask(mine, late.fills, spread))

    def _lift_of(self, chain: Chain) -> tuple[Stage, str] | None:
        """(a stage whose monoid's lift reads a value that the chain makes, that value)."""
        p = self.w.plan.program
        stages = (p.stage(k.stage) for k in self.w.launch.tile.works if not k.combine)
        for s in (s for s in stages if s.monoid and s.monoid.lift):
            made = [x.stage for x in chain.steps if isinstance(x, Close | Compute) and x.stage in s.reads]
            if made:
                return s, made[-1]
        return None

    def _parts(self, chain: Chain) -> Folds:
        """What folds the parts that another launch left of each stage that the chain closes."""
        spaces = {s.stage: self.w.plan.workspace(s.stage) for s in chain.steps if isinstance(s, Close)}
        plan = self.w.plan
        filled = {  # a smaller symbol fills fewer parts
            x: pieces(length_of(plan.program.dim(space.axis)), plan.part_step(space))
            if isinstance(plan.program.dim(space.axis), Sym)
            else Int(space.parts)
            for x, space in spaces.items()
            if space
        }
        last = {x for x, space in spaces.items() if space and space.by_last}
        return {x: fold_parts(plan.program.stage(x), n, at_once=x in last) for x, n in filled.items()}

    def _beside(self, stage: str) -> tuple[str, ...]:
        return beside(self.w.plan.program, self.w.launch.tile, stage)

    def _as_one(self, steps: tuple[Step, ...]) -> tuple[Step, ...]:
        """Steps of one kind of stages side by side become the first's: one fold holds all their sums. Closing names each."""
        out: list[Step] = []
        for s in steps:
            first = self._beside(s.stage)[0] if isinstance(s, _TOGETHER) else ""
            if not (isinstance(s, _TOGETHER) and s.stage != first and out and out[-1] == replace(s, stage=first)):
                out.append(s)
        return tuple(out)

    def _chain(self, i: int, steps: tuple[Step, ...]) -> tuple[Chain, set[int]]:
        """steps[i] and what can follow it on the same elements in registers, folds of them along their last axis included."""
        p, first = self.w.plan.program, steps[i]
        assert isinstance(first, Close | StoreState | Compute)
        axes, made, folded = p.stage(first.stage).axes, {first.stage}, self._beside(first.stage)
        if first.stage in self.sums:
            folded = (*folded, *self.sums[first.stage].rides)
        chain: list[Done] = [first]
        used: set[int] = set()
        for j in range(i + 1, len(steps)):
            s = steps[j]
            if isinstance(s, Close | StoreState | Compute) and self._follows(s, axes, made, folded):
                if isinstance(s, Compute) and p.stage(s.stage).reduces:
                    used.add(steps.index(Open(s.stage)))  # the elements are made later
                else:
                    made.add(s.stage)
            elif not (isinstance(s, Store) and s.stage in made):
                continue
            chain.append(s)
            used.add(j)
        return Chain(self.w, tuple(chain), asked=self.asked), used

    def _follows(
        self, s: Close | StoreState | Compute, axes: tuple[str, ...], made: set[str], folded: tuple[str, ...]
    ) -> bool:
        """Whether a step makes or finishes what it does of elements that are in registers; `folded`: side by side with them."""
        if not isinstance(s, Compute):
            return s.stage in folded
        stage, here = self.w.plan.program.stage(s.stage), {k.stage for k in self.w.launch.tile.works}
        fits = stage.every == axes and self._is_statistic(stage) if stage.reduces else same_rows(stage.axes, axes)
        if not stage.reduces and set(stage.axes) <= set(axes[:-1]):
            fits = not self.w.plan.stored(stage, self.w.launch)
        return fits and all(v in made or v not in here for v in stage.reads)

    def _is_statistic(self, s: Stage) -> bool:
        """Whether a stage folds the last axis of elements, one by one, into a state of one number."""
        m, p = s.monoid, self.w.plan.program
        alone = m is not None and len(m.state) == 1 and not m.lift and len(s.folded) == 1 and bool(s.axes)
        return alone and all(p.value(v).axes == s.every for v in s.reads)

    def _statistics(self, chain: Chain, spread: Spread, *, whole: bool) -> tuple[Stmt, ...]:
        """Folds of the chain's elements are opened; later steps share and close them."""
        out: list[Stmt] = []
        for s in chain.steps:
            stage = self.w.plan.program.stage(s.stage)
            if isinstance(s, Compute) and stage.reduces:
                self.sums[stage.out] = chain.statistics[stage.out] = statistic(self.w, stage, spread, whole=whole)
                out += self.sums[stage.out].open()
        return tuple(out)

    def _dealt(
        self,
        chain: Chain,
        axes: tuple[str, ...],
        folds: Folds | None = None,
        widest: int = _WIDEST,
        *,
        alone: bool = False,
    ) -> tuple[Stmt, ...]:
        """The block's elements dealt to all threads, in vectors of at most `widest`. `folds` make the sums they begin with.

        alone: not to those of the other blocks of a cluster that shares them, too
        """
        w = self.w
        if not axes:
            raise w.cannot(f"{chain.steps[0].stage} is one number; a GPU deals elements along axes")
        width = chain.width(axes, gcd(widest, w.scope[axes[-1]].size))
        if any(isinstance(s, Compute) and w.plan.program.stage(s.stage).reduces for s in chain.steps):
            spread = by_rows(w, axes, width)
            return (*self._statistics(chain, spread, whole=True), *chain.emit(spread, folds=folds))
        return chain.emit(in_order(w, axes, width, alone=alone), folds=folds)


def _flat(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps without loops over warps and lanes: those are agents, every work knows its share, and each does its part."""
    out: list[Step] = []
    for s in steps:
        if isinstance(s, Together):
            out += s.body
            continue
        out += _flat(s.body) if isinstance(s, ForStep) and s.loop.level in (*AGENTS, "lane") else (s,)
    return tuple(out)
