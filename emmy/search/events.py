"""What a tuning run tells whoever listens. Plain data; whoever renders it decides how it looks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from emmy.records import Measurement
from emmy.search.budget import Budget


@dataclass(frozen=True, slots=True)
class Planned:
    """Runs of a target are about to begin: `runs` in all, at most `abreast` at a time. `ended`: before an interruption."""

    target: str
    runs: int
    ended: int = 0
    abreast: int = 1


@dataclass(frozen=True, slots=True)
class Started:
    """A run begins, or goes on after `resumed` trials."""

    op: str
    target: str
    strategy: str
    budget: Budget
    run_id: str
    resumed: int
    known: int  # trials of this op that earlier runs made
    model: str  # digest of the model that leads; "" = none


@dataclass(frozen=True, slots=True)
class Measured:
    """One more trial. `best_us` after it; `eta_s` until the budget is spent, None when only patience limits it."""

    row: Measurement
    n: int
    best_us: float | None
    is_best: bool
    elapsed_s: float
    eta_s: float | None

    @property
    def op(self) -> str:
        return self.row.op

    @property
    def target(self) -> str:
        return self.row.device.target

    @property
    def schedule(self) -> str:
        return self.row.schedule


@dataclass(frozen=True, slots=True)
class Scored:
    """One more schedule was given a time by a model, on a card that is not here. `best_us` after it is predicted too."""

    op: str
    target: str
    schedule: str
    n: int
    best_us: float
    is_best: bool
    elapsed_s: float
    eta_s: float | None


@dataclass(frozen=True, slots=True)
class Racing:
    """The finalists are measured again, interleaved with the stock kernel."""

    op: str
    n: int
    target: str


@dataclass(frozen=True, slots=True)
class Note:
    """Something a user should know: a busy device, a stale model, a donor that no longer replays."""

    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """A run ended. `why`: the limit reached, `exhausted`, `interrupted`."""

    op: str
    why: str
    trials: int
    elapsed_s: float
    target: str


Event = Planned | Started | Measured | Scored | Racing | Note | Finished
Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """A listener that does nothing."""
