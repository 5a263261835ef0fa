"""A data set arrives from a card never seen: pushed, pulled, held, calibrated, released, trained on. And tampered ones, which stay held.

    python experiments/new_card.py [--rows 600] [--draws 10] [--card a4000]

Recorded spaces stand in for cards: their kernels are other people's, described by their own parameters instead of Emmy's features,
their times are real. A pusher has drawn `--rows` configurations of each kernel at random on the new card; the home that pulls
knows as many of each on the donor cards. Everything between the two homes is the code that `emmy data push` and `pull` run. What
is not, because no schedule of Emmy's is in it: features, source digest and roofline of a row are made here. What the recordings
lack (driver, clock, the answer's error) is filled in, or no set would pass for want of circumstances.

Judged is the ranking of those configurations of a space that no data set holds: top-10 regret against the best of them.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from emmy import __version__
from emmy.costmodel.calibrate import Evidence, Predictor, Verdict, calibrate
from emmy.costmodel.dataset import Dataset
from emmy.costmodel.donors import OTHER_ARCHITECTURE, SAME_ARCHITECTURE, DonorSamples, with_donors
from emmy.costmodel.evaluate import random_score, score
from emmy.costmodel.exchange import append_part
from emmy.costmodel.features import FeatureSet
from emmy.costmodel.fit import Samples, ensemble
from emmy.costmodel.model import Ensemble
from emmy.costmodel.place import place_at
from emmy.costmodel.pull import pull
from emmy.costmodel.push import push
from emmy.costmodel.quarantine import Quarantine
from emmy.costmodel.registry import ModelStore
from emmy.costmodel.shards import Manifest
from emmy.costmodel.train import judge, train
from emmy.records import Device, Measurement, Protocol
from emmy.workloads import recorded


@dataclass(frozen=True, slots=True)
class Card:
    """What a card's maker says of it: f32 at its boost clock, memory; MHz, TFLOP/s, GB/s."""

    product: str
    arch: str
    vendor: str
    boost_mhz: float
    f32_tflops: float
    dram_gbs: float


CARDS = {
    "a100": Card("NVIDIA A100-PCIE-40GB", "sm_80", "NVIDIA", 1410, 19.5, 1555),
    "a4000": Card("NVIDIA RTX A4000", "sm_86", "NVIDIA", 1560, 19.2, 448),
    "rtx3090": Card("NVIDIA GeForce RTX 3090", "sm_86", "NVIDIA", 1695, 35.6, 936),
    "rtx2080ti": Card("NVIDIA GeForce RTX 2080 Ti", "sm_75", "NVIDIA", 1545, 13.45, 616),
    "mi250x": Card("AMD Instinct MI250X", "gfx90a", "AMD", 1700, 23.95, 1638),  # one of its two dies
    "w6600": Card("AMD Radeon PRO W6600", "gfx1032", "AMD", 2331, 10.4, 224),
}
# What a kernel computes: operations (of which a multiply-add is two, and an add alone takes as long), and least bytes moved.
WORK = {
    "convolution": (2.0 * 4096 * 4096 * 15 * 15, 4.0 * 2 * 4096 * 4096),
    "dedispersion": (2.0 * 2048 * 25_000 * 1536, 1536 * 25_650 + 4.0 * 2048 * 25_000),
    "gemm": (2.0 * 4096**3, 4.0 * 3 * 4096**2),
}
SCENARIOS = (("a4000", ("a100",)), ("a100", ("a4000",)), ("rtx3090", ("rtx2080ti",)), ("rtx2080ti", ("rtx3090",)))
KERNELS = tuple(sorted({n.rpartition(".")[0] for n in recorded.names()}))
ROOF = "log2_roof_us"


def columns() -> tuple[str, ...]:
    """Names of all features: each kernel's parameters, and the roofline."""
    of = {k: recorded.load(next(n for n in recorded.names() if n.startswith(f"{k}."))).parameters for k in KERNELS}
    return (*(f"{k}.{p}" for k, names in of.items() for p in names), ROOF)


FEATURES = FeatureSet(columns(), hashlib.sha256("\n".join(columns()).encode()).hexdigest()[:16])


def roof_us(kernel: str, card: str) -> float:
    flops, n_bytes = WORK[kernel]
    return max(flops / CARDS[card].f32_tflops * 1e-6, n_bytes / CARDS[card].dram_gbs * 1e-3)


def source_of(op: str, schedule: str) -> str:
    """What stands for the digest of the source."""
    return hashlib.sha256(f"{op}\n{schedule}".encode()).hexdigest()


def rows_of(card: str) -> dict[str, list[Measurement]]:
    """Every configuration of the card that ran, by kernel, as a row; its id is of card and configuration."""
    out = {}
    for name in recorded.names():
        kernel, _, of = name.rpartition(".")
        if of == card:
            table = recorded.load(name)
            ran = np.flatnonzero(np.isfinite(table.time_ms))
            out[kernel] = [_row(kernel, card, table, int(i)) for i in ran]
    return out


def _row(kernel: str, card: str, table: recorded.RecordedTable, i: int) -> Measurement:
    schedule = ",".join(f"{p}={v}" for p, v in zip(table.parameters, table.values[i].tolist(), strict=True))
    c = CARDS[card]
    return Measurement(
        op=kernel,
        schedule=schedule,
        source_digest=source_of(kernel, schedule),
        device=Device(card, c.product, hashlib.sha256(card.encode()).hexdigest()[:16], "as recorded", "as recorded"),
        status="ok",
        samples_us=(float(table.time_ms[i]) * 1e3,),
        protocol=Protocol(cache="warm", clock="event"),
        error_norm=0.0,
        clock_mhz=c.boost_mhz,
        emmy_version=__version__,
        time_utc="2026-01-01T00:00:00.000+00:00",
        id=hashlib.sha256(f"{card} {kernel} {schedule}".encode()).hexdigest()[:32],
    )


def x_of(row: Measurement) -> np.ndarray:
    """A row's features: its kernel's parameters, as log2 where positive; NaN for those of other kernels."""
    known = {ROOF: np.log2(roof_us(row.op, row.device.target))}
    for word in row.schedule.split(","):
        name, _, value = word.partition("=")
        known[f"{row.op}.{name}"] = np.log2(float(value)) if float(value) > 0 else -1.0
    return np.array([known.get(name, np.nan) for name in FEATURES.names])


def samples_of(rows: Sequence[Measurement]) -> Samples:
    kernels = sorted({r.op for r in rows})
    problem = np.array([kernels.index(r.op) for r in rows], dtype=np.int64)
    return Samples(
        np.stack([x_of(r) for r in rows]) if rows else np.empty((0, len(FEATURES.names))),
        np.array([r.time_us for r in rows], dtype=np.float64),
        problem, tuple(kernels), problem, tuple(kernels), tuple(r.schedule for r in rows), tuple(r.id for r in rows),
        FEATURES, ROOF,
    )  # fmt: skip


def drawn(rows: dict[str, list[Measurement]], n: int, rng: np.random.Generator) -> list[Measurement]:
    """`n` rows of each kernel."""
    return [of[i] for of in rows.values() for i in rng.permutation(len(of))[:n]]


def filled(home: Path, rows: Sequence[Measurement]) -> Dataset:
    """A home that has measured these rows."""
    for card in sorted({r.device.target for r in rows}):
        append_part(home / card, [r for r in rows if r.device.target == card], Manifest(card, "MIT", "recorded spaces"))
    return Dataset(home)


def worth(donor: str, of: str) -> float:
    d, o = CARDS[donor], CARDS[of]
    if donor == of or d.vendor != o.vendor:
        return 0.0
    return SAME_ARCHITECTURE if d.arch == o.arch else OTHER_ARCHITECTURE


def fitted(card: str, rows: Sequence[Measurement]) -> Ensemble:
    """A model of the card's rows among these and of its donors'; without own rows of the donors' alone."""
    donors = donors_of(card, rows)
    own = samples_of([r for r in rows if r.device.target == card])
    return ensemble(with_donors(own, donors) if len(own) else donors[0].samples)


def donors_of(card: str, rows: Sequence[Measurement]) -> list[DonorSamples]:
    others = sorted({r.device.target for r in rows if worth(r.device.target, card) > 0})
    return [DonorSamples(o, samples_of([r for r in rows if r.device.target == o]), worth(o, card)) for o in others]


def evidence_of(dataset: Dataset, card: str) -> Evidence:
    known = dataset.rows()
    models = []
    for other in sorted({r.device.target for r in known}):
        if worth(other, card) > 0:
            model = ensemble(samples_of([r for r in known if r.device.target == other]))
            models.append(Predictor(other, partial(_log2_us, model)))
    return Evidence(
        known,
        lambda r: roof_us(r.op, r.device.target),
        lambda r: (x_of(r), source_of(r.op, r.schedule)),
        models,
        lambda other: worth(other, card) > 0,
    )


def _log2_us(model: Ensemble, x: np.ndarray) -> np.ndarray:
    return model.predict(x)[0]


# ---------------------------------------------------------------- tampering
def scaled(factor: float) -> Callable[[list[Measurement]], list[Measurement]]:
    return lambda rows: [replace(r, samples_us=tuple(t * factor for t in r.samples_us)) for r in rows]


def shuffled(rows: list[Measurement]) -> list[Measurement]:
    """Each kernel's times dealt anew among its configurations."""
    rng, out = np.random.default_rng(1), []
    for kernel in sorted({r.op for r in rows}):
        of = [r for r in rows if r.op == kernel]
        out += [replace(r, samples_us=of[j].samples_us) for r, j in zip(of, rng.permutation(len(of)), strict=True)]
    return out


def digests_changed(rows: list[Measurement]) -> list[Measurement]:
    return [replace(r, source_digest=source_of(r.source_digest, "changed")) for r in rows]


def one_too_fast(factor: float) -> Callable[[list[Measurement]], list[Measurement]]:
    def planted(rows: list[Measurement]) -> list[Measurement]:
        middle = sorted(rows, key=lambda r: (r.op, r.time_us or 0.0))[len(rows) // 2]
        best = min(r.time_us or 0.0 for r in rows if r.op == middle.op)
        return [replace(r, samples_us=(best * factor,)) if r.id == middle.id else r for r in rows]

    return planted


def without(**fields: object) -> Callable[[list[Measurement]], list[Measurement]]:
    return lambda rows: [replace(r, **fields) for r in rows]  # type: ignore[arg-type]


TAMPERED: dict[str, Callable[[list[Measurement]], list[Measurement]]] = {
    "times x 0.25": scaled(0.25),
    "times x 0.7": scaled(0.7),
    "times x 1.3": scaled(1.3),
    "times x 4": scaled(4.0),
    "times shuffled": shuffled,
    "source digests changed": digests_changed,
    "one row 10 times as fast as the fastest": one_too_fast(0.1),
    "one row 1.2 times as fast as the fastest": one_too_fast(1 / 1.2),
    "no clock": without(clock_mhz=None),
}


# ---------------------------------------------------------------- the story
def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def arrive(home: Dataset, rows: list[Measurement], evidence: Evidence, where: Path) -> tuple[Verdict, int]:
    """What is found of rows that a pusher has, and how many of them came in."""
    place = place_at(str(where / "place"))
    push(filled(where / "pusher", rows), place)
    (arrival,) = pull(home, place).arrivals
    verdict, quarantine = calibrate(arrival.rows(), evidence), Quarantine(home)
    if not verdict.passed:
        quarantine.hold(arrival, verdict.why)
        return verdict, 0
    return verdict, quarantine.release(arrival, "calibrated").new


def regrets(model: Ensemble, held: Mapping[str, list[Measurement]]) -> dict[str, float]:
    """Top-10 regret on each kernel's configurations."""
    out = {}
    for kernel, rows in held.items():
        time_us = np.array([r.time_us for r in rows], dtype=np.float64)
        out[kernel] = score(time_us, model.predict(np.stack([x_of(r) for r in rows]))[0]).top10
    return out


@dataclass(frozen=True, slots=True)
class Draw:
    """Data sets of a card and its donors, and what of their spaces is in none of them."""

    data: Mapping[str, list[Measurement]]
    held: Mapping[str, dict[str, list[Measurement]]]


def draw(cards: Sequence[str], n: int, seed: int) -> Draw:
    rng = np.random.default_rng(seed)
    spaces = {name: rows_of(name) for name in cards}
    data = {name: drawn(of, n, rng) for name, of in spaces.items()}
    taken = {r.id for rows in data.values() for r in rows}
    held = {name: {k: [r for r in rows if r.id not in taken] for k, rows in of.items()} for name, of in spaces.items()}
    return Draw(data, held)


def scenario(card: str, donors: Sequence[str], n: int, seeds: int) -> None:
    cards = (card, *donors)
    regret: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for seed in range(seeds):
        d = draw(cards, n, seed)
        known = [r for name in donors for r in d.data[name]]
        if seed == 0:
            say(
                f"\n{card}, of which nothing is known, beside {', '.join(donors)}: {len(d.data[card])} rows of {', '.join(d.held[card])}"
            )
            tampered(card, d, known)
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            home = filled(root / "home", known)
            evidence = evidence_of(home, card)
            before = {name: fitted(name, known) for name in cards}
            verdict, new = arrive(home, d.data[card], evidence, root)
            if not new:
                say(f"  seed {seed}: held: {verdict.why}")
                continue
            if seed == 0:
                say(
                    f"  as recorded: {new} rows released: "
                    + "; ".join(f"{f.check}: {f.detail}" for f in verdict.findings)
                )
                say(f"  {deployed(card, home, root / 'models')}")
            after = {name: fitted(name, home.rows()) for name in cards}
        for name in cards:
            old, now = regrets(before[name], d.held[name]), regrets(after[name], d.held[name])
            for kernel in d.held[name]:
                regret.setdefault((kernel, name), []).append((old[kernel], now[kernel]))
    for (kernel, name), pairs in regret.items():
        old_mean, now_mean = np.mean(pairs, axis=0)
        whole = np.array([r.time_us for r in rows_of(name)[kernel]], dtype=np.float64)
        say(
            f"  {kernel}.{name}: top-10 regret on the rest of its space, mean of {len(pairs)} draws: "
            f"before {old_mean:.1%}, after {now_mean:.1%}; at random {random_score(whole).top10:.1%}"
        )


def tampered(card: str, d: Draw, known: Sequence[Measurement]) -> None:
    """What becomes of data sets that are not as recorded, each in a home of its own."""
    evidence: Evidence | None = None
    for what, tamper in TAMPERED.items():
        with tempfile.TemporaryDirectory() as folder:
            home = filled(Path(folder) / "home", known)
            evidence = evidence or evidence_of(home, card)
            verdict, new = arrive(home, tamper(d.data[card]), evidence, Path(folder))
            assert len(home.rows()) == len(known) + new
        say(f"  {what}: {f'RELEASED, {new} rows' if new else f'held: {verdict.why}'}")


def deployed(card: str, home: Dataset, models: Path) -> str:
    """What a training makes of the card's rows: judged by held-out kernels, deployed when they speak for it."""
    rows, store = home.rows(), ModelStore(models)
    own = samples_of([r for r in rows if r.device.target == card])
    trained = train(own, card, donors=donors_of(card, rows))
    verdict = judge(trained, own, None)
    (store.deploy if verdict.deploy else store.keep)(trained.model)
    return f"a model of {card}, {'deployed' if verdict.deploy else 'kept and not deployed'}: {verdict.why}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", type=int, default=600, help="configurations of each kernel that a card's data set has"
    )
    parser.add_argument("--draws", type=int, default=10, help="of the data sets; regrets are means over them")
    parser.add_argument("--card", choices=[card for card, _ in SCENARIOS], help="only this one as the new card")
    args = parser.parse_args()
    for card, donors in (s for s in SCENARIOS if args.card in (None, s[0])):
        scenario(card, donors, args.rows, args.draws)
    return 0


if __name__ == "__main__":
    sys.exit(main())
