"""What a training and a review of rows came to, as the verbs that learn and those that take rows in show it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from emmy.report import RANKING_COLUMNS, Screen, counted, record_of

if TYPE_CHECKING:
    from emmy.costmodel.retrain import TrainReport
    from emmy.costmodel.review import Reviewed


def show_trained(r: TrainReport, force: bool, screen: Screen) -> None:
    """What a model learnt from, how it ranks, and whether it leads now."""
    dropped = "".join(f"; {counted(n, 'row')} left out: {why}" for why, n in r.dropped.items())
    screen.show(f"{r.target}: {r.samples} samples of {r.rows} rows in {r.seconds:.1f} s{dropped}")
    for d in r.trained.model.card.donors if r.trained else ():
        screen.show(f"  and {d.samples} samples of {d.target}, which count {d.weight:.3g} each")
    screen.rows("ranking", map(record_of, r.trained.scores if r.trained else ()), RANKING_COLUMNS)
    screen.show(f"{'deployed' if r.verdict.deploy or force else 'not deployed'}: {r.verdict.why}")
    if r.path:
        screen.show(str(r.path))
    screen.record("train", {k: v for k, v in record_of(r).items() if k != "trained"})


def show_reviewed(r: Reviewed, screen: Screen) -> None:
    """What was found of a set of rows, and what came in of it."""
    if r.release:
        came_in = f"calibrated; {counted(r.release.new, 'row')} taken in, {r.release.known} were known"
        screen.show(f"{r.arrival.name}: {came_in}")
    else:
        screen.show(f"{r.arrival.name}: {counted(r.arrival.n_rows, 'row')} stay in quarantine: {r.verdict.why}")
    record = {"set": r.arrival.name, "source": r.arrival.standing.source, "calibrated": r.verdict.passed}
    screen.record("calibration", {**record, "rows": r.release.new if r.release else 0, "findings": r.verdict.findings})
