"""When a model is trained anew by itself: as rows arrive while a command watches, after others' came in, or between the ops of a
long tune. A watcher also looks again at what is in quarantine, as more becomes known.

What the last training saw is on the card of the newest version, so nothing is lost or done twice when a watcher is killed:
a training that was cut short left no card, and begins again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from emmy.costmodel.dataset import DATABASE, Dataset
from emmy.costmodel.quarantine import Quarantine
from emmy.costmodel.registry import ModelStore, TrainingBusy, model_roots
from emmy.costmodel.replayed import SourceDigest
from emmy.costmodel.retrain import TrainReport, train_costmodel, usable_rows
from emmy.costmodel.review import Reviewed, review
from emmy.costmodel.samples import generated_digest
from emmy.costmodel.train import MIN_SAMPLES, Progress
from emmy.errors import DataBusy, EmmyError
from emmy.measure.journal import closed_journals

log = logging.getLogger("emmy.costmodel.upkeep")

GROWTH = 0.05  # new rows for each row the last training saw
SHARE = 0.1  # of a tune's time that trainings within it may take
POLL_S = 10.0


def enough(seen: int) -> int:
    """How many new rows make a model of `seen` rows old."""
    return max(MIN_SAMPLES, int(GROWTH * seen))


@dataclass(slots=True)
class Watch:
    """Trains a target's model whenever enough rows have come. `every`: so many new rows, instead of a share of the old."""

    home: Path
    gpu: str | None = None
    every: int | None = None
    models: Path | None = None
    source_digest: SourceDigest = generated_digest
    on_progress: Progress = lambda what, done, of: None
    on_reviewed: Callable[[Reviewed], None] = lambda reviewed: None
    _tried: dict[str, int] = field(default_factory=dict)  # rows at the last attempt, where it left no model
    _judged_on: dict[str, int] = field(
        default_factory=dict
    )  # usable rows there were when a set in quarantine was judged
    _looked: object = None

    def reports(self, rest: Callable[[], bool]) -> Iterator[TrainReport]:
        """A report a training, as they happen. `rest` is called when there is nothing to do, and says whether to go on."""
        while True:
            yield from self.look()
            if not rest():
                return

    def look(self) -> Iterator[TrainReport]:
        """Lets in and trains what is due now."""
        if _fingerprint(self.home) == self._looked:
            return
        dataset = Dataset.of(self.home)
        try:
            dataset.ingest()
            stored = self._let_in(dataset, usable_rows(dataset))
        except DataBusy as e:  # somebody writes: what they write is worth waiting for
            log.info("%s", e)
            return
        self._looked = _fingerprint(self.home)
        yield from self._train(stored)

    def train_due(self) -> Iterator[TrainReport]:
        """Trains what is due now, whatever is in quarantine."""
        yield from self._train(usable_rows(Dataset.of(self.home)))

    def _train(self, stored: Mapping[str, int]) -> Iterator[TrainReport]:
        for name in (n for n, rows in stored.items() if self.is_due(n, rows)):
            try:
                report = train_costmodel(
                    self.home,
                    name,
                    source_digest=self.source_digest,
                    models=self.models,
                    wait=False,
                    on_progress=self.on_progress,
                )[0]
            except (TrainingBusy, DataBusy) as e:
                log.info("%s", e)
                self._looked = None
                continue
            self._tried[name] = stored[name]
            yield report

    def _let_in(self, dataset: Dataset, stored: dict[str, int]) -> dict[str, int]:
        """Usable rows by target, once those sets in quarantine are in that more rows than before now speak for."""
        known = sum(stored.values())
        held = Quarantine(dataset).arrivals("held")
        due = [a for a in held if a.name not in self._judged_on or known - self._judged_on[a.name] >= enough(known)]
        for reviewed in review(dataset, due, source_digest=self.source_digest, on_progress=self.on_progress):
            self._judged_on[reviewed.arrival.name] = known
            self.on_reviewed(reviewed)
        return usable_rows(dataset) if due else stored

    def is_due(self, name: str, rows: int) -> bool:
        """Whether `rows` usable rows of the target are enough more than the last training had."""
        if self.gpu is not None and name != self.gpu:
            return False
        card = ModelStore(self.models or model_roots(self.home)[0]).newest(name)
        seen = max((card.rows_stored or card.rows) if card else 0, self._tried.get(name, 0))
        return rows - seen >= (self.every or enough(seen))


def train_after(
    home: Path,
    reviewed: Sequence[Reviewed],
    *,
    models: Path | None = None,
    source_digest: SourceDigest = generated_digest,
    on_progress: Progress = lambda what, done, of: None,
) -> Iterator[TrainReport]:
    """Trains the model of each card that got enough new rows; a model is deployed when held-out problems speak for it."""
    for name in dict.fromkeys(r.arrival.manifest.target for r in reviewed if r.release and r.release.new):
        yield from Watch(home, name, models=models, source_digest=source_digest, on_progress=on_progress).train_due()


class _Overspent(Exception):
    """A training would take more than its share of the time."""


@dataclass(slots=True)
class Upkeep:
    """Trains one target's model between the ops of a tune: when enough rows came, within a share of the time since it began.

    A training that would take longer is cut off. What it replayed is kept, so that the next attempt is shorter.
    """

    home: Path
    target: str
    share: float = SHARE
    models: Path | None = None
    source_digest: SourceDigest = generated_digest
    clock: Callable[[], float] = time.monotonic
    new: int = 0  # usable rows since the last training
    spent_s: float = 0.0  # on trainings
    _began: float = 0.0
    _expected_s: float = 0.0
    _seen: int = 0

    def __post_init__(self) -> None:
        self._began = self.clock()
        card = ModelStore(self.models or model_roots(self.home)[0]).newest(self.target)
        self._expected_s, self._seen = (card.train_s, card.rows_stored or card.rows) if card else (0.0, 0)

    @property
    def allowed_s(self) -> float:
        """What a training may take now."""
        return self.share * (self.clock() - self._began) - self.spent_s

    def after(self, usable_rows: int, is_stopped: Callable[[], bool] = lambda: False) -> TrainReport | str:
        """The training that was due after so many more rows; else why there was none. `is_stopped`: cut it off at once."""
        self.new += usable_rows
        if self.new < enough(self._seen):
            return f"{self.new} new rows, {enough(self._seen)} are needed"
        allowed = self.allowed_s
        if self._expected_s > allowed:
            return f"a training takes some {self._expected_s:.1f} s, {max(allowed, 0.0):.1f} s are allowed now"
        began = self.clock()
        try:
            report = train_costmodel(
                self.home,
                self.target,
                source_digest=self.source_digest,
                models=self.models,
                wait=False,
                on_progress=_Limit(self.clock, began + allowed, is_stopped),
            )[0]
        except _Overspent:
            took = self.clock() - began
            if is_stopped():
                return "stopped"
            self._expected_s = max(2 * allowed, 2 * took)
            return f"a training was cut off after {took:.1f} s, {allowed:.1f} s were allowed"
        except EmmyError as e:  # the tune must not end for it
            return str(e)
        finally:
            self.spent_s += self.clock() - began
        self.new, self._expected_s = 0, self.clock() - began
        self._seen = report.trained.model.card.rows_stored if report.trained else self._seen
        return report


@dataclass(slots=True)
class _Limit:
    """A training's progress that ends it when the time is up, or when the folds done show that it will be."""

    clock: Callable[[], float]
    until: float
    is_stopped: Callable[[], bool]
    _folds_began: float = 0.0

    def __call__(self, what: str, done: int, of: int) -> None:
        now = self.clock()
        if what == "folds judged":
            self._folds_began = now if done == 0 else self._folds_began
            each = (now - self._folds_began) / done if done else 0.0
            now += each * (of + 1 - done) if done < of else each  # the final fit is one more
        if now > self.until or self.is_stopped():
            raise _Overspent


def _fingerprint(home: Path) -> object:
    """Differs when rows may have come; cheap enough to ask again and again."""
    files = (
        home / DATABASE,
        *closed_journals(home),
        *home.glob("*/manifest.json"),
        *home.glob("imported/*/manifest.json"),
    )
    return tuple((str(p), s.st_mtime_ns, s.st_size) for p in files if p.exists() for s in (p.stat(),))
