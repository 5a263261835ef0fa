"""What a pack's manifest says, as frozen objects with one strict JSON form. Knows no file, no compiler and no device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal, NoReturn

from emmy.errors import PackError
from emmy.ir.dtype import DType
from emmy.typed import Mistyped, read_as

FORMAT, SCHEMA = "emmy-pack", 1
LICENCE = "Apache-2.0"
Origin = Literal["measured", "predicted"]


@dataclass(frozen=True, slots=True)
class Argument:
    """An array that the caller passes, row-major; a weight's layout is the order of its axes. A symbol stands by its name."""

    name: str
    dtype: DType
    axes: tuple[str, ...]
    shape: tuple[int | str, ...]
    is_output: bool


@dataclass(frozen=True, slots=True)
class Evidence:
    """Why a schedule is used, or is not. Times are microseconds of the whole plan.

    Of several races the figures are those of one, that with the median ratio, of two the worse.

    op:      that was timed: of a range, the range's or its upper end
    source:  what is kept of the digest of the text that was timed (`source_mark`)
    ratio:   times as fast as `stock`, in turns with it; low..high is its spread. None: never raced
    rivals:  the same against other kernels
    error:   the largest, in units of what the op allows
    low_us, high_us: of a prediction, whose `note` says what it rests on
    """

    origin: Origin
    op: str
    source: str
    time_us: float
    samples_us: tuple[float, ...]
    low_us: float | None
    high_us: float | None
    stock: str
    stock_us: float | None
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    rivals: Mapping[str, float]
    error: float | None
    protocol: Mapping[str, int | str]
    product: str
    driver: str
    toolkit: str
    emmy: str
    time_utc: str
    rows: int  # races, or times where there is none, of which it is one
    row: str  # its id
    note: str


@dataclass(frozen=True, slots=True)
class Code:
    """A plan's source and binary by their sha256. `launch`: of a GPU, the lines before the cubin (emmy/codegen/gpu_plan.py)."""

    source: str
    binary: str
    source_bytes: int
    binary_bytes: int
    launch: tuple[str, ...]
    workspace_bytes: int
    accumulate: Literal["f32", "hybrid", "f16"]


@dataclass(frozen=True, slots=True)
class Served:
    """The sizes lo..hi of a case's symbol, 0..0 without one, and who serves them: this code, or the stock kernel, and why."""

    lo: int
    hi: int
    op: str  # of these sizes
    why: str
    schedule: str
    code: Code | None
    evidence: Evidence | None

    @property
    def use(self) -> Literal["emmy", "stock"]:
        return "emmy" if self.code else "stock"

    @property
    def sizes(self) -> str:
        return "" if not self.hi else str(self.lo) if self.lo == self.hi else f"{self.lo}..{self.hi}"


@dataclass(frozen=True, slots=True)
class Case:
    """An op and who serves which of its sizes, ascending and without gaps. `symbol`: "" where no size is open."""

    op: str
    symbol: str
    arguments: tuple[Argument, ...]
    ranges: tuple[Served, ...]


@dataclass(frozen=True, slots=True)
class Card:
    """The device that a pack is for. `arch`: sm_90a, x86_64; `isa`: of a CPU, the vector instructions used."""

    target: str
    product: str
    arch: str
    isa: Literal["", "portable", "avx2", "avx512"]

    @property
    def is_cpu(self) -> bool:
        return bool(self.isa)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything but sources and binaries. `predicted`: something in it was never measured; `as_of`: when the latest row was made."""

    format: str
    schema: int
    licence: str
    emmy: str
    card: Card
    toolkit: str
    predicted: bool
    as_of: str
    cases: tuple[Case, ...]

    @property
    def codes(self) -> tuple[Code, ...]:
        """Each code once."""
        return tuple({c.source: c for case in self.cases for r in case.ranges if (c := r.code)}.values())

    def source_name(self, code: Code) -> str:
        """The pack's member that holds the source."""
        return f"source/{code.source}.{'c' if self.card.is_cpu else 'cu'}"

    def binary_name(self, code: Code) -> str:
        return f"binary/{self.card.arch}/{code.binary}.{'so' if self.card.is_cpu else 'cubin'}"

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1, allow_nan=False).encode() + b"\n"


def read_manifest(data: bytes) -> Manifest:
    """The manifest that `to_json` gave. Raises PackError: for another format, a newer schema, or naming a field."""
    try:
        raw = json.loads(data, parse_constant=_no_number)
    except (ValueError, RecursionError) as e:
        raise PackError(f"manifest.json is no JSON: {e}") from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise PackError(f'manifest.json: not the manifest of a pack, which says "format": "{FORMAT}"')
    if raw.get("schema") != SCHEMA:
        raise PackError(
            f"its schema is {str(raw.get('schema'))[:60]}, this Emmy reads {SCHEMA}: update Emmy, or build the pack anew"
        )
    try:
        return read_as(Manifest, raw)
    except Mistyped as e:
        raise PackError(f"manifest.json: {e}") from None


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")
