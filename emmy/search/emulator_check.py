"""Whether a GPU schedule computes its op, found without the GPU: its exact text runs on the emulator, at a reduced size.

The emulator takes a minute for a large op under one order of the threads, so such an op is cut down to a few tiles. The smaller op has
the same plan: the same loops and steps, rings, transports, atoms and split, each ring turning over at least once.

What was found is kept beside the emulator's core, under all that it follows from: cards with the same text share it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import isfinite, prod
from pathlib import Path

from emmy.codegen.build import SourceUnit, plan_source
from emmy.codegen.emulated import emulate_plan
from emmy.codegen.emulator import SCHEDULES
from emmy.codegen.emulator.build import core_path
from emmy.codegen.files import appearing, locked
from emmy.codegen.gpu_plan import plan_lines
from emmy.codegen.kernel_gpu import GpuKernel
from emmy.codegen.lower import complete
from emmy.codegen.ptx import twins, used
from emmy.errors import EmuError, PlanError, UsageError
from emmy.ir.gpu import accumulation, cluster_size, transfer_bytes
from emmy.ir.moves import Move
from emmy.ir.moves.raster import Raster
from emmy.ir.moves.roles import Persist
from emmy.ir.moves.streamk import StreamK
from emmy.ir.ops import Attention, Formula, FormulaOp, Op, PagedAttention, Products, RowOp
from emmy.ir.plan import BLOCK_LEVELS, Launch, Plan
from emmy.ir.program import Dim, Sym, upper
from emmy.ir.schedule import format_schedule, parse_schedule, replay
from emmy.ir.target import Target

Source = Callable[[Plan, Target], SourceUnit]

_WHOLE_FLOPS = 1e8  # an op with less work is not cut down
_WHOLE_ROWS_FLOPS = 1e4  # the same for rows, of which each flop is a step of a thread
_FORMAT = 1  # of what is kept
_ROWS_OF_TABLE = 7  # of one that is gathered from
_WORKERS, _ROUNDS = 2, 3  # that walk tiles, and how often each goes on to a further one if it ever does
_MOST_FLOPS = 3e9  # one with more is not run: 1e8 take 0.1 s with wgmma, 0.3 s with mma, more with small warp tiles


@dataclass(frozen=True, slots=True)
class Check:
    """`op` is what ran; `wrong` says what is wrong, if anything.

    error: the largest of all runs, in units of what the op allows its sums; None where a run came to no end
    """

    op: str
    wrong: str = ""
    error: float | None = None


def check(
    op: Op, schedule: str, target: Target, source: Source = plan_source, orders: Sequence[tuple[int, bool]] = SCHEDULES
) -> Check:
    """The schedule's text of `op`, or of a smaller op, against the reference: whole numbers under every order of the
    threads in `orders`, then random ones under the first.
    """
    found = reduced(op, schedule, target)
    if found is None:
        return Check("", "no smaller op of a feasible size has its plan")
    small, schedule = found
    unit = source(replay(small.program(), schedule, target), target)
    known = _known(small, unit, orders)
    with locked(known.parent / "locks" / known.name[:2]):  # other processes may ask the same
        if not known.exists():
            with appearing(known) as new:
                new.write_text(json.dumps(asdict(_run(small, unit, orders))), encoding="utf-8")
    return Check(**json.loads(known.read_text(encoding="utf-8")))


def _run(op: Op, unit: SourceUnit, orders: Sequence[tuple[int, bool]]) -> Check:
    sums, worst = accumulation(unit.plan), 0.0
    for sizes in _sizes(op):
        for kind, (seed, eager) in [*(("integer", o) for o in orders), ("normal", orders[0])]:
            inputs = op.inputs(kind, 1, sizes)  # type: ignore[arg-type]  # one of the two literals
            try:
                out, _ = emulate_plan(unit, inputs, sizes, seed=seed, eager=eager)
            except EmuError as e:
                return Check(op.key, str(e).splitlines()[0])
            worst = max(worst, error := op.error_norm(out, inputs, kind, sums))  # type: ignore[arg-type]
            if not error <= 1:
                return Check(op.key, f"{kind} inputs: the error is {error:.3g} times what is allowed", _finite(error))
    return Check(op.key, "", worst)


def _finite(error: float) -> float | None:
    return error if isfinite(error) else None


def _known(op: Op, unit: SourceUnit, orders: Sequence[tuple[int, bool]]) -> Path:
    """The file of what a run finds: named by text, launches, op, orders, and the helpers' bodies."""
    kernels = tuple(k for k in unit.kernels if isinstance(k, GpuKernel))
    allowed = [op.tolerance(accumulation(unit.plan), o) for o in unit.plan.program.outputs]
    parts = (unit.text, *plan_lines(unit.plan, kernels), op.key, repr(orders), repr(allowed), twins(used(unit.text)))
    digest = hashlib.sha256("\n".join((str(_FORMAT), *parts)).encode()).hexdigest()
    return core_path().parent / "checks" / f"{digest}.json"


def _sizes(op: Op) -> tuple[dict[str, int], ...]:
    """The run-time sizes to try: of a symbol both ends, and one below the upper end, where a tile is cut off."""
    syms = op.program().syms
    picks = ({s.name: n for s, n in zip(syms, at, strict=True)} for at in zip(*map(_ends, syms), strict=True))
    return tuple({tuple(p.items()): p for p in picks}.values()) or ({},)


def _ends(s: Sym) -> tuple[int, int, int]:
    return s.lo, max(s.lo, s.hi - 1), s.hi


def reduced(op: Op, schedule: str, target: Target) -> tuple[Op, str] | None:
    """The smallest op, as far as some are tried, that has the same plan, under the schedule for as few tiles (`_fewer_tiles`);
    what is given when it is small.

    None when no op of a feasible size has that plan.
    """
    whole = (op, schedule) if op.work().flops <= _MOST_FLOPS else None
    least = _WHOLE_ROWS_FLOPS if isinstance(op, FormulaOp) else _WHOLE_FLOPS
    if not isinstance(op, Products | Attention | PagedAttention | FormulaOp) or op.work().flops <= least:
        return whole
    few = _fewer_tiles(schedule, replay(op.program(), schedule, target))
    plan = replay(op.program(), few, target)
    form = _form(plan)

    def is_alike(small: Op) -> bool:
        try:
            its = replay(small.program(), few, target)
        except (PlanError, UsageError):
            return False
        return _form(its) == form and complete(its) is None

    for small in _fewer(op, plan, is_alike):
        if small.work().flops > _MOST_FLOPS:
            break
        if is_alike(small):
            return small, few
    return whole


def _fewer(
    op: Products | Attention | PagedAttention | FormulaOp, plan: Plan, is_alike: Callable[[Op], bool]
) -> Iterator[Op]:
    match op:
        case Attention():
            return _fewer_heads(op, plan)
        case PagedAttention():
            return _fewer_sequences(op, plan)
        case _:
            return _smaller(op, plan, is_alike)


def _fewer_tiles(schedule: str, plan: Plan) -> str:
    """The schedule with the narrowest raster, and few workers that walk tiles, so that few tiles give each several."""
    out: list[Move] = []
    for move in parse_schedule(schedule):
        match move:
            case Raster(group=int()):
                move = replace(move, group=2)
            case Persist(workers=int(n)) | StreamK(workers=int(n)):
                together = cluster_size(plan, plan.launch(move.launch).tile.nest)
                move = replace(move, workers=min(n, _WORKERS * together))
        out.append(move)
    return format_schedule(tuple(out))


def _smaller(op: Products | FormulaOp, plan: Plan, is_alike: Callable[[Op], bool]) -> Iterator[Op]:
    """The op with fewer tiles along each axis, a ragged last one kept, smallest first.

    A length of one axis that does not do beside the whole others is not tried beside shorter ones.
    """
    whole = {a: upper(d) for a, d in op.program().dims}
    lengths = [
        [n for n in _lengths(plan, a, size) if n == size or any(map(is_alike, _of_sizes(op, {**whole, a: n})))]
        for a, size in whole.items()
    ]
    for sizes in sorted(product(*lengths), key=prod):
        yield from _of_sizes(op, dict(zip(whole, sizes, strict=True)))


def _of_sizes(op: Products | FormulaOp, sizes: Mapping[str, int]) -> Iterator[Op]:
    """The op with these sizes, at most; none for a formula that names a position which is gone."""
    program, at = op.program(), dict[str, Dim](sizes)
    if isinstance(op, FormulaOp):
        walked = {a for s in program.stages for a in s.every}
        open_m = ((a, d, sizes[a] if a in walked else min(upper(d), _ROWS_OF_TABLE)) for a, d in program.dims)
        dims = ((a, Sym(d.name, min(d.lo, n), n) if isinstance(d, Sym) else n) for a, d, n in open_m)
        with suppress(PlanError):
            small = replace(program, dims=tuple(dims))
            sized = dict(small.dims)
            own = replace(op, m=sized["m"], n=sizes["n"]) if isinstance(op, RowOp) else None
            yield own if own is not None and own.program() == small else Formula(small)
        return
    if isinstance(op.m, Sym):
        at["m"] = Sym(op.m.name, min(op.m.lo, sizes["m"]), sizes["m"])
    yield replace(op, **at)  # type: ignore[arg-type]  # an axis is called as the op's field is


def _fewer_heads(op: Attention, plan: Plan) -> Iterator[Attention]:
    """The op with fewer heads, queries and keys, smallest first; where a query sees the last key, it still does."""
    size = {a: upper(d) for a, d in op.program().dims}
    first = "g" if "g" in size else "h"
    few_groups, few_queries, few_keys = (_lengths(plan, a, size[a]) if a in size else [1] for a in (first, "s", "t"))
    tries = {t for q in few_queries for k in (*few_keys, q) if k <= size["t"] for t in product(few_groups, (q,), (k,))}
    for groups, queries, keys in sorted(tries, key=lambda t: (prod(t), t)):
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
        enough = (_ROUNDS - 1) * la.tile.order.workers + 1  # for workers that walk the tiles of this axis alone
        tried |= {unit * n + size % unit for n in (*range(turns + 1), enough)}
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
    tiles = prod(plan.count(nest, i) for i in range(tile.n_block_loops))
    rounds = min(-(-tiles // tile.order.workers), _ROUNDS) if tile.order.workers else 0
    return la.name, tuple(loops), channels, tile.works, tile.order, rounds, tile.roles
