"""Whether rows that others measured can be believed: what is compared, and how far it may be off. Decides; moves no rows.

A set of rows is calibrated when all of these hold:

circumstances  every time says where, how and by which Emmy it was measured, and that its answer was checked
ids            no row has the id of another row that is known here
sources        enough rows' schedules give, with this Emmy, the source that was measured; the others train nothing
roofline       nothing is faster than the device can be
level          times are as long as expected
order          within a problem the fast ones are those that are expected to be fast

What is expected of a row comes from (`Relation`): the same kernel measured on the same product; a model of that product; the
same op and schedule measured on another card of the vendor, and a model of such a card, both by way of the two rooflines. They
are asked in this order until most rows are covered. The nearer the relation, the less may the rows be off. `docs/data.md` says
what these limits rest on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

import numpy as np

from emmy.costmodel.doctor import ROOF_MARGIN
from emmy.costmodel.evaluate import MIN_CANDIDATES, spearman
from emmy.costmodel.replayed import Outcome
from emmy.costmodel.shards import as_shipped
from emmy.records import Measurement

Check = Literal["circumstances", "ids", "sources", "roofline", "level", "order", "licence", "target"]
Key = tuple[str, ...]

MIN_ROWS = 20  # timed rows that replay, below which nothing is said of a set
COVERED = 0.8  # of these must be held against something, each by itself
BAD_ORDER = 0.25  # of the problems may be ordered worse than ORDER_FLOOR
ORDER_FLOOR = 0.2
TOLD_APART = 1.25  # the slowest over the fastest of a problem; where they are nearer, the order is noise


@dataclass(frozen=True, slots=True)
class Limits:
    """How far rows may be off what is expected of them. Factors, of times."""

    pairs: int  # rows with an expectation, at least
    level: float  # the median of a problem's ratios, over problems: at most this factor either way
    spread: float  # the 90 % over the 10 % quantile of all ratios
    leap: float  # one row may be so much faster than its problem's others say
    order: float  # Spearman's rank correlation, of the median problem


Relation = Literal["same kernels", "a model of the card", "kernels of another card", "a model of another card"]
LIMITS: Mapping[Relation, Limits] = {
    "same kernels": Limits(20, 1.2, 1.35, 1.5, 0.7),
    "a model of the card": Limits(50, 1.25, 1.6, 3.0, 0.5),
    "kernels of another card": Limits(50, 3.0, 4.0, 5.0, 0.6),
    "a model of another card": Limits(50, 3.0, 4.0, 8.0, 0.5),
}
ITS_OWN: tuple[Relation, ...] = ("same kernels", "a model of the card")


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check, with figures."""

    check: Check
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """All findings on a set of rows. It is calibrated when all passed."""

    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        return bool(self.findings) and all(f.passed for f in self.findings)

    @property
    def why(self) -> str:
        """What did not pass, in a sentence or more; "" when all did."""
        return "; ".join(f"{f.check}: {f.detail}" for f in self.findings if not f.passed)


@dataclass(frozen=True, slots=True)
class Predictor:
    """A model's times, in log2 of microseconds, of features [n, n_features], and the card whose rows it learned from."""

    card: str  # the target's name
    predict: Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What rows are held against.

    known:    rows that are believed here, of the target and of cards that are like it
    roof_us:  the least time a row can take; None where that is not known
    outcome:  what a row's schedule gives now: features, and the digest of its source; None where it is refused
    models:   of the target, or of cards like it, the nearest first
    is_alike: whether a card can say something of the target
    """

    known: Sequence[Measurement]
    roof_us: Callable[[Measurement], float | None]
    outcome: Callable[[Measurement], Outcome]
    models: Sequence[Predictor] = ()
    is_alike: Callable[[str], bool] = lambda card: True


def calibrate(rows: Sequence[Measurement], evidence: Evidence) -> Verdict:
    """What is found of rows of one target that came from elsewhere."""
    here = {r.id for r in evidence.known}  # a row that is known already says nothing of the others
    timed = [
        r for r in rows if r.time_us is not None and not r.contended and r.origin != "derived" and r.id not in here
    ]
    if len(timed) < MIN_ROWS:
        detail = (
            f"{len(timed)} rows are new and have an undisturbed time, at least {MIN_ROWS} are needed to say anything"
        )
        return Verdict((Finding("circumstances", False, detail),))
    first = [_circumstances(timed), _ids(rows, evidence.known)]
    outcomes = {r.id: evidence.outcome(r) for r in timed}
    fresh = [r for r in timed if (o := outcomes[r.id]) is not None and o[1] == r.source_digest]
    first += [_sources(timed, fresh, outcomes), _roofline(timed, evidence)]
    if not all(f.passed for f in first):
        return Verdict(tuple(first))
    found = list(_expectations(fresh, outcomes, evidence))
    return Verdict((*first, *_levels(found, len(fresh)), _order(found, len(fresh))))


# ---------------------------------------------------------------- each row by itself
def _circumstances(rows: Sequence[Measurement]) -> Finding:
    lacking = {r.id: what for r in rows if (what := _lacks(r))}
    if not lacking:
        return Finding("circumstances", True, f"all of {len(rows)} timed rows have them")
    row_id, what = next(iter(lacking.items()))
    return Finding("circumstances", False, f"{len(lacking)} of {len(rows)} timed rows lack some; row {row_id} {what}")


def _lacks(row: Measurement) -> str:
    device = row.device
    texts = {
        "product": device.product,
        "device": device.uuid_hash,
        "driver": device.driver,
        "toolkit": device.toolkit,
        "source": row.source_digest,
        "Emmy version": row.emmy_version,
        "time": row.time_utc,
    }
    if missing := [name for name, text in texts.items() if not text]:
        return f"has no {missing[0]}"
    if row.error_norm is None:
        return "does not say how far its answer was off"
    if row.protocol.clock == "event" and row.clock_mhz is None:
        return "does not say at which clock the GPU ran"
    return ""


def _ids(rows: Sequence[Measurement], known: Sequence[Measurement]) -> Finding:
    here = {r.id: r for r in known}
    other = [r.id for r in rows if r.id in here and _content(r) != _content(here[r.id])]
    if other:
        return Finding(
            "ids", False, f"{len(other)} rows have ids of other rows that are known here, such as {other[0]}"
        )
    return Finding("ids", True, "none stands for another row")


def _content(row: Measurement) -> tuple[object, ...]:
    """What makes it this measurement, as it is after an export too."""
    return (row.op, row.schedule, row.source_digest, row.device, row.status, as_shipped(row).samples_us, row.time_utc)


def _sources(timed: Sequence[Measurement], fresh: Sequence[Measurement], outcomes: Mapping[str, Outcome]) -> Finding:
    refused = sum(outcomes[r.id] is None for r in timed)
    changed = len(timed) - len(fresh) - refused
    detail = (
        f"of {len(timed)} schedules {len(fresh)} give the source that was measured, {changed} another, {refused} none"
    )
    needed = "" if len(fresh) >= MIN_ROWS else f"; at least {MIN_ROWS} are needed"
    return Finding("sources", not needed, detail + needed)


def _roofline(rows: Sequence[Measurement], evidence: Evidence) -> Finding:
    least = [(r, evidence.roof_us(r)) for r in rows]
    if (unknown := sum(roof is None for _, roof in least)) == len(rows):
        return Finding("roofline", False, "no row's roofline is known here")
    beyond = [(r, roof) for r, roof in least if roof and (r.time_us or 0.0) * ROOF_MARGIN < roof]
    if beyond:
        row, roof = beyond[0]
        detail = (
            f"{len(beyond)} rows are faster than it allows; row {row.id}: {row.time_us:.4g} us, it is {roof:.4g} us"
        )
        return Finding("roofline", False, detail)
    nearest = max(roof / (r.time_us or roof) for r, roof in least if roof)
    said = f", of {unknown} rows it is not known" if unknown else ""
    return Finding("roofline", True, f"the fastest reaches {nearest:.0%} of it{said}")


# ---------------------------------------------------------------- against what is expected
@dataclass(frozen=True, slots=True)
class _Expected:
    """Times of rows beside what one relation expects of them: by problem (their, expected) microseconds."""

    relation: Relation
    of: str  # whose kernels or model
    problems: Mapping[Key, Sequence[tuple[float, float]]] = field(default_factory=dict)

    @property
    def pairs(self) -> int:
        return sum(len(p) for p in self.problems.values())

    @property
    def limits(self) -> Limits:
        return LIMITS[self.relation]

    def log2(self, problem: Key) -> np.ndarray:
        theirs, expected = np.array(self.problems[problem]).T
        return np.asarray(np.log2(theirs / expected))


def _problem(row: Measurement) -> Key:
    p = row.protocol
    return (row.op, row.device.product, row.device.uuid_hash, p.cache, p.clocks, p.clock, str(p.threads))


def _how(row: Measurement) -> Key:
    p = row.protocol
    return (p.cache, p.clocks, p.clock, str(p.threads))


def _expectations(
    rows: Sequence[Measurement], outcomes: Mapping[str, Outcome], evidence: Evidence
) -> Iterable[_Expected]:
    """What each relation expects, the nearest relation first."""
    target, products = rows[0].device.target, {r.device.product for r in rows}
    calm = [r for r in evidence.known if r.time_us is not None and not r.contended and r.origin != "derived"]
    ours = [r for r in calm if r.device.product in products]
    same = {k: median(t for t, _ in v) for k, v in _times(ours, lambda r: (*_kernel(r), r.source_digest)).items()}
    yield _paired(rows, "same kernels", ", ".join(sorted(products)), lambda r: same.get((*_kernel(r), r.source_digest)))
    for m in evidence.models:
        if m.card == target:
            yield _predicted(rows, outcomes, m, "a model of the card")
    by_card: dict[str, list[Measurement]] = {}
    for r in calm:
        if r.device.product not in products and evidence.is_alike(r.device.target):
            by_card.setdefault(r.device.target, []).append(r)
    for card, theirs in by_card.items():
        yield _scaled(rows, theirs, card, evidence)
    for m in evidence.models:
        if m.card != target:
            yield _predicted(rows, outcomes, m, "a model of another card")


def _kernel(row: Measurement) -> Key:
    return (row.op, row.schedule, row.device.product, *_how(row))


def _times(
    rows: Sequence[Measurement], key: Callable[[Measurement], Key]
) -> dict[Key, list[tuple[float, Measurement]]]:
    out: dict[Key, list[tuple[float, Measurement]]] = {}
    for r in rows:
        if r.time_us is not None:
            out.setdefault(key(r), []).append((r.time_us, r))
    return out


def _scaled(rows: Sequence[Measurement], theirs: Sequence[Measurement], card: str, evidence: Evidence) -> _Expected:
    """The same op and schedule on another card, each against its own roofline."""
    there = _times(theirs, lambda r: (r.op, r.schedule, *_how(r)))
    factors: dict[Key, float | None] = {}

    def expected(row: Measurement) -> float | None:
        found = there.get((row.op, row.schedule, *_how(row)))
        if not found:
            return None
        problem = _problem(row)
        if problem not in factors:
            here, other = evidence.roof_us(row), evidence.roof_us(found[0][1])
            factors[problem] = here / other if here and other else None
        factor = factors[problem]
        return None if factor is None else factor * median(t for t, _ in found)

    return _paired(rows, "kernels of another card", card, expected)


def _predicted(
    rows: Sequence[Measurement], outcomes: Mapping[str, Outcome], model: Predictor, relation: Relation
) -> _Expected:
    x = np.stack([o[0] for r in rows if (o := outcomes[r.id]) is not None])
    times = dict(zip((r.id for r in rows), np.exp2(model.predict(x)).tolist(), strict=True))
    return _paired(rows, relation, model.card, lambda r: times[r.id])


def _paired(
    rows: Sequence[Measurement], relation: Relation, of: str, expected: Callable[[Measurement], float | None]
) -> _Expected:
    problems: dict[Key, list[tuple[float, float]]] = {}
    for r in rows:
        if r.time_us is not None and (us := expected(r)) is not None:
            problems.setdefault(_problem(r), []).append((r.time_us, us))
    return _Expected(relation, of, problems)


def _levels(found: Sequence[_Expected], n_rows: int) -> tuple[Finding, ...]:
    """How long the times are, by the nearest relations that together cover the rows."""
    out: list[Finding] = []
    for e in found:
        if e.pairs < min(e.limits.pairs, COVERED * n_rows):
            continue
        out.append(_level_by(e))
        if e.pairs >= COVERED * n_rows:
            return tuple(out)
    said = (
        "; ".join(f"{e.pairs} by {e.relation}" for e in found if e.pairs)
        or "no row of its product, no card or model like it"
    )
    few = f"too few of {n_rows} rows can be held against what is known here: {said}"
    return (*out, Finding("level", False, few))


def _level_by(e: _Expected) -> Finding:
    limits = e.limits
    middles = {p: float(np.median(e.log2(p))) for p in e.problems}
    level = 2.0 ** median(middles.values())
    every = np.concatenate([e.log2(p) for p in e.problems])
    low, high = np.exp2(np.quantile(every, (0.1, 0.9)))
    leap = 2.0 ** max(middles[p] - float(e.log2(p).min()) for p in e.problems)
    said = (
        f"{e.pairs} rows of {len(e.problems)} problems by {e.relation} ({e.of}): {level:.3g} of the time expected, "
        f"80 % from {low:.3g} to {high:.3g}, one {leap:.3g} times faster than its problem's others say"
    )
    faults = []
    if not 1 / limits.level <= level <= limits.level:
        faults.append(f"the level may be off by a factor of {limits.level:g}")
    if high / low > limits.spread:
        faults.append(f"the spread may be a factor of {limits.spread:g}")
    if leap > limits.leap:
        faults.append(f"one row may be {limits.leap:g} times faster")
    return Finding("level", not faults, said + "".join(f"; {f}" for f in faults))


def _order(found: Sequence[_Expected], n_rows: int) -> Finding:
    """How well the rows of a problem are in the order that is expected."""
    same, *others = found
    if same.pairs >= max(same.limits.pairs, COVERED * n_rows):
        return Finding("order", True, f"{same.pairs} of {n_rows} rows are of kernels known here")
    for e in (*others, same):
        of = {p: spearman(*np.array(pairs).T) for p, pairs in e.problems.items() if _has_order(pairs)}
        if not of:
            continue
        middle, bad = median(of.values()), sum(r < ORDER_FLOOR for r in of.values())
        said = f"{len(of)} problems by {e.relation} ({e.of}): rank correlation {middle:.2f}"
        wanted = f"at least {e.limits.order:g} is needed, and below {ORDER_FLOOR:g} in no more than a quarter"
        passed = middle >= e.limits.order and bad <= BAD_ORDER * len(of)
        return Finding("order", passed, said + ("" if passed else f", {bad} below {ORDER_FLOOR:g}; {wanted}"))
    few = f"no problem has {MIN_CANDIDATES} rows, apart in time, of which an order is expected"
    if any(e.relation in ITS_OWN and e.pairs >= COVERED * n_rows for e in found):
        return Finding("order", True, f"{few}; each row by itself is as long as its card's others say")
    return Finding("order", False, few)


def _has_order(pairs: Sequence[tuple[float, float]]) -> bool:
    theirs = [t for t, _ in pairs]
    return len(pairs) >= MIN_CANDIDATES and max(theirs) >= TOLD_APART * min(theirs)
