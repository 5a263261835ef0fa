"""Steps -> Kernel IR for CPU targets: one function a launch, one block an iteration of its block loops.

This file walks the steps; loops over elements, register tiles and packing are in cpu_fold, cpu_atoms and cpu_pack.
A fold is emitted as one: what follows its Close on the same elements is applied while they are in registers, in the last
piece along the folded axes. It must not know C.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from emmy.codegen.cpu_atoms import contraction, loops_outside
from emmy.codegen.cpu_fold import (
    Fold,
    Lifted,
    close_lifted,
    elementwise,
    fold_lifted,
    fold_parts,
    fold_piece,
    open_lifted,
    part_index,
    part_of,
    parts_name,
)
from emmy.codegen.cpu_pack import pack
from emmy.codegen.cpu_scope import Loop, Scope, Walk, length_of, whole
from emmy.codegen.cpu_values import Chain, Done
from emmy.codegen.kernel import (
    Buffer,
    Int,
    IntVar,
    Kernel,
    LetInt,
    Stmt,
    Whole,
    below,
    both,
    over,
    pieces,
    plus,
    product,
    rest,
    times,
    when,
)
from emmy.codegen.left import left_buffers
from emmy.codegen.steps import Advance, Close, Compute, Copy, FoldParts, For, Open, Outline, Step, Store, StoreState
from emmy.errors import PlanError
from emmy.ir.beside import beside
from emmy.ir.dtype import DType
from emmy.ir.expr import Axis
from emmy.ir.plan import Plan, Work
from emmy.ir.program import Stage
from emmy.ir.target import Target


def buffers(plan: Plan) -> tuple[Buffer, ...]:
    """Memory a plan's launches share: inputs, outputs, then what one launch leaves for another."""
    p = plan.program

    def size(axes: tuple[str, ...]) -> Whole:
        return product(tuple(length_of(p.dim(a)) for a in axes))

    def value(name: str, role: str) -> Buffer:
        v = p.value(name)
        return Buffer(name, v.dtype, role, size(v.axes))  # type: ignore[arg-type]

    between = [w.stage for la in plan.launches for w in la.tile.works if _leaves(plan, la.name, w.stage)]
    out = [*(value(v.name, "input") for v in p.inputs), *(value(o, "output") for o in p.outputs)]
    out += [value(s, "workspace") for s in between]
    f32: DType = "f32"
    for space in (x for x in plan.workspaces if not x.added):
        s = p.stage(space.value)
        assert s.monoid is not None
        for c, axes in s.monoid.components(s):
            role, words = ("flags", 2) if space.marked else ("workspace", 1)
            n = times(size(axes), Int(space.parts * words))
            out.append(Buffer(parts_name(s.out, c), f32, role, n))  # type: ignore[arg-type]
    return (*out, *left_buffers(plan))


def _leaves(plan: Plan, launch: str, stage: str) -> bool:
    """Whether a value goes through memory to another launch, without leaving the program."""
    la, p = plan.launch(launch), plan.program
    left_in_parts = plan.workspace(stage) is not None and not la.tile.work(stage).combine
    return stage not in p.outputs and not left_in_parts and plan.stored(p.stage(stage), la)


def expand(outline: Outline, target: Target) -> Kernel:
    """The kernel of one launch. Raises PlanError for what a CPU cannot do: roles, asynchronous copies, incomplete values."""
    plan, la = outline.plan, outline.launch
    if len(outline.roles) != 1 or outline.barriers:
        raise PlanError(
            f"{la.name}: {len(outline.roles)} roles and {len(outline.barriers)} barriers; a CPU block has one role and none"
        )
    shared = buffers(plan)
    w = Walk(plan, la, target.vector_bits // 32, shared)
    here = {k.stage for k in la.tile.works}
    values = {v.name for v in plan.program.inputs} | {s.out for s in plan.program.stages}
    w.places = {b.name: w.memory(b.name) for b in shared if b.name in values - here}
    head, scope, blocks, some = _blocks(w)
    body = _Expand(w).steps(outline.roles[0].steps, scope)
    syms = tuple(s.name for s in plan.program.syms)
    return Kernel(la.name, syms, shared, tuple(w.scratch), blocks, (*head, *when(some, body)))


def _blocks(w: Walk) -> tuple[tuple[Stmt, ...], Scope, Whole, Whole]:
    """(statements that turn `block` into pieces, the pieces, how many blocks, whether this one has any elements).

    The last loop moves fastest. Inside a short piece, the last pieces of a second loop over its axis are empty.
    """
    t = w.launch.tile
    scope: Scope = {a: whole(d) for a, d in w.plan.program.dims}
    loops: list[tuple[Loop, IntVar]] = []
    for x in t.nest[: t.n_block_loops]:
        loop = w.loop(x.axis, x.step, scope)
        scope = loop.scope
        if loop.var is not None:
            loops.append((loop, loop.var))
    counts = [pieces(loop.around.size, loop.step) for loop, _ in loops]
    left: Whole = IntVar("block")
    index: list[Whole] = []
    for count in reversed(counts):
        index.insert(0, rest(left, count) if len(index) + 1 < len(counts) else left)
        left = over(left, count)
    out: tuple[Stmt, ...] = ()
    some: Whole = Int(1)
    for (loop, var), i in zip(loops, index, strict=True):
        out += (LetInt(var.name, plus(loop.around.lo, times(i, Int(loop.step)))), *loop.ends())
        if loop.around.steps and not isinstance(loop.around.length, Int):
            some = both(some, below(var, loop.around.hi))
    return out, scope, product(tuple(counts)), some


@dataclass(slots=True)
class _Expand:
    w: Walk
    folds: dict[str, Fold | Lifted] = field(default_factory=dict)

    def steps(self, steps: tuple[Step, ...], scope: Scope) -> tuple[Stmt, ...]:
        """Statements for the steps of one loop's body. Values made here are forgotten at its end."""
        w, before = self.w, dict(self.w.places)
        out: tuple[Stmt, ...] = ()
        taken: set[int] = set()
        for i, s in enumerate(steps):
            if i in taken:
                continue
            match s:
                case For(_, loop, body):
                    walked = w.loop(loop.axis, loop.step, scope)
                    out += walked.wrap(self.steps(body, walked.scope))
                case Copy(value):
                    w.places[value], stmts = pack(w, value, scope)
                    out += stmts
                case Advance():
                    pass
                case Open(name):
                    end = next(j for j in range(i, len(steps)) if steps[j] in (Close(name), StoreState(name)))
                    chain, used = self._chain(steps, end, scope)
                    taken |= used
                    if FoldParts(name) in steps[i:end]:
                        out += fold_parts(w, w.stage(name), scope, chain)
                        w.places.update(chain.kept)
                        taken |= {steps.index(FoldParts(name), i), end}
                    else:
                        out += self._open(name, scope, chain, steps[i + 1 : end])
                case Compute(name) if name in self.folds:
                    out += self._piece(self.folds[name], scope)
                case Compute(name):
                    chain, used = self._chain(steps, i, scope)
                    taken |= used
                    out += elementwise(w, w.stage(name), scope, chain)
                    w.places.update(chain.kept)
                case Close(name) | StoreState(name):
                    fold = self.folds.pop(name)
                    if isinstance(fold, Lifted):
                        out += close_lifted(w, fold)
                    w.places.update(fold.chain.kept)
                case _:
                    raise PlanError(f"{w.launch.name}: a CPU has no step {s}")
        w.places = before
        return out

    def _chain(self, steps: tuple[Step, ...], at: int, scope: Scope) -> tuple[Chain, set[int]]:
        """What becomes of the elements of steps[at]: it, and the later steps of this loop that can follow in registers."""
        w, first = self.w, steps[at]
        if isinstance(first, StoreState):
            return Chain(), set()
        assert isinstance(first, Close | Compute)
        axes, done = w.stage(first.stage).axes, [first.stage]
        taken: set[int] = set()
        chain: list[Done] = [first]
        for j in range(at + 1, len(steps)):
            s = steps[j]
            if isinstance(s, Compute) and self._follows(w.stage(s.stage), axes, done):
                done.append(s.stage)
            elif not (isinstance(s, Store) and s.stage in done):
                continue
            chain.append(s)
            taken.add(j)
        readers = [w.stage(k.stage) for k in w.launch.tile.works if not k.combine and k.stage not in done]
        kept = tuple((v, w.block(v, axes, scope)) for v in done if any(v in r.reads for r in readers))
        return Chain(tuple(chain), kept), taken

    def _follows(self, s: Stage, axes: tuple[str, ...], done: list[str]) -> bool:
        return not s.reduces and s.axes == axes and all(v in done or v in self.w.places for v in s.reads)

    def _open(self, name: str, scope: Scope, chain: Chain, until: tuple[Step, ...]) -> tuple[Stmt, ...]:
        """Begin a fold: choose where its sums live between pieces of the folded axes."""
        w, s = self.w, self.w.stage(name)
        assert s.monoid is not None
        if s.monoid.lift:
            self.folds[name], stmts = open_lifted(w, s, scope, chain)
            return stmts
        work, home = w.launch.tile.work(name), None
        out: tuple[Stmt, ...] = ()
        if not chain.steps:
            view, home = part_of(w, s, "x", part_index(w, s, scope))
            out = (view,)
        elif self._in_pieces(until, s, scope) or _outer_pieces(work, s):
            stored = [x.stage for x in chain.steps if isinstance(x, Store) and w.stage(x.stage).dtype == "f32"]
            home = w.memory(stored[0]) if stored else w.block(f"{name}_sums", s.axes, scope)
            if (
                stored == [name]
                and chain.steps == (Close(name), Store(name))
                and s.monoid.finish == Axis("x")
                and not chain.kept
            ):
                chain = Chain()  # the sums are the value, and where it belongs
        self.folds[name] = Fold(s, work, scope, home, chain)
        if len(beside(w.plan.program, w.launch.tile, name)) > 1:
            w.places.update(
                chain.kept
            )  # the next of them ends in the same pieces, so that what follows it may read this one
        return out

    def _piece(self, fold: Fold | Lifted, scope: Scope) -> tuple[Stmt, ...]:
        """The piece in scope goes into open accumulators."""
        if isinstance(fold, Lifted):
            return fold_lifted(self.w, fold, scope)
        return contraction(self.w, fold, scope) or fold_piece(self.w, fold, scope)

    def _in_pieces(self, steps: tuple[Step, ...], s: Stage, scope: Scope) -> bool:
        """Whether a loop over a folded axis stands between Open and Compute."""
        for x in steps:
            if isinstance(x, For):
                p = scope[x.loop.axis]
                many = self.w.many(x.loop.axis, x.loop.step, scope)
                inner = {
                    **scope,
                    x.loop.axis: replace(p, size=Int(x.loop.step), steps=(*p.steps, x.loop.step)) if many else p,
                }
                if _computes(x.body, s.out) and (
                    (many and x.loop.axis in s.folded) or self._in_pieces(x.body, s, inner)
                ):
                    return True
        return False


def _computes(steps: tuple[Step, ...], name: str) -> bool:
    return any(x == Compute(name) or (isinstance(x, For) and _computes(x.body, name)) for x in steps)


def _outer_pieces(work: Work, s: Stage) -> bool:
    """Whether the work's own loops outside its atom cut a folded axis."""
    return any(x.axis in s.folded for x in loops_outside(work, s))
