"""Which kernels of a pack serve which layers of this process: found by shape, loaded once, tried against stock, counted.

Knows packs and torch; what vLLM's layers are is compat.py's affair.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from emmy.ir.dtype import DType
from emmy.ir.ops import Matmul, parse_op
from emmy.ir.program import Sym
from emmy.pack import Case, Pack, Served
from emmy_vllm import ops
from emmy_vllm.attended import Attended
from emmy_vllm.attention_steps import Shape
from emmy_vllm.counts import Counts
from emmy_vllm.selftest import alike_ranges, wrong_ranges
from emmy_vllm.settings import Settings

log = logging.getLogger("emmy.vllm")
DTYPES: dict[torch.dtype, DType] = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}


@dataclass
class Table:
    """A case of the pack as this process uses it. `number` is what graphs hold; `rows`: the most that the engine sends.

    refused: lo of a range -> why it is not used here
    alike:   ranges that alone serve, for any number of rows, in the deterministic lane
    place:   where it is used, of one that graphs get and not layers
    """

    case: Case
    number: int
    counts: Counts
    rows: int = 0
    refused: dict[int, str] = field(default_factory=dict)
    alike: tuple[tuple[int, int], ...] = ()
    layers: list[str] = field(default_factory=list)
    place: str = ""

    def why_left(self, r: Served) -> str:
        """Why stock serves a range of this process; "" when Emmy does."""
        if r.code is None:
            return r.why
        least = min(
            other.lo for other in self.case.ranges if other.code
        )  # few rows are padded to it where stock must not
        if r.lo > max(self.rows, least):
            return f"no step has {r.lo} rows"
        return self.refused.get(r.lo, "")

    def serves(self, r: Served) -> bool:
        return not self.why_left(r)


class Kernels:
    """The tables of one pack under one user's settings. Numbers follow from both, so that every process has the same."""

    def __init__(self, settings: Settings, instance: str) -> None:
        """`instance`: the engine's id. Raises PackError for a pack that is damaged or another one than the settings name."""
        self.settings, self.pack, self.instance = settings, settings.open(), instance
        self.tables: dict[str, Table] = {}
        self.stock: dict[str, list[str]] = {}  # why a product is vLLM's own -> layers
        self.attended: dict[tuple[str, Shape], Attended] = {}  # by vLLM's backend
        self.weights: dict[tuple[int, int, torch.dtype, torch.device], list[str]] = {}  # of plain linears -> layers
        self.graphs: Counter[str] = Counter()  # what became of chains in the graphs that this process compiled
        self._linears = dict(_linears(self.pack))

    def linear(self, n: int, k: int, dtype: torch.dtype, layer: str) -> Table | None:
        """The table of y = x @ w^T with w (n, k); None where the pack has none. `layer` asks, and is listed under it."""
        short = DTYPES.get(dtype)
        case = self._linears.get((n, k, short)) if short else None
        if case is None:
            self.leave(f"the pack has no {n}x{k}:{short or dtype}", layer)
            return None
        table = self.table(case)
        table.layers.append(layer)
        return table

    def note(self, weight: torch.Tensor, layer: str) -> None:
        """Notes a weight (n, k) of a plain linear: what stands around it in a graph may be fused."""
        n, k = weight.shape
        self.weights.setdefault((n, k, weight.dtype, weight.device), []).append(layer)

    def leave(self, why: str, layer: str) -> None:
        """Notes that a layer's product stays vLLM's."""
        self.stock.setdefault(why, []).append(layer)

    def table(self, case: Case) -> Table:
        """The table of a case, not loaded yet."""
        if case.op not in self.tables:
            rows = [r.sizes or "all" if r.code else "" for r in case.ranges]
            self.tables[case.op] = Table(case, self._number(case.op), Counts(self.instance, case.op, rows))
        return self.tables[case.op]

    def load(self, table: Table, rows: int) -> None:
        """Makes the table ready for steps of up to `rows` rows. Raises PackError, NoSuchDevice, WrongCard, LaunchError."""
        table.rows = max(table.rows, rows)
        plan = self.pack.plan(table.case.op, table.why_left)
        ops.add_table(table.number, table.case.op, table.case.arguments, plan, table.counts, table.alike)

    def load_linear(self, table: Table, rows: int, weight: torch.Tensor) -> None:
        """Loads the table where it is not yet, and tries each of its kernels on the weight: a wrong one is left to stock."""
        if rows <= table.rows:
            return
        table.alike = ()
        self.load(table, rows)
        wrong = wrong_ranges(table.case, table.number, table.serves, rows, weight)
        for lo, why in wrong.items():
            log.error("%s from %d rows: WRONG ANSWER, left to stock: %s", table.case.op, lo, why)
        table.refused |= wrong
        if self.settings.deterministic:
            table.alike = alike_ranges(table.case, table.number, table.serves, rows, weight)
            others = {r.lo for r in table.case.ranges if table.serves(r)} - {lo for lo, _ in table.alike}
            table.refused |= dict.fromkeys(
                others, "adds in another order than the kernels that the deterministic lane uses"
            )
        if wrong or self.settings.deterministic:
            self.load(table, rows)
        table.counts.clear()  # of what the tests called

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
            if any(r.code for r in case.ranges):
                yield (op.n, op.k, op.dtype), case


def kernels_of(settings: Settings, instance: str) -> Kernels:
    """This process's tables under these settings, made at the first call, for the engine that asked first."""
    if settings not in _all:
        _all[settings] = Kernels(settings, instance)
    return _all[settings]


def every() -> tuple[Kernels, ...]:
    """All that this process has, in the order they were asked for."""
    return tuple(_all.values())


_all: dict[Settings, Kernels] = {}
