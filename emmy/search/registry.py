"""Strategies by name. To add one, write its file and name it here; the contract tests follow."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from emmy.errors import UsageError
from emmy.search.space import Point, Space, Trial
from emmy.search.strategy import Ranker, Strategy

# name -> (module, class); imported when asked for, since some need libraries of the `tune` extra
STRATEGIES: dict[str, tuple[str, str]] = {
    "auto": ("emmy.search.auto", "AutoStrategy"),
    "mcts": ("emmy.search.mcts", "MctsStrategy"),
    "optuna": ("emmy.search.optuna_strategy", "OptunaStrategy"),
    "evolve": ("emmy.search.evolve", "EvolveStrategy"),
    "lfbo": ("emmy.search.lfbo", "LfboStrategy"),
    "random": ("emmy.search.random_strategy", "RandomStrategy"),
}


# Proposes, but searches for no winner: `emmy tune --collect`.
COLLECT = "collect"


def check_strategy(name: str) -> None:
    """Raises UsageError when there is no strategy of that name: before a device is waited for."""
    if name not in STRATEGIES:
        raise UsageError(f"strategy {name!r} is not one of {', '.join(STRATEGIES)}")


def make_strategy(
    name: str,
    space: Space,
    *,
    seed: int = 0,
    model: Ranker | None = None,
    known: Sequence[Trial] = (),
    study: Path | None = None,
    elsewhere: Sequence[Point] = (),
) -> Strategy:
    """A fresh strategy. Raises UsageError for other names.

    study:     where Optuna keeps its journal, for its dashboard
    elsewhere: winners of other cards; only `collect` asks
    """
    if name == COLLECT:
        from emmy.search.collect import CollectStrategy

        return CollectStrategy(space, seed=seed, model=model, known=known, elsewhere=elsewhere)
    check_strategy(name)
    if name == "optuna":
        from emmy.search.optuna_strategy import OptunaStrategy

        return OptunaStrategy(space, seed=seed, model=model, known=known, storage=study)
    module, cls = STRATEGIES[name]
    made: Strategy = getattr(import_module(module), cls)(space, seed=seed, model=model, known=known)
    return made
