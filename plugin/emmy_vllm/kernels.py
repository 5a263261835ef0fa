"""Which kernels of a pack serve which layers of this process: found by shape, loaded once, tried against stock, counted.

Knows packs and torch; what vLLM's layers are is compat.py's affair.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from emmy.ir.dtype import DType
from emmy.ir.ops import Matmul, parse_op
from emmy.ir.program import Sym
from emmy.pack import Case, Pack, Served
from emmy_vllm import ops
from emmy_vllm.selftest import wrong_ranges
from emmy_vllm.settings import Settings

log = logging.getLogger("emmy.vllm")
DTYPES: dict[torch.dtype, DType] = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}


@dataclass
class Table:
    """A case of the pack as this process uses it. `number` is what graphs hold; `rows`: the most that the engine sends."""

    case: Case
    number: int
    rows: int = 0
    refused: dict[int, str] = field(default_factory=dict)  # lo of a range -> why it is not used here
    layers: list[str] = field(default_factory=list)

    def why_left(self, r: Served) -> str:
        """Why stock serves a range of this process; "" when Emmy does."""
        if r.code is None:
            return r.why
        return f"no step has {r.lo} rows" if r.lo > self.rows else self.refused.get(r.lo, "")

    def counts(self) -> tuple[int, ...]:
        return ops.counts(self.number, len(self.case.ranges))


class Kernels:
    """The tables of one pack under one user's settings. Numbers follow from both, so that every process has the same."""

    def __init__(self, settings: Settings) -> None:
        """Raises PackError for a pack that is damaged or another one than the settings name."""
        self.settings, self.pack = settings, settings.open()
        self.tables: dict[str, Table] = {}
        self.missing: dict[str, list[str]] = {}  # op that the pack lacks -> layers
        self._linears = dict(_linears(self.pack))

    def linear(self, n: int, k: int, dtype: torch.dtype, layer: str) -> Table | None:
        """The table of y = x @ w^T with w (n, k); None where the pack has none. `layer` asks, and is listed under it."""
        short = DTYPES.get(dtype)
        case = self._linears.get((n, k, short)) if short else None
        if case is None:
            self.missing.setdefault(f"{n}x{k}:{short or dtype}", []).append(layer)
            return None
        table = self.table(case)
        table.layers.append(layer)
        return table

    def table(self, case: Case) -> Table:
        """The table of a case, not loaded yet."""
        return self.tables.setdefault(case.op, Table(case, self._number(case.op)))

    def load(self, table: Table, rows: int) -> None:
        """Makes the table ready for steps of up to `rows` rows. Raises PackError, NoSuchDevice, WrongCard, LaunchError."""
        table.rows = max(table.rows, rows)
        plan = self.pack.plan(table.case.op, table.why_left)
        case = table.case
        ops.add_table(table.number, case.op, case.arguments, len(case.ranges), plan)

    def load_linear(self, table: Table, rows: int, weight: torch.Tensor) -> None:
        """Loads the table where it is not yet, and tries each of its kernels on the weight: a wrong one is left to stock."""
        if rows <= table.rows:
            return
        self.load(table, rows)
        wrong = wrong_ranges(table.case, table.number, lambda r: not table.why_left(r), rows, weight)
        if wrong:
            table.refused |= wrong
            for lo, why in wrong.items():
                log.error("%s from %d rows: WRONG ANSWER, left to stock: %s", table.case.op, lo, why)
            self.load(table, rows)

    def _number(self, op: str) -> int:
        what = f"{self.pack.digest} {self.settings.deterministic} {op}"
        return int.from_bytes(hashlib.sha256(what.encode()).digest()[:8], "big") >> 1


def _linears(pack: Pack) -> Iterator[tuple[tuple[int, int, DType], Case]]:
    """The plain products with weights (n, k) and any number of rows."""
    for made in pack.cases:
        op = parse_op(made.op)
        if isinstance(op, Matmul) and isinstance(op.m, Sym) and op.layout == "nk" and not op.epilogue:
            case = pack.case(made.op)
            assert case is not None
            yield (op.n, op.k, op.dtype), case


def kernels_of(settings: Settings) -> Kernels:
    """The process's tables under these settings, made at the first call."""
    if settings not in _all:
        _all[settings] = Kernels(settings)
    return _all[settings]


def every() -> tuple[Kernels, ...]:
    """All that this process has, in the order they were asked for."""
    return tuple(_all.values())


_all: dict[Settings, Kernels] = {}
