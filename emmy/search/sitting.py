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
from emmy.search.finished import Finished, had_been_finished
from emmy.search.session import Request, leading, load_model, open_run
from emmy.search.tuner import INTERRUPTED, Stop, TuneResult


@dataclass(slots=True)
class Sitting:
    """Runs `requests`, which are of one target. `upkeep`: the deployed model leads, and is trained anew as rows arrive."""

    requests: Sequence[Request]
    here: Measurer
    home: Path
    emmy_version: str
    leader: CostModel | None
    upkeep: Upkeep | None
    finished: Finished
    on_event: Listener = ignore
    stop: Stop = field(default_factory=Stop)
    more: bool = False  # whether others follow these

    def run(self, request: Request) -> TuneResult | None:
        """The outcome of one of the requests; None when the same command finished it, before it was interrupted or as
        part of another op."""
        if request.op.key in self.finished:
            self.on_event(Note(had_been_finished(request.op)))
            return None
        leader = self.leader
        if self.upkeep is not None:  # which may have renewed it between the op's beginning and an interruption
            leader = leading(request, leader, self.here, self.home, self.emmy_version)
        run = open_run(request, self.here, self.home, self.emmy_version, leader, self.on_event, self.stop)
        result = run.go()
        if why := try_ingest(self.home):
            self.on_event(Note(why))
        if result.why != INTERRUPTED:
            self.finished.add(request.op.key)
            last = request is self.requests[-1] and not self.more
            if self.upkeep is not None and not last and not self.stop.asked:
                self._renew(self.upkeep, request, result)
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
