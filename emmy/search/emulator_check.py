"""Whether a GPU schedule computes its op, found without the GPU: its exact text runs on the emulator, at a reduced size.

The emulator takes a minute for a large op under one order of the threads, so such an op is cut down to a few tiles. The smaller op has
the same plan: the same loops and steps, rings, transports, atoms and split, each ring turning over at least once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from emmy.codegen.build import SourceUnit, plan_source
from emmy.codegen.emulated import emulate_plan
from emmy.codegen.emulator import SCHEDULES
from emmy.codegen.lower import complete
from emmy.errors import EmuError, PlanError, UsageError
from emmy.ir.gpu import accumulation, transfer_bytes
from emmy.ir.ops import Attention, Formula, FormulaOp, Op, PagedAttention, Products
from emmy.ir.plan import BLOCK_LEVELS, Launch, Plan
from emmy.ir.program import Dim, Sym, upper
from emmy.ir.schedule import replay
from emmy.ir.target import Target

Source = Callable[[Plan, Target], SourceUnit]

_WHOLE_FLOPS = 1e8  # an op with less work is not cut down
_WHOLE_ROWS_FLOPS = 1e4  # the same for rows, of which each flop is a step of a thread
_ROWS_OF_TABLE = 7  # of one that is gathered from
_MOST_FLOPS = 5e8  # one with more is not run: small warp tiles take many steps


@dataclass(frozen=True, slots=True)
class Check:
    """`op` is what ran; `wrong` says what is wrong, if anything."""

    op: str
    wrong: str = ""


def check(op: Op, schedule: str, target: Target, source: Source = plan_source) -> Check:
    """The schedule's text of `op`, or of a smaller op, against the reference: whole numbers under every order of the
    threads that is worth trying, then random ones.
    """
    small = reduced(op, schedule, target)
    if small is None:
        return Check("", "no smaller op of a feasible size has its plan")
    plan = replay(small.program(), schedule, target)
    unit, sums = source(plan, target), accumulation(plan)
    for sizes in _sizes(small):
        for n, (seed, eager) in enumerate((*SCHEDULES, SCHEDULES[0])):
            kind = "integer" if n < len(SCHEDULES) else "normal"
            inputs = small.inputs(kind, 1, sizes)  # type: ignore[arg-type]  # one of the two literals
            try:
                out, _ = emulate_plan(unit, inputs, sizes, seed=seed, eager=eager)
            except EmuError as e:
                return Check(small.key, str(e).splitlines()[0])
            error = small.error_norm(out, inputs, kind, sums)  # type: ignore[arg-type]
            if not error <= 1:
                return Check(small.key, f"{kind} inputs: the error is {error:.3g} times what is allowed")
    return Check(small.key)


def _sizes(op: Op) -> tuple[dict[str, int], ...]:
    """The run-time sizes to try: of a symbol both ends, and one below the upper end, where a tile is cut off."""
    syms = op.program().syms
    picks = ({s.name: n for s, n in zip(syms, at, strict=True)} for at in zip(*map(_ends, syms), strict=True))
    return tuple({tuple(p.items()): p for p in picks}.values()) or ({},)


def _ends(s: Sym) -> tuple[int, int, int]:
    return s.lo, max(s.lo, s.hi - 1), s.hi


def reduced(op: Op, schedule: str, target: Target) -> Op | None:
    """The smallest op, as far as some are tried, that the schedule gives the same plan; the op itself when it is small.

    None when no op of a feasible size has that plan.
    """
    whole = op if op.work().flops <= _MOST_FLOPS else None
    least = _WHOLE_ROWS_FLOPS if isinstance(op, FormulaOp) else _WHOLE_FLOPS
    if not isinstance(op, Products | Attention | PagedAttention | FormulaOp) or op.work().flops <= least:
        return whole
    plan = replay(op.program(), schedule, target)
    form = _form(plan)
    for small in _fewer(op, plan):
        if small.work().flops > _MOST_FLOPS:
            break
        try:
            its = replay(small.program(), schedule, target)
        except (PlanError, UsageError):
            continue
        if _form(its) == form and complete(its) is None:
            return small
    return whole


def _fewer(op: Products | Attention | PagedAttention | FormulaOp, plan: Plan) -> Iterator[Op]:
    match op:
        case Attention():
            return _fewer_heads(op, plan)
        case PagedAttention():
            return _fewer_sequences(op, plan)
        case _:
            return _smaller(op, plan)


def _smaller(op: Products | FormulaOp, plan: Plan) -> Iterator[Op]:
    """The op with fewer tiles along each axis, a ragged last one kept, smallest first."""
    program = op.program()
    axes = {a: upper(d) for a, d in program.dims}
    walked = {a for s in program.stages for a in s.every}
    tries = product(*(_lengths(plan, axis, size) for axis, size in axes.items()))
    for sizes in sorted(tries, key=prod):
        at: dict[str, Dim] = dict(zip(axes, sizes, strict=True))
        if isinstance(op, FormulaOp):
            open_m = ((a, d, upper(at[a]) if a in walked else min(axes[a], _ROWS_OF_TABLE)) for a, d in program.dims)
            dims = ((a, Sym(d.name, min(d.lo, n), n) if isinstance(d, Sym) else n) for a, d, n in open_m)
            with suppress(PlanError):  # a formula that names a position which is gone
                yield Formula(replace(program, dims=tuple(dims)))
            continue
        if isinstance(op.m, Sym):
            m = upper(at["m"])
            at["m"] = Sym(op.m.name, min(op.m.lo, m), m)
        yield replace(op, **at)  # type: ignore[arg-type]  # an axis is called as the op's field is


def _fewer_heads(op: Attention, plan: Plan) -> Iterator[Attention]:
    """The op with fewer heads, queries and keys, smallest first; where a query sees the last key, it still does."""
    size = {a: upper(d) for a, d in op.program().dims}
    first = "g" if "g" in size else "h"
    tries = product(*(_lengths(plan, a, size[a]) if a in size else [1] for a in (first, "s", "t")))
    for groups, queries, keys in sorted(tries, key=prod):
        if isinstance(op.queries, Sym):
            rows = Sym(op.queries.name, min(op.queries.lo, queries), queries)
            few: dict[str, Dim] = {"queries": rows, "keys": rows}
        else:
            few = {"queries": queries, "keys": keys}
        if (keys < queries) == (size["t"] < size.get("s", 1)) and (queries == keys or not isinstance(op.queries, Sym)):
            shared = groups if op.kv_heads else 0
            yield replace(op, heads=groups * (op.heads // op.groups), kv_heads=shared, **few)  # type: ignore[arg-type]


def _fewer_sequences(op: PagedAttention, plan: Plan) -> Iterator[PagedAttention]:
    """The op with fewer sequences, heads, queries and keys, smallest first, and a pool for them."""
    program, share = op.program(), op.heads // op.groups
    tries = product(*(_lengths(plan, a, upper(program.dim(a))) for a in "bgqt"))
    for sequences, groups, rows, keys in sorted(tries, key=prod):
        batch: Dim = (
            Sym(op.batch.name, min(op.batch.lo, sequences), sequences) if isinstance(op.batch, Sym) else sequences
        )
        if rows % share == 0:
            few = replace(op, batch=batch, heads=groups * share, kv_heads=groups, queries=rows // share)
            yield replace(few, keys=keys, pool=0)


def _lengths(plan: Plan, axis: str, size: int) -> list[int]:
    """Lengths of an axis worth trying: a few times what each launch takes of it at once, and the same rest."""
    tried = {size}
    for la in plan.launches:
        nest, unit = la.tile.nest, 1
        for i, x in enumerate(nest):
            if x.axis != axis:
                continue
            if x.level in BLOCK_LEVELS and axis in _folded(plan, la):
                unit *= plan.count(nest, i)  # parts of a split sum
            elif x.level in (*BLOCK_LEVELS, "serial"):
                unit *= x.step
                break
        turns = _depth(la) + 2 if axis in _folded(plan, la) else 3
        tried |= {unit * n + size % unit for n in range(turns + 1)}
    return sorted(n for n in tried if 0 < n <= size)


def _folded(plan: Plan, la: Launch) -> set[str]:
    """The axes that a launch sums over piece by piece."""
    return {a for w in la.tile.works if not w.combine for a in plan.program.stage(w.stage).folded}


def _depth(la: Launch) -> int:
    return max((c.depth for c in la.tile.channels), default=1)


def _form(plan: Plan) -> tuple[object, ...]:
    """What two plans must share to exercise the same code: all but how often their outermost loops turn."""
    return tuple(_launch_form(plan, la) for la in plan.launches)


def _launch_form(plan: Plan, la: Launch) -> tuple[object, ...]:
    nest, tile, folded = la.tile.nest, la.tile, _folded(plan, la)
    loops: list[object] = []
    for i, x in enumerate(nest):
        n = plan.count(nest, i)
        if x.level in BLOCK_LEVELS:
            loops.append((x.axis, x.level, n) if x.axis in folded else (x.axis, x.level, x.step, min(n, 2)))
        else:
            loops.append((x.axis, x.level, x.step, min(n, _depth(la) + 1) if x.level == "serial" else n))
    channels = tuple(
        (c.value, c.transport, c.depth, c.layout, transfer_bytes(plan, nest, c.value)) for c in tile.channels
    )
    return la.name, tuple(loops), channels, tile.works, tile.order, tile.roles
