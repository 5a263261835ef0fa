"""Several runs in one command, one after the other on one device: what is resumed, what leads, when the model is renewed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from emmy.costmodel.model import CostModel
from emmy.costmodel.recording import try_ingest
from emmy.costmodel.upkeep import Upkeep
from emmy.measure.measurer import Measurer
from emmy.search.events import Listener, Note, ignore
from emmy.search.session import Request, finished_before, load_model, open_run
from emmy.search.tuner import INTERRUPTED, Stop, TuneResult


@dataclass(slots=True)
class Sitting:
    """Runs `requests`, which are of one target. `keeps_up`: the deployed model leads, and is trained anew as rows arrive."""

    requests: Sequence[Request]
    here: Measurer
    home: Path
    emmy_version: str
    leader: CostModel | None
    keeps_up: bool
    on_event: Listener = ignore
    stop: Stop = field(default_factory=Stop)
    _done: tuple[str, ...] = ()
    _upkeep: Upkeep | None = None

    def __post_init__(self) -> None:
        self._done = finished_before(self.requests, self.here, self.home, self.emmy_version, self.leader)
        if self.keeps_up and len(self.requests) > 1:
            self._upkeep = Upkeep(self.home, self.requests[0].target.name)

    def run(self, request: Request) -> TuneResult | None:
        """The outcome of one of the requests; None when the same command finished it before it was interrupted."""
        if request.op.key in self._done:
            self.on_event(Note(f"{request.op}: finished before the interruption, and left out now"))
            return None
        run = open_run(
            request, self.here, self.home, self.emmy_version, self.leader, self.on_event, self.stop, self._done
        )
        result = run.go()
        if why := try_ingest(self.home):
            self.on_event(Note(why))
        if result.why != INTERRUPTED:
            self._done = (*self._done, request.op.key)
            if self._upkeep is not None and request is not self.requests[-1] and not self.stop.asked:
                self._renew(self._upkeep, request, result)
        return result

    def _renew(self, upkeep: Upkeep, request: Request, result: TuneResult) -> None:
        """Trains the model anew when enough rows came and there is time for it; it leads from then on."""
        report = upkeep.after(result.counts.get("ok", 0), lambda: self.stop.asked)
        if isinstance(report, str):
            return
        deployed = "deployed" if report.verdict.deploy else "not deployed"
        took = f"trained anew in {report.seconds:.1f} s"
        self.on_event(Note(f"the model of {upkeep.target} was {took}, {deployed}: {report.verdict.why}"))
        if report.verdict.deploy:
            self.leader = load_model(None, request.target, self.home, self.on_event)
