"""`emmy tune --collect`: a budget over many ops, spent on rows that teach a cost model. Looks for no winner, races nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from emmy.errors import UsageError
from emmy.ir.ops import Op
from emmy.ir.target import Target
from emmy.records import Measurement
from emmy.search.budget import Budget
from emmy.search.collect import SHARES, reasons
from emmy.search.ranges import starting_ranges
from emmy.search.session import Request
from emmy.search.tuner import INTERRUPTED, TuneResult


@dataclass(frozen=True, slots=True)
class Collected:
    """What came of one op: rows by reason (see `emmy.search.collect`) and by status."""

    op: str
    kind: str
    target: str
    rows: int
    reasons: Mapping[str, int]
    counts: Mapping[str, int]
    elapsed_s: float
    why: str
    run_id: str
    resumed: int


@dataclass(frozen=True, slots=True)
class Collection:
    """What came of a collection. `planned`: the shares that proposals are dealt by; `dealt`: rows by reason, of all ops."""

    ops: tuple[Collected, ...]
    planned: Mapping[str, float]
    dealt: Mapping[str, int]
    kinds: Mapping[str, int]  # rows by kind of op
    interrupted: bool


def requests(
    ops: Sequence[Op], budget: Budget, target: Target, seed: int, threads: int, fresh: bool
) -> tuple[Request, ...]:
    """A request an op, and one a range of an op whose size is open, those with the most work first.

    The budget is of all of them together: each kind of op gets as much as any other, and shares it equally among its ops.
    Raises UsageError when there are fewer trials than ops.
    """
    parts = {p.key: p for op in ops for p in starting_ranges(op)}
    of_kind = Counter(p.kind for p in parts.values())
    out = []
    for part in sorted(parts.values(), key=lambda o: -o.work().flops):
        ways = len(of_kind) * of_kind[part.kind]
        trials = None if budget.trials is None else budget.trials // ways
        if trials == 0:
            raise UsageError(
                f"{budget.trials} trials for {len(parts)} ops of {len(of_kind)} kinds leave some without any; "
                f"at least {len(of_kind) * max(of_kind.values())} are needed, or name fewer ops"
            )
        seconds = None if budget.seconds is None else budget.seconds / ways
        each = replace(budget, trials=trials, seconds=seconds)
        out.append(Request(part, target, "collect", seed, each, threads, fresh))
    return tuple(out)


def collect(asked: Sequence[Request], run: Callable[[Request], TuneResult | None]) -> Collection:
    """The outcome of `run` for each request, up to an interruption."""
    done: list[Collected] = []
    interrupted = False
    for request in asked:
        if (result := run(request)) is None:
            continue
        done.append(_collected(request, result))
        if interrupted := result.why == INTERRUPTED:
            break
    dealt: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for c in done:
        dealt.update(c.reasons)
        kinds[c.kind] += c.rows
    return Collection(tuple(done), SHARES, dealt, kinds, interrupted)


def _collected(request: Request, result: TuneResult) -> Collected:
    return Collected(
        op=result.op,
        kind=request.op.kind,
        target=result.target,
        rows=result.trials,
        reasons=_by_reason(result.rows),
        counts=result.counts,
        elapsed_s=result.elapsed_s,
        why=result.why,
        run_id=result.run_id,
        resumed=result.resumed,
    )


def _by_reason(rows: Sequence[Measurement]) -> Mapping[str, int]:
    found = Counter(reasons(r.static) for r in rows)
    return {name: found[name] for name in (*SHARES, "opening") if found[name]}
