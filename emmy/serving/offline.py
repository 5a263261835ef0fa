"""Prefill and decode timed in process: the engines of a group of lanes stay loaded side by side on the device, and take turns.

What they say can be compared there too, where it costs no other start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from emmy.errors import EmmyError
from emmy.records import now_utc
from emmy.serving.engine import Engine, Spec, engines
from emmy.serving.experiment import Experiment, Lane, Offline, groups
from emmy.serving.installed import Vllm
from emmy.serving.quality import Asked, agreed, logits
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
    asked: Asked | None = None  # prompts, to whose answers' logits stock's are compared

    def run(self) -> int:
        """How many cases are left without times, or lanes without a comparison. What is there already is not measured again."""
        groups_of = [(w, g) for w in range(1, self.experiment.waves + 1) for g in groups(self.experiment.lanes)]
        for wave, group in groups_of:
            left = self.left(wave, group)
            if left or self.unheard(wave, group):
                self._group(wave, group, left)
        return sum(len(self.left(wave, group)) + len(self.unheard(wave, group)) for wave, group in groups_of)

    def left(self, wave: int, group: Sequence[Lane]) -> tuple[Case, ...]:
        """Cases that some lane of the group has no time of: all of them take turns at it then."""
        return tuple(
            c
            for c in cases(self.experiment.offline)
            if not all(self.results.has(self._key(lane, c), wave) for lane in group)
        )

    def unheard(self, wave: int, group: Sequence[Lane]) -> tuple[Lane, ...]:
        """Lanes whose logits are to be compared with stock's yet."""
        if self.asked is None:
            return ()
        return tuple(x for x in group if x.against and not self.results.has(self._key(x, self.asked), wave))

    def _key(self, lane: Lane, what: Case | Asked) -> str:
        return self.experiment.key(lane, what, self.vllm.version)

    def _group(self, wave: int, group: Sequence[Lane], left: Sequence[Case]) -> None:
        o = self.experiment.offline
        self.told(f"wave {wave} of {self.experiment.waves}: starting the engines of {', '.join(x.name for x in group)}")
        flags = (*self.experiment.flags, *o.shared(len(group)))
        specs = [
            Spec(x.name, self.experiment.model, (*flags, *x.server_flags), x.use, x.environment or {}) for x in group
        ]
        doing: Case | Asked | None = left[0] if left else self.asked
        folder = self.results.folder / f"wave{wave}"
        try:
            with engines(self.vllm, specs, folder, together=bool(o.kv_gib)) as made:
                for case in left:
                    doing, times = case, self._turns(made, case)
                    for lane in group:
                        self._keep(wave, lane, case, made[lane.name], times[lane.name])
                if self.asked and (unheard := self.unheard(wave, group)):
                    doing = self.asked
                    self._compare(wave, group[0], unheard, made, self.asked)
        except EmmyError as e:
            assert doing is not None
            for lane in group:
                if lane.against or isinstance(doing, Case):
                    name = doing.name if isinstance(doing, Case) else "logits"
                    self.results.append(self._row(wave, lane, doing, name, "failed", str(e), {}, (), {}))
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
        self.results.append(self._row(wave, lane, case, case.name, "ok", "", figures, tuple(samples_ms), engine.facts))
        self.told(f"lane {lane.name}, {case.name}: {median(samples_ms):.3f} ms")

    def _compare(self, wave: int, stock: Lane, lanes: Sequence[Lane], made: Mapping[str, Engine], asked: Asked) -> None:
        """Keeps how far each lane's logits are from stock's. The prompts' logits lie on disk meanwhile, a gigabyte a lane."""
        with TemporaryDirectory(dir=self.results.folder) as kept:
            said = {x.name: logits(made[x.name], asked, Path(kept) / x.name) for x in (stock, *lanes)}
            for lane in lanes:
                facts = made[lane.name].facts
                for a in agreed(said[stock.name], said[lane.name]):
                    self.results.append(self._row(wave, lane, asked, a.case, "ok", "", a.figures, (), facts))
                    self.told(f"lane {lane.name}, {a.case}: mean KL {a.kl_mean:.3g} from stock")

    def _row(
        self, wave: int, lane: Lane, what: Case | Asked, name: str, status: str, why: str, figures: Mapping[str, float],
        samples: tuple[float, ...], facts: Mapping[str, object],
    ) -> Row:  # fmt: skip
        about = {**circumstances(self.vllm, self.device, lane), **facts}
        kind = "offline" if isinstance(what, Case) else "quality"
        return Row(
            self._key(lane, what), self.experiment.name, kind, wave, lane.name, lane.against, lane.dtype, name, status, why, "",
            figures, samples, about, now_utc(),
        )  # fmt: skip
