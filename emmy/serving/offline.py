"""Prefill and decode timed in process: the engines of a group of lanes stay loaded side by side on the device, and take turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from emmy.errors import EmmyError
from emmy.records import now_utc
from emmy.serving.engine import Engine, Spec, engines
from emmy.serving.experiment import Experiment, Lane, Offline, groups
from emmy.serving.installed import Vllm
from emmy.serving.results import Results, Row
from emmy.serving.sitting import Told, circumstances

WARMUPS = 2
PROFILED_STEPS = 8


@dataclass(frozen=True, slots=True)
class Case:
    """Something to time: of a prefill its milliseconds, of a decode those a token, over `steps` tokens after the first."""

    name: str
    batch: int
    context: int
    steps: int  # 0: the prefill alone

    def time_ms(self, engine: Engine, seed: int) -> float:
        def ms(new: int) -> float:
            return float(str(engine.ask("time", batch=self.batch, context=self.context, new=new, seed=seed)["ms"]))

        return ms(1) if not self.steps else (ms(1 + self.steps) - ms(1)) / self.steps


def cases(o: Offline) -> tuple[Case, ...]:
    return (
        *(Case(f"prefill {n}", 1, n, 0) for n in o.prefill),
        *(Case(f"decode {b}", b, o.context, o.steps) for b in o.decode),
    )


@dataclass(frozen=True, slots=True)
class InProcess:
    """One go at the offline part of an experiment."""

    experiment: Experiment
    vllm: Vllm
    results: Results
    device: str
    told: Told

    def run(self) -> int:
        """How many cases of lanes are left without times. What is there already is not measured again."""
        groups_of = [(w, g) for w in range(1, self.experiment.waves + 1) for g in groups(self.experiment.lanes)]
        for wave, group in groups_of:
            if left := self.left(wave, group):
                self._group(wave, group, left)
        return sum(len(self.left(wave, group)) for wave, group in groups_of)

    def left(self, wave: int, group: Sequence[Lane]) -> tuple[Case, ...]:
        """Cases that some lane of the group has no time of: all of them take turns at it then."""
        return tuple(
            c
            for c in cases(self.experiment.offline)
            if not all(self.results.has(self._key(lane, c), wave) for lane in group)
        )

    def _key(self, lane: Lane, case: Case) -> str:
        return self.experiment.key(lane, case, self.vllm.version)

    def _group(self, wave: int, group: Sequence[Lane], left: Sequence[Case]) -> None:
        o, todo = self.experiment.offline, iter(left)
        self.told(f"wave {wave} of {self.experiment.waves}: starting the engines of {', '.join(x.name for x in group)}")
        flags = (*self.experiment.flags, *o.shared(len(group)))
        specs = [
            Spec(x.name, self.experiment.model, (*flags, *x.server_flags), x.use, x.environment or {}) for x in group
        ]
        case = left[0]
        try:
            with engines(self.vllm, specs, self.results.folder / f"wave{wave}", together=bool(o.kv_gib)) as made:
                for case in todo:
                    times = self._turns(made, case)
                    for lane in group:
                        self._keep(wave, lane, case, made[lane.name], times[lane.name])
        except EmmyError as e:
            for lane in group:
                self._fail(wave, lane, case, str(e))
            self.told(str(e))

    def _turns(self, made: Mapping[str, Engine], case: Case) -> dict[str, list[float]]:
        """Of each engine the milliseconds of every round, after some that do not count."""
        times: dict[str, list[float]] = {name: [] for name in made}
        for i in range(WARMUPS + self.experiment.offline.rounds):
            for name, engine in made.items():
                ms = case.time_ms(engine, seed=i)
                if i >= WARMUPS:
                    times[name].append(ms)
        return times

    def _keep(self, wave: int, lane: Lane, case: Case, engine: Engine, samples_ms: Sequence[float]) -> None:
        figures = {"ms": median(samples_ms)}
        if case.steps:
            found = engine.ask("launches", batch=case.batch, context=case.context, new=PROFILED_STEPS)["kernels"]
            figures |= {"kernels_a_step": float(str(found))} if found is not None else {}
        self.results.append(self._row(wave, lane, case, "ok", "", figures, tuple(samples_ms), engine.facts))
        self.told(f"lane {lane.name}, {case.name}: {median(samples_ms):.3f} ms")

    def _fail(self, wave: int, lane: Lane, case: Case, why: str) -> None:
        self.results.append(self._row(wave, lane, case, "failed", why, {}, (), {}))

    def _row(
        self, wave: int, lane: Lane, case: Case, status: str, why: str, figures: Mapping[str, float],
        samples: tuple[float, ...], facts: Mapping[str, object],
    ) -> Row:  # fmt: skip
        about = {**circumstances(self.vllm, self.device, lane), **facts}
        return Row(
            self._key(lane, case), self.experiment.name, "offline", wave, lane.name, lane.against, lane.dtype, case.name,
            status, why, "", figures, samples, about, now_utc(),
        )  # fmt: skip
