"""How far the runs of a command are, as its events tell: what shows progress, on a screen or to other processes, reads it here."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from emmy.search.budget import Budget
from emmy.search.events import Event, Finished, Measured, Note, Planned, Racing, Scored, Started
from emmy.search.tuner import INTERRUPTED


@dataclass(slots=True)
class Course:
    """One run that is under way. Seconds are since it began, over all sittings.

    first: trials that were there when it began, which are told again; eta_s: until its budget is spent, a race not included,
    None before the first trial and where only patience limits it
    """

    op: str
    budget: Budget
    first: int
    phase: str = "search"  # or race
    trials: int = 0
    best_us: float | None = None
    elapsed_s: float = 0.0
    eta_s: float | None = None
    _since_s: float | None = None  # when the first new trial came

    @property
    def is_new(self) -> bool:
        """Whether the last trial was made now, and not before an interruption."""
        return self.trials > self.first

    @property
    def per_s(self) -> float:
        """New trials a second; 0 before the second."""
        n = self.trials - self.first - 1
        return n / max(self.elapsed_s - (self._since_s or 0.0), 1e-3) if n > 0 else 0.0

    def hear(self, event: Measured | Scored | Racing) -> None:
        match event:
            case Measured() | Scored():
                self.trials, self.best_us, self.elapsed_s = event.n, event.best_us, event.elapsed_s
                self.eta_s = event.eta_s
                if self.is_new and self._since_s is None:
                    self._since_s = event.elapsed_s
            case Racing():
                self.phase, self.eta_s = "race", 0.0


@dataclass(slots=True)
class Courses:
    """The runs of one target: `runs` in all (0 while that is not known), `ended` of them, at most `abreast` at a time.

    under_way: by op, in the order they began; mingle: whether several were at a time
    """

    runs: int = 0
    ended: int = 0
    abreast: int = 1
    under_way: dict[str, Course] = field(default_factory=dict)
    mingle: bool = False
    _took_s: list[float] = field(default_factory=list)  # by each that ended, its race included

    def hear(self, event: Event) -> Course | None:
        """The run that the event is of, as it is after it; of one that has ended, as it was."""
        match event:
            case Planned():
                self.runs, self.ended, self.abreast = event.runs, event.ended, event.abreast
                return None
            case Started():
                begun = self.under_way[event.op] = Course(event.op, event.budget, event.resumed)
                self.mingle = self.mingle or len(self.under_way) > 1
                return begun
            case Finished():
                if event.why != INTERRUPTED:
                    self.ended += 1
                    self._took_s.append(event.elapsed_s)
                return self.under_way.pop(event.op, None)
            case Note():
                return None
        course = self.under_way.get(event.op)
        if course is not None:
            course.hear(event)
        return course

    @property
    def eta_s(self) -> float | None:
        """Until all have ended: those to come take as long as those that ended did, before the first as long as their budget,
        and begin when one of those before them has ended. None where nothing says how long one takes.
        """
        each_s = self._each_s()
        left = [
            c.eta_s if c.eta_s is not None else each_s and max(0.0, each_s - c.elapsed_s)
            for c in self.under_way.values()
        ]
        to_come = max(0, self.runs - self.ended - len(left))
        known = [s for s in left if s is not None]
        if len(known) < len(left) or (to_come and each_s is None):
            return None
        free = known + [0.0] * (min(self.abreast, len(left) + to_come) - len(left))
        heapq.heapify(free)
        for _ in range(to_come):
            heapq.heapreplace(free, free[0] + (each_s or 0.0))
        return max(free, default=0.0)

    def _each_s(self) -> float | None:
        """How long one takes."""
        if self._took_s:
            return sum(self._took_s) / len(self._took_s)
        return next((c.budget.seconds for c in self.under_way.values()), None)
