"""Optuna's tree-structured Parzen estimator over the flattened space, by ask and tell. The only module that knows Optuna.

Every decision of the space is one categorical parameter with a fixed domain: ordered ones did worse as integers, whose
neighbours TPE takes to behave alike (16, 32 and 48 do not). What TPE suggests is walked down the tree, illegal values
repaired to the nearest legal ones, and what it is told is the point that was really measured; failures count as worse
than every time. With a model, the best predicted of several suggestions is taken.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from emmy.errors import UsageError
from emmy.search.space import Decision, Point, Space, Trial, Value
from emmy.search.strategy import Ranker, Strategy
from emmy.search.walk import descend, nearest, toward, varied

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

_STARTUP = 30  # random trials before TPE; see docs/search.md for what fewer cost and bring
_PER_POINT = 4  # suggestions a proposal, when a model can tell them apart
_TRIES = 4  # suggestions without a new point at or near them, a proposal
_NEAR = 12  # neighbours looked at where a suggestion was seen before


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
            wish: list[tuple[str, Value]] = list(trial.params.items())
            point = descend(self.space, toward(wish, self.rng))
            if point is not None and (point.key in self.seen or point.key in found):
                point = self._near(point, found)
            if point is None:
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

    def _near(self, point: Point, taken: Container[str]) -> Point | None:
        """A point not seen yet, a few decisions away: TPE comes back to its favourites, and each is measured once."""
        for i in range(_NEAR):
            other = descend(self.space, varied(point, self.rng, 1 + i // 4, 0.3))
            if other is not None and other.key not in self.seen and other.key not in taken:
                return other
        return None

    def learn(self, trials: Sequence[Trial]) -> None:
        import optuna

        states = optuna.trial.TrialState
        for trial in trials:
            key, number = trial.point.key, self._asked.pop(trial.point.key, None)
            # TPE leaves failed trials out of its account; pruned ones are worse than every time, so it learns to avoid them.
            state = states.PRUNED if trial.time_us is None else states.COMPLETE
            value = None if trial.time_us is None else math.log2(trial.time_us)
            if number is not None and key not in self._repaired:
                self._study.tell(number, value, state)
                continue
            if number is not None:
                self._give_up(number)  # the point as measured takes its place
            params = {
                n: nearest(self._decisions[n].values, v)[0] for n, v in trial.point.choices if n in self._decisions
            }
            self._study.add_trial(
                optuna.trial.create_trial(
                    state=state,
                    value=value,
                    params=params,
                    distributions={n: self._distributions[n] for n in params},
                    user_attrs={"key": key},
                )
            )

    def _give_up(self, number: int) -> None:
        import optuna

        self._study.tell(number, state=optuna.trial.TrialState.FAIL)


def _distribution(d: Decision) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution

    return CategoricalDistribution(d.values)


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
