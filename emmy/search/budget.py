"""How long a search may go on: trials, seconds, patience. Knows no clock; it is told what was spent."""

from __future__ import annotations

import re
from dataclasses import dataclass

from emmy.errors import UsageError

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_FORM = "such as 60s, 5m, 300 (trials), patience=80, roof=0.9, or several with commas: 300,5m"


@dataclass(frozen=True, slots=True)
class Budget:
    """The first limit reached ends the search. None = no such limit.

    trials: measurements, failures included;  seconds: since the run began, over all sittings;
    patience: trials in a row without a better time; roof: share of the roofline that the best time reaches
    """

    trials: int | None = None
    seconds: float | None = None
    patience: int | None = None
    roof: float | None = None

    def spent(self, trials: int, seconds: float, since_best: int, reached: float = 0.0) -> str | None:
        """Which limit is reached, as a phrase; None while the search may go on. `reached`: share of the roofline so far."""
        if self.trials is not None and trials >= self.trials:
            return f"{trials} trials"
        if self.seconds is not None and seconds >= self.seconds:
            return f"{seconds:.0f} s"
        if self.patience is not None and since_best >= self.patience:
            return f"{since_best} trials without a better one"
        if self.roof is not None and reached >= self.roof:
            return f"{reached:.0%} of the roofline reached"
        return None

    def __str__(self) -> str:
        parts = [
            str(self.trials) if self.trials is not None else "",
            f"{self.seconds:g}s" if self.seconds is not None else "",
            f"patience={self.patience}" if self.patience is not None else "",
            f"roof={self.roof:g}" if self.roof is not None else "",
        ]
        return ",".join(p for p in parts if p)


def parse_budget(text: str) -> Budget:
    """The budget `text` names. Raises UsageError that shows the form."""
    trials: int | None = None
    seconds: float | None = None
    patience: int | None = None
    roof: float | None = None
    for word in (w.strip() for w in text.split(",")):
        if re.fullmatch(r"[0-9]{1,9}( ?trials)?", word):
            trials = int(word.split("t")[0])
        elif hit := re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]+)?) ?([smh])", word):
            seconds = float(hit[1]) * _UNITS[hit[2]]
        elif hit := re.fullmatch(r"patience=([0-9]{1,9})", word):
            patience = int(hit[1])
        elif re.fullmatch(r"roof=0*[1-9][0-9.]*", word) and not re.fullmatch(r"roof=1(\.0*)?", word):
            raise UsageError(
                f"budget {text!r}: {word!r} is more than the roofline, which nothing passes: at most roof=1; it is {_FORM}"
            )
        elif hit := re.fullmatch(r"roof=(0?\.[0-9]{1,6}|1(?:\.0*)?)", word):
            roof = float(hit[1])
        else:
            raise UsageError(f"budget {text!r}: cannot read {word!r}; it is {_FORM}")
    budget = Budget(trials, seconds, patience, roof)
    if 0 in (trials, seconds, patience, roof):
        raise UsageError(f"budget {text!r}: limits must be above 0; it is {_FORM}")
    return budget
