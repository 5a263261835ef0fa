"""Optuna's tree-structured Parzen estimator over the flattened space, by ask and tell. The only module that knows Optuna.

Every decision of the space is one parameter with a fixed domain. What TPE suggests is walked down the tree, illegal
values repaired to the nearest legal ones, and what it is told is the point that was really measured. With a model, the
best predicted of several suggestions is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from emmy.errors import UsageError
from emmy.search.space import Decision, Point, Space, Trial, Value
from emmy.search.strategy import Ranker, Strategy
from emmy.search.walk import descend, nearest, toward

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

_STARTUP = 12  # random trials before TPE
_PER_POINT = 4  # suggestions a proposal, when a model can tell them apart
_TRIES = 4  # suggestions that lead to points seen before, a proposal


class OptunaStrategy(Strategy):
    """TPE (multivariate, constant liar). `storage`: a journal file that optuna-dashboard opens; None keeps it in memory."""

    name: ClassVar[str] = "optuna"

    def __init__(
        self,
        space: Space,
        *,
        seed: int = 0,
        model: Ranker | None = None,
        known: Sequence[Trial] = (),
        storage: Path | None = None,
    ) -> None:
        super().__init__(space, seed=seed, model=model, known=known)
        self._decisions = {d.name: d for d in space.domains()}
        self._study = _study(space.name, seed, storage)
        self._distributions = {d.name: _distribution(d) for d in self._decisions.values()}
        self._asked: dict[str, int] = {}  # by point key: the number of the suggestion that led there
        self._repaired: set[str] = set()  # keys of points that are not quite what was suggested

    def propose(self, n: int) -> Iterable[Point]:
        found: dict[str, Point] = {}
        wanted = n * (_PER_POINT if self.model is not None else 1)
        for _ in range(wanted * _TRIES):
            if len(found) >= wanted:
                break
            trial = self._study.ask(self._distributions)
            wish = [(name, self._value(name, raw)) for name, raw in trial.params.items()]
            point = descend(self.space, toward(wish, self.rng))
            if point is None or point.key in self.seen or point.key in found:
                self._give_up(trial.number)
                continue
            found[point.key] = point
            self._asked[point.key] = trial.number
            if not set(point.choices) <= set(wish):
                self._repaired.add(point.key)
        points = list(found.values())
        if self.model is not None and len(points) > n:
            predicted, _ = self.model.predict(self.space.features(points))
            points = [points[i] for i in predicted.argsort(kind="stable")]
        for point in points[n:]:
            self._give_up(self._asked.pop(point.key))
        return points[:n]

    def learn(self, trials: Sequence[Trial]) -> None:
        import optuna

        for trial in trials:
            number = self._asked.pop(trial.point.key, None)
            if number is not None and trial.time_us is not None and trial.point.key not in self._repaired:
                self._study.tell(number, math.log2(trial.time_us))
                continue
            if number is not None:
                self._give_up(number)  # the point as measured takes its place
            params = {n: self._raw(n, v) for n, v in trial.point.choices if n in self._decisions}
            failed = trial.time_us is None
            self._study.add_trial(
                optuna.trial.create_trial(
                    state=optuna.trial.TrialState.FAIL if failed else optuna.trial.TrialState.COMPLETE,
                    value=None if trial.time_us is None else math.log2(trial.time_us),
                    params=params,
                    distributions={n: self._distributions[n] for n in params},
                    user_attrs={"key": trial.point.key},
                )
            )

    def _give_up(self, number: int) -> None:
        import optuna

        self._study.tell(number, state=optuna.trial.TrialState.FAIL)

    def _value(self, name: str, raw: Value) -> Value:
        """What a suggestion means: an ordered decision is suggested as a position in its values."""
        d = self._decisions[name]
        return d.values[int(raw)] if d.ordered else raw

    def _raw(self, name: str, value: Value) -> Value:
        d = self._decisions[name]
        close = nearest(d.values, value)[0]
        return d.values.index(close) if d.ordered else close


def _distribution(d: Decision) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, IntDistribution

    return IntDistribution(0, len(d.values) - 1) if d.ordered else CategoricalDistribution(d.values)


def _study(name: str, seed: int, storage: Path | None) -> optuna.Study:
    """A fresh study; one kept from an earlier sitting is replaced, since the run replays its trials."""
    try:
        import optuna
    except ImportError:
        raise UsageError("strategy optuna needs Optuna: pip install 'emmy[tune]', or choose another strategy") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=_STARTUP, multivariate=True, constant_liar=True)
    backend = None
    if storage is not None:
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        storage.parent.mkdir(parents=True, exist_ok=True)
        storage.unlink(missing_ok=True)
        backend = JournalStorage(JournalFileBackend(str(storage)))
    return optuna.create_study(study_name=name, sampler=sampler, storage=backend, direction="minimize")
