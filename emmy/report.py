"""How Emmy looks: tables, JSON lines, numbers. Renders what it is given; computes and decides nothing.

Human text goes to stderr, data to stdout. With `--json` data is one object a line, each with `"v": 1` and, as `record`, what it is.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from emmy import config
from emmy.errors import EmmyError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from rich.progress import Progress, TaskID

    from emmy.records import Measurement
    from emmy.search.ranges import RangeWinner

JSON_VERSION = 1
SPEAK_EVERY_S = 10.0  # how often long work says how far it is where there is no terminal to draw on

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]


@dataclass(frozen=True, slots=True)
class Screen:
    """Where a command writes. `json`: data is objects, and tables are left out."""

    json: bool = False

    def say(self, text: str) -> None:
        """A line for people, on stderr. One that cannot be written is no reason to stop what it tells of."""
        with contextlib.suppress(OSError):
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

    def show(self, text: str) -> None:
        """Data for people, on stdout; nothing with --json."""
        if not self.json:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    def record(self, kind: str, data: object) -> None:
        """Data for programs, on stdout, one line; nothing without --json. `data` is a dataclass or a mapping."""
        if self.json:
            body = to_plain(data)
            assert isinstance(body, dict)
            line = {"v": JSON_VERSION, "record": kind, **body}
            sys.stdout.write(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n")
            sys.stdout.flush()

    def rows(
        self,
        kind: str,
        records: Iterable[Mapping[str, object]],
        columns: Mapping[str, str] | None = None,
        most: int = 1000,
    ) -> None:
        """Alike records: a table of the first `most` for people, an object each for programs.

        `columns`: key -> heading of what the table shows; default: every key under its own name.
        """
        listed = list(records)
        for each in listed:
            self.record(kind, each)
        shown = columns or {key: key.replace("_", " ") for each in listed[:1] for key in each}
        if listed:
            cells = ([_shown(key, each[key]) for key in shown] for each in listed[:most])
            self.show(table(tuple(shown.values()), cells))
        if len(listed) > most:
            self.show(f"and {len(listed) - most} more: --json lists them")

    def fail(self, error: EmmyError) -> int:
        """Renders an error and returns its exit code."""
        name = type(error).__name__
        self.say(f"{name}: {error}")
        self.record("error", {"error": name, "message": str(error), "exit_code": error.exit_code})
        return error.exit_code

    @property
    def live(self) -> bool:
        """Whether stderr is a terminal, where a line may be drawn over."""
        return sys.stderr.isatty()

    @property
    def colour(self) -> bool:
        return sys.stdout.isatty() and not config.no_color()


def record_of(value: DataclassInstance) -> dict[str, object]:
    """A dataclass's fields by name, as `Screen.rows` takes them."""
    return {f.name: getattr(value, f.name) for f in fields(value)}


def to_plain(value: object) -> Plain:
    """`value` as JSON can hold it: dataclasses as objects, paths as text, numbers that JSON lacks as null."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case Path():
            return str(value)
        case Mapping():
            return {str(k): to_plain(v) for k, v in value.items()}
        case list() | tuple() | set() | frozenset():
            return [to_plain(v) for v in value]
        case _ if is_dataclass(value):
            return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    return str(value)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Aligned columns under a rule; numbers to the right, text to the left."""
    cells = [[_cell(x) for x in row] for row in rows]
    right = [bool(cells) and all(_numeric(row[i]) for row in cells) for i in range(len(head))]
    width = [max(len(h), *(len(row[i]) for row in cells), 0) for i, h in enumerate(head)]

    def line(row: Sequence[str]) -> str:
        padded = (x.rjust(w) if r else x.ljust(w) for x, w, r in zip(row, width, right, strict=True))
        return "  ".join(padded).rstrip()

    return "\n".join([line(head), line(["-" * w for w in width]), *(line(row) for row in cells)])


def number(x: float | None) -> str:
    """Four digits that count, never an exponent: 3.142, 231.4, 18240; a dash for None."""
    if x is None or not math.isfinite(x):
        return "-"
    digits = 3 - math.floor(math.log10(abs(x))) if x else 0
    return f"{x:.{min(max(digits, 0), 4)}f}"


def lasting(seconds: float) -> str:
    """45 s, 12 min, 3 h 20 min."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def counted(n: int, noun: str) -> str:
    """1 trial, 2 trials."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"


def paint(text: str, colour: str, on: bool) -> str:
    """`text` in green, red or yellow where `on`; bold where the colour is bold."""
    code = {"green": "32", "red": "31", "yellow": "33", "bold": "1"}[colour]
    return f"\x1b[{code}m{text}\x1b[0m" if on else text


def schedule_text(schedule: str) -> str:
    """A schedule as people read it: one without moves is a schedule, too."""
    return schedule or "(no moves)"


def _shown(key: str, x: object) -> object:
    """A cell of a column with that key."""
    if key.endswith("_share"):
        return percent(x if isinstance(x, float) else None)
    return schedule_text(x) if key == "schedule" and isinstance(x, str) else x


def _cell(x: object) -> str:
    match x:
        case None:
            return "-"
        case bool():
            return "yes" if x else "no"
        case float():
            return number(x)
    return str(x)


def _numeric(text: str) -> bool:
    return text.rstrip(" %x").replace(".", "", 1).replace("-", "", 1).isdigit() or text == "-"


RANKING_COLUMNS = {
    "ranker": "ranking by", "top1": "top-1 regret", "top10": "top-10 regret", "worst_top1": "worst top-1",
    "spearman": "Spearman", "to97": "measurements to 97 %", "problems": "problems",
}  # fmt: skip


COVERAGE_COLUMNS = {
    "level": "interval of", "time": "holds times", "ratio": "holds ratios within a problem", "samples": "samples",
}  # fmt: skip
CURVE_COLUMNS = {
    "share": "share of rows", "rows": "own rows", "donors": "donors' rows", "ranker": "ranking by", "top1": "top-1 regret",
    "top10": "top-10 regret", "spearman": "Spearman", "problems": "problems",
}  # fmt: skip


# ---------------------------------------------------------------- races
RACE_COLUMNS = {
    "op": "op", "threads": "threads", "time_us": "us", "stock": "stock", "stock_us": "stock us", "ratio": "ratio",
    "low": "low", "high": "high", "verdict": "verdict", "roof_share": "of roofline",
}  # fmt: skip


def race_record(row: Measurement, roof_us: float) -> dict[str, object]:
    """A raced row. ratio: stock over ours, above 1 = ours is faster; low..high is its range over the rounds.

    verdict: win or loss where that range leaves 1 out, else tie; a status where the row failed.
    """
    from emmy.search.tuner import speedup_of

    s = speedup_of(row)
    verdict: str = row.status if row.status != "ok" else "not raced"
    if s:
        verdict = "tie" if s.is_tie else "win" if s.median > 1 else "loss"
    return {
        "op": row.op, "target": row.device.target, "product": row.device.product, "threads": row.protocol.threads,
        "status": row.status, "time_us": row.time_us, "stock": row.baseline or None, "stock_us": row.baseline_us,
        "ratio": s and s.median, "low": s and s.low, "high": s and s.high, "verdict": verdict, "roof_us": roof_us,
        "roof_share": row.time_us and roof_us / row.time_us, "contended": row.contended, "samples_us": row.samples_us,
        "schedule": row.schedule, "message": row.message,
    }  # fmt: skip


def show_races(screen: Screen, kind: str, records: Sequence[Mapping[str, object]], extra: Mapping[str, str]) -> None:
    """Raced rows as a table or as objects, with a warning for each that was taken on a busy machine."""
    screen.rows(kind, records, {**RACE_COLUMNS, **extra})
    for r in records:
        if r["contended"]:
            screen.say(
                f"note: {r['op']}: the machine was busy or throttled while this was timed, so the ratio is less certain than its "
                "range says; `emmy bench` repeats it"
            )


# ---------------------------------------------------------------- ranges
RANGE_COLUMNS = {
    "sizes": "sizes",
    "time_us": "us at the top",
    "ratio": "ratio",
    "known": "known",
    "schedule": "schedule",
}


def show_ranges(screen: Screen, ranges: Sequence[RangeWinner]) -> None:
    """The ranges of a table. us at the top: at the upper end of the range; ratio: stock over ours there, where it was raced."""
    screen.rows(
        "range",
        (
            {
                "op": w.op, "symbol": w.symbol, "lo": w.range.lo, "hi": w.range.hi, "sizes": f"{w.symbol} {w.range.sizes}",
                "time_us": w.time_us, "ratio": w.row.static.get("speedup") if w.row else None,
                "known": "measured" if w.row else "predicted" if w.predicted else "given", "schedule": w.range.schedule,
            }
            for w in ranges
        ),
        RANGE_COLUMNS,
    )  # fmt: skip


def dispatch_text(ranges: Sequence[RangeWinner]) -> str:
    from emmy.search.ranges import dispatch_of

    return str(dispatch_of(ranges))


# ---------------------------------------------------------------- progress
class Bar:
    """Progress of long work on stderr: a bar on a terminal, elsewhere a line when something new begins, and now and then."""

    def __init__(self, screen: Screen) -> None:
        self._screen, self._said, self._spoke_s, self._bar = screen, "", 0.0, _rich_bar(screen)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Bar:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, what: str, done: float, of: float, note: str = "") -> None:
        """`done` of `of` steps of `what` are behind us."""
        if self._bar:
            if what not in self._tasks:
                self._tasks[what] = self._bar.add_task(what, total=of, note=note)
            self._bar.update(self._tasks[what], completed=done, total=of, note=note)
        elif what != self._said or time.monotonic() - self._spoke_s >= SPEAK_EVERY_S:
            self._spoke_s = time.monotonic()
            self._screen.say(f"{what}: {done:.0f} of {of:.0f}")
        self._said = what

    def drop(self, what: str) -> None:
        """Nothing more comes of `what`."""
        if self._bar and (task := self._tasks.pop(what, None)) is not None:
            self._bar.remove_task(task)

    def say(self, text: str) -> None:
        """A line that stays, above the bar."""
        if self._bar:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._screen.say(text)

    @property
    def live(self) -> bool:
        return self._bar is not None


def _rich_bar(screen: Screen) -> Progress | None:
    """A bar drawn by rich; None where stderr is no terminal or rich is not installed."""
    if not screen.live:
        return None
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
    except ModuleNotFoundError:
        return None
    console = Console(stderr=True, no_color=config.no_color())
    return Progress(TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.fields[note]}"), console=console)
