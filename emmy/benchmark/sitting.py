"""One sitting of the benchmark: the cases that are left, the most valuable first, all lanes of a case in turns.

It may be cut short at any moment and taken up again. Kernels are compiled beside the measurement, or ahead of it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from math import inf
from pathlib import Path
from statistics import median

from emmy import config
from emmy.benchmark.cases import BenchCase, by_value, least_us
from emmy.benchmark.choice import Pick, Stored, known_cases
from emmy.benchmark.lanes import AUTOTUNED_CASES, RIVALS, SUBSET, SUMS, Lane
from emmy.benchmark.results import NONE, LaneRow, Results, device_columns, latest
from emmy.costmodel.recording import recording
from emmy.ir.target import Target
from emmy.measure.measurer import Heat, Measurer, Rivalled
from emmy.measure.rivals import RIVALS as NAMES
from emmy.measure.stock_warm import Warmed, inductor_cache, warm
from emmy.records import Candidate, Measurement, new_id, now_utc
from emmy.search.tuner import Stop

AHEAD = 0.3  # of a sitting's time that may go into compiling ahead
LEAST_S = 0.5  # that a case takes: bounds what is compiled ahead for a short sitting
Told = Callable[[str, int, int, tuple[LaneRow, ...]], None]  # what, done, of, the rows of the case just measured


@dataclass(frozen=True, slots=True)
class Setting:
    """What a sitting is told: where it measures, which lanes, for how long, and where the rows of Emmy's lanes go besides.

    seconds:  no case is begun later than that after the start, compiling ahead included; None = until all are done
    again:    also cases that were measured with another schedule than what is stored now
    compilers: processes that compile torch's kernels ahead; 0 = none, each is compiled when its turn comes
    """

    target: Target
    threads: int
    lanes: tuple[Lane, ...]
    home: Path
    emmy_version: str
    seconds: float | None = None
    rounds: int = 7
    again: bool = False
    compilers: int = 0


@dataclass(slots=True)
class BenchSitting:
    """Measures what `results` lack of the cases."""

    setting: Setting
    cases: Sequence[BenchCase]
    here: Measurer
    results: Results
    told: Told = lambda what, done, of, rows: None
    stop: Stop = field(default_factory=Stop)
    _picks: dict[str, dict[Lane, Pick | None]] = field(default_factory=dict)  # by case, of Emmy's lanes
    _known_us: dict[str, float | None] = field(default_factory=dict)

    def go(self) -> tuple[int, int]:
        """(cases measured now, cases left)."""
        began_s, s = time.monotonic(), self.setting
        todo = self.left()
        heats = _by_op(todo, self._op)
        reach = heats if s.seconds is None else heats[: int(s.seconds / LEAST_S) + 1]
        self.here.prepare(
            [Candidate(op, p.schedule) for op, cases in reach for p in self._schedules(cases[0]).values()]
        )
        self._warm([(op, cases) for op, cases in reach])
        done = 0
        with recording(s.home, "bench kernels", ",".join(o for o, _ in heats), s.target.name, s.emmy_version) as keep:
            for op, cases in heats:
                if self.stop.asked or (s.seconds is not None and time.monotonic() - began_s > s.seconds):
                    break
                lanes = self._lanes(cases)
                picks = self._schedules(cases[0])
                rivals = [RIVALS[lane] for lane in lanes if lane in RIVALS]
                heat = self.here.heat(op, [p.schedule for p in picks.values()], rivals, s.rounds)
                heat = replace(heat, rows=tuple(map(keep, heat.rows)))
                rows = self._rows(op, cases, heat)
                self.results.append(rows)
                done += len(cases)
                self.told(cases[0].id, done, len(todo), rows)
        return done, len(todo) - done

    def left(self) -> tuple[BenchCase, ...]:
        """The cases that have not been measured on this device in all lanes asked for, the most valuable first."""
        s, product = self.setting, self.here.device.product
        stored = Stored.read(s.home, s.target, s.threads)
        measured = latest(r for r in self.results.rows if r.product == product and r.status != "device_lost")
        todo = []
        for case in by_value(self.cases, s.target, s.threads, known_cases(stored, self.cases)):
            lanes = measured.get(case.id, {})
            is_done = all(lane in lanes for lane in s.lanes)
            if is_done and not s.again:
                continue
            picks = {lane: stored.pick(case, SUMS[lane]) for lane in s.lanes if lane in SUMS}
            if is_done and all((p.schedule if p else "") == lanes[lane].schedule for lane, p in picks.items()):
                continue
            self._picks[case.id], self._known_us[case.id] = picks, stored.known_us(case)
            todo.append(case)
        return tuple(todo)

    def _op(self, case: BenchCase) -> str:
        """What is timed: one op for all lanes, of an open size in the range of the first schedule."""
        return next((p.op for p in self._picks[case.id].values() if p), case.at()).key

    def _schedules(self, case: BenchCase) -> dict[Lane, Pick]:
        return {lane: p for lane, p in self._picks[case.id].items() if p is not None}

    def _lanes(self, cases: Sequence[BenchCase]) -> tuple[Lane, ...]:
        """The lanes that are run: max-autotune of the cases that stand for the others, or of all where none is of the catalogue."""
        subset = set(AUTOTUNED_CASES)
        whole = not any(c.id in subset for c in self.cases)
        chosen = whole or any(c.id in subset for c in cases)
        return tuple(lane for lane in self.setting.lanes if lane != "max-autotune" or chosen)

    def _warm(self, heats: Sequence[tuple[str, Sequence[BenchCase]]]) -> None:
        """Has torch's kernels compiled ahead, while Emmy's are compiled too."""
        s = self.setting
        compiled = {lane: RIVALS[lane] for lane in ("compile", "max-autotune") if lane in s.lanes}
        asked = [(op, name) for op, cases in heats for lane, name in compiled.items() if lane in self._lanes(cases)]
        if not asked or not s.compilers:
            return
        done: list[Warmed] = []

        def tell(w: Warmed) -> None:
            done.append(w)
            self.told("compiling torch's kernels", len(done), len(asked), ())

        warm(
            asked,
            workers=s.compilers,
            threads=s.threads,
            on_gpu=not s.target.is_cpu,
            environment=inductor_cache(config.cache_dir()),
            seconds=inf if s.seconds is None else AHEAD * s.seconds,
            on_progress=tell,
        )

    # ------------------------------------------------------------ rows
    def _rows(self, op: str, cases: Sequence[BenchCase], heat: Heat) -> tuple[LaneRow, ...]:
        """Rows of every case that the op stands for: they share the heat."""
        picks = self._schedules(cases[0])
        ours = dict(zip(picks, heat.rows, strict=True))
        rivals = {r.asked: r for r in heat.rivals}
        common = self._common()
        out = []
        for case in cases:
            for lane in self.setting.lanes:
                row = self._about(case, op, lane, common)
                if lane in RIVALS:
                    out.append(_of_rival(row, rivals.get(RIVALS[lane]), lane, lane in self._lanes(cases)))
                else:
                    out.append(_of_emmy(row, ours.get(lane), picks.get(lane)))
        return tuple(out)

    def _common(self) -> LaneRow:
        s, protocol = self.setting, self.here.device
        blank = LaneRow(new_id(), now_utc(), "", "", "", "", "eager", NONE)
        blank = replace(blank, **device_columns(protocol), torch=_torch_version(), rounds=s.rounds)  # type: ignore[arg-type]
        return replace(blank, threads=s.threads, emmy_version=s.emmy_version)

    def _about(self, case: BenchCase, op: str, lane: Lane, common: LaneRow) -> LaneRow:
        work = case.at().work()
        return replace(
            common,
            case=case.id,
            kind=case.kind,
            tier=case.tier,
            op=op,
            lane=lane,
            roof_us=least_us(case.at(), self.setting.target, self.setting.threads),
            flops=work.flops,
            bytes=work.bytes,
            best_known_us=self._known_us[case.id],
        )


def _by_op(cases: Sequence[BenchCase], op: Callable[[BenchCase], str]) -> list[tuple[str, list[BenchCase]]]:
    """The cases of each op that is timed: some of a catalogue are one op under two names."""
    of: dict[str, list[BenchCase]] = {}
    for case in cases:
        of.setdefault(op(case), []).append(case)
    return list(of.items())


def _of_rival(row: LaneRow, r: Rivalled | None, lane: Lane, chosen: bool) -> LaneRow:
    if r is None:
        why = "torch runs it as one kernel, compiled or not" if lane == "compile" else "torch has no such form of it"
        return replace(row, message=why if chosen else f"not one of {SUBSET}")
    return replace(
        row,
        status=r.status,
        message=r.message,
        runs=r.name,
        samples_us=r.samples_us,
        time_us=median(r.samples_us) if r.samples_us else None,
        warm_us=r.warm_us,
        sustained_us=r.sustained_us,
        error_norm=r.error_norm,
        contended=r.contended,
        clock_mhz=r.clock_mhz,
        temperature_c=r.temperature_c,
        static=_text(r.static),
    )


def _of_emmy(row: LaneRow, m: Measurement | None, pick: Pick | None) -> LaneRow:
    if m is None or pick is None:
        return replace(row, runs="emmy", message="no schedule of the op keeps its sums so")
    return replace(
        row,
        status=m.status,
        message=m.message or pick.note,
        runs="emmy",
        schedule=m.schedule,
        source_digest=m.source_digest,
        origin=pick.origin,
        samples_us=m.samples_us,
        time_us=m.time_us,
        warm_us=m.static.get("warm_us"),
        sustained_us=m.static.get("sustained_us"),
        error_norm=m.error_norm,
        contended=m.contended,
        clock_mhz=m.clock_mhz,
        temperature_c=m.temperature_c,
        cache=m.protocol.cache,
        clocks=m.protocol.clocks,
        clock=m.protocol.clock,
        static=_text(m.static),
    )


def _text(static: Mapping[str, float]) -> str:
    return json.dumps(dict(static), separators=(",", ":"), sort_keys=True)


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


assert set(RIVALS.values()) <= {"", *NAMES}
