"""What a pack should hold of some ops, from what is stored of them: who serves which sizes, and the evidence. Measures nothing.

A size is Emmy's only where it won: raced with the stock kernel on the target's own product, and faster by more than the spread,
also against every other kernel that it was raced with. A time says something of its own size and
of those down to half of it, or to 2 within the rows of one atom.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from emmy.codegen.build import source
from emmy.costmodel.dataset import Dataset
from emmy.errors import CompileError, PlanError, UsageError
from emmy.ir.ops import Op, parse_op
from emmy.ir.parts import Span, span_of, symbol_of
from emmy.ir.target import Target
from emmy.measure.rivals import RIVALS, SERVERS
from emmy.pack import Choice, Evidence, Offer
from emmy.records import Measurement, source_mark
from emmy.search.predictions import Prediction, find_prediction, predicted_ops
from emmy.search.ranges import TILE
from emmy.winner import Winner, find_winner, is_raced, sums_wanted, undisturbed, with_sums

REACH = 2  # a time at size s speaks of the sizes above s / REACH
SAME_STOCK = 1.25  # a stock time that exceeds its least by more is of another form; cards and days differ by less
FAILED = ("correctness", "runtime", "timeout")  # never to be run for anybody, whatever other rows say
STALE = "every schedule of it that was raced makes another source now: tune again"
NOTHING = "no right answer with a time is stored of it on {}"

Rows = Mapping[str, Sequence[Measurement]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who serves an op: "" in `why` = the schedule."""

    schedule: str
    why: str
    evidence: Evidence | None = None


def offers(ops: Sequence[Op], target: Target, home: Path, threads: int = 1) -> tuple[Offer, ...]:
    """What is stored of each op, and of the ranges and single sizes of those that have an open one. Predictions where no row is.

    Raises UsageError when nothing at all is known of any of them on the target.
    """
    known = _Known(home, target, _rows(home, target, threads), predicted_ops(home, target))
    made = tuple(_offer(op, known) for op in ops)
    if not ops:
        raise UsageError("a pack of no op: name one, or a set such as @gemma4-12b")
    if not any(c.evidence for o in made for c in o.choices):
        others, how = f" and {len(ops) - 1} more" * (len(ops) > 1), f" --threads {threads}" * (threads > 1)
        absent = "" if target.is_cpu else ", on the card, or without it to predict"
        raise UsageError(
            f"nothing is stored on {target.name}{f' with {threads} threads' * bool(how)} of {ops[0]}{others}. Tune first{absent}: "
            f"`emmy tune OP --gpu {target.name}{how}`"
        )
    return made


class _Known:
    """Verdicts by op, each found when it is first asked for."""

    def __init__(self, home: Path, target: Target, rows: Rows, predicted: Sequence[str]) -> None:
        self.home, self.target, self._rows = home, target, rows
        self.ops = tuple(dict.fromkeys((*rows, *predicted)))
        self._found: dict[str, Verdict] = {}

    def verdict(self, key: str) -> Verdict:
        if key not in self._found:
            self._found[key] = self._find(key)
        return self._found[key]

    def _find(self, key: str) -> Verdict:
        if rows := self._rows.get(key):
            return _measured(parse_op(key), rows, self.target)
        p = find_prediction(self.home, parse_op(key), self.target) if key in self.ops else None
        return (
            Verdict(p.schedule, "", _of_prediction(p, self.target))
            if p
            else Verdict("", NOTHING.format(self.target.name))
        )


def _rows(home: Path, target: Target, threads: int) -> Rows:
    dataset = Dataset.of(home)
    dataset.ingest()
    rows: dict[str, list[Measurement]] = defaultdict(list)
    with dataset.snapshot() as s:
        for r in s.rows(target=target.name, origins=("measured",)):
            if r.protocol.threads == threads:
                rows[r.op].append(r)
    return rows


def _offer(op: Op, known: _Known) -> Offer:
    nothing = NOTHING.format(known.target.name)
    if (symbol := symbol_of(op)) is None:
        v = known.verdict(op.key)
        return Offer(op, "", (Choice(0, 0, op, v.schedule, v.why, v.evidence),))
    name = symbol.name
    spans = {span: known.verdict(key) for key in known.ops if (span := span_of(op, key)) is not None}
    choices = [
        Choice(lo, hi, op.within(name, *timed), v.schedule, v.why, v.evidence)  # code for all that was timed
        for (lo, hi), timed, v in shared_out(spans, symbol.lo)
    ]
    at, out = symbol.lo, list[Choice]()
    for c in choices:
        out += [_left(op, name, at, c.lo - 1, nothing)] if at < c.lo else []
        out.append(c)
        at = c.hi + 1
    out += [_left(op, name, at, symbol.hi, nothing)] if at <= symbol.hi else []
    return Offer(op, name, tuple(out))


def _left(op: Op, symbol: str, lo: int, hi: int, why: str) -> Choice:
    return Choice(lo, hi, op.within(symbol, lo, hi), "", why)


def shared_out(spans: Mapping[Span, Verdict], first: int) -> list[tuple[Span, Span, Verdict]]:
    """(served, timed, verdict): each size goes to the nearest time above it that reaches it; ascending, without overlaps."""
    out: list[tuple[Span, Span, Verdict]] = []
    taken = first - 1  # sizes up to here are given away
    for timed in sorted(spans, key=lambda s: (s[1], bool(spans[s].why), s[0])):
        # Rows of one atom cost the same; one row is a kernel of its own.
        reach = timed[1] // REACH + 1 if timed[1] > TILE else 2
        lo = max(timed[0], min(reach, timed[1]), taken + 1)
        if lo <= timed[1]:
            out.append(((lo, timed[1]), timed, spans[timed]))
            taken = timed[1]
    return out


# ---------------------------------------------------------------- verdicts
def _measured(op: Op, rows: Sequence[Measurement], target: Target) -> Verdict:
    rows = with_sums(rows, sums_wanted())
    first = find_winner(rows, target.product)
    if first is None:
        return Verdict("", NOTHING.format(target.name))
    rows, best = _that_hold(op, rows, target)
    if best is None or (first.raced and not best.raced):
        return Verdict(first.schedule, STALE, _evidence([first.row], {}))
    own = [r for r in rows if r.schedule == best.schedule and r.time_us is not None]
    raced = [r for r in own if is_raced(r)]
    evidence = _evidence(undisturbed(raced or own), _rivals(rows, best.schedule, best.time_us))
    return Verdict(best.schedule, _why_stock(evidence, target), evidence)


def _that_hold(op: Op, rows: Sequence[Measurement], target: Target) -> tuple[Sequence[Measurement], Winner | None]:
    """Rows without those of the best schedules whose source is another now, or that once failed; and the best one left.

    Only races are looked at one after another: there are few of them.
    """
    failed = {(r.schedule, r.source_digest) for r in rows if r.status in FAILED}
    rows = [r for r in rows if (r.schedule, r.source_digest) not in failed]
    while (best := find_winner(rows, target.product)) is not None:
        digest = _digest(op, best.schedule, target)
        kept = [r for r in rows if r.schedule != best.schedule or r.source_digest == digest]
        if len(kept) == len(rows) or not best.raced:
            break
        rows = kept
    return rows, best


def _digest(op: Op, schedule: str, target: Target) -> str:
    """What rows keep of the source that the schedule makes now, "" where it makes none."""
    try:
        return source_mark(source(op, schedule, target).digest)
    except (PlanError, UsageError, CompileError):
        return ""


def _why_stock(e: Evidence, target: Target) -> str:
    """Why the stock kernel serves although a schedule is known; "" when that won."""
    if e.product != target.product:
        return f"it was timed on {e.product}, not on {target.product}"
    if e.ratio is None or e.ratio_low is None:
        return "it was never raced with the stock kernel"
    if e.ratio_low <= 1:
        return f"no win: {e.ratio:.3f} times as fast as {e.stock}, {e.ratio_low:.3f} at worst"
    slower = {name: x for name, x in e.rivals.items() if x <= 1 and name not in SERVERS}  # a server has one of them
    return "; ".join(f"no win: {x:.3f} times as fast as {name}" for name, x in slower.items())


def _rivals(rows: Sequence[Measurement], schedule: str, time_us: float) -> dict[str, float]:
    """How many times as fast as each further kernel: by races of the schedule, else of others against that kernel's time."""
    out = {}
    for name in RIVALS[1:]:
        raced = [r for r in rows if r.baseline == name and r.baseline_us]
        own = [r.static["speedup"] for r in raced if r.schedule == schedule and "speedup" in r.static]
        if raced:
            out[name] = median(own or [(r.baseline_us or 0.0) / time_us for r in raced])
    return out


def _evidence(rows: Sequence[Measurement], rivals: Mapping[str, float]) -> Evidence:
    """Of rows of one schedule: the race with the median ratio, of two the worse, so that all its figures are of one race."""
    races = _of_today([r for r in rows if is_raced(r)])
    by: Callable[[Measurement], float] = (lambda r: r.static["speedup"]) if races else (lambda r: -(r.time_us or 0.0))
    ordered = sorted(races or rows, key=by)
    row = ordered[(len(ordered) - 1) // 2]
    ratio, low, high = (row.static[name] if races else None for name in ("speedup", "speedup_low", "speedup_high"))
    p, d = row.protocol, row.device
    return Evidence(
        "measured", row.op, row.source_digest, row.time_us or 0.0, row.samples_us, None, None,
        row.baseline, row.baseline_us, ratio, low, high, rivals,
        max((r.error_norm for r in rows if r.error_norm is not None), default=None),
        {"cache": p.cache, "clocks": p.clocks, "clock": p.clock, "threads": p.threads, "repeats": p.repeats},
        d.product, d.driver, d.toolkit, row.emmy_version, row.time_utc, len(ordered), row.id, "",
    )  # fmt: skip


def _of_today(races: Sequence[Measurement]) -> Sequence[Measurement]:
    """The races against stock in its fastest form: it took a slower one in some before Emmy asked for the best of torch's backends."""
    least = min((r.baseline_us for r in races if r.baseline_us), default=0.0)
    return [r for r in races if (r.baseline_us or 0.0) <= SAME_STOCK * least]


def _of_prediction(p: Prediction, target: Target) -> Evidence:
    return Evidence(
        "predicted", p.op, p.source_digest, p.predicted_us, (), p.low_us, p.high_us, "", None, None, None, None, {}, None, {},
        target.product, "", "", p.emmy_version, p.time_utc, 0, "", f"{p}; {p.basis}",
    )  # fmt: skip
