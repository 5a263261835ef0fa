"""A measurer by formula for which small sizes want another schedule than large ones."""

from __future__ import annotations

from collections.abc import Sequence

from emmy.ir.ops import parse_op
from emmy.ir.program import upper
from emmy.ir.target import load_target
from emmy.measure.fake import FakeMeasurer
from emmy.records import Candidate, Measurement

WIDE = 64  # from more rows than so many on, packing B pays off


class BySize(FakeMeasurer):
    """Packing makes a kernel slower up to WIDE rows and faster above; the product is the target's own, as on a device."""

    def __init__(self, **options: object) -> None:
        super().__init__(product=load_target("cpu").product, **options)  # type: ignore[arg-type]
        self.raced: list[tuple[str, tuple[str, ...]]] = []

    def time_us(self, candidate: Candidate) -> float:
        m = upper(dict(parse_op(candidate.op).program().dims)["m"])
        packs = "stage(B,pack" in candidate.schedule
        return super().time_us(candidate) * (4 if packs == (m <= WIDE) else 1)

    def race(self, candidates: Sequence[Candidate], rounds: int = 7, against: str = "") -> list[Measurement]:
        self.raced.append((candidates[0].op, tuple(c.schedule for c in candidates)))
        return super().race(candidates, rounds, against)
